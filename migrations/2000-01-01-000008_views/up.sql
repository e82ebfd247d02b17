-- A timeout of the role must not end the waits of this file early: those for other instances that install, and for users of the
-- tables. A timeout that runs cannot be switched off by the statement that it limits, so this is another statement, before it
-- in the same transaction. With psql, that is so with --single-transaction.
DO $timeouts$ BEGIN
    PERFORM pg_catalog.set_config(s.name, '0', true) FROM pg_catalog.pg_settings AS s
        WHERE s.name OPERATOR(pg_catalog.=) ANY ('{lock_timeout,statement_timeout,transaction_timeout}');
END $timeouts$;

DO $migration$
DECLARE
    callers_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
BEGIN
-- One session at a time runs this file, and only if its version is not recorded yet.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000008') THEN
    RETURN;
END IF;
-- Under the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE OR REPLACE VIEW resource_control.advisory_lock AS
    SELECT CASE WHEN l.objsubid = 1 THEN (l.classid::bigint << 32) | l.objid::bigint END AS number,
            CASE WHEN l.objsubid = 2 THEN l.classid::bigint::bit(32)::integer END AS first,
            CASE WHEN l.objsubid = 2 THEN l.objid::bigint::bit(32)::integer END AS second,
            l.mode = 'ShareLock' AS is_shared,
            l.granted AS is_held,
            l.pid,
            COALESCE(a.application_name, '') AS application_name,
            a.usename::text AS role,
            host(a.client_addr) AS client,
            a.state,
            a.xact_start AS transaction_since,
            l.waitstart AS waiting_since,
            CASE WHEN l.granted THEN '{}' ELSE pg_blocking_pids(l.pid) END AS blocked_by
        FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
        WHERE l.locktype = 'advisory' AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database());

CREATE OR REPLACE VIEW resource_control.slot_in_flight AS
    -- Not the domains, because PostgreSQL has no operator for exactly a domain, and would look for one in the whole search path of
    -- whoever filters the rows.
    SELECT r.id, r.service::text AS service, r.slot::smallint AS slot, r.created_at, r.expires_at::timestamptz AS expires_at,
            r.expires_at - clock_timestamp() AS remaining, r.details
        FROM resource_control.service_request AS r
        WHERE r.completed_at IS NULL AND r.timed_out_at IS NULL AND r.expires_at > clock_timestamp();

CREATE OR REPLACE VIEW resource_control.throttle_state AS
    SELECT t.name, t.key, t.is_resource, t.throttle_interval, t.last_granted, t.details,
            t.last_granted + t.throttle_interval AS due_at,
            COALESCE(t.last_granted + t.throttle_interval <= clock_timestamp(), true) AS is_due
        FROM (
            SELECT n.name, n.key, n.is_resource, resource_control.elapsed(n.throttle_interval) AS throttle_interval,
                    NULLIF(n.last_granted, '-infinity') AS last_granted, n.details
                FROM resource_control.throttle AS n
            UNION ALL
            SELECT r.resource_id::text, '', true, resource_control.elapsed(r.throttle_interval),
                    NULLIF(r.last_locked, '-infinity'), r.last_locker_details
                FROM resource_control.throttled_resource AS r
        ) AS t;

CREATE OR REPLACE VIEW resource_control.rate_limit_state AS
    SELECT r.name, r.key, r.burst, GREATEST(floor(r.burst - r.owed), 0)::bigint AS remaining, r.owed / r.burst AS used,
            r.full_at, r.spent_at
        FROM (
            SELECT k.*, GREATEST(date_part('epoch', k.full_at - clock_timestamp()) * 1000000 / k.unit_us, 0) AS owed
                FROM resource_control.rate_limit AS k
        ) AS r;

-- A leader holds the only slot of a service that is named with the word leader and the election's name, in which spaces and
-- backslashes are escaped. The view removes the prefix and the escapes.
CREATE OR REPLACE VIEW resource_control.leader AS
    SELECT regexp_replace(s.service, '^leader |\\(.)', '\1', 'g') AS name, s.details AS holder, s.created_at AS since,
            s.expires_at AS until, s.id AS token
        FROM resource_control.slot_in_flight AS s
        WHERE starts_with(s.service, 'leader ') AND s.slot = 0;

CREATE OR REPLACE VIEW resource_control.schedule_state AS
    SELECT s.name,
            CASE
                WHEN s.started_at IS NULL THEN 'new'
                WHEN s.expires_at > clock_timestamp() THEN 'running'
                WHEN s.expires_at IS NULL THEN CASE WHEN s.error IS NULL THEN 'done' ELSE 'failed' END
                WHEN s.ended_at IS NULL THEN 'crashed'
                ELSE 'given back'
            END AS state,
            CASE WHEN s.started_at IS NOT NULL THEN s.tick END AS tick,
            s.attempt, s.token, s.runner, s.started_at, s.expires_at, s.ended_at, s.error, s.paused_at
        FROM resource_control.schedule AS s;

