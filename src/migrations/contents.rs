//! The objects in the schema `resource_control`, and the objects that depend on them, as the server's catalogue lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};

use diesel::prelude::*;
use diesel::sql_types::{Bool, Nullable, Text};

use super::rights;
use crate::error::Result;
use crate::session::{Session, undo};

/// Follows the dependencies that the server records: from the schema to the objects in it, from these to their parts, and
/// one step further to objects outside that depend on them. Operators are not qualified, because the search path is pinned.
const CONTENTS: &str = "
    WITH RECURSIVE inside (classid, objid, refclassid, refobjid, refobjsubid) AS (
        SELECT 'pg_namespace'::regclass::oid, oid, NULL::oid, NULL::oid, 0
            FROM pg_namespace WHERE nspname = 'resource_control'
        UNION
        SELECT d.classid, d.objid, d.refclassid, d.refobjid, d.refobjsubid
            FROM pg_depend AS d JOIN inside ON d.refclassid = inside.classid AND d.refobjid = inside.objid
            WHERE (d.refclassid = 'pg_namespace'::regclass OR d.deptype IN ('a', 'i', 'P', 'S'))
            AND (d.classid, d.objid) <> (d.refclassid, d.refobjid)
            -- Grants, the triggers behind foreign keys, and the tables of long values.
            AND d.classid <> 'pg_default_acl'::regclass
            AND NOT EXISTS (SELECT FROM pg_trigger
                WHERE d.classid = 'pg_trigger'::regclass AND oid = d.objid AND tgisinternal)
            AND NOT EXISTS (SELECT FROM pg_class
                WHERE d.classid = 'pg_class'::regclass AND oid = d.objid AND relkind = 't')
            -- NOT NULL constraints, which newer servers name and which each column shows.
            AND NOT EXISTS (SELECT FROM pg_constraint
                WHERE d.classid = 'pg_constraint'::regclass AND oid = d.objid AND contype = 'n')
    ), parts (classid, objid, objsubid, refclassid, refobjid, refobjsubid, is_inside) AS (
        SELECT classid, objid, 0, refclassid, refobjid, refobjsubid, true FROM inside
        UNION ALL
        SELECT classid, objid, attnum, classid, objid, 0, true
            FROM (SELECT DISTINCT classid, objid FROM inside) AS relations
            JOIN pg_class ON classid = 'pg_class'::regclass AND pg_class.oid = objid AND relkind IN ('r', 'p')
            JOIN pg_attribute ON attrelid = objid AND attnum > 0 AND NOT attisdropped
        UNION ALL
        -- A view depends by its rule and its columns.
        SELECT CASE WHEN is_view THEN 'pg_class'::regclass ELSE d.classid END,
                CASE WHEN is_view THEN relation.oid ELSE d.objid END,
                CASE WHEN is_view THEN 0 ELSE d.objsubid END,
                d.refclassid, d.refobjid, d.refobjsubid, false
            FROM (SELECT DISTINCT classid, objid FROM inside) AS known
            JOIN pg_depend AS d ON d.refclassid = known.classid AND d.refobjid = known.objid
            LEFT JOIN pg_rewrite ON pg_rewrite.oid = d.objid
                AND d.classid = 'pg_rewrite'::regclass AND rulename = '_RETURN'
            LEFT JOIN pg_class AS relation ON relation.oid = ev_class
                OR relation.oid = d.objid AND d.classid = 'pg_class'::regclass,
            LATERAL (SELECT COALESCE(relkind IN ('v', 'm'), false)) AS kind (is_view)
            WHERE d.refclassid <> 'pg_namespace'::regclass AND d.deptype NOT IN ('a', 'i', 'P', 'S')
            AND (d.classid, d.objid) NOT IN (SELECT classid, objid FROM inside)
        UNION ALL
        -- An extension does not depend on its members, and yet keeps them from being dropped.
        SELECT d.refclassid, d.refobjid, 0, d.classid, d.objid, 0, false
            FROM (SELECT DISTINCT classid, objid FROM inside) AS known
            JOIN pg_depend AS d ON d.classid = known.classid AND d.objid = known.objid AND d.deptype = 'e'
    ), named AS (
        SELECT parts.*, part.type || ' ' || part.identity AS object, whole.type || ' ' || whole.identity AS whole
            FROM parts, LATERAL pg_identify_object(classid, objid, objsubid) AS part,
            LATERAL pg_identify_object(refclassid, refobjid, refobjsubid) AS whole
    )
    SELECT object, whole, is_inside, COALESCE(CASE
            WHEN NOT is_inside THEN ''
            WHEN classid = 'pg_constraint'::regclass THEN pg_get_constraintdef(objid)
            WHEN classid = 'pg_trigger'::regclass THEN (SELECT tgenabled::text || ' ' || pg_get_triggerdef(objid)
                FROM pg_trigger WHERE oid = objid)
            WHEN classid = 'pg_attrdef'::regclass THEN (SELECT pg_get_expr(adbin, adrelid)
                FROM pg_attrdef WHERE oid = objid)
            WHEN classid = 'pg_proc'::regclass THEN (SELECT CASE prokind WHEN 'f' THEN 'a function'
                    WHEN 'p' THEN 'a procedure' WHEN 'a' THEN 'an aggregate' ELSE 'a window function' END
                    || ' of (' || pg_get_function_arguments(objid) || ')'
                    || COALESCE(' that returns ' || pg_get_function_result(objid), '')
                FROM pg_proc WHERE oid = objid)
            WHEN classid = 'pg_type'::regclass THEN (SELECT CASE typtype WHEN 'e' THEN 'an enumerated type'
                    WHEN 'd' THEN 'a domain' WHEN 'c' THEN 'a composite type' WHEN 'r' THEN 'a range type'
                    ELSE 'a base type' END
                FROM pg_type WHERE oid = objid)
            WHEN classid <> 'pg_class'::regclass THEN ''
            WHEN objsubid > 0 THEN (SELECT format_type(atttypid, atttypmod)
                    || CASE WHEN attcollation <> typcollation
                        THEN ' COLLATE ' || attcollation::regcollation ELSE '' END
                    || CASE WHEN attnotnull THEN ' NOT NULL' ELSE '' END
                    || CASE WHEN attidentity <> '' THEN ' GENERATED AS IDENTITY (' || attidentity::text || ')' ELSE '' END
                    || CASE WHEN attgenerated <> '' THEN ' GENERATED' ELSE '' END
                FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
                WHERE attrelid = objid AND attnum = objsubid)
            ELSE (SELECT CASE
                    WHEN relkind IN ('i', 'I') THEN pg_get_indexdef(pg_class.oid)
                        || CASE WHEN indisvalid THEN '' ELSE ' (invalid)' END
                    WHEN relkind = 'S' THEN format('a sequence of %s from %s by %s, %s to %s, with a cache of %s',
                        format_type(seqtypid, NULL), seqstart, seqincrement, seqmin, seqmax, seqcache)
                        || CASE WHEN seqcycle THEN ', in a cycle' ELSE '' END
                    ELSE CASE relpersistence WHEN 'u' THEN 'an unlogged' ELSE 'a' END || CASE relkind
                        WHEN 'r' THEN ' table' WHEN 'p' THEN ' partitioned table' ELSE ' relation ' || relkind::text END
                    || CASE WHEN relrowsecurity THEN ' with row security' ELSE '' END
                    || CASE WHEN relforcerowsecurity THEN ' with row security for its owner' ELSE '' END
                    || CASE WHEN relreplident <> 'd' THEN ' with the replica identity ' || relreplident::text ELSE '' END
                    || CASE WHEN EXISTS (SELECT FROM pg_inherits WHERE inhrelid = pg_class.oid)
                        THEN ' that inherits' ELSE '' END
                    || CASE WHEN EXISTS (SELECT FROM pg_inherits WHERE inhparent = pg_class.oid)
                        THEN ' that others inherit' ELSE '' END
                    END
                FROM pg_class LEFT JOIN pg_index ON indexrelid = pg_class.oid
                LEFT JOIN pg_sequence ON seqrelid = pg_class.oid
                WHERE pg_class.oid = objid)
        END, '') AS definition
        FROM named
    UNION ALL
    SELECT 'body of ' || object, object, true, pg_get_functiondef(objid)
        FROM named JOIN pg_proc ON classid = 'pg_proc'::regclass AND pg_proc.oid = objid
        WHERE is_inside AND prokind IN ('f', 'p')";

