//! A future that is dropped at any await point leaks nothing: each operation is dropped after every number of polls until it
//! completes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{AdvisoryLock, Pool, PooledGuard};
use diesel_interlock::{Attempt, Error, LockKey};
use tokio::task::block_in_place;
use workbench::Database;

use crate::dropping::{KEY, NOBODY, ONE_HOLDER, Observer, assert_full_strength, drops, poll_times};
use crate::run;

static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::bigint(KEY));
static OTHER: AdvisoryLock = AdvisoryLock::named("contention for the pool");

/// The pool has two connections more than the tasks that contend for it.
const SIZE: u32 = 4;
/// When a lock counts as leaked. A statement of the caller's that is not cancelled takes longer.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Try,
    FencedTry,
    Wait,
    With,
    Release,
    Drop,
    DropBehindQuery,
    DropBehindTransaction,
    ReleaseBehindQuery,
}

const OPERATIONS: [Operation; 9] = [
    Operation::Try,
    Operation::FencedTry,
    Operation::Wait,
    Operation::With,
    Operation::Release,
    Operation::Drop,
    Operation::DropBehindQuery,
    Operation::DropBehindTransaction,
    Operation::ReleaseBehindQuery,
];

async fn held<P: Pool>(pool: &P) -> PooledGuard<P> {
    // What was dropped before may still be on its way, take the lock and give it back.
    match LOCK.acquire_timeout(pool, LIMIT).await.unwrap() {
        Attempt::Acquired(guard) => guard,
        Attempt::Busy => panic!("a dropped future left the lock"),
    }
}

/// Runs an operation and drops it after so many polls. Returns whether it completed.
async fn dropped<P: Pool>(operation: Operation, pool: &P, polls: usize) -> bool {
    let sleep = "SELECT pg_sleep(600)";
    match operation {
        Operation::Try => {
            let tried = poll_times(LOCK.try_acquire(pool), polls).await;
            tried.is_some_and(|tried| tried.unwrap().acquired().is_some())
        }
        Operation::FencedTry => {
            let lock = LOCK.clone().fenced();
            let tried = poll_times(lock.try_acquire(pool), polls).await;
            tried.is_some_and(|tried| tried.unwrap().acquired().is_some())
        }
        Operation::Wait => {
            let wait = LOCK.acquire_timeout(pool, Duration::from_millis(250));
            poll_times(wait, polls).await.is_some() || polls > 12
        }
        Operation::With => {
            let work = LOCK.with(pool, async |conn| {
                conn.batch_execute("SELECT 1").await?;
                conn.transaction(async |conn| conn.batch_execute("SELECT 2").await)
                    .await?;
                Ok::<_, Error>(())
            });
            poll_times(work, polls).await.map(Result::unwrap).is_some()
        }
        Operation::Release => {
            let guard = held(pool).await;
            let released = poll_times(guard.release(), polls).await;
            released.map(Result::unwrap).is_some()
        }
        Operation::Drop => {
            drop(held(pool).await);
            polls > 0
        }
        Operation::DropBehindQuery | Operation::ReleaseBehindQuery => {
            let mut guard = held(pool).await;
            // A second poll would come when it has slept.
            let _ = poll_times(guard.conn().batch_execute(sleep), polls.min(1)).await;
            if operation == Operation::ReleaseBehindQuery && polls > 0 {
                assert!(poll_times(guard.release(), 1).await.is_none());
            }
            polls > 1
        }
        Operation::DropBehindTransaction => {
            let mut guard = held(pool).await;
            let transaction =
                (guard.conn()).transaction(async |conn| conn.batch_execute(sleep).await);
            let _ = poll_times(transaction, polls.min(2)).await;
            polls > 2
        }
    }
}

/// Uses the pool and its connections meanwhile, and asserts that nothing of what is dropped reaches them.
async fn contend<P: Pool>(pool: P, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        let work = OTHER.with(&pool, async |conn| {
            conn.batch_execute("SELECT pg_sleep(0.0002)").await?;
            Ok::<_, Error>(())
        });
        work.await.unwrap();
        let mut conn = pool.check_out().await.unwrap();
        conn.batch_execute("SELECT 1").await.unwrap();
        drop(conn);
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
}

async fn campaign<P: Pool>(database: Database, make: impl Fn(&Database) -> P) {
    let observer = &mut Observer::of(&database);
    let holders = database.deadpool(1);
    for operation in OPERATIONS {
        let waits = operation == Operation::Wait;
        let began = std::time::Instant::now();
        let (mut number, mut slowest) = (0, Duration::ZERO);
        while number < drops() {
            // On new connections nothing is prepared yet.
            let pool = make(&database);
            let stop = Arc::new(AtomicBool::new(false));
            let contenders: Vec<_> = (0..2)
                .map(|_| tokio::spawn(contend(pool.clone(), Arc::clone(&stop))))
                .collect();
            for _ in 0..5 {
                for polls in 0.. {
                    let holder = if waits {
                        Some(held(&holders).await)
                    } else {
                        None
                    };
                    let is_completed = dropped(operation, &pool, polls).await;
                    let expected = if waits { ONE_HOLDER } else { NOBODY };
                    let after = block_in_place(|| observer.until(expected, LIMIT));
                    slowest = slowest.max(after);
                    if let Some(holder) = holder {
                        holder.release().await.unwrap();
                        block_in_place(|| observer.until(NOBODY, LIMIT));
                    }
                    if is_completed {
                        break;
                    }
                    number += 1;
                }
            }
            stop.store(true, Ordering::Relaxed);
            for contender in contenders {
                contender.await.unwrap();
            }
            assert_full_strength(&pool, SIZE as usize).await;
            block_in_place(|| observer.until(NOBODY, LIMIT));
        }
        let took = began.elapsed();
        println!("{operation:?}: {number} dropped in {took:?}, free after {slowest:?} at most");
    }
}

