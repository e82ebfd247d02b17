CREATE TABLE servers (
    datacenter_id integer,
    server_id integer,
    PRIMARY KEY (datacenter_id, server_id)
);

INSERT INTO servers (datacenter_id, server_id)
SELECT datacenter_id, server_id
FROM generate_series(223, 224) AS datacenter_id, generate_series(341, 348) AS server_id;

-- The lock of the application prevents two of them from overlapping. Where a constraint can prevent it too, as `EXCLUDE
-- USING gist` can with the extension btree_gist, have both: the lock for a good error message, the constraint for programs
-- that do not take the lock.
CREATE TABLE reservations (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    datacenter_id integer NOT NULL,
    server_id integer NOT NULL,
    user_id integer NOT NULL,
    start_date timestamptz NOT NULL,
    end_date timestamptz NOT NULL CHECK (start_date < end_date),
    FOREIGN KEY (datacenter_id, server_id) REFERENCES servers
);
CREATE INDEX ON reservations (datacenter_id, server_id, end_date);

-- Who writes, or wrote, the nightly report. PostgreSQL does not keep since when a lock is held; this does.
CREATE TABLE report_runs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    host text NOT NULL,
    backend_pid integer NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz
);

CREATE TABLE report_nights (
    run_id bigint REFERENCES report_runs,
    night date,
    reserved bigint NOT NULL,
    PRIMARY KEY (run_id, night)
);

-- The cache: expensive to compute, cheap to read.
CREATE MATERIALIZED VIEW occupancy AS
SELECT
    datacenter_id,
    count(*) FILTER (
        WHERE EXISTS (
            SELECT FROM reservations
            WHERE reservations.datacenter_id = servers.datacenter_id
                AND reservations.server_id = servers.server_id
                AND current_timestamp BETWEEN start_date AND end_date
        )
    ) AS reserved,
    count(*) AS servers,
    current_timestamp AS rebuilt_at
FROM servers
GROUP BY datacenter_id;
