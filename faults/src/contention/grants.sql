-- All grants of a throttled resource.
CREATE SCHEMA contention;

CREATE TABLE contention.granted (
    at timestamptz NOT NULL,
    noted timestamptz NOT NULL,
    key text
);

CREATE FUNCTION contention.note_grant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO contention.granted VALUES (NEW.last_locked, clock_timestamp(), to_jsonb(NEW) ->> 'key');
    RETURN NULL;
END
$$;

CREATE TRIGGER note AFTER UPDATE ON resource_control.throttled_resource
    FOR EACH ROW EXECUTE FUNCTION contention.note_grant();
CREATE TRIGGER note AFTER INSERT OR UPDATE ON resource_control.throttled_key
    FOR EACH ROW EXECUTE FUNCTION contention.note_grant();

-- A table of an application that refers to the resource. A transaction that inserts here locks the key of the resource.
CREATE TABLE contention.report (
    resource_id resource_control.throttled_resource_enum NOT NULL REFERENCES resource_control.throttled_resource
);