#[derive(QueryableByName)]
struct Row {
    #[diesel(sql_type = Text)]
    object: String,
    #[diesel(sql_type = Nullable<Text>)]
    whole: Option<String>,
    #[diesel(sql_type = Bool)]
    is_inside: bool,
    #[diesel(sql_type = Text)]
    definition: String,
}

/// The objects by kind and name, such as `table resource_control.throttled_resource`.
#[derive(Debug)]
pub(super) struct Contents(BTreeMap<String, Part>);

#[derive(Debug, Default)]
struct Part {
    /// The objects that contain it, or that it depends on.
    wholes: BTreeSet<String>,
    is_inside: bool,
    definition: String,
}

impl Contents {
    /// Reads the objects, in a transaction with [`pin_search_path`].
    pub(super) async fn of<S: Session>(session: &mut S) -> QueryResult<Self> {
        let rows: Vec<Row> = session.all(diesel::sql_query(CONTENTS)).await?;
        let mut parts = BTreeMap::<_, Part>::new();
        for row in rows {
            let part = parts.entry(row.object).or_default();
            part.wholes.extend(row.whole);
            part.is_inside |= row.is_inside;
            if part.definition.is_empty() {
                part.definition = as_in_every_version(&row.definition);
            }
        }
        Ok(Self(parts))
    }

