-- A schema as somebody writes it who wants throttled resources and knows no crate for it. All that
-- others refer to by name is as in resource_control; the rest is not.
CREATE SCHEMA resource_control;

CREATE TYPE resource_control.throttled_resource_enum AS ENUM ('nightly report');

CREATE TABLE resource_control.throttled_resource (
    resource_id resource_control.throttled_resource_enum,
    throttle_interval interval,
    last_locked timestamp with time zone DEFAULT '-infinity',
    last_locker_details text DEFAULT '',
    PRIMARY KEY (resource_id),
    CONSTRAINT positive_delays_only CHECK (throttle_interval > '0'),
    CONSTRAINT empty_rules CHECK (
        last_locked = '-infinity' AND last_locker_details = ''
        OR last_locked != '-infinity' AND length(trim(last_locker_details)) > 0
    )
);
ALTER TABLE resource_control.throttled_resource
    ALTER throttle_interval SET NOT NULL, ALTER last_locked SET NOT NULL, ALTER last_locker_details SET NOT NULL;

INSERT INTO resource_control.throttled_resource VALUES ('nightly report', '1 minute');

-- Returns whether the caller has the resource now.
CREATE FUNCTION resource_control.lock_throttled_resource(
    resource_id_var resource_control.throttled_resource_enum, details_var text
) RETURNS boolean LANGUAGE sql STRICT AS $$
    WITH taken AS (
        UPDATE resource_control.throttled_resource
            SET last_locked = clock_timestamp(), last_locker_details = details_var
            WHERE resource_id = resource_id_var AND last_locked + throttle_interval < clock_timestamp()
            RETURNING 1
    )
    SELECT count(*) = 1 FROM taken
$$;
