//! Permits that renew themselves.
#![cfg(feature = "testing")] // whose timeouts may be short

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::assert_matches;
use crate::half::*;
use crate::support::{eventually, installed, number, run, truth};

const TIMEOUT: Duration = Duration::from_millis(900);
const KEPT: Semaphore = Semaphore::named("import", 1, TIMEOUT).keep_alive();

#[track_caller]
fn taken(semaphore: &Semaphore, pool: &PgPool) -> Permit {
    let admission = wait(semaphore.try_acquire(pool)).unwrap();
    admission.admitted().expect("a slot is free")
}

const THIRD: Duration = Duration::from_millis(100);
const EXPIRE: &str = "UPDATE resource_control.service_request SET expires_at = clock_timestamp()";

/// Users of the pool take connections and return them without a pause.
#[test]
fn a_permit_outlives_ten_timeouts_though_the_pool_is_busy() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let permit = taken(&KEPT, &pool);
    let (began, is_over) = (Instant::now(), AtomicBool::new(false));
    let mut least = TIMEOUT;
    std::thread::scope(|scope| {
        for user in 1..=6 {
            let (pool, is_over) = (&pool, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    wait(on_first(pool, &format!("SELECT pg_sleep(0.00{user})"))).unwrap();
                    if IS_ASYNC {
                        // bb8 lends to one who comes again at once before those who wait.
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
        let mut is_full = true;
        while began.elapsed() < 10 * TIMEOUT && is_full && !permit.is_lost() {
            is_full = wait(KEPT.try_acquire(&other)).unwrap().is_full();
            least = least.min(permit.remaining());
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(is_full && !permit.is_lost(), "least trust {least:?}");
    });
    wait(permit.release()).unwrap();
    println!("least trust {least:?} of {TIMEOUT:?}");
}

#[test]
fn a_permit_whose_renewals_fail_for_a_while_is_kept() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    let permit = taken(&KEPT, &pool);
    for _ in 0..4 {
        let before = permit.remaining();
        run(
            look,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
        eventually("it was renewed", || {
            assert!(!permit.is_lost());
            permit.remaining() > before
        });
    }
    wait(permit.release()).unwrap();
}

#[test]
fn a_permit_that_is_lost_tells_its_holder_within_a_third_of_its_timeout() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    for _ in 0..3 {
        let permit = taken(&KEPT, &pool);
        run(look, EXPIRE);
        let before = permit.remaining();
        wait(permit.lost());
        assert!(permit.is_lost() && wait(permit.wait_for_loss(Duration::MAX)));
        assert!(before > TIMEOUT / 2);
        assert_matches!(wait(permit.renew()), Err(Error::PermitLost(_)));
        assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
    }
}

#[test]
fn a_wait_for_a_loss_ends_with_its_time() {
    let database = installed();
    let pool = pool(&database, 2);
    let permit = taken(&KEPT, &pool);
    assert!(!wait(permit.wait_for_loss(Duration::ZERO)));
    assert!(!wait(permit.wait_for_loss(TIMEOUT * 2)));
    wait(permit.release()).unwrap();
}

/// Its renewal hangs behind a lock of the row.
#[test]
fn a_holder_that_cannot_renew_stops_before_the_database_lets_another_in() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let (look, open) = (&mut database.connect(), &mut database.connect());
    let permit = taken(&KEPT, &pool);
    run(
        open,
        "BEGIN; SELECT FROM resource_control.service_request FOR UPDATE",
    );
    wait(permit.lost());
    assert!(truth(
        look,
        "(SELECT expires_at > clock_timestamp() FROM resource_control.service_request)"
    ));
    assert!(wait(KEPT.try_acquire(&other)).unwrap().is_full());
    run(open, "COMMIT");
    // A late renewal may come through, and is of no use to anybody.
    assert!(permit.is_lost());
    drop(permit);
    let next = wait(KEPT.acquire(&other)).unwrap();
    wait(next.release()).unwrap();
}

/// Each is released at about the time of its first renewal.
#[test]
fn a_renewal_that_comes_after_the_release_revives_nothing() {
    let database = installed();
    let pool = pool(&database, 6);
    let many = Semaphore::named("race", 20, Duration::from_millis(300)).keep_alive();
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                for _ in 0..8 {
                    let permit = wait(many.acquire(&pool)).unwrap();
                    let renewal = THIRD - Duration::from_micros(fastrand::u64(0..6000));
                    assert!(!wait(permit.wait_for_loss(renewal)));
                    if fastrand::bool() {
                        wait(permit.release()).unwrap();
                    } else {
                        drop(permit);
                    }
                }
            });
        }
    });
    let look = &mut database.connect();
    let completed = "(SELECT count(completed_at) FROM resource_control.service_request)";
    eventually("all are completed", || number(look, completed) == 160);
    // What a renewal changed after the completion would expire later than that allows.
    let revived = "(SELECT count(*) FROM resource_control.service_request WHERE expires_at > completed_at + interval '301 ms')";
    assert_eq!(number(look, revived), 0);
}

#[test]
fn a_permit_that_was_released_or_detached_is_renewed_no_more() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    let released = taken(&KEPT, &pool);
    wait(released.release()).unwrap();
    let _ = taken(&KEPT, &pool).detach();
    let expired =
        "(SELECT bool_and(expires_at < clock_timestamp()) FROM resource_control.service_request)";
    eventually("both have expired", || truth(look, expired));
    wait(taken(&KEPT, &pool).release()).unwrap();
}

#[test]
fn fifteen_permits_share_a_pool_of_one() {
    let database = installed();
    let pool = pool(&database, 1);
    let many = Semaphore::named("many", 15, TIMEOUT).keep_alive();
    let permits: Vec<_> = (0..15)
        .map(|_| wait(many.acquire(&pool)).unwrap())
        .collect();
    assert!(!wait(permits[0].wait_for_loss(TIMEOUT * 3)));
    for permit in permits {
        wait(permit.release()).unwrap();
    }
}
