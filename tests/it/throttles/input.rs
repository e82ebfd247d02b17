//! Throttles that are told something impossible, and databases that lack something.

use std::time::Duration;

use diesel::connection::SimpleConnection;

use super::{REBUILD, Resource, age, database, granted, install};
use crate::half::{
    Cluster, Database, Error, ResourceLabel, Throttle,
    error::{Input, Schema},
    migrations, sync, throttled_resources,
};
use crate::keys::Unprintable;
use crate::support::{assert_matches, attempt, number};

#[test]
fn bad_input_is_an_error_that_changes_nothing() {
    let database = database();
    let conn = &mut database.connect();
    for details in ["", "   "] {
        assert_matches!(
            REBUILD.details(details.to_owned()).attempt_on(conn),
            Err(Error::Input(Input::EmptyDetails))
        );
        assert_matches!(
            REBUILD.key(1).details(details.to_owned()).attempt_on(conn),
            Err(Error::Input(Input::EmptyDetails))
        );
    }
    assert_matches!(
        REBUILD.details("a\0b").attempt_on(conn),
        Err(Error::Input(Input::NulCharacter))
    );
    assert_matches!(
        REBUILD.key("a\0b").details("me").attempt_on(conn),
        Err(Error::Input(Input::NulCharacter))
    );
    assert_matches!(
        REBUILD.key("").details("me").attempt_on(conn),
        Err(Error::Input(Input::EmptyKey))
    );
    assert_matches!(
        REBUILD.key(Unprintable).details("me").attempt_on(conn),
        Err(Error::Input(Input::Unformatted))
    );
    let unknown = Throttle::of(ResourceLabel("no such".into()));
    for refused in [
        unknown.details("me").attempt_on(conn),
        unknown.key(1).details("me").attempt_on(conn),
    ] {
        assert_matches!(
            refused,
            Err(Error::Schema(Schema::UnknownResource { label }))
                if label == "no such"
        );
    }
    conn.batch_execute("ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'no row'")
        .unwrap();
    let rowless = Throttle::of(ResourceLabel("no row".into()));
    let refused = rowless.details("me").attempt_on(conn);
    assert_matches!(
        refused,
        Err(Error::Schema(Schema::UnknownResource { label }))
            if label == "no row"
    );

    conn.batch_execute("SET default_transaction_read_only = on")
        .unwrap();
    let refused = REBUILD.details("me").attempt_on(conn);
    assert_matches!(refused, Err(Error::ReadOnly));
    conn.batch_execute("RESET default_transaction_read_only")
        .unwrap();
    let long = "x".repeat(1 << 20);
    for refused in [
        REBUILD.details(long.clone()).attempt_on(conn),
        REBUILD.key(&long).details("me").attempt_on(conn),
        Throttle::of(ResourceLabel(long.clone()))
            .details("me")
            .attempt_on(conn),
    ] {
        assert_matches!(refused, Err(Error::Input(Input::TooLong { .. })));
    }
    granted(attempt(conn, &REBUILD, long[..8192].to_owned()));
    granted(attempt(conn, &REBUILD.key(&long[..1000]), "me"));
}

