//! Transaction locks: what they exclude, when they end, and where they are refused.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Barrier;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, Attempt, Database, Error, IS_ASYNCHRONOUS, LockKey,
    error::{Input, Misplaced},
};
use crate::support::{Observer, assert_matches, foreign_holder, setting};

static LOCK: AdvisoryLock = AdvisoryLock::named("transaction lock");
const SHORT: Duration = Duration::from_millis(20);

diesel::table! {
    bookings (server_id) {
        server_id -> Integer,
    }
}

#[test]
fn it_is_held_until_the_transaction_ends() {
    let database = Database::new();
    let conn = &mut database.connect();
    let mut observer = Observer::of(&database);

    conn.transaction(|conn| {
        LOCK.acquire_xact(conn)?;
        assert_eq!(observer.holders(LOCK.key()), 1);
        Ok::<_, Error>(())
    })
    .unwrap();
    assert_eq!(observer.holders(LOCK.key()), 0);

    let rolled_back: QueryResult<()> = conn.transaction(|conn| {
        assert!(!LOCK.try_acquire_xact(conn)?.is_busy());
        assert_eq!(observer.holders(LOCK.key()), 1);
        Err(DieselError::RollbackTransaction)
    });
    rolled_back.unwrap_err();
    assert_eq!(observer.holders(LOCK.key()), 0);
}

