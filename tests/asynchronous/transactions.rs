//! Transaction locks, and what a dropped future leaves of them.

use std::future::{Future, pending, poll_fn};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Poll;
use std::time::Duration;

use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel::sql_types::BigInt;
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{AdvisoryLock, Pool};
use diesel_interlock::error::Misplaced;
use diesel_interlock::{Attempt, Error, Result};
use workbench::Database;

use crate::dropping::{drops, poll_times};
use crate::run;

static LOCK: AdvisoryLock = AdvisoryLock::named("x");
const SHORT: Duration = Duration::from_millis(20);

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

pub(crate) fn count(conn: &mut PgConnection, sql: &str) -> i64 {
    let found: Count = diesel::sql_query(sql).get_result(conn).unwrap();
    found.count
}

const LOCKS: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' \
     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// Waits until no session holds an advisory lock or waits for one, and looks again 2 milliseconds later.
pub(crate) async fn freed(observer: &mut PgConnection) {
    for _ in 0..2000 {
        if count(observer, LOCKS) == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
            assert_eq!(count(observer, LOCKS), 0);
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("still held");
}

fn database() -> Database {
    let database = Database::new();
    let create = "CREATE TABLE booking (id int)";
    diesel::sql_query(create)
        .execute(&mut database.connect())
        .unwrap();
    database
}

async fn book(conn: &mut AsyncPgConnection) -> Result<()> {
    conn.batch_execute("INSERT INTO booking VALUES (1)").await?;
    conn.batch_execute("INSERT INTO booking VALUES (2)").await?;
    Ok(())
}

#[test]
fn a_transaction_commits_under_its_lock_and_an_error_rolls_it_back() {
    run(async {
        let database = database();
        let observer = &mut database.connect();
        let conn = &mut database.connect_async().await;
        let held = LOCK.transaction(conn, async |conn| {
            book(conn).await?;
            Ok::<_, Error>(count(&mut database.connect(), LOCKS))
        });
        assert_eq!(held.await.unwrap(), 1);
        let failed = LOCK.transaction(conn, async |conn| {
            book(conn).await?;
            Err::<(), Error>(DieselError::RollbackTransaction.into())
        });
        assert!(matches!(
            failed.await,
            Err(Error::Database(DieselError::RollbackTransaction))
        ));
        assert_eq!(count(observer, "SELECT count(*) FROM booking"), 2);
        freed(observer).await;
    });
}

#[test]
fn a_lock_that_is_held_is_busy_and_the_transaction_stays_usable() {
    run(async {
        let database = database();
        let (conn, other) = (
            &mut database.connect_async().await,
            &mut database.connect_async().await,
        );
        let guard = LOCK.acquire_on(other).await.unwrap();
        let tried = LOCK.try_transaction(conn, book).await;
        assert!(tried.unwrap().is_busy());
        let timed = LOCK.transaction_timeout(conn, SHORT, book).await;
        assert!(timed.unwrap().is_busy());
        let continued = conn.transaction(async |conn| {
            conn.batch_execute("SET LOCAL lock_timeout = '7s'").await?;
            assert!(LOCK.try_acquire_xact(conn).await?.is_busy());
            assert!(LOCK.acquire_xact_timeout(conn, SHORT).await?.is_busy());
            let as_before = "DO $$ BEGIN ASSERT current_setting('lock_timeout') = '7s'; END $$";
            conn.batch_execute(as_before).await?;
            book(conn).await
        });
        continued.await.unwrap();
        guard.release().await.unwrap();
        let booked = LOCK.transaction_timeout(conn, SHORT, book).await;
        assert!(matches!(booked, Ok(Attempt::Acquired(()))));
        let booked = LOCK.try_transaction(conn, book).await;
        assert!(matches!(booked, Ok(Attempt::Acquired(()))));
        let observer = &mut database.connect();
        assert_eq!(count(observer, "SELECT count(*) FROM booking"), 6);
    });
}

#[test]
fn a_misplaced_transaction_lock_is_refused() {
    run(async {
        let database = database();
        let conn = &mut database.connect_async().await;
        assert!(matches!(
            LOCK.acquire_xact(conn).await,
            Err(Error::Misplaced(Misplaced::XactLockOutsideTransaction))
        ));
        let nested = conn.transaction(async |conn| LOCK.transaction(conn, book).await);
        assert!(matches!(
            nested.await,
            Err(Error::Misplaced(Misplaced::NestedTransaction))
        ));
        conn.begin_test_transaction().await.unwrap();
        LOCK.transaction(conn, book).await.unwrap();
        let failed = LOCK.transaction(conn, async |conn| {
            book(conn).await?;
            Err::<(), Error>(DieselError::RollbackTransaction.into())
        });
        failed.await.unwrap_err();
        LOCK.transaction(conn, book).await.unwrap();
        let as_before = "DO $$ BEGIN ASSERT (SELECT count(*) FROM booking) = 4; END $$";
        conn.batch_execute(as_before).await.unwrap();
    });
}

/// Drops `transaction` after every number of polls, while another session holds the lock every third time.
async fn drop_transactions<P: Pool>(database: Database, pool: P) {
    let observer = &mut database.connect();
    let other = &mut database.connect_async().await;
    let (mut polls, mut dropped, mut completed) = (0, 0, 0);
    while dropped < drops() {
        let mut conn = pool.check_out().await.unwrap();
        let holder = match dropped % 3 {
            0 => Some(LOCK.acquire_on(other).await.unwrap()),
            _ => None,
        };
        let is_busy = holder.is_some();
        let mut booking = std::pin::pin!(poll_times(LOCK.transaction(&mut conn, book), polls));
        let output = if is_busy {
            // It waits for the lock, unless it is dropped before.
            tokio::time::timeout(Duration::from_millis(5), &mut booking)
                .await
                .unwrap_or_default()
        } else {
            booking.as_mut().await
        };
        drop(holder);
        let was_ready = match output {
            Some(booked) => {
                booked.unwrap();
                completed += 1;
                true
            }
            None => {
                dropped += 1;
                false
            }
        };
        polls = if was_ready || polls > 40 {
            0
        } else {
            polls + 1
        };
    }
    assert!(completed > 0);
    freed(observer).await;
    assert_eq!(
        count(observer, "SELECT count(*) % 2 AS count FROM booking"),
        0
    );
    // The pool has its full strength.
    let mut all = Vec::new();
    for _ in 0..pool.size() {
        let mut conn = pool.check_out().await.unwrap();
        LOCK.transaction(&mut conn, book).await.unwrap();
        all.push(conn);
    }
}

#[test]
fn a_dropped_transaction_leaves_nothing_in_deadpool() {
    run(async {
        let database = database();
        let pool = database.deadpool(3);
        drop_transactions(database, pool).await;
    });
}

#[test]
fn a_dropped_transaction_leaves_nothing_in_bb8() {
    run(async {
        let database = database();
        let pool = database.bb8(3);
        drop_transactions(database, pool).await;
    });
}

#[test]
fn a_dropped_transaction_frees_its_lock_although_nobody_uses_the_connection() {
    run(async {
        let database = database();
        let observer = &mut database.connect();
        let before = "SELECT count(*) FROM booking";
        let mut polls = 0;
        loop {
            let mut conn = database.connect_async().await;
            let rows = count(observer, before);
            let booked = poll_times(LOCK.transaction(&mut conn, book), polls).await;
            if let Some(booked) = booked {
                booked.unwrap();
                break;
            }
            freed(observer).await;
            let more = count(observer, before) - rows;
            assert!(more == 0 || more == 2, "{more} after {polls} polls");
            if polls > 0 {
                let again = LOCK.transaction(&mut conn, book).await;
                assert!(
                    matches!(
                        again,
                        Err(Error::Database(DieselError::BrokenTransactionManager))
                    ),
                    "{again:?} after {polls} polls"
                );
            }
            polls += 1;
        }
        assert!(polls >= 4, "{polls}");
    });
}

#[test]
fn a_dropped_transaction_inside_a_test_transaction_is_rolled_back_to_its_savepoint() {
    run(async {
        let database = database();
        let mut polls = 1;
        loop {
            let mut conn = database.connect_async().await;
            conn.begin_test_transaction().await.unwrap();
            let booked = poll_times(LOCK.transaction(&mut conn, book), polls).await;
            let rows = "DO $$ BEGIN ASSERT (SELECT count(*) FROM booking) IN (0, 2); END $$";
            conn.batch_execute(rows).await.unwrap();
            if booked.is_some() {
                break;
            }
            polls += 1;
        }
        assert!(polls >= 4, "{polls}");
    });
}

#[test]
fn a_panic_rolls_back() {
    run(async {
        let database = database();
        let observer = &mut database.connect();
        let mut conn = database.connect_async().await;
        let booking = tokio::spawn(async move {
            LOCK.transaction(&mut conn, async |conn| {
                book(conn).await?;
                if true {
                    panic!("in the work");
                }
                Ok::<_, Error>(())
            })
            .await
        });
        assert!(booking.await.unwrap_err().is_panic());
        freed(observer).await;
        assert_eq!(count(observer, "SELECT count(*) FROM booking"), 0);
    });
}

/// A caller may give a wait up and continue its transaction, which then commits.
#[test]
fn a_transaction_whose_wait_was_dropped_can_be_continued() {
    run(async {
        let database = database();
        let observer = &mut database.connect();
        let mut polls = 0;
        loop {
            let (conn, other) = (
                &mut database.connect_async().await,
                &mut database.connect_async().await,
            );
            let guard = LOCK.acquire_on(other).await.unwrap();
            let rows = count(observer, "SELECT count(*) FROM booking");
            let waited = conn
                .transaction(async |conn| {
                    let wait = LOCK.acquire_xact_timeout(conn, SHORT);
                    let waited = poll_times(wait, polls).await;
                    book(conn).await?;
                    Ok::<_, Error>(waited)
                })
                .await
                .unwrap();
            let more = count(observer, "SELECT count(*) FROM booking") - rows;
            assert_eq!(more, 2, "after {polls} polls");
            guard.release().await.unwrap();
            if let Some(waited) = waited {
                assert!(waited.unwrap().is_busy());
                break;
            }
            polls += 1;
        }
        assert!(polls >= 3, "{polls}");
        freed(observer).await;
    });
}

/// The lock of a dropped try or wait belongs to the transaction of the caller, and ends with it.
#[test]
fn a_dropped_transaction_lock_ends_with_the_callers_transaction() {
    run(async {
        let database = database();
        let observer = &mut database.connect();
        let mut polls = 0;
        loop {
            let conn = &mut database.connect_async().await;
            let acquired = conn
                .transaction(async |conn| {
                    let acquired = poll_times(LOCK.acquire_xact(conn), polls).await;
                    book(conn).await?;
                    Ok::<_, Error>(acquired)
                })
                .await
                .unwrap();
            freed(observer).await;
            if let Some(acquired) = acquired {
                acquired.unwrap();
                break;
            }
            polls += 1;
        }
        assert!(polls >= 1, "{polls}");
    });
}

#[test]
fn a_nested_transaction_that_was_dropped_is_rolled_back_and_reported() {
    run(async {
        let database = database();
        let observer = &mut database.connect();
        let conn = &mut database.connect_async().await;
        for outcome in [Ok(()), Err(Error::Standby)] {
            let is_ok = outcome.is_ok();
            let done = LOCK.transaction(conn, async |conn| {
                book(conn).await?;
                let is_inside = AtomicBool::new(false);
                let mut nested = Box::pin(conn.transaction(async |_| {
                    is_inside.store(true, SeqCst);
                    pending::<Result<()>>().await
                }));
                poll_fn(|context| {
                    assert!(nested.as_mut().poll(context).is_pending());
                    if is_inside.load(SeqCst) {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
                drop(nested);
                outcome
            });
            let error = done.await.unwrap_err();
            if is_ok {
                let broken = Error::Database(DieselError::BrokenTransactionManager);
                assert_eq!(error.to_string(), broken.to_string());
            } else {
                assert!(matches!(error, Error::Standby), "{error:?}");
            }
            assert_eq!(count(observer, "SELECT count(*) FROM booking"), 0);
            freed(observer).await;
        }
        // The connection can still be used.
        LOCK.transaction(conn, book).await.unwrap();
        assert_eq!(count(observer, "SELECT count(*) FROM booking"), 2);
    });
}

#[test]
fn a_nested_transaction_that_was_dropped_at_any_point_never_commits_by_half() {
    run(async {
        let database = database();
        let observer = &mut database.connect();
        let conn = &mut database.connect_async().await;
        let (mut dropped, mut committed) = (0, 0);
        for polls in 1..20 {
            let mut is_complete = false;
            let done = LOCK.transaction(conn, async |conn| {
                conn.batch_execute("INSERT INTO booking VALUES (1)").await?;
                let nested = conn.transaction(async |conn| {
                    conn.batch_execute("INSERT INTO booking VALUES (2)").await?;
                    Ok::<_, Error>(())
                });
                is_complete = poll_times(nested, polls).await.is_some();
                Ok::<_, Error>(())
            });
            let done = done.await;
            let booked = count(observer, "SELECT count(*) FROM booking");
            if is_complete {
                done.unwrap();
                committed += 2;
            } else {
                done.unwrap_err();
                dropped += 1;
            }
            assert_eq!(booked, committed, "after {polls} polls");
            freed(observer).await;
            let is_usable = conn.transaction(async |_| Ok::<_, Error>(())).await;
            if is_usable.is_err() {
                *conn = database.connect_async().await;
            }
        }
        assert!(dropped > 0 && committed > 0, "{dropped}, {committed}");
    });
}