#[test]
fn nothing_is_left_of_a_future_that_is_dropped_with_deadpool() {
    run(async {
        let database = Database::new();
        campaign(database, |database| database.deadpool(SIZE)).await;
    });
}

#[test]
fn nothing_is_left_of_a_future_that_is_dropped_with_bb8() {
    run(async {
        let database = Database::new();
        campaign(database, |database| database.bb8(SIZE)).await;
    });
}

/// Unlocks the outer hold by raw SQL. Returns how often the session held the lock.
async fn holds(conn: &mut AsyncPgConnection) -> usize {
    #[derive(QueryableByName)]
    struct Unlocked {
        #[diesel(sql_type = diesel::sql_types::Bool)]
        unlocked: bool,
    }
    for number in 0.. {
        let query = diesel::sql_query(format!("SELECT pg_advisory_unlock({KEY}) AS unlocked"));
        let unlocked: Unlocked = diesel_async::RunQueryDsl::get_result(query, conn)
            .await
            .unwrap();
        if !unlocked.unlocked {
            return number;
        }
    }
    unreachable!()
}

#[test]
fn the_nested_holds_of_a_lent_connection_are_counted_right() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        for operation in ["take", "fenced", "release", "drop"] {
            let mut number = 0;
            while number < drops() {
                let conn = &mut database.connect_async().await;
                for _ in 0..4 {
                    for polls in 0.. {
                        let take = format!("SELECT pg_advisory_lock({KEY})");
                        conn.batch_execute(&take).await.unwrap();
                        let is_completed = match operation {
                            "take" => poll_times(LOCK.try_acquire_on(conn), polls).await.is_some(),
                            "fenced" => {
                                let lock = LOCK.clone().fenced();
                                poll_times(lock.try_acquire_on(conn), polls).await.is_some()
                            }
                            "release" => {
                                let guard = LOCK.acquire_on(conn).await.unwrap();
                                poll_times(guard.release(), polls).await.is_some()
                            }
                            _ => {
                                let mut guard = LOCK.acquire_on(conn).await.unwrap();
                                let query = guard.conn().batch_execute("SELECT pg_sleep(0.002)");
                                poll_times(query, polls).await.is_some()
                            }
                        };
                        // Nobody uses the connection, and it holds once.
                        block_in_place(|| observer.until(ONE_HOLDER, LIMIT));
                        assert_eq!(holds(conn).await, 1, "{operation} after {polls} polls");
                        if is_completed {
                            break;
                        }
                        number += 1;
                    }
                }
            }
        }
    });
}

#[test]
fn a_wait_that_is_dropped_on_a_lent_connection_takes_nothing() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        let holders = database.deadpool(1);
        for lifts in [false, true] {
            let conn = &mut database.connect_async().await;
            if lifts {
                let setting = "SET statement_timeout = '150ms'";
                conn.batch_execute(setting).await.unwrap();
            }
            for polls in 0..12 {
                let holder = held(&holders).await;
                let wait = LOCK.acquire_timeout_on(conn, Duration::from_secs(2));
                assert!(poll_times(wait, polls).await.is_none());
                holder.release().await.unwrap();
                block_in_place(|| observer.until(NOBODY, LIMIT));
                assert_eq!(holds(conn).await, 0);
                let outside = conn.batch_execute("SAVEPOINT s").await;
                assert!(outside.is_err(), "no transaction is open");
                let setting = if lifts { "150ms" } else { "0" };
                let is_restored = format!(
                    "DO $$ BEGIN ASSERT current_setting('statement_timeout') = '{setting}'; END $$"
                );
                conn.batch_execute(&is_restored).await.unwrap();
            }
        }
    });
}

#[test]
fn a_wait_that_is_dropped_in_a_test_transaction_leaves_the_transaction_and_takes_nothing() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        let holders = database.deadpool(1);
        for polls in 0..14 {
            for is_granted in [false, true] {
                let conn = &mut database.connect_async().await;
                conn.begin_test_transaction().await.unwrap();
                let holder = held(&holders).await;
                let wait = async {
                    let wait = LOCK.acquire_timeout_on(conn, Duration::from_millis(300));
                    poll_times(wait, polls).await.map(drop)
                };
                let release = async {
                    if !is_granted {
                        return Some(holder);
                    }
                    tokio::time::sleep(Duration::from_millis(30)).await;
                    holder.release().await.unwrap();
                    None
                };
                let (_, holder) = tokio::join!(wait, release);
                // Neither the transaction nor the unlock that was queued has failed.
                conn.batch_execute("SELECT 1").await.unwrap();
                assert_eq!(holds(conn).await, 0);
                drop(holder);
                block_in_place(|| observer.until(NOBODY, LIMIT));
            }
        }
    });
}
