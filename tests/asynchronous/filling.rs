//! Callers that give up cost no connection, and an empty pool fills although they do.

use std::time::{Duration, Instant};

use diesel_interlock::Pool;
use tokio::time::timeout;
use workbench::RoundTrips;

use crate::half::{
    AdvisoryLock, Quota, RateLimit, Semaphore, Throttle, block_on, make_pool, on_all, polled,
};
use crate::support::{IN_FLIGHT, Observer, assert_pool_whole, eventually, installed, number};

static LOCK: AdvisoryLock = AdvisoryLock::named("filling");
const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn an_empty_pool_fills_although_callers_give_up_before_it_connects() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    proxy.set_delay(Duration::from_millis(60), Duration::ZERO);
    let pool = make_pool(&proxy.url(), 2, Duration::from_secs(20));
    let slot = Semaphore::named("filling", 1, HOUR);
    let soon = Duration::from_millis(20);
    block_on(async {
        let end = Instant::now() + Duration::from_secs(30);
        while Pool::idle(&pool) == 0 {
            assert!(Instant::now() < end, "the pool is still empty");
            assert!(timeout(soon, LOCK.try_acquire(&pool)).await.is_err());
            assert!(timeout(soon, slot.try_acquire(&pool)).await.is_err());
        }
        let guard = LOCK.acquire(&pool).await.unwrap();
        guard.release().await.unwrap();
    });
    assert!(proxy.connections() <= 2, "{} sessions", proxy.connections());
}

#[test]
fn what_is_dropped_over_a_slow_network_opens_no_session_more_than_the_pool_has() {
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
    proxy.set_delay(Duration::from_millis(60), Duration::ZERO);
    let slots = Semaphore::named("filling", 2, HOUR);
    let throttle = Throttle::named("filling", HOUR);
    let limit = RateLimit::named("filling", Quota::per_second(100));
    block_on(async {
        for polls in 0..6 {
            let lock = LOCK.key(polls);
            // The drop of each comes when the one before may still be under way.
            polled(polls, lock.try_acquire(&pool)).await;
            polled(polls, lock.acquire(&pool)).await;
            polled(polls, AdvisoryLock::all([&lock, &LOCK]).acquire(&pool)).await;
            polled(polls, slots.try_acquire(&pool)).await;
            polled(polls, slots.acquire(&pool)).await;
            polled(polls, throttle.key(polls).attempt(&pool)).await;
            polled(polls, limit.key(polls).check(&pool)).await;
            drop(LOCK.key("guard").acquire(&pool).await.unwrap());
        }
    });
    assert_eq!(proxy.connections(), 3);
    proxy.set_delay(Duration::ZERO, Duration::ZERO);
    assert_pool_whole(&pool, &database);
    let mut observer = Observer::of(&database);
    eventually("no permit is in flight", || {
        number(observer.conn(), IN_FLIGHT) == 0
    });
}

/// The first is dropped while the pool checks the connection for it, and the second one waits for that connection.
#[test]
fn a_check_out_that_is_dropped_while_others_wait_costs_no_session() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    block_on(on_all(&pool, "SELECT 1")).unwrap();
    proxy.set_delay(Duration::from_millis(60), Duration::ZERO);
    let slots = Semaphore::named("filling", 100, HOUR);
    block_on(async {
        for _ in 0..3 {
            let mut first = Box::pin(LOCK.try_acquire(&pool));
            assert!(polled(1, first.as_mut()).await.is_none());
            let mut second = Box::pin(slots.try_acquire(&pool));
            assert!(polled(1, second.as_mut()).await.is_none());
            drop(first);
            let permit = second.await.unwrap().admitted().unwrap();
            permit.release().await.unwrap();
        }
    });
    assert_eq!(proxy.connections(), 1);
}
