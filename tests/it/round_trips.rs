//! How often the network is crossed, counted on the wire: of every operation, as often as its documentation says.

mod beside_the_primitives;
mod monitor;
mod other_forms;
#[cfg(feature = "testing")]
mod testing;
mod throttles;
mod transaction_locks;

use std::time::Duration;

use crate::half::prelude::*;
use crate::half::{AdvisoryLock, Database, Error, RoundTrips, Semaphore, silent_pool};
use crate::semaphores::database;
use crate::support::{Expect, Observer, assert_matches, foreign_holder};

static LOCK: AdvisoryLock = AdvisoryLock::named("round trips");

/// Makes the call twice; the second one, which finds everything prepared, must take so many round trips and prepare
/// nothing.
#[track_caller]
fn takes(trips: u64, proxy: &RoundTrips, mut call: impl FnMut()) {
    call();
    let parses = proxy.parses();
    assert_eq!(proxy.count(call), trips);
    assert_eq!(proxy.parses(), parses, "it was prepared before");
}

#[test]
fn one_to_lock_and_one_to_release_and_both_are_prepared() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    for lock in [LOCK.clone(), LOCK.clone().shared()] {
        let mut guard = lock.acquire(&pool).unwrap();
        assert!(guard.is_held().unwrap());
        guard.release().unwrap();
        let parses = proxy.parses();

        let mut guard = None;
        let taking = proxy.count(|| guard = lock.try_acquire(&pool).unwrap().acquired());
        assert_eq!(taking, 1);
        let mut guard = guard.unwrap();
        assert_eq!(proxy.count(|| assert!(guard.is_held().unwrap())), 1);
        assert_eq!(proxy.count(|| guard.release().unwrap()), 1);

        assert_eq!(proxy.count(|| drop(lock.acquire(&pool).unwrap())), 2);
        let timeout = Duration::from_secs(1);
        let waiting = || drop(lock.acquire_timeout(&pool, timeout).unwrap());
        assert_eq!(proxy.count(waiting), 2);
        assert_eq!(proxy.parses(), parses, "all of it was prepared before");
    }
}

/// Whether a pooler moves sessions is asked once, by comparing two connections of the pool.
#[test]
fn what_was_found_out_of_a_connection_is_not_asked_again() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 2);
    let both = [pool.get().unwrap(), pool.get().unwrap()];
    drop(both);
    let asked = proxy.count(|| LOCK.acquire(&pool).unwrap().release().unwrap());
    assert!(asked > 4, "{asked}");
    for _ in 0..2 {
        // Prepared on both.
        let guards =
            [LOCK.clone().shared(), LOCK.clone().shared()].map(|lock| lock.acquire(&pool).unwrap());
        drop(guards);
    }
    let again = proxy.count(|| {
        for _ in 0..3 {
            LOCK.clone()
                .shared()
                .acquire(&pool)
                .unwrap()
                .release()
                .unwrap();
        }
    });
    assert_eq!(again, 6);
}

#[test]
fn one_to_find_the_lock_busy() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    LOCK.acquire(&pool).unwrap().release().unwrap();
    let _holder = foreign_holder(&database, &LOCK);
    assert_eq!(
        proxy.count(|| assert!(LOCK.try_acquire(&pool).unwrap().is_busy())),
        1
    );
    let timeout = Duration::from_millis(50);
    let waiting = || assert!(LOCK.acquire_timeout(&pool, timeout).unwrap().is_busy());
    waiting();
    assert_eq!(
        proxy.count(waiting),
        3,
        "the try, the wait, and whether it was granted at the last moment"
    );
}

#[test]
fn a_transaction_lock_is_one_more_than_the_transaction() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let mut transaction = || LOCK.transaction(conn, |_| Ok::<_, Error>(())).unwrap();
    transaction();
    assert_eq!(proxy.count(&mut transaction), 3, "BEGIN, the lock, COMMIT");
}

#[test]
fn what_is_refused_sends_nothing() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let nameless = AdvisoryLock::named("");
    let refusals = || {
        nameless.acquire_on(conn).map(drop).unwrap_err();
        LOCK.acquire_xact(conn).unwrap_err();
    };
    assert_eq!(proxy.count(refusals), 0);
    conn.transaction(|conn| {
        let refusals = || {
            LOCK.acquire_on(conn).map(drop).unwrap_err();
            LOCK.transaction(conn, |_| Ok::<_, Error>(())).unwrap_err();
        };
        assert_eq!(proxy.count(refusals), 0);
        QueryResult::Ok(())
    })
    .unwrap();
}

#[test]
fn one_to_claim_one_to_be_refused_one_to_renew_and_one_to_release() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let semaphore = Semaphore::named("round trips", 1, Duration::from_secs(30));
    let mut permit = semaphore.try_acquire(&pool).unwrap().expect_acquired();
    permit.renew().unwrap();
    permit.release().unwrap();
    let parses = proxy.parses();

    let mut permit = None;
    let claim = || permit = semaphore.try_acquire(&pool).unwrap().admitted();
    assert_eq!(proxy.count(claim), 1);
    let mut permit = permit.unwrap();
    let refusal = || assert!(semaphore.try_acquire(&pool).unwrap().is_full());
    assert_eq!(proxy.count(refusal), 1);
    let renewal = || assert!(permit.renew().is_ok());
    assert_eq!(proxy.count(renewal), 1);
    assert_eq!(proxy.count(|| permit.release().unwrap()), 1);
    let permit = semaphore.try_acquire(&pool).unwrap().expect_acquired();
    assert_eq!(proxy.count(|| drop(permit)), 1);
    assert_eq!(proxy.parses(), parses, "all of it was prepared before");

    // On a connection of one's own.
    let conn = &mut pool.get().unwrap();
    let all = || {
        let claim = semaphore.claim_on(conn).unwrap().expect_acquired();
        assert!(semaphore.claim_on(conn).unwrap().is_full());
        assert!(semaphore.renew_on(conn, claim.id).unwrap().is_some());
        assert!(semaphore.complete_on(conn, claim.id).unwrap());
    };
    assert_eq!(proxy.count(all), 4);
    assert_eq!(proxy.parses(), parses);
    let refused = || {
        let bad = Semaphore::named("", 1, Duration::from_secs(30));
        bad.claim_on(conn).unwrap_err();
        conn.transaction(|conn| semaphore.claim_on(conn).map(drop))
            .unwrap_err();
    };
    assert_eq!(proxy.count(refused), 2, "BEGIN and ROLLBACK");
}

/// A dead network is not waited for twice: one failed unlock, and the connection is given up.
#[test]
fn a_severed_connection_is_given_up_and_replaced() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let guard = LOCK.try_acquire(&pool).unwrap().expect_acquired();
    proxy.sever();
    assert_matches!(guard.release(), Err(Error::LockLost { .. }));
    Observer::of(&database).assert_free(LOCK.key());
    LOCK.acquire(&pool).unwrap().release().unwrap();
}
