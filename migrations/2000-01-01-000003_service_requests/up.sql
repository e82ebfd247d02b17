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
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000003') THEN
    RETURN;
END IF;
-- Under the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

-- Other clients insert requests, too, so their values must be checked. Domains do this more cheaply than check constraints: a
-- session compiles the rules of a domain once, but the check constraints of a table for each statement, even for one that
-- changes none of the columns.
IF to_regtype('resource_control.service_name') IS NULL THEN
    CREATE DOMAIN resource_control.service_name AS text COLLATE pg_catalog."C"
        CONSTRAINT services_have_names CHECK (octet_length(VALUE) BETWEEN 1 AND 1000);
END IF;
IF to_regtype('resource_control.slot_number') IS NULL THEN
    CREATE DOMAIN resource_control.slot_number AS smallint CONSTRAINT slots_count_from_zero CHECK (VALUE >= 0);
END IF;
IF to_regtype('resource_control.request_expiry') IS NULL THEN
    CREATE DOMAIN resource_control.request_expiry AS timestamptz CONSTRAINT requests_expire CHECK (isfinite(VALUE));
END IF;

-- If somebody has run DROP DOMAIN … CASCADE, a column is gone, and the log is useless without it.
IF to_regclass('resource_control.service_request') IS NOT NULL AND 3 > (
    SELECT count(*) FROM pg_attribute
        WHERE attrelid = to_regclass('resource_control.service_request') AND attname IN ('service', 'slot', 'expires_at')
            AND NOT attisdropped)
THEN
    DROP TABLE resource_control.service_request;
END IF;

CREATE TABLE IF NOT EXISTS resource_control.service_request (
    -- The fencing token. CACHE 1, because a session would hand out cached numbers late, and so out of order.
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    service resource_control.service_name NOT NULL,
    slot resource_control.slot_number NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The default is for clients that insert their own rows and do not know this column.
    expires_at resource_control.request_expiry NOT NULL DEFAULT clock_timestamp() + '90 seconds',
    completed_at timestamptz,
    timed_out_at timestamptz,
    details text NOT NULL DEFAULT '',
    -- A random number of the claim, by which its holder recognizes the row. Null for clients that send none.
    claim bigint
-- Every request leaves a dead row and dead index entries, so autovacuum should run often, even if the log is long.
) WITH (
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.01, autovacuum_analyze_threshold = 1000
);

CREATE UNIQUE INDEX IF NOT EXISTS service_request_in_flight ON resource_control.service_request (service, slot)
    WHERE completed_at IS NULL AND timed_out_at IS NULL;

