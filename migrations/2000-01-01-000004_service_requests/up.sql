DO $migration$
DECLARE
    callers_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
BEGIN
-- One session at a time, and only if this migration was not run before, by diesel_cli or by the crate.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000004') THEN
    RETURN;
END IF;
-- With the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE TABLE resource_control.service_request (
    -- The fencing token. The sequence has no cache, because a session would use its cached numbers late, out of order.
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    -- Compared by bytes, because other collations of the argument or a new version of the system's may change what is equal.
    service text COLLATE pg_catalog."C" NOT NULL
        CONSTRAINT services_have_names CHECK (octet_length(service) BETWEEN 1 AND 1000),
    slot smallint NOT NULL CONSTRAINT slots_count_from_zero CHECK (slot >= 0),
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    completed_at timestamptz,
    timed_out_at timestamptz,
    details text NOT NULL DEFAULT ''
)
-- Every request leaves a dead row and dead index entries, so autovacuum runs often, independent of the size of the log.
WITH (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.01,
    autovacuum_analyze_threshold = 1000
);

CREATE UNIQUE INDEX service_request_in_flight ON resource_control.service_request (service, slot)
    WHERE completed_at IS NULL AND timed_out_at IS NULL;

-- The key of the advisory lock that a transaction holds while it claims a slot.
CREATE FUNCTION resource_control.service_request_lock(service text, slot integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $$
    SELECT pg_catalog.hashtextextended(service COLLATE pg_catalog."C", 20000101000004 OPERATOR(pg_catalog.+) slot)
$$;

-- The second step of a claim. Reads all requests in flight, marks those that are overdue, and locks a free slot. Returns a
-- null slot if the semaphore is full. Contended is true if a slot may be free but other claims hold its lock. The calling
-- function sets the planner's settings.
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
    live smallint[];
    overdue smallint[];
    highest smallint;
    -- How many more requests may be in flight.
    missing integer;
    candidate smallint;
    is_overdue boolean;
    is_renewed boolean;
    locked integer := 0;
    waited boolean := false;
    user_lock_timeout text;
BEGIN
    contended := false;
    SELECT COALESCE(array_agg(r.slot) FILTER (WHERE r.expires_at > look.now), '{}'),
            COALESCE(array_agg(r.slot) FILTER (WHERE r.expires_at <= look.now), '{}'),
            min(r.expires_at) FILTER (WHERE r.expires_at > look.now),
            max(r.slot)
        INTO live, overdue, next_expiry, highest
        FROM resource_control.service_request AS r
        WHERE r.service = lock_free_slot.service COLLATE "C" AND r.completed_at IS NULL AND r.timed_out_at IS NULL;
    missing := slots - cardinality(live);
    IF missing < 0 THEN
        -- There were more slots before. As many requests must expire before fewer than N are in flight.
        SELECT d.expires_at INTO next_expiry
            FROM resource_control.service_request AS d
            WHERE d.service = lock_free_slot.service COLLATE "C"
                AND d.completed_at IS NULL AND d.timed_out_at IS NULL AND d.expires_at > look.now
            ORDER BY d.expires_at
            OFFSET - look.missing LIMIT 1;
    END IF;
    IF missing <= 0 THEN
        RETURN;
    END IF;

    IF overdue <> '{}' THEN
        WITH marked AS (
            UPDATE resource_control.service_request AS r
                SET timed_out_at = clock_timestamp()
                -- The array and + 0 prevent a plan that was made for a tiny table and that would read the whole primary
                -- key index of a large one.
                WHERE r.id = ANY (ARRAY (
                    SELECT d.id FROM resource_control.service_request AS d
                        WHERE d.service = lock_free_slot.service COLLATE "C"
                            AND d.completed_at IS NULL AND d.timed_out_at IS NULL
                            AND d.expires_at <= clock_timestamp()
                        ORDER BY d.id + 0
                        -- If there were more slots before, every overdue request counts until it is marked.
                        LIMIT CASE WHEN look.highest < lock_free_slot.slots THEN 1000 ELSE 16000 END
                        FOR NO KEY UPDATE SKIP LOCKED))
                RETURNING r.slot
        )
        SELECT COALESCE(array_agg(o.slot), '{}') INTO overdue
            FROM (SELECT unnest(look.overdue) EXCEPT SELECT m.slot FROM marked AS m) AS o (slot);
    END IF;

    -- In random order, because concurrent claims then seldom try the same slot. Slots of overdue requests that could not be
    -- marked come last. Many slots, because the locks of all but one may be held by claims that are being committed.
    FOR candidate, is_overdue IN
        SELECT f.slot, f.slot IN (SELECT unnest(look.overdue))
            FROM (
                -- If there were more slots before, only the lowest ones, as many as may be claimed, because concurrent
                -- claims then compete for the same slots.
                SELECT g.slot FROM generate_series(0, lock_free_slot.slots - 1) AS g (slot)
                    WHERE g.slot NOT IN (SELECT unnest(look.live))
                    ORDER BY g.slot
                    LIMIT look.missing
            ) AS f
            ORDER BY 2, random()
            LIMIT 1000
    LOOP
        IF is_overdue AND waited THEN
            -- This claim does not wait for a second request.
            CONTINUE WHEN EXISTS (
                SELECT FROM resource_control.service_request AS r
                    WHERE r.service = lock_free_slot.service COLLATE "C" AND r.slot = look.candidate
                        AND r.completed_at IS NULL AND r.timed_out_at IS NULL);
        END IF;
        -- Each lock is held until the transaction ends.
        EXIT WHEN locked = 8;
        IF NOT pg_try_advisory_xact_lock(resource_control.service_request_lock(service, candidate)) THEN
            contended := true;
            CONTINUE;
        END IF;
        locked := locked + 1;
        IF is_overdue THEN
            -- Another claim may have marked the request meanwhile, or have taken the slot. Or the holder renewed the request.
            SELECT r.expires_at > clock_timestamp() INTO is_renewed
                FROM resource_control.service_request AS r
                WHERE r.service = lock_free_slot.service COLLATE "C" AND r.slot = look.candidate
                    AND r.completed_at IS NULL AND r.timed_out_at IS NULL;
            IF FOUND THEN
                CONTINUE WHEN is_renewed OR waited;
                -- Another claim may have locked this row, one that takes another slot and marks this request as well. No other
                -- slot is free, so this claim waits for that commit, once and for a short time.
                waited := true;
                user_lock_timeout := current_setting('lock_timeout');
                BEGIN
                    PERFORM set_config('lock_timeout', '250ms', true);
                    UPDATE resource_control.service_request AS r
                        SET timed_out_at = clock_timestamp()
                        WHERE r.service = lock_free_slot.service COLLATE "C" AND r.slot = look.candidate
                            AND r.completed_at IS NULL AND r.timed_out_at IS NULL
                            AND r.expires_at <= clock_timestamp();
                    PERFORM set_config('lock_timeout', user_lock_timeout, true);
                EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                    CONTINUE;
                END;
                CONTINUE WHEN EXISTS (
                    SELECT FROM resource_control.service_request AS r
                        WHERE r.service = lock_free_slot.service COLLATE "C" AND r.slot = look.candidate
                            AND r.completed_at IS NULL AND r.timed_out_at IS NULL);
            END IF;
        END IF;
        IF slots <= highest THEN
            -- There were more slots before. Even if all slots below this one were taken, there must be room for it. An
            -- overdue request that could not be marked may be about to be renewed, so it counts.
            CONTINUE WHEN slots <= candidate + (
                SELECT count(*) FROM resource_control.service_request AS r
                    WHERE r.service = lock_free_slot.service COLLATE "C" AND r.slot > look.candidate
                        AND r.completed_at IS NULL AND r.timed_out_at IS NULL);
        END IF;
        slot := candidate;
        RETURN;
    END LOOP;
    contended := contended AND NOT waited;
END
$$;

-- Claims a slot, or returns the time at which enough requests have expired for one more.
CREATE FUNCTION resource_control.admit_service_request(
    service text,
    slots integer,
    timeout interval,
    details text,
    OUT id bigint,
    OUT slot smallint,
    OUT created_at timestamptz,
    OUT expires_at timestamptz,
    OUT decided_at timestamptz,
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
                'the timeout must be longer than zero and at most a thousand years']
        WHEN details IS NULL OR octet_length(details) > 8192
            THEN ARRAY['diesel_interlock_bad_details', 'the details must not be null, and have at most 8192 bytes']
    END;
    entries bigint;
    newest bigint[];
    taken smallint[];
    ended smallint[];
    oldest bigint;
    is_lowered boolean;
    candidate smallint;
    violated text;
    contended boolean;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE check_violation USING CONSTRAINT = fault[1], MESSAGE = fault[2];
    END IF;

    -- A claim gets its id while it holds the lock of the slot, and after it has seen the slot free. It holds the lock until
    -- its commit, so each new holder of a slot gets a larger id.

    IF slots > 256 OR current_setting('resource_control.old_snapshot_until', true) <> '' THEN
        IF slots > 256 THEN
            -- To read all requests in flight might take long. A guess is mostly free, and concurrent claims seldom guess the same
            -- slot. This step reads a few slots, and whether any slot from N on is taken.
            SELECT g.slot INTO candidate
                FROM (
                    SELECT trunc(random() * admit_service_request.slots)::smallint AS slot FROM generate_series(1, 4)
                    -- If nearly all slots are taken, a recently used one may have been released.
                    UNION ALL
                    (SELECT n.slot FROM (
                        SELECT l.service, l.slot FROM resource_control.service_request AS l ORDER BY l.id DESC LIMIT 8
                    ) AS n WHERE n.service = admit_service_request.service COLLATE "C" AND n.slot < admit_service_request.slots)
                ) AS g
                WHERE NOT EXISTS (
                        SELECT FROM resource_control.service_request AS r
                            WHERE r.service = admit_service_request.service COLLATE "C"
                                AND r.slot >= admit_service_request.slots
                                AND r.completed_at IS NULL AND r.timed_out_at IS NULL)
                    AND NOT EXISTS (SELECT FROM (
                        SELECT r.slot
                            FROM resource_control.service_request AS r
                            WHERE r.service = admit_service_request.service COLLATE "C"
                                AND r.slot >= g.slot AND r.slot <= g.slot
                                AND r.completed_at IS NULL AND r.timed_out_at IS NULL
                            ORDER BY r.slot DESC
                            LIMIT 1) AS r)
                LIMIT 1;
        ELSIF current_setting('resource_control.old_snapshot_until') COLLATE "C"
            > date_part('epoch', clock_timestamp())::bigint::text
        THEN
            -- The newest requests mostly tell enough. The ids of a slot ascend, so a slot in which one of them has ended is free,
            -- unless another of them is in flight there. The least id keeps this read from those that were pruned.
            SELECT COALESCE(array_agg(n.id) FILTER (WHERE n.in_flight), '{}'),
                    COALESCE(array_agg(n.slot) FILTER (WHERE n.in_flight), '{}'),
                    array_agg(n.slot) FILTER (WHERE NOT n.in_flight),
                    min(n.id),
                    min(n.expires_at) FILTER (WHERE n.in_flight),
                    EXISTS (
                        SELECT FROM resource_control.service_request AS r
                            WHERE r.service = admit_service_request.service COLLATE "C"
                                AND r.slot >= admit_service_request.slots
                                AND r.completed_at IS NULL AND r.timed_out_at IS NULL),
                    clock_timestamp()
                INTO newest, taken, ended, oldest, next_expiry, is_lowered, decided_at
                FROM (
                    SELECT r.id, r.service, r.slot, r.expires_at, COALESCE(r.completed_at, r.timed_out_at) IS NULL AS in_flight
                        FROM resource_control.service_request AS r
                        WHERE r.id > (SELECT max(m.id) FROM resource_control.service_request AS m)
                            - 16 * admit_service_request.slots
                        ORDER BY r.id DESC
                        LIMIT 4 * admit_service_request.slots
                ) AS n
                WHERE n.service = admit_service_request.service COLLATE "C" AND n.slot < admit_service_request.slots;
            -- A random slot, so that no slot gathers the entries of all requests. If the newest requests do not tell whether it
            -- is free, this reads its entries.
            IF slots > cardinality(taken) AND NOT is_lowered THEN
                SELECT g.slot INTO candidate
                    FROM (
                        (SELECT s.slot FROM generate_series(0, admit_service_request.slots - 1) AS s (slot)
                            WHERE s.slot <> ALL (claim.taken)
                            ORDER BY random()
                            LIMIT 4)
                        -- If most slots have been held for long, these are.
                        UNION ALL
                        (SELECT e.slot FROM unnest(claim.ended) AS e (slot)
                            WHERE e.slot <> ALL (claim.taken)
                            ORDER BY random()
                            LIMIT 1)
                    ) AS g
                    WHERE g.slot = ANY (claim.ended) OR NOT EXISTS (
                        SELECT FROM (
                            SELECT FROM resource_control.service_request AS r
                                WHERE r.service = admit_service_request.service COLLATE "C"
                                    AND r.slot >= g.slot AND r.slot <= g.slot
                                    AND r.completed_at IS NULL AND r.timed_out_at IS NULL
                                -- The last index entry of a slot is nearly always the one in flight. (With = the order is lost.)
                                ORDER BY r.slot DESC
                                LIMIT 1
                        ) AS r)
                    LIMIT 1;
            END IF;
            IF candidate IS NULL AND (is_lowered OR slots > cardinality(taken)) THEN
                -- Slot by slot, except for those that the newest requests still hold.
                WITH held AS MATERIALIZED (
                    SELECT r.slot, r.expires_at FROM resource_control.service_request AS r
                        WHERE r.id = ANY (claim.newest) AND COALESCE(r.completed_at, r.timed_out_at) IS NULL
                )
                SELECT COALESCE(array_agg(s.slot), '{}'), min(s.expires_at), clock_timestamp()
                    INTO taken, next_expiry, decided_at
                    FROM (
                        SELECT h.slot, h.expires_at FROM held AS h
                        UNION ALL
                        SELECT n.slot, n.expires_at
                            FROM generate_series(0, admit_service_request.slots - 1) AS g (slot)
                            CROSS JOIN LATERAL (
                                SELECT r.slot, r.expires_at
                                    FROM resource_control.service_request AS r
                                    WHERE r.service = admit_service_request.service COLLATE "C"
                                        AND r.slot >= g.slot AND r.slot <= g.slot
                                        AND r.completed_at IS NULL AND r.timed_out_at IS NULL
                                    ORDER BY r.slot DESC
                                    LIMIT 1
                            ) AS n
                            WHERE g.slot NOT IN (SELECT h.slot FROM held AS h)
                        UNION ALL
                        SELECT r.slot, r.expires_at FROM resource_control.service_request AS r
                            WHERE r.service = admit_service_request.service COLLATE "C"
                                AND r.slot >= admit_service_request.slots
                                AND r.completed_at IS NULL AND r.timed_out_at IS NULL
                    ) AS s;
            END IF;
        END IF;
        IF NOT pg_try_advisory_xact_lock(resource_control.service_request_lock(service, candidate)) THEN
            candidate := NULL;
        ELSIF candidate = ANY (ended) THEN
            -- As the INSERT below, but PostgreSQL reads the entries of the slot once and not three times. The newest requests tell
            -- whether the slot is free, because a request in flight there is newer than the one that has ended.
            BEGIN
                INSERT INTO resource_control.service_request AS r (service, slot, created_at, expires_at, details)
                    SELECT admit_service_request.service, claim.candidate, c.now,
                            c.now + resource_control.elapsed(admit_service_request.timeout), admit_service_request.details
                        FROM (SELECT clock_timestamp() AS now) AS c
                        WHERE NOT EXISTS (
                            SELECT FROM (
                                SELECT d.service, d.slot, COALESCE(d.completed_at, d.timed_out_at) IS NULL AS in_flight
                                    FROM resource_control.service_request AS d WHERE d.id > claim.oldest ORDER BY d.id OFFSET 0
                            ) AS n
                            WHERE n.service = admit_service_request.service COLLATE "C" AND n.slot = claim.candidate
                                AND n.in_flight)
                    RETURNING r.id, r.slot, r.created_at, r.expires_at
                    INTO id, slot, created_at, expires_at;
                IF NOT FOUND THEN
                    candidate := NULL;
                END IF;
            EXCEPTION WHEN unique_violation THEN
                GET STACKED DIAGNOSTICS violated = CONSTRAINT_NAME;
                IF violated <> 'service_request_in_flight' THEN
                    RAISE;
                END IF;
                -- The INSERT below finds out whether this is a serialization failure.
            END;
        END IF;
        IF id IS NOT NULL THEN
            decided_at := clock_timestamp();
            RETURN;
        END IF;
    END IF;
    IF candidate IS NULL AND taken IS NULL THEN
        -- If the semaphore is full, this read decides it, without a lock or a transaction id. The clock is read after the
        -- requests.
        SELECT COALESCE(array_agg(r.slot), '{}'), min(r.expires_at), clock_timestamp()
            INTO taken, next_expiry, decided_at
            FROM resource_control.service_request AS r
            WHERE r.service = admit_service_request.service COLLATE "C"
                AND r.completed_at IS NULL AND r.timed_out_at IS NULL;
        -- Every expression here makes a refusal slower, so the entries are counted only if the read took long.
        IF decided_at > statement_timestamp() + '200 microseconds' AND slots <= 256 THEN
            entries := pg_stat_get_xact_tuples_returned('resource_control.service_request_in_flight'::regclass);
            PERFORM FROM resource_control.service_request AS r
                WHERE r.service = admit_service_request.service COLLATE "C"
                    AND r.completed_at IS NULL AND r.timed_out_at IS NULL;
            IF 1000 + 8 * slots
                < pg_stat_get_xact_tuples_returned('resource_control.service_request_in_flight'::regclass) - entries
            THEN
                -- Seconds as text, because a user may set any value, and texts can always be compared.
                PERFORM set_config('resource_control.old_snapshot_until',
                    (date_part('epoch', decided_at)::bigint + 10)::text, false);
            END IF;
        END IF;
    END IF;
    IF slots = cardinality(taken) AND next_expiry > decided_at THEN
        -- A stricter transaction may not see that a slot was freed. The level is checked here, because the call costs
        -- more.
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            PERFORM resource_control.require_read_committed();
        END IF;
        RETURN;
    END IF;
    IF candidate IS NULL AND slots > cardinality(taken) AND slots > ALL (taken) THEN
        FOR attempt IN 1 .. 8 LOOP
            candidate := trunc(random() * slots);
            EXIT WHEN CASE WHEN candidate <> ALL (taken)
                THEN pg_try_advisory_xact_lock(resource_control.service_request_lock(service, candidate)) END;
            candidate := NULL;
        END LOOP;
        IF candidate IS NULL THEN
            SELECT g.slot INTO candidate
                FROM generate_series(0, admit_service_request.slots - 1) AS g (slot)
                WHERE g.slot NOT IN (SELECT unnest(claim.taken))
                ORDER BY random()
                LIMIT 1;
            IF NOT pg_try_advisory_xact_lock(resource_control.service_request_lock(service, candidate)) THEN
                candidate := NULL;
            END IF;
        END IF;
    END IF;
    FOR attempt IN 1 .. 5 LOOP
        -- The second step searches for a slot.
        IF candidate IS NULL THEN
            SELECT f.slot, f.next_expiry, f.contended INTO candidate, next_expiry, contended
                FROM resource_control.lock_free_slot(
                    admit_service_request.service, admit_service_request.slots) AS f;
            EXIT WHEN candidate IS NULL AND NOT contended;
            IF candidate IS NULL THEN
                -- One claim may hold the locks of several slots, and will soon leave all but one of them free.
                PERFORM pg_sleep(0.001);
                CONTINUE;
            END IF;
        END IF;
        -- The clock is read in the same statement that sees the slot free, so after the end of the previous request. The
        -- statement may have waited for a lock of the table.
        INSERT INTO resource_control.service_request AS r (service, slot, created_at, expires_at, details)
            SELECT admit_service_request.service, claim.candidate, c.now,
                    c.now + resource_control.elapsed(admit_service_request.timeout), admit_service_request.details
                FROM (SELECT clock_timestamp() AS now) AS c
                WHERE NOT EXISTS (
                    SELECT FROM resource_control.service_request AS d
                        WHERE d.service = admit_service_request.service COLLATE "C" AND d.slot = claim.candidate
                            AND d.completed_at IS NULL AND d.timed_out_at IS NULL)
            -- A conflict with a row that this snapshot does not show is a serialization failure, not a duplicate. An id that
            -- exists already is an error.
            ON CONFLICT (service, slot) WHERE completed_at IS NULL AND timed_out_at IS NULL DO NOTHING
            RETURNING r.id, r.slot, r.created_at, r.expires_at
            INTO id, slot, created_at, expires_at;
        EXIT WHEN FOUND;
        candidate := NULL;
    END LOOP;
    decided_at := clock_timestamp();
    IF id IS NULL THEN
        PERFORM resource_control.require_read_committed();
    END IF;
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
    admitted bigint;
    violated text;
BEGIN
    BEGIN
        admitted := (resource_control.admit_service_request(
            claim_service_request.service,
            claim_service_request.slots,
            claim_service_request.timeout,
            claim_service_request.details)).id;
    EXCEPTION WHEN unique_violation THEN
        GET STACKED DIAGNOSTICS violated = CONSTRAINT_NAME;
        IF violated <> 'service_request_pkey' THEN
            RAISE;
        END IF;
        RAISE unique_violation USING
            CONSTRAINT = violated,
            MESSAGE = 'cannot number a request: the sequence of resource_control.service_request is behind the ids of the table, as in a copy that left it out',
            HINT = 'SELECT setval(''resource_control.service_request_id_seq'', (SELECT max(id) FROM resource_control.service_request))';
    END;
    -- All columns, including those that later migrations add.
    RETURN QUERY SELECT r.* FROM resource_control.service_request AS r WHERE r.id = claim.admitted;
END
$$;

-- This function sets no search path, because that would cost as much as everything here except the UPDATE. So each
-- operator is qualified.
CREATE FUNCTION resource_control.complete_service_request(id bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE STRICT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
BEGIN
    -- COALESCE keeps the planner from the index of requests in flight. That index looks cheap because it is small, but a
    -- search for an id reads all of it, with the entries of ended requests.
    -- The loop runs twice, because a request may look overdue while another transaction renews it. The second UPDATE waits
    -- for that transaction, and the next round finds the request renewed.
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
    IF NOT EXISTS (
        SELECT FROM resource_control.service_request AS r WHERE r.id OPERATOR(pg_catalog.=) complete_service_request.id)
    THEN
        PERFORM resource_control.require_read_committed();
    END IF;
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
            MESSAGE = 'the timeout must be longer than zero and at most a thousand years';
    END IF;
    UPDATE resource_control.service_request AS r
        SET expires_at = GREATEST(
            r.expires_at, clock_timestamp() + resource_control.elapsed(renew_service_request.timeout))
        WHERE r.id = renew_service_request.id AND COALESCE(r.completed_at, r.timed_out_at) IS NULL
            AND r.expires_at > clock_timestamp()
        RETURNING r.expires_at INTO renewed;
    IF renewed IS NULL AND NOT EXISTS (
        SELECT FROM resource_control.service_request AS r WHERE r.id = renew_service_request.id)
    THEN
        PERFORM resource_control.require_read_committed();
    END IF;
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
    -- From the oldest id on, until the requests are too young. The rest of the log is not read.
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
    -- Otherwise an overdue request stays unmarked until a claim needs its slot.
    UPDATE resource_control.service_request AS r
        SET timed_out_at = clock_timestamp()
        WHERE r.id = ANY (ARRAY (
            SELECT d.id FROM resource_control.service_request AS d
                WHERE d.completed_at IS NULL AND d.timed_out_at IS NULL AND d.expires_at <= prune.now
                ORDER BY d.id + 0
                LIMIT prune_service_requests.batch
                FOR NO KEY UPDATE SKIP LOCKED));
    RETURN pruned;
END
$$;

COMMENT ON TABLE resource_control.service_request IS
    'Requests to services that take a limited number at a time: the requests in flight, and the log of ended requests.';
COMMENT ON COLUMN resource_control.service_request.expires_at IS
    'From this time on the request no longer counts as in flight, even if it is not marked.';
COMMENT ON COLUMN resource_control.service_request.timed_out_at IS
    'When the request was found to have expired: by a claim that found no other slot free, by its own late completion, or by pruning.';
COMMENT ON FUNCTION resource_control.service_request_lock(text, integer) IS
    'The advisory lock that a claim of this slot holds until its transaction ends.';
COMMENT ON FUNCTION resource_control.lock_free_slot(text, integer) IS
    'Part of admit_service_request: marks the overdue requests of the service, and locks a free slot.';
COMMENT ON FUNCTION resource_control.admit_service_request(text, integer, interval, text) IS
    'As claim_service_request, but always returns one row: the claim, or the time at which enough requests have expired for one more.';
COMMENT ON FUNCTION resource_control.claim_service_request(text, integer, interval, text) IS
    'Claims one of the slots of the service, 0 to slots - 1, and returns the new row, or no row if all slots are taken. Commit at once, because until then no other claim can use the slot, even after its timeout. Call it at READ COMMITTED, because at a stricter level it may fail with a serialization failure and must be retried.';
COMMENT ON FUNCTION resource_control.complete_service_request(bigint) IS
    'Ends the request and frees its slot. Returns false if the request had ended or timed out before. Changes no other request. Fails with a serialization failure in a transaction stricter than READ COMMITTED that cannot see the request.';
COMMENT ON FUNCTION resource_control.renew_service_request(bigint, interval) IS
    'Extends the request to the given timeout from now, and returns when it expires. Never shortens it. Returns null if the request had ended or timed out before. Fails with a serialization failure in a transaction stricter than READ COMMITTED that cannot see the request.';
COMMENT ON FUNCTION resource_control.prune_service_requests(interval, integer) IS
    'Deletes at most batch requests that ended or expired longer ago than older_than, and returns how many. Also marks at most batch overdue requests. Call it at READ COMMITTED, because at a stricter level it may fail with a serialization failure and must be retried.';

PERFORM pg_catalog.set_config('search_path', callers_path, true);
INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000004');
END
$migration$;
