-- The statement below waits for other instances that install, and for users of the tables. A timeout of the role must not end
-- these waits. A statement cannot switch off a timeout that is already running for it, so the timeouts are switched off by a
-- statement of their own, in the same transaction (with psql: --single-transaction).
DO $timeouts$ BEGIN
    PERFORM pg_catalog.set_config(s.name, '0', true) FROM pg_catalog.pg_settings AS s
        WHERE s.name OPERATOR(pg_catalog.=) ANY ('{lock_timeout,statement_timeout,transaction_timeout}');
END $timeouts$;

DO $migration$
DECLARE
    callers_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
BEGIN
-- The version and the encoding are checked before anything is changed.
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

-- == Fencing tokens and names of locks ==

-- Not CREATE SCHEMA IF NOT EXISTS, which needs the right to create a schema even if this one exists.
IF to_regnamespace('resource_control') IS NULL THEN
    CREATE SCHEMA resource_control;
END IF;

-- The file inserts its own row, so the schema records it whatever tool runs it.
CREATE TABLE IF NOT EXISTS resource_control.installed_migration (
    version text PRIMARY KEY,
    run_at timestamptz NOT NULL DEFAULT current_timestamp
);

-- The fencing tokens of session locks and schedules. CACHE 1, because a session would hand out cached numbers late, and so out
-- of order.
CREATE SEQUENCE IF NOT EXISTS resource_control.fencing_token AS bigint CACHE 1;

CREATE TABLE IF NOT EXISTS resource_control.token_base (
    is_only boolean PRIMARY KEY DEFAULT true CONSTRAINT token_bases_are_one CHECK (is_only),
    -- The database in which the base was set, as database_identity() names it.
    identity text NOT NULL,
    base bigint NOT NULL
);

-- Differs between a database and its copies: it consists of the server's system identifier, the database's OID, and the OID of
-- token_base, which a restore into the same database creates anew. Null where the role may not read the system identifier, as
-- on some managed services.
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
    -- A program that only takes locks must start even if its role may not read the schema.
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
        -- There was no promotion, so no sequence has lost numbers.
        RETURN 0;
    END IF;
    -- The condition makes the planner use the index. Callers set enable_seqscan = off, which before PostgreSQL 18 adds 10^10 to
    -- the estimated cost of a sequential scan, and such a cost would start a JIT compilation:
    -- https://www.mail-archive.com/pgsql-hackers@lists.postgresql.org/msg20716.html
    RETURN GREATEST(0, timeline - 1 + COALESCE((SELECT b.base FROM resource_control.token_base AS b WHERE b.is_only), 0)) << 40;
END
$$;

CREATE OR REPLACE FUNCTION resource_control.next_token(sequence regclass) RETURNS bigint
    LANGUAGE plpgsql VOLATILE STRICT
AS $$
DECLARE
    token bigint := pg_catalog.nextval(sequence);
    token_floor bigint := NULLIF(pg_catalog.current_setting('diesel_interlock.token_floor', true), '')::bigint;
BEGIN
    -- A session reads the floor once, because a server that writes stays on its timeline until it stops. A new base sets the
    -- sequences themselves, to at least its floor.
    IF token_floor IS NULL THEN
        token_floor := resource_control.token_floor();
        PERFORM pg_catalog.set_config('diesel_interlock.token_floor', token_floor::pg_catalog.text, false);
    END IF;
    IF token < token_floor THEN
        -- This happens once per promotion. The lock admits one session at a time, because a slower one would set the sequence back.
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
    'The base to which the timeline of the server is added, so that tokens also grow after a restore, copy or upgrade, where timelines begin at 1 again.';
COMMENT ON FUNCTION resource_control.database_identity() IS
    'Identifies this database among its copies: the server, the database and the table token_base. Null where the role may not read it.';
COMMENT ON FUNCTION resource_control.is_copy() IS
    'Whether this database is a copy: the base of tokens was set in another one. The owner must install before tokens are drawn.';
