//! Waiting for a slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use workbench::RoundTrips;

use crate::assert_matches;
use crate::half::*;
use crate::support::{
    Observer, eventually, impatient_pool, installed, number, once_at_least, patiently, run,
};

const HOUR: Duration = Duration::from_secs(3600);
/// The timeout of a pool whose connections a crowd of waiters shares.
const LONG: Duration = Duration::from_secs(600);
const ONE: Semaphore = Semaphore::named("geocoder", 1, HOUR);

#[track_caller]
fn taken(semaphore: &Semaphore, pool: &PgPool) -> Permit {
    let admission = wait(semaphore.try_acquire(pool)).unwrap();
    admission.admitted().expect("a slot is free")
}

#[test]
fn a_waiter_gets_the_slot_that_is_released_completed_or_expires() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 2));
    for end in 0..4 {
        let permit = taken(&ONE, &pool);
        let proxy = RoundTrips::in_front_of(&database);
        let waiting = make_pool(&proxy.url(), 1, LONG);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| wait(ONE.acquire(&waiting)).unwrap());
            eventually("the waiter has been refused", || proxy.round_trips() > 5);
            match end {
                0 => wait(permit.release()).unwrap(),
                1 => drop(permit),
                2 => assert!(wait(ONE.complete(&other, permit.detach())).unwrap()),
                _ => {
                    let expire = "UPDATE resource_control.service_request SET expires_at = clock_timestamp()";
                    run(&mut database.connect(), expire);
                    permit.detach();
                }
            }
            wait(waiter.join().unwrap().release()).unwrap();
        });
    }
}

#[test]
fn a_wait_that_timed_out_returns_the_last_refusal() {
    let database = installed();
    let pool = pool(&database, 1);
    let permit = taken(&ONE, &pool);
    // On a slow machine no try has a reply in time, so rounds are repeated.
    once_at_least("the wait returns a refusal", || {
        match wait(ONE.acquire_timeout(&pool, Duration::from_secs(1))) {
            Ok(waited) => {
                let full = waited.full().expect("the slot is taken");
                assert!(full.retry_after <= HOUR);
                true
            }
            Err(error) => {
                assert_matches!(error, Error::TimedOut);
                false
            }
        }
    });
    wait(permit.release()).unwrap();
    let admission = wait(ONE.acquire_timeout(&pool, Duration::MAX)).unwrap();
    wait(admission.admitted().unwrap().release()).unwrap();
}

#[test]
fn an_exhausted_pool_is_an_error_and_not_a_refusal() {
    let database = installed();
    let pool = impatient_pool(&database, Duration::from_millis(200));
    on_one(&pool, |_| {
        assert_matches!(wait(ONE.try_acquire(&pool)), Err(Error::Pool(_)));
        assert_matches!(wait(ONE.acquire(&pool)), Err(Error::Pool(_)));
        assert_matches!(
            wait(ONE.acquire_timeout(&pool, Duration::from_millis(50))),
            Err(Error::Pool(_) | Error::TimedOut)
        );
    });
    let admission = patiently(|| wait(ONE.try_acquire(&pool)));
    drop(admission.admitted().expect("the slot is free"));
}

#[test]
fn a_holder_and_its_waiters_share_one_connection() {
    let database = installed();
    let pool = make_pool(&database.url(), 1, LONG);
    let ran = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..10 {
                    let permit = wait(ONE.acquire(&pool)).unwrap();
                    assert_eq!(
                        ran.fetch_add(1, Ordering::SeqCst) % 2,
                        0,
                        "two callers hold the slot"
                    );
                    wait(on_first(&pool, "SELECT 1")).unwrap();
                    ran.fetch_add(1, Ordering::SeqCst);
                    wait(permit.release()).unwrap();
                }
            });
        }
    });
    assert_eq!(ran.into_inner(), 160);
}

#[test]
fn a_waiter_holds_neither_connection_nor_snapshot_between_its_tries() {
    let database = installed();
    let (pool, waiting) = (pool(&database, 1), pool(&database, 1));
    let permit = taken(&ONE, &pool);
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| wait(ONE.acquire(&waiting)).unwrap());
        for _ in 0..20 {
            wait(on_first(&waiting, "SELECT 1")).unwrap();
            assert_eq!(observer.in_transaction(), 0);
        }
        wait(permit.release()).unwrap();
        wait(waiter.join().unwrap().release()).unwrap();
    });
}

/// The oldest waiter polls, and the n-th claims every n − 1 seconds.
#[test]
fn a_crowd_of_waiters_is_served_and_sends_few_claims() {
    const CROWD: u64 = 300;
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let (pool, waiting) = (pool(&database, 1), make_pool(&proxy.url(), 8, LONG));
    let thirty = Semaphore::named("crowd", 30, HOUR);
    let held: Vec<_> = (0..30).map(|_| taken(&thirty, &pool)).collect();
    let served = Arc::new(AtomicU64::new(0));
    let waiters: Vec<_> = (0..CROWD)
        .map(|_| {
            let (thirty, waiting, served) = (thirty.clone(), waiting.clone(), served.clone());
            std::thread::Builder::new()
                .stack_size(1 << 20)
                .spawn(move || {
                    let permit = wait(thirty.acquire(&waiting)).unwrap();
                    served.fetch_add(1, Ordering::SeqCst);
                    wait(permit.release()).unwrap();
                })
                .unwrap()
        })
        .collect();
    eventually("each waiter has been refused", || {
        // Each waiter needs two round trips: a check-out and a claim.
        proxy.round_trips() > 2 * CROWD
    });
    eventually(
        "in some second, less than a quarter of the crowd claims",
        || {
            let before = proxy.round_trips();
            std::thread::sleep(Duration::from_secs(1));
            proxy.round_trips() - before < CROWD / 4
        },
    );
    assert_eq!(served.load(Ordering::SeqCst), 0);
    for permit in held {
        wait(permit.release()).unwrap();
    }
    for waiter in waiters {
        waiter.join().unwrap();
    }
    assert_eq!(served.load(Ordering::SeqCst), CROWD);
    let admin = &mut database.connect();
    assert_eq!(
        number(
            admin,
            "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NULL)"
        ),
        0
    );
}

#[test]
fn a_granted_slot_wakes_the_next_waiter() {
    let database = installed();
    let pool = pool(&database, 4);
    let four = Semaphore::named("four", 4, HOUR);
    let held: Vec<_> = (0..4).map(|_| taken(&four, &pool)).collect();
    let barrier = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let permit = wait(four.acquire(&pool)).unwrap();
                // Each of the four waits at the barrier until all have a slot.
                barrier.wait();
                wait(permit.release()).unwrap();
            });
        }
        held.into_iter().for_each(drop);
    });
}
