//! The connection to the database that the environment names, and the queries on it.
//!
//! **`ps` and `doctor` let the server write JSON**, so a new table needs nothing but a query.
//!
//! **The search path is set for each transaction of a query**, not once per connection, because a
//! pooler in transaction mode would pass the setting on to other clients. Only `run` without
//! `--lease` sets it for whole sessions, because `run` has just checked that there is no such
//! pooler. The alternative, `options` in the URL, is refused by PgBouncer unless it is listed in
//! <https://www.pgbouncer.org/config.html#ignore_startup_parameters>. A test fills `public` with
//! functions, operators, types and relations that have the names of all those of PostgreSQL.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use std::{env, process, thread};

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool, PooledConnection};
use diesel::sql_types::Text;
use diesel_interlock::{Error, LockKey, PgPool};
use serde_json::Value;

use crate::ps::plain;
use crate::{Failure, refusal, say, unreachable};

/// The sessions that hold advisory locks, and those that wait for them on the server, with what each
/// session is doing. The query needs no schema.
pub(crate) const LOCKS: &str = "
    SELECT CASE l.objsubid WHEN 1 THEN ((l.classid::bigint << 32) | l.objid::bigint)::text
            ELSE format('%s, %s', l.classid::bigint::bit(32)::integer, l.objid::bigint::bit(32)::integer) END AS lock,
        CASE WHEN l.granted THEN 'held' ELSE 'waits' END AS state,
        CASE l.mode WHEN 'ShareLock' THEN 'shared' ELSE 'exclusive' END AS mode,
        l.pid, COALESCE(a.application_name, 'prepared ' || x.gid) AS application, \
        a.usename::text AS role, host(a.client_addr) AS client,
        a.backend_start AS session_since, a.state AS session, date_trunc('second', a.state_change) AS session_changed,
        CASE WHEN NOT l.granted THEN pg_blocking_pids(l.pid) END AS blocked_by,
        date_part('epoch', clock_timestamp() - COALESCE(a.backend_start, x.prepared))::bigint AS \
        age, x.gid AS prepared
    FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a USING (pid)
        LEFT JOIN (
            SELECT t.virtualtransaction, p.gid, p.prepared FROM pg_locks AS t JOIN \
            pg_prepared_xacts AS p ON p.transaction = t.transactionid
                WHERE t.locktype = 'transactionid' AND t.pid IS NULL
        ) AS x ON l.pid IS NULL AND x.virtualtransaction = l.virtualtransaction
    WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ORDER BY 1, l.granted DESC, l.pid";

/// The variables of libpq that say which database to use, if there is no `DATABASE_URL`.
const VARIABLES: [&str; 6] = [
    "PGHOST",
    "PGHOSTADDR",
    "PGPORT",
    "PGDATABASE",
    "PGUSER",
    "PGSERVICE",
];

/// `DATABASE_URL`, or an empty URL if libpq's own variables are set. Adds an application name, and
/// a connect timeout if none is set.
pub(crate) fn url(purpose: &str) -> Result<String, Failure> {
    let url = env::var("DATABASE_URL").unwrap_or_default();
    let mut url = url.trim().to_owned();
    let is_set = |name: &&str| env::var_os(name).is_some_and(|value| !value.is_empty());
    if url.is_empty() && !VARIABLES.iter().any(is_set) {
        let message = "set the environment variable DATABASE_URL, for example to \
            postgres://app@db/app, or the variables of libpq, such as PGHOST or PGSERVICE";
        return Err(Failure::new(Failure::SET_UP, message));
    }
    // PostgreSQL would truncate a longer name by itself, and print a notice each time.
    let mut name = format!("interlock {purpose}");
    while name.len() > 63 {
        name.pop();
    }
    add(&mut url, "fallback_application_name", &name);
    if !url.contains("connect_timeout") && env::var_os("PGCONNECT_TIMEOUT").is_none() {
        add(&mut url, "connect_timeout", "10");
    }
    Ok(url)
}

