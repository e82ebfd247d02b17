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
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000004') THEN
    RETURN;
END IF;
-- Under the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE TABLE IF NOT EXISTS resource_control.fence (
    name text COLLATE pg_catalog."C" PRIMARY KEY CONSTRAINT fences_have_names CHECK (octet_length(name) BETWEEN 1 AND 1000),
    token bigint NOT NULL
) WITH (fillfactor = 50);

CREATE OR REPLACE FUNCTION resource_control.pass_fence(name text, token bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE STRICT
    SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    IF current_setting('synchronous_commit') IN ('off', 'local') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    INSERT INTO resource_control.fence AS f (name, token)
        VALUES (pass_fence.name, pass_fence.token)
        ON CONFLICT ON CONSTRAINT fence_pkey
            DO UPDATE SET token = EXCLUDED.token WHERE f.token <= EXCLUDED.token;
    RETURN FOUND;
END
$$;

COMMENT ON TABLE resource_control.fence IS
    'The largest fencing token that has passed each fence.';
COMMENT ON FUNCTION resource_control.pass_fence(text, bigint) IS
    'Passes a fence with a token, unless a larger token has passed it, and returns whether the token passed. Call it inside the transaction that writes what the fence protects, and roll that transaction back if it returns false.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000004');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
