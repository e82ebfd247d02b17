//! Permits that renew themselves, and leaders, which hold one.

use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use workbench::RoundTrips;

use crate::assert_matches;
use crate::half::{
    Admission, Error, IS_FAIR, Permit, PgPool, Semaphore, make_pool, on_first, pool, wait,
};
use crate::support::{Observer, eventually, installed, number, run};

const TIMEOUT: Duration = Duration::from_millis(600);

static KEPT: Semaphore = Semaphore::named("kept", 1, TIMEOUT).keep_alive();
const IN_FLIGHT: &str = "(SELECT count(*) FROM resource_control.slot_in_flight)";

fn acquire(pool: &PgPool) -> Permit {
    match wait(KEPT.try_acquire(pool)).unwrap() {
        Admission::Admitted(permit) => permit,
        Admission::Full(full) => panic!("{full:?}"),
    }
}

#[test]
fn a_job_of_many_timeouts_keeps_its_permit() {
    let database = installed();
    let pool = pool(&database, 2);
    let permit = acquire(&pool);
    let observer = &mut database.connect();
    let first =
        "(SELECT date_part('epoch', expires_at) * 1000 FROM resource_control.service_request)";
    let before = number(observer, first);
    // Ten timeouts, seen in the row.
    eventually("it was renewed for ten timeouts", || {
        number(observer, first) > before + 10 * TIMEOUT.as_millis() as i64
    });
    assert!(!permit.is_lost());
    assert!(wait(KEPT.try_acquire(&pool)).unwrap().is_full());
    wait(permit.release()).unwrap();
    assert!(wait(KEPT.try_acquire(&pool)).unwrap().is_admitted());
}

#[test]
fn others_who_use_the_pool_without_a_pause_do_not_starve_it() {
    if !IS_FAIR {
        return; // it lends to whoever asks, and not to whoever has waited longest
    }
    let database = installed();
    let pool = pool(&database, 2);
    let permit = acquire(&pool);
    let is_over = AtomicI32::new(0);
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while is_over.load(Ordering::Relaxed) == 0 {
                    wait(on_first(&pool, "SELECT pg_sleep(0.001)")).unwrap();
                }
            });
        }
        let lost = wait(permit.wait_for_loss(4 * TIMEOUT));
        is_over.store(1, Ordering::Relaxed);
        assert!(!lost);
    });
    wait(permit.release()).unwrap();
}

#[test]
fn a_renewal_after_the_release_revives_nothing() {
    let database = installed();
    let pool = pool(&database, 2);
    let observer = &mut database.connect();
    for _ in 0..20 {
        let permit = acquire(&pool);
        // Due at once.
        run(
            observer,
            "UPDATE resource_control.service_request SET expires_at = expires_at WHERE completed_at IS NULL",
        );
        wait(permit.release()).unwrap();
        assert_eq!(number(observer, IN_FLIGHT), 0);
    }
    let ended =
        "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NOT NULL)";
    assert_eq!(number(observer, ended), 20);
}

#[test]
fn a_permit_that_another_ended_is_lost() {
    let database = installed();
    let pool = pool(&database, 2);
    let permit = acquire(&pool);
    assert!(wait(KEPT.complete(&pool, permit.fencing_token())).unwrap());
    assert!(wait(permit.wait_for_loss(Duration::from_secs(60))));
    assert!(permit.is_lost());
    assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
}

/// The holder stops before the database lets another one in.
#[test]
fn a_permit_is_lost_before_its_slot_is_free_if_the_network_is_cut() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let cut_off = make_pool(&proxy.url(), 2, Duration::from_secs(20));
    let others = pool(&database, 1);
    let permit = acquire(&cut_off);
    proxy.cut();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(KEPT.acquire(&others)).unwrap());
        assert!(wait(permit.wait_for_loss(Duration::from_secs(60))));
        assert!(permit.is_lost(), "and it stays so");
        let next = waiting.join().unwrap();
        assert!(permit.is_lost());
        proxy.restore();
        assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
        assert!(!next.is_lost(), "a late renewal revives nothing");
        wait(next.release()).unwrap();
    });
}

#[test]
fn a_crashed_holder_keeps_the_slot_for_a_timeout() {
    let database = installed();
    let pool = pool(&database, 2);
    let mut observer = Observer::of(&database);
    // A claim that nobody renews, as after a crash.
    run(
        observer.conn(),
        "SELECT resource_control.claim_service_request('kept', 1, '600 ms', 'crashed')",
    );
    assert!(wait(KEPT.try_acquire(&pool)).unwrap().is_full());
    let permit = wait(KEPT.acquire(&pool)).unwrap();
    assert!(
        number(
            observer.conn(),
            "(SELECT count(*) FROM resource_control.service_request WHERE timed_out_at IS NOT NULL)"
        ) == 1
    );
    wait(permit.release()).unwrap();
}

#[test]
fn a_short_timeout_is_refused() {
    let database = installed();
    let pool = pool(&database, 1);
    let short = Semaphore::named("short", 1, Duration::from_millis(1)).keep_alive();
    assert_matches!(wait(short.try_acquire(&pool)), Err(Error::Input(_)));
}
