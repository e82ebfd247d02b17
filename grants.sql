-- Grants a role all uses of the schema resource_control but one: only the owner adds labels to throttled_resource_enum. Run it
-- with psql as the role that installs:
--
--     psql --set=role=app --file=grants.sql "$DATABASE_URL"
--
-- Run it again after the first migrations of the application, if these are run later, because it also grants the right to read
-- Diesel's table of migrations. Objects of later releases are granted by default if the same role or the owner of the schema
-- installs them.
\set ON_ERROR_STOP on
BEGIN;

GRANT USAGE ON SCHEMA resource_control TO :"role";
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA resource_control TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO :"role";
-- Fencing tokens, which are raised after a failover; pg_dump reads the values of sequences.
GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA resource_control TO :"role";
-- The role may only read which migrations were run.
REVOKE INSERT, UPDATE, DELETE ON resource_control.installed_migration, resource_control.token_base FROM :"role";

-- Default privileges are those of one creator: the role that runs this file, and the owner of the schema, if that is another.
SELECT format('ALTER DEFAULT PRIVILEGES FOR ROLE %s IN SCHEMA resource_control GRANT %s TO %I', creator, granted, :'role')
    FROM (
        SELECT quote_ident(current_user)::regrole
        UNION SELECT nspowner::regrole FROM pg_namespace
            WHERE nspname = 'resource_control' AND pg_has_role(nspowner, 'MEMBER')
    ) AS creators (creator),
        unnest(ARRAY['EXECUTE ON FUNCTIONS', 'SELECT, INSERT, UPDATE, DELETE ON TABLES', 'USAGE, SELECT, UPDATE ON SEQUENCES']) AS granted
\gexec

-- migrations::run_pending reads which of the application's own migrations were run.
SELECT format('GRANT SELECT ON TABLE %s TO %I', to_regclass('__diesel_schema_migrations'), :'role')
    WHERE to_regclass('__diesel_schema_migrations') IS NOT NULL
\gexec

COMMIT;
