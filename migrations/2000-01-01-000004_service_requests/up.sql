DO $migration$
BEGIN
-- One at a time, and only where it was not run, by whichever means.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000004') THEN
    RETURN;
END IF;

CREATE TABLE resource_control.service_request (
    -- The fencing token. Numbers set aside for a session would be handed out late: no cache.
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    service text NOT NULL
        CONSTRAINT services_have_names CHECK (octet_length(service) BETWEEN 1 AND 1000),
    slot smallint NOT NULL CONSTRAINT slots_count_from_zero CHECK (slot >= 0),
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    completed_at timestamptz,
    timed_out_at timestamptz,
    details text NOT NULL DEFAULT ''
)
-- Every request leaves a dead row and index entries behind: clean up often, however long the log.
WITH (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.01,
    autovacuum_analyze_threshold = 1000
);

CREATE UNIQUE INDEX service_request_in_flight ON resource_control.service_request (service, slot)
    WHERE completed_at IS NULL AND timed_out_at IS NULL;

-- What stands for a slot while it is being claimed: an advisory lock of the transaction.
CREATE FUNCTION resource_control.service_request_lock(service text, slot integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $$
    SELECT pg_catalog.hashtextextended(service, 20000101000004 OPERATOR(pg_catalog.+) slot)
$$;

-- Finds a free slot and holds its lock, or answers none if all are in flight; marks what is overdue. Contended is where
-- a slot is free, and others are at it. The planner's settings are those of the function that calls it.
CREATE FUNCTION resource_control.lock_free_slot(
    service text,
    slots integer,
    OUT slot smallint,
    OUT next_expiry timestamptz,
    OUT contended boolean
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
<<look>>
DECLARE
    now CONSTANT timestamptz := clock_timestamp();
    -- In ascending order.
    live smallint[];
    overdue smallint[];
    lowered boolean;
    free integer;
    first integer;
    nth integer;
    candidate smallint;
    following smallint;
    waited boolean := false;
    user_lock_timeout text;
BEGIN
    contended := false;
    SELECT COALESCE(array_agg(r.slot) FILTER (WHERE r.expires_at > look.now), '{}'),
            COALESCE(array_agg(r.slot) FILTER (WHERE r.expires_at <= look.now), '{}'),
            min(r.expires_at) FILTER (WHERE r.expires_at > look.now)
        INTO live, overdue, next_expiry
        FROM (
            SELECT d.slot, d.expires_at
                FROM resource_control.service_request AS d
                WHERE d.service = lock_free_slot.service AND d.completed_at IS NULL AND d.timed_out_at IS NULL
                ORDER BY d.service, d.slot
        ) AS r;
    free := slots - cardinality(live);
    IF free <= 0 THEN
        RETURN;
    END IF;
    -- Some were claimed when there were more slots. Only as many of the lowest free slots may be
    -- claimed as requests are missing: who decides this at the same time decides on the same slots.
    lowered := slots <= GREATEST(live[cardinality(live)], overdue[cardinality(overdue)]);

    -- From anywhere, so that those who look at the same time seldom meet.
    first := trunc(random() * free);
    FOR step IN 0 .. CASE WHEN overdue = '{}' THEN free ELSE 2 * free END - 1 LOOP
        -- The n-th slot that is not held: as many higher as held ones are below it. One that nobody has
        -- comes before one that its holder has overstayed.
        nth := (first + step) % free;
        candidate := nth;
        LOOP
            following := nth + width_bucket(candidate, live);
            EXIT WHEN following = candidate;
            candidate := following;
        END LOOP;
        CONTINUE WHEN (step < free)
            = COALESCE(overdue[width_bucket(candidate, overdue)] = candidate, false);

        IF NOT pg_try_advisory_xact_lock(resource_control.service_request_lock(service, candidate)) THEN
            contended := true;
            CONTINUE;
        END IF;

        IF step >= free AND NOT waited THEN
            -- Another claim may be at it, one that takes another slot and marks this one as well.
            -- Nothing else is free, so its commit is waited for, once and if it comes soon.
            waited := true;
            user_lock_timeout := current_setting('lock_timeout');
            BEGIN
                PERFORM set_config('lock_timeout', '250ms', true);
                UPDATE resource_control.service_request AS r
                    SET timed_out_at = clock_timestamp()
                    WHERE r.service = lock_free_slot.service AND r.slot = look.candidate
                        AND r.completed_at IS NULL AND r.timed_out_at IS NULL
                        AND r.expires_at <= clock_timestamp();
                PERFORM set_config('lock_timeout', user_lock_timeout, true);
            EXCEPTION WHEN lock_not_available THEN
                CONTINUE;
            END;
        END IF;
        IF overdue <> '{}' THEN
            UPDATE resource_control.service_request AS r
                SET timed_out_at = clock_timestamp()
                -- An array and + 0, or a plan that is made for a tiny table would follow the index of
                -- the ids through all of a large one.
                WHERE r.id = ANY (ARRAY (
                    SELECT d.id FROM resource_control.service_request AS d
                        WHERE d.service = lock_free_slot.service
                            AND d.completed_at IS NULL AND d.timed_out_at IS NULL
                            AND d.expires_at <= clock_timestamp()
                        ORDER BY d.id + 0
                        FOR NO KEY UPDATE SKIP LOCKED));
        END IF;
        IF lowered THEN
            -- What could not be marked may be being renewed, and counts.
            CONTINUE WHEN slots <= candidate + (
                SELECT count(*) FROM resource_control.service_request AS r
                    WHERE r.service = lock_free_slot.service AND r.slot > look.candidate
                        AND r.completed_at IS NULL AND r.timed_out_at IS NULL);
        END IF;
        -- Somebody has taken it meanwhile, or its row is locked and could not be marked.
        CONTINUE WHEN EXISTS (
            SELECT FROM resource_control.service_request AS r
                WHERE r.service = lock_free_slot.service AND r.slot = look.candidate
                    AND r.completed_at IS NULL AND r.timed_out_at IS NULL);
        slot := candidate;
        RETURN;
    END LOOP;
    contended := contended AND NOT waited;
END
$$;

-- Claims a slot, or answers when the first of those in flight expires.
CREATE FUNCTION resource_control.admit_service_request(
    service text,
    slots integer,
    timeout interval,
    details text,
    OUT id bigint,
    OUT slot smallint,
    OUT created_at timestamptz,
    OUT expires_at timestamptz,
    OUT answered_at timestamptz,
    OUT next_expiry timestamptz
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
<<claim>>
DECLARE
    fault CONSTANT text[] := CASE
        WHEN service IS NULL OR octet_length(service) NOT BETWEEN 1 AND 1000
            THEN ARRAY['diesel_interlock_bad_service', 'the name of a service must have 1 to 1000 bytes']
        WHEN slots IS NULL OR slots NOT BETWEEN 1 AND 32767
            THEN ARRAY['diesel_interlock_bad_slots', 'the number of slots must be 1 to 32767']
        WHEN timeout IS NULL OR timeout <= '0' OR timeout > '1000 years'
            THEN ARRAY['diesel_interlock_bad_timeout',
                'the time-out must be longer than zero and at most a thousand years']
        WHEN details IS NULL OR octet_length(details) > 8192
            THEN ARRAY['diesel_interlock_bad_details', 'the details must not be null, and have at most 8192 bytes']
    END;
    taken smallint[];
    simple boolean;
    candidate smallint;
    contended boolean;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE check_violation USING CONSTRAINT = fault[1], MESSAGE = fault[2];
    END IF;

    -- A full semaphore answers from this read: no lock, no transaction id. The clock is read after the requests.
    -- Simple is: nobody is overdue, all slots are below N, and one of them is free.
    SELECT COALESCE(array_agg(r.slot), '{}'), min(r.expires_at), clock_timestamp(),
            (min(r.expires_at) <= clock_timestamp()
                OR admit_service_request.slots <= ANY (array_agg(r.slot))
                OR admit_service_request.slots <= cardinality(array_agg(r.slot))) IS NOT TRUE
        INTO taken, next_expiry, answered_at, simple
        FROM resource_control.service_request AS r
        WHERE r.service = admit_service_request.service AND r.completed_at IS NULL AND r.timed_out_at IS NULL;
    IF NOT simple AND slots <= cardinality(taken) AND next_expiry > answered_at THEN
        RETURN;
    END IF;

    FOR attempt IN CASE WHEN simple THEN 1 ELSE 9 END .. 10 LOOP
        -- Whoever draws an id for a slot holds its lock until the commit, and sees the slot free
        -- after that: so the ids of a slot ascend from each holder to the next.
        IF attempt <= 8 THEN
            -- A few guesses mostly find a free slot, and those who claim at the same time seldom meet.
            candidate := trunc(random() * slots);
            CONTINUE WHEN candidate = ANY (taken)
                OR NOT pg_try_advisory_xact_lock(resource_control.service_request_lock(service, candidate));
        ELSE
            SELECT f.slot, f.next_expiry, f.contended INTO candidate, next_expiry, contended
                FROM resource_control.lock_free_slot(
                    admit_service_request.service, admit_service_request.slots) AS f;
            EXIT WHEN candidate IS NULL AND NOT contended;
            CONTINUE WHEN candidate IS NULL;
        END IF;

        -- The clock is read in the snapshot that shows the slot free, after the end of who had it: the
        -- statement may have waited for somebody who locked the table.
        INSERT INTO resource_control.service_request AS r (service, slot, created_at, expires_at, details)
            SELECT admit_service_request.service, claim.candidate, c.now,
                    c.now + resource_control.elapsed(admit_service_request.timeout), admit_service_request.details
                FROM (SELECT clock_timestamp() AS now) AS c
                WHERE NOT EXISTS (
                    SELECT FROM resource_control.service_request AS d
                        WHERE d.service = admit_service_request.service AND d.slot = claim.candidate
                            AND d.completed_at IS NULL AND d.timed_out_at IS NULL)
            -- A row that this snapshot does not show is a serialization failure, not a duplicate.
            ON CONFLICT DO NOTHING
            RETURNING r.id, r.slot, r.created_at, r.expires_at
            INTO id, slot, created_at, expires_at;
        EXIT WHEN FOUND;
    END LOOP;
    answered_at := clock_timestamp();
END
$$;

CREATE FUNCTION resource_control.claim_service_request(
    service text,
    slots integer,
    timeout interval,
    details text DEFAULT ''
) RETURNS SETOF resource_control.service_request
    LANGUAGE plpgsql VOLATILE ROWS 1
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
<<claim>>
DECLARE
    admitted CONSTANT bigint := (resource_control.admit_service_request(
        claim_service_request.service,
        claim_service_request.slots,
        claim_service_request.timeout,
        claim_service_request.details)).id;
BEGIN
    -- With whatever columns the table has by then.
    RETURN QUERY SELECT r.* FROM resource_control.service_request AS r WHERE r.id = claim.admitted;
END
$$;

-- Short enough to do without a search path of its own, which would cost as much as all else beside the UPDATE: each
-- operator is qualified.
CREATE FUNCTION resource_control.complete_service_request(id bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE STRICT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
BEGIN
    -- COALESCE hides the condition of the index of those in flight, which is small and looks cheap, but is read
    -- to its end for an id, past all that it has kept of requests that are over.
    -- Twice, since it may look overdue while another transaction renews it: the second statement waits
    -- for that, and finds it renewed.
    FOR attempt IN 1 .. 2 LOOP
        UPDATE resource_control.service_request AS r
            SET completed_at = pg_catalog.clock_timestamp()
            WHERE r.id OPERATOR(pg_catalog.=) complete_service_request.id
                AND COALESCE(r.completed_at, r.timed_out_at) IS NULL AND r.expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp();
        IF FOUND THEN
            RETURN true;
        END IF;
        UPDATE resource_control.service_request AS r
            SET timed_out_at = pg_catalog.clock_timestamp()
            WHERE r.id OPERATOR(pg_catalog.=) complete_service_request.id
                AND COALESCE(r.completed_at, r.timed_out_at) IS NULL AND r.expires_at OPERATOR(pg_catalog.<=) pg_catalog.clock_timestamp();
        EXIT WHEN FOUND;
    END LOOP;
    RETURN false;
END
$$;

CREATE FUNCTION resource_control.renew_service_request(id bigint, timeout interval) RETURNS timestamptz
    LANGUAGE plpgsql VOLATILE STRICT
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    renewed timestamptz;
BEGIN
    IF timeout <= '0' OR timeout > '1000 years' THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_timeout',
            MESSAGE = 'the time-out must be longer than zero and at most a thousand years';
    END IF;
    UPDATE resource_control.service_request AS r
        SET expires_at = GREATEST(
            r.expires_at, clock_timestamp() + resource_control.elapsed(renew_service_request.timeout))
        WHERE r.id = renew_service_request.id AND COALESCE(r.completed_at, r.timed_out_at) IS NULL
            AND r.expires_at > clock_timestamp()
        RETURNING r.expires_at INTO renewed;
    RETURN renewed;
END
$$;

CREATE FUNCTION resource_control.prune_service_requests(older_than interval, batch integer) RETURNS integer
    LANGUAGE plpgsql VOLATILE STRICT
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
<<prune>>
DECLARE
    now CONSTANT timestamptz := clock_timestamp();
    before timestamptz;
    pruned integer := 0;
    deleted integer;
    last bigint := int8(-9223372036854775808);
    old bigint[];
    young boolean;
BEGIN
    IF older_than < '0' OR batch < 1 THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_pruning',
            MESSAGE = 'the age must not be negative, and the batch at least 1';
    END IF;
    before := now - resource_control.elapsed(older_than);
    -- From the oldest id on, until the requests are too young: the log behind them is not read.
    WHILE pruned < batch LOOP
        SELECT max(r.id),
                array_agg(r.id) FILTER (WHERE
                    COALESCE(GREATEST(r.completed_at, r.timed_out_at), r.expires_at) < prune.before),
                bool_or(r.created_at >= prune.before AND r.created_at <= prune.now)
            INTO last, old, young
            FROM (
                SELECT d.* FROM resource_control.service_request AS d
                    WHERE d.id > prune.last
                    ORDER BY d.id
                    LIMIT LEAST(prune_service_requests.batch - prune.pruned, 1000)
            ) AS r;
        EXIT WHEN last IS NULL;
        DELETE FROM resource_control.service_request AS r
            WHERE r.id = ANY (ARRAY (
                SELECT d.id FROM resource_control.service_request AS d
                    WHERE d.id = ANY (prune.old)
                        AND COALESCE(GREATEST(d.completed_at, d.timed_out_at), d.expires_at) < prune.before
                    ORDER BY d.id
                    FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS deleted = ROW_COUNT;
        pruned := pruned + deleted;
        EXIT WHEN young;
    END LOOP;
    RETURN pruned;
END
$$;

COMMENT ON TABLE resource_control.service_request IS
    'Requests to services that take only so many at a time: those in flight, and the log of those that ended.';
COMMENT ON COLUMN resource_control.service_request.expires_at IS
    'From then on it no longer counts as in flight, marked or not.';
COMMENT ON COLUMN resource_control.service_request.timed_out_at IS
    'When it was found to have expired: by the next claim, or by its own late completion.';
COMMENT ON FUNCTION resource_control.service_request_lock(text, integer) IS
    'The advisory lock that a claim of this slot holds until its transaction ends.';
COMMENT ON FUNCTION resource_control.lock_free_slot(text, integer) IS
    'A part of claim_service_request: locks a free slot, and marks the overdue requests of the service.';
COMMENT ON FUNCTION resource_control.admit_service_request(text, integer, interval, text) IS
    'As claim_service_request, always in one row: the claim, or when the first of the requests in flight expires.';
COMMENT ON FUNCTION resource_control.claim_service_request(text, integer, interval, text) IS
    'Claims one of the slots of the service, 0 to slots - 1, and answers the new row; none if all are in flight. Commit at once: until then the slot is kept from everyone. Call it at READ COMMITTED: at a stricter level it may fail with a serialization failure, and is to be repeated.';
COMMENT ON FUNCTION resource_control.complete_service_request(bigint) IS
    'Ends the request and frees its slot; false if it had ended or timed out before. Changes no other request.';
COMMENT ON FUNCTION resource_control.renew_service_request(bigint, interval) IS
    'Lets the request expire that long from now, never sooner than before, and answers when; null if it had ended or timed out before.';
COMMENT ON FUNCTION resource_control.prune_service_requests(interval, integer) IS
    'Deletes at most that many requests that ended, or expired, longer ago than that, and answers how many.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000004');
END
$migration$;
