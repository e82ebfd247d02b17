//! Permits that renew themselves.
#![cfg(feature = "testing")] // whose timeouts may be short

use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use workbench::RoundTrips;

use crate::assert_matches;
use crate::half::{
    Admission, Error, IS_ASYNC, Permit, PgPool, Semaphore, make_pool, on_first, pool, wait,
};
use crate::support::{Observer, eventually, installed, number, run, truth};

const TIMEOUT: Duration = Duration::from_millis(600);

static KEPT: Semaphore = Semaphore::named("kept", 1, TIMEOUT).keep_alive();
/// Which has a second to spare on a slow machine.
static PATIENT: Semaphore = Semaphore::named("kept", 1, Duration::from_secs(10)).keep_alive();
const THIRD: Duration = Duration::from_millis(100);
const EXPIRE: &str = "UPDATE resource_control.service_request SET expires_at = clock_timestamp()";

fn acquire(pool: &PgPool) -> Permit {
    match wait(KEPT.try_acquire(pool)).unwrap() {
        Admission::Admitted(permit) => permit,
        Admission::Full(full) => panic!("{full:?}"),
    }
}

#[test]
fn others_who_take_connections_without_a_pause_do_not_starve_it() {
    let database = installed();
    let pool = pool(&database, 2);
    let permit = wait(PATIENT.acquire(&pool)).unwrap();
    let is_over = AtomicI32::new(0);
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while is_over.load(Ordering::Relaxed) == 0 {
                    wait(on_first(&pool, "SELECT pg_sleep(0.001)")).unwrap();
                    if IS_ASYNC {
                        // bb8 serves a caller that comes again at once before those that wait.
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
        let lost = wait(permit.wait_for_loss(Duration::from_secs(11)));
        is_over.store(1, Ordering::Relaxed);
        assert!(!lost);
    });
    wait(permit.release()).unwrap();
}

