//! Attempts in a transaction of the caller, concurrently with other sessions, and at every
//! isolation level.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::Timestamptz;
use workbench::RoundTrips;

use super::throttles::{Resource, declared, rewind};
use crate::assert_matches;
use crate::half::{
    Conn, Decision, Error, Result, Throttle, execute, make_pool, on_one, pool, prune, wait,
};
use crate::support::{HAS_WRITTEN_NOTHING, Observer, eventually, installed, number, run, truth};

const HOUR: Duration = Duration::from_secs(3600);

static REBUILD: Throttle = Throttle::named("rebuild", HOUR);

/// A throttle of each kind: named or a resource, without and with a key.
fn kinds() -> [Throttle; 4] {
    [
        REBUILD.clone(),
        REBUILD.key(7),
        Throttle::of(Resource::Newsletter),
        Throttle::of(Resource::Newsletter).key(7),
    ]
}

fn attempt(throttle: &Throttle, conn: &mut Conn) -> Decision {
    wait(throttle.details("me").attempt_on(conn)).unwrap()
}

/// `FOR UPDATE` would be denied here: the insert's foreign key holds a lock on the resource's row.
#[test]
fn an_open_insert_that_references_the_resource_does_not_deny_it() {
    let (database, pool) = declared();
    let open = &mut database.connect();
    run(
        open,
        "CREATE TABLE runs (resource resource_control.throttled_resource_enum
            REFERENCES resource_control.throttled_resource)",
    );
    run(open, "BEGIN; INSERT INTO runs VALUES ('newsletter')");
    let newsletter = Throttle::of(Resource::Newsletter);
    assert!(wait(newsletter.attempt(&pool)).unwrap().is_granted());
    run(open, "COMMIT");
}

/// The clock at the time of the decision counts, not the start of the transaction or of the
/// statement.
#[test]
fn in_an_old_transaction_the_present_time_decides() {
    let database = installed();
    let pool = pool(&database, 1);
    let every = Duration::from_millis(20);
    let short = Throttle::named("short", every);
    on_one(&pool, |conn| {
        wait(execute(conn, "BEGIN")).unwrap();
        let first = attempt(&short, conn).granted().unwrap();
        wait(execute(conn, "SELECT pg_sleep(0.021)")).unwrap();
        let second = attempt(&short, conn).granted().unwrap();
        assert!((second.granted_at - first.granted_at).to_std().unwrap() >= every);
        wait(execute(conn, "COMMIT")).unwrap();
    });
}

/// Another session may take the throttle after an attempt has read that it is due, and before it
/// locks the row. If the denied attempt kept its row lock, it would deny the throttle to all
/// others.
#[test]
fn the_second_of_two_concurrent_attempts_is_denied_and_keeps_no_row_lock() {
    let (database, pool) = declared();
    let gate = &mut database.connect();
    let mut observer = Observer::of(&database);
    for throttle in kinds() {
        assert!(wait(throttle.attempt(&pool)).unwrap().is_granted());
        rewind(&database, 3600);
        // Others can read, and wait when they write.
        run(
            gate,
            "BEGIN; LOCK TABLE resource_control.throttle, resource_control.throttled_resource IN EXCLUSIVE MODE",
        );
        thread::scope(|scope| {
            let second = scope.spawn(|| {
                on_one(&pool, |conn| {
                    wait(execute(conn, "BEGIN")).unwrap();
                    let second = attempt(&throttle, conn);
                    let kept = wait(execute(conn, HAS_WRITTEN_NOTHING));
                    wait(execute(conn, "ROLLBACK")).unwrap();
                    kept.map(|()| second)
                })
            });
            eventually("the second attempt waits", || observer.all_waiting() == 1);
            run(
                gate,
                "UPDATE resource_control.throttle SET last_granted = clock_timestamp(), details = 'first';
                UPDATE resource_control.throttled_resource SET last_locked = clock_timestamp(), last_locker_details = 'first';
                COMMIT",
            );
            let denied = second.join().unwrap().unwrap().denied().unwrap();
            assert_eq!(denied.last.unwrap().by, "first", "{throttle:?}");
        });
        rewind(&database, 3600);
    }
}

