//! What is in the schema `resource_control`, as the server's catalogue tells it, and how it differs
//! from what should be there.

use std::collections::{BTreeMap, BTreeSet};

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Nullable, Text};

/// Something that the catalogue says of an object.
#[derive(Debug, QueryableByName)]
struct Fact {
    /// What it is said of: `column throttled_resource.last_locked`.
    #[diesel(sql_type = Text)]
    object: String,
    /// What the object is a part or a namesake of: `relation throttled_resource`.
    #[diesel(sql_type = Nullable<Text>)]
    family: Option<String>,
    /// What of the object: `type`.
    #[diesel(sql_type = Text)]
    aspect: String,
    #[diesel(sql_type = Text)]
    value: String,
}

/// The objects in the schema that have names of their own: `schema` is a query's first part.
pub(super) const OBJECTS: &str = "
    WITH RECURSIVE schema AS (
        SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'resource_control'
    ), objects (classid, objid, object, family) AS (
        SELECT 'pg_catalog.pg_namespace'::regclass::oid, oid, 'schema resource_control', NULL FROM schema
        UNION ALL
        SELECT 'pg_catalog.pg_class'::regclass, pg_class.oid, 'relation ' || relname, NULL
            FROM pg_catalog.pg_class JOIN schema ON relnamespace = schema.oid
            WHERE relkind NOT IN ('i', 'I', 'c')
        UNION ALL
        SELECT 'pg_catalog.pg_type'::regclass, pg_type.oid, 'type ' || typname, NULL
            FROM pg_catalog.pg_type JOIN schema ON typnamespace = schema.oid
            LEFT JOIN pg_catalog.pg_class ON pg_class.oid = typrelid
            WHERE (typrelid = 0 OR relkind = 'c') AND typcategory <> 'A' AND typtype <> 'm'
        UNION ALL
        SELECT 'pg_catalog.pg_proc'::regclass, pg_proc.oid,
                'function ' || proname || '(' || pg_catalog.oidvectortypes(proargtypes) || ')',
                'function ' || proname
            FROM pg_catalog.pg_proc JOIN schema ON pronamespace = schema.oid
    )";