#[test]
fn a_missing_schema_and_missing_rights_are_named() {
    let bare = Database::new();
    let conn = &mut bare.connect();
    assert_matches!(
        REBUILD.details("me").attempt_on(conn),
        Err(Error::Schema(Schema::NotInstalled))
    );
    assert_matches!(
        sync::<Resource>(conn),
        Err(Error::Schema(Schema::NotInstalled))
    );

    let cluster = Cluster::start();
    let database = cluster.database();
    install(&database);
    let conn = &mut database.connect();
    conn.batch_execute("CREATE ROLE app; SET ROLE app").unwrap();
    let refused = REBUILD.details("me").attempt_on(conn);
    assert_matches!(
        refused,
        Err(Error::Schema(Schema::MissingRights { role, .. }))
            if role == "app"
    );
    conn.batch_execute("RESET ROLE; GRANT USAGE ON SCHEMA resource_control TO app; SET ROLE app")
        .unwrap();
    let refused = REBUILD.details("me").attempt_on(conn);
    assert_matches!(
        refused,
        Err(Error::Schema(Schema::MissingRights { missing, .. }))
            if missing.contains("SELECT on throttled_resource")
    );

    // What the documentation grants is enough, and what is installed needs no DDL.
    conn.batch_execute(
        "RESET ROLE; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO app; SET ROLE app",
    )
    .unwrap();
    assert_eq!(migrations::install(conn).unwrap(), []);
    assert_eq!(sync::<Resource>(conn).unwrap().added, Vec::<String>::new());
    granted(attempt(conn, &REBUILD, "me"));
    granted(attempt(conn, &REBUILD.key(1), "me"));
    throttled_resources! {
        enum New { New = "new" every Duration::from_secs(1) }
    }
    let refused = sync::<New>(conn);
    assert_matches!(
        refused,
        Err(Error::Schema(Schema::MissingRights { missing, .. }))
            if missing.contains("owner")
    );
}

#[test]
fn a_row_whose_label_is_there_is_added_without_ownership() {
    let cluster = Cluster::start();
    let database = cluster.database();
    install(&database);
    let conn = &mut database.connect();
    conn.batch_execute(
        "DELETE FROM resource_control.throttled_resource;
         CREATE ROLE app;
         GRANT USAGE ON SCHEMA resource_control TO app;
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO app;
         SET ROLE app",
    )
    .unwrap();
    let added = sync::<Resource>(conn).unwrap().added;
    assert_eq!(added, ["cache rebuild", "tenant's import"]);
}

#[test]
fn the_functions_refuse_bad_input_themselves_and_pruning_keeps_to_its_batch() {
    let database = database();
    let conn = &mut database.connect();
    for (call, constraint) in [
        ("key('cache rebuild', NULL, 'me'", "empty_key"),
        ("key('cache rebuild', '', 'me'", "empty_key"),
        ("key('cache rebuild', 'k', NULL", "empty_details"),
        ("key('cache rebuild', 'k', '  '", "empty_details"),
        ("key(NULL, 'k', 'me'", "unknown_resource"),
        ("resource('cache rebuild', NULL", "empty_details"),
        ("resource('cache rebuild', '  '", "empty_details"),
        ("resource(NULL, 'me'", "unknown_resource"),
    ] {
        let call = format!("SELECT resource_control.attempt_throttled_{call})");
        let refused = conn.batch_execute(&call);
        let Err(diesel::result::Error::DatabaseError(_, information)) = &refused else {
            panic!("{call}: {refused:?}");
        };
        let constraint = format!("diesel_interlock_{constraint}");
        assert_eq!(
            information.constraint_name(),
            Some(&constraint[..]),
            "{call}"
        );
    }
    for key in 0..3 {
        granted(attempt(conn, &REBUILD.key(key), "me"));
    }
    age(conn, "1 hour");
    for pruned in [2, 1, 0] {
        let call = "resource_control.prune_throttled_keys(2)";
        assert_eq!(number(conn, call), pruned);
    }
}

#[test]
fn the_table_keeps_no_interval_of_nothing_and_no_grant_without_a_holder() {
    let database = database();
    let conn = &mut database.connect();
    for (change, is_kept) in [
        ("throttle_interval = '1 us'", true),
        ("throttle_interval = '0'", false),
        ("last_locked = now(), last_locker_details = 'me'", true),
        ("last_locked = now(), last_locker_details = ''", false),
        ("last_locked = now(), last_locker_details = '  '", false),
        ("last_locked = '-infinity', last_locker_details = ''", true),
        (
            "last_locked = '-infinity', last_locker_details = 'me'",
            false,
        ),
    ] {
        let update = format!("UPDATE resource_control.throttled_resource SET {change}");
        assert_eq!(conn.batch_execute(&update).is_ok(), is_kept, "{change}");
    }
}
