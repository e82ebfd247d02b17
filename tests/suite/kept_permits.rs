//! Permits that renew themselves.
#![cfg(feature = "testing")] // whose timeouts may be short

use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use diesel_interlock::testing::expire;
use workbench::RoundTrips;

use crate::assert_matches;
use crate::half::{
    Admission, Error, IS_ASYNC, Permit, PgPool, Semaphore, make_pool, on_first, pool, wait,
};
use crate::support::{LEASE, eventually, installed, number, once_at_least, run, truth};

/// So short that a permit may be lost at any moment if the machine pauses.
static SHORT: Semaphore = Semaphore::named("kept", 1, Duration::from_millis(600)).keep_alive();
static KEPT: Semaphore = Semaphore::named("kept", 1, LEASE).keep_alive();
/// Not renewed within a test: the first renewal comes after twenty minutes.
static LONG: Semaphore = Semaphore::named("kept", 1, Duration::from_secs(3600)).keep_alive();

#[track_caller]
fn acquire(semaphore: &Semaphore, pool: &PgPool) -> Permit {
    match wait(semaphore.try_acquire(pool)).unwrap() {
        Admission::Admitted(permit) => permit,
        Admission::Full(full) => panic!("{full:?}"),
    }
}

#[test]
fn callers_that_take_connections_without_a_pause_do_not_starve_a_renewal() {
    let database = installed();
    let pool = pool(&database, 2);
    let permit = acquire(&KEPT, &pool);
    let is_over = AtomicI32::new(0);
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while is_over.load(Ordering::Relaxed) == 0 {
                    wait(on_first(&pool, "SELECT pg_sleep(0.001)")).unwrap();
                    if IS_ASYNC {
                        // bb8 serves a caller that returns at once before those that wait:
                        // https://github.com/djc/bb8/issues/243
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
        let lost = wait(permit.wait_for_loss(LEASE));
        is_over.store(1, Ordering::Relaxed);
        assert!(!lost);
    });
    wait(permit.release()).unwrap();
}

/// Fifty callers use five connections for 0.1 seconds each, so a renewal waits in the queue of the
/// pool for about a second.
#[test]
fn a_long_job_keeps_its_permit_though_others_exhaust_the_pool() {
    let database = installed();
    let pool = pool(&database, 5);
    let permit = acquire(&KEPT, &pool);
    let is_over = AtomicI32::new(0);
    thread::scope(|scope| {
        for _ in 0..50 {
            scope.spawn(|| {
                while is_over.load(Ordering::Relaxed) == 0 {
                    wait(on_first(&pool, "SELECT pg_sleep(0.1)")).unwrap();
                    // A pool may serve a caller that returns at once before those that wait.
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        let lost = wait(permit.wait_for_loss(LEASE));
        is_over.store(1, Ordering::Relaxed);
        assert!(!lost);
    });
    assert!(wait(KEPT.try_acquire(&pool)).unwrap().is_full());
    wait(permit.release()).unwrap();
    assert!(wait(KEPT.try_acquire(&pool)).unwrap().is_admitted());
}

#[test]
fn a_permit_whose_request_was_completed_elsewhere_is_lost() {
    let database = installed();
    let pool = pool(&database, 2);
    let permit = acquire(&KEPT, &pool);
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
    let permit = acquire(&SHORT, &cut_off);
    proxy.cut();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(LONG.acquire(&others)).unwrap());
        assert!(wait(permit.wait_for_loss(Duration::from_secs(60))));
        assert!(permit.is_lost(), "a lost permit stays lost");
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
    let admin = &mut database.connect();
    // A claim that nobody renews, as after a crash.
    run(
        admin,
        "SELECT resource_control.claim_service_request('kept', 1, '1 hour', 'crashed')",
    );
    assert!(truth(
        admin,
        "(SELECT expires_at = created_at + interval '1 hour' FROM resource_control.service_request)"
    ));
    assert!(wait(LONG.try_acquire(&pool)).unwrap().is_full());
    assert_eq!(wait(expire(&LONG, &pool)).unwrap(), 1);
    let permit = acquire(&LONG, &pool);
    let timed_out = "(SELECT count(timed_out_at) FROM resource_control.service_request)";
    assert_eq!(number(admin, timed_out), 1);
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
    let admin = &mut database.connect();
    let permit = acquire(&KEPT, &pool);
    let expiry =
        "(SELECT date_part('epoch', expires_at) * 1000000 FROM resource_control.service_request)";
    let before = number(admin, expiry);
    // A sequence counts although its transaction fails.
    run(
        admin,
        "CREATE SEQUENCE failed;
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM nextval('public.failed'); RAISE 'not now'; END $$;
        CREATE TRIGGER fail BEFORE UPDATE ON resource_control.service_request
            FOR EACH ROW EXECUTE FUNCTION fail();
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid()",
    );
    eventually("three renewals have failed", || {
        number(admin, "(SELECT last_value FROM failed)") >= 3
    });
    run(
        admin,
        "DROP TRIGGER fail ON resource_control.service_request",
    );
    eventually("the permit was renewed", || number(admin, expiry) > before);
    assert!(!permit.is_lost());
    wait(permit.release()).unwrap();
}

/// Each renewal takes more than a third of the timeout.
#[test]
fn renewals_that_take_long_cost_no_permit() {
    let database = installed();
    let pool = pool(&database, 2);
    run(
        &mut database.connect(),
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.7); RETURN NEW; END $$;
        CREATE TRIGGER slow BEFORE UPDATE ON resource_control.service_request FOR EACH ROW
            WHEN (NEW.completed_at IS NULL) EXECUTE FUNCTION slow()",
    );
    let timeout = Duration::from_secs(2);
    let mut round = 0;
    once_at_least("the permit is kept", || {
        round += 1;
        let slow = Semaphore::named("slow", 1, timeout).keep_alive().key(round);
        let permit = acquire(&slow, &pool);
        let is_lost = wait(permit.wait_for_loss(2 * timeout));
        !is_lost && wait(permit.release()).is_ok()
    });
}

#[test]
fn a_lost_permit_notifies_its_holder_before_it_expires() {
    let database = installed();
    let pool = pool(&database, 2);
    let timeout = Duration::from_secs(3);
    let kept = Semaphore::named("kept", 1, timeout).keep_alive();
    once_at_least("the permit is lost before it expires", || {
        let permit = acquire(&kept, &pool);
        wait(expire(&kept, &pool)).unwrap();
        wait(permit.lost());
        let is_in_time = !permit.remaining().is_zero();
        assert!(permit.is_lost() && wait(permit.wait_for_loss(Duration::MAX)));
        assert_matches!(wait(permit.renew()), Err(Error::PermitLost(_)));
        assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
        is_in_time
    });
}

#[test]
fn a_wait_for_a_loss_ends_with_its_time() {
    let database = installed();
    let pool = pool(&database, 2);
    let permit = acquire(&LONG, &pool);
    assert!(!wait(permit.wait_for_loss(Duration::ZERO)));
    assert!(!wait(permit.wait_for_loss(Duration::from_millis(600))));
    wait(permit.release()).unwrap();
}

/// The renewal hangs, because another transaction has locked the row.
#[test]
fn a_holder_that_cannot_renew_stops_before_the_database_lets_another_in() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let (admin, open) = (&mut database.connect(), &mut database.connect());
    let kept = Semaphore::named("kept", 1, Duration::from_secs(3)).keep_alive();
    const REST: &str = "(SELECT date_part('epoch', max(expires_at) - clock_timestamp()) * 1000
        FROM resource_control.service_request WHERE completed_at IS NULL)";
    once_at_least("the holder stops while its slot is taken", || {
        let permit = acquire(&kept, &pool);
        run(
            open,
            "BEGIN; SELECT FROM resource_control.service_request FOR UPDATE",
        );
        wait(permit.lost());
        // At least a third of the margin is left.
        let rest = number(admin, REST);
        let is_full = wait(LONG.try_acquire(&other)).unwrap().is_full();
        run(open, "COMMIT");
        // The late renewal may succeed now, but the permit stays lost.
        assert!(permit.is_lost());
        drop(permit);
        let next = wait(LONG.acquire(&other)).unwrap();
        wait(next.release()).unwrap();
        rest > 100 && is_full
    });
}

