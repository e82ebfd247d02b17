//! What a throttle grants, what it denies, and what it says.

mod article;
mod collations;
mod enums;
mod input;
mod intervals;
mod isolation;

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::connection::SimpleConnection;

use crate::half::prelude::*;
use crate::half::{
    Database, Decision, DenialReason, Error, Grant, Throttle, error::Misplaced, migrations, sync,
    throttled_resources,
};
use crate::support::{assert_matches, attempt, eventually, is_granted};

throttled_resources! {
    pub(crate) enum Resource {
        Rebuild = "cache rebuild" every Duration::from_secs(15),
        Import = "tenant's import" every Duration::from_millis(100),
    }
}

const REBUILD: Throttle<Resource> = Throttle::of(Resource::Rebuild);

/// A database with the schema and the resources above.
pub(crate) fn database() -> Database {
    let database = Database::new();
    install(&database);
    database
}

pub(crate) fn install(database: &Database) {
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
}

fn granted(decision: Decision) -> Grant {
    match decision {
        Decision::Granted(grant) => grant,
        Decision::Denied(denial) => panic!("{denial:?}"),
    }
}

/// Moves the time: the last grant was so long ago.
pub(crate) fn age(conn: &mut PgConnection, interval: &str) {
    conn.batch_execute(&format!(
        "UPDATE resource_control.throttled_resource SET last_locked = last_locked - interval '{interval}' \
         WHERE last_locked <> '-infinity'; \
         UPDATE resource_control.throttled_key SET last_locked = last_locked - interval '{interval}'"
    ))
    .unwrap();
}

#[test]
fn it_is_granted_once_per_interval_and_says_to_whom() {
    let database = database();
    let (one, two) = (&mut database.connect(), &mut database.connect());
    for throttle in [REBUILD, REBUILD.key(7), REBUILD.key("⚿ \\ '")] {
        let grant = granted(attempt(one, &throttle, "web-1 pid 811"));
        assert_eq!(
            grant.until - grant.granted_at,
            chrono::TimeDelta::seconds(15)
        );

        let denial = attempt(two, &throttle, "web-2").denied().unwrap();
        assert_eq!(denial.reason, DenialReason::TooSoon);
        assert_eq!(denial.holder.as_deref(), Some("web-1 pid 811"));
        assert_eq!(denial.held_since, Some(grant.granted_at));
        assert_eq!(denial.next_at, Some(grant.until));
        assert!(denial.retry_after > Duration::ZERO);
        assert!(denial.retry_after <= Duration::from_secs(15));
        assert_eq!(
            u128::from(denial.retry_after_secs()),
            denial.retry_after.as_nanos().div_ceil(1_000_000_000)
        );
    }
    age(one, "15 seconds");
    for throttle in [REBUILD, REBUILD.key(7)] {
        granted(attempt(two, &throttle, "web-2"));
        assert!(!is_granted(one, &throttle, "web-1"));
    }
}

#[test]
fn keys_are_throttled_each_on_its_own() {
    let database = database();
    let conn = &mut database.connect();
    granted(attempt(conn, &REBUILD, "me"));
    for key in 0..10 {
        granted(attempt(conn, &REBUILD.key(key), "me"));
    }
    for key in 0..10 {
        assert!(!is_granted(conn, &REBUILD.key(key), "me"));
    }
    granted(attempt(conn, &Throttle::of(Resource::Import).key(0), "me"));
}

#[test]
fn while_another_transaction_takes_it_it_is_denied_at_once() {
    let database = database();
    let (taker, other) = (&mut database.connect(), &mut database.connect());
    other.batch_execute("SET statement_timeout = '5s'").unwrap(); // a wait would fail
    for throttle in [REBUILD, REBUILD.key("first attempt")] {
        for end in ["ROLLBACK", "COMMIT"] {
            taker.batch_execute("BEGIN").unwrap();
            granted(attempt(taker, &throttle, "taker"));

            let denial = attempt(other, &throttle, "other").denied().unwrap();
            assert_eq!(denial.reason, DenialReason::BeingTaken);
            assert_eq!((denial.holder, denial.held_since), (None, None));
            assert_eq!(denial.retry_after, Duration::from_secs(15));
            taker.batch_execute(end).unwrap();
        }
        let denial = attempt(other, &throttle, "other").denied().unwrap();
        assert_eq!(denial.holder.as_deref(), Some("taker"));
    }
}

