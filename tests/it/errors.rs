//! Errors say what to do, keep their cause, and pass through Diesel's error type unharmed.

use std::error::Error as _;

use diesel::connection::SimpleConnection;
use diesel::result::Error as DieselError;
use diesel_interlock::{AdvisoryLock, Error};
use workbench::Database;

static LOCK: AdvisoryLock = AdvisoryLock::named("errors");

fn assert_thread_safe<E: std::error::Error + Send + Sync + 'static>() {}

#[test]
fn they_can_be_sent_anywhere() {
    assert_thread_safe::<Error>();
}

#[test]
fn a_round_trip_through_diesels_error_changes_nothing() {
    let diesel: DieselError = Error::EmptyName.into();
    assert_eq!(diesel.to_string(), Error::EmptyName.to_string());
    assert!(matches!(Error::from(diesel), Error::EmptyName));

    let diesel: DieselError = Error::Database(DieselError::NotFound).into();
    assert_eq!(diesel, DieselError::NotFound);
    assert!(matches!(
        Error::from(diesel),
        Error::Database(DieselError::NotFound)
    ));

    let theirs = DieselError::QueryBuilderError("theirs".into());
    let Error::Database(DieselError::QueryBuilderError(inner)) = Error::from(theirs) else {
        panic!("not what it was");
    };
    assert_eq!(inner.to_string(), "theirs");
}

#[test]
fn the_cause_is_the_source_and_not_a_part_of_the_message() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.batch_execute("BEGIN").unwrap();
    conn.batch_execute("SELECT 1/0").unwrap_err();
    let error = LOCK.acquire_on(&mut conn).map(drop).unwrap_err();
    let source = error.source().unwrap().to_string();
    assert!(!error.to_string().contains(&source), "{error}: {source}");
    assert!(source.contains("aborted"), "{source}");
}

#[test]
fn messages_are_lowercase_and_name_the_way_out() {
    for (error, way_out) in [
        (Error::EmptyName, "give it a name"),
        (Error::InTransaction, "acquire_xact"),
        (Error::AlreadyInTransaction, "acquire_xact"),
        (Error::NotInTransaction, "AdvisoryLock::transaction"),
        (Error::RepeatableRead, "READ COMMITTED"),
        (Error::Standby, "primary"),
    ] {
        let message = error.to_string();
        assert!(message.starts_with(char::is_lowercase), "{message}");
        assert!(message.contains(way_out), "{message}");
        assert!(error.source().is_none());
    }
}
