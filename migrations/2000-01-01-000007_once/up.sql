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
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000007') THEN
    RETURN;
END IF;
-- Under the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE TABLE IF NOT EXISTS resource_control.once (
    name text COLLATE pg_catalog."C" NOT NULL,
    key text COLLATE pg_catalog."C" NOT NULL,
    outcome bytea NOT NULL,
    done_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, key)
);

-- Volatile, so that the function sees what was committed after its caller's statement began and before that statement took the
-- lock.
CREATE OR REPLACE FUNCTION resource_control.once_outcome(name text, key text) RETURNS bytea
    LANGUAGE sql VOLATILE
    RETURN (SELECT o.outcome FROM resource_control.once AS o WHERE o.name = once_outcome.name AND o.key = once_outcome.key);

COMMENT ON TABLE resource_control.once IS
    'What was done once, and what came of it.';
COMMENT ON COLUMN resource_control.once.outcome IS
    'What the work has returned.';
COMMENT ON COLUMN resource_control.once.done_at IS
    'When the work had ended, by the server''s clock.';
COMMENT ON FUNCTION resource_control.once_outcome(text, text) IS
    'What came of the work with this name and key, and null if it was not done.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000007');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
