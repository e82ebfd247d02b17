//! A transaction lock is held until its transaction ends.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::Quota;
use workbench::{Cluster, Database};

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, Attempt, Conn, Error, IS_ASYNC, LockKey, NOTICES_BROKEN, PgPool, RateLimit,
    begin, begin_test, check_exclusion, end, execute, make_pool, migrations, on_all, on_one, pool,
    unchecked_pool, wait,
};
use crate::support::{
    Observer, Wanted, assert_pool_whole, eventually, foreign_holder, installed, number, run,
};

static SERVER: AdvisoryLock = AdvisoryLock::named("server");

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn a_lock_is_held_until_the_transaction_ends() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let pair = Wanted::of(vec![AdvisoryLock::new(LockKey::pair(-1, i32::MIN))]);
    for wanted in Wanted::one_and_several(&SERVER).into_iter().chain([pair]) {
        let lock = &wanted.lock;
        on_one(&pool, |conn| {
            for way in 0..3 {
                begin(conn);
                match way {
                    0 => wait(lock.acquire_xact(conn)).unwrap(),
                    1 => assert!(wait(lock.try_acquire_xact(conn)).unwrap().is_acquired()),
                    _ => {
                        let attempt = wait(lock.acquire_xact_timeout(conn, MINUTE)).unwrap();
                        assert!(attempt.is_acquired());
                    }
                }
                wait(lock.acquire_xact(conn)).unwrap();
                wanted.assert_held(&mut observer);
                end(conn);
                assert_eq!(observer.all_held(), 0);
            }
        });
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_busy_lock_is_refused_and_the_transaction_goes_on() {
    let database = Database::new();
    let pool = pool(&database, 1);
    for wanted in Wanted::one_and_several(&SERVER) {
        let lock = &wanted.lock;
        let holder = wanted.foreign_holder(&database);
        on_one(&pool, |conn| {
            begin(conn);
            assert_matches!(wait(lock.try_acquire_xact(conn)), Ok(Attempt::Busy));
            for milliseconds in [50, 0] {
                let (timeout, began) = (Duration::from_millis(milliseconds), Instant::now());
                let waited = wait(lock.acquire_xact_timeout(conn, timeout));
                assert_matches!(waited, Ok(Attempt::Busy));
                assert!(began.elapsed() >= timeout);
            }
            wait(execute(
                conn,
                "DO $$ BEGIN ASSERT current_setting('lock_timeout') = '0'; END $$",
            ))
            .unwrap();
            drop(holder);
            assert_matches!(
                wait(lock.acquire_xact_timeout(conn, MINUTE)),
                Ok(Attempt::Acquired(()))
            );
            end(conn);
        });
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn an_acquisition_waits_for_the_holder() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let lock = SERVER.key(1);
    for timeout in [None, Some(MINUTE)] {
        let holder = foreign_holder(&database, lock.lock_key());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                on_one(&pool, |conn| {
                    begin(conn);
                    match timeout {
                        None => wait(lock.acquire_xact(conn)).unwrap(),
                        Some(timeout) => {
                            let waited = wait(lock.acquire_xact_timeout(conn, timeout)).unwrap();
                            assert!(waited.is_acquired());
                        }
                    }
                    end(conn);
                });
            });
            eventually("the lock is awaited on the server", || {
                observer.waiters(lock.lock_key()) == 1
            });
            drop(holder);
            waiting.join().unwrap();
        });
    }
}

#[test]
fn a_session_that_ends_in_a_wait_is_reported_as_such() {
    let database = Database::new();
    let pool = unchecked_pool(&database, 1);
    let mut observer = Observer::of(&database);
    let lock = SERVER.key(1);
    let all = AdvisoryLock::all([&SERVER, &lock]);
    let holder = foreign_holder(&database, lock.lock_key());
    for (lock, timeout) in [(&lock, None), (&lock, Some(MINUTE)), (&all, Some(MINUTE))] {
        let waited = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                on_one(&pool, |conn| {
                    begin(conn);
                    match timeout {
                        None => wait(lock.acquire_xact(conn)),
                        Some(timeout) => wait(lock.acquire_xact_timeout(conn, timeout)).map(drop),
                    }
                })
            });
            eventually("the lock is awaited on the server", || {
                observer.all_waiting() == 1
            });
            let waiter = "(SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
            let pid = number(observer.conn(), waiter);
            observer.kill(pid.try_into().unwrap());
            waiting.join().unwrap()
        });
        let ended = waited.unwrap_err();
        assert!(ended.is_unavailable(), "{ended:?}");
    }
    drop(holder);
    assert_pool_whole(&pool, &database);
}

