//! Rate limits: the same operations, awaited, and what a dropped future leaves behind.

use std::future::Future;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{Pool, RateLimit};
use diesel_interlock::error::{Input, Misplaced};
use diesel_interlock::{Check, Error, Quota, Reserve, asynchronous, migrations, monitor};
use workbench::{Database, RoundTrips};

use crate::dropping::poll_times;
use crate::run;

const HOUR: Duration = Duration::from_secs(3600);
static API: RateLimit = RateLimit::named("api", Quota::per_day(24).burst(5));

fn database() -> Database {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    database
}

/// Every operation over a pool, in a task of a runtime of several threads.
async fn works<P: Pool>(pool: P) {
    let spent = API.cost(4).check(&pool).await.unwrap().allowed().unwrap();
    assert_eq!(spent.remaining, 1);
    assert_eq!(RateLimit::give_back(&pool, &spent, 2).await.unwrap(), 2);
    assert_eq!(API.peek(&pool).await.unwrap().remaining, 3);
    let both = RateLimit::check_all(&pool, &[&API.key(7), &API.cost(3)]).await;
    assert!(both.unwrap().is_allowed());
    assert!(API.check(&pool).await.unwrap().is_limited());
    let Reserve::Reserved(reservation) = API.reserve(&pool, HOUR).await.unwrap() else {
        panic!();
    };
    assert!(reservation.wait > Duration::from_secs(3500));
    assert_eq!(RateLimit::cancel(&pool, reservation).await.unwrap(), 1);
    assert!(
        API.acquire_timeout(&pool, Duration::from_secs(9))
            .await
            .unwrap()
            .is_limited()
    );
    assert!(
        API.key(8)
            .acquire_timeout(&pool, HOUR)
            .await
            .unwrap()
            .is_allowed()
    );
    assert!(API.reset(&pool).await.unwrap());
    assert_eq!(API.reset_all(&pool).await.unwrap(), 2);
    assert_eq!(RateLimit::prune(&pool).await.unwrap(), 0);
}

#[test]
fn every_operation_over_both_pools() {
    let database = database();
    let pool = database.deadpool(2);
    run(async move { works(pool).await });
    run(async move { works(database.bb8(2)).await });
}

#[test]
fn both_halves_share_a_limit() {
    let database = database();
    let blocking = &mut database.connect();
    let limit = diesel_interlock::RateLimit::named("api", Quota::per_day(24).burst(5));
    assert!(limit.cost(5).check_on(blocking).unwrap().is_allowed());
    let url = database.async_url();
    run(async move {
        let conn = &mut AsyncPgConnection::establish(&url).await.unwrap();
        assert!(API.check_on(conn).await.unwrap().is_limited());
        assert!(API.reset_on(conn).await.unwrap());
        assert!(API.cost(5).check_on(conn).await.unwrap().is_allowed());
    });
    assert!(limit.check_on(blocking).unwrap().is_limited());
}

#[test]
fn open_transactions_are_refused_and_those_of_plain_sql_found() {
    let database = database();
    let url = database.async_url();
    run(async move {
        let conn = &mut AsyncPgConnection::establish(&url).await.unwrap();
        conn.begin_test_transaction().await.unwrap();
        assert!(API.cost(5).check_on(conn).await.unwrap().is_allowed());

        let conn = &mut AsyncPgConnection::establish(&url).await.unwrap();
        conn.transaction(async |conn| {
            let refused = API.check_on(conn).await;
            assert!(matches!(
                refused,
                Err(Error::Misplaced(Misplaced::SpendInTransaction))
            ));
            Ok::<_, diesel::result::Error>(())
        })
        .await
        .unwrap();
        conn.batch_execute("BEGIN").await.unwrap();
        let refused = API.cost(5).check_on(conn).await;
        assert!(matches!(
            refused,
            Err(Error::Misplaced(Misplaced::SpendInTransaction))
        ));
        conn.batch_execute("COMMIT").await.unwrap();
        assert_eq!(API.peek_on(conn).await.unwrap().remaining, 5);
        let bad = RateLimit::named("", Quota::per_day(1)).check_on(conn).await;
        assert!(matches!(bad, Err(Error::Input(Input::EmptyName))));
    });
}

