-- In `public`, every operator that `pg_catalog` lacks exactly: for such operands, PostgreSQL looks
-- for an operator in the whole search path, also if `pg_catalog` comes first. A polymorphic
-- operator is no exact match. The operators are shells, without a function: a statement that
-- refers to one fails when it is parsed, whatever rows there are, with an error that names the
-- operator and both types. Rows of the catalog, because CREATE OPERATOR takes minutes for as many.
WITH operand AS (
    SELECT t.oid FROM pg_type AS t
        WHERE t.typnamespace = 'pg_catalog'::regnamespace AND t.typname IN ('aclitem', 'bit', 'bool',
            'bpchar', 'bytea', 'char', 'cidr', 'date', 'float4', 'float8', 'inet', 'int2', 'int4',
            'int8', 'interval', 'json', 'jsonb', 'name', 'numeric', 'oid', 'pg_lsn', 'regclass',
            'regnamespace', 'regproc', 'regprocedure', 'regrole', 'regtype', 'text', 'tid',
            'timestamp', 'timestamptz', 'uuid', 'varbit', 'varchar', 'xid', 'xid8', '_aclitem',
            '_bool', '_char', '_float8', '_int2', '_int4', '_int8', '_interval', '_name', '_oid',
            '_text', '_timestamptz', '_varchar', 'int2vector', 'oidvector')
    UNION SELECT t.oid FROM pg_type AS t
        WHERE t.typnamespace = to_regnamespace('resource_control') AND t.typtype IN ('d', 'e')
), missing AS (
    SELECT name, l.oid AS l, r.oid AS r
        FROM unnest('{+,-,*,/,%,^,&,|,#,~,<<,>>,<,<=,=,<>,>=,>,||,&&,@>,<@,->,->>,^@,~*,!~,!~*,~~,~~*,!~~,!~~*}'
            ::name[]) AS name, operand AS r,
            (SELECT oid FROM operand UNION ALL SELECT 0) AS l
    EXCEPT SELECT o.oprname, o.oprleft, o.oprright FROM pg_operator AS o
        WHERE o.oprnamespace IN ('pg_catalog'::regnamespace, 'public'::regnamespace)
)
INSERT INTO pg_operator (oid, oprname, oprnamespace, oprowner, oprkind, oprcanmerge, oprcanhash,
        oprleft, oprright, oprresult, oprcom, oprnegate, oprcode, oprrest, oprjoin)
    SELECT ((SELECT max(o.oid)::bigint FROM pg_operator AS o) + row_number() OVER ())::oid, name,
            'public'::regnamespace, u.oid, CASE WHEN l = 0 THEN 'l' ELSE 'b' END::"char", false,
            false, l, r, 0, 0, 0, 0, 0, 0
        FROM missing, (SELECT oid FROM pg_roles WHERE rolname = current_user) AS u;
