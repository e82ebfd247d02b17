//! Attempts in a transaction whose snapshot is older than what they look for.

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::database;
use crate::half::prelude::*;
use crate::half::{Decision, Error, ResourceLabel, Result, Throttle, error::Schema};
use crate::support::truth;

const LATER: &str = "INSERT INTO resource_control.throttled_resource VALUES ('later', '1 s')";

type Call = fn(&mut PgConnection) -> Result<()>;

fn later(conn: &mut PgConnection) -> Result<Decision> {
    Throttle::of(ResourceLabel("later".into()))
        .details("me")
        .attempt_on(conn)
}

fn later_key(conn: &mut PgConnection) -> Result<Decision> {
    Throttle::of(ResourceLabel("later".into()))
        .key(1)
        .details("me")
        .attempt_on(conn)
}

fn by_hand(conn: &mut PgConnection) -> Result<()> {
    diesel::sql_query("SELECT resource_control.lock_throttled_resource('later', 'psql')")
        .execute(conn)?;
    Ok(())
}

#[test]
fn a_resource_that_the_snapshot_does_not_show_is_a_serialization_failure() {
    let calls: [Call; 3] = [
        |conn| later(conn).map(drop),
        |conn| later_key(conn).map(drop),
        by_hand,
    ];
    for call in calls {
        for is_serializable in [false, true] {
            let database = database();
            let (conn, other) = (&mut database.connect(), &mut database.connect());
            diesel::sql_query(
                "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'later'",
            )
            .execute(other)
            .unwrap();
            let transaction = conn.build_transaction();
            let mut transaction = match is_serializable {
                true => transaction.serializable(),
                false => transaction.repeatable_read(),
            };
            let failed = transaction.run(|conn| {
                diesel::sql_query("SELECT 1").execute(conn)?;
                diesel::sql_query(LATER).execute(other)?;
                call(conn)
            });
            let is_told = matches!(
                &failed,
                Err(Error::StrictIsolation
                    | Error::Database(DieselError::DatabaseError(
                        DatabaseErrorKind::SerializationFailure,
                        _
                    )))
            );
            assert!(is_told, "{failed:?}");
            call(conn).unwrap();
        }
    }
}

/// Outside a transaction, where the snapshot is new, what is missing is missing.
#[test]
fn an_unknown_resource_is_an_error_at_any_default_isolation_level() {
    let database = database();
    let conn = &mut database.connect();
    diesel::sql_query("ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'later'")
        .execute(conn)
        .unwrap();
    for level in [
        "read uncommitted",
        "read committed",
        "repeatable read",
        "serializable",
    ] {
        diesel::sql_query(format!("SET default_transaction_isolation = '{level}'"))
            .execute(conn)
            .unwrap();
        for refused in [later(conn), later_key(conn)] {
            let is_told = matches!(&refused, Err(Error::Schema(Schema::UnknownResource { label })) if label == "later");
            assert!(is_told, "{level}: {refused:?}");
        }
    }
    diesel::sql_query("SET default_transaction_isolation = 'read uncommitted'")
        .execute(conn)
        .unwrap();
    assert!(!truth(
        conn,
        "resource_control.lock_throttled_resource('later', 'psql')"
    ));
}
