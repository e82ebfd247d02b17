DO $migration$
DECLARE
    callers_path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
BEGIN
-- Runs one migration at a time, and only if its version is not recorded.
PERFORM pg_catalog.pg_advisory_xact_lock(20000101000000);
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000002') THEN
    RETURN;
END IF;
-- Otherwise the objects below could refer to objects of the caller with the same names.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

-- The type and the table exist if migrations::install adopts a schema that was created by hand.
IF pg_catalog.to_regtype('resource_control.throttled_resource_enum') IS NULL THEN
CREATE TYPE resource_control.throttled_resource_enum AS ENUM ();

CREATE TABLE resource_control.throttled_resource (
    resource_id resource_control.throttled_resource_enum PRIMARY KEY,
    throttle_interval interval NOT NULL
        CONSTRAINT positive_delays_only CHECK (throttle_interval > '00:00:00'),
    last_locked timestamptz NOT NULL DEFAULT '-infinity',
    last_locker_details text NOT NULL DEFAULT ''
        CONSTRAINT empty_rules CHECK (
            (last_locked = '-infinity' AND last_locker_details = '')
            OR (last_locked <> '-infinity' AND length(trim(last_locker_details)) > 0)
        )
)
-- Leaves room for the next version of a row in the same page, because each grant would otherwise write to the index.
WITH (fillfactor = 50);
ELSE
    ALTER TABLE resource_control.throttled_resource SET (fillfactor = 50);
END IF;

-- The result is limited, because a time beyond PostgreSQL's range is an error. A resource with such an interval would fail every
-- attempt, and the pruning of all resources. Names are qualified, because that costs less than a search path of its own.
CREATE FUNCTION resource_control.elapsed_with_days(span interval) RETURNS interval
    LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
AS $$
BEGIN
    IF span OPERATOR(pg_catalog.>) '1000 years' THEN
        RETURN '8640000:00:00';
    END IF;
    RETURN pg_catalog.make_interval(secs => (
            (
                (
                    (extract(year FROM span) OPERATOR(pg_catalog.*) 12) OPERATOR(pg_catalog.+) extract(month FROM span)
                ) OPERATOR(pg_catalog.*) 30 OPERATOR(pg_catalog.+) extract(day FROM span)
            ) OPERATOR(pg_catalog.*) 86400
            OPERATOR(pg_catalog.+) (extract(hour FROM span) OPERATOR(pg_catalog.*) 3600)
            OPERATOR(pg_catalog.+) (extract(minute FROM span) OPERATOR(pg_catalog.*) 60)
        )::pg_catalog.float8)
        -- The seconds are separate, because one number would round the microseconds of a century.
        OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => extract(second FROM span)::pg_catalog.float8);
END
$$;

-- It is not STRICT, so that PostgreSQL inlines it, and names are qualified, because it is inlined under the caller's search path.
-- PostgreSQL prepares an inlined expression for each statement anew, so the conversion, which few intervals need, is a function.
CREATE FUNCTION resource_control.elapsed(span interval) RETURNS interval
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE
        WHEN pg_catalog.date_part('day', span) OPERATOR(pg_catalog.=) 0
            AND pg_catalog.date_trunc('month', span) OPERATOR(pg_catalog.=) '0'
            AND span OPERATOR(pg_catalog.<=) '1000 years'
        THEN span
        ELSE resource_control.elapsed_with_days(span)
    END
$$;

-- Called if a row was not found, because a transaction whose snapshot is older than the row does not see it.
CREATE FUNCTION resource_control.require_read_committed() RETURNS void
    LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE serialization_failure USING
            MESSAGE = 'a transaction stricter than READ COMMITTED may not see what was committed since it began',
            HINT = 'Call the function at READ COMMITTED, or repeat the transaction.';
    END IF;
END
$$;

