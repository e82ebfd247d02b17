//! Sessions in a state that the application left behind: transactions, deallocated statements, settings.

use std::time::Duration;

use diesel::connection::InstrumentationEvent;
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{AdvisoryLock, Pool};
use diesel_interlock::{Error, LockKey, migrations};
use tokio::task::block_in_place;
use workbench::{Database, RoundTrips};

use crate::dropping::{KEY, NOBODY, Observer, assert_full_strength, poll_times};
use crate::run;
use crate::transactions::count;

static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::bigint(KEY));
static OUTER: AdvisoryLock = AdvisoryLock::named("outer");

const LIMIT: Duration = Duration::from_secs(60);

async fn abort(conn: &mut AsyncPgConnection) {
    conn.batch_execute("BEGIN").await.unwrap();
    conn.batch_execute("SELECT 1 / 0").await.unwrap_err();
}

async fn assert_usable(conn: &mut AsyncPgConnection) {
    let transaction = conn.transaction(async |conn| conn.batch_execute("SELECT 1").await);
    transaction.await.unwrap();
}

async fn asserts(conn: &mut AsyncPgConnection, condition: &str) {
    let block = format!("DO $$ BEGIN ASSERT {condition}; END $$");
    conn.batch_execute(&block).await.unwrap();
}

async fn nested_leak<P: Pool>(database: Database, pool: P) {
    let observer = &mut Observer::of(&database);
    for drops in [false, true] {
        let mut outer = OUTER.acquire(&pool).await.unwrap();
        let mut inner = LOCK.acquire_on(outer.conn()).await.unwrap();
        abort(inner.conn()).await;
        // The unlock fails, and nobody reads the reply.
        drop(inner);
        outer.conn().batch_execute("ROLLBACK").await.unwrap();
        assert_ne!(observer.requests(), NOBODY);
        if drops {
            drop(outer);
        } else {
            outer.release().await.unwrap();
        }
        block_in_place(|| observer.until(NOBODY, LIMIT));
    }
    assert_full_strength(&pool, 2).await;
}

#[test]
fn a_lock_that_a_nested_guard_could_not_release_goes_with_the_outer_guard() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(2);
        nested_leak(database, pool).await;
        let database = Database::new();
        let pool = database.bb8(2);
        nested_leak(database, pool).await;
    });
}

#[test]
fn a_guard_is_released_although_the_instrumentation_panics_in_its_drop() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        let conn = &mut database.connect_async().await;
        let mut guard = LOCK.acquire_on(conn).await.unwrap();
        guard
            .conn()
            .set_instrumentation(|event: InstrumentationEvent<'_>| {
                if let InstrumentationEvent::StartQuery { .. } = event {
                    panic!("in the instrumentation");
                }
            });
        drop(guard);
        block_in_place(|| observer.until(NOBODY, LIMIT));
        assert_usable(conn).await;
    });
}

async fn dropped_release_in_transaction<P: Pool>(pool: P) {
    for polls in 1..4 {
        let mut guard = LOCK.acquire(&pool).await.unwrap();
        guard.conn().batch_execute("BEGIN").await.unwrap();
        let _ = poll_times(guard.release(), polls).await;
        // None of the connections is inside a transaction.
        assert_full_strength(&pool, 1).await;
    }
}

#[test]
fn a_release_that_is_dropped_inside_a_transaction_of_plain_sql_does_not_leave_it_in_the_pool() {
    run(async {
        let database = Database::new();
        dropped_release_in_transaction(database.deadpool(1)).await;
        dropped_release_in_transaction(database.bb8(1)).await;
    });
}

#[test]
fn a_wait_that_fails_on_the_server_discards_its_pooled_connection() {
    run(async {
        let database = Database::new();
        let observer = &mut database.connect();
        let holder = &mut database.connect_async().await;
        let held = LOCK.acquire_on(holder).await.unwrap();
        let pool = database.deadpool(1);
        let waiting = pool.clone();
        let wait = tokio::spawn(async move { LOCK.acquire(&waiting).await.map(drop) });
        let waits = "SELECT COALESCE(max(pid), 0)::bigint AS count FROM pg_locks \
             WHERE locktype = 'advisory' AND NOT granted \
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        let mut pid = 0;
        // A cancellation at the end of a slice is taken for its timeout, so it is sent again.
        while !wait.is_finished() {
            pid = count(observer, waits).max(pid);
            let cancel = format!("SELECT pg_cancel_backend({pid})::int::bigint AS count");
            if pid != 0 {
                count(observer, &cancel);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let waited = wait.await.unwrap();
        assert!(matches!(waited, Err(Error::Database(_))), "{waited:?}");
        let mut looks = 0;
        let is_alive = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}");
        while count(observer, &is_alive) != 0 {
            looks += 1;
            assert!(looks < 2000, "the connection is still there");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        held.release().await.unwrap();
        assert_full_strength(&pool, 1).await;
    });
}

#[test]
fn a_try_in_an_aborted_transaction_leaves_the_connection_to_its_owner() {
    run(async {
        let database = Database::new();
        let conn = &mut database.connect_async().await;
        abort(conn).await;
        let tried = LOCK.try_acquire_on(conn).await;
        assert!(matches!(tried, Err(Error::Database(_))), "{tried:?}");
        drop(tried);
        conn.batch_execute("ROLLBACK").await.unwrap();
        assert_usable(conn).await;
        LOCK.acquire_on(conn)
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    });
}

#[test]
fn a_release_in_an_aborted_transaction_rolls_it_back() {
    run(async {
        let database = Database::new();
        let conn = &mut database.connect_async().await;
        let mut guard = LOCK.acquire_on(conn).await.unwrap();
        abort(guard.conn()).await;
        let released = guard.release().await;
        let is_reported = matches!(released, Err(Error::TransactionLeftOpen { .. }));
        assert!(is_reported, "{released:?}");
        assert_eq!(Observer::of(&database).requests(), NOBODY);
        assert_usable(conn).await;
    });
}

#[test]
fn statements_that_were_deallocated_are_no_loss_on_a_lent_connection() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        let conn = &mut database.connect_async().await;
        LOCK.acquire_on(conn)
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        let mut guard = LOCK.acquire_on(conn).await.unwrap();
        guard.conn().batch_execute("DEALLOCATE ALL").await.unwrap();
        guard.release().await.unwrap();
        assert_eq!(observer.requests(), NOBODY);

        let pool = database.deadpool(1);
        // The release of a connection that was lent is another statement than that of one that was not.
        LOCK.with(&pool, async |_| Ok::<_, Error>(()))
            .await
            .unwrap();
        let mut guard = LOCK.acquire(&pool).await.unwrap();
        guard.conn().batch_execute("DEALLOCATE ALL").await.unwrap();
        let released = guard.release().await;
        let is_reported = matches!(released, Err(Error::ReleaseFailed { .. }));
        assert!(is_reported, "{released:?}");
        block_in_place(|| observer.until(NOBODY, LIMIT));
        LOCK.acquire(&pool).await.unwrap().release().await.unwrap();
    });
}

