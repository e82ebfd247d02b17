DO $migration$
DECLARE
    callers_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
BEGIN
-- One session at a time, and only if this migration was not run before, by diesel_cli or by the crate.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000006') THEN
    RETURN;
END IF;
-- With the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

CREATE TABLE resource_control.rate_limit (
    -- Ordered by bytes, because the order of a language changes with the server's libraries. Without CHECK constraints,
    -- because PostgreSQL parses them anew for each statement that writes.
    name text COLLATE pg_catalog."C" NOT NULL,
    key text COLLATE pg_catalog."C" NOT NULL,
    generation bigint NOT NULL,
    updates integer NOT NULL,
    created_at timestamptz NOT NULL,
    changed_at timestamptz NOT NULL,
    full_at timestamptz NOT NULL,
    n bigint NOT NULL,
    period_us bigint NOT NULL,
    reserved_until timestamptz,
    PRIMARY KEY (name, key, generation)
)
-- The next version of a row then fits into the same page.
WITH (fillfactor = 50);

CREATE TABLE resource_control.rate_limit_override (
    name text COLLATE pg_catalog."C" NOT NULL
        CONSTRAINT overrides_have_names CHECK (octet_length(name) BETWEEN 1 AND 1000),
    key text COLLATE pg_catalog."C" CONSTRAINT overridden_keys_are_short CHECK (octet_length(key) <= 1000),
    n bigint NOT NULL CONSTRAINT overrides_allow_some CHECK (n BETWEEN 1 AND 4294967295),
    period interval NOT NULL CONSTRAINT periods_within_a_year CHECK (period > '0' AND period <= '366 days'),
    burst bigint NOT NULL CONSTRAINT bursts_allow_one CHECK (burst BETWEEN 1 AND 4294967295),
    -- One column for both kinds of rows, so that one search finds them, and one ON CONFLICT.
    scope text COLLATE pg_catalog."C" NOT NULL GENERATED ALWAYS AS (COALESCE('=' || key, '*')) STORED,
    CONSTRAINT bursts_refill_within_a_century CHECK (
        burst::float8 * date_part('epoch', resource_control.elapsed(period)) <= n::float8 * 36600 * 86400),
    PRIMARY KEY (name, scope)
);

