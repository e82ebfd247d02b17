//! Errors say what to do, keep their cause, and pass through Diesel's error type unharmed.

use std::error::Error as _;

use diesel::connection::SimpleConnection;
use diesel::result::Error as DieselError;

use crate::half::{
    AdvisoryLock, Database, Error,
    error::{Input, Misplaced},
    migrations, unchecked_pool,
};
use crate::migrations::directory;
use crate::support::assert_matches;

static LOCK: AdvisoryLock = AdvisoryLock::named("errors");

fn assert_thread_safe<E: std::error::Error + Send + Sync + 'static>() {}

#[test]
fn they_can_be_sent_anywhere() {
    assert_thread_safe::<Error>();
}

#[test]
fn a_round_trip_through_diesels_error_changes_nothing() {
    let diesel: DieselError = Error::Input(Input::EmptyName).into();
    assert_eq!(
        diesel.to_string(),
        Error::Input(Input::EmptyName).to_string()
    );
    assert_matches!(Error::from(diesel), Error::Input(Input::EmptyName));

    let diesel: DieselError = Error::Database(DieselError::NotFound).into();
    assert_eq!(diesel, DieselError::NotFound);
    assert_matches!(Error::from(diesel), Error::Database(DieselError::NotFound));

    let theirs = DieselError::QueryBuilderError("theirs".into());
    let Error::Database(DieselError::QueryBuilderError(inner)) = Error::from(theirs) else {
        panic!("not what it was");
    };
    assert_eq!(inner.to_string(), "theirs");
}

/// The message and its causes, as anyhow's `{:#}` and many a logger print them.
fn with_causes(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", with_causes(cause)),
        None => error.to_string(),
    }
}

#[test]
fn a_database_error_says_what_the_database_says_and_says_it_once() {
    let database = Database::new();
    let mut conn = database.connect();
    let error: Error = conn.batch_execute("SELECT 1/0").unwrap_err().into();
    assert_eq!(error.to_string(), "division by zero");
    assert_eq!(with_causes(&error), "division by zero");

    conn.batch_execute("BEGIN").unwrap();
    conn.batch_execute("SELECT 1/0").unwrap_err();
    let error = LOCK.acquire_on(&mut conn).map(drop).unwrap_err();
    assert_eq!(with_causes(&error).matches("aborted").count(), 1, "{error}");

    let unreadable = DieselError::DeserializationError("not a number".into());
    assert_eq!(with_causes(&Error::Database(unreadable)), "not a number");
}

#[test]
#[cfg(feature = "r2d2")]
fn an_exhausted_pool_says_why_it_gave_no_connection() {
    let pool = unchecked_pool("host=/nowhere", 1, std::time::Duration::from_millis(50));
    let error = LOCK.try_acquire(&pool).unwrap_err();
    assert_matches!(error, Error::Pool(_));
    let message = error.to_string();
    assert!(
        message.starts_with("no connection from the pool: timed out waiting for connection"),
        "{message}"
    );
    assert_eq!(with_causes(&error), message);
}

#[test]
#[cfg(feature = "migrations")]
fn a_migration_that_fails_says_which_and_why_and_says_it_once() {
    let database = Database::new();
    let source = directory("failing", &[("2026-01-01-000000_fails", "SELECT 1/0")]);
    let error = migrations::run_pending(&mut database.connect(), source.migrations()).unwrap_err();
    let message = with_causes(&error);
    assert!(message.contains("fails"), "{message}");
    assert_eq!(message.matches("division by zero").count(), 1, "{message}");
    assert!(error.to_string().contains("division by zero"), "{error}");
}

#[test]
#[cfg(feature = "migrations")]
fn a_migration_is_named_however_it_fails() {
    let deferred = "CREATE TABLE customer (id int PRIMARY KEY); \
        CREATE TABLE job (customer int REFERENCES customer DEFERRABLE INITIALLY DEFERRED); INSERT INTO job VALUES (1)";
    for (name, up) in [
        ("deferred", deferred),
        ("ended", "SELECT pg_terminate_backend(pg_backend_pid())"),
        (
            "copied",
            "CREATE TABLE users (id int); COPY users FROM STDIN",
        ),
    ] {
        let database = Database::new();
        let source = directory(name, &[(&format!("2026-01-01-000000_{name}"), up)]);
        let failed = migrations::run_pending(&mut database.connect(), source.migrations());
        let message = failed.unwrap_err().to_string();
        assert_eq!(message.matches(name).count(), 1, "{message}");
    }
}

#[test]
fn a_cause_is_the_source_and_not_a_part_of_the_message() {
    let cause = DieselError::BrokenTransactionManager;
    let error = Error::LockLost {
        key: LOCK.key().clone(),
        source: Some(cause),
    };
    let cause = error.source().unwrap().to_string();
    assert!(!error.to_string().contains(&cause), "{error}: {cause}");
}

#[test]
fn messages_are_lowercase_and_name_the_way_out() {
    for (error, way_out) in [
        (Error::Input(Input::EmptyName), "pass a name"),
        (
            Error::Misplaced(Misplaced::SessionLockInTransaction),
            "acquire_xact",
        ),
        (
            Error::Misplaced(Misplaced::NestedTransaction),
            "acquire_xact",
        ),
        (
            Error::Misplaced(Misplaced::XactLockOutsideTransaction),
            "AdvisoryLock::transaction",
        ),
        (
            Error::Misplaced(Misplaced::XactLockAtRepeatableRead),
            "READ COMMITTED",
        ),
        (Error::Standby, "primary"),
    ] {
        let message = error.to_string();
        assert!(message.starts_with(char::is_lowercase), "{message}");
        assert!(message.contains(way_out), "{message}");
        assert!(error.source().is_none());
    }
}
