-- What the workers write while they hold something, so that an overlap is in the server's own records. Times are
-- microseconds since 1970.
CREATE SCHEMA faults;

CREATE FUNCTION faults.micros(moment timestamptz) RETURNS bigint LANGUAGE sql IMMUTABLE STRICT
    AS $$ SELECT (extract(epoch FROM moment) * 1000000)::bigint $$;

-- A stretch of a session lock, written on the session that holds it: `ended` is at least the last time that the
-- session replied.
CREATE TABLE faults.section (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    lock integer NOT NULL,
    exclusive boolean NOT NULL,
    pid integer NOT NULL,
    began bigint NOT NULL,
    ended bigint NOT NULL,
    -- The fencing token that the session has drawn, if any.
    token bigint
);

-- What is written behind a fence, one for each session lock, on whatever session.
CREATE TABLE faults.fenced_write (
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    lock integer NOT NULL,
    token bigint NOT NULL
);

-- "Lock, look, insert" under a transaction lock. Nothing but the lock keeps a number from being given twice.
CREATE TABLE faults.booking (
    lock integer NOT NULL,
    number bigint NOT NULL,
    began bigint NOT NULL,
    ended bigint NOT NULL
);
CREATE INDEX ON faults.booking (lock, number);

-- What is copied out of and into, while a lock is held. More than one message has.
CREATE TABLE faults.copied (number integer NOT NULL, text text NOT NULL);
INSERT INTO faults.copied SELECT number, repeat('copied ', 10) FROM generate_series(1, 300) AS number;

-- Every grant of a throttle that was committed.
CREATE TABLE faults.granted (resource text NOT NULL, key text NOT NULL, at bigint NOT NULL);

CREATE FUNCTION faults.log_resource() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO faults.granted VALUES (NEW.resource_id::text, '', faults.micros(NEW.last_locked));
    RETURN NULL;
END $$;
CREATE TRIGGER log AFTER UPDATE OF last_locked ON resource_control.throttled_resource
    FOR EACH ROW EXECUTE FUNCTION faults.log_resource();

CREATE FUNCTION faults.log_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO faults.granted VALUES (NEW.resource_id::text, NEW.key, faults.micros(NEW.last_locked));
    RETURN NULL;
END $$;
CREATE TRIGGER log AFTER INSERT OR UPDATE OF last_locked ON resource_control.throttled_key
    FOR EACH ROW EXECUTE FUNCTION faults.log_key();

-- Every committed change of a key of a rate limit. Ids are in the order of the changes of a key, because each change locks the
-- row until the commit. `at` is the time that a caller is told, or that of a deletion.
CREATE TABLE faults.limit_change (
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    name text NOT NULL,
    key text NOT NULL,
    at bigint NOT NULL,
    deleted boolean NOT NULL
);

CREATE FUNCTION faults.log_limit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO faults.limit_change (name, key, at, deleted)
            VALUES (OLD.name, OLD.key, faults.micros(clock_timestamp()), true);
    ELSE
        INSERT INTO faults.limit_change (name, key, at, deleted)
            VALUES (NEW.name, NEW.key, faults.micros(NEW.changed_at), false);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER log AFTER INSERT OR UPDATE ON resource_control.rate_limit
    FOR EACH ROW WHEN (NEW.full_at > '-infinity') EXECUTE FUNCTION faults.log_limit();
-- The first generation is deleted with its key, and a later one also when another one replaces it.
CREATE TRIGGER log_end AFTER DELETE ON resource_control.rate_limit
    FOR EACH ROW WHEN (OLD.generation = 1) EXECUTE FUNCTION faults.log_limit();
