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
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000006') THEN
    RETURN;
END IF;
-- Under the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE TABLE IF NOT EXISTS resource_control.schedule (
    name text COLLATE pg_catalog."C" PRIMARY KEY CONSTRAINT schedules_have_names CHECK (octet_length(name) BETWEEN 1 AND 1000),
    tick timestamptz NOT NULL,
    attempt integer NOT NULL DEFAULT 0,
    missed integer NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    runner text NOT NULL DEFAULT '',
    started_at timestamptz,
    expires_at timestamptz,
    ended_at timestamptz,
    error text,
    claim bigint,
    paused_at timestamptz
) WITH (fillfactor = 50);

COMMENT ON TABLE resource_control.schedule IS
    'The tick of each schedule that ran last, and how it ended.';
COMMENT ON COLUMN resource_control.schedule.tick IS
    'The tick that was taken last, or when the schedule was first seen.';
COMMENT ON COLUMN resource_control.schedule.attempt IS
    'How many runs of this tick have begun, without those that gave it back.';
COMMENT ON COLUMN resource_control.schedule.missed IS
    'How many ticks before this one were missed and are not run.';
COMMENT ON COLUMN resource_control.schedule.token IS
    'The fencing token of the run, which grows from run to run.';
COMMENT ON COLUMN resource_control.schedule.claim IS
    'A random number of the claim, by which the run knows its row.';
COMMENT ON COLUMN resource_control.schedule.paused_at IS
    'Since when the schedule takes no tick. Null if it is not paused.';
COMMENT ON COLUMN resource_control.schedule.expires_at IS
    'Until when the run holds the tick. Null once ended; past if crashed or given back.';
COMMENT ON COLUMN resource_control.schedule.ended_at IS
    'When the run ended the tick or gave it back. Null while it runs or crashed.';
COMMENT ON COLUMN resource_control.schedule.error IS
    'What the run has failed with. Null if it has not.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000006');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