#[test]
fn after_a_rollback_it_is_as_if_never_taken() {
    let database = database();
    let conn = &mut database.connect();
    for throttle in [REBUILD, REBUILD.key(7)] {
        let rolled_back: Result<(), Error> = conn.transaction(|conn| {
            granted(throttle.details("me").attempt_on(conn)?);
            Err(diesel::result::Error::RollbackTransaction.into())
        });
        rolled_back.unwrap_err();
        granted(attempt(conn, &throttle, "me"));
    }
}

/// `FOR UPDATE` would be denied here: the insert's foreign key holds a lock on the resource's row.
#[test]
fn an_open_insert_that_references_the_resource_does_not_deny_it() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(
        "CREATE TABLE runs (resource resource_control.throttled_resource_enum \
         REFERENCES resource_control.throttled_resource)",
    )
    .unwrap();
    open.batch_execute("BEGIN; INSERT INTO runs VALUES ('cache rebuild')")
        .unwrap();
    granted(attempt(conn, &REBUILD, "me"));
}

#[derive(QueryableByName)]
struct Traces {
    #[diesel(sql_type = diesel::sql_types::Bool)]
    transaction_id: bool,
    #[diesel(sql_type = diesel::sql_types::BigInt)]
    locks: i64,
}

#[test]
fn a_denial_draws_no_transaction_id_and_locks_no_row() {
    let database = database();
    let conn = &mut database.connect();
    for throttle in [REBUILD, REBUILD.key(7)] {
        granted(attempt(conn, &throttle, "me"));
        age(conn, "8 seconds");
        conn.transaction(|conn| {
            assert!(throttle.details("me").attempt_on(conn)?.denied().is_some());
            let traces: Traces = diesel::sql_query(
                "SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS transaction_id, \
                 count(*) AS locks FROM pg_locks WHERE pid = pg_backend_pid() \
                 AND mode NOT IN ('AccessShareLock') AND locktype <> 'virtualxid'",
            )
            .get_result(conn)?;
            assert!(!traces.transaction_id);
            assert_eq!(traces.locks, 0);
            Ok::<_, Error>(())
        })
        .unwrap();
    }
}

/// Neither the transaction's start nor the message's decides, but the clock.
#[test]
fn a_transaction_opened_long_ago_sees_the_present() {
    let database = database();
    let conn = &mut database.connect();
    let import = Throttle::of(Resource::Import);
    for throttle in [import.clone(), import.key(7)] {
        conn.transaction(|conn| {
            let first = granted(throttle.details("me").attempt_on(conn)?);
            diesel::sql_query("SELECT pg_sleep(0.11)").execute(conn)?;
            let second = granted(throttle.details("me").attempt_on(conn)?);
            assert!(second.granted_at >= first.until);
            Ok::<_, Error>(())
        })
        .unwrap();
    }

    // One message, whose statements all have the same statement_timestamp().
    conn.batch_execute(
        "UPDATE resource_control.throttled_resource SET last_locked = '-infinity', last_locker_details = ''; \
         CREATE TABLE attempts (granted boolean)",
    )
    .unwrap();
    conn.batch_execute(
        "INSERT INTO attempts SELECT resource_control.lock_throttled_resource('tenant''s import', 'one'); \
         SELECT pg_sleep(0.11); \
         INSERT INTO attempts SELECT resource_control.lock_throttled_resource('tenant''s import', 'two')",
    )
    .unwrap();
    diesel::table! { attempts (granted) { granted -> Bool, } }
    let attempts: Vec<bool> = attempts::table
        .select(attempts::granted)
        .load(conn)
        .unwrap();
    assert_eq!(attempts, [true, true]);
}

