//! Semaphores over both pools and on a connection.

#[path = "semaphores/drops.rs"]
mod drops;
#[path = "semaphores/places.rs"]
mod places;
#[path = "semaphores/retries.rs"]
mod retries;

use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_async::{AsyncConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{Permit, Pool, Semaphore};
use diesel_interlock::error::{Input, Misplaced};
use diesel_interlock::{Admission, Error, migrations};
use tokio::time::sleep;
use workbench::{Database, RoundTrips};

use crate::run;

const LONG: Duration = Duration::from_secs(600);

static ONE: Semaphore = Semaphore::named("geocoder", 1, LONG);

fn database() -> Database {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    database
}

fn number(conn: &mut PgConnection, query: &str) -> i64 {
    diesel::select(diesel::dsl::sql::<BigInt>(&format!("({query})")))
        .get_result(conn)
        .unwrap()
}

fn in_flight(database: &Database) -> i64 {
    number(
        &mut database.connect(),
        "SELECT count(*) FROM resource_control.service_request \
         WHERE completed_at IS NULL AND timed_out_at IS NULL AND expires_at > clock_timestamp()",
    )
}

fn expire(database: &Database) {
    diesel::sql_query(
        "UPDATE resource_control.service_request SET created_at = created_at - interval '1 hour', \
         expires_at = clock_timestamp() - interval '1 second' WHERE completed_at IS NULL",
    )
    .execute(&mut database.connect())
    .unwrap();
}

/// Waits until as many slots are taken.
#[track_caller]
fn taken(database: &Database, slots: i64) -> impl Future<Output = ()> + use<'_> {
    let caller = std::panic::Location::caller();
    async move {
        let end = Instant::now() + Duration::from_secs(20);
        while in_flight(database) != slots {
            assert!(Instant::now() < end, "not within twenty seconds: {caller}");
            sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Checks that as many connections can be used at a time, and that none has a transaction open.
async fn full_strength<P: Pool>(database: &Database, pool: &P, size: usize) {
    let mut all = Vec::new();
    for _ in 0..size {
        let mut conn = pool.check_out().await.unwrap();
        conn.batch_execute("SELECT 1").await.unwrap();
        all.push(conn);
    }
    // The sessions of observers that were dropped end a moment later.
    let sessions = |state| {
        let count = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
             AND backend_type = 'client backend' AND pid <> pg_backend_pid() AND {state}"
        );
        number(&mut database.connect(), &count)
    };
    let end = Instant::now() + Duration::from_secs(20);
    while sessions("true") != size as i64 || sessions("state <> 'idle'") > 0 {
        assert!(Instant::now() < end, "{} sessions", sessions("true"));
        sleep(Duration::from_millis(2)).await;
    }
}

async fn permit<P: Pool>(semaphore: &Semaphore, pool: &P) -> Permit<P> {
    let admission = semaphore.try_acquire(pool).await.unwrap();
    admission.admitted().expect("a slot is free")
}

/// Runs a test over deadpool and over bb8, each with a database of its own. The test gets the size of the pool.
macro_rules! over_both_pools {
    ($(#[$attribute:meta])* $name:ident, $size:literal, $test:path) => {
        $(#[$attribute])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn over_deadpool() {
                crate::run(async {
                    let database = crate::semaphores::database();
                    let pool = database.deadpool($size);
                    $test(database, pool).await;
                });
            }

            #[test]
            fn over_bb8() {
                crate::run(async {
                    let database = crate::semaphores::database();
                    let pool = database.bb8($size);
                    $test(database, pool).await;
                });
            }
        }
    };
}
use over_both_pools;

over_both_pools!(a_permit_is_claimed_and_ends, 2, life_of_a_permit);

async fn life_of_a_permit<P: Pool>(database: Database, pool: P) {
    let first = permit(&ONE, &pool).await;
    assert_eq!(in_flight(&database), 1);
    assert!(first.remaining() <= LONG && first.remaining() > LONG / 2);
    let full = ONE.try_acquire(&pool).await.unwrap().full().unwrap();
    assert!(full.retry_after <= LONG && full.retry_after > LONG / 2);
    let waited = Instant::now();
    let timeout = Duration::from_millis(80);
    assert!(ONE.acquire_timeout(&pool, timeout).await.unwrap().is_full());
    assert!(waited.elapsed() >= timeout);
    let token = first.fencing_token();
    first.release().await.unwrap();
    assert_eq!(in_flight(&database), 0);

    let mut second = ONE.acquire(&pool).await.unwrap();
    assert!(second.fencing_token() > token);
    let expires_at = second.claim().expires_at;
    assert!(second.renew().await.unwrap() > expires_at);
    assert!(second.claim().expires_at > expires_at);
    drop(second);
    taken(&database, 0).await;

    let value = ONE.with(&pool, async |permit| {
        Ok::<_, Error>(permit.fencing_token() + in_flight(&database))
    });
    assert!(value.await.unwrap() > token);
    assert_eq!(in_flight(&database), 0);
    let admission = ONE.try_acquire(&pool).await.unwrap();
    let ran = admission.run(async |_| Err::<(), _>(Error::StrictIsolation));
    assert!(matches!(ran.await, Err(Error::StrictIsolation)));
    taken(&database, 0).await;

    let claim = permit(&ONE, &pool).await.into_claim();
    let mut own = database.connect_async().await;
    let conn = &mut own;
    assert!(ONE.claim_on(conn).await.unwrap().is_full());
    let renewed = ONE.renew_on(conn, claim.id).await.unwrap();
    assert!(renewed.unwrap() > claim.expires_at);
    assert!(ONE.complete_on(conn, claim.id).await.unwrap());
    assert!(!ONE.complete_on(conn, claim.id).await.unwrap());
    assert_eq!(ONE.renew_on(conn, claim.id).await.unwrap(), None);
    let claim = ONE.claim_on(conn).await.unwrap().admitted().unwrap();
    assert!(ONE.complete_on(conn, claim.id).await.unwrap());
    drop(own);
    full_strength(&database, &pool, 2).await;
}

over_both_pools!(
    a_permit_that_timed_out_reports_it_and_changes_nothing,
    1,
    timed_out
);

async fn timed_out<P: Pool>(database: Database, pool: P) {
    let (mut renewed, released) = {
        let two = Semaphore::named("geocoder", 2, LONG);
        (permit(&two, &pool).await, permit(&two, &pool).await)
    };
    expire(&database);
    let next = permit(&ONE, &pool).await;
    assert!(matches!(
        renewed.renew().await,
        Err(Error::TimedOut { service, id }) if service == "geocoder" && id == renewed.fencing_token()
    ));
    assert_eq!(renewed.remaining(), Duration::ZERO);
    assert!(matches!(
        released.release().await,
        Err(Error::TimedOut { .. })
    ));
    drop(renewed);
    sleep(Duration::from_millis(20)).await;
    assert_eq!(in_flight(&database), 1);
    next.release().await.unwrap();
}

over_both_pools!(
    a_claim_in_a_transaction_that_was_left_open_in_the_pool_is_undone,
    1,
    left_open
);

async fn left_open<P: Pool>(database: Database, pool: P) {
    let begin = async || {
        let mut conn = pool.check_out().await.unwrap();
        conn.batch_execute("BEGIN").await.unwrap();
    };
    begin().await;
    let claim = ONE.try_acquire(&pool).await;
    assert!(matches!(claim, Err(Error::TransactionInPool)), "{claim:?}");
    // The session ends at once, and its uncommitted claim with it.
    let mut own = database.connect_async().await;
    let claim = async {
        loop {
            if let Some(claim) = ONE.claim_on(&mut own).await.unwrap().admitted() {
                break claim;
            }
        }
    };
    let claim = tokio::time::timeout(Duration::from_secs(5), claim)
        .await
        .unwrap();
    assert!(ONE.complete_on(&mut own, claim.id).await.unwrap());
    drop(own);

    let mut held = permit(&ONE, &pool).await;
    begin().await;
    let renewed = held.renew().await;
    assert!(
        matches!(renewed, Err(Error::TransactionInPool)),
        "{renewed:?}"
    );
    held.renew().await.unwrap();
    begin().await;
    let released = held.release().await;
    assert!(
        matches!(released, Err(Error::TransactionInPool)),
        "{released:?}"
    );
    // It is released in the background.
    taken(&database, 0).await;

    let held = permit(&ONE, &pool).await;
    begin().await;
    drop(held);
    taken(&database, 0).await;
    full_strength(&database, &pool, 1).await;
}

#[test]
fn a_claim_in_a_transaction_of_the_caller_is_refused() {
    run(async {
        let database = database();
        let conn = &mut database.connect_async().await;
        let refused = conn
            .transaction(async |conn| ONE.claim_on(conn).await.map(drop))
            .await;
        assert!(matches!(
            refused,
            Err(Error::Misplaced(Misplaced::ClaimInTransaction))
        ));
        // After a plain SQL BEGIN the claim is completed in the transaction, which goes on.
        conn.batch_execute("BEGIN; CREATE TABLE kept ()")
            .await
            .unwrap();
        assert!(matches!(
            ONE.claim_on(conn).await,
            Err(Error::Misplaced(Misplaced::ClaimInTransaction))
        ));
        conn.batch_execute("COMMIT; DROP TABLE kept").await.unwrap();
        assert_eq!(in_flight(&database), 0);
        let claim = ONE.claim_on(conn).await.unwrap().admitted().unwrap();
        assert!(ONE.complete_on(conn, claim.id).await.unwrap());
    });
}

over_both_pools!(
    a_stricter_isolation_level_fails_no_claim,
    2,
    stricter_isolation_levels
);

async fn stricter_isolation_levels<P: Pool>(database: Database, pool: P) {
    for level in ["repeatable read", "serializable"] {
        diesel::sql_query(format!(
            "ALTER DATABASE {} SET default_transaction_isolation = '{level}'",
            database.name()
        ))
        .execute(&mut database.connect())
        .unwrap();
        // The connections that are open have the old level.
        let mut all = Vec::new();
        for _ in 0..2 {
            let mut conn = pool.check_out().await.unwrap();
            let set = format!("SET default_transaction_isolation = '{level}'");
            conn.batch_execute(&set).await.unwrap();
            all.push(conn);
        }
        drop(all);
        let contenders: Vec<_> = (0..8)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move {
                    for _ in 0..10 {
                        let mut permit = ONE.acquire(&pool).await.unwrap();
                        permit.renew().await.unwrap();
                        permit.release().await.unwrap();
                    }
                })
            })
            .collect();
        for contender in contenders {
            contender.await.unwrap();
        }
    }
    assert_eq!(in_flight(&database), 0);
    full_strength(&database, &pool, 2).await;
}

