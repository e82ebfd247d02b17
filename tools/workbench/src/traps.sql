-- Functions, types and relations in `public` with the names and the arguments of PostgreSQL's own,
-- and a search path in which they come first. What calls one of them is an error, and counts in
-- public.sprung, which no roll-back sets back.
CREATE SEQUENCE public.sprung;
CREATE FUNCTION public.spring(what pg_catalog.text) RETURNS pg_catalog.bool LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.nextval('public.sprung'::pg_catalog.regclass);
    RAISE EXCEPTION 'a trap was sprung: %', what;
END
$$;

DO $traps$
DECLARE
    trap record;
BEGIN
    PERFORM set_config('search_path', 'pg_catalog', true);
    -- Of the aggregates and the functions with any number of arguments, those with one to five
    -- arguments of common types.
    FOR trap IN
        SELECT format('FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L', p.proname,
            pg_get_function_identity_arguments(p.oid),
                CASE WHEN p.proretset THEN 'SETOF ' ELSE '' END || format_type(p.prorettype, NULL),
                format('BEGIN PERFORM public.spring(%L); END', p.proname)) AS what
            FROM pg_proc AS p WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind <> 'p'
                AND NOT EXISTS (SELECT FROM unnest(array_append(p.proargtypes::oid[],
                    p.prorettype)) AS t
                    WHERE t IN ('internal'::regtype, 'cstring'::regtype, '"any"'::regtype,
                        'trigger'::regtype))
        UNION ALL
        SELECT DISTINCT format('FUNCTION public.%I(%s) RETURNS text LANGUAGE plpgsql AS %L',
            p.proname, arguments,
                format('BEGIN PERFORM public.spring(%L); END', p.proname))
            FROM pg_proc AS p, unnest(ARRAY['anyelement', 'text, anyelement', 'text, text',
                'text, name', 'text, text, text',
                'text, text, name', 'text, bigint', 'text, integer', 'text, name, name',
                    'text, text, text, text',
                'text, text, text, text, text', 'text, bigint, bigint']) AS arguments
            WHERE p.pronamespace = 'pg_catalog'::regnamespace
                AND EXISTS (SELECT FROM unnest(p.proargtypes::oid[]) AS t WHERE t =
                    '"any"'::regtype)
        UNION ALL
        SELECT format('DOMAIN public.%I AS pg_catalog.%1$I CHECK (public.spring(%1$L))', t.typname)
            FROM pg_type AS t WHERE t.typnamespace = 'pg_catalog'::regnamespace AND t.typtype =
                'b' AND t.typcategory NOT IN ('A', 'Z')
        UNION ALL
        SELECT format('TABLE public.%I ()', c.relname)
            FROM pg_class AS c WHERE c.relnamespace = 'pg_catalog'::regnamespace AND c.relkind
                IN ('r', 'v')
    LOOP
        BEGIN
            EXECUTE 'CREATE ' || trap.what;
        EXCEPTION WHEN OTHERS THEN NULL; -- a few are grammar, or internal
        END;
    END LOOP;
    EXECUTE format('ALTER DATABASE %I SET search_path = public, pg_catalog', current_database());
END
$traps$;
