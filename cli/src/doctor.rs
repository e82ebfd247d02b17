//! `interlock doctor`: what is wrong with a set-up, and what to do. It changes nothing.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use diesel_interlock::{Error, check_exclusion, migrations};

use crate::database::{self, in_time};
use crate::{Failure, duration, ps};

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// How long a transaction may be open
    #[arg(long, value_parser = duration, value_name = "DURATION", default_value = "10m")]
    transaction_age: Duration,
    /// For how long the holder of a lock may do nothing in its session, and a slot be in use
    #[arg(long, value_parser = duration, value_name = "DURATION", default_value = "1h")]
    holder_age: Duration,
}

/// Each returns lines: `ok`, `warn` or `fail`, what was found, and what to do. No line is nothing to say. `:transaction_age` and
/// `:holder_age` stand for intervals.
const SERVER: &[&str] = &[
    "SELECT CASE WHEN current_setting('server_version_num')::int >= 140000 THEN 'ok' ELSE 'fail' END AS level,
        'PostgreSQL ' || current_setting('server_version') AS found, 'upgrade to PostgreSQL 14 or later' AS remedy",
    "SELECT CASE WHEN pg_is_in_recovery() THEN 'fail' ELSE 'ok' END AS level,
        CASE WHEN pg_is_in_recovery() THEN 'the server is a standby, whose locks exclude nobody on the primary'
            ELSE 'the server is a primary' END AS found,
        'connect to the primary, which target_session_attrs=read-write finds' AS remedy",
    "SELECT CASE WHEN getdatabaseencoding() = 'UTF8' THEN 'ok' ELSE 'fail' END AS level,
        'the encoding of the database is ' || getdatabaseencoding() AS found,
        'create a database with ENCODING UTF8, which names and keys need' AS remedy",
    "SELECT 'warn' AS level, 'this role may not create the schema' AS found,
        format('run `interlock install` as the owner of the database, or GRANT CREATE ON DATABASE %I TO %I', current_database(),
            current_user) AS remedy
        WHERE to_regnamespace('resource_control') IS NULL AND NOT has_database_privilege(current_database(), 'CREATE')",
    // A lock of a host that has vanished stays held for as long as the server believes in its connection.
    "SELECT CASE WHEN inet_client_addr() IS NULL OR seconds < 600 THEN 'ok' ELSE 'warn' END AS level,
        CASE WHEN inet_client_addr() IS NULL THEN 'connected by a socket of this machine, whose end the server sees'
            ELSE format('a host that vanishes keeps its locks for about %s s', seconds) END AS found,
        'set tcp_keepalives_idle = 30, tcp_keepalives_interval = 10 and tcp_keepalives_count = 3 on the server' AS remedy
        FROM (SELECT current_setting('tcp_keepalives_idle')::interval, current_setting('tcp_keepalives_interval')::interval,
                    current_setting('tcp_keepalives_count')::int) AS s (idle, pause, count),
            LATERAL (SELECT extract(epoch FROM idle + pause * count)::int) AS k (seconds)",
    "SELECT CASE WHEN current_setting('default_transaction_read_only')::bool THEN 'fail' ELSE 'ok' END AS level,
        CASE WHEN current_setting('default_transaction_read_only')::bool
            THEN 'default_transaction_read_only = on: nothing can be written here, and session locks are granted nevertheless'
            ELSE 'default_transaction_read_only = off' END AS found,
        format('if this is an old primary, stop it, because a lock that it grants excludes nobody on the new one; otherwise: BEGIN READ WRITE; ALTER ROLE %I IN DATABASE %I SET default_transaction_read_only = off; COMMIT',
            current_user, current_database()) AS remedy",
    "SELECT CASE WHEN reset_val = '0' THEN 'ok' ELSE 'warn' END AS level, format('%s = %s', name, reset_val || unit) AS found,
        format('it ends %s: ALTER ROLE %I IN DATABASE %I SET %s = 0',
            CASE WHEN name LIKE 'idle%' THEN 'a session that holds a lock and is idle'
            WHEN name LIKE 'tr%' THEN 'a session whose transaction takes longer, and frees its locks'
            ELSE 'waits and statements that nothing is wrong with' END, current_user, current_database(), name) AS remedy
        FROM pg_settings WHERE name = 'idle_session_timeout' OR name = 'transaction_timeout' AND reset_val <> '0'
            OR name IN ('statement_timeout', 'lock_timeout') AND reset_val::bigint BETWEEN 1 AND 999",
    "SELECT CASE setting WHEN '0' THEN 'warn' ELSE 'ok' END AS level, format('%s = %s', name, setting || unit) AS found,
        format(CASE name WHEN 'client_connection_check_interval'
            THEN 'a statement of a client that has gone runs to its end: ALTER ROLE %I IN DATABASE %I SET %s = ''10s'''
            ELSE 'a transaction that was forgotten keeps its locks: ALTER ROLE %I IN DATABASE %I SET %s = ''5min''' END,
            current_user, current_database(), name) AS remedy
        FROM pg_settings WHERE name IN ('client_connection_check_interval', 'idle_in_transaction_session_timeout')",
    "SELECT 'warn' AS level, format('synchronous_commit = %s for this role and database: a crash of the server may forget the last commits',
            setting) AS found,
        format('ALTER ROLE %I IN DATABASE %I SET synchronous_commit = on', current_user, current_database()) AS remedy
        FROM pg_settings WHERE name = 'synchronous_commit' AND setting IN ('off', 'local')",
    // The state is null for a role that may not see it.
    "SELECT CASE WHEN is_synchronous THEN 'ok' ELSE 'warn' END AS level,
        CASE WHEN is_synchronous THEN format('%s standbys, of which one at least is synchronous', standbys)
            ELSE format('%s standbys, and none is synchronous: a failover loses the last commits, and with them permits and ticks', standbys)
            END AS found,
        'set synchronous_standby_names, for example to ''ANY 1 (*)'', or accept what the page on failover says' AS remedy
        FROM (SELECT count(*) AS standbys, bool_or(sync_state IN ('sync', 'quorum')) AS is_synchronous
            FROM pg_stat_replication WHERE state = 'streaming' AND sync_state IS NOT NULL) AS r WHERE standbys > 0",
    "SELECT CASE WHEN used < room * 0.8 THEN 'ok' ELSE 'warn' END AS level,
        format('%s of %s connections are used', used, room) AS found,
        'use smaller pools, a pooler, or a larger max_connections' AS remedy
        FROM (SELECT (SELECT count(*) FROM pg_stat_activity WHERE datid IS NOT NULL) AS used,
            current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
                - COALESCE(current_setting('reserved_connections', true)::int, 0) AS room) AS c",
    "SELECT CASE WHEN used < room / 2 THEN 'ok' ELSE 'warn' END AS level,
        format('%s of about %s places in the table of locks are used', used, room) AS found,
        'raise max_locks_per_transaction, or hold fewer locks: if it is full, nobody can connect' AS remedy
        FROM (SELECT (SELECT count(*) FROM pg_locks WHERE NOT fastpath) AS used, current_setting('max_locks_per_transaction')::bigint
            * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) AS room) AS t",
    "SELECT CASE WHEN pg_has_role('pg_read_all_stats', 'USAGE') THEN 'ok' ELSE 'warn' END AS level,
        CASE WHEN pg_has_role('pg_read_all_stats', 'USAGE') THEN 'this role sees the sessions of all roles'
            ELSE 'this role does not see what the sessions of other roles do, so old ones may be missing below' END AS found,
        format('GRANT pg_read_all_stats TO %I', current_user) AS remedy",
    "SELECT 'warn' AS level, format('a transaction is open since %s in session %s (%s, %s, %s)',
            date_trunc('second', xact_start), pid, usename, application_name, state) AS found,
        format('no dead row since then can be removed, and semaphores get slow; end it if it is not needed: '
            'SELECT pg_terminate_backend(%s)', pid) AS remedy
        FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = current_database() AND pid <> pg_backend_pid()
            AND xact_start < clock_timestamp() - :transaction_age",
    "SELECT 'warn' AS level, format('a prepared transaction is open since %s', date_trunc('second', prepared)) AS found,
        format('COMMIT PREPARED or ROLLBACK PREPARED %L', gid) AS remedy
        FROM pg_prepared_xacts WHERE database = current_database() AND prepared < clock_timestamp() - :transaction_age",
];

