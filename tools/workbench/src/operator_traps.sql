-- As traps.sql, for operators.
DO $traps$
DECLARE
    trap record;
    number integer := 0;
BEGIN
    PERFORM set_config('search_path', 'pg_catalog', true);
    FOR trap IN
        SELECT o.oprname AS name, NULLIF(o.oprleft, 0)::regtype AS l, o.oprright::regtype AS r,
            o.oprresult::regtype AS result
            FROM pg_operator AS o WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND
                o.oprright <> 0
        UNION ALL
        -- Operators that match these operands better than PostgreSQL's own do.
        SELECT name, l, r, 'boolean'
            FROM unnest(ARRAY['=', '<>', '<', '>', '<=', '>=']) AS name,
                unnest(ARRAY['text', 'name', 'varchar', 'oid', 'regclass', 'regnamespace',
                    'regtype', '"char"', 'integer']::regtype[]) AS l,
                unnest(ARRAY['text', 'name', 'varchar', 'oid', 'regclass', 'regnamespace',
                    'regtype', '"char"', 'integer']::regtype[]) AS r
        UNION ALL
        SELECT name, l, r, 'text'
            FROM unnest(ARRAY['||', '~~', '~']) AS name, unnest(ARRAY['text', 'name',
                'varchar']::regtype[]) AS l,
                unnest(ARRAY['text', 'name', 'varchar', 'integer', 'bigint']::regtype[]) AS r
    LOOP
        number := number + 1;
        BEGIN
            EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L',
                'trap ' || number, concat_ws(', ', trap.l, trap.r), trap.result,
                format('BEGIN PERFORM public.spring(%L); END', concat_ws(' ', trap.l, trap.name,
                    trap.r)));
            EXECUTE format('CREATE OPERATOR public.%s (FUNCTION = public.%I%s, RIGHTARG = %s)',
                trap.name,
                'trap ' || number, ', LEFTARG = ' || trap.l, trap.r);
        EXCEPTION WHEN OTHERS THEN NULL;
        END;
    END LOOP;
END
$traps$;
