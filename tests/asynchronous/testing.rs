//! The helpers for an application's own tests.

use std::pin::pin;
use std::time::Duration;

use diesel_async::SimpleAsyncConnection;
use diesel_interlock::asynchronous::testing::{self, KeyPrefix};
use diesel_interlock::asynchronous::{
    AdvisoryLock, Pool, RateLimit, Throttle, migrations, sync_on,
};
use diesel_interlock::{Attempt, Quota, Semaphore, monitor, throttled_resources};
use workbench::Database;

use crate::dropping::poll_times;
use crate::run;

static LOCK: AdvisoryLock = AdvisoryLock::named("x");
static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));

throttled_resources! {
    enum Resource {
        Import = "import" every Duration::from_secs(3600),
    }
}

#[test]
fn a_task_enters_a_prefix_and_hands_it_on() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(3);
        let outside = LOCK.acquire(&pool).await.unwrap();
        let prefix = KeyPrefix::new("this test");
        let inside = prefix
            .scope(async {
                let guard = LOCK.try_acquire(&pool).await.unwrap();
                let handed_on = tokio::spawn(prefix.scope({
                    let pool = pool.clone();
                    async move { LOCK.try_acquire(&pool).await.unwrap().is_busy() }
                }));
                assert!(handed_on.await.unwrap(), "the prefix was handed on");
                let inherited = tokio::spawn({
                    let pool = pool.clone();
                    async move {
                        testing::prefixed("x") == "x"
                            && LOCK.try_acquire(&pool).await.unwrap().is_busy()
                    }
                });
                assert!(inherited.await.unwrap(), "a task inherits nothing");
                let other = KeyPrefix::new("another")
                    .scope(async { testing::prefixed("x") })
                    .await;
                assert_eq!(other, "another x");
                assert_eq!(testing::prefixed("x"), r"this\ test x");
                guard
            })
            .await;
        assert_eq!(testing::prefixed("x"), "x");

        // The drop outside, and its task, release the name that was acquired.
        let Attempt::Acquired(inside) = inside else {
            panic!("the names differ");
        };
        let conn = &mut database.connect_async().await;
        assert_eq!(testing::held_locks(conn).await.unwrap().len(), 2);
        drop(inside);
        prefix.scope(testing::assert_not_held(conn, &LOCK)).await;
        assert_eq!(testing::held_locks(conn).await.unwrap().len(), 1);
        let holders = diesel_interlock::asynchronous::monitor::holders_of(conn, LOCK.key()).await;
        let pids: Vec<_> = holders
            .unwrap()
            .into_iter()
            .map(|holder| holder.session.pid)
            .collect();
        assert_eq!(pids, [Some(outside.backend_pid())]);
        outside.release().await.unwrap();
        testing::assert_nothing_held(conn).await;
    });
}

#[test]
fn a_prefix_that_is_entered_in_a_scope_ends_at_the_next_await() {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let local = tokio::task::LocalSet::new();
    let test = local.run_until(KeyPrefix::new("scope").scope(async {
        let entered = KeyPrefix::new("entered").enter();
        assert_eq!(testing::prefixed("x"), "entered x");
        let beside = tokio::task::spawn_local(async { testing::prefixed("x").into_owned() });
        assert_eq!(beside.await.unwrap(), "x");
        assert_eq!(testing::prefixed("x"), "scope x");
        drop(entered);
        assert_eq!(testing::prefixed("x"), "scope x");
    }));
    { runtime }.build().unwrap().block_on(test);
    assert_eq!(testing::prefixed("x"), "x");
}

static API: RateLimit = RateLimit::named("api", Quota::per_day(24).burst(20));