COMMENT ON FUNCTION resource_control.token_floor() IS
    'The least token of the present timeline of the server, or 0 where the timeline cannot be read.';
COMMENT ON FUNCTION resource_control.next_token(regclass) IS
    'Draws a fencing token from a sequence, and raises the sequence to the floor of the present timeline first if it is below.';
COMMENT ON FUNCTION resource_control.lock_key(text) IS
    'The number of the advisory lock of a name: 64-bit FNV-1a of its UTF-8 bytes, as a signed number. It never changes.';

-- == Throttles ==

-- Converts an interval to elapsed time, because a day that is added to a timestamptz may have 23 to 25 hours. PostgreSQL
-- inlines this function.
CREATE OR REPLACE FUNCTION resource_control.elapsed(span interval) RETURNS interval
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN make_interval(secs => date_part('epoch', span));

-- Throttles whose interval is in the program, and the keys of resources. throttle_interval is the interval of the last grant,
-- for the views and for pruning. No constraint checks the columns: the crate is the only writer and checks before it sends,
-- while PostgreSQL would parse a CHECK anew for each grant.
CREATE TABLE IF NOT EXISTS resource_control.throttle (
    name text COLLATE pg_catalog."C" NOT NULL,
    key text COLLATE pg_catalog."C" NOT NULL,
    last_granted timestamptz NOT NULL DEFAULT '-infinity',
    throttle_interval interval NOT NULL,
    details text NOT NULL DEFAULT '',
    -- Whether this is the key of a resource. Part of the primary key, so that a named throttle may have the same name as a
    -- resource.
    is_resource boolean NOT NULL DEFAULT false,
    PRIMARY KEY (name, key, is_resource)
) WITH (fillfactor = 50);

-- Resources whose interval is in the database. The type has one label per resource.
IF to_regtype('resource_control.throttled_resource_enum') IS NULL THEN
    CREATE TYPE resource_control.throttled_resource_enum AS ENUM ();
END IF;

-- After DROP TYPE … CASCADE the table has no column of labels, and its rows are useless.
IF to_regclass('resource_control.throttled_resource') IS NOT NULL AND NOT EXISTS (
    SELECT FROM pg_attribute
        WHERE attrelid = to_regclass('resource_control.throttled_resource') AND attname = 'resource_id' AND NOT attisdropped)
THEN
    DROP TABLE resource_control.throttled_resource;
END IF;

CREATE TABLE IF NOT EXISTS resource_control.throttled_resource (
    resource_id resource_control.throttled_resource_enum PRIMARY KEY,
    throttle_interval interval NOT NULL
        CONSTRAINT positive_delays_only CHECK (throttle_interval > '00:00:00')
        CONSTRAINT a_microsecond_to_1000_years CHECK (date_part('epoch', throttle_interval) BETWEEN 1e-6 AND 31557600000),
    last_locked timestamptz NOT NULL DEFAULT '-infinity',
    last_locker_details text NOT NULL DEFAULT ''
        CONSTRAINT empty_rules CHECK (
            (last_locked = '-infinity' AND last_locker_details = '')
            OR (last_locked <> '-infinity' AND length(trim(last_locker_details)) > 0)
        )
) WITH (fillfactor = 50);

-- The clock is read for the stored time after it is read for the condition, so two grants are never closer than the interval.
CREATE OR REPLACE FUNCTION resource_control.lock_throttled_resource(
    resource_id_var resource_control.throttled_resource_enum,
    details_var text
) RETURNS boolean
    LANGUAGE plpgsql STRICT VOLATILE
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Not FOR UPDATE, which would skip the resource while an open transaction has inserted a row that references it: the foreign
    -- key takes FOR KEY SHARE.
    UPDATE resource_control.throttled_resource AS r
        SET last_locked = clock_timestamp(), last_locker_details = details_var
        WHERE r.resource_id = resource_id_var AND EXISTS (
            SELECT FROM resource_control.throttled_resource AS due
                WHERE due.resource_id = resource_id_var
                    AND due.last_locked <= clock_timestamp() - resource_control.elapsed(due.throttle_interval)
                FOR NO KEY UPDATE SKIP LOCKED);
    IF FOUND THEN
        IF current_setting('synchronous_commit') IN ('off', 'local') THEN
            PERFORM set_config('synchronous_commit', 'on', true);
        END IF;
        RETURN true;
    END IF;
    RETURN false;
