//! The questions that `doctor` asks the database. Each is a query of findings: `level` (`ok`,
//! `warn` or `fail`), `found`, and the remedy of those that are not `ok`: `why` in words, `sql` as
//! statements for psql, `shell` as a command, `settings` as settings with the values that they
//! should have. No row means that there is nothing to report. Of several rows with the same `pid`
//! only the first is reported. `:transaction_age` and `:holder_age` stand for intervals, `:locks`
//! for the query of all locks, `:own` for the names of what the migrations create, because others
//! may have put more into the schema.
//!
//! The table in `docs/doctor.md` has a row for each question.

pub(crate) const SERVER: &[&str] = &[
    "SELECT CASE WHEN current_setting('server_version_num')::int >= 140000 THEN 'ok' ELSE 'fail'
        END AS level,
        'PostgreSQL ' || current_setting('server_version') AS found,
            'upgrade to PostgreSQL 14 or later' AS why",
    "SELECT CASE WHEN pg_is_in_recovery() THEN 'fail' ELSE 'ok' END AS level,
        CASE WHEN pg_is_in_recovery() THEN 'the server is a standby: its locks exclude nobody on '
            'the primary, and nothing can be written'
            ELSE 'the server is a primary' END AS found,
        'connect to the primary: name all hosts in DATABASE_URL, and add '
            'target_session_attrs=read-write' AS why",
    "SELECT CASE WHEN getdatabaseencoding() = 'UTF8' THEN 'ok' ELSE 'fail' END AS level,
        'the encoding of the database is ' || getdatabaseencoding() AS found,
        'names and keys need UTF8: dump the database, and restore it into a new one' AS why,
        format('CREATE DATABASE %I ENCODING ''UTF8'' TEMPLATE template0;', current_database() ||
            '_utf8') AS sql",
    // This is what the server sees: behind a pooler, it is the pooler's connection.
    "SELECT CASE WHEN s.ssl OR c.is_here THEN 'ok' ELSE 'warn' END AS level,
        CASE WHEN s.ssl THEN format('the connection is encrypted (%s)', s.version)
            WHEN c.address IS NULL THEN 'the connection is a socket on the server''s machine, '
                'and not encrypted'
            WHEN c.is_here THEN 'the connection is not encrypted, and does not leave the '
                'server''s machine'
            ELSE format('the connection from %s is not encrypted', host(c.address)) END AS found,
        'with sslmode=prefer, which is the default, a connection is not encrypted if the server '
            'has no TLS: set ssl = on there, and '
            'add sslmode=verify-full or require to DATABASE_URL' AS why
        FROM pg_stat_ssl AS s,
            LATERAL (SELECT inet_client_addr() AS address, COALESCE(inet_client_addr() <<=
                '127.0.0.0/8'
                OR inet_client_addr() = '::1' OR inet_client_addr() = inet_server_addr(), true)
                    AS is_here) AS c
        WHERE s.pid = pg_backend_pid()",
    // If a client's host vanishes, its locks stay held until the server's keepalives find the
    // connection dead.
    "SELECT CASE WHEN is_here OR seconds < 600 THEN 'ok' ELSE 'warn' END AS level,
        CASE WHEN is_here THEN 'the server sees at once when a client on its machine has gone'
            ELSE format('a host that vanishes keeps its locks for about %s s', seconds) END AS
                found,
        'let the server check sooner whether a client is still there, on new connections' AS why,
        json_build_object('tcp_keepalives_idle', '30', 'tcp_keepalives_interval', '10',
            'tcp_keepalives_count', '3') AS settings
        FROM (SELECT current_setting('tcp_keepalives_idle')::interval,
            current_setting('tcp_keepalives_interval')::interval,
                    current_setting('tcp_keepalives_count')::int) AS s (idle, pause, count),
            LATERAL (SELECT extract(epoch FROM idle + pause * count)::int) AS k (seconds),
            LATERAL (SELECT COALESCE(inet_client_addr() <<= '127.0.0.0/8' OR inet_client_addr()
                = '::1'
                OR inet_client_addr() = inet_server_addr(), true) AS is_here) AS c",
    "SELECT CASE WHEN current_setting('default_transaction_read_only')::bool THEN 'fail' ELSE
        'ok' END AS level,
        CASE WHEN current_setting('default_transaction_read_only')::bool
            THEN 'default_transaction_read_only = on: nothing can be written here, and locks are '
                'refused'
            ELSE 'default_transaction_read_only = off' END AS found,
        'if this is an old primary, stop it, because locks that are held there exclude nobody on '
            'the new one; otherwise' AS why,
        json_build_object('default_transaction_read_only', 'off') AS settings",
    "SELECT 'warn' AS level, format('%s = %s', name, reset_val || unit) AS found,
        format('it ends %s', CASE name WHEN 'idle_session_timeout' THEN
            'a session that holds a lock and is idle'
            WHEN 'transaction_timeout' THEN 'a session whose transaction takes longer, and so '
                'frees its locks'
            WHEN 'idle_in_transaction_session_timeout' THEN 'a transaction between two of its '
                'statements, if the network or the program is slow'
            ELSE 'waits and statements although nothing is wrong with them' END) AS why,
        json_build_object(name, CASE name WHEN 'idle_in_transaction_session_timeout' THEN '5min'
            ELSE '0' END) AS settings
        FROM pg_settings WHERE name IN ('idle_session_timeout', 'transaction_timeout') AND
            reset_val <> '0'
            OR name IN ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout')
                AND reset_val::bigint BETWEEN 1 AND 999",
    // PostgreSQL's defaults are no mistake: where client_connection_check_interval is 0, a lock
    // sets it for its own session. The value now is that of this transaction, not of the role.
    "SELECT CASE WHEN is_slow THEN 'warn' ELSE 'ok' END AS level,
        format('%s = %s%s', name, reset_val || unit,
            CASE WHEN name LIKE 'client%' AND reset_val = '0'
                THEN ', and a lock sets it to a second for its session' END) AS found,
        'the locks of a process that dies in the middle of a statement stay held for that long'
            AS why,
        json_build_object(name, '1s') AS settings
        FROM (SELECT name, reset_val, unit,
                name LIKE 'client%' AND reset_val::bigint >= 60000 AS is_slow
            FROM pg_settings WHERE name IN ('client_connection_check_interval',
                'idle_in_transaction_session_timeout')) AS s",
    "SELECT 'warn' AS level, format('deadlock_timeout = %sms', setting) AS found,
        'a waiter asks the server in slices of 200 ms: each of these then searches for deadlocks, '
            'and CREATE INDEX CONCURRENTLY may be cancelled' AS why,
        json_build_object(name, '1s') AS settings
        FROM pg_settings WHERE name = 'deadlock_timeout' AND setting::bigint <= 200",
    "SELECT 'warn' AS level, format('synchronous_commit = %s for this role and database',
        setting) AS found,
        'a crash of the server may forget the last commits' AS why,
        json_build_object(name, 'on') AS settings
        FROM pg_settings WHERE name = 'synchronous_commit' AND setting IN ('off', 'local')",
    "SELECT 'fail' AS level, format('search_path = %s: what others create there is used instead of '
            'what PostgreSQL has', reset_val) AS found,
        'leave pg_catalog out, so that it comes first' AS why,
        json_build_object('search_path', array_to_string(array_remove(path, 'pg_catalog'), ', '))
            AS settings
        FROM (SELECT reset_val, ARRAY (SELECT btrim(p.name) FROM
                unnest(string_to_array(reset_val, ',')) AS p (name)) AS path
            FROM pg_settings WHERE name = 'search_path') AS s
        WHERE array_position(path, 'pg_catalog') > 1",
    // Every role sees the rows of the WAL senders, but the state is null for a role without
    // pg_read_all_stats. Senders of logical replication are no standbys.
    "SELECT CASE WHEN present < needed THEN 'fail' WHEN needed = 0 THEN 'warn' ELSE 'ok' END
            AS level,
        CASE WHEN present < needed THEN format('synchronous_standby_names = %L needs %s, and %s '
                'such are connected: every commit waits', setting, needed, present)
            WHEN needed = 0 THEN format('%s standbys, and none is synchronous: a failover loses '
                'the last commits, and with them permits and ticks', connected)
            ELSE format('%s standbys, and a commit waits for %s of them', connected, needed)
            END AS found,
        CASE WHEN present < needed THEN 'start the standbys that are named there, or do without'
            ELSE 'accept the losses that the page on failover names, or let commits wait for a '
                'standby; if there is only one, its loss then stops all writes' END AS why,
        CASE WHEN present < needed
            THEN 'ALTER SYSTEM SET synchronous_standby_names = ''''; SELECT pg_reload_conf();'
            ELSE 'ALTER SYSTEM SET synchronous_standby_names = ''ANY 1 (*)''; '
                'SELECT pg_reload_conf();' END AS sql
        FROM (SELECT setting, CASE WHEN setting = '' THEN 0 ELSE COALESCE((regexp_match(setting,
                    '^[[:space:]]*(?:first|any)?[[:space:]]*([0-9]+)[[:space:]]*[(]', 'i'))[1]::int,
                    1) END AS needed
                FROM (SELECT current_setting('synchronous_standby_names') AS setting) AS c) AS s,
            (SELECT count(*)::int AS connected, count(*) FILTER (WHERE r.state IS NULL OR
                    r.sync_state IN ('sync', 'quorum'))::int AS present
                FROM pg_stat_replication AS r
                WHERE (r.state IS NULL OR r.state = 'streaming') AND NOT EXISTS (
                    SELECT FROM pg_replication_slots AS l
                        WHERE l.active_pid = r.pid AND l.slot_type = 'logical')) AS r
        WHERE NOT pg_is_in_recovery() AND (needed > 0 OR connected > 0)",
    "SELECT CASE WHEN used < room * 0.8 THEN 'ok' ELSE 'warn' END AS level,
        format('%s of %s connections are used', used, room) AS found,
        'use smaller pools or a pooler, or allow more, which needs a restart' AS why,
        format('ALTER SYSTEM SET max_connections = %s;', current_setting('max_connections')::int
            * 2) AS sql
        FROM (SELECT (SELECT count(*) FROM pg_stat_activity WHERE datid IS NOT NULL) AS used,
            current_setting('max_connections')::int -
                current_setting('superuser_reserved_connections')::int
                - COALESCE(current_setting('reserved_connections', true)::int, 0) AS room) AS c",
    "SELECT 'warn' AS level, format('%s of the %s connections of the %s are used', used, room,
        what) AS found,
        'use smaller pools, or allow more' AS why, format('ALTER %s CONNECTION LIMIT -1;', what)
            AS sql
        FROM (SELECT format('ROLE %I', rolname) AS what, rolconnlimit AS room,
                    (SELECT count(*) FROM pg_stat_activity WHERE usename = rolname) AS used
                FROM pg_roles WHERE rolname = current_user AND NOT rolsuper
            UNION ALL SELECT format('DATABASE %I', datname), datconnlimit,
                    (SELECT count(*) FROM pg_stat_activity AS a WHERE a.datname = d.datname)
                FROM pg_database AS d WHERE d.datname = current_database()) AS c
        WHERE room >= 0 AND (used >= room * 0.8 OR room < 5)",
    "SELECT CASE WHEN used < room / 2 AND each >= 64 THEN 'ok' ELSE 'warn' END AS level,
        format('%s of about %s places in the table of locks are used (max_locks_per_transaction '
            '= %s)', used, room, each) AS found,
        'if it is full, locks fail and nobody can connect: hold fewer locks, or make room, which '
            'needs a restart' AS why,
        format('ALTER SYSTEM SET max_locks_per_transaction = %s;', GREATEST(each * 2, 128)) AS sql
        FROM (SELECT (SELECT count(*) FROM pg_locks WHERE NOT fastpath) AS used, each,
                each * (current_setting('max_connections')::bigint +
                    current_setting('max_prepared_transactions')::bigint) AS room
            FROM (SELECT current_setting('max_locks_per_transaction')::bigint AS each) AS s) AS t",
    // Advisory locks need no right but CONNECT. A role counts as a user of this database if it may
    // use the schema, or is the present role.
    "SELECT 'warn' AS level,
        format('%s roles may connect only because PUBLIC may, such as %s: each can take every '
            'advisory lock of this database', strangers,
            array_to_string(names[1:3], ', ')) AS found,
        'let only those roles connect that use it: as the owner of the database, with a GRANT for '
            'each role that you know' AS why,
        format('REVOKE CONNECT ON DATABASE %I FROM PUBLIC;%s', current_database(), grants) AS sql
        FROM (SELECT count(*) FILTER (WHERE NOT is_user) AS strangers, array_agg(rolname ORDER
            BY rolname) FILTER (WHERE NOT is_user) AS names,
                string_agg(format(' GRANT CONNECT ON DATABASE %I TO %I;', current_database(),
                    rolname), '') FILTER (WHERE is_user) AS grants
            FROM (SELECT r.rolname, r.rolname IN (current_user, session_user) OR
                COALESCE(has_schema_privilege(r.oid, n.oid, 'USAGE'), false) AS is_user
                FROM pg_roles AS r CROSS JOIN pg_database AS d LEFT JOIN pg_namespace AS n ON
                    n.nspname = 'resource_control'
                WHERE d.datname = current_database() AND r.rolcanlogin AND NOT r.rolsuper AND
                    NOT pg_has_role(r.oid, d.datdba, 'MEMBER')
                    AND has_database_privilege(r.oid, d.oid, 'CONNECT')
                    AND NOT EXISTS (SELECT FROM aclexplode(d.datacl) AS a
                        WHERE a.privilege_type = 'CONNECT' AND a.grantee <> 0 AND
                        pg_has_role(r.oid, a.grantee, 'USAGE'))) AS r
            ) AS p WHERE strangers > 0",
    // No warning, because an application does not need this right.
    "SELECT 'ok' AS level,
        CASE WHEN is_seen THEN 'this role sees the sessions of all roles'
            ELSE format('this role does not see what the sessions of other roles do, so old ones '
                'may be missing below (GRANT pg_read_all_stats TO %I;)', current_user) END AS found
        FROM (SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS is_seen) AS s",
    "SELECT 'warn' AS level, format('the replication slot %s is used by nobody, and keeps %s of '
        'WAL%s', slot_name,
            pg_size_pretty(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)),
            CASE WHEN xmin IS NOT NULL THEN ', and all dead rows since its standby left' ELSE ''
                END) AS found,
        'if its standby or subscriber will not come back, drop the slot' AS why,
            format('SELECT pg_drop_replication_slot(%L);', slot_name) AS sql
        FROM pg_replication_slots WHERE NOT active AND NOT pg_is_in_recovery()",
    // The primary knows the age of a standby's snapshot only in transactions. The limit is what the
    // server runs in twenty seconds on average, and 200.
    "SELECT 'warn' AS level, format('%s has a snapshot that is %s transactions old '
        '(hot_standby_feedback)', what, behind) AS found,
        'no dead row since then can be removed, and semaphores get slow: end the transaction '
            'there' AS why,
        format('SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE xact_start < now() '
            '- interval %L; -- on the standby', :transaction_age) AS sql
        FROM (SELECT format('the standby %s', COALESCE(host(client_addr), application_name)) AS
            what, age(backend_xmin) AS behind
                FROM pg_stat_replication
            UNION SELECT format('the replication slot %s', slot_name), age(xmin) FROM
                pg_replication_slots WHERE active) AS s
        WHERE behind > 200 + 20 * (SELECT sum(xact_commit + xact_rollback)
            / GREATEST(date_part('epoch', now() - pg_postmaster_start_time()), 60) FROM
                pg_stat_database)",
];

/// Locks that are held for long, and old transactions. The age of a lock of `interlock run` is that
/// of its session, because the session runs a query every second and is never idle for long.
pub(crate) const HOLDERS: &str = "
    SELECT 'warn' AS level, \
    format('session %s (%s, %s) holds the lock %s, and has been %s since %s', \
    pid, role, application, lock, session, date_trunc('second', since)) AS found,
        'if it is stuck' AS why, NULL AS sql, format('interlock kill --number -- ''%s''', lock) \
        AS shell, pid
        FROM (SELECT *, CASE WHEN application LIKE 'interlock %' THEN session_since ELSE \
        session_changed END AS since
            FROM (:locks) AS l) AS l
        WHERE state = 'held' AND since < clock_timestamp() - :holder_age
    UNION ALL SELECT 'warn', \
            format('a transaction has been open since %s in session %s (%s, %s, %s)',
            date_trunc('second', xact_start), pid, usename, application_name, state),
        'no dead row since then can be removed, and semaphores get slow: end it if it is not '
            'needed',
        format('SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND '
            'backend_start = %L;', pid, backend_start), NULL, pid
        FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = \
        current_database() AND pid <> pg_backend_pid()
            AND xact_start < clock_timestamp() - :transaction_age
    UNION ALL SELECT 'warn', format('the prepared transaction %s has been open since %s', \
    gid, date_trunc('second', prepared)),
        'it keeps its locks, even over a restart; if nobody else ends it', \
        format('ROLLBACK PREPARED %L;', gid), NULL, NULL
        FROM pg_prepared_xacts WHERE database = current_database() AND prepared < \
        clock_timestamp() - :transaction_age";