#[test]
fn a_rollback_to_a_savepoint_set_before_releases_it() {
    let database = Database::new();
    let conn = &mut database.connect();
    let mut observer = Observer::of(&database);
    conn.transaction(|conn| {
        let nested: Result<(), Error> = conn.transaction(|conn| {
            LOCK.acquire_xact(conn)?;
            Err(DieselError::RollbackTransaction.into())
        });
        nested.unwrap_err();
        assert_eq!(observer.holders(LOCK.key()), 0);
        conn.transaction(|conn| LOCK.acquire_xact(conn))?;
        assert_eq!(observer.holders(LOCK.key()), 1);
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn the_error_of_the_work_is_returned_although_the_session_has_ended() {
    let database = Database::new();
    let conn = &mut database.connect();
    let worked: Result<(), Error> = LOCK.transaction(conn, |conn| {
        let end = "SELECT pg_terminate_backend(pg_backend_pid())";
        conn.batch_execute(end).unwrap_err();
        Err(Error::ReadOnly)
    });
    assert_matches!(worked, Err(Error::ReadOnly));
}

#[test]
fn work_that_ends_the_transaction_by_itself_is_told_that_nothing_was_rolled_back() {
    if IS_ASYNCHRONOUS {
        return; // diesel-async does not see a `COMMIT` that is sent as plain SQL
    }
    let database = Database::new();
    let conn = &mut database.connect();
    let worked: Result<(), Error> = LOCK.transaction(conn, |conn| {
        conn.batch_execute("COMMIT")?;
        Err(Error::ReadOnly)
    });
    assert_matches!(worked, Err(Error::Database(DieselError::NotInTransaction)));
}

#[test]
fn it_excludes_session_locks_and_is_excluded_by_them() {
    let database = Database::new();
    let conn = &mut database.connect();
    for key in [
        LockKey::named("one"),
        LockKey::bigint(i64::MIN),
        LockKey::pair(-3, 4),
    ] {
        let lock = AdvisoryLock::new(key);
        let pool = database.pool(1);
        lock.transaction(conn, |_| {
            assert!(lock.try_acquire(&pool)?.is_busy());
            Ok::<_, Error>(())
        })
        .unwrap();
        lock.with(&pool, |_| {
            assert!(
                lock.try_transaction(conn, |_| Ok::<_, Error>(()))?
                    .is_busy()
            );
            let waited = lock.transaction_timeout(conn, SHORT, |_| Ok::<_, Error>(()))?;
            assert!(waited.is_busy());
            Ok::<_, Error>(())
        })
        .unwrap();
    }
}

#[test]
fn sharers_share_and_exclude_the_exclusive() {
    let database = Database::new();
    let (one, two) = (&mut database.connect(), &mut database.connect());
    let shared = LOCK.clone().shared();
    shared
        .transaction(one, |_| {
            let beside = shared.try_transaction(two, |_| Ok::<_, Error>(1))?;
            assert_eq!(beside, Attempt::Acquired(1));
            let waited = shared.transaction_timeout(two, SHORT, |_| Ok::<_, Error>(2))?;
            assert_eq!(waited, Attempt::Acquired(2));
            assert!(LOCK.try_transaction(two, |_| Ok::<_, Error>(()))?.is_busy());
            Ok::<_, Error>(())
        })
        .unwrap();
}

#[test]
fn a_timed_out_wait_leaves_the_transaction_usable_and_its_settings_as_they_were() {
    let database = Database::new();
    let conn = &mut database.connect();
    let _holder = foreign_holder(&database, &LOCK);
    conn.batch_execute("CREATE TABLE bookings (server_id int); SET statement_timeout = '9s'")
        .unwrap();
    conn.transaction(|conn| {
        conn.batch_execute("SET LOCAL lock_timeout = '3s'; INSERT INTO bookings VALUES (1)")?;
        assert!(LOCK.acquire_xact_timeout(conn, SHORT)?.is_busy());
        assert!(LOCK.acquire_xact_timeout(conn, Duration::ZERO)?.is_busy());
        assert_eq!(setting(conn, "lock_timeout"), "3s");
        assert_eq!(setting(conn, "statement_timeout"), "9s");
        conn.batch_execute("INSERT INTO bookings VALUES (2)")?;
        Ok::<_, Error>(())
    })
    .unwrap();
    assert_eq!(bookings::table.count().get_result(conn), Ok(2));
}

#[test]
fn a_granted_wait_leaves_the_settings_as_they_were_too() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    for timeout in [None, Some(Duration::from_secs(60)), Some(Duration::MAX)] {
        let holder = foreign_holder(&database, &LOCK);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let conn = &mut database.connect();
                conn.transaction(|conn| {
                    conn.batch_execute("SET LOCAL lock_timeout = '3s'")?;
                    conn.batch_execute("SET LOCAL statement_timeout = '9s'")?;
                    match timeout {
                        None => LOCK.acquire_xact(conn)?,
                        Some(timeout) => {
                            LOCK.acquire_xact_timeout(conn, timeout)?
                                .acquired()
                                .unwrap();
                        }
                    }
                    assert_eq!(setting(conn, "lock_timeout"), "3s");
                    assert_eq!(setting(conn, "statement_timeout"), "9s");
                    Ok::<_, Error>(Observer::of(&database).holders(LOCK.key()))
                })
            });
            while observer.waiters(LOCK.key()) == 0 {}
            drop(holder);
            assert_eq!(waiter.join().unwrap().unwrap(), 1);
        });
    }
    assert_eq!(observer.all_held(), 0);
}

#[test]
fn outside_a_transaction_it_is_refused() {
    let database = Database::new();
    let conn = &mut database.connect();
    assert_matches!(
        LOCK.acquire_xact(conn),
        Err(Error::Misplaced(Misplaced::XactLockOutsideTransaction))
    );
    assert_matches!(
        LOCK.try_acquire_xact(conn),
        Err(Error::Misplaced(Misplaced::XactLockOutsideTransaction))
    );
    assert_matches!(
        LOCK.acquire_xact_timeout(conn, SHORT),
        Err(Error::Misplaced(Misplaced::XactLockOutsideTransaction))
    );
}