-- Sets a new base for the timelines if this database is a copy, or anew in any case. All tokens are then larger than those that
-- the sequences and the rows show. Returns whether a new base was set, and null if this is a copy and the role may not set it.
CREATE OR REPLACE FUNCTION resource_control.set_token_base(anew boolean DEFAULT false) RETURNS boolean
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET lock_timeout = 0
AS $$
DECLARE
    -- A larger token in a row was not drawn from a sequence, and after it no range would be left.
    no_token CONSTANT bigint := 1::bigint << 62;
    -- Microseconds since 2026, and of a day.
    age CONSTANT bigint := GREATEST(date_part('epoch', clock_timestamp()) * 1000000 - 1767225600000000, 0);
    day CONSTANT bigint := 86400000000;
    timeline bigint := 1;
    largest bigint;
    range bigint;
BEGIN
    IF NOT (anew OR resource_control.is_copy()) THEN
        RETURN false;
    END IF;
    -- Only one session at a time, because a slower one would set the sequences back.
    PERFORM pg_advisory_xact_lock(20000101000009);
    IF NOT (anew OR resource_control.is_copy()) THEN
        RETURN false;
    END IF;
    BEGIN
        timeline := ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint;
    EXCEPTION WHEN OTHERS THEN
        -- Then token_floor() cannot read it either.
    END;
    -- Logical replication copies rows and no sequences, and a sequence has not yet reached the range of a base that is new.
    SELECT max(d.token) INTO largest FROM (
        SELECT s.last_value FROM resource_control.fencing_token AS s WHERE s.is_called
        UNION ALL SELECT s.last_value FROM resource_control.service_request_id_seq AS s WHERE s.is_called
        UNION ALL SELECT max(r.id) FROM resource_control.service_request AS r WHERE r.id < no_token
        UNION ALL SELECT max(s.token) FROM resource_control.schedule AS s WHERE s.token < no_token
        UNION ALL SELECT max(f.token) FROM resource_control.fence AS f WHERE f.token < no_token
        UNION ALL SELECT b.base + timeline - 1 << 40 FROM resource_control.token_base AS b WHERE b.base < no_token >> 40
    ) AS d (token);
    DELETE FROM resource_control.token_base;
    IF FOUND OR largest > 0 THEN
        -- The next range, because the original may have drawn more tokens since it was copied. And at least the range of today,
        -- because the original may also have been promoted since, which happens less than once a day.
        range := GREATEST((largest >> 40) + 1, age / day);
        -- Within the range, a later copy of the same original begins later: by more than is drawn in the meantime.
        PERFORM setval(s.sequence, (range << 40) + age % day * 4)
            FROM (VALUES ('resource_control.fencing_token'::regclass), ('resource_control.service_request_id_seq')) AS s (sequence);
    END IF;
    INSERT INTO resource_control.token_base (identity, base)
        VALUES (COALESCE(resource_control.database_identity(), ''), COALESCE(range, 0) + 1 - timeline)
        -- Makes a row that an older snapshot does not show a serialization failure, after which the crate repeats the call.
        ON CONFLICT DO NOTHING;
    RETURN true;
EXCEPTION WHEN insufficient_privilege THEN
    IF anew THEN
        RAISE;
    END IF;
    RETURN NULL;
END
$$;

PERFORM resource_control.set_token_base();

COMMENT ON FUNCTION resource_control.set_token_base(boolean) IS
    'Lets tokens go on above all that are known if this database is a copy, or anew in any case. Returns whether it did, and null if this is a copy and the role may not do so.';
COMMENT ON VIEW resource_control.advisory_lock IS
    'Who holds the advisory locks of this database, and who waits for them on the server, and for whom. A lock is a number, or first and second.';
COMMENT ON VIEW resource_control.slot_in_flight IS
    'The slots of semaphores that are in use.';
COMMENT ON VIEW resource_control.throttle_state IS
    'When throttles of both kinds are due.';
COMMENT ON VIEW resource_control.rate_limit_state IS
    'How many units the keys of rate limits have left, and how much of the burst is used: 0 for a full key, 1 for one that is limited.';
COMMENT ON VIEW resource_control.leader IS
    'Who leads what, since when, and until when unless the term is renewed.';
COMMENT ON VIEW resource_control.schedule_state IS
    'The tick of each schedule that ran last, and whether it is new, running, done, failed, crashed or given back; and since when the schedule is paused.';
COMMENT ON COLUMN resource_control.advisory_lock.number IS
    'The number of the lock, and null for a pair.';
COMMENT ON COLUMN resource_control.advisory_lock.first IS
    'The first of a pair of numbers.';
COMMENT ON COLUMN resource_control.advisory_lock.second IS
    'The second of a pair of numbers.';
COMMENT ON COLUMN resource_control.advisory_lock.is_shared IS
    'Whether the session has, or wants, the shared form of the lock.';
COMMENT ON COLUMN resource_control.advisory_lock.is_held IS
    'Whether the session holds the lock. Otherwise it waits for it.';
COMMENT ON COLUMN resource_control.advisory_lock.pid IS
    'The session, and null for a prepared transaction.';