const FACTS: &str = "
    , tables AS (
        SELECT pg_class.oid, relname, reloptions, 'relation ' || relname AS family
            FROM pg_catalog.pg_class JOIN schema ON relnamespace = schema.oid
            WHERE relkind IN ('r', 'p')
    ), facts (object, family, aspect, value) AS (
        SELECT object, family, aspect, value
            FROM objects JOIN pg_catalog.pg_class ON objid = pg_class.oid
                AND classid = 'pg_catalog.pg_class'::regclass
            LEFT JOIN pg_catalog.pg_sequence ON seqrelid = pg_class.oid,
            LATERAL (VALUES
                ('kind', CASE WHEN relkind = 'r' AND relpersistence = 'p' THEN 'a table'
                    WHEN relkind = 'r' THEN 'an unlogged table' WHEN relkind = 'p' THEN 'a partitioned table'
                    WHEN relkind = 'v' THEN 'a view' WHEN relkind = 'm' THEN 'a materialized view'
                    WHEN relkind = 'f' THEN 'a foreign table' WHEN relkind = 'S' THEN 'a sequence'
                    ELSE relkind::text END),
                ('definition', pg_catalog.format('a sequence of %s from %s by %s, %s to %s, with a cache of %s',
                    pg_catalog.format_type(seqtypid, NULL), seqstart, seqincrement, seqmin, seqmax, seqcache)
                    || CASE WHEN seqcycle THEN ', in a cycle' ELSE '' END)
            ) AS fact (aspect, value)
            WHERE (aspect = 'definition') = (relkind = 'S')
        UNION ALL
        SELECT object, family, 'kind', CASE typtype WHEN 'e' THEN 'an enumerated type'
                WHEN 'd' THEN 'a domain' WHEN 'c' THEN 'a composite type' WHEN 'r' THEN 'a range type'
                ELSE 'a base type' END
            FROM objects JOIN pg_catalog.pg_type ON objid = pg_type.oid
                AND classid = 'pg_catalog.pg_type'::regclass
        UNION ALL
        SELECT object, family, aspect, value
            FROM objects JOIN pg_catalog.pg_proc ON objid = pg_proc.oid
                AND classid = 'pg_catalog.pg_proc'::regclass,
            LATERAL (VALUES
                ('kind', CASE prokind WHEN 'f' THEN 'a function' WHEN 'p' THEN 'a procedure'
                    WHEN 'a' THEN 'an aggregate' ELSE 'a window function' END),
                ('arguments', '(' || pg_catalog.pg_get_function_arguments(objid) || ')'),
                ('result', COALESCE(pg_catalog.pg_get_function_result(objid), 'nothing')),
                ('body', CASE WHEN prokind IN ('f', 'p') THEN pg_catalog.pg_get_functiondef(objid) ELSE '' END)
            ) AS fact (aspect, value)
        UNION ALL
        SELECT 'column ' || relname || '.' || attname, family, aspect, value
            FROM tables JOIN pg_catalog.pg_attribute ON attrelid = tables.oid
            JOIN pg_catalog.pg_type ON pg_type.oid = atttypid
            LEFT JOIN pg_catalog.pg_attrdef ON adrelid = attrelid AND adnum = attnum,
            LATERAL (VALUES
                ('type', pg_catalog.format_type(atttypid, atttypmod)
                    || CASE WHEN attcollation <> typcollation
                        THEN ' COLLATE ' || attcollation::regcollation ELSE '' END),
                ('nullability', CASE WHEN attnotnull THEN 'not null' ELSE 'nullable' END),
                ('default', CASE WHEN attidentity = 'a' THEN 'an identity, always'
                    WHEN attidentity = 'd' THEN 'an identity'
                    WHEN attgenerated <> '' THEN 'what is generated as ' || pg_catalog.pg_get_expr(adbin, adrelid)
                    ELSE COALESCE(pg_catalog.pg_get_expr(adbin, adrelid), 'nothing') END),
                ('comment', pg_catalog.col_description(attrelid, attnum))
            ) AS fact (aspect, value)
            WHERE attnum > 0 AND NOT attisdropped
        UNION ALL
        SELECT 'constraint ' || relname || '.' || conname, family, 'definition',
                pg_catalog.pg_get_constraintdef(pg_constraint.oid)
            FROM tables JOIN pg_catalog.pg_constraint ON conrelid = tables.oid
            -- Not the names of NOT NULL, which are older servers' columns.
            WHERE contype NOT IN ('n', 't')
        UNION ALL
        SELECT 'index ' || tables.relname || '.' || pg_class.relname, family, 'definition',
                pg_catalog.pg_get_indexdef(indexrelid) || CASE WHEN indisvalid THEN '' ELSE ' (invalid)' END
            FROM tables JOIN pg_catalog.pg_index ON indrelid = tables.oid
            JOIN pg_catalog.pg_class ON pg_class.oid = indexrelid
            WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_constraint
                WHERE conindid = indexrelid AND contype IN ('p', 'u', 'x'))
        UNION ALL
        SELECT 'storage parameter ' || relname || '.' || pg_catalog.split_part(parameter, '=', 1), family,
                'parameter', pg_catalog.substr(parameter, pg_catalog.strpos(parameter, '=') + 1)
            FROM tables, pg_catalog.unnest(reloptions) AS parameter
        UNION ALL
        SELECT object, family, 'comment', description
            FROM objects JOIN pg_catalog.pg_description ON objsubid = 0
                AND pg_description.classoid = classid AND pg_description.objoid = objid
    )
    SELECT object, family, aspect, value FROM facts WHERE value IS NOT NULL";

/// All that is said of the schema and of what is in it.
#[derive(Debug)]
pub(super) struct Description {
    facts: BTreeMap<(String, String), Fact>,
    objects: BTreeSet<String>,
    families: BTreeSet<String>,
}

impl Description {
    /// Asks for it. Names are written out by the search path: see `pin_search_path`.
    pub(super) fn of(conn: &mut PgConnection) -> QueryResult<Self> {
        let facts: Vec<Fact> = diesel::sql_query(format!("{OBJECTS}{FACTS}")).load(conn)?;
        Ok(Self {
            objects: facts.iter().map(|fact| fact.object.clone()).collect(),
            families: facts.iter().filter_map(|it| it.family.clone()).collect(),
            facts: facts
                .into_iter()
                .map(|fact| ((fact.object.clone(), fact.aspect.clone()), fact))
                .collect(),
        })
    }

