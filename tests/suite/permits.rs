//! The ways out of a permit: releases, drops, errors, panics, also while the pool is exhausted or
//! the server is down.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use workbench::{Cluster, RoundTrips, StopMode};

use crate::assert_matches;
use crate::half::*;
use crate::support::{
    Observer, assert_after_drop, eventually, install, installed, number, patiently, run,
};

const MINUTE: Duration = Duration::from_secs(60);
const ONE: Semaphore = Semaphore::named("geocoder", 1, MINUTE);

#[track_caller]
fn taken(semaphore: &Semaphore, pool: &PgPool) -> Permit {
    let admission = wait(semaphore.try_acquire(pool)).unwrap();
    admission.admitted().expect("a slot is free")
}

fn panics() -> Result<()> {
    panic!("the work")
}

fn in_flight(conn: &mut diesel::PgConnection) -> i64 {
    number(
        conn,
        "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NULL AND timed_out_at IS NULL)",
    )
}

#[test]
fn every_way_out_of_the_work_releases_its_permit() {
    let database = installed();
    let pool = pool(&database, 1);
    let admin = &mut database.connect();
    let value = wait(ONE.with(
        &pool,
        work!(|permit| {
            assert!(permit.fencing_token() > 0);
            Ok::<_, Error>(7)
        }),
    ));
    assert_eq!(value.unwrap(), 7);
    assert_eq!(in_flight(admin), 0);

    let admission = wait(ONE.try_acquire(&pool)).unwrap();
    let run_out = wait(admission.run(work!(|_permit| Err::<(), _>(Error::TimedOut))));
    assert_matches!(run_out, Err(Error::TimedOut));
    assert_after_drop("an error releases it", || in_flight(admin) == 0);

    let panicked = catch_unwind(AssertUnwindSafe(|| {
        wait(ONE.with(&pool, work!(|_permit| panics())))
    }));
    assert!(panicked.is_err());
    assert_after_drop("a panic releases it", || in_flight(admin) == 0);

    let _held = taken(&ONE, &pool);
    let admission = wait(ONE.try_acquire(&pool)).unwrap();
    let run_out = wait(admission.run(work!(|_permit| Ok::<_, Error>(7)))).unwrap();
    assert!(run_out.is_full());
}

#[test]
fn work_that_outlasts_its_permit_is_an_error() {
    let database = installed();
    let pool = pool(&database, 2);
    let admin = &mut database.connect();
    let outcome = wait(ONE.with(
        &pool,
        work!(|_permit| {
            let expire =
                "UPDATE resource_control.service_request SET expires_at = clock_timestamp()";
            run(&mut database.connect(), expire);
            Ok::<_, Error>(7)
        }),
    ));
    assert_matches!(outcome, Err(Error::PermitLost(_)));
    assert_eq!(in_flight(admin), 0);
}

#[test]
fn a_permit_is_released_from_another_thread() {
    let database = installed();
    let pool = pool(&database, 1);
    let permit = taken(&ONE, &pool);
    std::thread::spawn(move || drop(permit)).join().unwrap();
    assert_after_drop("it is released", || in_flight(&mut database.connect()) == 0);
}

#[test]
fn a_permit_expires_for_its_holder_before_it_expires_in_the_database() {
    let database = installed();
    let pool = pool(&database, 1);
    for (timeout, margin) in [(MINUTE, 1000), (Duration::from_secs(8), 800)] {
        let semaphore = Semaphore::named("believes", 1, timeout);
        let permit = taken(&semaphore, &pool);
        assert!(permit.remaining() <= timeout - Duration::from_millis(margin));
        wait(permit.release()).unwrap();
    }
}

#[test]
fn a_renewal_extends_a_permit() {
    let database = installed();
    let pool = pool(&database, 1);
    let permit = taken(&ONE, &pool);
    // Repeated, because a renewal may take longer than the permit has existed.
    eventually("a renewal has lengthened it", || {
        let before = permit.remaining();
        wait(permit.renew()).unwrap();
        permit.remaining() > before
    });
}