#[test]
fn opening_one_inside_another_is_refused() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.transaction(|conn| {
        let refused = LOCK.transaction(conn, |_| Ok::<_, Error>(()));
        assert_matches!(refused, Err(Error::Misplaced(Misplaced::NestedTransaction)));
        let refused = LOCK.try_transaction(conn, |_| Ok::<_, Error>(()));
        assert_matches!(refused, Err(Error::Misplaced(Misplaced::NestedTransaction)));
        let refused = LOCK.transaction_timeout(conn, SHORT, |_| Ok::<_, Error>(()));
        assert_matches!(refused, Err(Error::Misplaced(Misplaced::NestedTransaction)));
        // The transaction is still usable.
        LOCK.acquire_xact(conn)
    })
    .unwrap();
}

#[test]
fn an_empty_name_is_refused() {
    let database = Database::new();
    let conn = &mut database.connect();
    let nameless = AdvisoryLock::named("");
    let refused = nameless.transaction(conn, |_| Ok::<_, Error>(()));
    assert_matches!(refused, Err(Error::Input(Input::EmptyName)));
}

#[test]
fn the_works_own_error_comes_back_and_nothing_is_committed() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute("CREATE TABLE bookings (server_id int)")
        .unwrap();

    #[derive(Debug, PartialEq)]
    enum Refusal {
        SoldOut,
        Broken,
    }
    impl From<Error> for Refusal {
        fn from(_: Error) -> Self {
            Refusal::Broken
        }
    }
    let refused: Result<(), _> = LOCK.transaction(conn, |conn| {
        conn.batch_execute("INSERT INTO bookings VALUES (1)")
            .unwrap();
        Err(Refusal::SoldOut)
    });
    assert_eq!(refused, Err(Refusal::SoldOut));
    assert_eq!(bookings::table.count().get_result(conn), Ok(0));
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn a_deadlock_is_detected() {
    let database = Database::new();
    let (a, b) = (AdvisoryLock::named("a"), AdvisoryLock::named("b"));
    let both_have_one = Barrier::new(2);
    let results = std::thread::scope(|scope| {
        let lock_both = |first: &'static str, second: &'static str| {
            let conn = &mut database.connect();
            AdvisoryLock::named(first).transaction(conn, |conn| {
                both_have_one.wait();
                AdvisoryLock::named(second).acquire_xact(conn)
            })
        };
        let one = scope.spawn(move || lock_both("a", "b"));
        let two = scope.spawn(move || lock_both("b", "a"));
        [one.join().unwrap(), two.join().unwrap()]
    });
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    let mut observer = Observer::of(&database);
    observer.assert_free(a.key());
    observer.assert_free(b.key());
}

/// Books a server if it is free, as the articles do: check, then insert.
fn check_and_insert(conn: &mut PgConnection) -> QueryResult<bool> {
    let free = bookings::table.count().get_result::<i64>(conn)? == 0;
    if free {
        diesel::insert_into(bookings::table)
            .values(bookings::server_id.eq(345))
            .execute(conn)?;
    }
    Ok(free)
}

/// Four sessions that begin, then meet, then lock, check and insert. The statement before the
/// lock gives a REPEATABLE READ transaction its snapshot.
fn four_sessions_book(
    level: &str,
    lock: impl Fn(&mut PgConnection) -> Result<(), Error> + Sync,
) -> (i64, Vec<Result<bool, Error>>) {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute("CREATE TABLE bookings (server_id int)")
        .unwrap();
    let begun = Barrier::new(4);
    let results = std::thread::scope(|scope| {
        let sessions: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    conn.batch_execute(&format!("SET default_transaction_isolation = '{level}'"))?;
                    conn.transaction(|conn| {
                        diesel::sql_query("SELECT 1").execute(conn)?;
                        begun.wait();
                        lock(conn)?;
                        Ok(check_and_insert(conn)?)
                    })
                })
            })
            .collect();
        sessions
            .into_iter()
            .map(|session| session.join().unwrap())
            .collect()
    });
    (bookings::table.count().get_result(conn).unwrap(), results)
}