END
$$;

COMMENT ON FUNCTION resource_control.elapsed(interval) IS
    'The interval as elapsed time: a day is 24 hours, a month 30 days and a year 365.25 days.';
COMMENT ON TYPE resource_control.throttled_resource_enum IS
    'The names of throttled resources. Only its owner can add one.';
COMMENT ON TABLE resource_control.throttle IS
    'When each named throttle, and each key of a resource, was granted last.';
COMMENT ON TABLE resource_control.throttled_resource IS
    'Resources that are granted at most once per interval.';
COMMENT ON COLUMN resource_control.throttled_resource.throttle_interval IS
    'Elapsed time in any time zone: a day is 24 hours, a month 30 days, a year 365.25.';
COMMENT ON COLUMN resource_control.throttled_resource.last_locked IS
    'When it was granted last, by the server''s clock; -infinity for never.';
COMMENT ON FUNCTION resource_control.lock_throttled_resource(resource_control.throttled_resource_enum, text) IS
    'Grants the resource if its interval has passed, and returns whether it has granted it. Denies at once while another transaction takes the resource. Commit at once.';

-- == Semaphores and leaders ==

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

-- After DROP DOMAIN … CASCADE the table lacks a column, and its rows are useless.
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

-- A claim never waits for another claim: it only tries advisory locks, skips locked rows, and inserts into a slot only while it
-- holds the slot's lock.
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
    -- The sub-select reads the clock once for both columns. It stands in SET because there it is evaluated again after a wait for a
    -- transaction that renews the row; in FROM it would keep the time from before the wait. COALESCE keeps the planner from using
    -- the index of requests in flight, which a search by id would have to read as a whole.
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
    -- Reads from the oldest id on, and stops where the requests are too young, so that the rest of the log is not read.
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
    'From this time on the request is not in flight, whether or not it is marked.';
COMMENT ON COLUMN resource_control.service_request.timed_out_at IS
    'When the next claim of the service, or a late completion, found it expired.';
COMMENT ON COLUMN resource_control.service_request.claim IS
    'A random number by which its holder finds the row. Null if the client sent none.';
COMMENT ON FUNCTION resource_control.claim_service_request(text, integer, interval, text, bigint) IS
    'Claims one of the slots 0 to slots - 1 of the service. The id is the fencing token. If id is null, no slot is free, and retry_after tells when to ask again. The claim, a random number, is stored in the row, so that its holder can prove later that the row is the one it has claimed. Call it at READ COMMITTED and commit at once.';
COMMENT ON FUNCTION resource_control.complete_service_request(text, bigint, boolean, bigint) IS
    'Ends the request and frees its slot. Returns false if the request had ended or timed out before, or if its service or, where one is given, its claim is another one. With is_async, the transaction commits without waiting for the disk.';
COMMENT ON FUNCTION resource_control.renew_service_request(text, bigint, interval, bigint) IS
    'Extends the request to the given timeout from now, and never shortens it. Returns whether the request was in flight and, where a claim is given, has that claim.';
COMMENT ON FUNCTION resource_control.prune_service_requests(interval, integer) IS
    'Deletes at most batch requests that ended or expired longer ago than older_than, the oldest first, and returns how many it has deleted.';

-- == Fences ==

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

-- == Rate limits ==

