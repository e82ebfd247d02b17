//! The exporter's counters and gauges agree with the operations.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, Attempt, Error, Fence, IS_ASYNC, Quota, RateLimit, Semaphore, Throttle, begin,
    end, execute, on_one, pool, wait,
};
use crate::support::exporter::{Metrics, exported};
use crate::support::{
    Observer, assert_after_drop, eventually, foreign_holder, fresh, installed, once_at_least,
};

#[cfg(feature = "testing")]
const HOUR: Duration = Duration::from_secs(3600);

/// A drop waits two seconds for its reply, and then counts as failed, so rounds are repeated on a
/// machine that pauses.
#[test]
fn locks_are_counted_by_outcome() {
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 3);
    once_at_least("all outcomes are counted", || {
        let name = fresh("counted lock");
        let (metrics, lock) = (Metrics(name), AdvisoryLock::named(name));
        for _ in 0..3 {
            let guard = wait(lock.acquire(&pool)).unwrap();
            let began = Instant::now();
            assert_eq!(metrics.held(), 1.0);
            let before = metrics.held_seconds();
            for _ in 0..2 {
                assert!(wait(lock.try_acquire(&pool)).unwrap().is_busy());
            }
            let held = began.elapsed();
            wait(guard.release()).unwrap();
            assert_eq!(metrics.held(), 0.0);
            assert!(metrics.held_seconds() - before >= held.as_secs_f64());
        }
        let holder = foreign_holder(&database, lock.lock_key());
        let waited = wait(lock.acquire_timeout(&pool, Duration::from_secs(1)));
        assert_matches!(waited, Ok(Attempt::Busy) | Err(Error::TimedOut));
        drop(holder);
        eventually("the lock is free", || {
            Observer::of(&database).holders(lock.lock_key()) == 0
        });
        let shared = lock.shared();
        let readers: Vec<_> = (0..2)
            .map(|_| wait(shared.try_acquire(&pool)).unwrap().acquired().unwrap())
            .collect();
        assert_eq!(metrics.held(), 2.0);
        drop(readers);
        assert_after_drop("both ends are counted", || metrics.holdings() == 5.0);
        assert_after_drop("nothing is held", || metrics.held() == 0.0);
        assert_eq!(metrics.operations("acquired"), 5.0);
        assert_eq!(metrics.waits(), 4.0, "a try does not wait");
        assert_eq!((metrics.waiting(), metrics.lost()), (0.0, 0.0));
        ["released", "busy", "failed"].map(|outcome| metrics.operations(outcome)) == [5.0, 7.0, 0.0]
    });
}

#[test]
fn all_other_primitives_are_counted_too() {
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    let (throttle, limit, semaphore, fence, lock) = (
        Throttle::named("counted throttle", Duration::from_secs(3600)),
        RateLimit::named("counted limit", Quota::per_day(24).burst(3)),
        Semaphore::named("counted semaphore", 2, Duration::from_secs(3600)),
        Fence::named("counted fence"),
        AdvisoryLock::named("counted in a transaction"),
    );
    for _ in 0..5 {
        let _ = wait(throttle.attempt(&pool)).unwrap();
        let _ = wait(limit.check(&pool)).unwrap();
    }
    let waited = wait(limit.acquire_timeout(&pool, Duration::from_secs(20))).unwrap();
    assert!(!waited.is_allowed());
    let counted = Metrics("counted throttle");
    assert_eq!(
        (counted.operations("granted"), counted.operations("denied")),
        (1.0, 4.0)
    );
    let counted = Metrics("counted limit");
    assert_eq!(
        (counted.operations("allowed"), counted.operations("limited")),
        (3.0, 3.0)
    );
    assert_eq!(counted.waits(), 1.0);

    let permits: Vec<_> = (0..4)
        .filter_map(|_| wait(semaphore.try_acquire(&pool)).unwrap().admitted())
        .collect();
    let counted = Metrics("counted semaphore");
    assert_eq!(counted.held(), 2.0);
    permits
        .into_iter()
        .for_each(|permit| wait(permit.release()).unwrap());
    assert_eq!(
        ["admitted", "full", "released"].map(|outcome| counted.operations(outcome)),
        [2.0, 2.0, 2.0]
    );
    assert_eq!((counted.held(), counted.holdings()), (0.0, 2.0));

    on_one(&pool, |conn| {
        wait(fence.pass(conn, 1)).unwrap_err();
        begin(conn);
        wait(fence.pass(conn, 1)).unwrap();
        wait(lock.acquire_xact(conn)).unwrap();
        end(conn);
    });
    let counted = Metrics("counted fence");
    assert_eq!(
        (counted.operations("passed"), counted.operations("failed")),
        (1.0, 1.0)
    );
    let counted = Metrics("counted in a transaction");
    assert_eq!(
        (counted.operations("acquired"), counted.waits()),
        (1.0, 1.0)
    );
    assert_eq!((counted.held(), counted.waiting()), (0.0, 0.0));
}

