//! The loss of a permit or a run is counted once as a loss, wherever it is noticed first.
#![cfg(feature = "testing")] // whose leases may be short

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use diesel_interlock::testing::{expire, make_tick_due};
use workbench::{Database, RoundTrips};

use crate::assert_matches;
use crate::half::schedule::RunDue;
use crate::half::*;
use crate::support::exporter::{Metrics, exported};
use crate::support::{
    IN_FLIGHT, LEASE, eventually, fresh, hourly, installed, number, once_at_least, run,
};

const SHORT: Duration = Duration::from_millis(300);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const EXPIRE: &str = "UPDATE resource_control.schedule SET expires_at = clock_timestamp()";

/// Takes the slot of this name, lets `loses` lose it, and asserts that the loss is counted once.
#[track_caller]
fn is_counted_once(
    name: &'static str,
    pool: &PgPool,
    timeout: Duration,
    loses: impl FnOnce(&Semaphore, Permit),
) {
    let (metrics, semaphore) = (Metrics(name), Semaphore::named(name, 1, timeout));
    let admission = wait(semaphore.try_acquire(pool)).unwrap();
    let permit = admission.admitted().expect("the slot is free");
    assert_eq!((metrics.held(), metrics.lost()), (1.0, 0.0));
    loses(&semaphore, permit);
    eventually("the loss is counted", || metrics.lost() == 1.0);
    let others = Semaphore::named(name, 1, HOUR);
    eventually("the slot is free", || {
        wait(others.try_acquire(pool)).unwrap().is_admitted()
    });
    eventually("nothing is held", || metrics.held() == 0.0);
    assert_eq!(metrics.lost(), 1.0);
    assert_eq!(metrics.operations("lost"), 1.0);
    // The permits that were taken just above are counted as released.
    eventually("all ends are counted", || {
        metrics.holdings() == metrics.operations("admitted")
            && metrics.operations("released") == metrics.operations("admitted") - 1.0
    });
}

/// Waits until the permit has expired. `remaining` does not notice the loss, as `is_lost` would.
fn outlast(permit: &Permit) {
    eventually("the permit has expired", || permit.remaining().is_zero());
}

#[test]
fn an_expired_permit_is_counted_as_lost_once() {
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    is_counted_once("lost, and noticed when asked", &pool, SHORT, |_, permit| {
        outlast(&permit);
        assert!(permit.is_lost() && permit.is_lost());
    });
    is_counted_once("lost, and noticed in a wait", &pool, SHORT, |_, permit| {
        assert!(wait(permit.wait_for_loss(MINUTE)));
        assert_matches!(wait(permit.renew()), Err(Error::PermitLost(_)));
        assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
    });
    is_counted_once(
        "lost, and noticed in its drop",
        &pool,
        SHORT,
        |_, permit| {
            outlast(&permit);
            drop(permit);
        },
    );
    is_counted_once(
        "lost, and noticed in its release",
        &pool,
        SHORT,
        |_, permit| {
            outlast(&permit);
            assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
        },
    );
    is_counted_once("lost, and noticed at its end", &pool, SHORT, |_, permit| {
        outlast(&permit);
        permit.detach();
    });
    is_counted_once("lost in a panic", &pool, SHORT, |_, permit| {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            outlast(&permit);
            let _permit = permit;
            panic!("the work");
        }));
        assert!(panicked.is_err());
    });
}

#[test]
fn a_permit_whose_request_was_ended_is_counted_as_lost_once() {
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    let ends = |semaphore: &Semaphore, permit: &Permit| {
        assert!(wait(semaphore.complete(&pool, permit.fencing_token())).unwrap());
    };
    is_counted_once(
        "ended before its drop",
        &pool,
        MINUTE,
        |semaphore, permit| {
            ends(semaphore, &permit);
            drop(permit);
        },
    );
    is_counted_once(
        "ended before its release",
        &pool,
        MINUTE,
        |semaphore, permit| {
            ends(semaphore, &permit);
            assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
        },
    );
    is_counted_once(
        "expired before its release",
        &pool,
        MINUTE,
        |semaphore, permit| {
            assert_eq!(wait(expire(semaphore, &pool)).unwrap(), 1);
            assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
        },
    );
    is_counted_once(
        "ended before a renewal",
        &pool,
        MINUTE,
        |semaphore, permit| {
            ends(semaphore, &permit);
            assert_matches!(wait(permit.renew()), Err(Error::PermitLost(_)));
            assert!(permit.is_lost());
            drop(permit);
        },
    );
}

