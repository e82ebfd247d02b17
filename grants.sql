-- Grants a role the use of the schema resource_control. Run it with psql as the role that installs:
--
--     psql --set=role=app --file=grants.sql "$DATABASE_URL"
--
-- Run it once. Objects of later releases are granted by default if the same role installs them.
\set ON_ERROR_STOP on
BEGIN;

GRANT USAGE ON SCHEMA resource_control TO :"role";
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA resource_control TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO :"role";
-- pg_dump reads the values of sequences.
GRANT SELECT ON ALL SEQUENCES IN SCHEMA resource_control TO :"role";
-- The role may only read which migrations were run.
REVOKE INSERT, UPDATE, DELETE ON resource_control.installed_migration FROM :"role";

ALTER DEFAULT PRIVILEGES IN SCHEMA resource_control GRANT EXECUTE ON FUNCTIONS TO :"role";
ALTER DEFAULT PRIVILEGES IN SCHEMA resource_control GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO :"role";
ALTER DEFAULT PRIVILEGES IN SCHEMA resource_control GRANT SELECT ON SEQUENCES TO :"role";

-- migrations::run_pending reads which of the application's own migrations were run.
SELECT format('GRANT SELECT ON TABLE %s TO %I', to_regclass('__diesel_schema_migrations'), :'role')
    WHERE to_regclass('__diesel_schema_migrations') IS NOT NULL
\gexec

COMMIT;