/// Locks that keep everybody else from reading a table, so that a question about its rows would
/// wait, too.
pub(crate) const LOCKED: &str = "
    SELECT 'fail' AS level, format('session %s (%s, %s) has resource_control.%I for itself%s: \
        everybody else waits, and the schema cannot be examined', l.pid, a.usename, \
        a.application_name, c.relname, ' since ' || date_trunc('second', a.xact_start)) AS found,
        CASE WHEN a.backend_start IS NULL THEN 'a member of pg_read_all_stats sees since when, and '
            'how to end it' ELSE 'if it does not end by itself' END AS why,
        CASE WHEN a.backend_start IS NOT NULL THEN format('SELECT pg_terminate_backend(pid) FROM '
            'pg_stat_activity WHERE pid = %s AND backend_start = %L;', l.pid, a.backend_start) END
            AS sql
        FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
            JOIN pg_namespace AS n ON n.oid = c.relnamespace
            JOIN pg_stat_activity AS a ON a.pid = l.pid
        WHERE n.nspname = 'resource_control' AND c.relname = ANY (:own) AND l.granted
            AND l.mode = 'AccessExclusiveLock' AND l.database = (SELECT d.oid FROM pg_database AS d
                WHERE d.datname = current_database())";

pub(crate) const MAY_CREATE: &str = "
    SELECT 'warn' AS level, 'this role may not create the schema' AS found, \
    'install as the owner of the database, or' AS why,
        format('GRANT CREATE ON DATABASE %I TO %I;', current_database(), current_user) AS sql
        WHERE NOT has_database_privilege(current_database(), 'CREATE')";