-- The generic cell rate algorithm. A key without a row is full. Do not reorder the three times: a statement that spends units
-- computes them in the order of these columns, each from the clock at that moment, and the limit holds only in that order.
CREATE TABLE IF NOT EXISTS resource_control.rate_limit (
    name text COLLATE pg_catalog."C" NOT NULL,
    key text COLLATE pg_catalog."C" NOT NULL,
    since timestamptz NOT NULL,
    spent_at timestamptz NOT NULL,
    full_at timestamptz NOT NULL,
    unit_us float8 NOT NULL,
    burst bigint NOT NULL,
    PRIMARY KEY (name, key)
) WITH (fillfactor = 50);

-- Converts full_at to another quota, under which a unit takes wanted_us microseconds to refill: the key owes as many units as
-- before. A time of more than 100,000 years is cut to 100,000 years, because timestamps end in the year 294276. PostgreSQL
-- inlines this function.
CREATE OR REPLACE FUNCTION resource_control.rate_limit_full_at(full_at timestamptz, unit_us float8, wanted_us float8)
    RETURNS timestamptz
    LANGUAGE sql VOLATILE
    RETURN CASE WHEN unit_us = wanted_us OR full_at <= clock_timestamp() THEN full_at
        ELSE make_interval(secs => LEAST(date_part('epoch', full_at - clock_timestamp()) * (wanted_us / unit_us),
            '3155760000000'::double precision)) + clock_timestamp() END;

COMMENT ON FUNCTION resource_control.rate_limit_full_at(timestamptz, float8, float8) IS
    'Converts full_at to another quota, whose unit takes wanted_us microseconds to refill: '
    'the key owes as many units as before.';
COMMENT ON TABLE resource_control.rate_limit IS
    'What the keys of rate limits owe. A key without a row is full.';
COMMENT ON COLUMN resource_control.rate_limit.since IS
    'When the quota of this row came into force.';
COMMENT ON COLUMN resource_control.rate_limit.spent_at IS
    'When units were spent last, by the server''s clock.';
COMMENT ON COLUMN resource_control.rate_limit.full_at IS
    'When the key is full again if no more units are spent.';
COMMENT ON COLUMN resource_control.rate_limit.unit_us IS
    'How many microseconds refill a unit, under the quota of this row.';
COMMENT ON COLUMN resource_control.rate_limit.burst IS
    'How many units a full key has, under the quota of this row.';

-- == Schedules ==

CREATE TABLE IF NOT EXISTS resource_control.schedule (
    name text COLLATE pg_catalog."C" PRIMARY KEY CONSTRAINT schedules_have_names CHECK (octet_length(name) BETWEEN 1 AND 1000),
    counted_from timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_at timestamptz,
    tick timestamptz,
    attempt integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    missed integer NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    runner text NOT NULL DEFAULT '',
    started_at timestamptz,
    expires_at timestamptz,
    ended_at timestamptz,
    error text,
    claim bigint,
    triggered_at timestamptz,
    paused_at timestamptz
) WITH (fillfactor = 50);

COMMENT ON TABLE resource_control.schedule IS
    'The next tick of each schedule, and the tick that ran last, with its result.';
COMMENT ON COLUMN resource_control.schedule.counted_from IS
    'The next tick follows this time: the last scheduled tick, or the first look.';
COMMENT ON COLUMN resource_control.schedule.next_at IS
    'The next scheduled tick. Infinity if there is none, null if it is not known.';
COMMENT ON COLUMN resource_control.schedule.tick IS
    'The tick that was taken last: a scheduled time, or the time of a trigger.';
COMMENT ON COLUMN resource_control.schedule.attempt IS
    'How many runs of this tick have begun, without those that gave the tick back.';
COMMENT ON COLUMN resource_control.schedule.failed IS
    'How many of these runs have returned an error.';
COMMENT ON COLUMN resource_control.schedule.missed IS
    'How many ticks before this one were missed and are not run.';
COMMENT ON COLUMN resource_control.schedule.token IS
    'The fencing token of the run, which grows from run to run.';
