//! Schemas that somebody made by hand: adopted where they are what ours is, refused where they differ.

use std::sync::Barrier;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};
use diesel_interlock::{Error, ResourceLabel, Throttle, migrations};
use workbench::Database;

use crate::support::Observer;

pub(crate) const BY_HAND: &str = include_str!("by_hand.sql");

/// What a user has built on it.
const DEPENDANTS: &str = "
    ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'mail';
    CREATE TABLE resource_control.their_own (id int);
    CREATE FUNCTION resource_control.their_own() RETURNS int LANGUAGE sql AS 'SELECT 1';
    CREATE TABLE job (
        id int PRIMARY KEY,
        resource resource_control.throttled_resource_enum REFERENCES resource_control.throttled_resource
    );
    INSERT INTO job VALUES (1, 'nightly report');
    CREATE VIEW job_view AS SELECT id, last_locked FROM job
        JOIN resource_control.throttled_resource ON resource_id = resource;
    CREATE FUNCTION job_lock(resource resource_control.throttled_resource_enum) RETURNS boolean LANGUAGE sql
        AS $$ SELECT resource_control.lock_throttled_resource(resource, 'job') $$;
    CREATE INDEX their_own_index ON resource_control.throttled_resource (last_locked);
    GRANT EXECUTE ON FUNCTION resource_control.lock_throttled_resource TO pg_monitor;";

#[derive(QueryableByName, Debug, PartialEq, Eq)]
struct Line {
    #[diesel(sql_type = Nullable<Text>)]
    line: Option<String>,
}

fn lines(conn: &mut PgConnection, sql: &str) -> Vec<Line> {
    diesel::sql_query(sql)
        .load(conn)
        .unwrap_or_else(|error| panic!("{sql}: {error}"))
}

/// Every row of the catalogue that DDL could have changed, by who wrote it.
pub(crate) fn catalogue(conn: &mut PgConnection) -> Vec<String> {
    let mut rows = Vec::new();
    for table in [
        "pg_namespace",
        "pg_class",
        "pg_type",
        "pg_proc",
        "pg_attribute",
        "pg_constraint",
        "pg_description",
        "pg_enum",
        "pg_depend",
    ] {
        rows.extend(lines(
            conn,
            &format!("SELECT '{table} ' || xmin || ' ' || ctid AS line FROM pg_catalog.{table} ORDER BY 1"),
        ));
    }
    rows.into_iter().filter_map(|row| row.line).collect()
}

/// What there is in the schema, apart from rows, labels and the user's own.
fn schema(conn: &mut PgConnection) -> Vec<Line> {
    lines(
        conn,
        "SELECT line FROM (
            SELECT 'function ' || pg_get_functiondef(oid) || coalesce(obj_description(oid, 'pg_proc'), '') AS line
                FROM pg_proc WHERE pronamespace = 'resource_control'::regnamespace
            UNION ALL SELECT 'table ' || relname || coalesce(array_to_string(reloptions, ', '), '')
                    || coalesce(obj_description(oid, 'pg_class'), '') FROM pg_class
                WHERE relnamespace = 'resource_control'::regnamespace
            UNION ALL SELECT 'column ' || attrelid::regclass || '.' || attname || format_type(atttypid, atttypmod)
                    || attnotnull || coalesce(col_description(attrelid, attnum), '')
                FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
                WHERE relnamespace = 'resource_control'::regnamespace AND attnum > 0
            UNION ALL SELECT 'constraint ' || conrelid::regclass || '.' || conname || pg_get_constraintdef(oid)
                FROM pg_constraint WHERE connamespace = 'resource_control'::regnamespace
        ) AS everything WHERE line NOT LIKE '%their_own%' ORDER BY line",
    )
}

fn expected_schema() -> Vec<Line> {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    schema(conn)
}

fn differences(conn: &mut PgConnection) -> Vec<String> {
    let before = catalogue(conn);
    let differences = match migrations::install(conn) {
        Err(Error::ForeignInstallation { differences }) => differences,
        other => panic!("{other:?}"),
    };
    assert_eq!(catalogue(conn), before, "{differences:?}");
    differences
}