/// Questions that read the views of the schema, and the catalogs.
pub(crate) const VIEWS: &[&str] = &[
    "SELECT 'warn' AS level, format('request %s has slot %s of %s since %s (%s)', id, slot,
        service, date_trunc('second', created_at),
            left(details, 100)) AS found,
        'if it is stuck' AS why, format('interlock kill --slot %s -- %s', id,
            chr(39) || replace(service, chr(39), chr(39) || chr(92) || chr(39) || chr(39)) ||
                chr(39)) AS shell
        FROM resource_control.slot_in_flight WHERE created_at < clock_timestamp() - :holder_age
            AND NOT starts_with(service, 'leader ')",
    "SELECT 'warn' AS level, format('%s runs the schedule %s since %s', left(runner, 100), name,
        date_trunc('second', started_at)) AS found,
        'if it is stuck' AS why, format('interlock kill --run -- %s',
            chr(39) || replace(name, chr(39), chr(39) || chr(92) || chr(39) || chr(39)) ||
                chr(39)) AS shell
        FROM resource_control.schedule_state WHERE state = 'running' AND started_at <
            clock_timestamp() - :holder_age",
    "SELECT 'warn' AS level, format('%s had %s rows at its last ANALYZE, and nothing prunes it by '
        'itself', c.relname, c.reltuples::bigint) AS found,
        format('call diesel_interlock::prune::%s daily, for example from a schedule', p.function)
            AS why
        FROM pg_class AS c JOIN (VALUES ('throttle', 'throttles'), ('rate_limit', 'rate_limits'),
                ('service_request', 'requests'), ('once', 'once')) AS p (name, function)
            ON p.name = c.relname
        WHERE c.relnamespace = 'resource_control'::regnamespace AND c.relkind = 'r'
            AND c.reltuples > 1000000",
    "SELECT 'warn' AS level, format('request %s of %s was made in the future, at %s, and expires '
        'at %s', id, service, created_at, expires_at)
            AS found,
        'if nobody holds it' AS why, format('SELECT '
            'resource_control.complete_service_request(%L, %s);', service, id) AS sql
        FROM resource_control.slot_in_flight WHERE created_at > clock_timestamp() + interval
            '10 seconds'",
    "SELECT 'warn' AS level, format('a run of the schedule %s began in the future, at %s, and '
        'keeps others from running until %s', name, started_at, expires_at) AS found,
        'if the clock was wrong, and nobody runs it' AS why, format('interlock kill --run -- %s',
            chr(39) || replace(name, chr(39), chr(39) || chr(92) || chr(39) || chr(39)) ||
                chr(39)) AS shell
        FROM resource_control.schedule_state WHERE state = 'running' AND started_at >
            clock_timestamp() + interval '10 seconds'",
    "SELECT 'fail' AS level, format('resource_control.%I has no primary key %I (%s), because that '
        'was not copied, or another one', c.relname, w.name, k.key) AS found,
        'add it, as the owner' AS why, format('ALTER TABLE resource_control.%I%s ADD CONSTRAINT '
            '%I PRIMARY KEY (%s);', c.relname, (SELECT format(' DROP CONSTRAINT %I,', p.conname)
                FROM pg_constraint AS p WHERE p.conrelid = c.oid AND p.contype = 'p'), w.name,
            k.key) AS sql
        FROM pg_class AS c JOIN (VALUES ('installed_migration', 'version'), ('token_base',
            'is_only'), ('throttle', 'name, key, is_resource'),
                ('throttled_resource', 'resource_id'), ('service_request', 'id'), ('fence',
                    'name'), ('rate_limit', 'name, key'),
                ('schedule', 'name'), ('once', 'name, key')) AS k (name, key) ON k.name = c.relname,
            LATERAL (SELECT c.relname || '_pkey') AS w (name)
        WHERE c.relnamespace = 'resource_control'::regnamespace AND c.relkind = 'r'
            AND NOT EXISTS (SELECT FROM pg_constraint AS p JOIN pg_index AS i
                    ON i.indexrelid = p.conindid
                WHERE p.conrelid = c.oid AND p.contype = 'p' AND p.conname = w.name AND
                    i.indisvalid AND
                    pg_get_constraintdef(p.oid) = format('PRIMARY KEY (%s)', k.key))",
    "SELECT 'fail' AS level, 'resource_control.service_request.id is no identity, because that '
        'was not copied' AS found,
        'make it one, as the owner, and run doctor once more, because its sequence then begins '
            'at 1' AS why,
        'ALTER TABLE resource_control.service_request ALTER id SET NOT NULL, ALTER id ADD '
            'GENERATED ALWAYS AS IDENTITY (CACHE 1);' AS sql
        FROM pg_attribute WHERE attrelid = 'resource_control.service_request'::regclass AND
            attname = 'id' AND attidentity = ''",
    "SELECT 'fail' AS level, format('the sequence of resource_control.service_request.id is %s, '
            'but claims draw from resource_control.service_request_id_seq', name) AS found,
        'rename it, as the owner, and run doctor once more' AS why,
        CASE WHEN to_regclass('resource_control.service_request_id_seq') IS NULL THEN ''
            ELSE 'ALTER SEQUENCE resource_control.service_request_id_seq RENAME TO '
                'former_service_request_id_seq; ' END
            || format('ALTER SEQUENCE %s RENAME TO service_request_id_seq;', name) AS sql
        FROM pg_get_serial_sequence('resource_control.service_request', 'id') AS s (name)
        WHERE name <> 'resource_control.service_request_id_seq'",
    "SELECT 'fail' AS level, 'the index resource_control.service_request_in_flight is not that '
            'of this release, so slots may be taken twice' AS found,
        'make it anew, as the owner' AS why,
        'DROP INDEX resource_control.service_request_in_flight; ' || definition || ';' AS sql
        FROM pg_index, (SELECT 'CREATE UNIQUE INDEX service_request_in_flight ON '
            'resource_control.service_request USING btree (service, slot) WHERE ((completed_at '
            'IS NULL) AND (timed_out_at IS NULL))' AS definition) AS d
        WHERE indexrelid = to_regclass('resource_control.service_request_in_flight')
            AND NOT (indisvalid AND indisunique AND pg_get_indexdef(indexrelid) = definition)",
];