COMMENT ON COLUMN resource_control.schedule.expires_at IS
    'When the lease of the run ends. After a failure: when the tick is retried.';
COMMENT ON COLUMN resource_control.schedule.ended_at IS
    'When the run ended or gave the tick back. Null while it runs, and after a crash.';
COMMENT ON COLUMN resource_control.schedule.error IS
    'The error of the run, or why it has crashed, if that is known.';
COMMENT ON COLUMN resource_control.schedule.claim IS
    'A random number by which the run recognizes its row.';
COMMENT ON COLUMN resource_control.schedule.triggered_at IS
    'When the schedule was triggered. Null if no triggered run is outstanding.';
COMMENT ON COLUMN resource_control.schedule.paused_at IS
    'Since when the schedule is paused. Null if it is not paused.';

-- == Once ==

CREATE TABLE IF NOT EXISTS resource_control.once (
    name text COLLATE pg_catalog."C" NOT NULL,
    key text COLLATE pg_catalog."C" NOT NULL,
    outcome bytea NOT NULL,
    done_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    fingerprint bytea,
    PRIMARY KEY (name, key)
);

-- Volatile, because a volatile function takes a new snapshot: it sees the rows that were committed after its caller's statement
-- began, while that statement waited for the lock. In PL/pgSQL, because a session keeps the plan of such a function, but plans a
-- volatile SQL function at each call.
CREATE OR REPLACE FUNCTION resource_control.once_outcome(name text, key text) RETURNS resource_control.once
    LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    RETURN (SELECT o FROM resource_control.once AS o
        WHERE o.name = once_outcome.name COLLATE pg_catalog."C" AND o.key = once_outcome.key COLLATE pg_catalog."C");
END
$$;

COMMENT ON TABLE resource_control.once IS
    'Outcomes of Once: one row for each name and key whose work has succeeded.';
COMMENT ON COLUMN resource_control.once.outcome IS
    'The bytes that the work has returned.';
COMMENT ON COLUMN resource_control.once.done_at IS
    'When the work ended, by the server''s clock.';
COMMENT ON COLUMN resource_control.once.fingerprint IS
    'The SHA-256 of the request. Null if none was given.';
COMMENT ON FUNCTION resource_control.once_outcome(text, text) IS
    'The row with this name and key. Null if that work has not been done.';

-- == Views, and the base of fencing tokens ==

CREATE OR REPLACE VIEW resource_control.advisory_lock AS
    SELECT CASE WHEN l.objsubid = 1 THEN (l.classid::bigint << 32) | l.objid::bigint END AS number,
            CASE WHEN l.objsubid = 2 THEN l.classid::bigint::bit(32)::integer END AS first,
            CASE WHEN l.objsubid = 2 THEN l.objid::bigint::bit(32)::integer END AS second,
            l.mode = 'ShareLock' AS is_shared,
            l.granted AS is_held,
            l.pid,
            COALESCE(a.application_name, '') AS application_name,
            a.usename::text AS role,
            host(a.client_addr) AS client,
            a.state,
            a.xact_start AS transaction_since,
            l.waitstart AS waiting_since,
            CASE WHEN l.granted THEN '{}' ELSE pg_blocking_pids(l.pid) END AS blocked_by
        FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
        WHERE l.locktype = 'advisory' AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database());

CREATE OR REPLACE VIEW resource_control.slot_in_flight AS
    -- The columns have plain types instead of the domains. PostgreSQL has no operator for exactly a domain, so a filter on such a
    -- column would make it search the whole search path of the user for one.
    SELECT r.id, r.service::text AS service, r.slot::smallint AS slot, r.created_at, r.expires_at::timestamptz AS expires_at,
            r.expires_at - clock_timestamp() AS remaining, r.details
        FROM resource_control.service_request AS r
        WHERE r.completed_at IS NULL AND r.timed_out_at IS NULL AND r.expires_at > clock_timestamp();