-- The functions up to `microseconds` are single expressions without a setting, so that PostgreSQL inlines them. Each operator
-- is qualified, because they are then under the caller's search path. Their numbers are above zero, but for the amount and the
-- debt.
CREATE FUNCTION resource_control.scaled_up(amount bigint, multiplier bigint, divisor bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE
        WHEN amount OPERATOR(pg_catalog.<=) (4611686018427387903 OPERATOR(pg_catalog./) multiplier)
        THEN ((amount OPERATOR(pg_catalog.*) multiplier) OPERATOR(pg_catalog.+) (divisor OPERATOR(pg_catalog.-) 1)) OPERATOR(pg_catalog./) divisor
        -- Under a quota that an operator set, a debt may be more units than a bigint counts.
        ELSE LEAST(pg_catalog.div((amount::numeric OPERATOR(pg_catalog.*) multiplier) OPERATOR(pg_catalog.+) (divisor OPERATOR(pg_catalog.-) 1), divisor),
            9223372036854775807)::bigint
    END
$$;

CREATE FUNCTION resource_control.scaled_down(amount bigint, multiplier bigint, divisor bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE
        WHEN amount OPERATOR(pg_catalog.<=) (4611686018427387903 OPERATOR(pg_catalog./) multiplier)
        THEN (amount OPERATOR(pg_catalog.*) multiplier) OPERATOR(pg_catalog./) divisor
        ELSE pg_catalog.div(amount::numeric OPERATOR(pg_catalog.*) multiplier, divisor)::bigint
    END
$$;

-- What is owed is units and not time, so another quota than the row's rescales it. The result is at most 9000000000000000, 285
-- years, because PostgreSQL multiplies an interval by a double precision, which is exact to the microsecond up to that. A row
-- is never written with a debt that was cut so, because it would owe less under its former quota again.
CREATE FUNCTION resource_control.rescaled(
    debt_us bigint,
    n bigint,
    period_us bigint,
    wanted_n bigint,
    wanted_period_us bigint
) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT LEAST(
        pg_catalog.div(
            (debt_us::numeric OPERATOR(pg_catalog.*) (n::numeric OPERATOR(pg_catalog.*) wanted_period_us))
                OPERATOR(pg_catalog.+) ((period_us::numeric OPERATOR(pg_catalog.*) wanted_n) OPERATOR(pg_catalog.-) 1),
            period_us::numeric OPERATOR(pg_catalog.*) wanted_n),
        9000000000000000)::bigint
$$;

-- Time before the last change counts as none, because the clock may have been set back. A reservation keeps its moment, so another
-- quota than the row's rescales only what is owed after it. Until then nobody knows which units are used. So under the other
-- quota a whole burst counts as owed at that moment.
CREATE FUNCTION resource_control.rate_limit_debt(
    changed_at timestamptz,
    full_at timestamptz,
    reserved_until timestamptz,
    n bigint,
    period_us bigint,
    at timestamptz,
    wanted_n bigint,
    wanted_period_us bigint,
    wanted_burst bigint
) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE
        WHEN full_at IS NULL OR full_at OPERATOR(pg_catalog.<=) GREATEST(changed_at, at) THEN 0
        -- Set by hand.
        WHEN full_at OPERATOR(pg_catalog.=) 'infinity' THEN 9000000000000000
        WHEN n OPERATOR(pg_catalog.=) wanted_n AND period_us OPERATOR(pg_catalog.=) wanted_period_us
        THEN (pg_catalog.date_part('epoch', full_at OPERATOR(pg_catalog.-) GREATEST(changed_at, at)) OPERATOR(pg_catalog.*) 1000000)::bigint
        WHEN reserved_until OPERATOR(pg_catalog.>) GREATEST(changed_at, at)
        THEN (pg_catalog.date_part('epoch', LEAST(reserved_until, full_at) OPERATOR(pg_catalog.-) GREATEST(changed_at, at)) OPERATOR(pg_catalog.*) 1000000)::bigint
            OPERATOR(pg_catalog.+) GREATEST(
                resource_control.scaled_up(wanted_burst, wanted_period_us, wanted_n),
                resource_control.rescaled(
                    (pg_catalog.date_part('epoch', full_at OPERATOR(pg_catalog.-) LEAST(reserved_until, full_at)) OPERATOR(pg_catalog.*) 1000000)::bigint,
                    n, period_us, wanted_n, wanted_period_us))
        ELSE resource_control.rescaled(
            (pg_catalog.date_part('epoch', full_at OPERATOR(pg_catalog.-) GREATEST(changed_at, at)) OPERATOR(pg_catalog.*) 1000000)::bigint,
            n, period_us, wanted_n, wanted_period_us)
    END
$$;

CREATE FUNCTION resource_control.microseconds(span interval) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT (pg_catalog.date_part('epoch', resource_control.elapsed(span)) OPERATOR(pg_catalog.*) 1000000)::bigint
$$;

-- Raises what is wrong with a call that cannot be allowed. If only an override refuses it, returns the reason, because an
-- operator's row must not turn a limited call into an error.
CREATE FUNCTION resource_control.refuse_rate_limit(
    name text,
    key text,
    n bigint,
    period_us bigint,
    burst bigint,
    units bigint,
    is_overridden boolean
) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(name) BETWEEN 1 AND 1000 AND octet_length(key) <= 1000) IS NOT TRUE THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_rate_limit',
            MESSAGE = 'the name of a rate limit must have 1 to 1000 bytes, and its key at most 1000';
    END IF;
    IF (n BETWEEN 1 AND 4294967295 AND burst BETWEEN 1 AND 4294967295 AND period_us BETWEEN 1 AND 31622400000000
        AND burst::float8 * period_us <= n::float8 * 3162240000000000) IS NOT TRUE
    THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_quota',
            MESSAGE = 'N and the burst of a quota must be 1 to 4294967295, its period at most 366 days, and the burst must refill within 36600 days';
    END IF;
    IF units IS NULL THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_cost',
            MESSAGE = 'the cost must be 1 to 4294967295, and the wait 0 to 366 days';
    END IF;
    IF NOT is_overridden THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_cost_above_burst',
            MESSAGE = format('the cost %s is above the burst %s of the rate limit %L', units, burst, name);
    END IF;
    RETURN 'above_burst';
END
$$;

-- Returns the quota in force and what is owed. A missing row means that nothing is owed.
CREATE FUNCTION resource_control.read_rate_limit(
    name text,
    key text,
    n bigint,
    period interval,
    burst bigint,
    OUT quota_n bigint,
    OUT quota_period_us bigint,
    OUT quota_burst bigint,
    OUT is_overridden boolean,
    OUT debt_us bigint,
    OUT decided_at timestamptz,
    OUT stale_generation bigint
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET lock_timeout = '250ms'
AS $$
#variable_conflict use_variable
DECLARE
    own_period_us CONSTANT bigint := resource_control.microseconds(period);
BEGIN
    PERFORM resource_control.refuse_rate_limit(name, key, n, own_period_us, burst, 1, true);
    SELECT c.quota_n, c.quota_period_us, c.quota_burst, c.is_overridden,
            resource_control.rate_limit_debt(
                c.changed_at, c.full_at, c.reserved_until, c.n, c.period_us, c.now, c.quota_n, c.quota_period_us, c.quota_burst),
            c.now,
            CASE
                -- Only a check of this key alone forgets it.
                WHEN c.full_at = '-infinity' THEN NULL
                WHEN c.changed_at > c.now OR (c.n <> c.quota_n OR c.period_us <> c.quota_period_us)
                    AND (c.reserved_until > c.now) IS NOT TRUE
                    AND resource_control.rate_limit_debt(c.changed_at, c.full_at, c.reserved_until, c.n, c.period_us, c.now,
                        c.quota_n, c.quota_period_us, c.quota_burst) < 9000000000000000
                THEN c.generation
            END
        INTO quota_n, quota_period_us, quota_burst, is_overridden, debt_us, decided_at, stale_generation
        FROM (
            SELECT COALESCE(o.n, read_rate_limit.n) AS quota_n, COALESCE(o.period_us, own_period_us) AS quota_period_us,
                    COALESCE(o.burst, read_rate_limit.burst) AS quota_burst, o.n IS NOT NULL AS is_overridden,
                    r.generation, r.changed_at, r.full_at, r.reserved_until, r.n, r.period_us, clock_timestamp() AS now
                FROM (SELECT) AS one
                LEFT JOIN LATERAL (
                    SELECT q.n, q.burst, resource_control.microseconds(q.period) AS period_us
                        FROM resource_control.rate_limit_override AS q
                        WHERE q.name = read_rate_limit.name COLLATE "C"
                            AND q.scope IN ('*', '=' || read_rate_limit.key COLLATE "C")
                        ORDER BY q.scope DESC
                        LIMIT 1
                ) AS o ON true
                LEFT JOIN LATERAL (
                    SELECT b.*
                        FROM resource_control.rate_limit AS b
                        WHERE b.name = read_rate_limit.name COLLATE "C" AND b.key = read_rate_limit.key COLLATE "C"
                        ORDER BY b.generation DESC
                        LIMIT 1
                ) AS r ON true
        ) AS c;
END
$$;

-- Makes room for the next generation of a row, which the caller has locked and inserts anew. While an old snapshot is open, the
-- index keeps an entry of each version. A new generation is found without passing over those of the one before.
CREATE FUNCTION resource_control.retire_rate_limit(name text, key text, generation bigint) RETURNS void
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_variable
BEGIN
    IF generation = 1 THEN
        -- It stays as long as the key exists.
        UPDATE resource_control.rate_limit AS b SET full_at = '-infinity'
            WHERE b.name = retire_rate_limit.name COLLATE "C" AND b.key = retire_rate_limit.key COLLATE "C"
                AND b.generation = 1;
    ELSE
        DELETE FROM resource_control.rate_limit AS b
            WHERE b.name = retire_rate_limit.name COLLATE "C" AND b.key = retire_rate_limit.key COLLATE "C"
                AND b.generation = retire_rate_limit.generation;
    END IF;
END
$$;

-- Deletes a key whose last generation is one that a later one had replaced, and returns whether it did. No function leaves such a
-- key, but whoever deletes rows by hand may, and it counts as full.
CREATE FUNCTION resource_control.forget_rate_limit(name text, key text, generation bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_variable
BEGIN
    PERFORM FROM resource_control.rate_limit AS b
        WHERE b.name = forget_rate_limit.name COLLATE "C" AND b.key = forget_rate_limit.key COLLATE "C"
            AND b.generation = forget_rate_limit.generation AND b.full_at = '-infinity'
        FOR UPDATE;
    IF FOUND THEN
        DELETE FROM resource_control.rate_limit AS b
            WHERE b.name = forget_rate_limit.name COLLATE "C" AND b.key = forget_rate_limit.key COLLATE "C"
                AND b.generation <= forget_rate_limit.generation
                -- Another call may have forgotten and used it before this one had the lock.
                AND NOT EXISTS (
                    SELECT FROM resource_control.rate_limit AS l
                        WHERE l.name = forget_rate_limit.name COLLATE "C" AND l.key = forget_rate_limit.key COLLATE "C"
                            AND l.generation > forget_rate_limit.generation);
    END IF;
    RETURN FOUND;
END
$$;

-- Writes what a key owes under another quota, and by the present clock. Otherwise a key that is limited, which writes
-- nothing, would be refilled at the rate of the old quota, or not at all until a clock that was set back shows the old time
-- again. What was spent under the old quota may have come back faster, and by the old clock nobody knows when it was spent. So
-- the key counts as created anew, and none of that is given back. A reserved moment is moved with the clock. The callers limit
-- the wait for other transactions.
CREATE FUNCTION resource_control.settle_rate_limit(
    name text,
    key text,
    generation bigint,
    n bigint,
    period_us bigint,
    burst bigint
) RETURNS void
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_variable
DECLARE
    held resource_control.rate_limit;
    now timestamptz;
    debt bigint;
BEGIN
    SELECT b.* INTO held
        FROM resource_control.rate_limit AS b
        WHERE b.name = settle_rate_limit.name COLLATE "C" AND b.key = settle_rate_limit.key COLLATE "C"
            AND b.generation = settle_rate_limit.generation AND b.full_at > '-infinity'
        FOR NO KEY UPDATE;
    now := clock_timestamp();
    debt := resource_control.rate_limit_debt(
        held.changed_at, held.full_at, held.reserved_until, held.n, held.period_us, now, n, period_us, burst);
    IF debt >= 9000000000000000 THEN
        -- It owes too much to be told under the other quota, and keeps its own.
        n := held.n;
        period_us := held.period_us;
        debt := resource_control.rate_limit_debt(
            held.changed_at, held.full_at, held.reserved_until, n, period_us, now, n, period_us, burst);
    END IF;
    IF held.changed_at > now OR held.n <> n OR held.period_us <> period_us THEN
        -- Also later than all that was spent before the clock was set back.
        held.created_at := GREATEST(held.created_at,
            CASE WHEN held.changed_at > now THEN held.changed_at + interval '00:00:00.000001' END,
            CASE WHEN held.n <> n OR held.period_us <> period_us THEN now END);
        held.reserved_until := LEAST(held.reserved_until, now + interval '00:00:00.000001'
            * (date_part('epoch', held.reserved_until - held.changed_at) * 1000000)::bigint);
        -- A key that is closed by hand stays so.
        held.full_at := CASE WHEN isfinite(held.full_at) THEN now + interval '00:00:00.000001' * debt ELSE 'infinity' END;
        IF held.updates < 200 THEN
            UPDATE resource_control.rate_limit AS b
                SET updates = b.updates + 1, changed_at = now, n = settle_rate_limit.n, period_us = settle_rate_limit.period_us,
                    created_at = held.created_at, reserved_until = held.reserved_until, full_at = held.full_at
                WHERE b.name = settle_rate_limit.name COLLATE "C" AND b.key = settle_rate_limit.key COLLATE "C"
                    AND b.generation = settle_rate_limit.generation;
        ELSE
            PERFORM resource_control.retire_rate_limit(name, key, generation);
            INSERT INTO resource_control.rate_limit
                (name, key, generation, updates, created_at, changed_at, full_at, n, period_us, reserved_until)
                VALUES (name, key, generation + 1, 1, held.created_at, now, held.full_at, n, period_us, held.reserved_until);
        END IF;
    END IF;
END
$$;

-- Decides whether a call is allowed, and spends its units, for any state of the key.
CREATE FUNCTION resource_control.decide_rate_limit(
    name text,
    key text,
    n bigint,
    period_us bigint,
    burst bigint,
    cost bigint,
    max_wait_us bigint,
    at_least bigint,
    commit_async boolean,
    patience text DEFAULT NULL,
    OUT units bigint,
    OUT reason text,
    OUT decided_at timestamptz,
    OUT full_at timestamptz,
    OUT quota_n bigint,
    OUT quota_period_us bigint,
    OUT quota_burst bigint
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET lock_timeout = '250ms'
AS $$
#variable_conflict use_variable
DECLARE
    is_valid boolean;
    found_generation bigint;
    held resource_control.rate_limit;
    -- The largest debt with which the call is allowed, as a number and as an interval, and what its cost adds to the debt.
    -- Intervals have no days here, because days differ in length where the clocks change.
    room bigint;
    allowance interval;
    increase interval;
    debt bigint;
    late timestamptz;
    is_overridden boolean;
    setting text;
BEGIN
    IF patience IS NOT NULL THEN
        setting := set_config('lock_timeout', patience, true);
    END IF;
    LOOP
        -- The clock is read after the row.
        SELECT d.quota_n, d.quota_period_us, d.quota_burst, d.now, d.generation, d.room,
                d.room * interval '00:00:00.000001', d.now + d.debt * interval '00:00:00.000001',
                CASE WHEN d.room IS NOT NULL THEN
                    resource_control.scaled_up(LEAST(cost, d.quota_burst), d.quota_period_us, d.quota_n) * interval '00:00:00.000001'
                END,
                CASE
                    WHEN d.room IS NULL THEN 'invalid'
                    WHEN d.generation IS NULL THEN 'first'
                    WHEN d.full_at = '-infinity' THEN 'retired'
                    WHEN d.changed_at > d.now THEN 'stale'
                    -- A row under another quota is rescaled, but not while a reservation keeps this call waiting.
                    WHEN (d.n <> d.quota_n OR d.period_us <> d.quota_period_us) AND d.debt < 9000000000000000
                        AND (d.debt > d.room AND d.reserved_until > d.now) IS NOT TRUE THEN 'stale'
                    WHEN d.debt > d.room THEN 'spent'
                    WHEN d.updates >= 200 OR at_least IS NOT NULL OR max_wait_us > 0 THEN 'locking'
                END, d.is_valid, d.is_overridden
            INTO quota_n, quota_period_us, quota_burst, decided_at, found_generation, room,
                allowance, full_at, increase, reason, is_valid, is_overridden
            FROM (
                SELECT c.*,
                        CASE WHEN c.is_valid THEN resource_control.rate_limit_debt(
                            c.changed_at, c.full_at, c.reserved_until, c.n, c.period_us, c.now, c.quota_n, c.quota_period_us, c.quota_burst)
                        END AS debt,
                        CASE WHEN c.quota_burst >= COALESCE(at_least, cost) AND c.is_valid THEN max_wait_us
                            + resource_control.scaled_down(
                                c.quota_burst - COALESCE(at_least, cost), c.quota_period_us, c.quota_n)
                        END AS room
                    FROM (
                        SELECT COALESCE(o.n, decide_rate_limit.n) AS quota_n,
                                COALESCE(o.period_us, decide_rate_limit.period_us) AS quota_period_us,
                                COALESCE(o.burst, decide_rate_limit.burst) AS quota_burst, o.n IS NOT NULL AS is_overridden,
                                r.generation, r.updates, r.changed_at, r.full_at, r.reserved_until, r.n, r.period_us,
                                decide_rate_limit.n BETWEEN 1 AND 4294967295
                                    AND decide_rate_limit.burst BETWEEN 1 AND 4294967295
                                    AND decide_rate_limit.period_us BETWEEN 1 AND 31622400000000
                                    AND decide_rate_limit.burst::float8 * decide_rate_limit.period_us
                                        <= decide_rate_limit.n::float8 * 3162240000000000
                                    AND octet_length(name) BETWEEN 1 AND 1000 AND octet_length(key) <= 1000
                                    AND cost >= COALESCE(at_least, 1) AND COALESCE(at_least, 1) >= 1
                                    AND max_wait_us BETWEEN 0 AND 31622400000000 AS is_valid,
                                clock_timestamp() AS now
                            FROM (SELECT) AS one
                            LEFT JOIN LATERAL (
                                SELECT q.n, q.burst, resource_control.microseconds(q.period) AS period_us
                                    FROM resource_control.rate_limit_override AS q
                                    WHERE q.name = decide_rate_limit.name COLLATE "C"
                                        AND q.scope IN ('*', '=' || decide_rate_limit.key COLLATE "C")
                                    ORDER BY q.scope DESC
                                    LIMIT 1
                            ) AS o ON true
                            LEFT JOIN LATERAL (
                                SELECT b.*
                                    FROM resource_control.rate_limit AS b
                                    WHERE b.name = decide_rate_limit.name COLLATE "C"
                                        AND b.key = decide_rate_limit.key COLLATE "C"
                                    ORDER BY b.generation DESC
                                    LIMIT 1
                            ) AS r ON true
                    ) AS c
            ) AS d;

        IF reason = 'spent' THEN
            -- Most limited calls end with this read, without a lock and without a transaction id.
            units := 0;
            RETURN;
        ELSIF reason = 'invalid' THEN
            units := 0;
            reason := resource_control.refuse_rate_limit(name, key, n, period_us, burst,
                CASE WHEN is_valid THEN COALESCE(at_least, cost) END, is_overridden);
            RETURN;
        END IF;

        -- One block for the lock and the write, because a lock of one subtransaction and a write of another would need a
        -- multixact.
        BEGIN
            IF commit_async THEN
                setting := set_config('synchronous_commit', 'off', true);
            END IF;
            IF reason IS NULL THEN
                -- If this waits for another transaction that changes the row, PostgreSQL evaluates it again for the new row,
                -- with the clock of that moment. After one that was rolled back, it counts as if it had not waited.
                UPDATE resource_control.rate_limit AS b
                    SET updates = b.updates + 1, changed_at = clock_timestamp(),
                        full_at = GREATEST(b.full_at, clock_timestamp()) + increase
                    WHERE b.name = decide_rate_limit.name COLLATE "C" AND b.key = decide_rate_limit.key COLLATE "C"
                        AND b.generation = found_generation AND b.updates < 200 AND b.n = quota_n AND b.period_us = quota_period_us AND b.full_at > '-infinity'
                        AND b.full_at <= clock_timestamp() + allowance AND b.changed_at <= clock_timestamp()
                    RETURNING b.changed_at, b.full_at INTO decided_at, full_at;
                IF FOUND THEN
                    units := cost;
                    RETURN;
                END IF;
            ELSIF reason = 'first' THEN
                units := LEAST(cost, quota_burst);
                increase := resource_control.scaled_up(units, quota_period_us, quota_n) * interval '00:00:00.000001';
                decided_at := clock_timestamp();
                full_at := decided_at + increase;
                -- The first generation stays as long as the key exists, so of two first calls one conflicts here, even if
                -- the other one's row was replaced meanwhile, or is too new for the snapshot of this transaction.
                INSERT INTO resource_control.rate_limit AS b
                    (name, key, generation, updates, created_at, changed_at, full_at, n, period_us)
                    VALUES (name, key, 1, 1, decided_at, decided_at, full_at, quota_n, quota_period_us)
                    ON CONFLICT ON CONSTRAINT rate_limit_pkey DO NOTHING;
                IF FOUND THEN
                    late := clock_timestamp();
                    IF late >= decided_at
                        + resource_control.scaled_up(1, quota_period_us, quota_n) * interval '00:00:00.000001'
                    THEN
                        -- The INSERT took so long that another row of the key may have come and gone.
                        decided_at := late;
                        full_at := late + increase;
                        UPDATE resource_control.rate_limit AS b
                            SET created_at = late, changed_at = late, full_at = late + increase
                            WHERE b.name = decide_rate_limit.name COLLATE "C" AND b.key = decide_rate_limit.key COLLATE "C"
                                AND b.generation = 1;
                    END IF;
                    reason := NULL;
                    RETURN;
                END IF;
            ELSIF reason = 'retired' THEN
                -- The generation that replaced this one was deleted by hand. The next round finds a key without rows.
                PERFORM resource_control.forget_rate_limit(name, key, found_generation);
            ELSIF reason = 'stale' THEN
                PERFORM resource_control.settle_rate_limit(name, key, found_generation, quota_n, quota_period_us, quota_burst);
            ELSE
                SELECT b.* INTO held
                    FROM resource_control.rate_limit AS b
                    WHERE b.name = decide_rate_limit.name COLLATE "C" AND b.key = decide_rate_limit.key COLLATE "C"
                        AND b.generation = found_generation AND b.full_at > '-infinity'
                    FOR NO KEY UPDATE;
                CONTINUE WHEN NOT FOUND;
                decided_at := clock_timestamp();
                debt := resource_control.rate_limit_debt(
                    held.changed_at, held.full_at, held.reserved_until, held.n, held.period_us, decided_at, quota_n, quota_period_us,
                    quota_burst);
                full_at := decided_at + debt * interval '00:00:00.000001';
                CONTINUE WHEN held.n <> quota_n OR held.period_us <> quota_period_us OR held.changed_at > decided_at;
                IF debt > room THEN
                    units := 0;
                    reason := 'spent';
                    RETURN;
                END IF;
                -- A call that names a least number of units takes fewer than its cost if fewer are left.
                units := CASE WHEN at_least IS NULL THEN cost ELSE GREATEST(at_least, LEAST(cost,
                    quota_burst - resource_control.scaled_up(debt, quota_n, quota_period_us))) END;
                full_at := full_at
                    + resource_control.scaled_up(units, quota_period_us, quota_n) * interval '00:00:00.000001';
                IF max_wait_us > 0 THEN
                    held.reserved_until := GREATEST(held.reserved_until, decided_at + (debt - resource_control.scaled_down(
                        quota_burst - units, quota_period_us, quota_n)) * interval '00:00:00.000001');
                END IF;
                IF held.updates < 200 THEN
                    UPDATE resource_control.rate_limit AS b
                        SET updates = b.updates + 1, changed_at = decided_at, full_at = decide_rate_limit.full_at,
                            reserved_until = held.reserved_until
                        WHERE b.name = decide_rate_limit.name COLLATE "C" AND b.key = decide_rate_limit.key COLLATE "C"
                            AND b.generation = found_generation;
                ELSE
                    PERFORM resource_control.retire_rate_limit(name, key, found_generation);
                    INSERT INTO resource_control.rate_limit
                        (name, key, generation, updates, created_at, changed_at, full_at, n, period_us, reserved_until)
                        VALUES (name, key, found_generation + 1, 1, held.created_at, decided_at, full_at,
                            quota_n, quota_period_us, held.reserved_until);
                END IF;
                reason := NULL;
                RETURN;
            END IF;
        EXCEPTION WHEN lock_not_available OR deadlock_detected OR query_canceled THEN
            -- Also if the statement_timeout of the session is shorter than the wait.
            units := 0;
            reason := 'contended';
            RETURN;
        END;
    END LOOP;
END
$$;

-- Does the same for the states of a key that are common, and leaves the others to decide_rate_limit. PostgreSQL prepares each
-- expression of a function anew in each transaction, so there are few here, and the caller computes two arguments: the largest
-- debt with which its own quota allows the call, or null if none does, and what the cost adds to the debt. The quota that is
-- returned is null if it is the caller's own.
CREATE FUNCTION resource_control.spend_rate_limit(
    name text,
    key text,
    n bigint,
    period_us bigint,
    burst bigint,
    cost bigint,
    max_wait_us bigint,
    commit_async boolean,
    allowance interval,
    increase interval,
    OUT units bigint,
    OUT reason text,
    OUT decided_at timestamptz,
    OUT full_at timestamptz,
    OUT quota_n bigint,
    OUT quota_period_us bigint,
    OUT quota_burst bigint
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET lock_timeout = '250ms'
AS $$
#variable_conflict use_variable
DECLARE
    found_generation bigint;
    found_changed_at timestamptz;
    setting text;
BEGIN
    SELECT b.generation, b.changed_at, b.full_at INTO found_generation, found_changed_at, full_at
        FROM resource_control.rate_limit AS b
        WHERE b.name = spend_rate_limit.name COLLATE "C" AND b.key = spend_rate_limit.key COLLATE "C"
            AND b.n = spend_rate_limit.n AND b.period_us = spend_rate_limit.period_us
            AND NOT EXISTS (
                SELECT FROM resource_control.rate_limit_override AS q
                    WHERE q.name = spend_rate_limit.name COLLATE "C"
                        AND q.scope IN ('*', '=' || spend_rate_limit.key COLLATE "C"))
        ORDER BY b.generation DESC
        LIMIT 1;
    decided_at := clock_timestamp();
    IF found_changed_at <= decided_at AND full_at > decided_at + allowance THEN
        -- Most limited calls end with this read, without a lock and without a transaction id.
        units := 0;
        reason := 'spent';
        RETURN;
    END IF;
    IF found_generation IS NOT NULL AND max_wait_us = 0 THEN
        BEGIN
            IF commit_async THEN
                setting := set_config('synchronous_commit', 'off', true);
            END IF;
            -- If this waits for another transaction that changes the row, PostgreSQL evaluates it again for the new row, with
            -- the clock of that moment. After one that was rolled back, it counts as if it had not waited.
            UPDATE resource_control.rate_limit AS b
                SET updates = b.updates + 1, changed_at = clock_timestamp(),
                    full_at = GREATEST(b.full_at, clock_timestamp()) + increase
                WHERE b.name = spend_rate_limit.name COLLATE "C" AND b.key = spend_rate_limit.key COLLATE "C"
                    AND b.generation = found_generation AND b.updates < 200
                    AND b.n = spend_rate_limit.n AND b.period_us = spend_rate_limit.period_us AND b.full_at > '-infinity'
                    AND b.full_at <= clock_timestamp() + allowance AND b.changed_at <= clock_timestamp()
                RETURNING b.changed_at, b.full_at INTO decided_at, full_at;
            IF FOUND THEN
                units := cost;
                RETURN;
            END IF;
        EXCEPTION WHEN lock_not_available OR deadlock_detected OR query_canceled THEN
            -- Also if the statement_timeout of the session is shorter than the wait.
            units := 0;
            reason := 'contended';
            RETURN;
        END;
    END IF;
    SELECT * INTO units, reason, decided_at, full_at, quota_n, quota_period_us, quota_burst
        FROM resource_control.decide_rate_limit(
            name, key, n, period_us, burst, cost, max_wait_us, NULL, commit_async);
END
$$;

CREATE FUNCTION resource_control.reserve_rate_limit_within(
    name text,
    key text,
    n bigint,
    period interval,
    burst bigint,
    cost bigint,
    max_wait interval,
    commit_async boolean,
    patience text,
    OUT allowed boolean,
    OUT units bigint,
    OUT reason text,
    OUT decided_at timestamptz,
    OUT wait interval,
    OUT retry_after interval,
    OUT remaining bigint,
    OUT full_in interval,
    OUT quota_n bigint,
    OUT quota_period interval,
    OUT quota_burst bigint
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    us CONSTANT interval := '00:00:00.000001';
    debt bigint;
    wait_us bigint;
    spent record;
BEGIN
    SELECT * INTO spent
        FROM resource_control.decide_rate_limit(
            name, key, n, resource_control.microseconds(period), burst, cost,
            CASE WHEN max_wait IS NOT NULL THEN resource_control.microseconds(LEAST(max_wait, '366 days')) END,
            NULL, commit_async, patience);
    allowed := spent.units > 0;
    units := spent.units;
    reason := spent.reason;
    decided_at := spent.decided_at;
    quota_n := spent.quota_n;
    quota_period := spent.quota_period_us * us;
    quota_burst := spent.quota_burst;
    -- What is owed before the call.
    debt := GREATEST((date_part('epoch', spent.full_at - decided_at) * 1000000)::bigint, 0)
        - resource_control.scaled_up(units, spent.quota_period_us, quota_n);
    -- The UPDATE reads the clock twice, and a debt is rounded up by less than a microsecond for each call. So that a key does
    -- not seem to have a unit less because of that, this tells what is left a moment later.
    remaining := GREATEST(quota_burst - units - resource_control.scaled_up(
        GREATEST(debt - CASE WHEN allowed THEN LEAST(spent.quota_period_us / quota_n / 2, 1000) ELSE 0 END, 0),
        quota_n, spent.quota_period_us), 0);
    full_in := GREATEST(spent.full_at - decided_at, '0');
    IF cost <= quota_burst THEN
        wait_us := GREATEST(debt - resource_control.scaled_down(quota_burst - cost, spent.quota_period_us, quota_n), 0);
    END IF;
    IF allowed THEN
        wait := wait_us * us;
    ELSE
        retry_after := CASE reason WHEN 'contended' THEN '250ms' ELSE wait_us * us END;
    END IF;
END
$$;

CREATE FUNCTION resource_control.reserve_rate_limit(
    name text,
    key text,
    n bigint,
    period interval,
    burst bigint,
    cost bigint,
    max_wait interval,
    commit_async boolean DEFAULT false,
    OUT allowed boolean,
    OUT units bigint,
    OUT reason text,
    OUT decided_at timestamptz,
    OUT wait interval,
    OUT retry_after interval,
    OUT remaining bigint,
    OUT full_in interval,
    OUT quota_n bigint,
    OUT quota_period interval,
    OUT quota_burst bigint
)
    LANGUAGE sql VOLATILE
AS $$
    SELECT r.allowed, r.units, r.reason, r.decided_at, r.wait, r.retry_after, r.remaining, r.full_in,
            r.quota_n, r.quota_period, r.quota_burst
        FROM resource_control.reserve_rate_limit_within(name, key, n, period, burst, cost, max_wait, commit_async, NULL) AS r
$$;

CREATE FUNCTION resource_control.check_rate_limit(
    name text,
    key text,
    n bigint,
    period interval,
    burst bigint,
    cost bigint DEFAULT 1,
    commit_async boolean DEFAULT false,
    OUT allowed boolean,
    OUT units bigint,
    OUT reason text,
    OUT decided_at timestamptz,
    OUT wait interval,
    OUT retry_after interval,
    OUT remaining bigint,
    OUT full_in interval,
    OUT quota_n bigint,
    OUT quota_period interval,
    OUT quota_burst bigint
)
    LANGUAGE sql VOLATILE
AS $$
    SELECT r.allowed, r.units, r.reason, r.decided_at, r.wait, r.retry_after, r.remaining, r.full_in,
            r.quota_n, r.quota_period, r.quota_burst
        FROM resource_control.reserve_rate_limit_within(name, key, n, period, burst, cost, '0', commit_async, NULL) AS r
$$;

-- Checks several limits. All calls are allowed, or none is. The arrays that it returns are in the order of the given ones.
CREATE FUNCTION resource_control.check_rate_limits(
    names text[],
    keys text[],
    ns bigint[],
    periods interval[],
    bursts bigint[],
    costs bigint[],
    commit_async boolean DEFAULT false,
    OUT allowed boolean,
    OUT limited_by integer,
    OUT reason text,
    OUT retry_after interval,
    OUT decided_at timestamptz[],
    OUT remaining bigint[],
    OUT full_in interval[],
    OUT quota_n bigint[],
    OUT quota_period interval[],
    OUT quota_burst bigint[]
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET lock_timeout = '250ms'
AS $$
#variable_conflict use_variable
DECLARE
    us CONSTANT interval := '00:00:00.000001';
    given record;
    state record;
    place integer;
    wait_us bigint;
    longest bigint := 0;
    violated text;
    stale text[];
    patience text;
BEGIN
    IF cardinality(names) IS NULL OR NOT cardinality(names) = ALL (ARRAY[
        COALESCE(cardinality(keys), 0), COALESCE(cardinality(ns), 0), COALESCE(cardinality(periods), 0),
        COALESCE(cardinality(bursts), 0), COALESCE(cardinality(costs), 0)])
    THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_rate_limit',
            MESSAGE = 'the arrays must have the same length';
    END IF;
    IF EXISTS (
        SELECT FROM unnest(names, keys, ns, periods, bursts) AS u (name, key, n, period, burst)
            GROUP BY u.name COLLATE "C", u.key COLLATE "C"
            HAVING min(u.n) <> max(u.n) OR min(u.burst) <> max(u.burst)
                OR min(resource_control.microseconds(u.period)) <> max(resource_control.microseconds(u.period)))
    THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_different_quotas',
            MESSAGE = 'the same key is given twice, with different quotas';
    END IF;
    IF EXISTS (SELECT FROM unnest(costs) AS c (cost) WHERE (c.cost >= 1) IS NOT TRUE) THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_cost',
            MESSAGE = 'the cost of each call must be at least 1';
    END IF;
    allowed := false;

    -- Reads first without locks, so that most limited calls change nothing.
    FOR given IN
        SELECT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key, u.n, u.period, u.burst,
                sum(u.cost)::bigint AS cost, min(u.place)::integer AS place
            FROM unnest(names, keys, ns, periods, bursts, costs)
                WITH ORDINALITY AS u (name, key, n, period, burst, cost, place)
            GROUP BY 1, 2, 3, 4, 5
            ORDER BY 1, 2
    LOOP
        SELECT * INTO state
            FROM resource_control.read_rate_limit(given.name, given.key, given.n, given.period, given.burst);
        IF stale IS NULL AND state.stale_generation IS NOT NULL THEN
            stale := ARRAY[given.name, given.key, state.stale_generation::text,
                state.quota_n::text, state.quota_period_us::text, state.quota_burst::text];
        END IF;
        IF given.cost > state.quota_burst THEN
            IF NOT state.is_overridden THEN
                RAISE check_violation USING
                    CONSTRAINT = 'diesel_interlock_cost_above_burst',
                    MESSAGE = format('the cost %s is above the burst %s of the rate limit %L',
                        given.cost, state.quota_burst, given.name),
                    DETAIL = format('place %s', given.place);
            END IF;
            wait_us := 9223372036854775807;
        ELSE
            wait_us := state.debt_us - resource_control.scaled_down(
                state.quota_burst - given.cost, state.quota_period_us, state.quota_n);
        END IF;
        IF wait_us > longest THEN
            longest := wait_us;
            limited_by := given.place;
            reason := CASE WHEN given.cost > state.quota_burst THEN 'above_burst' ELSE 'spent' END;
            retry_after := CASE WHEN reason = 'spent' THEN wait_us * us END;
            decided_at := ARRAY[state.decided_at];
            remaining := ARRAY[GREATEST(
                state.quota_burst - resource_control.scaled_up(state.debt_us, state.quota_n, state.quota_period_us), 0)];
            full_in := ARRAY[state.debt_us * us];
            quota_n := ARRAY[state.quota_n];
            quota_period := ARRAY[state.quota_period_us * us];
            quota_burst := ARRAY[state.quota_burst];
        END IF;
    END LOOP;
    IF limited_by IS NOT NULL THEN
        IF stale IS NOT NULL THEN
            BEGIN
                -- The next call settles the next key, because this one must not wait for a key while it holds another.
                IF commit_async THEN
                    PERFORM set_config('synchronous_commit', 'off', true);
                END IF;
                -- A limited call does not wait for another transaction.
                PERFORM set_config('lock_timeout', '1ms', true);
                PERFORM resource_control.settle_rate_limit(
                    stale[1], stale[2], stale[3]::bigint, stale[4]::bigint, stale[5]::bigint, stale[6]::bigint);
            EXCEPTION WHEN lock_not_available OR deadlock_detected OR query_canceled THEN
                NULL; -- A later call does it.
            END;
        END IF;
        RETURN;
    END IF;

    -- Spends in the order of the primary key, as everything here that locks several rows, because two calls that lock the
    -- same rows in different orders would deadlock. While it waits for another transaction at a later key, for example one that
    -- somebody left open, the calls for the earlier keys wait, too. One of these may be a limit that all customers share. So it
    -- has less patience there.
    BEGIN
        FOR given IN
            SELECT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key, u.n, u.period, u.burst,
                    sum(u.cost)::bigint AS cost, array_agg(u.place::integer) AS places
                FROM unnest(names, keys, ns, periods, bursts, costs)
                    WITH ORDINALITY AS u (name, key, n, period, burst, cost, place)
                GROUP BY 1, 2, 3, 4, 5
                ORDER BY 1, 2
        LOOP
            SELECT * INTO state
                FROM resource_control.reserve_rate_limit_within(given.name, given.key, given.n, given.period, given.burst,
                    given.cost, '0', commit_async, patience);
            IF NOT state.allowed THEN
                limited_by := given.places[1];
                reason := state.reason;
                retry_after := state.retry_after;
                decided_at := ARRAY[state.decided_at];
                remaining := ARRAY[state.remaining];
                full_in := ARRAY[state.full_in];
                quota_n := ARRAY[state.quota_n];
                quota_period := ARRAY[state.quota_period];
                quota_burst := ARRAY[state.quota_burst];
                RAISE check_violation USING CONSTRAINT = 'diesel_interlock_limited';
            END IF;
            FOREACH place IN ARRAY given.places LOOP
                decided_at[place] := state.decided_at;
                remaining[place] := state.remaining;
                full_in[place] := state.full_in;
                quota_n[place] := state.quota_n;
                quota_period[place] := state.quota_period;
                quota_burst[place] := state.quota_burst;
            END LOOP;
            patience := '25ms';
        END LOOP;
        allowed := true;
    EXCEPTION WHEN check_violation THEN
        -- What was spent in this block is rolled back.
        GET STACKED DIAGNOSTICS violated = CONSTRAINT_NAME;
        IF violated <> 'diesel_interlock_limited' THEN
            RAISE;
        END IF;
    END;
END
$$;

-- Gives units back that were spent and not used. Time that has passed since then has refilled the key already, so it is
-- subtracted. So is the time until the last moment that a reservation was told, because that moment stays as it was told. With
-- the units given back, the key may be full before then, and it must not count that time and the units both.
CREATE FUNCTION resource_control.give_back_rate_limit(
    name text,
    key text,
    units bigint,
    spent_at timestamptz,
    wait interval DEFAULT '0',
    commit_async boolean DEFAULT false
) RETURNS bigint
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET lock_timeout = '250ms'
AS $$
#variable_conflict use_variable
DECLARE
    wanted_name CONSTANT text COLLATE "C" := name;
    wanted_key CONSTANT text COLLATE "C" := key;
    us CONSTANT interval := '00:00:00.000001';
    held resource_control.rate_limit;
    now timestamptz;
    age bigint;
    debt bigint;
    worth bigint;
BEGIN
    IF (units BETWEEN 1 AND 4294967295 AND spent_at IS NOT NULL AND wait >= '0') IS NOT TRUE THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_cost',
            MESSAGE = 'the units must be 1 to 4294967295, the moment must not be null, and the wait must not be negative';
    END IF;
    FOR round IN 1 .. 20 LOOP
        SELECT b.* INTO held
            FROM resource_control.rate_limit AS b
            WHERE b.name = wanted_name AND b.key = wanted_key
            ORDER BY b.generation DESC
            LIMIT 1;
        EXIT WHEN NOT FOUND;
        BEGIN
            IF commit_async THEN
                PERFORM set_config('synchronous_commit', 'off', true);
            END IF;
            SELECT b.* INTO held
                FROM resource_control.rate_limit AS b
                WHERE b.name = wanted_name AND b.key = wanted_key AND b.generation = held.generation
                    AND b.full_at > '-infinity'
                FOR NO KEY UPDATE;
            CONTINUE WHEN NOT FOUND;
            now := clock_timestamp();
            -- A key that was reset or pruned since then owes nothing of what was spent before. One that was given another quota
            -- may have been refilled at that one's rate, and counts as created then. A row that was last changed before the
            -- spend has lost it, by a failover or a crash, or the clock was set back, and nobody knows how much time has passed.
            -- One that is closed by hand stays so.
            EXIT WHEN held.created_at > spent_at OR held.changed_at < spent_at OR held.full_at = 'infinity';
            age := GREATEST(date_part('epoch', GREATEST(now, held.changed_at, held.reserved_until) - spent_at) * 1000000
                - resource_control.microseconds(wait), 0);
            debt := resource_control.rate_limit_debt(
                held.changed_at, held.full_at, held.reserved_until, held.n, held.period_us, now, held.n, held.period_us, 1);
            worth := LEAST(resource_control.scaled_down(units, held.period_us, held.n) - age, debt);
            EXIT WHEN worth <= 0;
            UPDATE resource_control.rate_limit AS b
                SET updates = held.updates + 1, changed_at = now, full_at = now + (debt - worth) * us,
                    -- As settle_rate_limit writes it, if the clock was set back.
                    created_at = GREATEST(held.created_at, CASE WHEN held.changed_at > now THEN held.changed_at + us END),
                    reserved_until = LEAST(held.reserved_until,
                        now + (date_part('epoch', held.reserved_until - held.changed_at) * 1000000)::bigint * us)
                WHERE b.name = wanted_name AND b.key = wanted_key AND b.generation = held.generation;
            RETURN LEAST(resource_control.scaled_up(worth, held.n, held.period_us), units);
        EXCEPTION WHEN lock_not_available OR deadlock_detected OR query_canceled THEN
            RETURN 0;
        END;
    END LOOP;
    RETURN 0;
END
$$;

CREATE FUNCTION resource_control.peek_rate_limit(
    name text,
    key text,
    n bigint,
    period interval,
    burst bigint,
    OUT remaining bigint,
    OUT full_in interval,
    OUT quota_n bigint,
    OUT quota_period interval,
    OUT quota_burst bigint
)
    LANGUAGE sql VOLATILE
AS $$
    SELECT GREATEST(
                r.quota_burst OPERATOR(pg_catalog.-)
                    resource_control.scaled_up(r.debt_us, r.quota_n, r.quota_period_us), 0),
            r.debt_us OPERATOR(pg_catalog.*) '00:00:00.000001'::interval,
            r.quota_n,
            r.quota_period_us OPERATOR(pg_catalog.*) '00:00:00.000001'::interval,
            r.quota_burst
        FROM resource_control.read_rate_limit(name, key, n, period, burst) AS r
$$;

-- Deletes a key, or all keys of the name.
CREATE FUNCTION resource_control.reset_rate_limit(
    name text,
    key text DEFAULT NULL,
    commit_async boolean DEFAULT false
) RETURNS bigint
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET lock_timeout = '250ms'
AS $$
#variable_conflict use_variable
DECLARE
    wanted_name CONSTANT text COLLATE "C" := name;
    wanted_key text COLLATE "C";
    found_generation bigint;
    is_retired boolean;
    is_full boolean;
    deleted bigint := 0;
BEGIN
    BEGIN
        IF commit_async THEN
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        FOREACH wanted_key IN ARRAY CASE
            WHEN key IS NOT NULL THEN ARRAY[key]
            ELSE ARRAY(
                SELECT b.key FROM resource_control.rate_limit AS b
                    WHERE b.name = wanted_name GROUP BY b.key ORDER BY b.key)
        END LOOP
            LOOP
                SELECT b.generation, b.full_at = '-infinity' INTO found_generation, is_retired
                    FROM resource_control.rate_limit AS b
                    WHERE b.name = wanted_name AND b.key = wanted_key
                    ORDER BY b.generation DESC
                    LIMIT 1;
                EXIT WHEN NOT FOUND;
                EXIT WHEN is_retired AND resource_control.forget_rate_limit(wanted_name, wanted_key, found_generation);
                SELECT b.full_at <= GREATEST(b.changed_at, clock_timestamp()) INTO is_full
                    FROM resource_control.rate_limit AS b
                    WHERE b.name = wanted_name AND b.key = wanted_key AND b.generation = found_generation
                        AND b.full_at > '-infinity'
                    FOR UPDATE;
                -- Otherwise another session replaced the row at the same moment.
                IF FOUND THEN
                    DELETE FROM resource_control.rate_limit AS b WHERE b.name = wanted_name AND b.key = wanted_key;
                    deleted := deleted + CASE WHEN is_full THEN 0 ELSE 1 END;
                    EXIT;
                END IF;
            END LOOP;
        END LOOP;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_contended',
            MESSAGE = format('another transaction has locked the rate limit %L for 250 ms', name),
            HINT = 'Repeat the call. A transaction that was left open may hold the lock.';
    END;
    RETURN deleted;
END
$$;

-- Locks in the order of the primary key, and does not skip locked rows, because PostgreSQL waits nevertheless for a row that
-- was updated meanwhile, and would then deadlock with check_rate_limits.
CREATE FUNCTION resource_control.prune_rate_limits(
    after_name text DEFAULT '',
    after_key text DEFAULT '',
    batch integer DEFAULT 1000,
    OUT pruned integer,
    OUT last_name text,
    OUT last_key text
)
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET lock_timeout = '50ms'
AS $$
#variable_conflict use_variable
DECLARE
    start_name CONSTANT text COLLATE "C" := after_name;
    start_key CONSTANT text COLLATE "C" := after_key;
    names text[] COLLATE "C";
    keys text[] COLLATE "C";
    are_full boolean[];
    passed integer;
    stop integer;
    reached integer;
    found_generation bigint;
    is_retired boolean;
BEGIN
    IF (batch >= 1) IS NOT TRUE OR after_name IS NULL OR after_key IS NULL THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_bad_pruning',
            MESSAGE = 'the batch must be at least 1, and the position must not be null';
    END IF;
    SELECT count(*), array_agg(r.name ORDER BY r.name, r.key), array_agg(r.key ORDER BY r.name, r.key),
            array_agg(r.is_full ORDER BY r.name, r.key)
        INTO passed, names, keys, are_full
        FROM (
            -- The first generation of a key that has a later one counts as full here. Below, only the last one counts.
            SELECT b.name, b.key, b.full_at <= GREATEST(b.changed_at, clock_timestamp()) AS is_full
                FROM resource_control.rate_limit AS b
                WHERE (b.name, b.key) > (start_name, start_key)
                ORDER BY b.name, b.key, b.generation
                LIMIT batch
        ) AS r;
    IF passed = batch THEN
        last_name := names[passed];
        last_key := keys[passed];
    END IF;
    stop := passed;
    LOOP
        pruned := 0;
        BEGIN
            FOR place IN 1 .. stop LOOP
                CONTINUE WHEN NOT are_full[place];
                reached := place;
                SELECT b.generation, b.full_at = '-infinity' INTO found_generation, is_retired
                    FROM resource_control.rate_limit AS b
                    WHERE b.name = names[place] AND b.key = keys[place]
                    ORDER BY b.generation DESC
                    LIMIT 1;
                CONTINUE WHEN NOT FOUND;
                IF is_retired THEN
                    IF resource_control.forget_rate_limit(names[place], keys[place], found_generation) THEN
                        pruned := pruned + 1;
                    END IF;
                    CONTINUE;
                END IF;
                -- Reads without the lock first, because checks of a locked key wait until the end of this transaction.
                CONTINUE WHEN NOT EXISTS (
                    SELECT FROM resource_control.rate_limit AS b
                        WHERE b.name = names[place] AND b.key = keys[place] AND b.generation = found_generation
                            AND b.full_at <= GREATEST(b.changed_at, clock_timestamp()));
                PERFORM FROM resource_control.rate_limit AS b
                    WHERE b.name = names[place] AND b.key = keys[place] AND b.generation = found_generation
                        AND b.full_at > '-infinity' AND b.full_at <= GREATEST(b.changed_at, clock_timestamp())
                    FOR UPDATE;
                CONTINUE WHEN NOT FOUND;
                DELETE FROM resource_control.rate_limit AS b WHERE b.name = names[place] AND b.key = keys[place];
                pruned := pruned + 1;
            END LOOP;
            EXIT;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            -- Another transaction holds this key. Prunes those before it, and lets the next call begin after it.
            stop := reached - 1;
            last_name := names[reached];
            last_key := keys[reached];
        END;
    END LOOP;
END
$$;

COMMENT ON TABLE resource_control.rate_limit IS
    'What is left of rate limits: a row for each limit and key that was used, until it is pruned, and the first generation of those keys that have a later generation. A missing row means a full key.';
COMMENT ON COLUMN resource_control.rate_limit.generation IS
    'The row of the largest generation counts. After 200 updates the next generation replaces it, because old versions of a row slow down a search for it as long as a snapshot needs them.';
COMMENT ON COLUMN resource_control.rate_limit.updates IS
    'The number of updates in this generation.';
COMMENT ON COLUMN resource_control.rate_limit.created_at IS
    'When the key was used first, or first after it was reset, pruned, or given another quota. If the clock was set back since then, a microsecond after the last change by the old clock.';
COMMENT ON COLUMN resource_control.rate_limit.changed_at IS
    'When the row was changed last, by the server''s clock: units were spent or given back, or the debt was rewritten for another quota or clock.';
COMMENT ON COLUMN resource_control.rate_limit.full_at IS
    'When the key is full again if no more units are spent; -infinity in a first generation that a later one replaced.';
COMMENT ON COLUMN resource_control.rate_limit.n IS
    'N of the quota under which the row was written.';
COMMENT ON COLUMN resource_control.rate_limit.period_us IS
    'The period of the quota under which the row was written, in microseconds.';
COMMENT ON COLUMN resource_control.rate_limit.reserved_until IS
    'Each reservation may be used from some moment on. This is the latest of these moments, or null if there was no reservation in this row.';
COMMENT ON TABLE resource_control.rate_limit_override IS
    'Quotas that operators set. The row of the key counts, else the row of the name, else the quota of the program.';
COMMENT ON COLUMN resource_control.rate_limit_override.key IS
    'The key, or null for all keys of the name.';
COMMENT ON COLUMN resource_control.rate_limit_override.scope IS
    'An equals sign and the key, or an asterisk for all keys of the name.';
COMMENT ON COLUMN resource_control.rate_limit_override.period IS
    'Elapsed time: a day is 24 hours and a month 30 days, in every time zone.';
COMMENT ON FUNCTION resource_control.scaled_up(bigint, bigint, bigint) IS
    'The amount times the multiplier, divided by the divisor, rounded up; at most 9223372036854775807.';
COMMENT ON FUNCTION resource_control.scaled_down(bigint, bigint, bigint) IS
    'The amount times the multiplier, divided by the divisor, rounded down.';
COMMENT ON FUNCTION resource_control.rescaled(bigint, bigint, bigint, bigint, bigint) IS
    'The time in which the wanted quota refills what the other one refills in the given time, in microseconds, rounded up.';
COMMENT ON FUNCTION resource_control.rate_limit_debt(timestamptz, timestamptz, timestamptz, bigint, bigint, timestamptz, bigint, bigint, bigint) IS
    'How long a key takes to be full again under the wanted quota, in microseconds.';
COMMENT ON FUNCTION resource_control.microseconds(interval) IS
    'The interval as elapsed time, in microseconds.';
COMMENT ON FUNCTION resource_control.read_rate_limit(text, text, bigint, interval, bigint) IS
    'The quota in force of a key, and how long the key takes to be full again. Part of peek_rate_limit and check_rate_limits.';
COMMENT ON FUNCTION resource_control.retire_rate_limit(text, text, bigint) IS
    'Removes a generation that a later one replaces: deletes the row, or marks the first generation as one that no longer counts. Part of settle_rate_limit and decide_rate_limit.';
COMMENT ON FUNCTION resource_control.forget_rate_limit(text, text, bigint) IS
    'Deletes what is left of a key whose newest row was deleted by hand. Part of decide_rate_limit, reset_rate_limit and prune_rate_limits.';
COMMENT ON FUNCTION resource_control.settle_rate_limit(text, text, bigint, bigint, bigint, bigint) IS
    'Converts the debt of a key to another quota and to the present clock, and writes it. Part of decide_rate_limit and check_rate_limits.';
COMMENT ON FUNCTION resource_control.refuse_rate_limit(text, text, bigint, bigint, bigint, bigint, boolean) IS
    'Raises an error for invalid arguments. Returns above_burst if only an override refuses the cost. Part of decide_rate_limit and read_rate_limit.';
COMMENT ON FUNCTION resource_control.decide_rate_limit(text, text, bigint, bigint, bigint, bigint, bigint, bigint, boolean, text) IS
    'As reserve_rate_limit_within, in microseconds. With at_least it spends fewer units than the cost, down to at_least, if fewer are left.';
COMMENT ON FUNCTION resource_control.reserve_rate_limit_within(text, text, bigint, interval, bigint, bigint, interval, boolean, text) IS
    'As reserve_rate_limit, but waits for another transaction at most as long as patience says, a value of lock_timeout. Part of reserve_rate_limit, check_rate_limit and check_rate_limits.';
COMMENT ON FUNCTION resource_control.spend_rate_limit(text, text, bigint, bigint, bigint, bigint, bigint, boolean, interval, interval) IS
    'As decide_rate_limit, and faster. For this crate only: allowance must be the largest debt with which the quota and the wait allow the call, or null if they never do. increase must be what the cost adds to the debt.';
COMMENT ON FUNCTION resource_control.check_rate_limit(text, text, bigint, interval, bigint, bigint, boolean) IS
    'Spends units of a key if the limit allows it: at most burst + W * n / period units in any time W. Waits at most 250 ms for each transaction that it meets at the key. Call it in a transaction of its own and commit at once, because other calls that spend units of the key wait until then, and a rollback gives the units back. Call it at READ COMMITTED, because at a stricter level it may fail with a serialization failure and must be retried. With commit_async, the transaction commits without waiting for the disk.';
COMMENT ON FUNCTION resource_control.reserve_rate_limit(text, text, bigint, interval, bigint, bigint, interval, boolean) IS
    'As check_rate_limit, but also spends units of the future, if the wait for them is at most max_wait. Returns how long to wait.';
COMMENT ON FUNCTION resource_control.check_rate_limits(text[], text[], bigint[], interval[], bigint[], bigint[], boolean) IS
    'Spends units of several keys if all limits allow the call, and otherwise spends nothing. In that case limited_by is the place of the limit that refuses: the one with the longest wait, or the first one that refuses while the units are being spent. A key that is given twice is checked once, for the sum of the costs. Waits at most 25 ms for each key after the first. Otherwise as check_rate_limit.';
COMMENT ON FUNCTION resource_control.give_back_rate_limit(text, text, bigint, timestamptz, interval, boolean) IS
    'Gives back units that were spent at spent_at and not used, less what was refilled since then. For a reservation, wait is how long it had to wait, and the refill counts from the end of that wait. Time until the last moment that others have reserved counts as passed. Gives nothing back if the key was reset, pruned or given another quota since then, or if the server has lost the spend and the key was not used since. Returns how many units the key got back, rounded up. The same unit must not be given back twice. Otherwise as check_rate_limit.';
COMMENT ON FUNCTION resource_control.peek_rate_limit(text, text, bigint, interval, bigint) IS
    'How many units of a key are left, when it is full again, and the quota in force. Changes nothing.';
COMMENT ON FUNCTION resource_control.reset_rate_limit(text, text, boolean) IS
    'Makes a key full, or without a key all keys of the name. Returns how many were not. Waits at most 250 ms for each transaction that it meets at a key. If that is too short, it raises diesel_interlock_contended and changes nothing.';
COMMENT ON FUNCTION resource_control.prune_rate_limits(text, text, integer) IS
    'Looks at the rows after after_name and after_key, at most as many as batch says, and deletes those of their keys that are full. Returns how many it deleted, and the name and key after which to continue: null if no rows follow. Commit at once, because checks of those keys wait until then.';

PERFORM pg_catalog.set_config('search_path', callers_path, true);
INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000006');
END
$migration$;
