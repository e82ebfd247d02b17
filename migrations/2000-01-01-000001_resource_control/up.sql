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
-- Checked before anything is changed, because the later files need both.
IF pg_catalog.current_setting('server_version_num')::integer OPERATOR(pg_catalog.<) 140000 THEN
    RAISE feature_not_supported USING
        MESSAGE = 'diesel_interlock needs PostgreSQL 14 or later, and this is '
            OPERATOR(pg_catalog.||) pg_catalog.current_setting('server_version'),
        HINT = 'Upgrade the server. Nothing was installed.';
END IF;
IF pg_catalog.getdatabaseencoding() OPERATOR(pg_catalog.<>) 'UTF8' THEN
    RAISE feature_not_supported USING
        MESSAGE = 'diesel_interlock needs a database with the encoding UTF8, and that of this '
        'one is ' OPERATOR(pg_catalog.||) pg_catalog.getdatabaseencoding()::pg_catalog.text,
        HINT = 'Create a database with ENCODING UTF8. Nothing was installed.';
END IF;
-- One session at a time runs this file, and only if its version is not recorded yet.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
-- Not to_regclass, whose cache may lack what another session committed while this one waited for the lock.
IF EXISTS (
    SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
        WHERE n.nspname OPERATOR(pg_catalog.=) 'resource_control' AND c.relname OPERATOR(pg_catalog.=) 'installed_migration'
) THEN
    IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000001') THEN
        RETURN;
    END IF;
END IF;
-- Under the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

-- Not CREATE SCHEMA IF NOT EXISTS, which needs the right to create a schema even if this one exists.
IF to_regnamespace('resource_control') IS NULL THEN
    CREATE SCHEMA resource_control;
END IF;

-- Each file inserts its own row, so the schema records the file whatever tool runs it.
CREATE TABLE IF NOT EXISTS resource_control.installed_migration (
    version text PRIMARY KEY,
    run_at timestamptz NOT NULL DEFAULT current_timestamp
);

-- The fencing tokens of session locks and schedules. CACHE 1, because a session would hand out cached numbers late, and so out
-- of order.
CREATE SEQUENCE IF NOT EXISTS resource_control.fencing_token AS bigint CACHE 1;

CREATE TABLE IF NOT EXISTS resource_control.token_base (
    is_only boolean PRIMARY KEY DEFAULT true CONSTRAINT token_bases_are_one CHECK (is_only),
    -- Where the base was set.
    identity text NOT NULL,
    base bigint NOT NULL
);

-- Tells this database from a copy of it: by the server, by the database in it, and by the table of the base, which a restore
-- into the same database creates anew. Null where the server does not say, as on some managed services.
CREATE OR REPLACE FUNCTION resource_control.database_identity() RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT concat_ws(' ', c.system_identifier, d.oid, 'resource_control.token_base'::regclass::oid)
        FROM pg_control_system() AS c, pg_database AS d WHERE d.datname = current_database());
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION resource_control.is_copy() RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    here CONSTANT text := resource_control.database_identity();
BEGIN
    RETURN here IS NOT NULL AND NOT EXISTS (SELECT FROM resource_control.token_base AS b WHERE b.identity = here);
EXCEPTION WHEN insufficient_privilege THEN
    -- A role that may read nothing may still start a program that only takes locks.
    RETURN false;
END
$$;

-- A promotion begins a new timeline, and a sequence may then have lost its last numbers. So that no token is drawn twice, each
-- timeline has its own range of numbers. Where the timeline cannot be read, as on some managed services, all numbers are in one
-- range.
CREATE OR REPLACE FUNCTION resource_control.token_floor() RETURNS bigint
    LANGUAGE plpgsql STABLE
AS $$
DECLARE
    timeline bigint;
BEGIN
    BEGIN
        timeline := ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8))::bit(32)::bigint;
    EXCEPTION WHEN OTHERS THEN
        RETURN 0;
    END;
    IF timeline = 1 THEN
        -- There was no promotion since the base was set, so no number was lost.
        RETURN 0;
    END IF;
    -- The condition makes the planner use the index. Callers switch sequential scans off, and the estimated cost of one that is
    -- off would start a JIT compilation.
    RETURN GREATEST(0, timeline - 1 + COALESCE((SELECT b.base FROM resource_control.token_base AS b WHERE b.is_only), 0)) << 40;
END
$$;

CREATE OR REPLACE FUNCTION resource_control.next_token(sequence regclass) RETURNS bigint
    LANGUAGE plpgsql VOLATILE STRICT
AS $$
DECLARE
    token bigint := pg_catalog.nextval(sequence);
    token_floor CONSTANT bigint := resource_control.token_floor();
BEGIN
    IF token < token_floor THEN
        -- This happens once per promotion. Only one session at a time, because a slower one would set the sequence back.
        PERFORM pg_catalog.pg_advisory_xact_lock(20000101000009);
        IF pg_catalog.nextval(sequence) < token_floor THEN
            PERFORM pg_catalog.setval(sequence, token_floor);
        END IF;
        token := pg_catalog.nextval(sequence);
    END IF;
    RETURN token;
END
$$;

CREATE OR REPLACE FUNCTION resource_control.lock_key(name text) RETURNS bigint
    LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
    SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- The 64 bits are kept in two halves, because bigint has no multiplication that wraps.
    bytes CONSTANT bytea := convert_to(name, 'UTF8');
    high bigint := x'cbf29ce4'::bigint;
    low bigint := x'84222325'::bigint;
BEGIN
    FOR i IN 0 .. length(bytes) - 1 LOOP
        low := low # get_byte(bytes, i);
        -- Multiplies by 2^40 + 435, which is the prime of FNV-1a.
        high := (high * 435 + (low * 435 >> 32) + ((low & x'ffffff'::bigint) << 8)) & x'ffffffff'::bigint;
        low := low * 435 & x'ffffffff'::bigint;
    END LOOP;
    RETURN (high << 32) | low;
END
$$;

COMMENT ON SCHEMA resource_control IS
    'Throttles, semaphores, fences, rate limits and schedules of diesel_interlock.';
COMMENT ON TABLE resource_control.installed_migration IS
    'The migrations of diesel_interlock that were run in this database.';
COMMENT ON SEQUENCE resource_control.fencing_token IS
    'The fencing tokens of session locks and schedules.';
COMMENT ON TABLE resource_control.token_base IS
    'From where the timelines of the server are counted, so that tokens grow also after a restore, copy or upgrade, where timelines begin at 1 again.';
COMMENT ON FUNCTION resource_control.database_identity() IS
    'The server, the database and the table of the base of tokens, and null where the server does not say.';
COMMENT ON FUNCTION resource_control.is_copy() IS
    'Whether the base of tokens was set in another database, of which this one is a copy: the owner must install before tokens are drawn.';
COMMENT ON FUNCTION resource_control.token_floor() IS
    'The least token of the present timeline of the server, or 0 where the timeline cannot be read.';
COMMENT ON FUNCTION resource_control.next_token(regclass) IS
    'Draws a fencing token from a sequence, and raises the sequence to the floor of the present timeline first if it is below.';
COMMENT ON FUNCTION resource_control.lock_key(text) IS
    'The number of the advisory lock of a name: 64-bit FNV-1a of its UTF-8 bytes, as a signed number. It never changes.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000001');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