/// `CREATE INDEX` takes this lock on a table: rows can be locked meanwhile, but not written.
#[test]
fn a_grant_that_waited_for_its_table_begins_after_the_wait() {
    let (database, pool) = declared();
    let conn = &mut database.connect();
    let mut observer = Observer::of(&database);
    for throttle in kinds() {
        run(
            conn,
            "BEGIN; LOCK TABLE resource_control.throttle, resource_control.throttled_resource IN SHARE MODE",
        );
        thread::scope(|scope| {
            let waiter = scope.spawn(|| wait(throttle.attempt(&pool)).unwrap());
            eventually("the attempt waits", || observer.all_waiting() == 1);
            let now: DateTime<Utc> = diesel::select(sql::<Timestamptz>("clock_timestamp()"))
                .get_result(conn)
                .unwrap();
            run(conn, "COMMIT");
            let granted = waiter.join().unwrap().granted().unwrap();
            assert!(granted.granted_at >= now, "{throttle:?}");
        });
    }
}

#[test]
fn on_a_connection_no_default_isolation_level_is_an_error() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let (database, _) = declared();
        for throttle in kinds() {
            let start = Barrier::new(6);
            let granted: usize = thread::scope(|scope| {
                let threads: Vec<_> = (0..6)
                    .map(|_| {
                        scope.spawn(|| {
                            let pool = pool(&database, 1);
                            on_one(&pool, |conn| {
                                let set = format!("SET default_transaction_isolation = '{level}'");
                                wait(execute(conn, &set)).unwrap();
                                start.wait();
                                let is_granted = |_: &i32| attempt(&throttle, conn).is_granted();
                                (0..20).filter(is_granted).count()
                            })
                        })
                    })
                    .collect();
                let threads = threads.into_iter();
                threads.map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(granted, 1, "{level}: {throttle:?}");
        }
    }
}

/// In the old snapshot of the transaction the throttle is due.
#[test]
fn at_a_stricter_level_a_concurrent_grant_is_a_serialization_failure() {
    let (_database, pool) = declared();
    for throttle in kinds() {
        on_one(&pool, |conn| {
            wait(execute(
                conn,
                "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1",
            ))
            .unwrap();
            assert!(wait(throttle.attempt(&pool)).unwrap().is_granted());
            let failed: Result<Decision> = wait(throttle.attempt_on(conn));
            assert_matches!(
                failed,
                Err(Error::Database(DieselError::DatabaseError(
                    DatabaseErrorKind::SerializationFailure,
                    _
                )))
            );
            wait(execute(conn, "ROLLBACK")).unwrap();
        });
    }
}

#[test]
fn a_resource_that_was_not_declared_leaves_the_transaction_usable() {
    let database = installed();
    let pool = pool(&database, 1);
    let newsletter = Throttle::of(Resource::Newsletter);
    for throttle in [newsletter.clone(), newsletter.key(7)] {
        on_one(&pool, |conn| {
            wait(execute(conn, "BEGIN")).unwrap();
            assert_matches!(
                wait(throttle.attempt_on(conn)),
                Err(Error::NotDeclared("newsletter"))
            );
            assert!(attempt(&REBUILD, conn).is_granted());
            wait(execute(conn, "ROLLBACK")).unwrap();
        });
    }
}

#[test]
fn without_the_schema_an_attempt_on_a_connection_says_so() {
    let database = workbench::Database::new();
    on_one(&pool(&database, 1), |conn| {
        assert_matches!(wait(REBUILD.attempt_on(conn)), Err(Error::NotInstalled));
    });
}

/// A client in another language may have locked the row.
#[test]
fn a_row_that_another_session_has_locked_is_denied_and_not_pruned() {
    let database = installed();
    let pool = pool(&database, 1);
    for key in 0..3 {
        assert!(wait(REBUILD.key(key).attempt(&pool)).unwrap().is_granted());
    }
    rewind(&database, 7200);
    let open = &mut database.connect();
    run(
        open,
        "BEGIN; SELECT FROM resource_control.throttle WHERE key = '1' FOR UPDATE",
    );
    let denied = wait(REBUILD.key(1).attempt(&pool))
        .unwrap()
        .denied()
        .unwrap();
    assert_eq!(
        (denied.retry_after, denied.last),
        (Duration::from_secs(1), None)
    );
    assert_eq!(wait(prune::throttles(&pool)).unwrap(), 2);
    run(open, "COMMIT");
    assert!(wait(REBUILD.key(1).attempt(&pool)).unwrap().is_granted());
}

