-- Grants a role everything in the schema resource_control but one right: only the owner can add labels to
-- throttled_resource_enum. Run this file with psql as the role that installs:
--
--     psql --set=role=app --file=migrations/grants.sql "$DATABASE_URL"
--
-- With reads=1, the role may only read the views, for dashboards, exporters and `interlock ps`. If a superuser runs the file, the
-- role also sees the sessions of all roles. Run it again after an upgrade of the schema:
--
--     psql --set=role=grafana --set=reads=1 --file=migrations/grants.sql "$DATABASE_URL"
--
-- The file also grants the right to read Diesel's table of migrations. So run it again after the first migrations of the
-- application, if these are run later. Objects of later releases are granted by default if the same role or the owner of the schema
-- installs them.
\set ON_ERROR_STOP on
BEGIN;

\if :{?reads}
\else
-- migrations::run_pending reads Diesel's table of the application's own migrations, which is found by the search path.
SELECT pg_catalog.format('GRANT SELECT ON TABLE %s TO %I',
    pg_catalog.to_regclass('__diesel_schema_migrations'), :'role')
    WHERE pg_catalog.to_regclass('__diesel_schema_migrations') IS NOT NULL
\gexec
\endif

-- From here on, no name is looked up in a schema where another role may have created objects.
SET LOCAL search_path = pg_catalog, pg_temp;

\if :{?reads}

GRANT USAGE ON SCHEMA resource_control TO :"role";
-- Only the views, which read the tables with the rights of their owner. The tables themselves stay closed, because that of `Once`
-- contains what the work has returned.
SELECT pg_catalog.format('GRANT SELECT ON resource_control.%I TO %I', relname, :'role')
    FROM pg_catalog.pg_class WHERE relnamespace = 'resource_control'::pg_catalog.regnamespace
        AND relkind = 'v'
\gexec
GRANT EXECUTE ON FUNCTION resource_control.elapsed(interval), resource_control.lock_key(text) TO
    :"role";
-- Without this right, the role sees which session holds a lock, but not what that session is doing.
SELECT pg_catalog.format('GRANT pg_read_all_stats TO %I', :'role')
    WHERE (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user)
\gexec

\else

GRANT USAGE ON SCHEMA resource_control TO :"role";
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA resource_control TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO :"role";
-- ALL TABLES includes the views, some of which are updatable.
SELECT pg_catalog.format('REVOKE INSERT, UPDATE, DELETE ON resource_control.%I FROM %I',
    relname, :'role')
    FROM pg_catalog.pg_class WHERE relnamespace = 'resource_control'::pg_catalog.regnamespace
        AND relkind = 'v'
\gexec
-- UPDATE, because fencing tokens are raised after a failover; SELECT, because pg_dump reads the values of sequences.
GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA resource_control TO :"role";
-- These two tables the role may only read.
REVOKE INSERT, UPDATE, DELETE ON resource_control.installed_migration, resource_control.token_base FROM :"role";

-- Default privileges apply to the objects of one creator. So they are set for the role that runs this file and for the owner of the
-- schema.
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