/// Ten timeouts, while two hundred others take all connections without a pause.
#[test]
fn a_long_job_keeps_its_permit_though_others_exhaust_the_pool() {
    let database = installed();
    let long = Semaphore::named("long", 1, Duration::from_secs(3)).keep_alive();
    let pool = pool(&database, 20);
    let permit = wait(long.acquire(&pool)).unwrap();
    let is_over = AtomicI32::new(0);
    let (look, first) = (
        &mut database.connect(),
        "(SELECT date_part('epoch', expires_at) * 1000 FROM resource_control.service_request)",
    );
    let before = number(look, first);
    thread::scope(|scope| {
        for _ in 0..200 {
            scope.spawn(|| {
                while is_over.load(Ordering::Relaxed) == 0 {
                    // Little work for the machine, and ten before oneself in the queue.
                    wait(on_first(&pool, "SELECT pg_sleep(0.03)")).unwrap();
                    // A pool may serve a caller that comes again at once before those that wait.
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        // Seen in the row.
        eventually("it was renewed for ten timeouts", || {
            permit.is_lost() || number(look, first) > before + 30_000
        });
        is_over.store(1, Ordering::Relaxed);
    });
    assert!(!permit.is_lost());
    assert!(wait(long.try_acquire(&pool)).unwrap().is_full());
    wait(permit.release()).unwrap();
    assert!(wait(long.try_acquire(&pool)).unwrap().is_admitted());
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
        "SELECT resource_control.claim_service_request('kept', 1, '3 s', 'crashed')",
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

#[test]
fn a_permit_whose_renewals_fail_for_a_while_is_kept() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    let permit = wait(PATIENT.acquire(&pool)).unwrap();
    let expiry =
        "(SELECT date_part('epoch', expires_at) * 1000000 FROM resource_control.service_request)";
    for _ in 0..2 {
        let before = number(look, expiry);
        run(
            look,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
        eventually("it was renewed", || {
            assert!(!permit.is_lost());
            number(look, expiry) > before
        });
    }
    wait(permit.release()).unwrap();
}

/// Each renewal takes more than a third of the timeout.
#[test]
fn a_slow_server_costs_no_permit() {
    let database = installed();
    let pool = pool(&database, 2);
    let slow = Semaphore::named("slow", 1, Duration::from_secs(3)).keep_alive();
    let permit = wait(slow.acquire(&pool)).unwrap();
    run(
        &mut database.connect(),
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1.05); RETURN NEW; END $$;
        CREATE TRIGGER slow BEFORE UPDATE ON resource_control.service_request FOR EACH ROW
            WHEN (NEW.completed_at IS NULL) EXECUTE FUNCTION slow()",
    );
    assert!(!wait(permit.wait_for_loss(Duration::from_secs(7))));
    wait(permit.release()).unwrap();
}

#[test]
fn a_permit_that_is_lost_tells_its_holder_within_a_third_of_its_timeout() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    let permit = wait(PATIENT.acquire(&pool)).unwrap();
    run(look, EXPIRE);
    wait(permit.lost());
    assert!(permit.is_lost() && wait(permit.wait_for_loss(Duration::MAX)));
    assert!(!permit.remaining().is_zero(), "it would be lost by then");
    assert_matches!(wait(permit.renew()), Err(Error::PermitLost(_)));
    assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
}

#[test]
fn a_wait_for_a_loss_ends_with_its_time() {
    let database = installed();
    let pool = pool(&database, 2);
    let permit = acquire(&pool);
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
    let permit = wait(PATIENT.acquire(&pool)).unwrap();
    run(
        open,
        "BEGIN; SELECT FROM resource_control.service_request FOR UPDATE",
    );
    wait(permit.lost());
    assert!(truth(
        look,
        "(SELECT expires_at > clock_timestamp() FROM resource_control.service_request)"
    ));
    assert!(wait(PATIENT.try_acquire(&other)).unwrap().is_full());
    run(open, "COMMIT");
    // A late renewal may come through, and is of no use to anybody.
    assert!(permit.is_lost());
    drop(permit);
    let next = wait(PATIENT.acquire(&other)).unwrap();
    wait(next.release()).unwrap();
}

/// Each is released at about the time of its first renewal.
#[test]
fn a_renewal_that_comes_after_the_release_revives_nothing() {
    let database = installed();
    let pool = pool(&database, 6);
    let many = Semaphore::named("race", 20, Duration::from_millis(300)).keep_alive();
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                for _ in 0..8 {
                    let permit = wait(many.acquire(&pool)).unwrap();
                    let renewal = THIRD - Duration::from_micros(fastrand::u64(0..6000));
                    // On a machine that is too slow, it may be lost.
                    wait(permit.wait_for_loss(renewal));
                    if fastrand::bool() {
                        assert_matches!(wait(permit.release()), Ok(()) | Err(Error::PermitLost(_)));
                    } else {
                        drop(permit);
                    }
                }
            });
        }
    });
    let look = &mut database.connect();
    // On a machine that is too slow, one may have expired before its drop could complete it.
    let ended = "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NOT NULL OR expires_at <= clock_timestamp())";
    eventually("all have ended", || number(look, ended) == 160);
    // What a renewal changed after the completion would expire later than that allows.
    let revived = "(SELECT count(*) FROM resource_control.service_request WHERE expires_at > completed_at + interval '301 ms')";
    assert_eq!(number(look, revived), 0);
}

#[test]
fn a_permit_that_was_released_or_detached_is_renewed_no_more() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    let released = acquire(&pool);
    wait(released.release()).unwrap();
    let _ = acquire(&pool).detach();
    let expired =
        "(SELECT bool_and(expires_at < clock_timestamp()) FROM resource_control.service_request)";
    eventually("both have expired", || truth(look, expired));
    wait(acquire(&pool).release()).unwrap();
}

#[test]
fn fifteen_permits_share_a_pool_of_one() {
    let database = installed();
    let pool = pool(&database, 1);
    let timeout = Duration::from_secs(10);
    let many = Semaphore::named("many", 15, timeout).keep_alive();
    let permits: Vec<_> = (0..15)
        .map(|_| wait(many.acquire(&pool)).unwrap())
        .collect();
    assert!(!wait(permits[0].wait_for_loss(timeout + timeout / 10)));
    for permit in permits {
        wait(permit.release()).unwrap();
    }
}