/// What needs the schema, and what this role may do there.
const SCHEMA: &[&str] = &[
    "SELECT 'warn' AS level, format('request %s has slot %s of %s since %s (%s)', id, slot, service, date_trunc('second', created_at),
            details) AS found,
        format('if it is stuck: interlock kill --slot %s -- ''%s''', id,
            replace(service, chr(39), chr(39) || chr(92) || chr(39) || chr(39))) AS remedy
        FROM resource_control.slot_in_flight WHERE created_at < clock_timestamp() - :holder_age AND NOT starts_with(service, 'leader ')",
    "SELECT 'warn' AS level, format('%s has %s rows, and nothing prunes it by itself', c.relname, c.reltuples) AS found,
        'call prune of the semaphore, throttle or rate limit from time to time' AS remedy
        FROM pg_class AS c WHERE c.relnamespace = 'resource_control'::regnamespace AND c.relkind = 'r' AND c.reltuples > 1000000",
    "SELECT 'fail' AS level, 'the ids of requests, which are fencing tokens, would repeat: their sequence was not copied' AS found,
        format('SELECT setval(%L, %s)', sequence, largest) AS remedy
        FROM (SELECT pg_get_serial_sequence('resource_control.service_request', 'id') AS sequence,
            (SELECT max(id) FROM resource_control.service_request) AS largest) AS s
        WHERE CASE WHEN has_sequence_privilege(sequence, 'USAGE, SELECT')
            THEN largest > COALESCE(pg_sequence_last_value(sequence::regclass), 0) END",
    // A fence keeps what has passed it, from either sequence.
    "SELECT 'fail' AS level, 'a fence refuses all new tokens, because their sequence was not copied' AS found,
        format('SELECT setval(%L, %s)', sequence, largest) AS remedy
        FROM (SELECT 'resource_control.fencing_token' AS sequence, (SELECT max(token) FROM resource_control.fence) AS largest,
            pg_get_serial_sequence('resource_control.service_request', 'id') AS ids) AS s
        WHERE CASE WHEN has_sequence_privilege(sequence, 'USAGE, SELECT') AND has_sequence_privilege(ids, 'USAGE, SELECT')
            THEN largest > GREATEST(pg_sequence_last_value(sequence::regclass), pg_sequence_last_value(ids::regclass), 0) END",
    // A clock that was ahead, of a former primary or before it was set back.
    "SELECT 'warn' AS level, format('the schedule %s has a tick of the future, %s, before which nothing runs', name, tick) AS found,
        format('UPDATE resource_control.schedule SET tick = clock_timestamp() WHERE name = %L', name) AS remedy
        FROM resource_control.schedule WHERE tick > clock_timestamp() + interval '10 seconds'",
    "SELECT 'warn' AS level, format('request %s of %s was made in the future, at %s, and expires at %s', id, service, created_at, expires_at)
            AS found,
        format('if nobody holds it: SELECT resource_control.complete_service_request(%L, %s)', service, id) AS remedy
        FROM resource_control.slot_in_flight WHERE created_at > clock_timestamp() + interval '10 seconds'",
    "SELECT 'fail' AS level, format('%s has no primary key, because that was not copied', c.oid::regclass) AS found,
        'add the one that up.sql has for it: ALTER TABLE ... ADD PRIMARY KEY' AS remedy
        FROM pg_class AS c WHERE c.relnamespace = 'resource_control'::regnamespace AND c.relkind = 'r'
            AND NOT EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid)",
    "SELECT 'fail' AS level, 'resource_control.service_request.id is no identity, because that was not copied' AS found,
        'ALTER TABLE resource_control.service_request ALTER id SET NOT NULL, ALTER id ADD GENERATED ALWAYS AS IDENTITY; then run doctor'
            AS remedy
        FROM pg_attribute WHERE attrelid = 'resource_control.service_request'::regclass AND attname = 'id' AND attidentity = ''",
];

