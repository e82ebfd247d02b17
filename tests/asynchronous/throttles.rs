//! Attempts, synchronizations and passes of fences whose futures are dropped.

use std::time::Duration;

use crate::half::{Throttle, execute, on_one, polled, pool, throttled_resources, wait};
use crate::support::{assert_pool_whole, installed, run};

const HOUR: Duration = Duration::from_secs(3600);

static REBUILD: Throttle = Throttle::named("rebuild", HOUR);

throttled_resources! {
    enum Resource {
        Newsletter = "newsletter" every HOUR,
        Import = "import" every HOUR,
    }
}

/// A dropped attempt may have been granted to nobody.
#[test]
fn an_attempt_that_is_dropped_at_any_poll_is_granted_once_at_most() {
    let database = installed();
    for size in [1, 4] {
        let pool = pool(&database, size);
        let synced = wait(Throttle::sync::<Resource>(&pool)).unwrap();
        assert!(synced.different.is_empty());
        let due = "DELETE FROM resource_control.throttle;
            UPDATE resource_control.throttled_resource SET last_locked = '-infinity', last_locker_details = ''";
        for level in ["read committed", "serializable"] {
            let default = format!("SET default_transaction_isolation = '{level}'");
            for throttle in [
                REBUILD.key("new"),
                Throttle::of(Resource::Newsletter),
                Throttle::of(Resource::Newsletter).key("new"),
            ] {
                for polls in 0.. {
                    run(&mut database.connect(), due);
                    on_one(&pool, |conn| wait(execute(conn, &default)).unwrap());
                    let (dropped, other) = wait(async {
                        // Both attempts are polled concurrently, so that they race.
                        tokio::join!(
                            polled(polls, throttle.attempt(&pool)),
                            throttle.attempt(&pool)
                        )
                    });
                    let is_delivered = dropped.is_some();
                    let dropped = dropped.is_some_and(|decision| decision.unwrap().is_granted());
                    let granted = usize::from(dropped) + usize::from(other.unwrap().is_granted());
                    let later = wait(throttle.attempt(&pool)).unwrap().is_granted();
                    assert!(granted + usize::from(later) <= 1, "{throttle:?} at {polls}");
                    assert!(wait(throttle.attempt(&pool)).unwrap().is_denied());
                    // After one or two polls a fast server may already have replied.
                    if is_delivered && polls > 2 {
                        break;
                    }
                }
            }
        }
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_synchronization_that_is_dropped_at_any_poll_can_be_repeated() {
    let database = installed();
    let pool = pool(&database, 1);
    let undo = "DELETE FROM resource_control.throttled_resource";
    for polls in 0.. {
        let dropped = wait(polled(polls, Throttle::sync::<Resource>(&pool)));
        wait(Throttle::sync::<Resource>(&pool)).unwrap().added.len();
        let again = wait(Throttle::sync::<Resource>(&pool)).unwrap();
        assert_eq!(again, Default::default());
        if let Some(synced) = dropped {
            assert_eq!(synced.unwrap().added.len(), 2);
            break;
        }
        run(&mut database.connect(), undo);
    }
    assert_pool_whole(&pool, &database);
}

/// The effect of a dropped pass is committed or rolled back with the caller's transaction.
#[test]
fn a_pass_that_is_dropped_counts_only_if_the_transaction_commits() {
    use crate::half::{Fence, begin, end};
    let database = installed();
    let pool = pool(&database, 1);
    let fence = Fence::named("rows");
    for polls in 0.. {
        let is_passed = on_one(&pool, |conn| {
            begin(conn);
            let passed = wait(polled(polls, fence.pass(conn, 10 + polls as i64)));
            end(conn);
            begin(conn);
            wait(fence.pass(conn, 1)).unwrap();
            end(conn);
            passed.is_some()
        });
        if is_passed {
            break;
        }
    }
    assert_pool_whole(&pool, &database);
}