    /// Returns whether the schema is empty.
    pub(super) fn are_empty(&self) -> bool {
        self.0.values().filter(|part| part.is_inside).count() == 1
    }

    pub(super) fn have(&self, object: &str) -> bool {
        self.0.get(object).is_some_and(|part| part.is_inside)
    }

    /// Removes the bodies of functions.
    pub(super) fn without_bodies(mut self) -> Self {
        self.0.retain(|object, _| !object.starts_with("body of "));
        self
    }

    /// Returns the objects that `other` lacks and that are part of, or depend on, an object that it has. The columns of a
    /// table that it lacks are left out.
    pub(super) fn beyond<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a String> {
        let is_known = |object: &String| other.0.contains_key(object);
        let unknown = self
            .0
            .iter()
            .filter(move |(object, part)| !is_known(object) && part.wholes.iter().any(is_known));
        unknown.map(|(object, _)| object)
    }

    /// Returns the objects of `expected` that are missing or different here, in English.
    pub(super) fn differences(&self, expected: &Self) -> Vec<String> {
        let missing = expected.beyond(self).map(|it| format!("{it} is missing"));
        let different = expected.0.iter().filter_map(|(object, expected)| {
            let found = self.0.get(object)?.definition.as_str();
            match expected.definition.as_str() {
                same if same == found => None,
                long if long.contains('\n') => Some(format!("{object} is not this crate's")),
                other => Some(format!("{object} is {found:?}, expected {other:?}")),
            }
        });
        missing.chain(different).collect()
    }
}

/// Returns a definition as every version of the server shows it. Since 14 a call that was written as `trim(x)` is shown as
/// `TRIM(BOTH FROM x)`. Before it is `btrim(x)`, and so is every call in a dump of such a server.
fn as_in_every_version(definition: &str) -> String {
    definition.replace("TRIM(BOTH FROM ", "btrim(")
}

/// Runs `work` as if the schema did not exist, and rolls it back. Meanwhile the schema has another name, which no other
/// session sees.
pub(super) async fn beside<S: Session, T>(
    session: &mut S,
    work: impl AsyncFnOnce(&mut S) -> Result<T>,
) -> Result<T> {
    rights::require_creating_schemas(session).await?;
    session.begin().await?;
    // A name that no schema has.
    let number = RandomState::new().build_hasher().finish();
    let rename =
        format!("ALTER SCHEMA resource_control RENAME TO diesel_interlock_aside_{number:x}");
    let result = match session.batch(&rename).await {
        Ok(()) => work(session).await,
        Err(error) => Err(error.into()),
    };
    match result {
        Ok(value) => {
            session.rollback().await?;
            Ok(value)
        }
        Err(error) => {
            undo(session).await?;
            Err(error)
        }
    }
}

/// Until the transaction ends, names have their default meaning, and the server writes out the schema of every other
/// object, with quotes only where they are needed.
pub(super) async fn pin_search_path<S: Session>(session: &mut S) -> QueryResult<()> {
    let pin = "SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL quote_all_identifiers = off";
    session.batch(pin).await
}
