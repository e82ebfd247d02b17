//! Fences, the monitor, and synchronization: the same operations, awaited.

use std::time::Duration;

use diesel_async::{AsyncConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{self, AdvisoryLock, Fence, Pool};
use diesel_interlock::error::Misplaced;
use diesel_interlock::{DeclaredResources, Error, throttled_resources};
use workbench::Database;

use crate::dropping::poll_times;
use crate::run;

static LOCK: AdvisoryLock = AdvisoryLock::named("x").fenced();
static FENCE: Fence = Fence::named("rows");

throttled_resources! {
    enum Resource {
        CacheRebuild = "cache rebuild" every Duration::from_secs(15),
        TenantImport = "tenant import" every Duration::from_secs(60),
    }
}

mod changed {
    use std::time::Duration;

    diesel_interlock::throttled_resources! {
        pub(super) enum Resource {
            CacheRebuild = "cache rebuild" every Duration::from_secs(30),
        }
    }
}

async fn passes<P: Pool>(pool: P) {
    asynchronous::migrations::install(&pool).await.unwrap();
    let mut first = LOCK.acquire(&pool).await.unwrap();
    let earlier = first.fencing_token().await.unwrap();
    first.release().await.unwrap();
    let mut second = LOCK.acquire(&pool).await.unwrap();
    let later = second.fencing_token().await.unwrap();
    let conn = &mut *pool.check_out().await.unwrap();
    for token in [earlier, later, later] {
        conn.transaction(async |conn| FENCE.pass(conn, token).await)
            .await
            .unwrap();
    }
    let refused = conn
        .transaction(async |conn| FENCE.pass(conn, earlier).await)
        .await;
    assert!(
        matches!(&refused, Err(Error::Fenced { name, token }) if name == "rows" && *token == earlier),
        "{refused:?}"
    );
    assert!(matches!(
        FENCE.pass(conn, later).await,
        Err(Error::Misplaced(Misplaced::FenceOutsideTransaction))
    ));
}

#[test]
fn an_earlier_holder_does_not_pass_a_fence() {
    run(async {
        let database = Database::new();
        passes(database.deadpool(3)).await;
        let database = Database::new();
        passes(database.bb8(3)).await;
    });
}

/// What a dropped pass leaves is in the transaction of the caller, and ends with it.
#[test]
fn a_dropped_pass_ends_with_the_callers_transaction() {
    run(async {
        let database = Database::new();
        let conn = &mut database.connect_async().await;
        asynchronous::migrations::install_on(conn).await.unwrap();
        let mut polls = 0;
        loop {
            let token = polls as i64 + 10;
            let rolled_back = conn
                .transaction(async |conn| {
                    let passed = poll_times(FENCE.pass(conn, token), polls).await;
                    let stop = passed.map_or(Error::NoRuntime, |passed| {
                        passed.unwrap();
                        Error::Standby
                    });
                    Err::<(), _>(stop)
                })
                .await;
            let least = conn
                .transaction(async |conn| FENCE.pass(conn, 1).await)
                .await;
            least.unwrap();
            if let Err(Error::Standby) = rolled_back {
                break;
            }
            polls += 1;
        }
        assert!(polls >= 1);
    });
}

#[test]
fn declared_resources_are_inserted_and_their_intervals_kept_or_overwritten() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(2);
        asynchronous::migrations::install(&pool).await.unwrap();
        let synced = asynchronous::sync::<Resource>(&pool).await.unwrap();
        assert_eq!(synced.added, ["cache rebuild", "tenant import"]);
        let again = asynchronous::sync::<Resource>(&pool).await.unwrap();
        assert!(again.added.is_empty() && again.different.is_empty());

        let conn = &mut database.connect_async().await;
        let kept = asynchronous::sync_on::<changed::Resource>(conn).await;
        let [different] = &kept.unwrap().different[..] else {
            panic!("one interval differs");
        };
        assert_eq!(different.in_database, Duration::from_secs(15));
        assert_eq!(
            different.declared,
            changed::Resource::CacheRebuild.interval()
        );
        let overwritten = asynchronous::sync_intervals::<changed::Resource>(&pool).await;
        assert_eq!(overwritten.unwrap().different.len(), 1);
        let now = asynchronous::sync_intervals_on::<changed::Resource>(conn).await;
        assert!(now.unwrap().different.is_empty());

        conn.begin_test_transaction().await.unwrap();
        let refused = asynchronous::sync_on::<Resource>(conn).await;
        assert!(matches!(
            refused,
            Err(Error::Misplaced(Misplaced::CommitsInTransaction))
        ));
    });
}

#[test]
fn the_monitor_lists_holders_waiters_and_slots() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(3);
        asynchronous::migrations::install(&pool).await.unwrap();
        let conn = &mut database.connect_async().await;
        let guard = LOCK.acquire(&pool).await.unwrap();
        let holders = asynchronous::monitor::holders_of(conn, LOCK.key()).await;
        assert_eq!(holders.unwrap()[0].session.pid, Some(guard.backend_pid()));
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move { LOCK.acquire(&pool).await.unwrap().backend_pid() }
        });
        let waiter = loop {
            let waiters = asynchronous::monitor::waiters_of(conn, LOCK.key()).await;
            if let Some(waiter) = waiters.unwrap().pop() {
                break waiter;
            }
        };
        guard.release().await.unwrap();
        assert_eq!(waiter.session.pid, Some(waiting.await.unwrap()));
        conn.batch_execute(
            "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, details) \
             VALUES ('geocoder', 1, now(), now() + interval '1 hour', 'web-3')",
        )
        .await
        .unwrap();
        let slots = asynchronous::monitor::slots(conn, "geocoder", 3)
            .await
            .unwrap();
        assert_eq!((slots.free, slots.in_flight), (vec![0, 2], 1));
    });
}
