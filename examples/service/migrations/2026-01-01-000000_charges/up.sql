CREATE TABLE charge (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    cents integer NOT NULL,
    is_sent boolean NOT NULL DEFAULT false
);