CREATE OR REPLACE VIEW resource_control.throttle_state AS
    SELECT t.name, t.key, t.is_resource, t.throttle_interval, t.last_granted, t.details,
            t.last_granted + t.throttle_interval AS due_at,
            COALESCE(t.last_granted + t.throttle_interval <= clock_timestamp(), true) AS is_due
        FROM (
            SELECT n.name, n.key, n.is_resource, resource_control.elapsed(n.throttle_interval) AS throttle_interval,
                    NULLIF(n.last_granted, '-infinity') AS last_granted, n.details
                FROM resource_control.throttle AS n
            UNION ALL
            SELECT r.resource_id::text, '', true, resource_control.elapsed(r.throttle_interval),
                    NULLIF(r.last_locked, '-infinity'), r.last_locker_details
                FROM resource_control.throttled_resource AS r
        ) AS t;

CREATE OR REPLACE VIEW resource_control.rate_limit_state AS
    SELECT r.name, r.key, r.burst, GREATEST(floor(r.burst - r.owed), 0)::bigint AS remaining, r.owed / r.burst AS used,
            r.full_at, r.spent_at
        FROM (
            SELECT k.*, GREATEST(date_part('epoch', k.full_at - clock_timestamp()) * 1000000 / k.unit_us, 0) AS owed
                FROM resource_control.rate_limit AS k
        ) AS r;

-- A leader holds the only slot of a service that is named with the word leader and the election's name, in which spaces and
-- backslashes are escaped. The view removes the prefix and the escapes.
CREATE OR REPLACE VIEW resource_control.leader AS
    SELECT regexp_replace(s.service, E'^leader |\\\\(.)', E'\\1', 'g') AS name, s.details AS holder, s.created_at AS since,
            s.expires_at AS until, s.id AS fencing_token
        FROM resource_control.slot_in_flight AS s
        WHERE starts_with(s.service, 'leader ') AND s.slot = 0;

CREATE OR REPLACE VIEW resource_control.schedule_state AS
    SELECT s.name, t.state, NULLIF(s.next_at, 'infinity') AS next_at, s.tick, s.attempt, s.token, s.runner, s.started_at,
            CASE WHEN t.state <> 'failed' THEN s.expires_at END AS expires_at, s.ended_at,
            CASE WHEN t.state = 'crashed' THEN COALESCE(s.error, 'the lease expired: the process died, or could not renew it')
                ELSE s.error END AS error,
            CASE WHEN t.state = 'failed' THEN s.expires_at END AS retry_at, s.triggered_at, s.paused_at
        FROM resource_control.schedule AS s,
            LATERAL (SELECT CASE
                WHEN s.started_at IS NULL THEN 'new'
                WHEN s.ended_at IS NOT NULL AND s.error IS NOT NULL THEN 'failed'
                WHEN s.expires_at IS NULL THEN 'done'
                WHEN s.ended_at IS NOT NULL THEN 'given back'
                WHEN s.error IS NULL AND s.expires_at > clock_timestamp() THEN 'running'
                ELSE 'crashed'
            END AS state) AS t;

-- Sets a new base if this database is a copy, or in any case if anew is true. All later tokens are larger than those in the
-- sequences and rows. Returns whether a new base was set, and null if this is a copy and the role may not set a base.
CREATE OR REPLACE FUNCTION resource_control.set_token_base(anew boolean DEFAULT false) RETURNS boolean
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET lock_timeout = 0
AS $$
DECLARE
    -- No sequence reaches this number, so a larger token in a row is a mistake. It is ignored, because no range is left above it.
    no_token CONSTANT bigint := 1::bigint << 62;
    -- The microseconds since 2026, and those of a day.
    age CONSTANT bigint := GREATEST(date_part('epoch', clock_timestamp()) * 1000000 - 1767225600000000, 0);
    day CONSTANT bigint := 86400000000;
    timeline bigint := 1;
    largest bigint;
    range bigint;