#[test]
fn the_timeouts_of_the_session_apply_to_a_wait() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    for wanted in Wanted::one_and_several(&SERVER) {
        let lock = &wanted.lock;
        let holder = wanted.foreign_holder(&database);
        for setting in ["lock_timeout = '20ms'", "statement_timeout = '20ms'"] {
            for timeout in [None, Some(MINUTE)] {
                on_one(&pool, |conn| {
                    begin(conn);
                    wait(execute(conn, &format!("SET LOCAL {setting}"))).unwrap();
                    let waited = match timeout {
                        None => wait(lock.acquire_xact(conn)),
                        Some(timeout) => wait(lock.acquire_xact_timeout(conn, timeout)).map(drop),
                    };
                    assert_matches!(waited, Err(Error::Database(_)));
                    end(conn);
                });
                assert_eq!(observer.all_held(), 1, "only the foreign lock");
            }
        }
        drop(holder);
        observer.assert_free(wanted.key());
    }
    assert_pool_whole(&pool, &database);
}

/// The errors of the three ways to take the lock.
fn refusals(lock: &AdvisoryLock, conn: &mut Conn) -> [Error; 3] {
    TRIES.map(|refusal| refusal(lock, conn))
}

const TRIES: [fn(&AdvisoryLock, &mut Conn) -> Error; 3] = [
    |lock, conn| wait(lock.try_acquire_xact(conn)).map(drop).unwrap_err(),
    |lock, conn| wait(lock.acquire_xact(conn)).unwrap_err(),
    |lock, conn| {
        let refused = wait(lock.acquire_xact_timeout(conn, MINUTE));
        refused.map(drop).unwrap_err()
    },
];

#[test]
fn outside_a_transaction_and_at_repeatable_read_an_acquisition_is_an_error() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    for Wanted { lock, .. } in Wanted::one_and_several(&SERVER) {
        on_one(&pool, |conn| {
            for refused in refusals(&lock, conn) {
                assert_matches!(refused, Error::OutsideTransaction);
            }
            for level in ["REPEATABLE READ", "SERIALIZABLE"] {
                begin(conn);
                let set = format!("SET TRANSACTION ISOLATION LEVEL {level}");
                wait(execute(conn, &set)).unwrap();
                if level == "SERIALIZABLE" {
                    wait(lock.acquire_xact(conn)).unwrap();
                } else {
                    for refused in refusals(&lock, conn) {
                        assert_matches!(refused, Error::RepeatableRead);
                    }
                    assert_eq!(observer.all_held(), 0);
                    wait(execute(conn, "SELECT 1")).unwrap();
                }
                end(conn);
            }
        });
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn on_a_standby_an_acquisition_is_an_error() {
    let cluster = Cluster::start();
    let standby = cluster.standby();
    for Wanted { lock, .. } in Wanted::one_and_several(&SERVER) {
        let pool = make_pool(&standby.url("postgres"), 1, Duration::from_secs(20));
        for refusal in TRIES {
            // A connection to a standby leaves its pool, if the manager notices that it is
            // marked as broken.
            let pool = if NOTICES_BROKEN {
                pool.clone()
            } else {
                make_pool(&standby.url("postgres"), 1, Duration::from_secs(20))
            };
            on_one(&pool, |conn| {
                begin(conn);
                assert_matches!(refusal(&lock, conn), Error::Standby);
            });
        }
    }
}

/// Each request checks whether the server is booked, and then inserts a booking. Without a lock,
/// ten concurrent requests would book the server ten times.
#[test]
fn of_ten_concurrent_requests_one_books_the_server() {
    for isolation in ["read committed", "repeatable read", "serializable"] {
        let database = Database::new();
        let conn = &mut database.connect();
        run(conn, "CREATE TABLE booking (server integer NOT NULL)");
        run(
            conn,
            &format!(
                "ALTER DATABASE {} SET default_transaction_isolation = '{isolation}'",
                database.name()
            ),
        );
        let barrier = Barrier::new(10);
        thread::scope(|scope| {
            for _ in 0..10 {
                scope.spawn(|| {
                    let pool = pool(&database, 1);
                    barrier.wait();
                    on_one(&pool, |conn| {
                        let booked: Result<(), Error> = wait(SERVER.key(345).transaction(
                            conn,
                            work!(|conn| {
                                let insert = "INSERT INTO booking SELECT 345 WHERE NOT EXISTS (SELECT FROM booking)";
                                Ok(reply!(execute(conn, insert))?)
                            }),
                        ));
                        booked.unwrap();
                    });
                });
            }
        });
        assert_eq!(
            number(conn, "(SELECT count(*) FROM booking)"),
            1,
            "{isolation}"
        );
    }
}

#[test]
fn transaction_commits_a_value_and_rolls_back_an_error() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let observer = &mut database.connect();
    run(observer, "CREATE TABLE written ()");
    on_one(&pool, |conn| {
        let committed: Result<i32, Error> = wait(SERVER.transaction(
            conn,
            work!(|conn| {
                reply!(execute(conn, "INSERT INTO written DEFAULT VALUES"))?;
                Ok(7)
            }),
        ));
        assert_eq!(committed.unwrap(), 7);
        let failed: Result<(), Error> = wait(SERVER.transaction(
            conn,
            work!(|conn| {
                reply!(execute(conn, "INSERT INTO written DEFAULT VALUES"))?;
                Err(Error::TimedOut)
            }),
        ));
        assert_matches!(failed, Err(Error::TimedOut));
        let failed: Result<(), Error> =
            wait(SERVER.transaction(conn, work!(|conn| Ok(reply!(execute(conn, "SELECT 1/0"))?))));
        assert_matches!(failed, Err(Error::Database(_)));
        let nested: Result<(), Error> = wait(SERVER.transaction(
            conn,
            work!(|conn| reply!(SERVER.transaction(conn, work!(|_conn| Ok(()))))),
        ));
        assert_matches!(nested, Err(Error::InsideTransaction));
    });
    assert_eq!(number(observer, "(SELECT count(*) FROM written)"), 1);
    assert_pool_whole(&pool, &database);
}