/// Adds a parameter of libpq to a URL, or to keywords and values.
fn add(url: &mut String, name: &str, value: &str) {
    if let Some(rest) = ["postgres://", "postgresql://"]
        .iter()
        .find_map(|scheme| url.strip_prefix(scheme))
    {
        // A password may contain a question mark, too.
        let rest = match rest.find(['@', '/']) {
            Some(end) if rest[end..].starts_with('@') => &rest[end..],
            _ => rest,
        };
        let mark = match rest.split_once('?') {
            None => "?",
            Some((_, parameters)) if parameters.is_empty() || parameters.ends_with('&') => "",
            Some(_) => "&",
        };
        let value: String = value.bytes().map(|byte| format!("%{byte:02X}")).collect();
        *url += &format!("{mark}{name}={value}");
    } else {
        let value = value.replace('\\', r"\\").replace('\'', r"\'");
        *url += &format!(" {name}='{value}'");
    }
}

pub(crate) fn connect(url: &str) -> Result<PgConnection, Failure> {
    PgConnection::establish(url).map_err(|error| match error {
        ConnectionError::BadConnection(text) => refusal::failure(&text, url),
        error => Failure::new(Failure::UNAVAILABLE, unreachable(&error)),
    })
}

/// Whether the linked libpq was built with TLS. Without TLS, libpq refuses the parameter before it
/// looks for the server, which does not exist.
pub(crate) fn has_tls() -> bool {
    let nowhere = "host=/dev/null sslmode=require connect_timeout=2";
    match PgConnection::establish(nowhere) {
        Err(ConnectionError::BadConnection(text)) => !text.contains("not compiled in"),
        _ => true,
    }
}

/// How long a database may take to reply. A pooler whose server connections are all in use accepts
/// a client, and then sends nothing.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);

/// Runs `work`, and exits the program with a message if the work takes longer than [`SILENCE`].
pub(crate) fn in_time<T>(work: impl FnOnce() -> T) -> T {
    let (_done, is_done) = mpsc::channel::<()>(); // `_done` is dropped when the work has ended
    let _ = thread::Builder::new().spawn(move || {
        if is_done.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
            say!("{}", silent().message);
            process::exit(Failure::UNAVAILABLE);
        }
    });
    work()
}

pub(crate) fn silent() -> Failure {
    let message = "the database does not reply: is it, or a pooler in front of it, at the limit of \
        its connections, or does another session hold a lock on the row or table? See `interlock \
        doctor --transaction-age 10s`";
    Failure::new(Failure::UNAVAILABLE, message)
}

/// Switches prepared statements off: poolers in transaction mode before PgBouncer 1.21 do not
/// support them, and this program does not need them.
#[derive(Debug)]
struct Unprepared(Arc<AtomicBool>);

impl CustomizeConnection<PgConnection, diesel::r2d2::Error> for Unprepared {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), diesel::r2d2::Error> {
        conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        if self.0.load(Ordering::Relaxed) {
            own(conn).map_err(diesel::r2d2::Error::QueryError)?;
        }
        Ok(())
    }
}

/// Sets the search path for the whole session, for the statements of the library.
fn own(conn: &mut PgConnection) -> QueryResult<()> {
    conn.batch_execute("SET search_path = pg_catalog, pg_temp")
}

type Session = PooledConnection<ConnectionManager<PgConnection>>;

/// A pool. After [`make_own`](Self::make_own) its sessions have a trusted search path.
#[derive(Debug, Clone)]
pub(crate) struct Sessions {
    pub(crate) pool: PgPool,
    pub(crate) url: String,
    are_own: Arc<AtomicBool>,
}

impl Sessions {
    /// A session, or the reason why there is none within this time.
    pub(crate) fn get(&self, limit: Duration) -> Result<Session, Failure> {
        let session = self.pool.get_timeout(limit);
        session.map_err(|error| Failure::new(Failure::UNAVAILABLE, unreachable(&error)))
    }

    /// Sets a trusted search path in all sessions, present and future. Only for connections without
    /// a pooler in transaction mode, which would hand these sessions to other clients.
    pub(crate) fn make_own(&self) -> Result<(), Error> {
        self.are_own.store(true, Ordering::Relaxed);
        let mut idle = Vec::new();
        while let Some(mut conn) = self.pool.try_get() {
            own(&mut conn)?;
            idle.push(conn);
        }
        Ok(())
    }
}

/// A pool, after a first connection has succeeded.
pub(crate) fn pool(url: &str) -> Result<PgPool, Failure> {
    // r2d2 retries until its timeout, while a single connection returns the server's error at once.
    drop(connect(url)?);
    Ok(sessions(url)?.pool)
}