-- Never waits for another claim: it only tries advisory locks, skips locked rows, and inserts into a slot only while it holds
-- the slot's lock.
CREATE OR REPLACE FUNCTION resource_control.claim_service_request(
    service text,
    slots integer,
    timeout interval,
    details text DEFAULT '',
    claim bigint DEFAULT NULL,
    OUT id bigint,
    OUT slot smallint,
    OUT created_at timestamptz,
    OUT expires_at timestamptz,
    OUT retry_after interval
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    -- Without these settings, a session would keep plans that it made for an empty table while the table grows.
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
<<this>>
DECLARE
    taken smallint[];
    next_expiry timestamptz;
    now timestamptz;
    is_lowered boolean;
    live bigint;
    free smallint[];
    choices integer;
    first integer;
    tries integer;
    candidate smallint;
BEGIN
    IF (octet_length(service) BETWEEN 1 AND 1000 AND slots BETWEEN 1 AND 1000 AND details IS NOT NULL
        AND timeout > '0' AND timeout <= '1000 years') IS NOT TRUE
    THEN
        RAISE check_violation USING CONSTRAINT = 'diesel_interlock_bad_claim',
            MESSAGE = 'claim with a service of 1 to 1000 bytes, 1 to 1000 slots, a timeout above zero and up to 1000 years, and details';
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE check_violation USING CONSTRAINT = 'diesel_interlock_isolation',
            MESSAGE = 'claim at READ COMMITTED, because an older snapshot does not show what others have claimed';
    END IF;
    FOR attempt IN 1 .. 3 LOOP
        -- If the semaphore is full, this read alone decides, without a lock and without a transaction id.
        SELECT COALESCE(array_agg(r.slot::smallint), '{}'), min(r.expires_at), clock_timestamp(), COALESCE(max(r.slot) >= slots, false)
            INTO taken, next_expiry, now, is_lowered
            FROM resource_control.service_request AS r
            WHERE r.service = claim_service_request.service COLLATE "C" AND r.completed_at IS NULL AND r.timed_out_at IS NULL;
        IF cardinality(taken) >= slots AND next_expiry > now THEN
            retry_after := next_expiry - now;
            RETURN;
        END IF;
        IF next_expiry <= now THEN
            -- An expired request keeps its slot until it is marked as timed out. A locked one is skipped, because another
            -- transaction is ending, renewing or marking it.
            UPDATE resource_control.service_request AS r SET timed_out_at = clock_timestamp()
                WHERE r.id = ANY (ARRAY (
                    SELECT d.id FROM resource_control.service_request AS d
                        WHERE d.service = claim_service_request.service COLLATE "C"
                            AND d.completed_at IS NULL AND d.timed_out_at IS NULL AND d.expires_at <= clock_timestamp()
                        FOR NO KEY UPDATE SKIP LOCKED));
            CONTINUE WHEN FOUND;
        END IF;
        IF is_lowered THEN
            -- N was lowered, so a free slot alone does not prove that fewer than N requests are in flight. Until no slot from N
            -- on is in flight, only one claim at a time counts the requests, and the others are refused until that claim
            -- commits.
            EXIT WHEN NOT pg_try_advisory_xact_lock(hashtextextended(service COLLATE "C", 20000101000003));
            SELECT count(*) INTO live
                FROM resource_control.service_request AS r
                WHERE r.service = claim_service_request.service COLLATE "C" AND r.completed_at IS NULL AND r.timed_out_at IS NULL;
            EXIT WHEN live >= slots;
        END IF;
        -- The commit must wait for the disk: if a crash of the server forgot a permit, the slot would get a second holder.
        IF current_setting('synchronous_commit') IN ('off', 'local') THEN
            PERFORM set_config('synchronous_commit', 'on', true);
        END IF;
        -- Start at a random slot, so that concurrent claims seldom try the same one. If most slots are taken, one query finds
        -- the free ones, and otherwise no query is needed.
        free := NULL;
        IF 4 * cardinality(taken) > 3 * slots THEN
            free := ARRAY (SELECT g.slot FROM generate_series(0, slots - 1) AS g (slot) WHERE g.slot NOT IN (SELECT unnest(taken)));
        END IF;
        choices := COALESCE(cardinality(free), slots);
        first := floor(random() * choices);
        tries := 0;
        FOR i IN first .. first + choices - 1 LOOP
            candidate := i % choices;
            IF free IS NULL THEN
                CONTINUE WHEN candidate = ANY (taken);
            ELSE
                candidate := free[1 + candidate];
            END IF;
            EXIT WHEN tries = 16;
            tries := tries + 1;
            -- A claim draws its id after it has seen the slot free, and while it holds the slot's lock, which it keeps until
            -- its commit. So the ids of a slot ascend.
            CONTINUE WHEN NOT pg_try_advisory_xact_lock(hashtextextended(service COLLATE "C", 20000101000004 + candidate));
            INSERT INTO resource_control.service_request AS r (id, service, slot, created_at, expires_at, details, claim)
                OVERRIDING SYSTEM VALUE
                SELECT resource_control.next_token('resource_control.service_request_id_seq'), claim_service_request.service, this.candidate, c.now,
                        c.now + resource_control.elapsed(claim_service_request.timeout), claim_service_request.details,
                        claim_service_request.claim
                    FROM (SELECT clock_timestamp() AS now) AS c
                    WHERE NOT EXISTS (
                        SELECT FROM resource_control.service_request AS d
                            WHERE d.service = claim_service_request.service COLLATE "C"
                                AND d.slot = this.candidate
                                AND d.completed_at IS NULL AND d.timed_out_at IS NULL)
                    AND (this.is_lowered OR NOT EXISTS (
                        SELECT FROM resource_control.service_request AS d
                            WHERE d.service = claim_service_request.service COLLATE "C"
                                AND d.slot >= claim_service_request.slots
                                AND d.completed_at IS NULL AND d.timed_out_at IS NULL))
                -- A conflict is possible only with a client that inserts without the slot's lock.
                ON CONFLICT (service, slot) WHERE completed_at IS NULL AND timed_out_at IS NULL DO NOTHING
                RETURNING r.id, r.slot::smallint, r.created_at, r.expires_at::timestamptz INTO id, slot, created_at, expires_at;
            IF FOUND THEN
                RETURN;
            END IF;
        END LOOP;
    END LOOP;
    -- Other transactions are claiming or freeing the remaining slots just now.
    retry_after := '5 ms';
END
$$;

CREATE OR REPLACE FUNCTION resource_control.complete_service_request(
    service text,
    id bigint,
    is_async boolean DEFAULT false,
    claim bigint DEFAULT NULL
) RETURNS boolean
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    is_in_time boolean;
BEGIN
    IF is_async THEN
        -- If a crash of the server loses this commit, the slot is free after its timeout anyway.
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    -- The clock is read once, and again after a wait for the row, as another transaction renews it: a sub-select in FROM would keep
    -- the time from before the wait. COALESCE keeps the planner from using the index of requests in flight, which a search by id
    -- would have to read as a whole.
    UPDATE resource_control.service_request AS r
        SET (completed_at, timed_out_at) = (
            SELECT CASE WHEN r.expires_at > c.now THEN c.now END, CASE WHEN r.expires_at <= c.now THEN c.now END
                FROM (SELECT clock_timestamp() AS now) AS c)
        WHERE r.id = complete_service_request.id AND r.service = complete_service_request.service COLLATE "C"
            AND (complete_service_request.claim IS NULL OR r.claim = complete_service_request.claim)
            AND COALESCE(r.completed_at, r.timed_out_at) IS NULL
        RETURNING r.completed_at IS NOT NULL INTO is_in_time;
    IF NOT FOUND AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE check_violation USING CONSTRAINT = 'diesel_interlock_isolation',
            MESSAGE = 'complete at READ COMMITTED, because an older snapshot does not show a request that is newer';
    END IF;
    RETURN COALESCE(is_in_time, false);
END
$$;

CREATE OR REPLACE FUNCTION resource_control.renew_service_request(
    service text,
    id bigint,
    timeout interval,
    claim bigint DEFAULT NULL
) RETURNS boolean
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $$
#variable_conflict use_variable
BEGIN
    IF (timeout > '0' AND timeout <= '1000 years') IS NOT TRUE THEN
        RAISE check_violation USING CONSTRAINT = 'diesel_interlock_bad_renewal',
            MESSAGE = 'renew with a timeout above zero and up to 1000 years';
    END IF;
    IF current_setting('synchronous_commit') IN ('off', 'local') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    UPDATE resource_control.service_request AS r
        SET expires_at = GREATEST(r.expires_at, clock_timestamp() + resource_control.elapsed(timeout))
        WHERE r.id = renew_service_request.id AND r.service = renew_service_request.service COLLATE "C"
            AND (renew_service_request.claim IS NULL OR r.claim = renew_service_request.claim)
            AND COALESCE(r.completed_at, r.timed_out_at) IS NULL AND r.expires_at > clock_timestamp();
    IF FOUND THEN
        RETURN true;
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE check_violation USING CONSTRAINT = 'diesel_interlock_isolation',
            MESSAGE = 'renew at READ COMMITTED, because an older snapshot does not show a request that is newer';
    END IF;
    RETURN false;
END
$$;

CREATE OR REPLACE FUNCTION resource_control.prune_service_requests(older_than interval, batch integer) RETURNS integer
    LANGUAGE plpgsql VOLATILE STRICT
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    before timestamptz;
    last bigint := 0;
    old bigint[];
    is_young boolean;
    pruned integer := 0;
    deleted integer;
BEGIN
    IF older_than < '0' OR older_than > '1000 years' OR batch < 1 THEN
        RAISE check_violation USING CONSTRAINT = 'diesel_interlock_bad_pruning',
            MESSAGE = 'prune with an age of zero to 1000 years, and a batch of 1 at least';
    END IF;
    before := clock_timestamp() - resource_control.elapsed(older_than);
    -- Read from the oldest id on until the requests are too young, so the rest of the log is not read.
    WHILE pruned < batch AND is_young IS NOT TRUE LOOP
        SELECT max(r.id), bool_and(r.created_at >= before),
                array_agg(r.id) FILTER (WHERE COALESCE(r.completed_at, r.timed_out_at, r.expires_at) < before)
            INTO last, is_young, old
            FROM (
                SELECT d.* FROM resource_control.service_request AS d
                    WHERE d.id > last ORDER BY d.id LIMIT LEAST(batch - pruned, 1000)
            ) AS r;
        EXIT WHEN last IS NULL;
        DELETE FROM resource_control.service_request AS r
            WHERE r.id = ANY (ARRAY (
                SELECT d.id FROM resource_control.service_request AS d
                    WHERE d.id = ANY (old) AND COALESCE(d.completed_at, d.timed_out_at, d.expires_at) < before
                    FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS deleted = ROW_COUNT;
        pruned := pruned + deleted;
    END LOOP;
    RETURN pruned;
END
$$;

COMMENT ON TABLE resource_control.service_request IS
    'Requests to services that take a limited number at a time, in flight or ended.';
COMMENT ON COLUMN resource_control.service_request.expires_at IS
    'From this time on the request is not in flight, even if it is not marked.';
COMMENT ON COLUMN resource_control.service_request.timed_out_at IS
    'When the next claim of the service, or a late completion, found it expired.';
COMMENT ON COLUMN resource_control.service_request.claim IS
    'A random number that the claim has brought. Null for clients that bring none.';
COMMENT ON FUNCTION resource_control.claim_service_request(text, integer, interval, text, bigint) IS
    'Claims one of the slots 0 to slots - 1 of the service. The id is the fencing token. If id is null, no slot is free, and retry_after tells when to ask again. The claim, a random number, is stored in the row, so that its holder can prove later that the row is the one it has claimed. Call it at READ COMMITTED and commit at once.';
COMMENT ON FUNCTION resource_control.complete_service_request(text, bigint, boolean, bigint) IS
    'Ends the request and frees its slot. Returns false if it had ended or timed out before, or is of another service or, if one is given, another claim. With is_async, the transaction commits without waiting for the disk.';
COMMENT ON FUNCTION resource_control.renew_service_request(text, bigint, interval, bigint) IS
    'Extends the request to the given timeout from now, and returns whether it was in flight and, if a claim is given, has that claim. Never shortens it.';
COMMENT ON FUNCTION resource_control.prune_service_requests(interval, integer) IS
    'Deletes at most batch requests that ended or expired longer ago than older_than, the oldest first, and returns how many.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000003');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
