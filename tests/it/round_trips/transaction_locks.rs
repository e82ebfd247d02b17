//! Transaction locks, beside BEGIN and COMMIT.

use std::time::Duration;

use super::{LOCK, takes};
use crate::half::prelude::*;
use crate::half::{Database, Error, RoundTrips};
use crate::support::{Expect, Observer, eventually, foreign_holder};

/// Long enough that the try, on a slow machine, does not take all of it.
const SHORT: Duration = Duration::from_millis(500);
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn one_for_a_lock_that_is_free() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    conn.transaction(|conn| {
        takes(1, &proxy, || LOCK.acquire_xact(conn).unwrap());
        takes(1, &proxy, || {
            LOCK.try_acquire_xact(conn).unwrap().expect_acquired()
        });
        takes(1, &proxy, || {
            LOCK.acquire_xact_timeout(conn, LIMIT)
                .unwrap()
                .expect_acquired()
        });
        QueryResult::Ok(())
    })
    .unwrap();
    takes(3, &proxy, || {
        LOCK.transaction(conn, |_| Ok::<_, Error>(())).unwrap()
    });
    takes(3, &proxy, || {
        LOCK.try_transaction(conn, |_| Ok::<_, Error>(()))
            .unwrap()
            .expect_acquired();
    });
    takes(3, &proxy, || {
        LOCK.transaction_timeout(conn, LIMIT, |_| Ok::<_, Error>(()))
            .unwrap()
            .expect_acquired();
    });
}

#[test]
fn a_lock_that_is_taken_takes_three_more_for_the_savepoint_in_which_it_is_waited_for() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let _holder = foreign_holder(&database, &LOCK);
    conn.transaction(|conn| {
        takes(1, &proxy, || {
            assert!(LOCK.try_acquire_xact(conn).unwrap().is_busy())
        });
        takes(4, &proxy, || {
            assert!(LOCK.acquire_xact_timeout(conn, SHORT).unwrap().is_busy())
        });
        QueryResult::Ok(())
    })
    .unwrap();
    takes(3, &proxy, || {
        assert!(
            LOCK.try_transaction(conn, |_| Ok::<_, Error>(()))
                .unwrap()
                .is_busy()
        )
    });
    takes(6, &proxy, || {
        assert!(
            LOCK.transaction_timeout(conn, SHORT, |_| Ok::<_, Error>(()))
                .unwrap()
                .is_busy()
        );
    });
}

#[test]
fn a_lock_that_is_waited_for_without_a_limit_takes_one_more() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    LOCK.transaction(conn, |_| Ok::<_, Error>(())).unwrap();
    let holder = foreign_holder(&database, &LOCK);
    let mut observer = Observer::of(&database);
    let before = proxy.round_trips();
    std::thread::scope(|scope| {
        scope.spawn(|| LOCK.transaction(conn, |_| Ok::<_, Error>(())).unwrap());
        eventually("it waits", || observer.waiters(LOCK.key()) == 1);
        drop(holder);
    });
    assert_eq!(proxy.round_trips() - before, 4);
}
