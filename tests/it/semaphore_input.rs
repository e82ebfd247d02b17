//! Semaphores with invalid arguments, and databases with missing objects.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::result::DatabaseErrorKind;
use diesel::result::Error as DieselError;

use crate::half::prelude::*;
use crate::half::{
    Cluster, Database, Error, Semaphore,
    error::{Input, Schema},
    migrations, monitor,
};
use crate::semaphores::{database, fill, log};
use crate::support::{Expect, assert_matches, eventually, number};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn bad_input_is_an_error_before_anything_is_sent() {
    let database = database();
    let conn = &mut database.connect();
    // A statement that is sent here returns a different error.
    let (nowhere, bare) = (&mut Database::new().connect(), Database::new());
    let pool = bare.pool(1);
    let megabyte = "x".repeat(1 << 20);
    let refused = |semaphore: Semaphore| -> Error {
        let conn = &mut bare.connect();
        let errors = [
            semaphore.claim_on(conn).unwrap_err(),
            semaphore.try_acquire(&pool).unwrap_err(),
            semaphore.acquire(&pool).unwrap_err(),
            semaphore.acquire_timeout(&pool, SECOND).unwrap_err(),
            semaphore.with(&pool, |_| Ok::<_, Error>(())).unwrap_err(),
        ];
        let [first, others @ ..] = errors;
        for other in others {
            assert_eq!(other.to_string(), first.to_string());
        }
        first
    };
    for slots in [0, 32_768, 40_000, u32::MAX] {
        let error = refused(Semaphore::named("geocoder", slots, SECOND));
        assert_matches!(
            error,
            Error::Input(Input::BadSlots { service, slots: told }) if service == "geocoder" && *told == slots
        );
    }
    for timeout in [
        Duration::ZERO,
        Duration::from_secs(1001 * 366 * 86_400),
        Duration::MAX,
    ] {
        let semaphore = Semaphore::named("geocoder", 1, timeout);
        let renewed = semaphore.renew_on(nowhere, 1);
        assert_matches!(renewed, Err(Error::Input(Input::BadTimeout { .. })));
        let error = refused(semaphore);
        assert_matches!(
            error,
            Error::Input(Input::BadTimeout { service })
                if service == "geocoder"
        );
    }
    let error = refused(Semaphore::named("", 1, SECOND));
    assert_matches!(error, Error::Input(Input::EmptyName));
    for semaphore in [
        Semaphore::named("a\0b", 1, SECOND),
        Semaphore::named("geocoder", 1, SECOND).details("a\0b"),
    ] {
        let error = refused(semaphore);
        assert_matches!(error, Error::Input(Input::NulCharacter));
    }
    for semaphore in [
        Semaphore::new(&megabyte[..1001], 1, SECOND),
        Semaphore::new(megabyte.clone(), 1, SECOND),
        Semaphore::named("geocoder", 1, SECOND).details(megabyte[..8193].to_owned()),
        Semaphore::named("geocoder", 1, SECOND).details(megabyte.clone()),
    ] {
        let error = refused(semaphore);
        assert_matches!(error, Error::Input(Input::TooLong { .. }));
    }

    // The largest valid values.
    let timeout = Duration::from_secs(1000 * 360 * 86_400);
    let largest =
        Semaphore::new(&megabyte[..1000], 32_767, timeout).details(megabyte[..8192].to_owned());
    let claim = largest.claim_on(conn).unwrap().expect_acquired();
    assert!(largest.renew_on(conn, claim.id).unwrap().is_some());
    assert!(largest.complete_on(conn, claim.id).unwrap());
    let smallest = Semaphore::named("x", 1, Duration::from_nanos(1));
    assert_eq!(smallest.claim_on(conn).unwrap().expect_acquired().slot, 0);
}

/// The name of the constraint that the call violates.
fn constraint(conn: &mut PgConnection, call: &str) -> Option<String> {
    match conn.batch_execute(&format!("SELECT {call}")) {
        Err(DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, information)) => {
            information.constraint_name().map(str::to_owned)
        }
        other => panic!("{call}: {other:?}"),
    }
}