#[test]
fn a_schema_made_by_hand_is_adopted_and_all_that_was_built_on_it_stays() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    conn.batch_execute(DEPENDANTS).unwrap();
    conn.batch_execute(
        "SELECT resource_control.lock_throttled_resource('nightly report', 'web-1')",
    )
    .unwrap();
    const THEIRS: &str = "SELECT last_locked || last_locker_details AS line FROM resource_control.throttled_resource \
        UNION ALL SELECT 'labels ' || count(*) FROM pg_enum UNION ALL SELECT 'jobs ' || count(*) FROM job \
        UNION ALL SELECT relname || ' ' || oid || ' ' || relfilenode FROM pg_class \
            WHERE relname IN ('throttled_resource', 'their_own', 'job', 'job_view') \
        UNION ALL SELECT proname || ' ' || oid || ' ' || coalesce(proacl::text, '') FROM pg_proc \
            WHERE proname IN ('lock_throttled_resource', 'their_own', 'job_lock') ORDER BY line";
    let theirs = lines(conn, THEIRS);

    let adopted = migrations::install(conn).unwrap();
    let all: Vec<_> = crate::installation::versions();
    assert_eq!(
        adopted.iter().map(ToString::to_string).collect::<Vec<_>>(),
        all
    );
    assert_eq!(lines(conn, THEIRS), theirs);
    assert_eq!(schema(conn), expected_schema());
    let settled = catalogue(conn);
    assert_eq!(migrations::install(conn).unwrap(), []);
    assert_eq!(catalogue(conn), settled);

    let denied = Throttle::of(ResourceLabel("nightly report".into())).attempt(conn, "me");
    assert!(denied.unwrap().denied().is_some());
    let _ = Throttle::of(ResourceLabel("nightly report".into()))
        .key(7)
        .attempt(conn, "me")
        .unwrap();
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn it_is_adopted_once_by_twenty_instances_under_any_settings() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    conn.batch_execute(
        "CREATE SCHEMA impostor; CREATE DOMAIN impostor.text AS int; CREATE DOMAIN impostor.interval AS int;
         CREATE FUNCTION impostor.length(pg_catalog.text) RETURNS int LANGUAGE sql AS 'SELECT 0'",
    )
    .unwrap();
    let start = Barrier::new(20);
    let adopted: usize = std::thread::scope(|scope| {
        let instances: Vec<_> = (0..20)
            .map(|_| {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    conn.batch_execute(
                        "SET search_path = impostor, public, pg_catalog; \
                         SET default_transaction_isolation = serializable; \
                         SET standard_conforming_strings = off; SET TimeZone = 'Europe/Paris'; \
                         SET IntervalStyle = 'sql_standard'; SET DateStyle = 'German'",
                    )
                    .unwrap();
                    start.wait();
                    migrations::install(conn).unwrap().len()
                })
            })
            .collect();
        instances.into_iter().map(|it| it.join().unwrap()).sum()
    });
    assert_eq!(adopted, crate::installation::versions().len());
    assert_eq!(schema(conn), expected_schema());
}

#[test]
fn adopting_waits_for_nobody_and_nobody_waits_for_it() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    let taking = &mut database.connect();
    taking
        .batch_execute(
            "BEGIN; SELECT resource_control.lock_throttled_resource('nightly report', 'web-1')",
        )
        .unwrap();
    conn.batch_execute("SET lock_timeout = '5s'").unwrap();
    migrations::install(conn).unwrap();
    taking
        .batch_execute(
            "SELECT resource_control.lock_throttled_resource('nightly report', 'web-1'); COMMIT",
        )
        .unwrap();
}

#[test]
fn an_empty_schema_is_filled() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute("CREATE SCHEMA resource_control")
        .unwrap();
    migrations::install(conn).unwrap();
    assert_eq!(schema(conn), expected_schema());
}