#[test]
fn work_that_has_lost_its_transaction_is_an_error() {
    let database = Database::new();
    let pool = unchecked_pool(&database, 1);
    let after = |hidden: &str| -> Result<(), Error> {
        on_one(&pool, |conn| {
            wait(SERVER.transaction(
                conn,
                work!(|conn| {
                    let _ = reply!(execute(conn, hidden));
                    Ok(())
                }),
            ))
        })
    };
    let ended = after("SELECT pg_terminate_backend(pg_backend_pid())").unwrap_err();
    assert!(ended.is_unavailable(), "{ended:?}");
    // diesel-async does not track the server's transaction status, so it does not notice the
    // ROLLBACK.
    if !IS_ASYNC {
        assert_matches!(after("ROLLBACK"), Err(Error::TransactionEnded));
    }
    after("SELECT 1").unwrap();
}

#[test]
fn an_aborted_test_transaction_is_an_error_of_its_own() {
    let database = Database::new();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| {
        begin_test(conn);
        assert!(wait(execute(conn, "SELECT 1/0")).is_err());
        let refused: Result<(), Error> = wait(SERVER.transaction(conn, work!(|_conn| Ok(()))));
        assert_matches!(refused, Err(Error::Database(_)));
    });
}

/// Other code has left a transaction open on each connection of a pool that does not check its
/// connections.
#[test]
fn a_pooled_connection_inside_a_transaction_is_discarded() {
    let limit = RateLimit::named("x", Quota::per_minute(1000));
    type Operation<'a> = &'a dyn Fn(&PgPool) -> Result<(), Error>;
    let operations: [Operation<'_>; 4] = [
        &|pool| wait(RateLimit::check_all(&[&limit], pool)).map(drop),
        &|pool| wait(check_exclusion(pool)),
        &|pool| wait(migrations::install(pool)).map(drop),
        &|pool| {
            on_one(pool, |conn| {
                wait(SERVER.transaction(conn, work!(|_conn| Ok(()))))
            })
        },
    ];
    for (i, operation) in operations.into_iter().enumerate() {
        let database = if i == 0 { installed() } else { Database::new() };
        let pool = unchecked_pool(&database, 2);
        let conn = &mut database.connect();
        run(conn, "CREATE TABLE left_open (id serial)");
        wait(on_all(&pool, "BEGIN; INSERT INTO left_open DEFAULT VALUES")).unwrap();
        let tries: Vec<_> = (0..3).map(|_| operation(&pool)).collect();
        for refused in &tries {
            assert_matches!(
                refused,
                Ok(()) | Err(Error::DirtyConnection | Error::InsideTransaction)
            );
        }
        assert_matches!(tries.last(), Some(Ok(())));
        assert_pool_whole(&pool, &database);
        let left = number(conn, "(SELECT count(*) FROM left_open)");
        assert_eq!(left, 0, "operation {i}");
    }
}

#[test]
fn rolling_back_a_savepoint_frees_the_lock() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    on_one(&pool, |conn| {
        begin(conn);
        wait(execute(conn, "SAVEPOINT before")).unwrap();
        wait(SERVER.acquire_xact(conn)).unwrap();
        wait(execute(conn, "ROLLBACK TO SAVEPOINT before")).unwrap();
        assert_eq!(observer.holders(SERVER.lock_key()), 0);
        end(conn);
    });
}
