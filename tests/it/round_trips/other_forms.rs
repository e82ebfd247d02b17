//! The other forms of locks and semaphores: on a borrowed connection, as a closure, with a limit, while they wait.

use std::time::Duration;

use super::{LOCK, takes};
use crate::half::prelude::*;
use crate::half::{Admission, Database, Error, RoundTrips, Semaphore, silent_pool};
use crate::semaphores::database;
use crate::support::{Expect, Observer, eventually, foreign_holder};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn two_for_a_lock_of_any_form_that_is_free() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = &silent_pool(&proxy, 1);
    takes(2, &proxy, || {
        LOCK.with(pool, |_| Ok::<_, Error>(())).unwrap()
    });
    takes(2, &proxy, || {
        LOCK.try_acquire(pool)
            .unwrap()
            .run(|_| Ok::<_, Error>(()))
            .unwrap()
            .expect_acquired();
    });
    takes(2, &proxy, || {
        LOCK.acquire_timeout(pool, LIMIT)
            .unwrap()
            .run(|_| Ok::<_, Error>(()))
            .unwrap()
            .expect_acquired();
    });

    let conn = &mut pool.get().unwrap();
    takes(2, &proxy, || drop(LOCK.acquire_on(conn).unwrap()));
    takes(2, &proxy, || {
        drop(LOCK.try_acquire_on(conn).unwrap().expect_acquired())
    });
    takes(2, &proxy, || {
        drop(
            LOCK.acquire_timeout_on(conn, LIMIT)
                .unwrap()
                .expect_acquired(),
        )
    });
    takes(2, &proxy, || {
        LOCK.acquire_on(conn)
            .unwrap()
            .run(|_| Ok::<_, Error>(()))
            .unwrap()
    });
    takes(2, &proxy, || {
        LOCK.try_acquire_on(conn)
            .unwrap()
            .run(|_| Ok::<_, Error>(()))
            .unwrap()
            .expect_acquired();
    });
    takes(2, &proxy, || {
        LOCK.acquire_timeout_on(conn, LIMIT)
            .unwrap()
            .run(|_| Ok::<_, Error>(()))
            .unwrap()
            .expect_acquired();
    });
}

#[test]
fn one_for_a_lock_of_any_form_that_is_taken() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = &silent_pool(&proxy, 1);
    let _holder = foreign_holder(&database, &LOCK);
    takes(1, &proxy, || {
        assert!(
            LOCK.try_acquire(pool)
                .unwrap()
                .run(|_| Ok::<_, Error>(()))
                .unwrap()
                .is_busy()
        )
    });
    let conn = &mut pool.get().unwrap();
    takes(1, &proxy, || {
        assert!(LOCK.try_acquire_on(conn).unwrap().is_busy())
    });
    takes(1, &proxy, || {
        assert!(
            LOCK.try_acquire_on(conn)
                .unwrap()
                .run(|_| Ok::<_, Error>(()))
                .unwrap()
                .is_busy()
        )
    });
}

/// A try, which shows that it is taken, a statement for each 200 milliseconds of waiting, and a look after each
/// of them that timed out.
#[test]
fn a_lock_that_is_waited_for_takes_two_for_each_slice() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let mut observer = Observer::of(&database);
    let mut wait = || {
        let holder = foreign_holder(&database, &LOCK);
        let before = proxy.round_trips();
        let waited = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let began = std::time::Instant::now();
                drop(LOCK.acquire_on(conn).unwrap());
                began.elapsed()
            });
            eventually("it waits", || observer.waiters(LOCK.key()) == 1);
            drop(holder);
            waiter.join().unwrap()
        });
        (proxy.round_trips() - before, waited)
    };
    // Prepares the statements.
    wait();
    let (trips, waited) = wait();
    // The first look has to be prepared, in one round trip more.
    let most = match waited.as_millis() as u64 / 200 {
        0 => 3,
        slices => 4 + 2 * slices,
    };
    assert!((3..=most).contains(&trips), "{trips} in {waited:?}");
}

#[test]
fn a_semaphore_of_any_form_takes_one_to_claim_and_one_to_release() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = &silent_pool(&proxy, 1);
    let semaphore = Semaphore::named("any form", 1, Duration::from_secs(30));
    takes(2, &proxy, || {
        semaphore
            .try_acquire(pool)
            .unwrap()
            .run(|_| Ok::<_, Error>(()))
            .unwrap()
            .expect_acquired();
    });
    takes(2, &proxy, || {
        semaphore.with(pool, |_| Ok::<_, Error>(())).unwrap()
    });
    takes(2, &proxy, || drop(semaphore.acquire(pool).unwrap()));
    takes(2, &proxy, || {
        drop(
            semaphore
                .acquire_timeout(pool, LIMIT)
                .unwrap()
                .expect_acquired(),
        )
    });
    let admitted = |admission| matches!(admission, Admission::Admitted(_));
    takes(2, &proxy, || {
        assert!(admitted(semaphore.try_acquire(pool).unwrap()))
    });
    takes(2, &proxy, || {
        assert!(admitted(semaphore.acquire_timeout(pool, LIMIT).unwrap()))
    });
    // What a permit became ends elsewhere.
    takes(2, &proxy, || {
        let claim = semaphore
            .try_acquire(pool)
            .unwrap()
            .expect_acquired()
            .into_claim();
        assert!(
            semaphore
                .complete_on(&mut pool.get().unwrap(), claim.id)
                .unwrap()
        );
    });

    let _permit = semaphore
        .try_acquire(pool)
        .unwrap()
        .expect_acquired()
        .into_claim();
    takes(1, &proxy, || {
        assert!(
            semaphore
                .try_acquire(pool)
                .unwrap()
                .run(|_| Ok::<_, Error>(()))
                .unwrap()
                .is_full()
        )
    });
    takes(1, &proxy, || {
        assert!(matches!(
            semaphore.try_acquire(pool).unwrap(),
            Admission::Full(_)
        ))
    });
    takes(1, &proxy, || {
        assert!(
            semaphore
                .acquire_timeout(pool, Duration::ZERO)
                .unwrap()
                .is_full()
        )
    });
    let conn = &mut pool.get().unwrap();
    takes(1, &proxy, || {
        assert!(matches!(
            semaphore.claim_on(conn).unwrap(),
            Admission::Full(_)
        ))
    });
}