/// Questions that read the tables.
pub(crate) const TABLES: &[&str] = &[
    // The next questions find times in the future: the server's clock was ahead, on a former
    // primary or before the clock was set back.
    "SELECT 'warn' AS level, format('the schedule %s has a tick of the future, %s, before which '
        'nothing runs', name, counted_from) AS found,
        'if the clock was wrong' AS why,
        format('UPDATE resource_control.schedule SET counted_from = clock_timestamp(), next_at = '
            'NULL WHERE name = %L;', name) AS sql
        FROM resource_control.schedule WHERE counted_from > clock_timestamp() + interval
            '10 seconds'",
    "SELECT 'warn' AS level, format('%s throttles were granted in the future, such as %s at %s: '
            'each denies until then', all_of_them, names[1], latest) AS found,
        'if the clock was wrong' AS why,
        'UPDATE resource_control.throttle SET last_granted = clock_timestamp() WHERE last_granted '
            '> clock_timestamp();' AS sql
        FROM (SELECT count(*) AS all_of_them, array_agg(name ORDER BY last_granted DESC) AS names,
                max(last_granted) AS latest
            FROM resource_control.throttle
            WHERE last_granted > clock_timestamp() + interval '10 seconds') AS t
        WHERE all_of_them > 0",
    "SELECT 'warn' AS level, format('the resource %s was granted in the future, at %s, and is '
            'denied until then', resource_id::text, last_locked) AS found,
        'if the clock was wrong' AS why,
        format('UPDATE resource_control.throttled_resource SET last_locked = clock_timestamp() '
            'WHERE resource_id = %L;', resource_id::text) AS sql
        FROM resource_control.throttled_resource
        WHERE last_locked > clock_timestamp() + interval '10 seconds'",
    "SELECT 'warn' AS level, format('%s keys of rate limits were spent in the future, such as one '
            'of %s at %s: each is limited until then', all_of_them, names[1], latest) AS found,
        'if the clock was wrong, let them be full again' AS why,
        'DELETE FROM resource_control.rate_limit WHERE spent_at > clock_timestamp();' AS sql
        FROM (SELECT count(*) AS all_of_them, array_agg(name ORDER BY spent_at DESC) AS names,
                max(spent_at) AS latest
            FROM resource_control.rate_limit
            WHERE spent_at > clock_timestamp() + interval '10 seconds') AS t
        WHERE all_of_them > 0",
    // No sequence gets there by `nextval`: somebody has set it.
    "SELECT 'fail' AS level, format('the sequence resource_control.%I is near its end, and then '
            'no token can be drawn', relname) AS found,
        'let tokens continue above all that rows show' AS why,
        'interlock install --restored' AS shell
        FROM pg_class WHERE relnamespace = 'resource_control'::regnamespace::oid AND
            CASE WHEN relkind = 'S' AND has_sequence_privilege(oid, 'USAGE, SELECT')
                THEN pg_sequence_last_value(oid::regclass) >= 1::bigint << 62 END",
    // The tokens of requests and of schedules each come from one sequence, and the token of a fence
    // comes from either. A token beyond the range of the present timeline comes from no sequence.
    "WITH sequence AS (
            SELECT name, CASE WHEN has_sequence_privilege(name, 'USAGE, SELECT')
                    THEN COALESCE(pg_sequence_last_value(name::regclass), 0) END AS drawn
                FROM (VALUES ('resource_control.fencing_token'),
                    (pg_get_serial_sequence('resource_control.service_request', 'id'))) AS v (name)
        ), range AS (
            SELECT GREATEST(resource_control.token_floor() >> 40,
                    (SELECT max(b.base) FROM resource_control.token_base AS b),
                    (SELECT max(s.drawn >> 40) FROM sequence AS s
                        WHERE s.drawn < 1::bigint << 62)) + 1 << 40 AS past
        ), found AS (
            SELECT s.name, s.drawn, 'the ids of requests, which are fencing tokens, would repeat'
                    AS what, (SELECT max(r.id) FROM resource_control.service_request AS r
                        WHERE r.id < range.past) AS largest
                FROM sequence AS s, range WHERE s.name <> 'resource_control.fencing_token'
            UNION ALL SELECT s.name, s.drawn, 'the fencing tokens of schedules would repeat',
                    (SELECT max(t.token) FROM resource_control.schedule AS t
                        WHERE t.token < range.past)
                FROM sequence AS s, range WHERE s.name = 'resource_control.fencing_token'
            UNION ALL SELECT s.name, (SELECT max(o.drawn) FROM sequence AS o),
                    'a fence refuses all new tokens',
                    (SELECT max(f.token) FROM resource_control.fence AS f
                        WHERE f.token < range.past)
                FROM sequence AS s, range WHERE s.name = 'resource_control.fencing_token'
        )
        SELECT 'fail' AS level, f.what || ', because their sequence was not copied' AS found,
            'set it, as the owner' AS why,
            format('SELECT setval(%L, %s);', f.name, (SELECT max(o.largest) FROM found AS o
                WHERE o.name = f.name)) AS sql
            FROM found AS f WHERE f.largest > f.drawn
        UNION ALL SELECT 'fail', format('the fence %s was passed with %s, a token that nobody has '
                'drawn, and refuses all others', f.name, f.token),
            'set it back, as the owner, when no former holder is at work',
            format('UPDATE resource_control.fence SET token = %s WHERE name = %L;',
                GREATEST(resource_control.token_floor(), (SELECT min(s.drawn) FROM sequence AS s
                    WHERE s.drawn < 1::bigint << 62), 0), f.name)
            FROM resource_control.fence AS f, range WHERE f.token >= range.past",
];