/// Each permit is released at about the time of its first renewal, so that release and renewal
/// race.
#[test]
fn a_renewal_after_the_release_does_not_revive_the_request() {
    let database = installed();
    let pool = pool(&database, 6);
    let many = Semaphore::named("race", 20, Duration::from_millis(300)).keep_alive();
    let admin = &mut database.connect();
    run(
        admin,
        "CREATE TABLE revived (id bigint);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN INSERT INTO public.revived VALUES (OLD.id); RETURN NULL; END $$;
        CREATE TRIGGER note AFTER UPDATE ON resource_control.service_request FOR EACH ROW
            WHEN (OLD.completed_at IS NOT NULL OR OLD.timed_out_at IS NOT NULL)
            EXECUTE FUNCTION note()",
    );
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                for _ in 0..8 {
                    let permit = wait(many.acquire(&pool)).unwrap();
                    let renewal = Duration::from_micros(fastrand::u64(94_000..100_000));
                    // On a slow machine, the permit may be lost.
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
    // On a slow machine, a request may have expired before the drop could complete it.
    let ended = "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NOT NULL OR expires_at <= clock_timestamp())";
    eventually("all requests have ended", || number(admin, ended) == 160);
    assert_eq!(number(admin, "(SELECT count(*) FROM revived)"), 0);
}

#[test]
fn a_released_or_detached_permit_is_no_longer_renewed() {
    let database = installed();
    let pool = pool(&database, 2);
    let admin = &mut database.connect();
    // On a slow machine, the permit may be lost.
    let released = wait(acquire(&SHORT, &pool).release());
    assert_matches!(released, Ok(()) | Err(Error::PermitLost(_)));
    let _ = acquire(&SHORT, &pool).detach();
    let expired =
        "(SELECT bool_and(expires_at < clock_timestamp()) FROM resource_control.service_request)";
    eventually("both requests have expired", || truth(admin, expired));
    wait(acquire(&LONG, &pool).release()).unwrap();
}

#[test]
fn fifteen_permits_share_a_pool_of_one() {
    let database = installed();
    let pool = pool(&database, 1);
    let many = Semaphore::named("many", 15, LEASE).keep_alive();
    let permits: Vec<_> = (0..15).map(|_| acquire(&many, &pool)).collect();
    assert!(!wait(permits[0].wait_for_loss(LEASE)));
    for permit in permits {
        wait(permit.release()).unwrap();
    }
}
