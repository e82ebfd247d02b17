-- The database's own account of every change to the requests, with the session that made it. What a
-- killed session did not commit is not in it.
CREATE SCHEMA hammer;

CREATE TABLE hammer.change (
    at timestamptz NOT NULL,
    client text NOT NULL,
    isolation text NOT NULL,
    was resource_control.service_request,
    became resource_control.service_request NOT NULL
);

CREATE FUNCTION hammer.note_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO hammer.change VALUES (
        clock_timestamp(), current_setting('application_name'), current_setting('transaction_isolation'),
        OLD, NEW);
    -- Some commits are slow, so that others come in between, and killers.
    IF random() < 0.05 THEN
        PERFORM pg_sleep(0.02 * random());
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER note AFTER INSERT OR UPDATE ON resource_control.service_request
    FOR EACH ROW EXECUTE FUNCTION hammer.note_request();
