CREATE TABLE booking (server integer NOT NULL, customer text NOT NULL);