/// In Paris, 2026-03-29 has 23 hours and 2026-10-25 has 25.
#[test]
fn a_day_is_24_hours_and_a_month_30_days_in_every_time_zone() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute("SET TimeZone = 'Europe/Paris'").unwrap();
    let next = |conn: &mut PgConnection, interval: &str, last: &str| -> Vec<DateTime<Utc>> {
        conn.batch_execute(&format!(
            "UPDATE resource_control.throttled_resource SET throttle_interval = '{interval}', \
             last_locked = '{last}', last_locker_details = 'x' WHERE resource_id = 'cache rebuild'; \
             DELETE FROM resource_control.throttled_key; \
             INSERT INTO resource_control.throttled_key VALUES ('cache rebuild', '7', '{last}', 'x')"
        ))
        .unwrap();
        [REBUILD, REBUILD.key(7)]
            .map(|throttle| {
                attempt(conn, &throttle, "me")
                    .denied()
                    .unwrap()
                    .next_at
                    .unwrap()
            })
            .into()
    };
    for (interval, last, expected) in [
        ("1 day", "2126-03-30 12:00+02", "2126-03-31T10:00:00Z"),
        ("24 hours", "2126-03-30 12:00+02", "2126-03-31T10:00:00Z"),
        ("1 month", "2126-03-15 12:00+01", "2126-04-14T11:00:00Z"),
        ("1 year", "2126-01-01 00:00+00", "2126-12-27T00:00:00Z"),
        (
            "1 month 1 day 01:02:03.5",
            "2126-01-01 00:00+00",
            "2126-02-01T01:02:03.5Z",
        ),
    ] {
        let expected: DateTime<Utc> = expected.parse().unwrap();
        assert_eq!(
            next(conn, interval, last),
            [expected, expected],
            "{interval}"
        );
    }
}

#[test]
fn a_resource_that_was_closed_by_hand_is_denied() {
    let database = database();
    let conn = &mut database.connect();
    granted(attempt(conn, &REBUILD.key(7), "me"));
    for table in ["throttled_resource", "throttled_key"] {
        conn.batch_execute(&format!(
            "UPDATE resource_control.{table} SET last_locked = 'infinity', last_locker_details = 'closed'"
        ))
        .unwrap();
    }
    for throttle in [REBUILD, REBUILD.key(7)] {
        let denial = attempt(conn, &throttle, "me").denied().unwrap();
        assert_eq!((denial.next_at, denial.held_since), (None, None));
        assert_eq!(denial.holder.as_deref(), Some("closed"));
        assert_eq!(denial.retry_after, Duration::from_secs(15));
    }
}

#[test]
fn the_closure_form_commits_first_and_works_afterwards() {
    let database = database();
    let pool = database.pool(1);
    let seen = REBUILD
        .details("me")
        .run(&pool, |grant| {
            // The only connection is free again, and other sessions see the grant.
            let denial = REBUILD
                .details("other")
                .attempt_on(&mut pool.get().unwrap())?
                .denied()
                .unwrap();
            Ok::<_, Error>(denial.held_since == Some(grant.granted_at))
        })
        .unwrap();
    assert_eq!(seen, Decision::Granted(true));
    let denied = REBUILD
        .details("me")
        .run(&pool, |_| Ok::<_, Error>(()))
        .unwrap();
    assert_matches!(denied, Decision::Denied(_));

    let conn = &mut database.connect();
    let ran = REBUILD.key(1).details("me").run_on(conn, |conn, _| {
        conn.batch_execute("SELECT 1")?;
        QueryResult::Ok(5)
    });
    assert_eq!(ran.unwrap(), Decision::Granted(5));
    conn.transaction(|conn| {
        let refused = REBUILD
            .key(2)
            .details("me")
            .run_on(conn, |_, _| Ok::<_, Error>(()));
        assert_matches!(
            refused,
            Err(Error::Misplaced(Misplaced::GrantInTransaction))
        );
        QueryResult::Ok(())
    })
    .unwrap();
}

/// The grant would depend on the end of that transaction.
#[test]
fn an_attempt_through_a_pool_is_refused_in_a_transaction_that_was_left_open_there() {
    let database = database();
    let pool = database.pool(1);
    let throttle = REBUILD.details("me");
    pool.get().unwrap().batch_execute("BEGIN").unwrap();
    let refused = throttle.attempt(&pool);
    assert_matches!(refused, Err(Error::TransactionInPool));
    // Nothing was granted before. The server ends the discarded session, which was taking the resource, a moment later.
    eventually("it is granted", || {
        throttle.attempt(&pool).unwrap().granted().is_some()
    });
    assert!(throttle.attempt(&pool).unwrap().is_denied());
}