/// Waits until as many units are left under the prefix, because a task gives units back or takes them.
async fn until_left<P: Pool>(pool: &P, prefix: &KeyPrefix, key: &str, units: u32) {
    let mut looks = 0;
    while prefix
        .scope(API.key(key).peek(pool))
        .await
        .unwrap()
        .remaining
        != units
    {
        looks += 1;
        assert!(looks < 2000, "never {units}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[test]
fn a_wait_that_is_dropped_in_a_scope_cancels_its_reservation() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(2);
        migrations::install(&pool).await.unwrap();
        let (prefix, key) = (KeyPrefix::new("this test"), API.key("waits"));
        assert!(key.cost(20).check(&pool).await.unwrap().is_allowed());
        let hours = Duration::from_secs(10 * 3600);
        let test = prefix.scope(async {
            assert!(key.cost(20).check(&pool).await.unwrap().is_allowed());
            let two = key.cost(2);
            let mut wait = pin!(two.acquire_timeout(&pool, hours));
            // The reservation is made, and the wait for it has begun.
            while key.peek(&pool).await.unwrap().full_in <= 2 * hours {
                assert!(poll_times(&mut wait, 1).await.is_none());
            }
            assert!(poll_times(&mut wait, 1).await.is_none());
        });
        test.await;
        let mut looks = 0;
        while prefix.scope(key.peek(&pool)).await.unwrap().full_in > 2 * hours {
            looks += 1;
            assert!(looks < 2000, "the reservation is not cancelled");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(key.peek(&pool).await.unwrap().remaining, 0);
    });
}

#[test]
fn a_local_check_that_is_dropped_in_a_scope_takes_units_of_its_prefix() {
    run(async {
        let database = Database::new();
        let (pool, observer) = (database.deadpool(1), database.deadpool(1));
        migrations::install(&observer).await.unwrap();
        let prefix = KeyPrefix::new("this test");
        let local = API.local(&pool, 5).unwrap();
        let only = pool.get().await.unwrap();
        let check = prefix.scope(local.check("7", 1));
        assert!(poll_times(check, 1).await.is_none());
        drop(only);
        until_left(&observer, &prefix, "7", 15).await;
        assert_eq!(API.key("7").peek(&observer).await.unwrap().remaining, 20);
    });
}

#[test]
fn an_assertion_names_the_holder_and_its_own_place() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(1);
        let guard = LOCK.acquire(&pool).await.unwrap();
        let pid = guard.backend_pid().to_string();
        let url = database.async_url();
        let asserting = tokio::spawn(async move {
            use diesel_async::AsyncConnection;
            let conn = &mut diesel_async::AsyncPgConnection::establish(&url)
                .await
                .unwrap();
            testing::assert_not_held(conn, &LOCK).await;
        });
        let panic = asserting.await.unwrap_err().into_panic();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.contains("nobody holds the lock \"x\""), "{message}");
        assert!(
            message.contains(&pid) && message.contains("testing.rs"),
            "{message}"
        );
        guard.release().await.unwrap();
    });
}

#[test]
fn a_throttle_is_made_due_and_a_request_expires() {
    run(async {
        let database = Database::new();
        let conn = &mut database.connect_async().await;
        migrations::install_on(conn).await.unwrap();
        let _ = sync_on::<Resource>(conn).await.unwrap();
        for import in [
            Throttle::of(Resource::Import),
            Throttle::of(Resource::Import).key(7),
        ] {
            let import = import.details("this test");
            assert!(!import.attempt_on(conn).await.unwrap().is_denied());
            assert!(import.attempt_on(conn).await.unwrap().is_denied());
            testing::make_due(conn, &import).await.unwrap();
            assert!(!import.attempt_on(conn).await.unwrap().is_denied());
        }

        testing::assert_none_in_flight(conn, &GEOCODER).await;
        let claim = "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, details) \
             VALUES ('this\\ test geocoder', 0, now(), now() + interval '1 hour', 'web-3')";
        conn.batch_execute(claim).await.unwrap();
        testing::assert_none_in_flight(conn, &GEOCODER).await;
        assert_eq!(testing::requests_in_flight(conn).await.unwrap().len(), 1);
        assert_eq!(testing::expire(conn, &GEOCODER).await.unwrap(), 0);
        let prefix = KeyPrefix::new("this test");
        let expired = prefix.scope(testing::expire(conn, &GEOCODER)).await;
        assert_eq!(expired.unwrap(), 1);
        testing::assert_nothing_held(conn).await;
        let _: fn() -> _ = monitor::in_flight;
    });
}