-- The settings keep the caller's search path from hiding a function or an operator, and make a plan that was chosen for a
-- small table use the index, because the table may grow.
CREATE FUNCTION resource_control.attempt_throttled_resource(
    resource resource_control.throttled_resource_enum,
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
    span interval;
    version tid;
    tried boolean := false;
BEGIN
    IF details IS NULL OR length(btrim(details)) = 0 THEN
        RAISE check_violation USING
            CONSTRAINT = 'diesel_interlock_empty_details',
            MESSAGE = 'the details are empty: say who takes the resource';
    END IF;

    LOOP
        SELECT resource_control.elapsed(r.throttle_interval), r.last_locked, r.last_locker_details
            INTO span, held_since, holder
            FROM resource_control.throttled_resource AS r WHERE r.resource_id = resource;
        IF NOT FOUND THEN
            PERFORM resource_control.require_read_committed();
            RAISE check_violation USING
                CONSTRAINT = 'diesel_interlock_unknown_resource',
                MESSAGE = format('%L has no row in resource_control.throttled_resource', resource);
        END IF;
        decided_at := clock_timestamp();
        IF held_since > decided_at - span THEN
            -- Most attempts come too soon and end with this read, without a lock and without a transaction id.
            granted := false;
            being_taken := false;
            next_at := held_since + span;
            -- A resource whose last_locked was set to infinity by hand is closed until it is set to another time.
            retry_after := CASE WHEN isfinite(next_at) THEN next_at - decided_at ELSE span END;
            RETURN;
        END IF;
        EXIT WHEN tried;

        -- Locks the row only if it is still due, because a denial would keep the lock until the transaction ends. FOR
        -- UPDATE would conflict with the foreign key of an insert in an open transaction.
        SELECT r.ctid INTO version FROM resource_control.throttled_resource AS r
            WHERE r.resource_id = resource AND r.last_locked <= clock_timestamp() - span
            FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND THEN
            -- Reads the clock as it writes the row, because the UPDATE may wait for a lock of the table. Finds the row
            -- by its ctid, because the index would visit all versions of the row that an old snapshot keeps.
            UPDATE resource_control.throttled_resource AS r
                SET last_locked = clock_timestamp(), last_locker_details = details
                WHERE r.ctid = version
                RETURNING r.last_locked INTO decided_at;
        END IF;
        IF FOUND THEN
            granted := true;
            being_taken := false;
            next_at := decided_at + span;
            holder := details;
            held_since := decided_at;
            RETURN;
        END IF;
        tried := true;
    END LOOP;

    -- Another transaction is taking the resource. Its details are not committed and may be rolled back.
    granted := false;
    being_taken := true;
    next_at := decided_at + span;
    retry_after := span;
    holder := NULL;
    held_since := NULL;
END
$$;

CREATE OR REPLACE FUNCTION resource_control.lock_throttled_resource(
    resource_id_var resource_control.throttled_resource_enum,
    details_var text
) RETURNS boolean
    LANGUAGE plpgsql STRICT VOLATILE
    SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off
    SET enable_bitmapscan = off
AS $$
BEGIN
    PERFORM FROM resource_control.throttled_resource WHERE resource_id = resource_id_var;
    IF NOT FOUND THEN
        PERFORM resource_control.require_read_committed();
        RETURN false;
    END IF;
    RETURN (SELECT granted FROM resource_control.attempt_throttled_resource(resource_id_var, details_var));
END
$$;

COMMENT ON TABLE resource_control.throttled_resource IS
    'Resources that are granted at most once per interval.';
COMMENT ON COLUMN resource_control.throttled_resource.throttle_interval IS
    'Elapsed time: a day is 24 hours and a month 30 days, in every time zone. More than 1000 years, and infinity, count as 1000 years.';
COMMENT ON COLUMN resource_control.throttled_resource.last_locked IS
    'When it was granted last, by the server''s clock; -infinity for never.';
COMMENT ON FUNCTION resource_control.elapsed(interval) IS
    'The interval as elapsed time, at most 1000 years. Adding a day to a timestamptz adds 23 or 25 hours where the clocks change.';
COMMENT ON FUNCTION resource_control.elapsed_with_days(interval) IS
    'Part of elapsed: the interval as elapsed time, at most 1000 years.';
COMMENT ON FUNCTION resource_control.require_read_committed() IS
    'Raises a serialization failure at an isolation level stricter than READ COMMITTED.';
COMMENT ON FUNCTION resource_control.attempt_throttled_resource(resource_control.throttled_resource_enum, text) IS
    'Grants the resource if it is due, and returns the decision. Never waits. Call it at READ COMMITTED, because at a stricter level it may fail with a serialization failure and must be retried. Commit at once, and do the work afterwards.';
COMMENT ON FUNCTION resource_control.lock_throttled_resource(resource_control.throttled_resource_enum, text) IS
    'Grants the resource if it is due, and returns whether it did; false for a resource without a row. Otherwise as attempt_throttled_resource.';

PERFORM pg_catalog.set_config('search_path', callers_path, true);
INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000002');
END
$migration$;
