//! During an outage of the database, an error that no caller gets is logged, once for each outage.
#![cfg(feature = "testing")] // whose leases may be short

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use diesel::PgConnection;

use crate::assert_matches;
use crate::half::schedule::every;
use crate::half::*;
use crate::support::log::Log;
use crate::support::{
    LEASE, eventually, fresh, impatient_pool, installed, once_at_least, patiently, run,
};

const HOUR: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_millis(100);

fn nothing() -> Result<()> {
    Ok(())
}

#[test]
fn an_error_that_is_returned_is_not_logged_as_a_warning() {
    const NAME: &str = "away, and returned";
    let log = Log::of(NAME);
    let database = installed();
    let pool = impatient_pool(&database, SOON);
    let semaphore = Semaphore::named(NAME, 1, HOUR);
    let schedule = Schedule::named(NAME);
    let permit = patiently(|| wait(semaphore.acquire(&pool)));
    on_one(&pool, |_| {
        let lock = AdvisoryLock::named(NAME);
        let limit = RateLimit::named(NAME, Quota::per_day(1));
        for _ in 0..3 {
            for failed in [
                wait(lock.try_acquire(&pool)).map(drop),
                wait(lock.acquire_timeout(&pool, 2 * SOON)).map(drop),
                wait(Throttle::named(NAME, HOUR).attempt(&pool)).map(drop),
                wait(limit.check(&pool)).map(drop),
                wait(limit.acquire_timeout(&pool, 2 * SOON)).map(drop),
                wait(limit.local(pool.clone(), 1).check("7")).map(drop),
                wait(semaphore.try_acquire(&pool)).map(drop),
                wait(semaphore.acquire_timeout(&pool, 2 * SOON)).map(drop),
                wait(semaphore.complete(&pool, 1)).map(drop),
                wait(permit.renew()),
                wait(schedule.run_due(&pool, every(HOUR), work!(|_tick| nothing()))).map(drop),
            ] {
                assert_matches!(failed, Err(_));
            }
        }
        assert_matches!(wait(permit.release()), Err(Error::Pool(_)));
    });
    assert_eq!(log.warnings(), [""; 0]);
    for operation in ["try_acquire", "attempt", "check", "local", "renew", "run"] {
        assert!(
            log.count(&format!("{operation}: failed")) >= 3,
            "{operation}"
        );
    }
    assert_eq!(log.count("release: failed"), 1);
}

/// An outage for elections: their table is gone, and comes back.
const AWAY: &str = "ALTER TABLE resource_control.service_request RENAME TO elsewhere";
const THERE: &str = "ALTER TABLE resource_control.elsewhere RENAME TO service_request";

/// A pause of the machine may also end such a short term, or fail a try, so rounds are repeated.
#[test]
fn an_election_logs_one_warning_for_each_outage() {
    let database = installed();
    let (pool, conn) = (pool(&database, 2), &mut database.connect());
    once_at_least(
        "two outages and the loss of the term between them are logged",
        || {
            let name = fresh("away, and stands again");
            let log = Log::of(name);
            let leader = Leader::named(name, Duration::from_millis(600));
            let terms = AtomicU64::new(0);
            let elected = |_| {
                terms.fetch_add(1, Ordering::SeqCst);
            };
            let fails = |more| {
                let before = log.count("lead: failed");
                eventually("several tries have failed", || {
                    log.count("lead: failed") >= before + more
                });
            };
            run(conn, AWAY);
            while_it_leads(&leader, &pool, elected, || {
                fails(4);
                run(conn, THERE);
                eventually("the instance leads", || terms.load(Ordering::SeqCst) > 0);

                // The term ends, and the instance is a candidate again.
                run(conn, AWAY);
                fails(4);
                run(conn, THERE);
                eventually("the instance leads again", || {
                    terms.load(Ordering::SeqCst) > 1
                });
            });
            let warnings = log.warnings();
            let is_of_a_term = |warning: &str| warning.ends_with(": deposed");
            matches!(&warnings[..], [first, term, second]
            if first == "lead: failed" && is_of_a_term(term) && second == "lead: failed")
        },
    );
}