#[test]
fn bad_input_and_a_missing_runtime_are_errors_before_anything_is_sent() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = proxy.deadpool(1);
    {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let mut outside = std::pin::pin!(ONE.try_acquire(&pool));
        assert!(matches!(
            outside.as_mut().poll(&mut context),
            std::task::Poll::Ready(Err(Error::NoRuntime))
        ));
    }
    run(async move {
        for bad in [
            Semaphore::named("", 1, LONG),
            Semaphore::named("x", 0, LONG),
            Semaphore::named("x", 1, Duration::ZERO),
            Semaphore::named("x", 1, LONG).details("\0"),
        ] {
            let claim = bad.try_acquire(&pool).await.map(|_| ());
            assert!(matches!(claim, Err(Error::Input(_))), "{claim:?}");
        }
        let nameless = Semaphore::new("", 1, LONG).acquire(&pool).await;
        assert!(matches!(nameless, Err(Error::Input(Input::EmptyName))));
    });
    assert_eq!(proxy.round_trips(), 0);
}

#[test]
fn a_pool_without_a_connection_is_an_error_and_ends_no_wait_that_began() {
    run(async {
        let database = database();
        let pool = database.deadpool(1);
        let only = pool.check_out().await.unwrap();
        for timeout in [Duration::from_millis(50), Duration::ZERO] {
            let waited = ONE.acquire_timeout(&pool, timeout).await;
            assert!(matches!(waited, Err(Error::Pool(_))), "{waited:?}");
        }
        drop(only);
        let held = permit(&ONE, &pool).await;
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move { ONE.acquire_timeout(&pool, Duration::from_millis(300)).await }
        });
        sleep(Duration::from_millis(50)).await;
        let begun = Instant::now();
        let only = pool.check_out().await.unwrap();
        assert!(waiting.await.unwrap().unwrap().is_full());
        assert!(begun.elapsed() < Duration::from_secs(10));
        drop(only);
        held.release().await.unwrap();
    });
}

