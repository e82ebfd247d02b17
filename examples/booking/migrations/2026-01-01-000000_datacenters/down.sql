DROP MATERIALIZED VIEW occupancy;
DROP TABLE report_nights;
DROP TABLE report_runs;
DROP TABLE reservations;
DROP TABLE servers;
