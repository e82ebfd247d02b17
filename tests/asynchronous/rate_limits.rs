//! Dropped futures of rate limits spend at most once, and lose no chunk.

use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::half::{
    Check, Error, PgPool, Quota, RateLimit, block_on, block_on_one_thread, make_pool, polled, pool,
};
use crate::support::{assert_pool_whole, installed};

/// How long a dropped call waits for its reply. A longer round proves nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// No unit refills while a test runs.
static WIDE: RateLimit = RateLimit::named("wide", Quota::per_day(24).burst(1000));

/// Repeats a check while a dropped call has the row locked.
async fn check(limit: &RateLimit, pool: &PgPool) -> Check {
    loop {
        match limit.check(pool).await {
            Err(Error::KeyLocked(_)) => {}
            checked => return checked.unwrap(),
        }
    }
}

#[test]
fn a_check_that_is_dropped_after_any_poll_spends_once_at_most() {
    let database = installed();
    let pool = pool(&database, 2);
    block_on(async {
        let mut drops = 0;
        for (round, polls) in (0..12).cycle().enumerate() {
            // On a fast server some replies arrive before the drop, so there are more rounds.
            if round >= 60 && drops >= 30 {
                break;
            }
            let limit = WIDE.key(round);
            let both = [&limit, &WIDE.key("both")];
            let spent = [
                polled(polls, limit.check(&pool)).await.is_none(),
                polled(polls, limit.acquire_timeout(&pool, Duration::from_secs(9)))
                    .await
                    .is_none(),
                polled(polls, RateLimit::check_all(&both, &pool))
                    .await
                    .is_none(),
            ];
            drops += spent.iter().filter(|is_dropped| **is_dropped).count();
            // Two checks, one on each connection, are answered after all statements that were sent
            // before.
            let _ = (check(&limit, &pool).await, check(&limit, &pool).await);
            let remaining = limit.peek(&pool).await.unwrap().remaining;
            assert!(
                (995..=998).contains(&remaining),
                "{remaining} after {polls} polls"
            );
        }
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn dropped_waits_spend_nothing() {
    let database = installed();
    let pool = pool(&database, 2);
    let limit = RateLimit::named("slow", Quota::per_hour(1));
    block_on(async {
        assert!(limit.check(&pool).await.unwrap().is_allowed());
        let waits: Vec<_> = (0..30)
            .map(|_| {
                let (limit, pool) = (limit.clone(), pool.clone());
                tokio::spawn(async move {
                    let wait = limit.acquire_timeout(&pool, Duration::from_secs(7200));
                    timeout(Duration::from_millis(100), wait).await.is_err()
                })
            })
            .collect();
        for wait in waits {
            assert!(wait.await.unwrap());
        }
        let hour = Duration::from_secs(3600);
        assert!(limit.peek(&pool).await.unwrap().full_in <= hour);
        assert!(limit.reset(&pool).await.unwrap());
        assert!(
            limit
                .acquire_timeout(&pool, hour)
                .await
                .unwrap()
                .is_allowed()
        );
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_local_check_that_is_dropped_after_any_poll_loses_no_chunk() {
    let database = installed();
    let pool = pool(&database, 2);
    block_on(async {
        for polls in 0..30 {
            let is_proved = async |round: usize| {
                let key = format!("{polls} {round}");
                let local = WIDE.local(pool.clone(), 10);
                let began = Instant::now();
                let _ = polled(polls, local.check(&key)).await;
                let mut are_allowed = true;
                for _ in 0..9 {
                    let checked = local.check(&key).await;
                    are_allowed &= checked.is_ok_and(|check| check.is_allowed());
                }
                let is_quick = began.elapsed() < PATIENCE;
                assert!(are_allowed || !is_quick, "after {polls}");
                let remaining = WIDE.key(&key).peek(&pool).await.unwrap().remaining;
                assert!(remaining == 990 || !is_quick, "{remaining} after {polls}");
                is_quick
            };
            let mut round = 0;
            while !is_proved(round).await {
                round += 1;
                assert!(round < 20, "no round was quick");
            }
        }
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_local_check_that_nobody_polls_does_not_block_others() {
    let database = installed();
    block_on_one_thread(async {
        let pool = make_pool(&database.url(), 2, Duration::from_secs(20));
        let local = WIDE.local(pool.clone(), 10);
        let mut forgotten = Box::pin(local.check("7"));
        assert!(polled(1, forgotten.as_mut()).await.is_none());
        assert!(local.check("7").await.unwrap().is_allowed());
        assert!(forgotten.await.unwrap().is_allowed());
    });
}