/// A connection that an earlier user left in a transaction is not kept in the pool with the key that the check has locked.
async fn left_open<P: Pool>(database: Database, pool: P) {
    let begin = async || {
        let mut conn = pool.check_out().await.unwrap();
        conn.batch_execute("BEGIN").await.unwrap();
    };
    let own = &mut database.connect_async().await;
    begin().await;
    let refused = API.check(&pool).await;
    assert!(
        matches!(refused, Err(Error::TransactionInPool)),
        "{refused:?}"
    );
    assert!(eventually_all(own).await);
    begin().await;
    let refused = API.reserve(&pool, HOUR).await;
    assert!(
        matches!(refused, Err(Error::TransactionInPool)),
        "{refused:?}"
    );
    assert!(eventually_all(own).await);
    // Its transaction is aborted.
    let mut conn = pool.check_out().await.unwrap();
    conn.batch_execute("BEGIN; SELECT 1 / 0").await.unwrap_err();
    drop(conn);
    let refused = API.check(&pool).await;
    assert!(
        matches!(refused, Err(Error::TransactionInPool)),
        "{refused:?}"
    );
}

/// Spends all units. The check waits for the end of the other session, for a quarter of a second at a time.
async fn eventually_all(conn: &mut AsyncPgConnection) -> bool {
    for _ in 0..40 {
        if API.cost(5).check_on(conn).await.unwrap().is_allowed() {
            return API.reset_on(conn).await.unwrap();
        }
    }
    false
}

#[test]
fn a_transaction_that_was_left_open_in_the_pool_is_undone_with_its_checks() {
    run(async {
        let database = database();
        let pool = database.deadpool(1);
        left_open(database, pool).await;
    });
    run(async {
        let database = database();
        let pool = database.bb8(1);
        left_open(database, pool).await;
    });
}

#[test]
fn operators_see_the_same_over_either_half() {
    let database = database();
    let blocking = &mut database.connect();
    let url = database.async_url();
    let limit = diesel_interlock::RateLimit::named("api", Quota::per_day(24).burst(5));
    for (key, units) in [(1, 3), (2, 5)] {
        let spent = limit.key(key).cost(units).check_on(blocking).unwrap();
        assert!(spent.is_allowed());
    }
    let of_the_other = monitor::keys_near_limit(blocking, &limit, 10).unwrap();
    run(async move {
        let conn = &mut AsyncPgConnection::establish(&url).await.unwrap();
        let near = asynchronous::monitor::keys_near_limit(conn, &API, 10)
            .await
            .unwrap();
        let left = |near: &[monitor::KeyNearLimit]| -> Vec<_> {
            let near = near.iter();
            near.map(|it| {
                (
                    it.key.clone(),
                    it.remaining,
                    it.owed,
                    it.quota,
                    it.quota_source,
                )
            })
            .collect()
        };
        assert_eq!(left(&near), left(&of_the_other));
        assert_eq!((&*near[0].key, near[0].remaining), ("2", 0));
        let bad = RateLimit::named("", Quota::per_day(1));
        let refused = asynchronous::monitor::keys_near_limit(conn, &bad, 10).await;
        assert!(matches!(refused, Err(Error::Input(Input::EmptyName))));
        let overrides = monitor::overrides();
        let overrides: Vec<monitor::RateLimitOverride> =
            diesel_async::RunQueryDsl::load(overrides, conn)
                .await
                .unwrap();
        assert_eq!(overrides, []);
    });
}