BEGIN
    IF NOT (anew OR resource_control.is_copy()) THEN
        RETURN false;
    END IF;
    -- The lock admits one session at a time, because a slower one would set the sequences back.
    PERFORM pg_advisory_xact_lock(20000101000009);
    IF NOT (anew OR resource_control.is_copy()) THEN
        RETURN false;
    END IF;
    BEGIN
        timeline := ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint;
    EXCEPTION WHEN OTHERS THEN
        -- token_floor() cannot read the timeline either, and returns 0.
    END;
    -- Sequences and rows are both read: logical replication copies rows and no sequences. The base is read, too, because the
    -- sequences may not have reached its range yet.
    SELECT max(d.token) INTO largest FROM (
        SELECT s.last_value FROM resource_control.fencing_token AS s WHERE s.is_called AND s.last_value < no_token
        UNION ALL SELECT s.last_value FROM resource_control.service_request_id_seq AS s WHERE s.is_called AND s.last_value < no_token
        UNION ALL SELECT max(r.id) FROM resource_control.service_request AS r WHERE r.id < no_token
        UNION ALL SELECT max(s.token) FROM resource_control.schedule AS s WHERE s.token < no_token
        UNION ALL SELECT max(f.token) FROM resource_control.fence AS f WHERE f.token < no_token
        UNION ALL SELECT b.base + timeline - 1 << 40 FROM resource_control.token_base AS b WHERE b.base < no_token >> 40
    ) AS d (token);
    DELETE FROM resource_control.token_base;
    IF FOUND OR largest > 0 THEN
        -- The next range, because the original may have drawn more tokens since it was copied. At least the range of today: each
        -- promotion of the original since then began another range, and promotions are rarer than one a day.
        range := GREATEST((largest >> 40) + 1, age / day);
        -- Within its range, a copy begins at a number that grows with the time of day, by more than tokens are drawn in that time.
        -- So a later copy of the same original begins above the tokens of an earlier one.
        PERFORM setval(s.sequence, (range << 40) + age % day * 4)
            FROM (VALUES ('resource_control.fencing_token'::regclass), ('resource_control.service_request_id_seq')) AS s (sequence);
    END IF;
    INSERT INTO resource_control.token_base (identity, base)
        VALUES (COALESCE(resource_control.database_identity(), ''), COALESCE(range, 0) + 1 - timeline)
        -- At REPEATABLE READ, a row of another session that the snapshot does not show is then a serialization failure, after
        -- which the crate repeats the call.
        ON CONFLICT DO NOTHING;
    RETURN true;
EXCEPTION WHEN insufficient_privilege THEN
    IF anew THEN
        RAISE;
    END IF;
    RETURN NULL;
END
$$;

PERFORM resource_control.set_token_base();

COMMENT ON FUNCTION resource_control.set_token_base(boolean) IS
    'Lets tokens continue above all that are known if this database is a copy, or in any case if anew is true. Returns whether it has set a new base, and null if this is a copy and the role may not set one.';
COMMENT ON VIEW resource_control.advisory_lock IS
    'The holders of the advisory locks of this database, and the sessions that wait for them on the server, with the pids that block these. A lock is a number, or a pair of first and second.';
COMMENT ON VIEW resource_control.slot_in_flight IS
    'The slots of semaphores that are in use.';
COMMENT ON VIEW resource_control.throttle_state IS
    'When the throttles of both kinds were granted last, and when they are due.';
COMMENT ON VIEW resource_control.rate_limit_state IS
    'How many units the keys of rate limits have left, and how much of the burst is used: 0 for a full key, 1 for one that is limited.';
COMMENT ON VIEW resource_control.leader IS
    'The leader of each election, since when it leads, and when its term ends unless it is renewed.';
COMMENT ON VIEW resource_control.schedule_state IS
    'The next tick of each schedule, and the tick that ran last. The state is new, running, done, failed, crashed or given back.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000001');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