#[test]
fn a_local_limit_counts_calls_and_chunks() {
    const METRICS: Metrics = Metrics("counted in memory");
    static LIMIT: RateLimit = RateLimit::named("counted in memory", Quota::per_day(24).burst(10));
    let _ = exported();
    let database = installed();
    let local = LIMIT.local(pool(&database, 1), 5);
    let allowed = (0..17)
        .filter(|_| wait(local.check("a key")).unwrap().is_allowed())
        .count();
    assert_eq!(allowed, 10);
    assert_eq!(METRICS.operations("allowed"), 10.0);
    assert_eq!(METRICS.operations("limited"), 7.0);
    assert_eq!(METRICS.operations("chunk"), 2.0);
    assert_eq!(METRICS.operations("no chunk"), 1.0);
}

/// A drop that does not learn within two seconds that its session has ended counts as failed, so
/// rounds are repeated.
#[test]
fn a_killed_session_is_counted_as_lost() {
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    let mut observer = Observer::of(&database);
    once_at_least("all outcomes are counted", || {
        let name = fresh("killed");
        let (metrics, lock) = (Metrics(name), AdvisoryLock::named(name));
        for _ in 0..2 {
            let guard = wait(lock.acquire(&pool)).unwrap();
            observer.kill(guard.backend_pid());
            assert_matches!(wait(guard.release()), Err(Error::LockLost(_)));
        }
        let guard = wait(lock.acquire(&pool)).unwrap();
        observer.kill(guard.backend_pid());
        drop(guard);
        assert_after_drop("all ends are counted", || metrics.holdings() == 3.0);
        assert_after_drop("nothing is held", || metrics.held() == 0.0);
        assert_eq!(metrics.operations("released"), 0.0);
        (metrics.operations("lost"), metrics.lost()) == (3.0, 3.0)
    });
}