over_both_pools!(a_crowd_never_exceeds_the_slots, 2, crowd);

async fn crowd<P: Pool>(database: Database, pool: P) {
    static INSIDE: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    use std::sync::atomic::Ordering::SeqCst;
    let three = Semaphore::named("crowd", 3, LONG);
    INSIDE.store(0, SeqCst);
    let (pool, semaphore) = (&pool, &three);
    let tasks: Vec<_> = (0..16)
        .map(|_| async move {
            for round in 0..8 {
                let permit = semaphore.acquire(pool).await.unwrap();
                let slot = permit.claim().slot;
                assert!((0..3).contains(&slot));
                tokio::task::yield_now().await;
                if round % 2 == 0 {
                    permit.release().await.unwrap();
                }
            }
        })
        .collect();
    let mut set = std::pin::pin!(join_all(tasks));
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        tokio::select! {
            () = &mut set => break,
            () = sleep(Duration::from_millis(5)) => {
                assert!(in_flight(&database) <= 3);
                assert!(Instant::now() < end);
            }
        }
    }
    taken(&database, 0).await;
    full_strength(&database, pool, 2).await;
}

/// Polls all futures until each is ready.
async fn join_all<F: Future<Output = ()>>(futures: Vec<F>) {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    std::future::poll_fn(|context| {
        futures.retain_mut(|future| future.as_mut().poll(context).is_pending());
        if futures.is_empty() {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
}

/// With one waiter the polls are up to 150 milliseconds apart, so most wake-ups are faster.
#[test]
fn a_release_in_one_half_wakes_a_waiter_of_the_other() {
    run(async {
        let database = database();
        let (pool, blocking) = (database.deadpool(2), database.pool(2));
        let semaphore = diesel_interlock::Semaphore::named("both halves", 1, LONG);
        let other = Semaphore::from(semaphore.clone());
        let mut fastest = [Duration::MAX; 2];
        for _ in 0..5 {
            let held = permit(&other, &pool).await;
            let waiting = tokio::task::spawn_blocking({
                let (semaphore, blocking) = (semaphore.clone(), blocking.clone());
                move || (semaphore.acquire(&blocking).unwrap(), Instant::now())
            });
            sleep(Duration::from_millis(500)).await;
            let released = Instant::now();
            held.release().await.unwrap();
            let (held, at) = waiting.await.unwrap();
            fastest[0] = fastest[0].min(at - released);
            let waiting = tokio::spawn({
                let (other, pool) = (other.clone(), pool.clone());
                async move { (other.acquire(&pool).await.unwrap(), Instant::now()) }
            });
            sleep(Duration::from_millis(500)).await;
            let released = Instant::now();
            tokio::task::spawn_blocking(move || held.release().unwrap())
                .await
                .unwrap();
            let (held, at) = waiting.await.unwrap();
            fastest[1] = fastest[1].min(at - released);
            drop(held);
            taken(&database, 0).await;
        }
        assert!(
            fastest.iter().all(|time| *time < Duration::from_millis(25)),
            "{fastest:?}"
        );
    });
}

/// Counted with `RecyclingMethod::Fast`, which sends nothing at a check-out.
#[test]
fn one_round_trip_to_claim_to_be_refused_to_renew_to_release_and_to_drop() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let pool = proxy.deadpool(1);
    let acquire = || runtime.block_on(permit(&ONE, &pool));
    let refuse = || assert!(runtime.block_on(ONE.try_acquire(&pool)).unwrap().is_full());
    let renew = |permit: &mut Permit<_>| {
        runtime.block_on(permit.renew()).unwrap();
    };
    let mut held = acquire();
    renew(&mut held);
    runtime.block_on(held.release()).unwrap();
    let parses = proxy.parses();
    for _ in 0..20 {
        let mut held = None;
        assert_eq!(proxy.count(|| held = Some(acquire())), 1, "a claim");
        let mut held = held.unwrap();
        assert_eq!(proxy.count(refuse), 1, "a refusal");
        assert_eq!(proxy.count(|| renew(&mut held)), 1, "a renewal");
        let release = || runtime.block_on(held.release()).unwrap();
        assert_eq!(proxy.count(release), 1, "a release");
        let held = acquire();
        let dropped = proxy.count(|| {
            drop(held);
            runtime.block_on(taken(&database, 0));
        });
        assert_eq!(dropped, 1, "a drop");
    }
    assert_eq!(proxy.parses(), parses, "all of it was prepared before");
}
