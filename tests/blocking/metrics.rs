//! Counters and gauges of leaders and schedules in the blocking half.
#![cfg(feature = "testing")] // whose terms and leases may be short

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use diesel_interlock::schedule::RunDue;
use diesel_interlock::testing::{depose, make_tick_due};

use crate::half::*;
use crate::support::exporter::{Metrics, exported};
use crate::support::{eventually, hourly, installed};

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_leader_counts_its_elections_and_how_its_terms_end() {
    const METRICS: Metrics = Metrics("counted leader");
    // A term long enough not to be lost on a slow machine.
    static LEADER: Leader = Leader::named("counted leader", Duration::from_secs(12));
    let _ = exported();
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let (stop, mut terms) = (Stop::new(), 0);
    LEADER
        .lead(&pool, &stop, |term| {
            assert_eq!((METRICS.held(), METRICS.waiting()), (1.0, 0.0));
            terms += 1;
            if terms == 1 {
                assert!(depose(&LEADER, &other).unwrap());
                assert!(!term.pause(Duration::MAX));
                eventually("the loss is counted while the work continues", || {
                    METRICS.lost() == 1.0
                });
                assert_eq!(METRICS.held(), 0.0);
            } else {
                stop.stop();
            }
        })
        .unwrap();
    assert_eq!(
        ["elected", "deposed", "resigned", "stopped"].map(|outcome| METRICS.operations(outcome)),
        [2.0, 1.0, 1.0, 1.0]
    );
    assert_eq!((METRICS.held(), METRICS.waiting()), (0.0, 0.0));
    assert_eq!((METRICS.lost(), METRICS.holdings()), (1.0, 2.0));
}

#[test]
fn a_schedule_counts_how_its_runs_end() {
    const METRICS: Metrics = Metrics("counted schedule");
    static REPORT: Schedule = Schedule::named("counted schedule").after_crash(HOUR, 3);
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 3);
    let run = |outcome: Result<(), &'static str>| {
        REPORT.run_due(&pool, hourly, move |_| {
            assert_eq!(METRICS.held(), 1.0);
            assert_ne!(outcome, Err("a panic"));
            outcome
        })
    };
    assert!(matches!(run(Ok(())).unwrap(), RunDue::Later(_)));
    for outcome in [Ok(()), Err("an error"), Ok(())] {
        assert!(make_tick_due(&REPORT, &pool, HOUR).unwrap());
        assert_eq!(run(outcome).unwrap(), RunDue::Ran);
        assert_eq!(METRICS.held(), 0.0);
    }
    assert!(make_tick_due(&REPORT, &pool, HOUR).unwrap());
    catch_unwind(AssertUnwindSafe(|| run(Err("a panic")))).unwrap_err();
    assert_eq!(METRICS.held(), 0.0);
    assert_eq!(
        ["done", "failed", "crashed"].map(|outcome| METRICS.operations(outcome)),
        [2.0, 1.0, 1.0]
    );
    assert_eq!((METRICS.holdings(), METRICS.lost()), (4.0, 0.0));
}
