DO $migration$
DECLARE
    callers_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
BEGIN
-- Runs one migration at a time, and only if its version is not recorded.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000003') THEN
    RETURN;
END IF;
-- Otherwise the objects below could refer to objects of the caller with the same names.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE TABLE resource_control.throttled_key (
    resource_id resource_control.throttled_resource_enum NOT NULL,
    -- Keys are ordered by their bytes, because the order of a language changes with the server's libraries.
    key text COLLATE pg_catalog."C" NOT NULL CONSTRAINT key_not_empty CHECK (key <> ''),
    last_locked timestamptz NOT NULL,
    last_locker_details text NOT NULL
        CONSTRAINT details_not_empty CHECK (length(trim(last_locker_details)) > 0),
    PRIMARY KEY (resource_id, key)
)
WITH (fillfactor = 70);

-- The number of the advisory lock that a transaction holds for a key whose row does not exist yet. It is a hash of the bytes,
-- so the collation of the argument does not change it.
CREATE FUNCTION resource_control.throttled_key_lock(
    resource resource_control.throttled_resource_enum,
    key text
) RETURNS bigint
    LANGUAGE sql STABLE STRICT PARALLEL SAFE
AS $$
    SELECT pg_catalog.hashtextextended(
        key COLLATE pg_catalog."C", pg_catalog.hashtextextended(resource::pg_catalog.text, 20000101000003))
$$;

