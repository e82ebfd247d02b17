-- Grants a role all uses of the schema resource_control but one: only the owner adds labels to throttled_resource_enum. Run it
-- with psql as the role that installs:
--
--     psql --set=role=app --file=migrations/grants.sql "$DATABASE_URL"
--
-- A role that only reads, for dashboards, exporters and `interlock ps`, gets the right to read the
-- views, and to see the sessions of all roles if a superuser runs this. Run it again after an
-- upgrade of the schema:
--
--     psql --set=role=grafana --set=reads=1 --file=migrations/grants.sql "$DATABASE_URL"
--
-- Run it again after the first migrations of the application, if these are run later, because it also grants the right to read
-- Diesel's table of migrations. Objects of later releases are granted by default if the same role or the owner of the schema
-- installs them.
\set ON_ERROR_STOP on
BEGIN;

\if :{?reads}
\else
-- migrations::run_pending reads which of the application's own migrations were run. Their table is
-- found by the search path.
SELECT pg_catalog.format('GRANT SELECT ON TABLE %s TO %I',
    pg_catalog.to_regclass('__diesel_schema_migrations'), :'role')
    WHERE pg_catalog.to_regclass('__diesel_schema_migrations') IS NOT NULL
\gexec
\endif

-- Nothing below is looked up among the objects of others.
SET LOCAL search_path = pg_catalog, pg_temp;

\if :{?reads}

GRANT USAGE ON SCHEMA resource_control TO :"role";
-- The views, which are read with the rights of their owner, and no table: that of `Once` has what
-- the work has returned.
SELECT pg_catalog.format('GRANT SELECT ON resource_control.%I TO %I', relname, :'role')
    FROM pg_catalog.pg_class WHERE relnamespace = 'resource_control'::pg_catalog.regnamespace
        AND relkind = 'v'
\gexec
GRANT EXECUTE ON FUNCTION resource_control.elapsed(interval), resource_control.lock_key(text) TO
    :"role";
-- Without it, the role sees who holds a lock, but not what that session does.
SELECT pg_catalog.format('GRANT pg_read_all_stats TO %I', :'role')
    WHERE (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user)
\gexec

\else

GRANT USAGE ON SCHEMA resource_control TO :"role";
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA resource_control TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO :"role";
-- ALL TABLES are all views, too, through some of which one could write.
SELECT pg_catalog.format('REVOKE INSERT, UPDATE, DELETE ON resource_control.%I FROM %I',
    relname, :'role')
    FROM pg_catalog.pg_class WHERE relnamespace = 'resource_control'::pg_catalog.regnamespace
        AND relkind = 'v'
\gexec
-- Fencing tokens, which are raised after a failover; pg_dump reads the values of sequences.
GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA resource_control TO :"role";
-- The role may only read which migrations were run.
REVOKE INSERT, UPDATE, DELETE ON resource_control.installed_migration, resource_control.token_base FROM :"role";

-- Default privileges are those of one creator: the role that runs this file, and the owner of the schema, if that is another.
SELECT pg_catalog.format('ALTER DEFAULT PRIVILEGES FOR ROLE %s IN SCHEMA resource_control GRANT '
'%s TO %I', creator, granted, :'role')
    FROM (
        SELECT quote_ident(current_user)::regrole
        UNION SELECT nspowner::regrole FROM pg_namespace
            WHERE nspname = 'resource_control' AND pg_has_role(nspowner, 'MEMBER')
    ) AS creators (creator),
        unnest(ARRAY['EXECUTE ON FUNCTIONS', 'SELECT, INSERT, UPDATE, DELETE ON TABLES', 'USAGE, SELECT, UPDATE ON SEQUENCES']) AS granted
\gexec

\endif
COMMIT;
