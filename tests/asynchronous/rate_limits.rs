//! Rate limits: the same operations, awaited, and what a dropped future leaves.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{Pool, RateLimit};
use diesel_interlock::error::{Input, Misplaced};
use diesel_interlock::{Error, Quota, Reserve, asynchronous, migrations, monitor};
use workbench::Database;

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

/// Polls a future so often at most, and drops it.
async fn polled(future: impl Future, times: usize) {
    let mut future = pin!(future);
    let mut count = 0;
    poll_fn(|context| {
        count += 1;
        if count > times || future.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        Poll::Pending
    })
    .await;
}

#[test]
fn a_dropped_wait_cancels_its_reservation_after_every_poll() {
    let database = database();
    let pool = database.deadpool(3);
    run(async move {
        for times in (0..12).cycle().take(120) {
            API.reset(&pool).await.unwrap();
            assert!(API.cost(5).check(&pool).await.unwrap().is_allowed());
            // After the reply it is polled no more, because it sleeps for hours.
            let two = API.cost(2);
            let wait = polled(two.acquire_timeout(&pool, 9 * HOUR), times);
            let _ = tokio::time::timeout(Duration::from_millis(20), wait).await;
            let mut looks = 0;
            // What was spent before takes five hours to come back.
            while API.peek(&pool).await.unwrap().full_in > 5 * HOUR {
                looks += 1;
                assert!(looks < 2000, "not cancelled after {times} polls");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    });
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
            polled(API.check(&pool), times).await;
            // The connection is used again only after the reply was read.
            assert!(API.check(&pool).await.unwrap().is_allowed());
            let remaining = API.peek(&pool).await.unwrap().remaining;
            assert!(remaining == 4 || remaining == 3, "{remaining}");
        }
    });
}