CREATE FUNCTION resource_control.attempt_throttled_key(
    resource resource_control.throttled_resource_enum,
    key text,
    details text,
    OUT granted boolean,
    OUT being_taken boolean,
    OUT decided_at timestamptz,
    OUT next_at timestamptz,
    OUT retry_after interval,
    OUT holder text,
    OUT held_since timestamptz
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
AS $$
DECLARE
    -- The argument may have the collation of a column, with which the index cannot be used.
    wanted CONSTANT text COLLATE "C" := key;
    span interval;
    version tid;
    tried_row boolean;
BEGIN
    IF details IS NULL OR length(btrim(details)) = 0 THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_empty_details',
            MESSAGE = 'the details are empty: say who takes the resource';
    END IF;
    IF wanted IS NULL OR wanted = '' THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_empty_key',
            MESSAGE = 'the key is empty: say what the resource is throttled for';
    END IF;

    -- The steps are those of attempt_throttled_resource. They share no function, because the call would make a denial
    -- slower by 4 %.
    LOOP
        SELECT resource_control.elapsed(r.throttle_interval), k.last_locked, k.last_locker_details
            INTO span, held_since, holder
            FROM resource_control.throttled_resource AS r
            LEFT JOIN resource_control.throttled_key AS k ON k.resource_id = r.resource_id AND k.key = wanted
            WHERE r.resource_id = resource;
        IF NOT FOUND THEN
            PERFORM resource_control.require_read_committed();
            RAISE check_violation USING
                CONSTRAINT = 'diesel_interlock_unknown_resource',
                MESSAGE = format('%L has no row in resource_control.throttled_resource', resource);
        END IF;
        decided_at := clock_timestamp();
        IF held_since > decided_at - span THEN
            granted := false;
            being_taken := false;
            next_at := held_since + span;
            retry_after := CASE WHEN isfinite(next_at) THEN next_at - decided_at ELSE span END;
            RETURN;
        END IF;
        -- The row may have been pruned, or inserted, since the first try.
        EXIT WHEN tried_row = (held_since IS NOT NULL);
        tried_row := held_since IS NOT NULL;

        IF tried_row THEN
            SELECT k.ctid INTO version FROM resource_control.throttled_key AS k
                WHERE k.resource_id = resource AND k.key = wanted AND k.last_locked <= clock_timestamp() - span
                FOR NO KEY UPDATE SKIP LOCKED;
            IF FOUND THEN
                UPDATE resource_control.throttled_key AS k
                    SET last_locked = clock_timestamp(), last_locker_details = details
                    WHERE k.ctid = version
                    RETURNING k.last_locked INTO decided_at;
                granted := FOUND;
            END IF;
        ELSIF pg_try_advisory_xact_lock(resource_control.throttled_key_lock(resource, wanted)) THEN
            -- Without the lock, an INSERT would wait for another transaction's first attempt. A row that this
            -- snapshot does not show is a serialization failure, not a duplicate.
            INSERT INTO resource_control.throttled_key AS k (resource_id, key, last_locked, last_locker_details)
                VALUES (resource, wanted, clock_timestamp(), details)
                ON CONFLICT ON CONSTRAINT throttled_key_pkey DO NOTHING
                RETURNING k.last_locked INTO decided_at;
            granted := FOUND;
        END IF;
        IF granted THEN
            being_taken := false;
            next_at := decided_at + span;
            holder := details;
            held_since := decided_at;
            RETURN;
        END IF;
    END LOOP;

    granted := false;
    being_taken := true;
    next_at := decided_at + span;
    retry_after := span;
    holder := NULL;
    held_since := NULL;
END
$$;

-- Reads first without locks, because attempts at locked keys are denied until it commits. The settings make it delete the
-- rows by the index, even if the table was small when the plan was chosen.
CREATE FUNCTION resource_control.prune_throttled_keys(batch integer) RETURNS integer
    LANGUAGE plpgsql VOLATILE STRICT
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
AS $$
DECLARE
    resources resource_control.throttled_resource_enum[];
    keys text[] COLLATE "C";
    -- More than the batch, because keys that are being taken are skipped.
    at_most CONSTANT bigint := 2 * greatest(batch, 0)::bigint;
    pruned integer;
BEGIN
    -- Goes label by label, because a join of each key with its resource takes three times as long.
    SELECT array_agg(c.resource_id), array_agg(c.key) INTO resources, keys
        FROM (
            SELECT passed.resource_id, passed.key
            FROM (
                SELECT label, coalesce(
                    clock_timestamp() - resource_control.elapsed(r.throttle_interval), 'infinity') AS passed_before
                FROM unnest(enum_range(NULL::resource_control.throttled_resource_enum)) AS label
                LEFT JOIN resource_control.throttled_resource AS r ON r.resource_id = label
            ) AS l
            CROSS JOIN LATERAL (
                SELECT k.resource_id, k.key
                FROM resource_control.throttled_key AS k
                WHERE k.resource_id = l.label AND k.last_locked <= l.passed_before
                LIMIT at_most
            ) AS passed
            LIMIT at_most
        ) AS c;

    -- Checks the keys again after locking them, because they may have been taken meanwhile.
    DELETE FROM resource_control.throttled_key AS k
        USING (
            SELECT d.ctid, d.resource_id, d.key
            FROM unnest(resources, keys) AS c (resource_id, key)
            JOIN resource_control.throttled_key AS d ON d.resource_id = c.resource_id AND d.key = c.key
            LEFT JOIN resource_control.throttled_resource AS r ON r.resource_id = d.resource_id
            WHERE r.resource_id IS NULL
                OR d.last_locked <= clock_timestamp() - resource_control.elapsed(r.throttle_interval)
            LIMIT greatest(batch, 0)
            FOR UPDATE OF d SKIP LOCKED
        ) AS locked
        WHERE k.ctid = locked.ctid AND k.resource_id = locked.resource_id AND k.key = locked.key;
    GET DIAGNOSTICS pruned = ROW_COUNT;
    RETURN pruned;
END
$$;

COMMENT ON TABLE resource_control.throttled_key IS
    'Resources that are granted at most once per interval and key. The first attempt inserts the row.';
COMMENT ON FUNCTION resource_control.throttled_key_lock(resource_control.throttled_resource_enum, text) IS
    'The advisory lock that the first attempt at a key holds until its transaction ends.';
COMMENT ON FUNCTION resource_control.attempt_throttled_key(resource_control.throttled_resource_enum, text, text) IS
    'Grants the resource for this key if it is due, and returns the decision. Otherwise as attempt_throttled_resource.';
COMMENT ON FUNCTION resource_control.prune_throttled_keys(integer) IS
    'Deletes keys whose interval has passed, or whose resource has no row: at most as many as batch says. Skips keys that are being taken. Returns the number of deleted keys. Keep the batch in the hundreds and commit at once, because attempts at those keys are denied from their deletion to the end of the transaction.';

PERFORM pg_catalog.set_config('search_path', callers_path, true);
INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000003');
END
$migration$;