/// A pool of a database that may be unavailable at the moment.
pub(crate) fn sessions(url: &str) -> Result<Sessions, Failure> {
    let are_own = Arc::new(AtomicBool::new(false));
    let pool = Pool::builder()
        .max_size(3)
        .min_idle(Some(0))
        .connection_customizer(Box::new(Unprepared(Arc::clone(&are_own))))
        .connection_timeout(Duration::from_secs(10))
        .build(ConnectionManager::new(url))
        .map_err(|error| Failure::new(Failure::UNAVAILABLE, unreachable(&error)))?;
    let url = url.to_owned();
    Ok(Sessions { pool, url, are_own })
}

/// Settings of each transaction. The search path is set because another role may have created
/// functions in one of its schemas, and this program, perhaps as a superuser, must not call them.
/// `SET LOCAL`, because a pooler hands the session to other clients after the transaction. The last
/// ones are those by which the server prints definitions and times, in texts that are compared or
/// are to be pasted into another session.
const OWN: &str = "SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL statement_timeout = 0; \
    SET LOCAL idle_in_transaction_session_timeout = 0; SET LOCAL quote_all_identifiers = off; \
    SET LOCAL standard_conforming_strings = on; SET LOCAL extra_float_digits = 1; \
    SET LOCAL DateStyle = ISO; SET LOCAL IntervalStyle = postgres";

/// Set for queries, so that no function of another role that a query may call can write, for
/// example grant that role the rights of this one, and so that a table that is locked by another
/// session is told from a database that does not reply.
const READ_ONLY: &str = "SET LOCAL transaction_read_only = on; SET LOCAL lock_timeout = '5s'";

#[derive(QueryableByName)]
pub(crate) struct Json {
    #[diesel(sql_type = Text)]
    rows: String,
}

pub(crate) fn parsed(json: &Json) -> QueryResult<Value> {
    serde_json::from_str(&json.rows)
        .map_err(|error| diesel::result::Error::DeserializationError(error.into()))
}

/// The rows of a query, each an object whose members are in the order of the columns.
pub(crate) fn rows(conn: &mut PgConnection, query: &str) -> QueryResult<Vec<Value>> {
    rows_of(conn, query, None, true)
}

/// The rows of a query with `$1`.
pub(crate) fn rows_with(
    conn: &mut PgConnection,
    query: &str,
    bind: &str,
) -> QueryResult<Vec<Value>> {
    rows_of(conn, query, Some(bind), true)
}

/// The rows of a statement with `$1` that changes something.
pub(crate) fn changed(
    conn: &mut PgConnection,
    statement: &str,
    bind: &str,
) -> QueryResult<Vec<Value>> {
    rows_of(conn, statement, Some(bind), false)
}

fn rows_of(
    conn: &mut PgConnection,
    query: &str,
    bind: Option<&str>,
    is_read_only: bool,
) -> QueryResult<Vec<Value>> {
    let query =
        format!("WITH q AS ({query}) SELECT COALESCE(json_agg(q), '[]')::text AS rows FROM q");
    let settings = if is_read_only { READ_ONLY } else { "" };
    let json: Json = in_transaction(conn, settings, |conn| {
        let query = diesel::sql_query(query);
        match bind {
            Some(bind) => query.bind::<Text, _>(bind).get_result(conn),
            None => query.get_result(conn),
        }
    })?;
    match parsed(&json)? {
        Value::Array(rows) => Ok(rows),
        _ => Ok(Vec::new()),
    }
}

#[derive(QueryableByName)]
struct Planned {
    #[diesel(sql_type = Text, column_name = "QUERY PLAN")]
    line: String,
}

/// Returns the plan of a query, which is not run. Under row security, where the plan depends on the
/// role, this is an error.
pub(crate) fn plan(conn: &mut PgConnection, query: &str) -> QueryResult<Vec<String>> {
    let settings = format!("{READ_ONLY}; SET LOCAL row_security = off");
    let lines: Vec<Planned> = in_transaction(conn, &settings, |conn| {
        diesel::sql_query(format!("EXPLAIN (VERBOSE, COSTS OFF) {query}")).load(conn)
    })?;
    Ok(lines.into_iter().map(|it| it.line).collect())
}

/// Runs statements that return no rows.
pub(crate) fn execute(conn: &mut PgConnection, statements: &str) -> QueryResult<()> {
    in_transaction(conn, "", |conn| conn.batch_execute(statements))
}