/// The holder of a lost permit has stopped, so a longer request would only keep the slot from
/// others.
#[test]
fn a_lost_permit_is_not_renewed() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    let admin = &mut database.connect();
    let short = Semaphore::named("short", 1, Duration::from_millis(300));
    let permit = taken(&short, &pool);
    // The request has not expired in the database, which would still renew it.
    run(
        admin,
        "UPDATE resource_control.service_request SET expires_at = expires_at + interval '1 hour'",
    );
    let expiry =
        "(SELECT date_part('epoch', expires_at) * 1000000 FROM resource_control.service_request)";
    let before = number(admin, expiry);
    eventually("the permit has expired", || permit.remaining().is_zero());
    let sent = proxy.count(|| {
        for _ in 0..2 {
            assert_matches!(wait(permit.renew()), Err(Error::PermitLost(_)));
        }
    });
    assert_eq!((sent, number(admin, expiry)), (0, before));
    drop(permit);
    eventually("the slot is free", || in_flight(admin) == 0);
}

#[test]
fn permits_that_are_dropped_while_the_pool_is_exhausted_are_released_later() {
    let database = installed();
    let pool = pool(&database, 1);
    let admin = &mut database.connect();
    let many = Semaphore::named("many", 100, MINUTE);
    let permits: Vec<_> = (0..100).map(|_| taken(&many, &pool)).collect();
    on_one(&pool, |_| {
        drop(permits);
        assert_eq!(in_flight(admin), 100);
    });
    eventually("the slots are free", || in_flight(admin) == 0);
    wait(taken(&many, &pool).release()).unwrap();
}

#[test]
fn a_release_gets_through_a_pool_that_is_never_idle() {
    let database = installed();
    let pool = pool(&database, 1);
    let admin = &mut database.connect();
    let permit = taken(&ONE, &pool);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    wait(on_first(&pool, "SELECT pg_sleep(0.005)")).unwrap();
                    if IS_ASYNC {
                        // bb8 serves a caller that returns at once before those that wait:
                        // https://github.com/djc/bb8/issues/243
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
        drop(permit);
        eventually("the slot is free", || in_flight(admin) == 0);
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_release_waits_for_a_server_that_is_down() {
    let cluster = Cluster::start();
    let database = cluster.database();
    install(&mut database.connect());
    let pool = make_pool(&database.url(), 2, Duration::from_secs(2));
    let [dropped, released] = [ONE, ONE.key(7)].map(|one| {
        let admission = patiently(|| wait(one.try_acquire(&pool)));
        admission.admitted().expect("a slot is free")
    });
    cluster.stop(StopMode::Immediate);
    drop(dropped);
    let error = wait(released.release()).unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    cluster.start_again();
    let admin = &mut database.connect();
    eventually("both slots are free", || in_flight(admin) == 0);
}

#[test]
fn a_release_over_a_severed_connection_is_repeated_over_another() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    let permit = taken(&ONE, &pool);
    proxy.sever();
    drop(permit);
    let admin = &mut database.connect();
    eventually("the slot is free", || in_flight(admin) == 0);
}

#[test]
fn on_a_connection_with_an_open_transaction_a_claim_is_refused_and_a_release_is_repeated() {
    if IS_ASYNC {
        return; // diesel-async does not see it
    }
    let database = installed();
    let pool = pool(&database, 1);
    wait(on_first(&pool, "BEGIN")).unwrap();
    assert_matches!(wait(ONE.try_acquire(&pool)), Err(Error::DirtyConnection));
    let mut observer = Observer::of(&database);
    eventually("the session has ended", || observer.in_transaction() == 0);
    let permit = taken(&ONE, &pool);
    wait(on_first(&pool, "BEGIN")).unwrap();
    drop(permit);
    eventually("the slot is free", || {
        in_flight(&mut database.connect()) == 0
    });
}
