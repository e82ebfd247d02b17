//! `with_on` and `try_with_on`: session locks for the duration of a closure, on a connection of the
//! caller.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use workbench::Database;

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, Attempt, Error, IS_ASYNC, NOTICES_BROKEN, begin, begin_inside, execute, on_one,
    pool, wait,
};
use crate::support::{Observer, Wanted, eventually, number, run};

static LOCK: AdvisoryLock = AdvisoryLock::named("scopes");

#[test]
fn a_lock_is_held_in_the_scope_and_free_after_it() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    for wanted in Wanted::one_and_several(&LOCK) {
        let lock = &wanted.lock;
        on_one(&pool, |conn| {
            let held: Result<(), Error> = wait(lock.with_on(
                conn,
                work!(|conn| {
                    reply!(execute(conn, "SELECT 1"))?;
                    Ok(wanted.assert_held(&mut observer))
                }),
            ));
            held.unwrap();
            assert_eq!(observer.all_held(), 0);
            let failed: Result<(), Error> =
                wait(lock.with_on(conn, work!(|conn| Ok(reply!(execute(conn, "SELECT 1/0"))?))));
            assert_matches!(failed, Err(Error::Database(_)));
            assert_eq!(observer.all_held(), 0);
        });
    }
}

#[test]
fn a_busy_lock_is_not_waited_for_by_the_try() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    for wanted in Wanted::one_and_several(&LOCK) {
        let holder = wanted.foreign_holder(&database);
        on_one(&pool, |conn| {
            let tried: Result<Attempt<()>, Error> = wait(
                wanted
                    .lock
                    .try_with_on(conn, work!(|_conn| panic!("the lock is busy"))),
            );
            assert_eq!(tried.unwrap(), Attempt::Busy);
            assert_eq!(observer.all_held(), 1, "only the foreign lock");
            wait(execute(conn, "SELECT 1")).unwrap();
        });
        drop(holder);
        observer.assert_free(wanted.key());
    }
}

#[test]
fn a_scope_waits_for_the_holder_of_the_lock() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    for wanted in Wanted::one_and_several(&LOCK) {
        let holder = wanted.foreign_holder(&database);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                on_one(&pool, |conn| {
                    let held: Result<(), Error> =
                        wait(wanted.lock.with_on(conn, work!(|_conn| Ok(()))));
                    held.unwrap();
                });
            });
            eventually("the lock is awaited on the server", || {
                observer.waiters(wanted.key()) == 1
            });
            drop(holder);
            waiting.join().unwrap();
        });
        assert_eq!(observer.all_held(), 0);
    }
}

#[test]
fn a_transaction_that_is_left_open_ends_the_session() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    on_one(&pool, |conn| {
        let left: Result<(), Error> = wait(LOCK.with_on(
            conn,
            work!(|conn| {
                reply!(execute(conn, "BEGIN"))?;
                Ok(reply!(execute(conn, "SELECT 1/0"))?)
            }),
        ));
        assert!(left.is_err());
        observer.assert_free(LOCK.lock_key());
    });
    wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap();
    if NOTICES_BROKEN {
        on_one(&pool, begin);
        wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap();
    }
}

#[test]
fn a_transaction_that_is_left_open_is_rolled_back_and_reported() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    run(observer.conn(), "CREATE TABLE written ()");
    const WRITE: &str = "INSERT INTO written DEFAULT VALUES";
    for (is_nested, is_plain) in [(false, false), (true, false), (false, true)] {
        if IS_ASYNC && is_plain {
            continue; // diesel-async does not notice a transaction of plain SQL
        }
        on_one(&pool, |conn| {
            let left: Result<(), Error> = wait(LOCK.with_on(
                conn,
                work!(|conn| {
                    if is_plain {
                        reply!(execute(conn, "BEGIN"))?;
                    } else {
                        reply!(begin_inside(conn))?;
                    }
                    if is_nested {
                        reply!(begin_inside(conn))?;
                    }
                    reply!(execute(conn, WRITE))?;
                    Ok(())
                }),
            ));
            assert_matches!(left, Err(Error::TransactionLeftOpen(_)));
            assert_eq!(observer.holders(LOCK.lock_key()), 0);
            assert_eq!(observer.in_transaction(), 0);
            // Outside a transaction a savepoint is an error.
            assert!(wait(execute(conn, "SAVEPOINT outside")).is_err());
            let held: Result<(), Error> =
                wait(LOCK.with_on(conn, work!(|conn| Ok(reply!(execute(conn, "SELECT 1"))?))));
            held.unwrap();
        });
        assert_eq!(number(observer.conn(), "(SELECT count(*) FROM written)"), 0);
    }
}

/// The transaction must not outlive the lock.
#[test]
fn a_panic_in_a_transaction_ends_the_session() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    on_one(&pool, |conn| {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let ran: Result<(), Error> = wait(LOCK.with_on(
                conn,
                work!(|conn| {
                    reply!(begin_inside(conn))?;
                    panic!("in the work")
                }),
            ));
            ran
        }));
        assert!(panicked.is_err());
        assert!(wait(execute(conn, "SELECT 1")).is_err());
        observer.assert_free(LOCK.lock_key());
    });
    wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap();
}

#[test]
fn a_lost_lock_is_reported() {
    let database = Database::new();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| {
        let lost: Result<(), Error> = wait(LOCK.with_on(
            conn,
            work!(|conn| Ok(reply!(execute(conn, "SELECT pg_advisory_unlock_all()"))?)),
        ));
        assert_matches!(lost, Err(Error::LockLost(_)));
    });
}