const GRANTS: &str = "
    SELECT 'fail' AS level, format('the role %s may not use all of the schema resource_control', current_user) AS found,
        string_agg(format('GRANT %s TO %I', missing, current_user), '; ') AS remedy
    FROM (
        SELECT 'USAGE ON SCHEMA resource_control' AS missing
            FROM pg_namespace AS n WHERE n.nspname = 'resource_control' AND NOT has_schema_privilege(n.oid, 'USAGE')
        UNION ALL SELECT format('%s ON resource_control.%I', string_agg(p, ', '), c.relname)
            FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace,
                unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p
            WHERE n.nspname = 'resource_control' AND c.relkind IN ('r', 'v') AND NOT has_table_privilege(c.oid, p)
                AND (p = 'SELECT' OR c.relkind = 'r' AND c.relname NOT IN ('installed_migration', 'token_base')) GROUP BY c.relname
        UNION ALL SELECT format('USAGE, UPDATE ON SEQUENCE resource_control.%I', c.relname)
            FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
            WHERE n.nspname = 'resource_control' AND CASE c.relkind WHEN 'S' THEN NOT (has_sequence_privilege(c.oid, 'USAGE') AND has_sequence_privilege(c.oid, 'UPDATE')) END
        UNION ALL SELECT format('EXECUTE ON FUNCTION %s', p.oid::regprocedure)
            FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
            WHERE n.nspname = 'resource_control' AND NOT has_function_privilege(p.oid, 'EXECUTE')
    ) AS m HAVING count(*) > 0";