#[test]
fn a_dropped_wait_cancels_its_reservation_after_every_poll() {
    let database = database();
    let pool = database.deadpool(3);
    run(async move {
        // A key for each, because a reservation may be made and cancelled later than the next wait begins.
        for key in 0..120 {
            let five = API.key(key).cost(5);
            assert!(five.check(&pool).await.unwrap().is_allowed());
            // After the reply it is polled no more, because it sleeps for hours.
            let two = API.key(key).cost(2);
            let wait = poll_times(two.acquire_timeout(&pool, 9 * HOUR), key % 12);
            let _ = tokio::time::timeout(Duration::from_millis(20), wait).await;
        }
        for key in 0..120 {
            let mut looks = 0;
            // What was spent before takes five hours to come back.
            while pool.status().available < pool.status().size
                || API.key(key).peek(&pool).await.unwrap().full_in > 5 * HOUR
            {
                looks += 1;
                assert!(looks < 2000, "not cancelled after {} polls", key % 12);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    });
}

#[test]
fn a_wait_that_is_dropped_before_it_has_a_connection_spends_nothing() {
    let database = database();
    let (pool, other) = (database.deadpool(1), database.deadpool(1));
    run(async move {
        let only = pool.get().await.unwrap();
        let wait = API.acquire_timeout(&pool, 9 * HOUR);
        assert!(
            tokio::time::timeout(Duration::from_millis(50), wait)
                .await
                .is_err()
        );
        drop(only);
        // Users of the pool are served in their order.
        drop(pool.get().await.unwrap());
        assert_eq!(pool.status().waiting, 0);
        assert_eq!(API.peek(&other).await.unwrap().full_in, Duration::ZERO);
    });
    let rows = "(SELECT count(*) FROM resource_control.rate_limit)";
    let rows = diesel::select(diesel::dsl::sql::<diesel::sql_types::BigInt>(rows));
    let conn = &mut database.connect();
    let rows: i64 = diesel::RunQueryDsl::get_result(rows, conn).unwrap();
    assert_eq!(rows, 0);
}

#[test]
fn a_wait_that_times_out_from_outside_gives_its_units_back() {
    let database = database();
    let pool = database.deadpool(3);
    run(async move {
        // A key each, because a wait ahead of others gives nothing back.
        let waits = (0..8).map(|key| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let limit = API.key(key);
                assert!(limit.cost(5).check(&pool).await.unwrap().is_allowed());
                let wait = limit.acquire_timeout(&pool, 99 * HOUR);
                assert!(
                    tokio::time::timeout(Duration::from_millis(100), wait)
                        .await
                        .is_err()
                );
            })
        });
        for wait in waits.collect::<Vec<_>>() {
            wait.await.unwrap();
        }
        for key in 0..8 {
            let mut looks = 0;
            while API.key(key).peek(&pool).await.unwrap().full_in > 5 * HOUR {
                looks += 1;
                assert!(looks < 2000);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    });
}

#[test]
fn a_dropped_check_spends_once_or_not_at_all() {
    let database = database();
    let pool = database.deadpool(2);
    run(async move {
        for times in (0..6).cycle().take(60) {
            API.reset(&pool).await.unwrap();
            poll_times(API.check(&pool), times).await;
            // The connection is used again only after the reply was read.
            assert!(API.check(&pool).await.unwrap().is_allowed());
            let remaining = API.peek(&pool).await.unwrap().remaining;
            assert!(remaining == 4 || remaining == 3, "{remaining}");
        }
    });
}

/// Returns when as many units of the key are left. It is polled, because tasks give units back.
async fn until_left<P: Pool>(pool: &P, limit: &RateLimit, units: RangeInclusive<u32>) {
    let mut looks = 0;
    loop {
        let remaining = limit.peek(pool).await.unwrap().remaining;
        if units.contains(&remaining) {
            return;
        }
        looks += 1;
        assert!(looks < 5000, "{remaining}, not {units:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

static WIDE: RateLimit = RateLimit::named("wide", Quota::per_day(24).burst(100));

/// After each number of polls of the first of two checks, one chunk was taken, and what was not used is given back.
async fn drops_keep_the_chunk<P: Pool>(pool: P, observer: impl Pool) {
    let key = WIDE.key(7);
    for polls in (0..12).cycle().take(36) {
        key.reset(&observer).await.unwrap();
        let local = WIDE.local(&pool, 10).unwrap();
        poll_times(local.check("7", 1), polls).await;
        assert!(local.check("7", 1).await.unwrap().is_allowed());
        assert_eq!(key.peek(&observer).await.unwrap().remaining, 90);
        drop(local);
        // The units of the call that was dropped may be spent.
        until_left(&observer, &key, 98..=99).await;
    }
}

#[test]
fn a_dropped_local_check_loses_only_its_own_units() {
    let database = database();
    let (pool, observer) = (database.deadpool(1), database.deadpool(1));
    run(async move {
        drops_keep_the_chunk(pool, observer.clone()).await;
        drops_keep_the_chunk(database.bb8(1), observer).await;
    });
}

#[test]
fn a_value_that_is_dropped_while_it_takes_units_gives_them_back() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let (pool, observer) = (proxy.deadpool(1), database.deadpool(1));
    run(async move {
        for key in 0..20 {
            let local = WIDE.local(&pool, 10).unwrap();
            // The connection is open before nothing passes any more.
            drop(pool.get().await.unwrap());
            proxy.cut();
            let checked = poll_times(local.check(&key.to_string(), 1), 1).await;
            assert!(checked.is_none());
            drop(local);
            proxy.restore();
            // The unit of the call is spent.
            until_left(&observer, &WIDE.key(key), 99..=99).await;
        }
    });
}

#[test]
fn a_check_that_nobody_polls_stops_no_other_one() {
    let database = database();
    let pool = database.deadpool(2);
    run(async move {
        let local = WIDE.local(&pool, 10).unwrap();
        let mut forgotten = Box::pin(local.check("7", 1));
        poll_times(forgotten.as_mut(), 1).await;
        assert!(local.check("7", 1).await.unwrap().is_allowed());
        assert!(forgotten.await.unwrap().is_allowed());
    });
}

#[test]
fn tasks_that_find_nothing_at_once_take_no_more_chunks_than_they_need() {
    let database = database();
    let pool = database.deadpool(1);
    run(async move {
        let local = Arc::new(WIDE.local(&pool, 10).unwrap());
        let tasks = (0..25).map(|_| {
            let local = Arc::clone(&local);
            tokio::spawn(async move { local.check("7", 1).await.unwrap().is_allowed() })
        });
        for task in tasks.collect::<Vec<_>>() {
            assert!(task.await.unwrap());
        }
        assert_eq!(WIDE.key(7).peek(&pool).await.unwrap().remaining, 70);
    });
}

#[test]
fn local_units_need_no_runtime_and_are_dropped_without_one() {
    let database = database();
    let pool = database.deadpool(1);
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let poll = |future: &mut (dyn Future<Output = Result<Check, Error>> + Unpin)| {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    };
    let local = WIDE.local(&pool, 2).unwrap();
    let outside = poll(&mut Box::pin(local.check("7", 1)));
    assert!(matches!(outside, Poll::Ready(Err(Error::NoRuntime))));
    let first = runtime();
    assert!(first.block_on(local.check("7", 1)).unwrap().is_allowed());
    // One is left.
    let outside = poll(&mut Box::pin(local.check("7", 1)));
    assert!(matches!(outside, Poll::Ready(Ok(Check::Allowed(_)))));
    assert!(first.block_on(local.check("7", 1)).unwrap().is_allowed());
    drop(first);
    drop(local);

    // The runtime is there, and nobody drives it.
    let second = runtime();
    let pool = database.deadpool(1);
    let local = WIDE.local(&pool, 2).unwrap();
    assert!(second.block_on(local.check("8", 1)).unwrap().is_allowed());
    drop(local);
    let observer = database.deadpool(1);
    second.block_on(until_left(&observer, &WIDE.key(8), 99..=99));
}
