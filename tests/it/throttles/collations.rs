//! Keys and names out of columns of other collations than the database's.

use diesel::connection::SimpleConnection;

use super::database;
use crate::half::prelude::*;
use crate::support::{number, truth};

/// With a language's rules, by which letters may be equal whose bytes are not; `None` where the server has none.
fn nondeterministic(conn: &mut PgConnection) -> Option<&'static str> {
    let icu = "EXISTS (SELECT FROM pg_collation WHERE collprovider = 'i')";
    if !truth(conn, icu) {
        eprintln!("no ICU here: not tried");
        return None;
    }
    conn.batch_execute(
        "CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
    )
    .unwrap();
    Some("nocase")
}

/// `"C"` compares bytes, POSIX is another name of it, and the others follow a language.
fn collations(conn: &mut PgConnection) -> Vec<&'static str> {
    let mut collations = vec!["\"default\"", "\"C\"", "\"POSIX\""];
    collations.extend(nondeterministic(conn));
    collations
}

#[test]
fn a_key_out_of_a_column_of_any_collation_is_found_by_the_index() {
    let database = database();
    let conn = &mut database.connect();
    for collation in collations(conn) {
        conn.batch_execute(&format!(
            "DROP TABLE IF EXISTS tenant; \
             CREATE TABLE tenant (name text COLLATE {collation}); \
             INSERT INTO tenant VALUES ('number 500'); \
             DELETE FROM resource_control.throttled_key; \
             INSERT INTO resource_control.throttled_key \
                 SELECT 'cache rebuild', 'number ' || n, '2026-01-01', 'x' FROM generate_series(1, 1000) AS n; \
             ANALYZE resource_control.throttled_key; \
             BEGIN"
        ))
        .unwrap();
        let granted = "SELECT granted FROM tenant, \
            resource_control.attempt_throttled_key('cache rebuild', tenant.name, 'me')";
        assert!(truth(conn, granted), "{collation}");
        let entries =
            "pg_stat_get_xact_tuples_returned('resource_control.throttled_key_pkey'::regclass)";
        let entries = number(conn, entries);
        assert!(
            (1..100).contains(&entries),
            "{collation}: {entries} entries were read"
        );
        assert!(!truth(conn, granted), "{collation}");
        conn.batch_execute("COMMIT").unwrap();
    }
}

#[test]
fn keys_that_a_collation_holds_equal_are_different_keys() {
    let database = database();
    let conn = &mut database.connect();
    if nondeterministic(conn).is_none() {
        return;
    }
    conn.batch_execute(
        "CREATE TABLE tenant (name text COLLATE nocase); INSERT INTO tenant VALUES ('geo')",
    )
    .unwrap();
    let granted = "SELECT granted FROM tenant, \
        resource_control.attempt_throttled_key('cache rebuild', tenant.name, 'me')";
    assert!(truth(conn, granted));
    assert!(!truth(conn, granted));
    conn.batch_execute("UPDATE tenant SET name = 'GEO'")
        .unwrap();
    assert!(truth(conn, granted));
    assert!(truth(
        conn,
        "SELECT resource_control.throttled_key_lock('cache rebuild', name) \
             <> resource_control.throttled_key_lock('cache rebuild', 'geo') \
         AND resource_control.throttled_key_lock('cache rebuild', name) \
             = resource_control.throttled_key_lock('cache rebuild', 'GEO') FROM tenant"
    ));

    // Of two columns, whose collations differ, too.
    let both = "SELECT granted FROM tenant, (VALUES ('GEO' COLLATE \"C\")) AS who (details), \
        resource_control.attempt_throttled_key('cache rebuild', tenant.name, who.details)";
    assert!(!truth(conn, both));
}

#[test]
fn a_fences_name_is_its_bytes_from_a_column_of_any_collation() {
    let database = database();
    let conn = &mut database.connect();
    for collation in collations(conn) {
        conn.batch_execute(&format!(
            "DROP TABLE IF EXISTS fenced; \
             CREATE TABLE fenced (name text COLLATE {collation}); \
             INSERT INTO fenced VALUES ('geo'); DELETE FROM resource_control.fence"
        ))
        .unwrap();
        let pass = |token| format!("SELECT resource_control.pass_fence(name, {token}) FROM fenced");
        assert!(truth(conn, &pass(2)), "{collation}");
        assert!(!truth(conn, &pass(1)), "{collation}");
        conn.batch_execute("UPDATE fenced SET name = 'GEO'")
            .unwrap();
        assert!(truth(conn, &pass(1)), "{collation}");
    }
}

/// An index in a language's order is corrupt once the library that knows the language is a newer one.
#[test]
fn no_index_depends_on_a_librarys_order() {
    let database = database();
    let conn = &mut database.connect();
    // Versions are digits, whose order is the same in every language.
    let texts = "FROM pg_index JOIN pg_class AS t ON t.oid = indrelid, unnest(indcollation) AS c (used) \
        WHERE t.relnamespace = 'resource_control'::regnamespace AND used <> 0 \
        AND t.relname <> 'installed_migration'";
    let tables = number(conn, &format!("SELECT count(DISTINCT indrelid) {texts}"));
    assert!(tables >= 5, "only {tables} tables were found");
    let others = format!("SELECT count(*) {texts} AND used <> 'pg_catalog.\"C\"'::regcollation");
    assert_eq!(number(conn, &others), 0);
}