impl Doctor {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        let url = database::url("doctor")?;
        let lines = in_time(|| self.lines(&url))?;
        io::stdout().write_all(lines.text.as_bytes())?;
        Ok(lines.has_failed.into())
    }

    fn lines(&self, url: &str) -> Result<Lines, Failure> {
        let pool = database::pool(url)?;
        let mut lines = Lines::default();
        lines.of("the exclusion by session locks", check_exclusion(&pool));
        let holders = format!(
            "SELECT 'warn' AS level, format('session %s (%s, %s) holds the lock %s, and is %s since %s', pid, role, application, lock,
                    session, since) AS found,
                format('if it is stuck: interlock kill --number -- ''%s''', lock) AS remedy
                FROM (SELECT *, CASE WHEN application LIKE 'interlock %' THEN session_since ELSE session_changed END AS since
                    FROM ({}) AS l) AS l
                WHERE state = 'held' AND since < clock_timestamp() - :holder_age",
            database::LOCKS
        );
        let mut all: Vec<_> = SERVER.to_vec();
        all.extend([holders.as_str(), GRANTS]);
        let whole = migrations::check(&pool);
        let conn = &mut pool.get().map_err(|error| Error::Pool(error.into()))?;
        if whole.is_ok() {
            all.extend(SCHEMA);
        }
        lines.of("the schema resource_control", whole);
        for query in all {
            let age = |age: Duration| format!("interval '{} milliseconds'", age.as_millis());
            let query = query.replace(":transaction_age", &age(self.transaction_age));
            let query = query.replace(":holder_age", &age(self.holder_age));
            match database::rows(conn, &query) {
                Ok(rows) => {
                    for row in rows {
                        let text = |member: &str| row[member].as_str().unwrap_or_default();
                        lines.add(text("level"), text("found"), text("remedy"));
                    }
                }
                Err(error) => {
                    let error = Error::from(error);
                    let is_over = error.is_unavailable();
                    lines.of("a question has failed", Err(error));
                    if is_over {
                        break;
                    }
                }
            }
        }
        Ok(lines)
    }
}

#[derive(Debug, Default)]
struct Lines {
    text: String,
    has_failed: bool,
}

impl Lines {
    fn add(&mut self, level: &str, found: &str, remedy: &str) {
        self.has_failed |= level == "fail";
        self.text += &format!("{level:4}  {}\n", ps::plain(found));
        if level != "ok" {
            self.text += &format!("      {}\n", ps::plain(remedy));
        }
    }

    /// The errors of the library say what to do.
    fn of(&mut self, what: &str, checked: Result<(), Error>) {
        match checked {
            Ok(()) => self.add("ok", what, ""),
            Err(error) => {
                let message = Failure::from(error).message;
                let (found, remedy) = message.split_once(": ").unwrap_or((what, &message));
                self.add("fail", found, remedy);
            }
        }
    }
}
