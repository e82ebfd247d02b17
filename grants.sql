-- Lets a role use the schema resource_control without owning it. For psql, as the role that installs:
--
--     psql --set=role=app --file=grants.sql "$DATABASE_URL"
--
-- Once is enough: what later releases add is granted by default, as far as the same role installs it.
\set ON_ERROR_STOP on
BEGIN;

GRANT USAGE ON SCHEMA resource_control TO :"role";
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA resource_control TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO :"role";
-- For pg_dump, which reads their values.
GRANT SELECT ON ALL SEQUENCES IN SCHEMA resource_control TO :"role";
-- Which migrations were run is for reading only.
REVOKE INSERT, UPDATE, DELETE ON resource_control.installed_migration FROM :"role";

ALTER DEFAULT PRIVILEGES IN SCHEMA resource_control GRANT EXECUTE ON FUNCTIONS TO :"role";
ALTER DEFAULT PRIVILEGES IN SCHEMA resource_control GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO :"role";
ALTER DEFAULT PRIVILEGES IN SCHEMA resource_control GRANT SELECT ON SEQUENCES TO :"role";

-- For migrations::run_pending, which reads what was run of the application's own migrations.
SELECT format('GRANT SELECT ON TABLE %s TO %I', to_regclass('__diesel_schema_migrations'), :'role')
    WHERE to_regclass('__diesel_schema_migrations') IS NOT NULL
\gexec

COMMIT;