#[test]
fn a_transaction_that_was_left_open_in_the_pool_is_found() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(1);
        for left in ["BEGIN", "BEGIN; SELECT 1 / 0"] {
            let mut conn = pool.check_out().await.unwrap();
            let _ = conn.batch_execute(left).await;
            drop(conn);
            let tried = LOCK.try_acquire(&pool).await;
            assert!(matches!(tried, Err(Error::TransactionInPool)), "{tried:?}");
            LOCK.acquire(&pool).await.unwrap().release().await.unwrap();
        }
    });
}

#[test]
fn the_idle_session_timeout_is_restored_on_each_way_out() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        if database
            .connect_async()
            .await
            .batch_execute("SHOW idle_session_timeout")
            .await
            .is_err()
        {
            return; // before PostgreSQL 14
        }
        let set = "SET idle_session_timeout = '70s'";
        let is_restored = "current_setting('idle_session_timeout') = '70s'";
        let is_lifted = "current_setting('idle_session_timeout') = '0'";

        // First a try that was dropped before its reply told that there is a timeout.
        let is_new = "NOT EXISTS (SELECT FROM pg_settings \
                      WHERE name = 'idle_session_timeout' AND source = 'session')";
        migrations::install(&mut database.connect()).unwrap();
        let (pool, fenced) = (database.deadpool(1), LOCK.clone().fenced());
        for polls in (0..8).cycle().take(24) {
            let mut conn = pool.check_out().await.unwrap();
            conn.batch_execute(set).await.unwrap();
            drop(conn);
            drop(poll_times(fenced.try_acquire(&pool), polls).await);
            block_in_place(|| observer.until(NOBODY, LIMIT));
            let mut conn = pool.check_out().await.unwrap();
            asserts(&mut conn, &format!("{is_restored} OR {is_new}")).await;
        }

        let conn = &mut database.connect_async().await;
        conn.batch_execute(set).await.unwrap();
        for polls in 0..8 {
            let mut guard = LOCK.acquire_on(conn).await.unwrap();
            asserts(guard.conn(), is_lifted).await;
            let _ = poll_times(guard.release(), polls).await;
            block_in_place(|| observer.until(NOBODY, LIMIT));
            asserts(conn, is_restored).await;
        }
        let outer = LOCK.acquire_on(conn).await.unwrap();
        drop(outer);
        asserts(conn, is_restored).await;

        // A pooled session is as before, or another one.
        let pool = database.deadpool(1);
        for way in 0..30 {
            let mut conn = pool.check_out().await.unwrap();
            conn.batch_execute(set).await.unwrap();
            drop(conn);
            let polls = way / 3;
            match way % 3 {
                0 => drop(poll_times(LOCK.try_acquire(&pool), polls).await),
                1 => drop(LOCK.acquire(&pool).await.unwrap()),
                _ => {
                    let guard = LOCK.acquire(&pool).await.unwrap();
                    let _ = poll_times(guard.release(), polls).await;
                }
            }
            block_in_place(|| observer.until(NOBODY, LIMIT));
            let mut conn = pool.check_out().await.unwrap();
            asserts(&mut conn, &format!("{is_restored} OR {is_new}")).await;
        }
    });
}

#[test]
fn a_take_and_a_release_are_one_round_trip_each() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = proxy.deadpool(1);
    workbench::block_on(async {
        // A process that meets an `idle_session_timeout` sends a longer statement from then on. Here that is before the count,
        // and no other test can change it.
        let met = &mut database.connect_async().await;
        if (met.batch_execute("SET idle_session_timeout = '70s'").await).is_ok() {
            LOCK.acquire_on(met).await.unwrap().release().await.unwrap();
        }
        // Prepares the statements.
        LOCK.acquire(&pool).await.unwrap().release().await.unwrap();
        for _ in 0..200 {
            let before = proxy.round_trips();
            let guard = LOCK.acquire(&pool).await.unwrap();
            let between = proxy.round_trips();
            guard.release().await.unwrap();
            let counts = (between - before, proxy.round_trips() - between);
            assert_eq!(counts, (1, 1));
        }
    });
}
