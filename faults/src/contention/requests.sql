-- The changes of the requests, with the session that made each. The changes of a killed session that it did not commit
-- are not recorded.
CREATE SCHEMA contention;

CREATE TABLE contention.change (
    at timestamptz NOT NULL,
    client text NOT NULL,
    isolation text NOT NULL,
    was resource_control.service_request,
    became resource_control.service_request NOT NULL
);

CREATE FUNCTION contention.note_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO contention.change VALUES (
        clock_timestamp(), current_setting('application_name'), current_setting('transaction_isolation'),
        OLD, NEW);
    -- Some commits are slow, so that other sessions come in between, and some sessions are ended before they commit.
    IF random() < 0.05 THEN
        PERFORM pg_sleep(0.02 * random());
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER note AFTER INSERT OR UPDATE ON resource_control.service_request
    FOR EACH ROW EXECUTE FUNCTION contention.note_request();