#[test]
fn four_sessions_that_lock_check_and_insert_make_one_row_or_are_refused() {
    let (rows, results) = four_sessions_book("read committed", |conn| LOCK.acquire_xact(conn));
    assert_eq!(rows, 1);
    assert!(results.iter().all(Result::is_ok), "{results:?}");

    let (rows, results) = four_sessions_book("serializable", |conn| LOCK.acquire_xact(conn));
    assert_eq!(rows, 1);
    for failed in results.iter().filter_map(|result| result.as_ref().err()) {
        let Error::Database(DieselError::DatabaseError(kind, _)) = failed else {
            panic!("{failed:?}");
        };
        assert_matches!(kind, DatabaseErrorKind::SerializationFailure);
    }

    for lock in [
        |conn: &mut PgConnection| LOCK.acquire_xact(conn),
        |conn: &mut PgConnection| LOCK.try_acquire_xact(conn).map(|_| ()),
        |conn: &mut PgConnection| LOCK.acquire_xact_timeout(conn, SHORT).map(|_| ()),
    ] {
        let (rows, results) = four_sessions_book("repeatable read", lock);
        assert_eq!(rows, 0);
        for result in results {
            assert_matches!(
                result,
                Err(Error::Misplaced(Misplaced::XactLockAtRepeatableRead))
            );
        }
    }
}

/// Without the refusal all four bookings succeed, as PostgreSQL's own lock shows at REPEATABLE READ.
#[test]
fn a_plain_lock_at_repeatable_read_books_twice() {
    let (rows, _) = four_sessions_book("repeatable read", |conn| {
        let id = LOCK.key().id()?;
        Ok(conn.batch_execute(&format!("SELECT pg_advisory_xact_lock({id})"))?)
    });
    assert_eq!(rows, 4);
}

#[test]
fn ten_requests_for_one_server_book_it_once_at_any_default_level() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = Database::new();
        let conn = &mut database.connect();
        conn.batch_execute("CREATE TABLE bookings (server_id int)")
            .unwrap();
        let start = Barrier::new(10);
        let booked = std::thread::scope(|scope| {
            let requests: Vec<_> = (0..10)
                .map(|_| {
                    scope.spawn(|| {
                        let conn = &mut database.connect();
                        conn.batch_execute(&format!(
                            "SET default_transaction_isolation = '{level}'"
                        ))
                        .unwrap();
                        start.wait();
                        AdvisoryLock::new(LockKey::parts([223, 345]))
                            .transaction(conn, check_and_insert)
                            .unwrap()
                    })
                })
                .collect();
            requests
                .into_iter()
                .map(|request| request.join().unwrap())
                .filter(|booked| *booked)
                .count()
        });
        assert_eq!(booked, 1, "{level}");
        assert_eq!(bookings::table.count().get_result(conn), Ok(1), "{level}");
    }
}

#[test]
fn a_nested_transaction_that_was_left_open_is_rolled_back_and_reported() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute("CREATE TABLE bookings (server_id int)")
        .unwrap();
    let mut observer = Observer::of(&database);
    for is_ok in [true, false] {
        let done = LOCK.transaction(conn, |conn| {
            conn.batch_execute("INSERT INTO bookings VALUES (1)")?;
            let nested = catch_unwind(AssertUnwindSafe(|| {
                conn.transaction::<(), Error, _>(|_| resume_unwind(Box::new("in the nested one")))
            }));
            assert!(nested.is_err());
            if is_ok { Ok(()) } else { Err(Error::Standby) }
        });
        if is_ok {
            let reported: Result<(), _> =
                Err(Error::Database(DieselError::BrokenTransactionManager));
            assert_eq!(format!("{done:?}"), format!("{reported:?}"));
        } else {
            assert_matches!(done, Err(Error::Standby));
        }
        assert_eq!(observer.holders(LOCK.key()), 0);
    }
    // Nothing was committed, and the connection can still be used.
    let count = LOCK.transaction(conn, |conn| {
        let count: i64 = bookings::table.count().get_result(conn)?;
        Ok::<_, Error>(count)
    });
    assert_eq!(count.unwrap(), 0);
}