#[test]
fn the_gauge_of_held_locks_falls_on_every_way_out() {
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    // Three of the ways out are drops, so rounds are repeated here, too.
    once_at_least("all outcomes are counted", || {
        let name = fresh("left");
        let (metrics, lock) = (Metrics(name), AdvisoryLock::named(name));
        let failed: Result<(), Error> = wait(lock.with(
            &pool,
            work!(|_conn| {
                assert_eq!(metrics.held(), 1.0);
                Err(Error::TimedOut)
            }),
        ));
        failed.unwrap_err();
        assert_after_drop("after an error", || metrics.held() == 0.0);
        let guard = wait(lock.acquire(&pool)).unwrap();
        catch_unwind(AssertUnwindSafe(move || {
            let _guard = guard;
            panic!("of the work");
        }))
        .unwrap_err();
        assert_after_drop("after a panic", || metrics.held() == 0.0);
        // An open transaction: the connection is discarded.
        let mut guard = wait(lock.acquire(&pool)).unwrap();
        begin(guard.conn());
        assert_matches!(wait(guard.release()), Err(Error::TransactionLeftOpen(_)));
        assert_eq!(metrics.held(), 0.0);
        // An aborted transaction: the release fails, or the transaction is rolled back before it.
        let mut guard = wait(lock.acquire(&pool)).unwrap();
        wait(execute(guard.conn(), "BEGIN")).unwrap();
        wait(execute(guard.conn(), "SELECT 1/0")).unwrap_err();
        drop(guard);
        assert_after_drop("after an abort", || metrics.held() == 0.0);
        // On a connection of the caller.
        on_one(&pool, |conn| {
            let entered = wait(lock.with_on(
                conn,
                work!(|_conn| {
                    assert_eq!(metrics.held(), 1.0);
                    Ok::<_, Error>(())
                }),
            ));
            entered.unwrap();
            assert_eq!(metrics.held(), 0.0);
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                wait(lock.with_on(
                    conn,
                    work!(|_conn| {
                        if metrics.held() == 1.0 {
                            panic!("of the work");
                        }
                        Ok::<_, Error>(())
                    }),
                ))
            }));
            assert!(panicked.is_err());
            assert_eq!(metrics.held(), 0.0);
        });
        assert_after_drop("each end is counted", || metrics.holdings() == 6.0);
        assert_eq!(metrics.operations("acquired"), 6.0);
        assert_eq!(metrics.waiting(), 0.0);
        metrics.operations("failed") == if IS_ASYNC { 1.0 } else { 2.0 }
    });
}

#[test]
fn a_permit_counts_as_held_until_it_is_released_dropped_or_detached() {
    const METRICS: Metrics = Metrics("left permit");
    static SLOTS: Semaphore = Semaphore::named("left permit", 3, Duration::from_secs(3600));
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    let acquire = || wait(SLOTS.acquire(&pool)).unwrap();
    let (released, dropped, detached) = (acquire(), acquire(), acquire());
    assert_eq!(METRICS.held(), 3.0);
    wait(released.renew()).unwrap();
    wait(released.release()).unwrap();
    assert_eq!(METRICS.held(), 2.0);
    let token = detached.detach();
    assert_eq!(METRICS.held(), 1.0);
    drop(dropped);
    assert_eq!(METRICS.held(), 0.0);
    assert!(wait(SLOTS.complete(&pool, token)).unwrap());
    assert_after_drop("all ends are counted", || {
        METRICS.operations("released") == 2.0
    });
    assert_eq!(METRICS.operations("detached"), 1.0);
    assert_eq!(METRICS.operations("renewed"), 1.0);
    assert_eq!(METRICS.operations("in flight"), 1.0);
    assert_eq!((METRICS.holdings(), METRICS.waits()), (3.0, 3.0));
    assert_eq!(METRICS.held(), 0.0);
}

#[cfg(feature = "testing")] // whose timeouts may be short
#[test]
fn a_kept_permit_is_counted_as_lost_once_as_soon_as_the_loss_is_noticed() {
    const METRICS: Metrics = Metrics("lost permit");
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    // The first renewals, which notice the losses, come after four seconds.
    let kept = Semaphore::named("lost permit", 2, crate::support::LEASE).keep_alive();
    let [released, dropped] = [(); 2].map(|()| wait(kept.acquire(&pool)).unwrap());
    for permit in [&released, &dropped] {
        assert!(wait(kept.complete(&pool, permit.fencing_token())).unwrap());
    }
    for permit in [&released, &dropped] {
        assert!(wait(permit.wait_for_loss(Duration::from_secs(60))));
    }
    eventually(
        "the losses are counted before the permits are released",
        || METRICS.lost() == 2.0,
    );
    assert_eq!(METRICS.held(), 0.0);
    wait(released.release()).unwrap_err();
    drop(dropped);
    let next = wait(Semaphore::named("lost permit", 2, HOUR).acquire(&pool)).unwrap();
    assert_eq!(METRICS.held(), 1.0);
    wait(next.release()).unwrap();
    assert_eq!(METRICS.operations("lost"), 2.0);
    assert_eq!(METRICS.operations("released"), 1.0);
    assert_eq!((METRICS.holdings(), METRICS.lost()), (3.0, 2.0));
    assert_eq!(METRICS.held(), 0.0);
}

