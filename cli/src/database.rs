//! The database of the environment, and how it is asked.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use std::{env, process, thread};

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool};
use diesel::sql_types::Text;
use diesel_interlock::{LockKey, PgPool};
use serde_json::Value;

use crate::{Failure, say, unreachable};

/// Who holds advisory locks, and who waits for them on the server. It needs no schema, and shows what a session does.
pub(crate) const LOCKS: &str = "
    SELECT CASE l.objsubid WHEN 1 THEN ((l.classid::bigint << 32) | l.objid::bigint)::text
            ELSE format('%s, %s', l.classid::bigint::bit(32)::integer, l.objid::bigint::bit(32)::integer) END AS lock,
        CASE WHEN l.granted THEN 'held' ELSE 'waits' END AS state,
        CASE l.mode WHEN 'ShareLock' THEN 'shared' ELSE 'exclusive' END AS mode,
        l.pid, a.application_name AS application, a.usename::text AS role, host(a.client_addr) AS client,
        a.backend_start AS session_since, a.state AS session, date_trunc('second', a.state_change) AS session_changed,
        CASE WHEN NOT l.granted THEN pg_blocking_pids(l.pid) END AS blocked_by
    FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a USING (pid)
    WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ORDER BY 1, l.granted DESC, l.pid";

/// `DATABASE_URL`, with a name for this program and a limit for connecting where it has none.
pub(crate) fn url(purpose: &str) -> Result<String, Failure> {
    let url = env::var("DATABASE_URL").unwrap_or_default();
    let mut url = url.trim().to_owned();
    if url.is_empty() {
        let message = "set the environment variable DATABASE_URL, such as postgres://app@db/app";
        return Err(Failure::new(Failure::SET_UP, message));
    }
    // PostgreSQL would cut it by itself, and say so each time.
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
        // A password may have the mark, too.
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
        ConnectionError::BadConnection(text) => bad_connection(text),
        error => Failure::new(Failure::UNAVAILABLE, unreachable(&error)),
    })
}

/// What libpq and the server say is all that tells a wrong set-up, in which waiting helps nobody, from a database that is away.
fn bad_connection(mut text: String) -> Failure {
    let is_refused = [
        "authentication failed",
        "does not exist",
        "no pg_hba.conf entry",
        "not permitted to log in",
        "permission denied for database",
    ];
    let is_away = [
        "connection to server",
        "could not connect",
        "could not translate host name",
    ];
    let is_one_of = |texts: &[&str]| texts.iter().any(|it| text.contains(it));
    let status = if is_one_of(&is_away) && !is_one_of(&is_refused) {
        Failure::UNAVAILABLE
    } else {
        Failure::SET_UP
    };
    if !is_one_of(&is_away) {
        // What it quotes of a URL that it cannot read may be the password.
        let pieces = text.split('"').enumerate();
        text = pieces
            .map(|(i, piece)| if i % 2 == 1 { "\"...\"" } else { piece })
            .collect();
    }
    Failure::new(status, unreachable(&text))
}

/// How long a database may take to reply: a pooler that is full accepts connections, and then says nothing.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);

/// Does some work, and ends the program with a reason if that takes longer.
pub(crate) fn in_time<T>(work: impl FnOnce() -> T) -> T {
    let (_done, is_done) = mpsc::channel::<()>();
    let _ = thread::Builder::new().spawn(move || {
        if is_done.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
            say!("{}", silent().message);
            process::exit(Failure::UNAVAILABLE);
        }
    });
    work()
}

pub(crate) fn silent() -> Failure {
    let message = "the database does not reply: is it, or a pooler before it, at the limit of its connections?";
    Failure::new(Failure::UNAVAILABLE, message)
}

/// Poolers in transaction mode before PgBouncer 1.21 know nothing of prepared statements, of which this program has no need.
#[derive(Debug)]
struct Unprepared;

impl<E> CustomizeConnection<PgConnection, E> for Unprepared {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), E> {
        conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        Ok(())
    }
}

/// A pool for a lock and its renewals, of a database that is there.
pub(crate) fn pool(url: &str) -> Result<PgPool, Failure> {
    // A pool tries again until its timeout where a connection says at once what is wrong.
    drop(connect(url)?);
    pool_that_waits(url)
}

/// The same, of a database that may be away for now.
pub(crate) fn pool_that_waits(url: &str) -> Result<PgPool, Failure> {
    Pool::builder()
        .max_size(3)
        .min_idle(Some(0))
        .connection_customizer(Box::new(Unprepared))
        .connection_timeout(Duration::from_secs(10))
        .build(ConnectionManager::new(url))
        .map_err(|error| Failure::new(Failure::UNAVAILABLE, unreachable(&error)))
}

#[derive(QueryableByName)]
struct Json {
    #[diesel(sql_type = Text)]
    rows: String,
}

/// The rows of a query, each an object whose members are in the order of the columns.
pub(crate) fn rows(conn: &mut PgConnection, query: &str) -> QueryResult<Vec<Value>> {
    rows_with(conn, query, "")
}

/// The same of a query with `$1`.
pub(crate) fn rows_with(
    conn: &mut PgConnection,
    query: &str,
    bind: &str,
) -> QueryResult<Vec<Value>> {
    let query = format!("SELECT COALESCE(json_agg(q), '[]')::text AS rows FROM ({query}) AS q");
    let json: Json = conn.transaction(|conn| {
        // Not for longer, because a pooler lends the session to others.
        conn.batch_execute("SET LOCAL statement_timeout = 0")?;
        if query.contains("$1") {
            let query = diesel::sql_query(query);
            query.bind::<Text, _>(bind).get_result(conn)
        } else {
            diesel::sql_query(query).get_result(conn)
        }
    })?;
    serde_json::from_str(&json.rows)
        .map_err(|error| diesel::result::Error::DeserializationError(error.into()))
}

pub(crate) fn has_schema(conn: &mut PgConnection) -> QueryResult<bool> {
    let schema = "SELECT 1 FROM pg_namespace WHERE nspname = 'resource_control'";
    Ok(!rows(conn, schema)?.is_empty())
}

/// The number of a lock as in [`LOCKS`]: of a name, or written as a number or a pair.
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
    fn a_password_is_not_said_and_a_wrong_set_up_is_told_from_an_absence() {
        let server = "connection to server at \"db\" (10.0.0.1), port 5432 failed: ";
        for (text, status) in [
            (
                "missing \"=\" after \"app:s3cret@db\" in connection info string",
                78,
            ),
            ("invalid percent-encoded token: \"s3cret%zz\"", 78),
            (&(server.to_owned() + "Connection refused"), 69),
            (
                &(server.to_owned() + "FATAL:  the database system is starting up"),
                69,
            ),
            (
                &(server.to_owned() + "FATAL:  password authentication failed for user \"app\""),
                78,
            ),
            ("could not translate host name \"db\" to address", 69),
        ] {
            let failure = bad_connection(text.to_owned());
            assert_eq!(failure.status, status, "{text}");
            assert!(!failure.message.contains("s3cret"), "{failure}");
        }
    }

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