/// A pause of the machine may also fail a look, which is logged as another outage, so rounds are
/// repeated.
#[test]
fn a_schedule_logs_one_warning_for_each_outage() {
    let database = installed();
    let (pool, conn) = (pool(&database, 2), &mut database.connect());
    once_at_least("two outages are logged", || {
        let name = fresh("away, and looks again");
        let log = Log::of(name);
        let schedule = Schedule::named(name);
        // Each run pauses the schedule, so that the next tick runs only when the test resumes it.
        let runs = AtomicUsize::new(0);
        let pauses = Mutex::new(database.connect());
        let next = every(Duration::from_millis(200));
        let work = |_| {
            run(
                &mut pauses.lock().unwrap(),
                "UPDATE resource_control.schedule SET paused_at = clock_timestamp()",
            );
            runs.fetch_add(1, Ordering::SeqCst);
            false
        };
        let runs_well = |conn: &mut PgConnection, times| {
            run(
                conn,
                "UPDATE resource_control.schedule SET paused_at = NULL",
            );
            eventually("the schedule has run", || log.count("run: done") == times);
            assert_eq!(runs.load(Ordering::SeqCst), times);
        };
        let mut warnings = Vec::new();
        while_it_runs(&schedule, &pool, &next, &work, || {
            for times in 1..=2 {
                runs_well(conn, times);
                run(
                    conn,
                    "ALTER TABLE resource_control.schedule RENAME TO elsewhere",
                );
                eventually("several tries have failed", || {
                    log.count("run: failed") >= 3 * times
                });
                warnings.push(log.warnings().len());
                run(
                    conn,
                    "ALTER TABLE resource_control.elsewhere RENAME TO schedule",
                );
            }
            runs_well(conn, 3);
        });
        warnings == [1, 2] && log.warnings() == ["run: failed"; 2]
    });
}

#[test]
fn the_losses_of_a_run_and_of_a_permit_are_logged_once_each() {
    const SCHEDULE: &str = "a lost run";
    const PERMIT: &str = "a lost permit";
    let [of_schedule, of_permit] = [SCHEDULE, PERMIT].map(Log::of);
    let database = installed();
    let (pool, conn) = (pool(&database, 4), &mut database.connect());
    // The first renewals, which notice the losses, come after four seconds.
    let schedule = Schedule::named(SCHEDULE).after_crash(LEASE, 3);
    let semaphore = Semaphore::named(PERMIT, 1, LEASE).keep_alive();
    let attempts = AtomicUsize::new(0);
    let work = |attempt| {
        // The first run lasts until its lease is lost.
        attempts.fetch_max(attempt, Ordering::SeqCst) == 0
    };
    let permit = wait(semaphore.acquire(&pool)).unwrap();
    let next = every(Duration::from_millis(200));
    while_it_runs(&schedule, &pool, &next, &work, || {
        eventually("the first attempt runs", || {
            attempts.load(Ordering::SeqCst) == 1
        });
        run(
            conn,
            "UPDATE resource_control.schedule SET expires_at = clock_timestamp();
            UPDATE resource_control.service_request SET expires_at = clock_timestamp()",
        );
        eventually("the second attempt runs", || {
            attempts.load(Ordering::SeqCst) == 2
        });
    });
    assert!(wait(permit.wait_for_loss(HOUR)) && permit.is_lost());
    assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
    assert_eq!(of_permit.warnings().len(), 1, "{:?}", of_permit.warnings());
    assert!(of_permit.warnings()[0].ends_with(": lost"));
    let of_schedule = of_schedule.warnings();
    assert_eq!(of_schedule.len(), 1, "{of_schedule:?}");
    assert!(of_schedule[0].ends_with(": lost"));
}

/// Otherwise each of them would wait for the timeout of the pool in turn. A caller that comes after
/// the failure asks for itself, so rounds are repeated.
#[test]
fn callers_that_wait_for_a_chunk_in_an_outage_do_not_ask_for_themselves() {
    let database = installed();
    let pool = make_pool(&database.url(), 1, Duration::from_secs(2));
    once_at_least("one of eight callers asks the database", || {
        let name = fresh("away, and asked once");
        let log = Log::of(name);
        let local = RateLimit::named(name, Quota::per_day(100)).local(pool.clone(), 10);
        let start = Barrier::new(8);
        on_one(&pool, |_| {
            thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        start.wait();
                        assert_matches!(wait(local.check("7")), Err(Error::Pool(_)));
                    });
                }
            });
        });
        assert!(patiently(|| wait(local.check("7"))).is_allowed());
        log.count("local: failed") == 1
    });
}