/// Objects that are not as the migration created them. Reads only catalogs, and runs before any
/// question that reads the schema.
pub(crate) const AS_INSTALLED: &str = "
    WITH objects AS (
        SELECT c.oid, c.relname AS name, c.relkind AS kind, c.relpersistence AS persistence,
                c.relrowsecurity OR c.relforcerowsecurity AS has_security, c.reloptions AS options,
                c.relreplident AS identity, c.relowner AS owner
            FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
            WHERE n.nspname = 'resource_control' AND c.relname = ANY (:own)
    ), checks AS (
        SELECT k.name, k.kind || ' resource_control.' || k.of AS what, k.definition,
                CASE k.kind WHEN 'TABLE' THEN t.typrelid ELSE t.oid END AS of
            FROM pg_namespace AS n JOIN pg_type AS t ON t.typnamespace = n.oid JOIN (VALUES ('token_bases_are_one', 'TABLE', 'token_base', 'CHECK (is_only)'),
                ('positive_delays_only', 'TABLE', 'throttled_resource',
                    'CHECK ((throttle_interval > ''00:00:00''::interval))'),
                ('a_microsecond_to_1000_years', 'TABLE', 'throttled_resource',
                    'CHECK (((date_part(''epoch''::text, throttle_interval) >= '
                    '(0.000001)::double precision) AND (date_part(''epoch''::text, '
                    'throttle_interval) <= (''31557600000''::bigint)::double precision)))'),
                ('empty_rules', 'TABLE', 'throttled_resource',
                    'CHECK ((((last_locked = ''-infinity''::timestamp with time zone) AND '
                    '(last_locker_details = ''''::text)) OR ((last_locked <> ''-infinity'''
                    '::timestamp with time zone) AND '
                    '(length(TRIM(BOTH FROM last_locker_details)) > 0))))'),
                ('services_have_names', 'DOMAIN', 'service_name',
                    'CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 1000)))'),
                ('slots_count_from_zero', 'DOMAIN', 'slot_number', 'CHECK ((VALUE >= 0))'),
                ('requests_expire', 'DOMAIN', 'request_expiry', 'CHECK (isfinite(VALUE))'),
                ('fences_have_names', 'TABLE', 'fence',
                    'CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 1000)))'),
                ('schedules_have_names', 'TABLE', 'schedule',
                    'CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 1000)))')
            ) AS k (name, kind, of, definition) ON k.of = t.typname
            WHERE n.nspname = 'resource_control'
    )
    SELECT 'fail' AS level, format('resource_control.%I is UNLOGGED: a crash of the server empties '
            'it, and a standby does not have it', name) AS found, 'as the owner' AS why,
        format('ALTER %s resource_control.%I SET LOGGED;',
            CASE kind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, name) AS sql
        FROM objects WHERE kind IN ('r', 'S') AND persistence <> 'p' AND NOT EXISTS (
            SELECT FROM pg_depend AS d JOIN objects AS t ON t.oid = d.refobjid
                WHERE d.objid = objects.oid AND d.deptype = 'i' AND t.persistence <> 'p')
    UNION ALL SELECT 'fail', format('the sequence resource_control.%I is not as it was installed '
            '(%s): tokens may go down, repeat or end', name, concat_ws(', ',
                CASE WHEN seqincrement <> 1 THEN format('INCREMENT %s', seqincrement) END,
                CASE WHEN seqmin <> 1 THEN format('MINVALUE %s', seqmin) END,
                CASE WHEN seqmax <> 9223372036854775807 THEN format('MAXVALUE %s', seqmax) END,
                CASE WHEN seqcache <> 1 THEN format('CACHE %s', seqcache) END,
                CASE WHEN seqcycle THEN 'CYCLE' END)), 'as the owner',
        format('ALTER SEQUENCE resource_control.%I%s INCREMENT 1 MINVALUE 1 MAXVALUE '
            '9223372036854775807 CACHE 1 NO CYCLE;', name,
            CASE WHEN seqtypid <> 20::oid THEN ' AS bigint' END)
        FROM objects JOIN pg_sequence ON seqrelid = oid
        WHERE seqincrement <> 1 OR seqmin <> 1 OR seqmax <> 9223372036854775807 OR seqcache <> 1 OR
            seqcycle
    UNION ALL SELECT 'fail', format('row security hides rows of resource_control.%I from roles '
            'that do not own it', name), 'as the owner',
        format('ALTER TABLE resource_control.%I DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL '
            'SECURITY;', name)
        FROM objects WHERE has_security
    UNION ALL SELECT 'fail', format('the rule %I on resource_control.%I replaces what is written '
            'there', r.rulename, name), 'as the owner',
        format('DROP RULE %I ON resource_control.%I;', r.rulename, name)
        FROM objects JOIN pg_rewrite AS r ON r.ev_class = objects.oid
        WHERE NOT (kind = 'v' AND r.rulename = '_RETURN')
    UNION ALL SELECT 'warn', format('the trigger %I on resource_control.%I may change or refuse '
            'what is written there', t.tgname, name), 'if it is not meant to, as the owner',
        format('DROP TRIGGER %I ON resource_control.%I;', t.tgname, name)
        FROM objects JOIN pg_trigger AS t ON t.tgrelid = objects.oid WHERE NOT t.tgisinternal
    UNION ALL SELECT 'warn', format('the constraint %I on %s may refuse what is written there',
            c.conname, what), 'if it is not meant to, as the owner',
        format('ALTER %s DROP CONSTRAINT %I;', what, c.conname)
        FROM pg_constraint AS c JOIN pg_namespace AS n ON n.oid = c.connamespace
            LEFT JOIN objects ON objects.oid = c.conrelid LEFT JOIN pg_type AS d ON d.oid = c.contypid,
            LATERAL (SELECT CASE WHEN d.oid IS NULL
                THEN format('TABLE resource_control.%I', objects.name)
                ELSE format('DOMAIN resource_control.%I', d.typname) END) AS w (what)
        WHERE n.nspname = 'resource_control' AND c.contype IN ('c', 'f', 'u', 'x')
            AND (objects.oid IS NOT NULL OR d.typname = ANY (:own))
            AND NOT EXISTS (SELECT FROM checks AS k
                WHERE k.name = c.conname AND k.of IN (c.conrelid, c.contypid))
    UNION ALL SELECT 'fail', format('the constraint %I on %s is missing, or not that of this '
            'release', name, what), 'as the owner',
        format('ALTER %1$s DROP CONSTRAINT IF EXISTS %2$I; ALTER %1$s ADD CONSTRAINT %2$I %3$s;',
            what, name, definition)
        FROM checks WHERE NOT EXISTS (SELECT FROM pg_constraint AS c
            WHERE c.conname = checks.name AND checks.of IN (c.conrelid, c.contypid)
                AND pg_get_constraintdef(c.oid) = definition)
    UNION ALL SELECT 'warn', format('the index %I on resource_control.%I may refuse what is '
            'written there', c.relname, name), 'if it is not meant to, as the owner',
        format('DROP INDEX resource_control.%I;', c.relname)
        FROM objects JOIN pg_index AS i ON i.indrelid = objects.oid
            JOIN pg_class AS c ON c.oid = i.indexrelid
        WHERE (i.indisunique OR i.indexprs IS NOT NULL OR i.indpred IS NOT NULL)
            AND c.relname <> ALL (:own)
            AND NOT EXISTS (SELECT FROM pg_constraint AS k WHERE k.conindid = c.oid)
    UNION ALL SELECT 'fail', format('resource_control.%I is published, and has no replica '
            'identity, so no row there can be changed', name), 'as the owner',
        format('ALTER TABLE resource_control.%I REPLICA IDENTITY DEFAULT;', name)
        FROM objects WHERE identity = 'n' AND EXISTS (SELECT FROM pg_publication_tables AS p
            WHERE p.schemaname = 'resource_control' AND p.tablename = objects.name)
    UNION ALL SELECT DISTINCT 'fail', format('the view resource_control.%I cannot be read, because '
            'its owner %I may not read resource_control.%I', v.name, r.rolname, t.name),
        'as the owner of the latter',
        format('GRANT SELECT ON resource_control.%I TO %I;', t.name, r.rolname)
        FROM objects AS v JOIN pg_roles AS r ON r.oid = v.owner
            JOIN pg_rewrite AS w ON w.ev_class = v.oid
            JOIN pg_depend AS d ON d.objid = w.oid AND d.classid = 'pg_rewrite'::regclass
            JOIN objects AS t ON t.oid = d.refobjid AND t.oid <> v.oid
        WHERE v.kind = 'v' AND NOT has_table_privilege(r.oid, t.oid, 'SELECT')
    UNION ALL SELECT 'fail', format('the view resource_control.%I has the options %s, so it may '
            'not be readable for those that may only read', name, array_to_string(options, ', ')),
        'as the owner', format('ALTER VIEW resource_control.%I RESET (%s);', name,
            (SELECT string_agg(split_part(o, '=', 1), ', ') FROM unnest(options) AS u (o)))
        FROM objects WHERE kind = 'v' AND options IS NOT NULL
    UNION ALL SELECT 'warn', format('autovacuum is off for resource_control.%I, which gets slow',
            name), 'as the owner',
        format('ALTER TABLE resource_control.%I RESET (autovacuum_enabled);', name)
        FROM objects WHERE kind = 'r' AND EXISTS (SELECT FROM unnest(options) AS u (o)
            WHERE split_part(o, '=', 1) = 'autovacuum_enabled' AND NOT split_part(o, '=', 2)::bool)";