#[test]
fn the_gauge_of_waiters_counts_each_waiter() {
    const METRICS: Metrics = Metrics("awaited");
    static LOCK: AdvisoryLock = AdvisoryLock::named("awaited");
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 4);
    let holder = foreign_holder(&database, LOCK.lock_key());
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                start.wait();
                wait(LOCK.with(&pool, work!(|_conn| Ok::<_, Error>(())))).unwrap();
            });
        }
        start.wait();
        eventually("three waiters are counted", || METRICS.waiting() == 3.0);
        assert_eq!((METRICS.waits(), METRICS.held()), (0.0, 0.0));
        drop(holder);
    });
    assert_eq!((METRICS.waiting(), METRICS.held()), (0.0, 0.0));
    assert_eq!((METRICS.waits(), METRICS.holdings()), (3.0, 3.0));
}

#[test]
fn a_failed_operation_is_counted_and_raises_no_gauge() {
    const METRICS: Metrics = Metrics("unreachable");
    static LOCK: AdvisoryLock = AdvisoryLock::named("unreachable");
    let _ = exported();
    let url = "postgres://nobody@127.0.0.1:1/nothing";
    let pool = crate::half::make_pool(url, 1, Duration::from_millis(50));
    wait(LOCK.acquire(&pool)).unwrap_err();
    wait(LOCK.try_acquire(&pool)).unwrap_err();
    assert_eq!(METRICS.operations("failed"), 2.0);
    assert_eq!((METRICS.waiting(), METRICS.held()), (0.0, 0.0));
    assert_eq!((METRICS.waits(), METRICS.holdings()), (1.0, 0.0));
}

#[test]
fn keys_are_in_no_label() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("keyed lock");
    static SLOT: Semaphore = Semaphore::named("keyed slot", 1, Duration::from_secs(60));
    static LIMIT: RateLimit = RateLimit::named("keyed limit", Quota::per_second(5));
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    let secret = "s3cr3t";
    let mut guard = wait(LOCK.key(secret).acquire(&pool)).unwrap();
    let token = wait(guard.fencing_token()).unwrap();
    wait(guard.release()).unwrap();
    wait(wait(SLOT.key(secret).acquire(&pool)).unwrap().release()).unwrap();
    let _ = wait(LIMIT.key(secret).check(&pool)).unwrap();
    let _ = wait(LIMIT.local(pool.clone(), 1).check(secret)).unwrap();
    let _ = wait(
        Throttle::named("keyed throttle", Duration::from_secs(1))
            .key(secret)
            .attempt(&pool),
    )
    .unwrap();
    on_one(&pool, |conn| {
        begin(conn);
        wait(Fence::named("keyed fence").key(secret).pass(conn, token)).unwrap();
        end(conn);
    });
    let at_run_time = AdvisoryLock::new(diesel_interlock::LockKey::parts(["tenant", secret]));
    let taken = wait(at_run_time.try_acquire(&pool)).unwrap();
    assert_matches!(taken, Attempt::Acquired(_));
    let exported = exported();
    assert!(!exported.contains(secret), "{exported}");
    for name in ["lock", "slot", "limit", "throttle", "fence"] {
        assert!(
            exported.contains(&format!("name=\"keyed {name}\"")),
            "{exported}"
        );
    }
    assert!(exported.contains("name=\"\""), "{exported}");
    assert!(
        exported.contains("# TYPE interlock_operations_total counter"),
        "{exported}"
    );
    assert!(exported.contains("# HELP interlock_held "), "{exported}");
}
