CREATE TABLE job_runs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job text NOT NULL,
    instance text NOT NULL,
    started_at timestamptz NOT NULL,
    -- Null while it runs, and for ever if its instance died.
    finished_at timestamptz
);
