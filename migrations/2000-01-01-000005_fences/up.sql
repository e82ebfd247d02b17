DO $migration$
DECLARE
    callers_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
BEGIN
-- One at a time, and only where it was not run, by whichever means.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000005') THEN
    RETURN;
END IF;
-- Names of the caller's would be bound to what is created here.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE TABLE resource_control.fence (
    -- Bytes, and not a language's order, which would change with the server's libraries.
    name text COLLATE pg_catalog."C" PRIMARY KEY CONSTRAINT fences_have_names CHECK (octet_length(name) BETWEEN 1 AND 1000),
    token bigint NOT NULL
)
-- Room for the next version of a row in its own page.
WITH (fillfactor = 50);

CREATE FUNCTION resource_control.pass_fence(name text, token bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE STRICT
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO resource_control.fence AS f (name, token)
        VALUES (pass_fence.name, pass_fence.token)
        ON CONFLICT ON CONSTRAINT fence_pkey
            DO UPDATE SET token = EXCLUDED.token WHERE f.token <= EXCLUDED.token;
    RETURN FOUND;
END
$$;

COMMENT ON TABLE resource_control.fence IS
    'The greatest fencing token that has passed each fence.';
COMMENT ON FUNCTION resource_control.pass_fence(text, bigint) IS
    'Lets a token pass unless a greater one has; returns whether it did. Call it inside the transaction that writes what the fence protects, and roll that back if it returns false.';

PERFORM pg_catalog.set_config('search_path', callers_path, true);
INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000005');
END
$migration$;
