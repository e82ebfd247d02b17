-- The database's own account of every grant of a throttled resource.
CREATE SCHEMA hammer;

CREATE TABLE hammer.granted (
    at timestamptz NOT NULL,
    noted timestamptz NOT NULL,
    key text
);

CREATE FUNCTION hammer.note_grant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO hammer.granted VALUES (NEW.last_locked, clock_timestamp(), to_jsonb(NEW) ->> 'key');
    RETURN NULL;
END
$$;

CREATE TRIGGER note AFTER UPDATE ON resource_control.throttled_resource
    FOR EACH ROW EXECUTE FUNCTION hammer.note_grant();
CREATE TRIGGER note AFTER INSERT OR UPDATE ON resource_control.throttled_key
    FOR EACH ROW EXECUTE FUNCTION hammer.note_grant();

-- What an application has beside it: a transaction that inserts here locks the resource's key.
CREATE TABLE hammer.report (
    resource_id resource_control.throttled_resource_enum NOT NULL REFERENCES resource_control.throttled_resource
);