/// Runs `work` in a transaction. BEGIN and the settings are one message, because with Diesel's own
/// transaction a timeout of the role could end it before the settings arrive.
fn in_transaction<T>(
    conn: &mut PgConnection,
    settings: &str,
    work: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    let begun = conn.batch_execute(&format!("BEGIN; {OWN}; {settings}"));
    match begun.and_then(|()| work(conn)) {
        Ok(done) => conn.batch_execute("COMMIT").map(|()| done),
        Err(error) => {
            // If the session has ended, the error says why, and this would not.
            let _ = conn.batch_execute("ROLLBACK");
            Err(error)
        }
    }
}

/// The rights of each role beyond the objects that it owns. A role counts as having the rights of
/// every role that it is a member of, because a function may `SET ROLE`. For the same reason the
/// rights of this program are those of `session_user`: the owner of a database may give it another
/// `current_user` (`ALTER DATABASE … SET role`), and a function may reset that. `pg_monitor` and
/// `pg_signal_backend` are left out, because roles that only observe have them.
const POWERS: &str = "
    SELECT a.power, r.oid AS role FROM pg_roles AS r, LATERAL (VALUES
        ('SUPERUSER', r.rolsuper), ('CREATEROLE', r.rolcreaterole), ('REPLICATION', r.rolreplication),
        ('BYPASSRLS', r.rolbypassrls),
        (r.rolname::text, r.rolname = ANY ('{pg_execute_server_program,pg_read_server_files,
            pg_write_server_files,pg_read_all_data,pg_write_all_data,pg_maintain,
            pg_create_subscription,pg_database_owner,rds_superuser,cloudsqlsuperuser,
            alloydbsuperuser,azure_pg_admin,neon_superuser}'))
    ) AS a (power, is_had) WHERE a.is_had";

/// The schema `resource_control`, as this role may use it. This is determined before anything in
/// the schema is read, called or written.
#[derive(Debug)]
pub(crate) enum Schema {
    Absent,
    /// `what`, the schema or something in it, belongs to the role `owner`, which lacks a right of
    /// this role. Its functions would be called with that right.
    Foreign {
        what: String,
        owner: String,
        power: String,
    },
    /// This role has no right to use the schema. Locks do not need the schema.
    Closed,
    /// This role may read the views and write nothing, as `grants.sql --set=reads=1` grants.
    Readable,
    Usable,
}

impl Schema {
    pub(crate) fn of(conn: &mut PgConnection) -> QueryResult<Self> {
        let schema = format!(
            "
            WITH powers AS MATERIALIZED ({POWERS}),
            strangers AS (
                SELECT o.what, r.rolname AS owner, m.power
                    FROM (
                        SELECT n.nspowner, 'the schema resource_control' FROM pg_namespace AS n
                            WHERE n.nspname = 'resource_control'
                        UNION SELECT c.relowner, format('resource_control.%I', c.relname)
                            FROM pg_class AS c
                            WHERE c.relnamespace = to_regnamespace('resource_control')::oid
                        UNION SELECT p.proowner, format('the function resource_control.%I', p.proname)
                            FROM pg_proc AS p
                            WHERE p.pronamespace = to_regnamespace('resource_control')::oid
                        UNION SELECT t.typowner, format('the type resource_control.%I', t.typname)
                            FROM pg_type AS t
                            WHERE t.typnamespace = to_regnamespace('resource_control')::oid
                        UNION SELECT p.proowner, format('the function of the trigger %I on '
                                'resource_control.%I', t.tgname, c.relname)
                            FROM pg_trigger AS t
                            JOIN pg_class AS c ON c.oid = t.tgrelid
                            JOIN pg_proc AS p ON p.oid = t.tgfoid
                            WHERE c.relnamespace = to_regnamespace('resource_control')::oid
                    ) AS o (owner, what) JOIN pg_roles AS r ON r.oid = o.owner
                    JOIN powers AS m ON pg_has_role(session_user, m.role, 'MEMBER')
                    WHERE NOT EXISTS (SELECT FROM powers AS t
                        WHERE t.power = m.power AND pg_has_role(r.oid, t.role, 'MEMBER'))
                    ORDER BY o.what <> 'the schema resource_control', m.power <> 'SUPERUSER',
                        r.rolname, o.what, m.power LIMIT 1
            )
            SELECT has_schema_privilege(n.oid, 'USAGE') AS is_open,
                (SELECT bool_or(has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE'))
                    FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relkind = 'r')
                    AS is_writable,
                (SELECT bool_or(has_table_privilege(c.oid, 'SELECT'))
                    FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relkind = 'v')
                    AS is_readable,
                (SELECT s.what FROM strangers AS s) AS what,
                (SELECT s.owner FROM strangers AS s) AS stranger,
                (SELECT s.power FROM strangers AS s) AS power
            FROM pg_namespace AS n WHERE n.nspname = 'resource_control'"
        );
        let rows = rows(conn, &schema)?;
        let text = |row: &Value, member: &str| plain(row[member].as_str().unwrap_or_default());
        Ok(match rows.first() {
            None => Self::Absent,
            Some(it) if it["stranger"].is_string() => Self::Foreign {
                what: text(it, "what"),
                owner: text(it, "stranger"),
                power: text(it, "power"),
            },
            Some(it) if it["is_open"] != true => Self::Closed,
            Some(it) if it["is_writable"] != true && it["is_readable"] == true => Self::Readable,
            Some(_) => Self::Usable,
        })
    }

    /// Creates the empty schema if this role has rights that other roles may lack, so that none of
    /// them can create it first, and own it. Does nothing where the migrations would refuse to
    /// install.
    pub(crate) fn claim(conn: &mut PgConnection) -> QueryResult<()> {
        execute(
            conn,
            &format!(
                "DO $$ BEGIN
                    IF EXISTS (SELECT FROM ({POWERS}) AS p WHERE pg_has_role(session_user, p.role, 'MEMBER'))
                        AND current_setting('server_version_num')::int >= 140000
                        AND getdatabaseencoding() = 'UTF8' AND NOT pg_is_in_recovery()
                    THEN
                        CREATE SCHEMA resource_control;
                    END IF;
                END $$"
            ),
        )
    }

    /// Why not even the views of the schema are read, if so.
    pub(crate) fn why_unread(&self) -> Option<String> {
        match self {
            Self::Absent => Some("the schema resource_control is not installed".to_owned()),
            Self::Foreign { what, owner, power } => {
                // Somebody who may not own the schema may have put something into it.
                let remove = match what.as_str() {
                    "the schema resource_control" => "",
                    _ => "drop it if it is not meant to be there, or ",
                };
                Some(format!(
                    "{what} belongs to the role {owner}, whose functions would run with the rights \
                        of this role, which has {power}: {remove}connect as {owner} instead"
                ))
            }
            Self::Closed => Some("this role may not use the schema resource_control".to_owned()),
            Self::Readable | Self::Usable => None,
        }
    }

    /// An error if the schema is absent or foreign. A missing right is left to PostgreSQL's own
    /// message.
    pub(crate) fn require(&self) -> Result<(), Failure> {
        match (self, self.why_unread()) {
            (Self::Absent, _) => Err(Error::NotInstalled.into()),
            (Self::Foreign { .. }, Some(why)) => Err(Failure::new(Failure::SET_UP, why)),
            _ => Ok(()),
        }
    }
}

/// The number of a lock as [`LOCKS`] shows it. `name` is the lock's name or, if `is_number`, its
/// number or pair.
pub(crate) fn lock(name: &str, is_number: bool) -> Result<String, Failure> {
    if !is_number {
        return Ok(LockKey::from(name.to_owned()).id()?.to_string());
    }
    let numbers: Result<Vec<i64>, _> = name.split(',').map(|part| part.trim().parse()).collect();
    let id = match numbers.as_deref() {
        Ok(&[number]) => Some(LockKey::from(number)),
        Ok(&[first, second]) => i32::try_from(first)
            .ok()
            .zip(i32::try_from(second).ok())
            .map(LockKey::from),
        _ => None,
    };
    let message = "the number of a lock is like 42, or a pair like 7,12";
    let id = id.ok_or_else(|| Failure::new(Failure::INPUT, message))?;
    Ok(id.id()?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_is_added_where_libpq_finds_it() {
        for (url, expected) in [
            ("postgres://app@db/app", "postgres://app@db/app?a=%62"),
            ("postgres://app:?@db/app", "postgres://app:?@db/app?a=%62"),
            ("postgres:///app?", "postgres:///app?a=%62"),
            ("postgresql:///app?x=y", "postgresql:///app?x=y&a=%62"),
            ("postgresql:///?x=@&", "postgresql:///?x=@&a=%62"),
            ("postgresql://?host=db", "postgresql://?host=db&a=%62"),
            ("host=db", "host=db a='b'"),
        ] {
            let mut url = url.to_owned();
            add(&mut url, "a", "b");
            assert_eq!(url, expected);
        }
    }
}
