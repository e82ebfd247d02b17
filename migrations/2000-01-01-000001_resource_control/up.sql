DO $migration$
DECLARE
    callers_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
BEGIN
-- Runs one migration at a time, and only if its version is not recorded.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
IF pg_catalog.to_regclass('resource_control.installed_migration') IS NOT NULL THEN
    RETURN;
END IF;
-- Otherwise the objects below could refer to objects of the caller with the same names.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE SCHEMA resource_control;

-- Each migration inserts its own row, so that the schema records it however it was run.
CREATE TABLE resource_control.installed_migration (
    version text PRIMARY KEY,
    run_at timestamptz NOT NULL DEFAULT current_timestamp
);

CREATE FUNCTION resource_control.lock_key(name text) RETURNS bigint
    LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
    SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- The 64 bits are in two halves, because bigint has no multiplication that wraps.
    bytes CONSTANT bytea := pg_catalog.convert_to(name, 'UTF8');
    high bigint := x'cbf29ce4'::bigint;
    low bigint := x'84222325'::bigint;
BEGIN
    FOR i IN 0 .. pg_catalog.length(bytes) - 1 LOOP
        low := low # pg_catalog.get_byte(bytes, i);
        -- Multiplies by 2^40 + 435, the prime of FNV-1a.
        high := (high * 435 + (low * 435 >> 32) + ((low & x'ffffff'::bigint) << 8)) & x'ffffffff'::bigint;
        low := low * 435 & x'ffffffff'::bigint;
    END LOOP;
    RETURN (high << 32) | low;
END
$$;

COMMENT ON SCHEMA resource_control IS
    'Throttles, rate limits, semaphores and fences of diesel_interlock.';
COMMENT ON TABLE resource_control.installed_migration IS
    'The migrations of diesel_interlock that were run in this database.';
COMMENT ON FUNCTION resource_control.lock_key(text) IS
    'The advisory lock key of a name: 64-bit FNV-1a of its UTF-8 bytes, as a signed number. It never changes.';

PERFORM pg_catalog.set_config('search_path', callers_path, true);
INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000001');
END
$migration$;