pub(crate) const GRANTS: &str = "
    SELECT 'fail' AS level, format('the role %s may not use all of the schema resource_control', \
    current_user) AS found,
        'run this as the owner of the schema (grants.sql grants later objects, too)' AS why,
        string_agg(format('GRANT %s TO %I;', missing, current_user), ' ') AS sql
    FROM (
        SELECT 'USAGE ON SCHEMA resource_control' AS missing
            FROM pg_namespace AS n WHERE n.nspname = 'resource_control' AND NOT \
            has_schema_privilege(n.oid, 'USAGE')
        UNION ALL SELECT format('%s ON resource_control.%I', string_agg(p, ', '), c.relname)
            FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace,
                unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p
            WHERE n.nspname = 'resource_control' AND c.relname = ANY (:own) \
            AND c.relkind IN ('r', 'v') AND NOT has_table_privilege(c.oid, p)
                AND (p = 'SELECT' OR c.relkind = 'r' AND c.relname NOT IN \
                ('installed_migration', 'token_base')) GROUP BY c.relname
        UNION ALL SELECT format('USAGE, SELECT, UPDATE ON SEQUENCE resource_control.%I', c.relname)
            FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
            WHERE n.nspname = 'resource_control' AND c.relname = ANY (:own) AND CASE c.relkind WHEN 'S'
                THEN NOT (has_sequence_privilege(c.oid, 'USAGE') AND \
                has_sequence_privilege(c.oid, 'UPDATE')) END
        UNION ALL SELECT format('EXECUTE ON FUNCTION %s', p.oid::regprocedure)
            FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
            WHERE n.nspname = 'resource_control' AND p.proname = ANY (:own) AND NOT \
            has_function_privilege(p.oid, 'EXECUTE')
    ) AS m HAVING count(*) > 0";