    /// The objects, each with its kind and name.
    pub(super) fn objects(&self) -> &BTreeSet<String> {
        &self.objects
    }

    /// What is not as expected and cannot be brought in: not what is missing as a whole, nor what can
    /// be replaced.
    pub(super) fn differences(&self, expected: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        for (key, fact) in &expected.facts {
            match self.facts.get(key) {
                Some(found) if found.value == fact.value => {}
                _ if fact.is_replaced() => {}
                Some(found) => differences.push(fact.instead_of(found)),
                None if self.objects.contains(&fact.object) => {}
                None if self.lacks_a_part(fact) => {
                    differences.push(format!("{} is missing", fact.object));
                }
                None => {}
            }
        }
        for fact in self.facts.values() {
            if !expected.objects.contains(&fact.object) && expected.is_hindered_by(fact, self) {
                differences.push(format!("{}, not expected", fact.sentence()));
            }
        }
        differences.dedup(); // a missing column, once for each of its aspects
        differences
    }

    /// Everything that is not as expected.
    pub(super) fn all_differences(&self, expected: &Self) -> Vec<String> {
        let differing = expected
            .facts
            .iter()
            .filter_map(|(key, fact)| match self.facts.get(key) {
                Some(found) if found.value == fact.value => None,
                Some(found) => Some(fact.instead_of(found)),
                None => Some(format!("{} is missing", fact.object)),
            });
        differing.collect()
    }

    /// The statements that set the storage parameters which are not as expected.
    pub(super) fn storage_parameters(&self, expected: &Self) -> Vec<String> {
        let differing = expected.facts.iter().filter_map(|(key, fact)| {
            let name = fact.object.strip_prefix("storage parameter ")?;
            let (table, parameter) = name.split_once('.')?;
            let found = self.facts.get(key).map(|found| &found.value);
            (found != Some(&fact.value)).then(|| {
                format!(
                    "ALTER TABLE resource_control.{table} SET ({parameter} = '{}')",
                    fact.value
                )
            })
        });
        differing.collect()
    }

    /// Whether what is missing is a part of a table that is there, or has a namesake with other
    /// arguments. Indexes can be added.
    fn lacks_a_part(&self, fact: &Fact) -> bool {
        let is_there = match &fact.family {
            Some(table) if table.starts_with("relation ") => self.objects.contains(table),
            Some(function) => self.families.contains(function),
            None => false,
        };
        is_there && !fact.object.starts_with("index ")
    }

    /// Whether something that the description does not have stands in the way of the functions that
    /// it has: on one of its tables, a constraint, a unique index, or a column that cannot be left out.
    fn is_hindered_by(&self, fact: &Fact, found: &Self) -> bool {
        let Some(family) = &fact.family else {
            return false;
        };
        let of_column = |aspect: &str| {
            let key = (fact.object.clone(), aspect.to_owned());
            found.facts.get(&key).map(|fact| fact.value.as_str())
        };
        let kind = fact.object.split(' ').next();
        self.objects.contains(family)
            && match (kind, fact.aspect.as_str()) {
                (Some("constraint"), "definition") => true,
                (Some("index"), "definition") => fact.value.starts_with("CREATE UNIQUE INDEX"),
                (Some("column"), "nullability") => {
                    fact.value == "not null" && of_column("default") == Some("nothing")
                }
                _ => false,
            }
    }
}

impl Fact {
    /// Whether adoption brings it in, whatever is there.
    fn is_replaced(&self) -> bool {
        matches!(self.aspect.as_str(), "body" | "comment" | "parameter")
    }

    fn sentence(&self) -> String {
        let Fact {
            object,
            aspect,
            value,
            ..
        } = self;
        match aspect.as_str() {
            "default" => format!("{object} defaults to {value}"),
            "arguments" => format!("{object} takes {value}"),
            "result" => format!("{object} returns {value}"),
            "comment" => format!("the comment on {object} is {value:?}"),
            _ => format!("{object} is {value}"),
        }
    }

    fn instead_of(&self, found: &Fact) -> String {
        format!("{}, expected {}", found.sentence(), self.value)
    }
}