#[test]
fn the_functions_refuse_bad_input_themselves() {
    let database = database();
    let conn = &mut database.connect();
    let mut refused = |function: &str, arguments: &[&str], constraint_name: &str| {
        for arguments in arguments {
            let call = format!("resource_control.{function}({arguments})");
            let broken = constraint(conn, &call);
            assert_eq!(broken.as_deref(), Some(constraint_name), "{call}");
        }
    };
    let services = [
        "NULL, 1, '1 s'",
        "'', 1, '1 s'",
        "repeat('x', 1001), 1, '1 s'",
        "repeat('ü', 501), 1, '1 s'",
    ];
    refused(
        "claim_service_request",
        &services,
        "diesel_interlock_bad_service",
    );
    let slots = ["NULL", "0", "-1", "32768", "2147483647", "-2147483648"]
        .map(|slots| format!("'s', {slots}, '1 s'"));
    let slots = slots.each_ref().map(String::as_str);
    refused(
        "claim_service_request",
        &slots,
        "diesel_interlock_bad_slots",
    );
    let timeouts = [
        "NULL",
        "'0'",
        "'-1 s'",
        "'1 month -30 days'",
        "'1000 years 1 us'",
        "'178000000 years'",
        "'-178000000 years'",
    ];
    let claims = timeouts.map(|timeout| format!("'s', 1, {timeout}"));
    let claims = claims.each_ref().map(String::as_str);
    refused(
        "claim_service_request",
        &claims,
        "diesel_interlock_bad_timeout",
    );
    let renewals = timeouts.map(|timeout| format!("1, {timeout}"));
    let renewals = renewals.each_ref().map(String::as_str);
    refused(
        "renew_service_request",
        &renewals[1..],
        "diesel_interlock_bad_timeout",
    );
    let details = ["'s', 1, '1 s', NULL", "'s', 1, '1 s', repeat('x', 8193)"];
    refused(
        "claim_service_request",
        &details,
        "diesel_interlock_bad_details",
    );
    let prunings = [
        "'-1 s', 1",
        "'1 s', 0",
        "'1 s', -1",
        "'-178000000 years', 1",
    ];
    refused(
        "prune_service_requests",
        &prunings,
        "diesel_interlock_bad_pruning",
    );

    if number(conn, "current_setting('server_version_num')") >= 170_000 {
        for call in [
            "claim_service_request('s', 1, 'infinity')",
            "claim_service_request('s', 1, '-infinity')",
            "renew_service_request(1, 'infinity')",
        ] {
            let broken = constraint(conn, &format!("resource_control.{call}"));
            assert_eq!(
                broken.as_deref(),
                Some("diesel_interlock_bad_timeout"),
                "{call}"
            );
        }
    }
    for call in [
        "complete_service_request(NULL)",
        "renew_service_request(NULL, '1 s')",
        "renew_service_request(1, NULL)",
        "prune_service_requests(NULL, 1)",
        "prune_service_requests('1 s', NULL)",
    ] {
        let is_null = format!("(resource_control.{call} IS NULL)::integer");
        assert_eq!(number(conn, &is_null), 1, "{call}");
    }
    assert_eq!(log(conn), []);
}

#[test]
fn a_missing_schema_is_named() {
    let bare = Database::new();
    let (pool, conn) = (bare.pool(1), &mut bare.connect());
    let semaphore = Semaphore::named("geocoder", 1, SECOND);
    assert_matches!(
        semaphore.claim_on(conn),
        Err(Error::Schema(Schema::NotInstalled))
    );
    assert_matches!(
        semaphore.try_acquire(&pool),
        Err(Error::Schema(Schema::NotInstalled))
    );
    assert_matches!(
        semaphore.acquire_timeout(&pool, Duration::from_secs(10)),
        Err(Error::Schema(Schema::NotInstalled))
    );
    assert_matches!(
        semaphore.complete_on(conn, 1),
        Err(Error::Schema(Schema::NotInstalled))
    );
    assert_matches!(
        semaphore.renew_on(conn, 1),
        Err(Error::Schema(Schema::NotInstalled))
    );
    // Both connections are still usable.
    migrations::install(conn).unwrap();
    assert!(semaphore.claim_on(conn).unwrap().admitted().is_some());
    assert!(semaphore.try_acquire(&pool).unwrap().is_full());
}

#[test]
fn missing_rights_are_named_and_the_documented_ones_are_enough() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let semaphore = Semaphore::named("geocoder", 1, SECOND);
    conn.batch_execute("CREATE ROLE app; SET ROLE app").unwrap();
    for grant in [
        "USAGE ON SCHEMA resource_control",
        "SELECT ON ALL TABLES IN SCHEMA resource_control",
        "INSERT, UPDATE ON ALL TABLES IN SCHEMA resource_control",
    ] {
        let refused = semaphore.claim_on(conn);
        let cause = refused.as_ref().err().and_then(std::error::Error::source);
        let cause = cause.expect("the error of the server").to_string();
        assert!(cause.contains("permission denied"), "{cause}");
        assert_matches!(
            refused,
            Err(Error::Schema(Schema::MissingRights { role, .. }))
                if role == "app"
        );
        conn.batch_execute(&format!("RESET ROLE; GRANT {grant} TO app; SET ROLE app"))
            .unwrap();
    }
    let claim = semaphore.claim_on(conn).unwrap().expect_acquired();
    assert!(semaphore.renew_on(conn, claim.id).unwrap().is_some());
    assert!(semaphore.complete_on(conn, claim.id).unwrap());
}