/// Beside the round trips that prepare the statements once per connection.
#[test]
fn an_attempt_takes_one_round_trip_and_the_first_of_a_key_two() {
    let (database, _) = declared();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    on_one(&pool, |conn| {
        for throttle in kinds() {
            // One grant, one denial.
            for _ in 0..2 {
                let _ = attempt(&throttle, conn);
            }
            let trips = proxy.count(|| assert!(attempt(&throttle, conn).is_denied()));
            assert_eq!(trips, 1, "{throttle:?}");
            rewind(&database, 3600);
            let trips = proxy.count(|| assert!(attempt(&throttle, conn).is_granted()));
            assert_eq!(trips, 1, "{throttle:?}");
        }
        for throttle in [
            REBUILD.key("new"),
            Throttle::of(Resource::Import).key("new"),
        ] {
            let trips = proxy.count(|| assert!(attempt(&throttle, conn).is_granted()));
            assert_eq!(trips, 2, "{throttle:?}");
        }
        let parsed = proxy.parses();
        for throttle in kinds() {
            let _ = attempt(&throttle, conn);
        }
        assert_eq!(proxy.parses(), parsed, "a statement was prepared again");
    });
}

/// Clients in other languages call the stored function.
#[test]
fn with_other_clients_no_two_grants_are_closer_than_the_interval() {
    const GRANTS: usize = 20;
    for level in ["read committed", "repeatable read", "serializable"] {
        let (database, _) = declared();
        let conn = &mut database.connect();
        run(
            conn,
            "UPDATE resource_control.throttled_resource SET throttle_interval = '20 ms'",
        );
        run(conn, "CREATE TABLE grants (at timestamptz)");
        run(
            conn,
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN INSERT INTO public.grants VALUES (NEW.last_locked); RETURN NULL; END'",
        );
        run(
            conn,
            "CREATE TRIGGER note AFTER UPDATE ON resource_control.throttled_resource
                FOR EACH ROW EXECUTE FUNCTION note()",
        );
        let granted = AtomicUsize::new(0);
        let start = Barrier::new(6);
        let set = format!("SET default_transaction_isolation = '{level}'");
        thread::scope(|scope| {
            for number in 0..6 {
                let (database, granted, start, set) = (&database, &granted, &start, &set);
                scope.spawn(move || {
                    let pool = pool(database, 1);
                    let other = &mut database.connect();
                    run(other, set);
                    on_one(&pool, |conn| {
                        wait(execute(conn, set)).unwrap();
                        let newsletter = Throttle::of(Resource::Newsletter);
                        start.wait();
                        while granted.load(Ordering::SeqCst) < GRANTS {
                            let is_granted = if number % 2 == 0 {
                                attempt(&newsletter, conn).is_granted()
                            } else {
                                by_function(other)
                            };
                            granted.fetch_add(usize::from(is_granted), Ordering::SeqCst);
                        }
                    });
                });
            }
        });
        let closest = "(SELECT min(gap) FROM (SELECT at - lag(at) OVER (ORDER BY at) AS gap FROM public.grants) AS g)";
        assert!(
            truth(conn, &format!("{closest} >= interval '20 ms'")),
            "{level}"
        );
        let noted = number(conn, "(SELECT count(*) FROM public.grants)");
        assert_eq!(noted as usize, granted.into_inner(), "{level}");
    }
}

/// Calls the stored function. At a stricter level it may fail, and then grants nothing.
fn by_function(conn: &mut PgConnection) -> bool {
    let call = "SELECT 1 WHERE resource_control.lock_throttled_resource('newsletter', 'psql')";
    match diesel::sql_query(call).execute(conn) {
        Ok(granted) => granted == 1,
        Err(DieselError::DatabaseError(DatabaseErrorKind::SerializationFailure, _)) => false,
        Err(error) => panic!("{error}"),
    }
}
