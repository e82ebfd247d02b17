//! Callers that give up cost no connection, and an empty pool fills although they do.

use std::time::{Duration, Instant};

use diesel_interlock::Pool;
use tokio::time::timeout;
use workbench::RoundTrips;

use crate::half::{
    AdvisoryLock, PgPool, Quota, RateLimit, Semaphore, Throttle, block_on, make_pool, polled,
};
use crate::support::{
    IN_FLIGHT, Observer, assert_pool_whole, eventually, in_a_quick_round, installed, number,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("filling");
const HOUR: Duration = Duration::from_secs(3600);

/// Asserts that the dropped calls open no connection beside those of the pool. `drops` calls and
/// drops them, and returns whether they had no reply.
///
/// A dropped call has two seconds for its reply before its connection is closed, so a round that
/// takes longer proves nothing, and is repeated.
async fn opens_none(proxy: &RoundTrips, pool: &PgPool, size: usize, drops: impl AsyncFn() -> bool) {
    let all_are_there = async || {
        let mut all = Vec::new();
        for _ in 0..size {
            all.push(pool.check_out(None).await.unwrap());
        }
    };
    for _ in 0..20 {
        all_are_there().await;
        let (connections, began) = (proxy.connections(), Instant::now());
        let are_dropped = drops().await;
        all_are_there().await;
        if are_dropped && began.elapsed() < Duration::from_secs(2) {
            assert_eq!(proxy.connections(), connections);
            return;
        }
    }
    panic!("no round was quick");
}

#[test]
fn an_empty_pool_fills_although_callers_give_up_before_it_connects() {
    let database = installed();
    let slot = Semaphore::named("filling", 1, HOUR);
    let soon = Duration::from_millis(20);
    // A reply that takes longer than two seconds costs the connection.
    let opened = in_a_quick_round(Duration::from_secs(2), || {
        let proxy = RoundTrips::in_front_of(&database);
        proxy.set_delay(Duration::from_millis(30), Duration::ZERO);
        let pool = make_pool(&proxy.url(), 2, Duration::from_secs(20));
        block_on(async {
            let end = Instant::now() + Duration::from_secs(60);
            while Pool::idle(&pool) == 0 {
                assert!(Instant::now() < end, "the pool is still empty");
                drop(timeout(soon, LOCK.try_acquire(&pool)).await);
                drop(timeout(soon, slot.try_acquire(&pool)).await);
            }
            let guard = LOCK.acquire(&pool).await.unwrap();
            guard.release().await.unwrap();
        });
        proxy.connections()
    });
    assert!(opened <= 2, "{opened} sessions");
}

#[test]
fn calls_that_are_dropped_over_a_slow_network_open_no_extra_sessions() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 3, Duration::from_secs(60));
    block_on(async {
        let mut all = Vec::new();
        for _ in 0..3 {
            all.push(pool.check_out(None).await.unwrap());
        }
    });
    assert_eq!(proxy.connections(), 3);
    proxy.set_delay(Duration::from_millis(20), Duration::ZERO);
    let slots = Semaphore::named("filling", 2, HOUR);
    let throttle = Throttle::named("filling", HOUR);
    let limit = RateLimit::named("filling", Quota::per_second(100));
    // Each call is dropped while the drop of the call before may still be at work.
    let drops = async |half: bool, polls: usize| {
        let lock = LOCK.key(polls);
        if half {
            polled(polls, lock.try_acquire(&pool)).await;
            polled(polls, lock.acquire(&pool)).await;
            polled(polls, AdvisoryLock::all([&lock, &LOCK]).acquire(&pool)).await;
            polled(polls, slots.try_acquire(&pool)).await;
        } else {
            polled(polls, slots.acquire(&pool)).await;
            polled(polls, throttle.key(polls).attempt(&pool)).await;
            polled(polls, limit.key(polls).check(&pool)).await;
            drop(LOCK.key("guard").acquire(&pool).await.unwrap());
        }
    };
    block_on(async {
        for (half, polls) in (0..6).flat_map(|polls| [(true, polls), (false, polls)]) {
            let drops = async || {
                drops(half, polls).await;
                true
            };
            opens_none(&proxy, &pool, 3, drops).await;
        }
    });
    proxy.set_delay(Duration::ZERO, Duration::ZERO);
    assert_pool_whole(&pool, &database);
    let mut observer = Observer::of(&database);
    eventually("no permit is in flight", || {
        number(observer.conn(), IN_FLIGHT) == 0
    });
}

/// The first call is dropped while the pool checks the connection for it, and a second call waits
/// for that connection.
#[test]
fn a_check_out_that_is_dropped_while_others_wait_costs_no_session() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    proxy.set_delay(Duration::from_millis(20), Duration::ZERO);
    let slots = Semaphore::named("filling", 100, HOUR);
    let waits = async || {
        let mut first = Box::pin(LOCK.try_acquire(&pool));
        let is_first = polled(1, first.as_mut()).await.is_none();
        let mut second = Box::pin(slots.try_acquire(&pool));
        let is_second = polled(1, second.as_mut()).await.is_none();
        drop(first);
        if is_second {
            let permit = second.await.unwrap().admitted().unwrap();
            permit.release().await.unwrap();
        }
        is_first && is_second
    };
    block_on(async {
        for _ in 0..3 {
            opens_none(&proxy, &pool, 1, &waits).await;
        }
    });
}