#[test]
fn a_kept_permit_that_is_lost_is_counted_as_lost_once() {
    let _ = exported();
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let (whole, cut) = (
        pool(&database, 2),
        make_pool(&proxy.url(), 2, Duration::from_secs(20)),
    );
    // The short lease may be lost before the network is cut, and is then counted once, too.
    for (name, lease, is_cut) in [
        ("kept and ended", LEASE, false),
        ("kept and cut off", Duration::from_millis(600), true),
    ] {
        let metrics = Metrics(name);
        let semaphore = Semaphore::named(name, 1, lease).keep_alive();
        let permit = wait(semaphore.acquire(&cut)).unwrap();
        if is_cut {
            proxy.cut();
            if !IS_ASYNC {
                // The thread that renews hangs on the network, so only a question notices the loss.
                assert!(wait(permit.wait_for_loss(MINUTE)));
            }
        } else {
            assert!(wait(semaphore.complete(&whole, permit.fencing_token())).unwrap());
        }
        eventually("the loss is counted", || metrics.lost() == 1.0);
        assert_eq!(metrics.held(), 0.0);
        assert!(permit.is_lost());
        proxy.restore();
        assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
        assert_eq!(
            (
                metrics.lost(),
                metrics.operations("lost"),
                metrics.holdings()
            ),
            (1.0, 1.0, 1.0)
        );
    }
}

#[test]
fn a_run_that_has_lost_its_lease_is_counted_as_lost_once() {
    let _ = exported();
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 2, Duration::from_secs(20));
    for is_cut in [false, true] {
        // On a slow machine the lease may be lost before the work begins.
        once_at_least("the lease is lost during the work", || {
            let name = fresh("a lost run");
            let metrics = Metrics(name);
            let schedule = Schedule::named(name);
            let look = wait(schedule.run_due(&pool, hourly, work!(|_tick| Ok::<_, Error>(()))));
            assert_matches!(look.unwrap(), RunDue::Later(_));
            assert!(wait(make_tick_due(&schedule, &pool, HOUR)).unwrap());
            let mut is_held = false;
            let ran = wait(schedule.after_crash(Duration::from_secs(2), 3).run_due(
                &pool,
                hourly,
                work!(|tick| {
                    is_held = (metrics.held(), metrics.lost()) == (1.0, 0.0);
                    if is_cut {
                        proxy.cut();
                    } else {
                        run(&mut database.connect(), EXPIRE);
                    }
                    assert!(reply!(tick.wait_for_loss(MINUTE)));
                    Ok::<_, Error>(())
                }),
            ));
            proxy.restore();
            if !is_held {
                return false;
            }
            assert_matches!(ran, Err(Error::PermitLost(_)));
            // The thread that renews may count the loss a moment later.
            eventually("the loss is counted", || metrics.lost() == 1.0);
            let lost = (
                metrics.lost(),
                metrics.operations("lost"),
                metrics.holdings(),
            );
            assert_eq!(lost, (1.0, 1.0, 1.0));
            assert_eq!((metrics.held(), metrics.operations("done")), (0.0, 0.0));
            true
        });
    }
}

/// Makes each claim of a term and of a tick last longer than its lease, and counts them.
const SLOW_CLAIMS: &str = "
    CREATE SEQUENCE claims;
    CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM pg_sleep(0.4), nextval('public.claims');
        RETURN NEW;
    END $$;
    CREATE TRIGGER slow BEFORE INSERT ON resource_control.service_request FOR EACH ROW
        EXECUTE FUNCTION slow();
    CREATE TRIGGER slow BEFORE UPDATE ON resource_control.schedule FOR EACH ROW
        WHEN (NEW.token <> OLD.token) EXECUTE FUNCTION slow()";

/// Asserts that none of several claims that came too late counts as an end of something.
fn assert_nothing_was_held(database: &Database, metrics: &Metrics, loops: impl FnOnce(&dyn Fn())) {
    let claims = || number(&mut database.connect(), "(SELECT last_value FROM claims)");
    let before = claims();
    loops(&|| eventually("several claims were too late", || claims() > before + 3));
    eventually("nothing is held", || metrics.held() == 0.0);
    let outcomes = [
        "elected",
        "resigned",
        "deposed",
        "released",
        "lost",
        "done",
        "given back",
    ];
    let counted = outcomes.map(|outcome| metrics.operations(outcome));
    assert_eq!(counted, [0.0; 7], "{outcomes:?}");
    assert_eq!((metrics.lost(), metrics.holdings()), (0.0, 0.0));
}

#[test]
fn a_term_or_run_that_is_granted_too_late_is_neither_won_nor_lost() {
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 4);
    let (leader, schedule) = (
        Leader::named("late", SHORT),
        Schedule::named("late run").after_crash(SHORT, 1000),
    );
    // A look has as much time as its lease.
    let patient = Schedule::named("late run");
    let register = patient.run_due(&pool, hourly, work!(|_tick| Ok::<_, Error>(())));
    assert_matches!(wait(register), Ok(RunDue::Later(_)));
    assert!(wait(make_tick_due(&schedule, &pool, HOUR)).unwrap());
    run(&mut database.connect(), SLOW_CLAIMS);

    assert_nothing_was_held(&database, &Metrics("late"), |several| {
        while_it_leads(
            &leader,
            &pool,
            |_| panic!("the work of a term that was granted too late runs"),
            several,
        );
    });
    eventually("all slots are free", || {
        number(&mut database.connect(), IN_FLIGHT) == 0
    });
    assert_nothing_was_held(&database, &Metrics("late run"), |several| {
        while_it_runs(
            &schedule,
            &pool,
            &hourly,
            &|_| panic!("the work of a run that was granted too late runs"),
            several,
        );
    });
}
