//! A dropped future leaves no gauge raised.

use std::time::Duration;

use workbench::block_on;

use crate::half::{AdvisoryLock, Error, Leader, PgPool, Semaphore, execute, polled, pool};
use crate::support::exporter::{Metrics, exported};
use crate::support::{Observer, eventually, foreign_holder, installed};

/// The largest number of polls before an operation is dropped, at which some operations are
/// halfway.
const POLLS: usize = 12;

fn assert_nothing_is_held_or_awaited(metrics: &Metrics) {
    eventually("nothing is held or awaited", || {
        (metrics.held(), metrics.waiting()) == (0.0, 0.0)
    });
}

#[test]
fn a_dropped_wait_leaves_the_gauge_of_waiters() {
    const METRICS: Metrics = Metrics("dropped wait");
    static LOCK: AdvisoryLock = AdvisoryLock::named("dropped wait");
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 3);
    let _holder = foreign_holder(&database, LOCK.lock_key());
    let waits = || {
        let pool = pool.clone();
        workbench::runtime().spawn(async move { LOCK.acquire(&pool).await.map(drop) })
    };
    let (first, second) = (waits(), waits());
    eventually("two waiters are counted", || METRICS.waiting() == 2.0);
    first.abort();
    eventually("one waiter is counted", || METRICS.waiting() == 1.0);
    second.abort();
    assert_nothing_is_held_or_awaited(&METRICS);
    assert_eq!(METRICS.waits(), 0.0, "a dropped wait has no duration");
}

#[test]
fn operations_that_are_dropped_halfway_raise_no_gauge() {
    const LOCKS: Metrics = Metrics("dropped lock");
    const SLOTS: Metrics = Metrics("dropped slot");
    static LOCK: AdvisoryLock = AdvisoryLock::named("dropped lock");
    static SLOT: Semaphore =
        Semaphore::named("dropped slot", 2, Duration::from_secs(3600)).keep_alive();
    async fn lock(pool: &PgPool) {
        LOCK.acquire(pool).await.unwrap().release().await.unwrap();
    }
    async fn work_under_the_lock(pool: &PgPool) {
        let work = async |conn: &mut _| Ok::<_, Error>(execute(conn, "SELECT 1").await?);
        LOCK.with(pool, work).await.unwrap();
    }
    async fn slot(pool: &PgPool) {
        SLOT.acquire(pool).await.unwrap().release().await.unwrap();
    }
    let _ = exported();
    let database = installed();
    let pool = pool(&database, 2);
    for polls in 0..POLLS {
        block_on(polled(polls, lock(&pool)));
        block_on(polled(polls, work_under_the_lock(&pool)));
        block_on(polled(polls, slot(&pool)));
    }
    assert_nothing_is_held_or_awaited(&LOCKS);
    assert_nothing_is_held_or_awaited(&SLOTS);
    Observer::of(&database).assert_free(LOCK.lock_key());
    block_on(async {
        lock(&pool).await;
        slot(&pool).await;
    });
    assert_nothing_is_held_or_awaited(&LOCKS);
    assert_nothing_is_held_or_awaited(&SLOTS);
    assert_eq!((LOCKS.lost(), SLOTS.lost()), (0.0, 0.0));
}

#[test]
fn a_dropped_leader_counts_as_resigned_and_a_dropped_candidate_is_not_counted() {
    const METRICS: Metrics = Metrics("dropped leader");
    static LEADER: Leader = Leader::named("dropped leader", Duration::from_secs(3600));
    let _ = exported();
    let database = installed();
    let stands = || {
        let pool = pool(&database, 2);
        workbench::runtime().spawn(async move {
            LEADER
                .lead(&pool, |_| std::future::pending())
                .await
                .map(drop)
        })
    };
    let leader = stands();
    eventually("one instance leads", || METRICS.held() == 1.0);
    let candidate = stands();
    eventually("the other instance is a candidate", || {
        METRICS.waiting() == 1.0
    });
    candidate.abort();
    eventually("the dropped candidate is not counted", || {
        METRICS.waiting() == 0.0
    });
    leader.abort();
    eventually("nobody leads", || {
        (METRICS.operations("resigned"), METRICS.held()) == (1.0, 0.0)
    });
    assert_eq!(METRICS.operations("elected"), 1.0);
    assert_eq!((METRICS.holdings(), METRICS.lost()), (1.0, 0.0));
}