/// The grants of a monitoring role, as the guide has them.
fn grants_to_monitor(role: &str) -> String {
    let page = include_str!("../../docs/production.md");
    let grants = page.lines().filter(|line| line.starts_with("GRANT "));
    grants
        .map(|grant| grant.replace("grafana", role))
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn a_failure_that_is_not_about_the_schema_or_rights_keeps_its_own_error() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let (conn, locking) = (&mut database.connect(), &mut database.connect());
    migrations::install(conn).unwrap();
    // As before an upgrade, when the new program runs already. A table of the administrator is nobody's business.
    conn.batch_execute(include_str!(
        "../../migrations/2000-01-01-000006_rate_limits/down.sql"
    ))
    .unwrap();
    conn.batch_execute(&format!(
        "CREATE ROLE grafana; CREATE ROLE app; {}
         GRANT USAGE ON SCHEMA resource_control TO app;
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO app;
         CREATE TABLE resource_control.notes (id int);
         SET lock_timeout = '20ms'",
        grants_to_monitor("grafana")
    ))
    .unwrap();
    let semaphore = Semaphore::named("geocoder", 4, SECOND);
    let claim = semaphore.claim_on(conn).unwrap().expect_acquired();
    locking
        .batch_execute("BEGIN; LOCK TABLE resource_control.service_request")
        .unwrap();

    conn.batch_execute("SET ROLE grafana").unwrap();
    let slots = monitor::slots(conn, "geocoder", 4);
    assert_matches!(slots, Err(Error::Database(_)));
    for role in ["app", "postgres"] {
        conn.batch_execute(&format!("SET ROLE {role}")).unwrap();
        let claimed = semaphore.claim_on(conn);
        assert_matches!(claimed, Err(Error::Database(_)));
        let renewed = semaphore.renew_on(conn, claim.id);
        assert_matches!(renewed, Err(Error::Database(_)));
        let completed = semaphore.complete_on(conn, claim.id);
        assert_matches!(completed, Err(Error::Database(_)));
    }
    locking.batch_execute("ROLLBACK").unwrap();
    assert!(semaphore.complete_on(conn, claim.id).unwrap());
}

#[test]
fn a_read_only_session_is_an_error_that_says_so() {
    let database = database();
    let conn = &mut database.connect();
    let semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    let claim = semaphore.claim_on(conn).unwrap().expect_acquired();
    let held = log(conn);
    conn.batch_execute("SET default_transaction_read_only = on")
        .unwrap();
    assert!(semaphore.claim_on(conn).unwrap().is_full());
    let two = Semaphore::named("geocoder", 2, SECOND);
    assert_matches!(two.claim_on(conn), Err(Error::ReadOnly));
    assert_matches!(two.complete_on(conn, claim.id), Err(Error::ReadOnly));
    assert_matches!(two.renew_on(conn, claim.id), Err(Error::ReadOnly));
    assert_eq!(log(conn), held);
    conn.batch_execute("SET default_transaction_read_only = off")
        .unwrap();
    assert_eq!(fill(&two, conn).len(), 1);
}

#[test]
fn a_standby_reads_the_table_and_claims_nothing() {
    let primary = Cluster::start();
    let database = primary.database();
    migrations::install(&mut database.connect()).unwrap();
    let one = Semaphore::named("geocoder", 1, Duration::from_secs(3600));
    let claim = one
        .claim_on(&mut database.connect())
        .unwrap()
        .expect_acquired();
    let standby = primary.standby();
    let conn = &mut PgConnection::establish(&standby.url(database.name())).unwrap();
    eventually("it has followed", || log(conn).len() == 1);
    assert!(one.claim_on(conn).unwrap().is_full());
    let two = Semaphore::named("geocoder", 2, SECOND);
    assert_matches!(two.claim_on(conn), Err(Error::ReadOnly));
    assert_matches!(one.complete_on(conn, claim.id), Err(Error::ReadOnly));
    assert_matches!(one.renew_on(conn, claim.id), Err(Error::ReadOnly));
}
