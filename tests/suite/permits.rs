//! The ways out of a permit: releases, drops, errors, panics, and a pool or a server that is away meanwhile.

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
fn work_is_done_under_a_permit_that_every_way_out_releases() {
    let database = installed();
    let pool = pool(&database, 1);
    let look = &mut database.connect();
    let value = wait(ONE.with(
        &pool,
        work!(|permit| {
            assert!(permit.fencing_token() > 0);
            Ok::<_, Error>(7)
        }),
    ));
    assert_eq!(value.unwrap(), 7);
    assert_eq!(in_flight(look), 0);

    let admission = wait(ONE.try_acquire(&pool)).unwrap();
    let run_out = wait(admission.run(work!(|_permit| Err::<(), _>(Error::TimedOut))));
    assert_matches!(run_out, Err(Error::TimedOut));
    assert_after_drop("an error releases it", || in_flight(look) == 0);

    let panicked = catch_unwind(AssertUnwindSafe(|| {
        wait(ONE.with(&pool, work!(|_permit| panics())))
    }));
    assert!(panicked.is_err());
    assert_after_drop("a panic releases it", || in_flight(look) == 0);

    let _held = taken(&ONE, &pool);
    let admission = wait(ONE.try_acquire(&pool)).unwrap();
    let run_out = wait(admission.run(work!(|_permit| Ok::<_, Error>(7)))).unwrap();
    assert!(run_out.is_full());
}

#[test]
fn work_that_outlasted_its_permit_is_an_error() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
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
    assert_eq!(in_flight(look), 0);
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
fn a_permit_believes_in_its_slot_for_less_long_than_the_database() {
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
fn a_renewal_lets_a_permit_remain_longer() {
    let database = installed();
    let pool = pool(&database, 1);
    let permit = taken(&ONE, &pool);
    // Unless the renewal takes longer than the permit is old.
    eventually("a renewal has lengthened it", || {
        let before = permit.remaining();
        wait(permit.renew()).unwrap();
        permit.remaining() > before
    });
}

/// Nobody else could have the slot, for nothing.
#[test]
fn a_permit_that_is_lost_is_not_extended() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    let look = &mut database.connect();
    let short = Semaphore::named("short", 1, Duration::from_millis(300));
    let permit = taken(&short, &pool);
    // So that the database would renew it.
    run(
        look,
        "UPDATE resource_control.service_request SET expires_at = expires_at + interval '1 hour'",
    );
    let expiry =
        "(SELECT date_part('epoch', expires_at) * 1000000 FROM resource_control.service_request)";
    let before = number(look, expiry);
    eventually("its time is over", || permit.remaining().is_zero());
    let sent = proxy.count(|| {
        for _ in 0..2 {
            assert_matches!(wait(permit.renew()), Err(Error::PermitLost(_)));
        }
    });
    assert_eq!((sent, number(look, expiry)), (0, before));
    drop(permit);
    eventually("it is released", || in_flight(look) == 0);
}

#[test]
fn permits_that_are_dropped_while_the_pool_is_exhausted_are_released_later() {
    let database = installed();
    let pool = pool(&database, 1);
    let look = &mut database.connect();
    let many = Semaphore::named("many", 100, MINUTE);
    let permits: Vec<_> = (0..100).map(|_| taken(&many, &pool)).collect();
    on_one(&pool, |_| {
        drop(permits);
        assert_eq!(in_flight(look), 100);
    });
    eventually("they are released", || in_flight(look) == 0);
    wait(taken(&many, &pool).release()).unwrap();
}

#[test]
fn a_release_gets_through_a_pool_that_is_never_idle() {
    let database = installed();
    let pool = pool(&database, 1);
    let look = &mut database.connect();
    let permit = taken(&ONE, &pool);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    wait(on_first(&pool, "SELECT pg_sleep(0.005)")).unwrap();
                    if IS_ASYNC {
                        // bb8 serves a caller that comes again at once before those that wait.
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
        drop(permit);
        eventually("it is released", || in_flight(look) == 0);
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
    let look = &mut database.connect();
    eventually("both are released", || in_flight(look) == 0);
}

#[test]
fn a_release_follows_where_the_network_was_severed() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    let permit = taken(&ONE, &pool);
    proxy.sever();
    drop(permit);
    let look = &mut database.connect();
    eventually("it is released", || in_flight(look) == 0);
}

#[test]
fn what_is_done_on_a_connection_with_a_transaction_left_open_does_not_count() {
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
    eventually("it is released", || in_flight(&mut database.connect()) == 0);
}