#[test]
fn each_difference_is_stated_and_nothing_is_changed() {
    let on = "resource_control.throttled_resource";
    for (change, expected) in [
        (
            format!("ALTER TABLE {on} ALTER last_locked TYPE timestamp"),
            &[
                "column throttled_resource.last_locked is timestamp without time zone, \
                 expected timestamp with time zone",
            ][..],
        ),
        (
            format!("ALTER TABLE {on} ALTER last_locked DROP NOT NULL, ALTER last_locker_details DROP DEFAULT"),
            &[
                "column throttled_resource.last_locked is nullable, expected not null",
                "column throttled_resource.last_locker_details defaults to nothing, expected ''::text",
            ],
        ),
        (
            format!("ALTER TABLE {on} DROP CONSTRAINT positive_delays_only"),
            &["constraint throttled_resource.positive_delays_only is missing"],
        ),
        (
            format!(
                "ALTER TABLE {on} DROP CONSTRAINT positive_delays_only, \
                 ADD CONSTRAINT positive_delays_only CHECK (throttle_interval > '1 second')"
            ),
            &["constraint throttled_resource.positive_delays_only is CHECK"],
        ),
        (
            format!("ALTER TABLE {on} RENAME CONSTRAINT empty_rules TO rules"),
            &[
                "constraint throttled_resource.empty_rules is missing",
                "constraint throttled_resource.rules is CHECK",
            ],
        ),
        (
            format!("ALTER TABLE {on} DROP last_locker_details"),
            &[
                "column throttled_resource.last_locker_details is missing",
                "constraint throttled_resource.empty_rules is missing",
            ],
        ),
        (
            format!("ALTER TABLE {on} ADD tenant int NOT NULL DEFAULT 0; ALTER TABLE {on} ALTER tenant DROP DEFAULT"),
            &["column throttled_resource.tenant is not null, not expected"],
        ),
        (
            format!("CREATE UNIQUE INDEX one_each ON {on} (last_locked)"),
            &["index throttled_resource.one_each is CREATE UNIQUE INDEX"],
        ),
        (
            format!("ALTER TABLE {on} RENAME TO mine; CREATE VIEW {on} AS SELECT * FROM resource_control.mine"),
            &["relation throttled_resource is a view, expected a table"],
        ),
        (
            format!("ALTER TABLE {on} SET UNLOGGED"),
            &["relation throttled_resource is an unlogged table, expected a table"],
        ),
        (
            format!("ALTER TABLE {on} ALTER resource_id TYPE text"),
            &["column throttled_resource.resource_id is text, expected resource_control.throttled_resource_enum"],
        ),
        (
            "DROP FUNCTION resource_control.lock_throttled_resource; \
             CREATE FUNCTION resource_control.lock_throttled_resource(\
             resource_id_var resource_control.throttled_resource_enum, details_var text) \
             RETURNS integer LANGUAGE sql AS 'SELECT 1'"
                .to_owned(),
            &["function lock_throttled_resource(resource_control.throttled_resource_enum, text) \
               returns integer, expected boolean"],
        ),
        (
            "DROP FUNCTION resource_control.lock_throttled_resource; \
             CREATE FUNCTION resource_control.lock_throttled_resource(\
             a resource_control.throttled_resource_enum, b text) \
             RETURNS boolean LANGUAGE sql AS 'SELECT true'"
                .to_owned(),
            &["function lock_throttled_resource(resource_control.throttled_resource_enum, text) takes (a "],
        ),
        (
            "DROP FUNCTION resource_control.lock_throttled_resource; \
             CREATE FUNCTION resource_control.lock_throttled_resource(text, text) \
             RETURNS boolean LANGUAGE sql AS 'SELECT true'"
                .to_owned(),
            &["function lock_throttled_resource(resource_control.throttled_resource_enum, text) is missing"],
        ),
        (
            "CREATE TABLE resource_control.service_request (id bigserial PRIMARY KEY, service text NOT NULL)"
                .to_owned(),
            &[
                "column service_request.completed_at is missing",
                "column service_request.id defaults to nextval(",
            ],
        ),
    ] {
        let database = Database::new();
        let conn = &mut database.connect();
        conn.batch_execute(BY_HAND).unwrap();
        conn.batch_execute(&change).unwrap();
        let differences = differences(conn);
        for expected in expected {
            let stated = differences.iter().any(|it| it.starts_with(expected));
            assert!(stated, "{change}: {expected:?} in {differences:#?}");
        }
        let unique: std::collections::BTreeSet<_> = differences.iter().collect();
        assert_eq!(unique.len(), differences.len(), "{differences:#?}");
    }
}

#[test]
fn the_message_names_the_differences_and_the_way_out() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute("CREATE SCHEMA resource_control; CREATE DOMAIN resource_control.throttled_resource_enum AS text")
        .unwrap();
    let message = migrations::install(conn).unwrap_err().to_string();
    assert!(
        message.contains("type throttled_resource_enum is a domain, expected an enumerated type"),
        "{message}"
    );
    assert!(message.contains("rename it"), "{message}");
}

#[test]
fn a_role_that_does_not_own_it_is_told_so() {
    let database = crate::roles::server().database();
    let role = crate::roles::Role::new(&database);
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    conn.batch_execute(&format!("SET SESSION AUTHORIZATION {}", role.name()))
        .unwrap();
    let refused = migrations::install(conn);
    assert!(
        matches!(refused, Err(Error::MissingRights { .. })),
        "{refused:?}"
    );
}

#[test]
fn an_owner_who_may_not_make_schemas_is_told_so() {
    let database = crate::roles::server().database();
    let role = crate::roles::Role::new(&database);
    let conn = &mut database.connect();
    let name = role.name();
    conn.batch_execute(&format!(
        "CREATE SCHEMA resource_control AUTHORIZATION {name}; SET SESSION AUTHORIZATION {name}"
    ))
    .unwrap();
    let refused = migrations::install(conn);
    assert!(
        matches!(&refused, Err(Error::MissingRights { missing, .. }) if missing.starts_with("CREATE on the database, to compare")),
        "{refused:?}"
    );
    // Before the database goes, what the role owns in it.
    conn.batch_execute("RESET SESSION AUTHORIZATION; DROP SCHEMA resource_control")
        .unwrap();
}

#[test]
fn columns_that_can_be_left_out_are_nobodys_business() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    conn.batch_execute(
        "ALTER TABLE resource_control.throttled_resource \
         ADD note text, ADD tenant int NOT NULL DEFAULT 0",
    )
    .unwrap();
    migrations::install(conn).unwrap();
}

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

#[test]
fn what_was_adopted_goes_on_throttling() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    migrations::install(conn).unwrap();
    let mut lock = |who: &str| -> i64 {
        diesel::sql_query(
            "SELECT resource_control.lock_throttled_resource('nightly report', $1)::int::bigint AS count",
        )
        .bind::<Text, _>(who)
        .get_result::<Count>(conn)
        .unwrap()
        .count
    };
    assert_eq!(lock("web-1"), 1);
    assert_eq!(lock("web-2"), 0);
}
