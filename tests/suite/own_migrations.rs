//! An application's own migrations: each runs once, on whichever instance is first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;

use diesel::connection::SimpleConnection;
use workbench::Database;

use crate::assert_matches;
use crate::half::*;
use crate::support::Step::{Alone, Panic, Sql};
use crate::support::{Observer, Own, Role, eventually, foreign_holder, number, run};

const USERS: Own = Own(&[
    (
        "2026-01-01-000000_users",
        Sql("CREATE TABLE users AS SELECT generate_series(1, 1000) AS id"),
    ),
    (
        "2026-01-02-000000_index",
        Alone("CREATE INDEX CONCURRENTLY users_id ON users (id)"),
    ),
    (
        "2026-01-03-000000_more",
        Sql("INSERT INTO users VALUES (0)"),
    ),
]);
const VERSIONS: [&str; 3] = ["20260101000000", "20260102000000", "20260103000000"];
const LOCK: LockKey = LockKey::named("diesel_interlock migrations");

fn assert_free(database: &Database) {
    let mut observer = Observer::of(database);
    eventually("nothing is held", || observer.all_held() == 0);
}

/// One of the migrations builds an index concurrently, which waits for all open transactions. So no
/// instance that waits may have one.
#[test]
fn twenty_instances_run_each_migration_once() {
    let database = Database::new();
    let start = Barrier::new(20);
    let ran: Vec<usize> = std::thread::scope(|scope| {
        let instance = || {
            start.wait();
            run_pending(&database.url(), USERS).unwrap().len()
        };
        let all: Vec<_> = (0..20).map(|_| scope.spawn(instance)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(
        (ran.iter().sum::<usize>(), ran.iter().max()),
        (3, Some(&3)),
        "{ran:?}"
    );
    assert_eq!(
        number(&mut database.connect(), "(SELECT count(*) FROM users)"),
        1001
    );
    assert_free(&database);
}

#[test]
fn an_index_is_built_concurrently_while_other_instances_wait_for_the_lock() {
    const INDEX: Own = Own(&[
        (
            "1_wait",
            Alone(
                "DO $$ BEGIN WHILE NOT EXISTS (SELECT FROM pg_tables WHERE tablename = 'go_on') LOOP PERFORM pg_sleep(0.01); END LOOP; END $$",
            ),
        ),
        ("2_users", Sql("CREATE TABLE users (id int)")),
        (
            "3_index",
            Alone("CREATE INDEX CONCURRENTLY users_id ON users (id)"),
        ),
    ]);
    let database = Database::new();
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let instance = || run_pending(&database.url(), INDEX).unwrap().len();
        let all: Vec<_> = (0..4).map(|_| scope.spawn(instance)).collect();
        eventually(
            "one instance holds the lock, and others were refused",
            || observer.holders(&LOCK) == 1 && observer.have_tried() > 0,
        );
        run(observer.conn(), "CREATE TABLE go_on ()");
        let ran: usize = all.into_iter().map(|one| one.join().unwrap()).sum();
        assert_eq!(ran, 3);
    });
    assert_free(&database);
}

#[test]
fn a_first_call_returns_the_versions_that_ran_and_a_second_one_none() {
    let database = Database::new();
    assert_eq!(run_pending(&database.url(), USERS).unwrap(), VERSIONS);
    assert!(run_pending(&database.url(), USERS).unwrap().is_empty());
    assert!(run_pending(&database.url(), Own(&[])).unwrap().is_empty());
}

#[test]
fn a_failure_says_the_databases_reason_and_keeps_what_ran_before() {
    const FAILING: Own = Own(&[
        ("1_good", Sql("CREATE TABLE good ()")),
        (
            "2_bad",
            Sql("CREATE TABLE bad (); DO $$ BEGIN RAISE 'not on Fridays'; END $$"),
        ),
        ("3_later", Sql("CREATE TABLE later ()")),
    ]);
    let database = Database::new();
    let failed = run_pending(&database.url(), FAILING);
    assert_matches!(failed, Err(Error::ApplicationMigration(_)));
    assert!(failed.unwrap_err().to_string().contains("not on Fridays"));
    assert_eq!(
        number(
            &mut database.connect(),
            "(SELECT count(*) FROM pg_tables WHERE tablename IN ('good', 'bad', 'later'))"
        ),
        1
    );
    assert_free(&database);
}

#[test]
fn a_migration_that_panics_frees_the_lock() {
    const PANICKING: Own = Own(&[("1_good", Sql("CREATE TABLE good ()")), ("2_bad", Panic)]);
    let database = Database::new();
    let panicked = catch_unwind(AssertUnwindSafe(|| run_pending(&database.url(), PANICKING)));
    assert!(panicked.is_err());
    assert_free(&database);
    assert_eq!(
        run_pending(&database.url(), Own(&PANICKING.0[..1]))
            .unwrap()
            .len(),
        0
    );
}

#[test]
fn a_migration_that_ends_its_session_is_an_error_and_frees_the_lock() {
    const ENDING: Own = Own(&[(
        "1_end",
        Sql("SELECT pg_terminate_backend(pg_backend_pid())"),
    )]);
    let database = Database::new();
    assert!(run_pending(&database.url(), ENDING).is_err());
    assert_free(&database);
}

#[test]
fn equal_versions_are_refused_before_anything_is_sent() {
    const EQUAL: Own = Own(&[
        ("2026-01-01-000000_users", Sql("CREATE TABLE users ()")),
        ("20260101000000_orders", Sql("CREATE TABLE orders ()")),
    ]);
    let database = Database::new();
    let refused = run_pending(&database.url(), EQUAL);
    assert_matches!(refused, Err(Error::EqualVersions(first, second))
        if (&**first, &**second) == ("2026-01-01-000000_users", "20260101000000_orders"));
    assert_eq!(
        number(
            &mut database.connect(),
            "(SELECT count(*) FROM pg_tables WHERE schemaname = 'public')"
        ),
        0
    );
}

#[test]
fn each_tenants_schema_is_migrated_although_public_is() {
    let database = Database::new();
    let conn = &mut database.connect();
    run(conn, "CREATE SCHEMA a; CREATE SCHEMA b");
    run_pending(&database.url(), USERS).unwrap();
    for tenant in ["a", "b"] {
        let url = database.url_with("options", &format!("-c search_path={tenant},public"));
        assert_eq!(run_pending(&url, USERS).unwrap(), VERSIONS);
        assert!(run_pending(&url, USERS).unwrap().is_empty());
        assert_eq!(
            number(conn, &format!("(SELECT count(*) FROM {tenant}.users)")),
            1001
        );
    }
}

#[test]
fn the_role_of_a_second_service_migrates_a_schema_of_its_own() {
    let database = Database::new();
    let role = Role::new(&database);
    run_pending(&database.url(), USERS).unwrap();
    let name = role.name();
    run(
        &mut database.connect(),
        &format!("CREATE SCHEMA {name} AUTHORIZATION {name}"),
    );
    let url = database.url_with(
        "options",
        &format!("-c role={name} -c search_path={name},public"),
    );
    assert_eq!(run_pending(&url, USERS).unwrap(), VERSIONS);
    assert!(run_pending(&url, USERS).unwrap().is_empty());
}

#[test]
fn for_a_role_that_may_only_read_diesels_table_nothing_is_pending() {
    let database = Database::new();
    let role = Role::new(&database);
    wait(migrations::install(&pool(&database, 1))).unwrap();
    run_pending(&database.url(), USERS).unwrap();
    assert_matches!(run_pending(role.url(), USERS), Err(Error::Database(_)));
    if role.grant() {
        assert!(run_pending(role.url(), USERS).unwrap().is_empty());
        let more = Own(&[("2026-01-04-000000_more", Sql("CREATE TABLE more ()"))]);
        assert_matches!(
            run_pending(role.url(), more),
            Err(Error::ApplicationMigration(_))
        );
    }
    assert_free(&database);
}

#[test]
fn an_instance_that_waits_runs_what_the_holder_has_not_run() {
    let database = Database::new();
    let mut holder = foreign_holder(&database, &LOCK);
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| run_pending(&database.url(), USERS).unwrap());
        eventually("the instance was refused the lock", || {
            observer.have_tried() > 0
        });
        assert_eq!(
            number(
                observer.conn(),
                "(SELECT count(*) FROM pg_tables WHERE tablename = 'users')"
            ),
            0
        );
        holder
            .batch_execute("SELECT pg_advisory_unlock_all()")
            .unwrap();
        assert_eq!(waiting.join().unwrap(), VERSIONS);
    });
}
