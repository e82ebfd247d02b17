CREATE TABLE resource_control.throttled_key (
    resource_id resource_control.throttled_resource_enum NOT NULL,
    key text NOT NULL CONSTRAINT key_not_empty CHECK (key <> ''),
    last_locked timestamptz NOT NULL,
    last_locker_details text NOT NULL
        CONSTRAINT details_not_empty CHECK (length(trim(last_locker_details)) > 0),
    PRIMARY KEY (resource_id, key)
)
WITH (fillfactor = 70);

-- What stands for a key until its row exists: an advisory lock of the transaction.
CREATE FUNCTION resource_control.throttled_key_lock(
    resource resource_control.throttled_resource_enum,
    key text
) RETURNS bigint
    LANGUAGE sql STABLE STRICT PARALLEL SAFE
AS $$
    SELECT pg_catalog.hashtextextended(key, pg_catalog.hashtextextended(resource::text, 20000101000003))
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
    wanted CONSTANT text := key;
    span interval;
    has_row boolean;
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

    -- Most attempts come too soon and end with this read: no lock, no transaction id.
    SELECT resource_control.elapsed(r.throttle_interval), k.last_locked, k.last_locker_details
        INTO span, held_since, holder
        FROM resource_control.throttled_resource AS r
        LEFT JOIN resource_control.throttled_key AS k ON k.resource_id = r.resource_id AND k.key = wanted
        WHERE r.resource_id = resource;
    IF NOT FOUND THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_unknown_resource',
            MESSAGE = format('%L has no row in resource_control.throttled_resource', resource);
    END IF;
    granted := false;
    being_taken := false;
    decided_at := clock_timestamp();

    IF held_since IS NULL OR held_since + span <= decided_at THEN
        -- Due, or never seen. An INSERT would wait for another transaction's first attempt, so the
        -- key is locked before there is a row; nobody inserts, takes or prunes it without that.
        being_taken := NOT pg_try_advisory_xact_lock(
            resource_control.throttled_key_lock(resource, wanted));
        IF NOT being_taken THEN
            SELECT true, k.last_locked, k.last_locker_details
                INTO has_row, held_since, holder
                FROM resource_control.throttled_key AS k
                WHERE k.resource_id = resource AND k.key = wanted;
            IF has_row THEN
                SELECT k.last_locked, k.last_locker_details
                    INTO held_since, holder
                    FROM resource_control.throttled_key AS k
                    WHERE k.resource_id = resource AND k.key = wanted
                    FOR NO KEY UPDATE SKIP LOCKED;
                being_taken := NOT FOUND;
            END IF;
        END IF;
        decided_at := clock_timestamp();
        IF NOT being_taken AND has_row AND held_since + span <= decided_at THEN
            UPDATE resource_control.throttled_key AS k
                SET last_locked = decided_at, last_locker_details = details
                WHERE k.resource_id = resource AND k.key = wanted;
            granted := true;
        ELSIF NOT being_taken AND has_row IS NULL THEN
            -- A row that this snapshot does not show is a serialization failure, not a duplicate.
            INSERT INTO resource_control.throttled_key (resource_id, key, last_locked, last_locker_details)
                VALUES (resource, wanted, decided_at, details)
                ON CONFLICT DO NOTHING;
            granted := FOUND;
            being_taken := NOT FOUND;
        END IF;
    END IF;

    IF granted THEN
        held_since := decided_at;
        holder := details;
        next_at := decided_at + span;
    ELSIF being_taken THEN
        held_since := NULL;
        holder := NULL;
        retry_after := span;
        next_at := decided_at + span;
    ELSE
        next_at := held_since + span;
        -- Set to infinity by hand, it is closed until it is set to something else.
        retry_after := CASE WHEN isfinite(next_at) THEN next_at - decided_at ELSE span END;
    END IF;
END
$$;

CREATE FUNCTION resource_control.prune_throttled_keys(batch integer) RETURNS integer
    LANGUAGE plpgsql VOLATILE STRICT
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
AS $$
DECLARE
    pruned integer := 0;
    candidate record;
BEGIN
    FOR candidate IN
        SELECT k.resource_id, k.key
        FROM resource_control.throttled_key AS k
        LEFT JOIN resource_control.throttled_resource AS r USING (resource_id)
        WHERE r.resource_id IS NULL
            OR k.last_locked + resource_control.elapsed(r.throttle_interval) <= clock_timestamp()
    LOOP
        EXIT WHEN pruned >= batch;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(
            resource_control.throttled_key_lock(candidate.resource_id, candidate.key));
        -- Looked up again under the lock: it may have been taken meanwhile.
        DELETE FROM resource_control.throttled_key AS k
            WHERE (k.resource_id, k.key) IN (
                SELECT d.resource_id, d.key
                FROM resource_control.throttled_key AS d
                LEFT JOIN resource_control.throttled_resource AS r USING (resource_id)
                WHERE d.resource_id = candidate.resource_id AND d.key = candidate.key
                    AND (r.resource_id IS NULL
                        OR d.last_locked + resource_control.elapsed(r.throttle_interval)
                            <= clock_timestamp())
                FOR UPDATE OF d SKIP LOCKED);
        IF FOUND THEN
            pruned := pruned + 1;
        END IF;
    END LOOP;
    RETURN pruned;
END
$$;

COMMENT ON TABLE resource_control.throttled_key IS
    'Resources that are handed out at most once per interval and key. A row is made by the first attempt.';
COMMENT ON FUNCTION resource_control.throttled_key_lock(resource_control.throttled_resource_enum, text) IS
    'The advisory lock that an attempt at a key holds until its transaction ends.';
COMMENT ON FUNCTION resource_control.attempt_throttled_key(resource_control.throttled_resource_enum, text, text) IS
    'Hands the resource out for this key if it is due, and answers the decision. Otherwise as attempt_throttled_resource.';
COMMENT ON FUNCTION resource_control.prune_throttled_keys(integer) IS
    'Deletes at most that many keys whose interval has passed, skipping those that are being taken, and answers how many. Each holds an advisory lock until the transaction ends: keep the batch in the hundreds.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000003');
