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
IF EXISTS (SELECT FROM resource_control.installed_migration WHERE version OPERATOR(pg_catalog.=) '20000101000005') THEN
    RETURN;
END IF;
-- Under the caller's search path, the objects below could refer to the caller's own objects.
PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

-- The generic cell rate algorithm. A key without a row is full. Do not reorder the three times: a statement that spends units
-- evaluates them in the order of these columns, each by the clock, and the limit holds only in that order.
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

-- Converts full_at to another quota, under which a unit takes wanted_us to refill: the key owes as many units as before. What
-- takes longer than 100,000 years counts as so long, because a timestamp ends in 294276. PostgreSQL inlines this function.
CREATE OR REPLACE FUNCTION resource_control.rate_limit_full_at(full_at timestamptz, unit_us float8, wanted_us float8)
    RETURNS timestamptz
    LANGUAGE sql VOLATILE
    RETURN CASE WHEN unit_us = wanted_us OR full_at <= clock_timestamp() THEN full_at
        ELSE make_interval(secs => LEAST(date_part('epoch', full_at - clock_timestamp()) * (wanted_us / unit_us),
            '3155760000000'::double precision)) + clock_timestamp() END;

COMMENT ON FUNCTION resource_control.rate_limit_full_at(timestamptz, float8, float8) IS
    'When a key is full under another quota, whose unit takes wanted_us microseconds to refill: '
    'it owes as many units as before.';
COMMENT ON TABLE resource_control.rate_limit IS
    'What the keys of rate limits owe. A key without a row is full.';
COMMENT ON COLUMN resource_control.rate_limit.since IS
    'From when on the quota of this row is in force.';
COMMENT ON COLUMN resource_control.rate_limit.spent_at IS
    'When units were spent last, by the server''s clock.';
COMMENT ON COLUMN resource_control.rate_limit.full_at IS
    'When the key is full again if no more units are spent.';
COMMENT ON COLUMN resource_control.rate_limit.unit_us IS
    'How many microseconds refill a unit, under the quota of this row.';
COMMENT ON COLUMN resource_control.rate_limit.burst IS
    'How many units a full key has, under the quota of this row.';

INSERT INTO resource_control.installed_migration (version) VALUES ('20000101000005');
PERFORM pg_catalog.set_config('search_path', callers_path, true);
END
$migration$;
