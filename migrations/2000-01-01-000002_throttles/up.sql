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
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000002') THEN
    RETURN;
END IF;
-- Under the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

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

-- If somebody has run DROP TYPE … CASCADE, the column with the labels is gone, and the rows are useless without it.
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

-- The stored time is read from the clock after the condition was, so two grants are never closer than the interval.
CREATE OR REPLACE FUNCTION resource_control.lock_throttled_resource(
    resource_id_var resource_control.throttled_resource_enum,
    details_var text
) RETURNS boolean
    LANGUAGE plpgsql STRICT VOLATILE
    SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Not FOR UPDATE: it would conflict with the foreign key of a row that an open transaction has inserted.
    UPDATE resource_control.throttled_resource AS r
        SET last_locked = clock_timestamp(), last_locker_details = details_var
        WHERE r.ctid = (
            SELECT due.ctid FROM resource_control.throttled_resource AS due
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
    'Grants the resource if its interval has passed, and returns whether it did. Denies at once while another transaction takes it. Commit at once.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000002');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