COMMENT ON COLUMN resource_control.advisory_lock.application_name IS
    'The application_name of the session.';
COMMENT ON COLUMN resource_control.advisory_lock.role IS
    'The role of the session. Null if the reader may not see it.';
COMMENT ON COLUMN resource_control.advisory_lock.client IS
    'The address of the client, and null for a socket.';
COMMENT ON COLUMN resource_control.advisory_lock.state IS
    'What the session does: active, idle, idle in transaction ...';
COMMENT ON COLUMN resource_control.advisory_lock.transaction_since IS
    'Since when the session has a transaction.';
COMMENT ON COLUMN resource_control.advisory_lock.waiting_since IS
    'Since when the session waits for the lock.';
COMMENT ON COLUMN resource_control.advisory_lock.blocked_by IS
    'The sessions for which it waits.';
COMMENT ON COLUMN resource_control.slot_in_flight.id IS
    'The id of the request, and its fencing token.';
COMMENT ON COLUMN resource_control.slot_in_flight.service IS
    'The name of the semaphore.';
COMMENT ON COLUMN resource_control.slot_in_flight.slot IS
    'The slot, from 0.';
COMMENT ON COLUMN resource_control.slot_in_flight.created_at IS
    'When the slot was claimed.';
COMMENT ON COLUMN resource_control.slot_in_flight.expires_at IS
    'When the slot is free again unless the request is renewed.';
COMMENT ON COLUMN resource_control.slot_in_flight.remaining IS
    'How long that is from now.';
COMMENT ON COLUMN resource_control.slot_in_flight.details IS
    'Who has claimed it, as far as the holder tells.';
COMMENT ON COLUMN resource_control.throttle_state.name IS
    'The name of the throttle, or of the resource.';
COMMENT ON COLUMN resource_control.throttle_state.key IS
    'The key, and empty without one.';
COMMENT ON COLUMN resource_control.throttle_state.is_resource IS
    'Whether it is a resource of the database.';
COMMENT ON COLUMN resource_control.throttle_state.throttle_interval IS
    'The interval, as elapsed time.';
COMMENT ON COLUMN resource_control.throttle_state.last_granted IS
    'When it was granted last, and null for never.';
COMMENT ON COLUMN resource_control.throttle_state.details IS
    'Who was granted it last.';
COMMENT ON COLUMN resource_control.throttle_state.due_at IS
    'When it is due, and null for one that was never granted.';
COMMENT ON COLUMN resource_control.throttle_state.is_due IS
    'Whether it is due.';
COMMENT ON COLUMN resource_control.rate_limit_state.name IS
    'The name of the limit.';
COMMENT ON COLUMN resource_control.rate_limit_state.key IS
    'The key, and empty without one.';
COMMENT ON COLUMN resource_control.rate_limit_state.burst IS
    'How many units it has when it is full.';
COMMENT ON COLUMN resource_control.rate_limit_state.remaining IS
    'How many units it has now.';
COMMENT ON COLUMN resource_control.rate_limit_state.used IS
    'How much of the burst is used: 0 for a full key, 1 for one that is limited.';
COMMENT ON COLUMN resource_control.rate_limit_state.full_at IS
    'When it is full if no more units are spent.';
COMMENT ON COLUMN resource_control.rate_limit_state.spent_at IS
    'When units were spent last.';
COMMENT ON COLUMN resource_control.leader.name IS
    'The name of the election.';
COMMENT ON COLUMN resource_control.leader.holder IS
    'The details of the leader.';
COMMENT ON COLUMN resource_control.leader.since IS
    'Since when it leads.';
COMMENT ON COLUMN resource_control.leader.until IS
    'Until when it leads unless the term is renewed.';
COMMENT ON COLUMN resource_control.leader.token IS
    'The fencing token of the term.';
COMMENT ON COLUMN resource_control.schedule_state.name IS
    'The name of the schedule.';
COMMENT ON COLUMN resource_control.schedule_state.state IS
    'new, running, done, failed, crashed or given back.';
COMMENT ON COLUMN resource_control.schedule_state.tick IS
    'The tick that was taken last, and null before the first one.';
COMMENT ON COLUMN resource_control.schedule_state.attempt IS
    'Which run of the tick it is or was.';
COMMENT ON COLUMN resource_control.schedule_state.token IS
    'The fencing token of the run.';
COMMENT ON COLUMN resource_control.schedule_state.runner IS
    'Who runs it, or ran it.';
COMMENT ON COLUMN resource_control.schedule_state.started_at IS
    'When the run began.';
COMMENT ON COLUMN resource_control.schedule_state.expires_at IS
    'Until when the run holds the tick, while it runs.';
COMMENT ON COLUMN resource_control.schedule_state.ended_at IS
    'When the run ended.';
COMMENT ON COLUMN resource_control.schedule_state.error IS
    'What the run has failed with.';
COMMENT ON COLUMN resource_control.schedule_state.paused_at IS
    'Since when the schedule is paused, and takes no tick.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000008');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
