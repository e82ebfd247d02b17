//! `Once::run`: the work of a key has one effect, and all callers get the same outcome.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use diesel::result::{DatabaseErrorKind, Error as DieselError};
use workbench::{Cluster, Database};

use crate::assert_matches;
use crate::half::{
    Attempt, Conn, Done, Error, NOTICES_BROKEN, Once, PgPool, begin, end, execute, make_pool,
    on_first, on_one, pool, prune, unchecked_pool, wait,
};
use crate::support::{
    Observer, assert_pool_whole, eventually, install, installed, number, run, text,
};

static CHARGE: Once = Once::named("charge");

const EFFECT: &str = "INSERT INTO effect DEFAULT VALUES";
const EFFECTS: &str = "(SELECT count(*) FROM effect)";
/// SQL that ends its own session.
const EXIT: &str = "SELECT pg_terminate_backend(pg_backend_pid())";
/// The pid of the session that holds the lock of `Once`, and so does the work.
const HOLDER: &str =
    "(SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND database =
    (SELECT oid FROM pg_database WHERE datname = current_database()))";
const DONE: &str = "(SELECT count(*) FROM resource_control.once)";

/// A database with the schema, and a table for the effects of the work.
fn database() -> Database {
    let database = installed();
    run(&mut database.connect(), "CREATE TABLE effect (id serial)");
    database
}

/// The pool, or another one if its manager would lend a connection again that Diesel has marked as
/// broken.
fn replaced(before: PgPool, database: &Database) -> PgPool {
    if NOTICES_BROKEN {
        before
    } else {
        pool(database, 1)
    }
}

fn charge(once: &Once, conn: &mut Conn, outcome: &str) -> Result<Done, Error> {
    wait(once.run(
        conn,
        work!(|conn| {
            reply!(execute(conn, EFFECT))?;
            Ok(outcome)
        }),
    ))
}

/// Charges on a connection of the pool.
fn charged(once: &Once, pool: &PgPool, outcome: &str) -> Result<Done, Error> {
    on_one(pool, |conn| charge(once, conn, outcome))
}

/// Charges on a connection of the pool, with work that also sends `more`.
fn charged_and(pool: &PgPool, more: &str) -> Result<Done, Error> {
    on_one(pool, |conn| {
        wait(CHARGE.run(
            conn,
            work!(|conn| {
                reply!(execute(conn, EFFECT))?;
                reply!(execute(conn, more))?;
                Ok("done")
            }),
        ))
    })
}

fn first(outcome: &str) -> Done {
    Done::First(outcome.into())
}

fn before(outcome: &str) -> Done {
    Done::Before(outcome.into())
}

/// Asserts that nothing was done, that no transaction and no lock is left, and that the next caller
/// does the work.
#[track_caller]
fn assert_undone(once: &Once, pool: &PgPool, database: &Database) {
    let conn = &mut database.connect();
    assert_eq!((number(conn, EFFECTS), number(conn, DONE)), (0, 0));
    assert_pool_whole(pool, database);
    assert_eq!(charged(once, pool, "anew").unwrap(), first("anew"));
    assert_eq!((number(conn, EFFECTS), number(conn, DONE)), (1, 1));
}

/// Clients choose the keys of `Once`, and could find a key whose number is that of a named lock. So
/// the lock is in the space of pairs.
#[test]
fn the_lock_of_once_is_a_pair() {
    let database = database();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let spaces = "(SELECT sum(objsubid) * 100 + count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted \
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
    for once in [CHARGE.clone(), CHARGE.key("of a client")] {
        on_one(&pool, |conn| {
            assert!(
                wait(once.run(
                    conn,
                    work!(|_conn| {
                        assert_eq!(number(observer.conn(), spaces), 201);
                        Ok::<_, Error>("done")
                    })
                ))
                .unwrap()
                .is_first()
            );
        });
    }
}

#[test]
fn a_repetition_gets_the_outcome_and_has_no_effect() {
    let database = database();
    let pool = pool(&database, 1);
    let bytes: Vec<u8> = (0..=255).collect();
    for outcome in [Vec::new(), bytes, vec![7; 1 << 20]] {
        let once = CHARGE.key(outcome.len());
        on_one(&pool, |conn| {
            let done: Result<Done, Error> = wait(once.run(
                conn,
                work!(|conn| {
                    reply!(execute(conn, EFFECT))?;
                    Ok(outcome.clone())
                }),
            ));
            assert_eq!(done.unwrap(), Done::First(outcome.clone()));
            for _ in 0..3 {
                let done = charge(&once, conn, "again").unwrap();
                assert!(!done.is_first());
                assert_eq!(done.bytes(), outcome);
                assert_eq!(done.into_bytes(), outcome);
            }
        });
    }
    assert_eq!(number(&mut database.connect(), EFFECTS), 3);
    assert_pool_whole(&pool, &database);
}

#[test]
fn of_ten_concurrent_calls_one_has_an_effect_and_all_get_its_outcome() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = database();
        let conn = &mut database.connect();
        let name = database.name();
        run(
            conn,
            &format!("ALTER DATABASE {name} SET default_transaction_isolation = '{level}'"),
        );
        let pools: Vec<_> = (0..10).map(|_| pool(&database, 1)).collect();
        let start = Barrier::new(10);
        for key in 0..10 {
            let done: Vec<Done> = thread::scope(|scope| {
                let posts: Vec<_> = (0..10)
                    .map(|number| {
                        let (pool, start) = (&pools[number], &start);
                        scope.spawn(move || {
                            start.wait();
                            charged(&CHARGE.key(key), pool, &number.to_string()).unwrap()
                        })
                    })
                    .collect();
                posts.into_iter().map(|it| it.join().unwrap()).collect()
            });
            assert_eq!(done.iter().filter(|it| it.is_first()).count(), 1, "{level}");
            assert!(
                done.iter().all(|it| it.bytes() == done[0].bytes()),
                "{level}"
            );
            assert_eq!(number(conn, EFFECTS), key + 1, "{level}");
        }
    }
}

/// Lets a first call end by `ends` while a second call waits for it. Returns the outcome of the
/// second call, and the number of effects.
fn behind(ends: impl Fn(&mut Observer) -> Result<&'static str, Error> + Sync) -> (Done, i64) {
    let database = database();
    let pool = pool(&database, 2);
    let is_inside = Barrier::new(2);
    let second = thread::scope(|scope| {
        scope.spawn(|| {
            let mut observer = Observer::of(&database);
            let _ = catch_unwind(AssertUnwindSafe(|| {
                on_one(&pool, |conn| {
                    let first: Result<Done, Error> = wait(CHARGE.run(
                        conn,
                        work!(|conn| {
                            reply!(execute(conn, EFFECT))?;
                            is_inside.wait();
                            eventually("the second call waits", || observer.all_waiting() == 1);
                            ends(&mut observer)
                        }),
                    ));
                    first.map(drop)
                })
            }));
        });
        is_inside.wait();
        charged(&CHARGE, &pool, "second").unwrap()
    });
    assert_pool_whole(&pool, &database);
    (second, number(&mut database.connect(), EFFECTS))
}

#[test]
fn a_second_call_waits_for_the_first_and_gets_its_outcome() {
    assert_eq!(behind(|_| Ok("first")), (before("first"), 1));
}

#[test]
fn after_a_first_call_that_fails_the_second_call_does_the_work() {
    assert_eq!(behind(|_| Err(Error::TimedOut)), (first("second"), 1));
    assert_eq!(behind(|_| panic!("in the work")), (first("second"), 1));
    let killed = |observer: &mut Observer| {
        let pid = number(observer.conn(), HOLDER);
        observer.kill(pid.try_into().unwrap());
        Ok("of a session that has ended")
    };
    assert_eq!(behind(killed), (first("second"), 1));
}

#[test]
fn work_that_fails_is_not_done() {
    for failing in [
        "SELECT 1/0",
        "SELECT pg_terminate_backend(pg_backend_pid())",
    ] {
        let database = database();
        let pool = pool(&database, 1);
        let failed = charged_and(&pool, failing);
        assert_matches!(failed, Err(Error::Database(_)));
        assert_undone(&CHARGE, &pool, &database);
    }
}

#[test]
fn work_that_hides_its_error_is_not_done() {
    let database = database();
    let pool = pool(&database, 1);
    let failed: Result<Done, Error> = on_one(&pool, |conn| {
        wait(CHARGE.run(
            conn,
            work!(|conn| {
                reply!(execute(conn, EFFECT))?;
                assert!(reply!(execute(conn, "SELECT 1/0")).is_err());
                Ok("done")
            }),
        ))
    });
    assert_matches!(failed, Err(Error::Database(_)));
    assert_undone(&CHARGE, &pool, &database);
}

#[test]
fn work_that_ends_its_transaction_is_not_done() {
    for (ending, effects) in [
        ("ROLLBACK", 0),
        ("ROLLBACK AND CHAIN", 0),
        ("ROLLBACK; BEGIN", 0),
        ("COMMIT", 1),
        ("COMMIT AND CHAIN", 1),
    ] {
        let database = database();
        let pool = pool(&database, 1);
        let failed = charged_and(&pool, ending);
        assert_matches!(failed, Err(Error::TransactionEnded));
        let conn = &mut database.connect();
        assert_eq!((number(conn, EFFECTS), number(conn, DONE)), (effects, 0));
        run(conn, "DELETE FROM effect");
        assert_undone(&CHARGE, &pool, &database);
    }
}

#[test]
fn work_that_makes_its_transaction_read_only_is_not_taken_for_a_standby() {
    let database = database();
    let pool = pool(&database, 1);
    let failed = charged_and(&pool, "SET TRANSACTION READ ONLY");
    assert_matches!(
        failed,
        Err(Error::Database(DieselError::DatabaseError(
            DatabaseErrorKind::ReadOnlyTransaction,
            _
        )))
    );
    assert_undone(&CHARGE, &pool, &database);
}

#[test]
fn work_that_panics_is_not_done() {
    let database = database();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let _: Result<Done, Error> = wait(CHARGE.run(
                conn,
                work!(|conn| {
                    reply!(execute(conn, EFFECT))?;
                    if true {
                        panic!("in the work");
                    }
                    Ok("done")
                }),
            ));
        }));
        assert!(caught.is_err());
    });
    assert_undone(&CHARGE, &replaced(pool, &database), &database);
}

#[test]
fn work_whose_commit_is_refused_is_not_done() {
    let database = database();
    let pool = pool(&database, 1);
    run(
        &mut database.connect(),
        "ALTER TABLE effect ADD CONSTRAINT one_id UNIQUE (id) DEFERRABLE INITIALLY DEFERRED",
    );
    let refused: Result<Done, Error> = on_one(&pool, |conn| {
        wait(CHARGE.run(
            conn,
            work!(|conn| {
                reply!(execute(conn, "INSERT INTO effect VALUES (-1), (-1)"))?;
                Ok("done")
            }),
        ))
    });
    assert_matches!(
        refused,
        Err(Error::Database(DieselError::DatabaseError(
            DatabaseErrorKind::UniqueViolation,
            _
        )))
    );
    assert_undone(&CHARGE, &pool, &database);
}

#[test]
fn the_work_and_its_mark_are_seen_together() {
    let database = database();
    let pool = pool(&database, 1);
    let observer = &mut database.connect();
    let both = format!("{EFFECTS} + 2 * {DONE}");
    on_one(&pool, |conn| {
        let done: Result<Done, Error> = wait(CHARGE.run(
            conn,
            work!(|conn| {
                reply!(execute(conn, EFFECT))?;
                let own = format!("DO $$ BEGIN ASSERT {EFFECTS} = 1; END $$");
                reply!(execute(conn, &own))?;
                assert_eq!(number(observer, &both), 0);
                Ok("done")
            }),
        ));
        assert!(done.unwrap().is_first());
    });
    assert_eq!(number(observer, &both), 3);
    assert_eq!(
        text(observer, "(SELECT outcome FROM resource_control.once)"),
        r"\x646f6e65"
    );
}

#[test]
fn different_names_and_keys_do_not_collide() {
    let database = database();
    let pool = pool(&database, 1);
    let all = [
        Once::named("charge"),
        Once::named("charge").key(1),
        Once::named("charge").key(2),
        Once::named("charge").key("1 "),
        Once::named("charge").key(r"1\ "),
        Once::named("refund").key(1),
        Once::named("charge 1"),
        Once::named("charge 1").key(2),
        Once::named("charge").key("1 2"),
    ];
    for (number, once) in all.iter().enumerate() {
        let number = number.to_string();
        assert_eq!(charged(once, &pool, &number).unwrap(), first(&number));
    }
    for (number, once) in all.iter().enumerate() {
        let repeated = charged(once, &pool, "again").unwrap();
        assert_eq!(repeated, before(&number.to_string()), "{once:?}");
    }
}

/// Half of the calls fail, and half of these end their session.
#[test]
fn however_often_the_work_fails_each_key_has_one_effect_and_one_outcome() {
    const KEYS: usize = 30;
    const WORKS: [&str; 4] = ["SELECT 1", "SELECT 1/0", EXIT, "SELECT 1"];
    let database = database();
    let outcomes: Vec<Vec<Done>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|thread| {
                let database = &database;
                scope.spawn(move || {
                    let pool = pool(database, 1);
                    let (mut turn, mut done) = (thread, Vec::new());
                    while done.len() < KEYS {
                        turn += 1;
                        let failing = WORKS[turn % 4];
                        let outcome = format!("{thread} {turn}");
                        let result: Result<Done, Error> = on_one(&pool, |conn| {
                            wait(CHARGE.key(done.len()).run(
                                conn,
                                work!(|conn| {
                                    reply!(execute(conn, EFFECT))?;
                                    reply!(execute(conn, failing))?;
                                    Ok(outcome.clone())
                                }),
                            ))
                        });
                        done.extend(result.ok());
                    }
                    done
                })
            })
            .collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    });
    for key in 0..KEYS {
        let of_key = || outcomes.iter().map(|done| &done[key]);
        assert_eq!(of_key().filter(|it| it.is_first()).count(), 1);
        assert!(of_key().all(|it| it.bytes() == outcomes[0][key].bytes()));
    }
    let conn = &mut database.connect();
    assert_eq!(number(conn, EFFECTS), KEYS as i64);
    assert_eq!(number(conn, DONE), KEYS as i64);
}

#[test]
fn old_outcomes_are_pruned() {
    let database = database();
    let pool = pool(&database, 1);
    let conn = &mut database.connect();
    for key in 0..3 {
        assert!(charged(&CHARGE.key(key), &pool, "").unwrap().is_first());
    }
    let hour = Duration::from_secs(3600);
    assert_eq!(wait(prune::once(&pool, hour)).unwrap(), 0);
    run(
        conn,
        "UPDATE resource_control.once SET done_at = done_at - interval '1 hour' WHERE key < '2';
        INSERT INTO resource_control.once SELECT 'many', k, '', '2026-01-01' FROM generate_series(1, 10000) AS k",
    );
    // A row that another transaction has locked is skipped.
    run(
        conn,
        "BEGIN; SELECT FROM resource_control.once WHERE name = 'charge' AND key = '1' FOR UPDATE",
    );
    assert_eq!(wait(prune::once(&pool, hour)).unwrap(), 10_001);
    run(conn, "COMMIT");
    for (key, is_forgotten) in [(0, true), (1, false), (2, false)] {
        let done = charged(&CHARGE.key(key), &pool, "").unwrap();
        assert_eq!(done.is_first(), is_forgotten, "{key}");
    }
    assert_eq!(wait(prune::once(&pool, Duration::ZERO)).unwrap(), 3);
    assert_matches!(
        wait(prune::once(&pool, Duration::MAX)),
        Err(Error::Input(_))
    );
}

#[test]
fn bad_input_is_refused_before_anything_is_sent() {
    let database = database();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    on_one(&pool, |conn| {
        observer.kill_all(); // so that all that is sent fails
        for once in [
            Once::named(""),
            Once::named("nul\0"),
            CHARGE.key(""),
            CHARGE.key("nul\0"),
            CHARGE.key("x".repeat(1001)),
        ] {
            let refused = charge(&once, conn, "done");
            assert_matches!(refused, Err(Error::Input(_)));
        }
    });
    let longest = CHARGE.key(" ".repeat(1000));
    assert_eq!(charged(&longest, &pool, "done").unwrap(), first("done"));
    assert_eq!(charged(&longest, &pool, "again").unwrap(), before("done"));
}

#[test]
fn inside_a_transaction_a_run_is_an_error() {
    let database = database();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| {
        begin(conn);
        assert_matches!(charge(&CHARGE, conn, "done"), Err(Error::InsideTransaction));
        end(conn);
        let nested: Result<Done, Error> = wait(CHARGE.run(
            conn,
            work!(|conn| {
                let inner: Result<Done, Error> =
                    reply!(CHARGE.key(1).run(conn, work!(|_conn| Ok("inner"))));
                inner.map(Done::into_bytes)
            }),
        ));
        assert_matches!(nested, Err(Error::InsideTransaction));
    });
    assert_undone(&CHARGE, &pool, &database);
}

#[test]
fn inside_a_transaction_of_plain_sql_a_run_is_an_error() {
    let database = database();
    let mut pool = pool(&database, 1);
    for before in [EFFECT, "SAVEPOINT one"] {
        on_one(&pool, |conn| {
            wait(execute(conn, &format!("BEGIN; {before}"))).unwrap();
            assert_matches!(charge(&CHARGE, conn, "done"), Err(Error::InsideTransaction));
            wait(execute(conn, "ROLLBACK")).unwrap();
        });
        pool = replaced(pool, &database);
    }
    assert_undone(&CHARGE, &pool, &database);
}

#[test]
fn a_session_that_ends_in_the_work_or_in_the_commit_is_reported_as_such() {
    let database = database();
    run(
        &mut database.connect(),
        "CREATE FUNCTION exit() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(10); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER exit AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION exit();
        CREATE TABLE at_once (); CREATE TRIGGER exit AFTER INSERT ON at_once EXECUTE FUNCTION exit()",
    );
    let pool = unchecked_pool(&database, 1);
    let ended = charged(&CHARGE, &pool, "done").unwrap_err();
    assert!(ended.is_unavailable(), "{ended:?}");
    let ended: Result<Done, Error> = on_one(&pool, |conn| {
        wait(CHARGE.run(
            conn,
            work!(|conn| {
                let _ = reply!(execute(conn, "INSERT INTO at_once DEFAULT VALUES"));
                Ok("done")
            }),
        ))
    });
    let ended = ended.unwrap_err();
    assert!(ended.is_unavailable(), "{ended:?}");
}

#[test]
fn a_missing_schema_is_an_error_of_its_own() {
    let database = Database::new();
    let pool = pool(&database, 1);
    assert_matches!(charged(&CHARGE, &pool, "done"), Err(Error::NotInstalled));
    assert_matches!(
        wait(prune::once(&pool, Duration::ZERO)),
        Err(Error::NotInstalled)
    );
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_session_that_has_ended_is_reported_as_such() {
    let database = database();
    let pool = unchecked_pool(&database, 1);
    let mut observer = Observer::of(&database);
    on_one(&pool, |conn| {
        assert!(charge(&CHARGE, conn, "done").unwrap().is_first());
        observer.kill_all();
        eventually("the session has ended", || observer.sessions() == 0);
        let ended = charge(&CHARGE, conn, "again").unwrap_err();
        assert!(ended.is_unavailable(), "{ended:?}");
    });
}

/// The statement that takes the lock may begin before the first call commits. Its snapshot is then
/// too old to show the outcome, so the outcome is read by a new snapshot.
#[test]
fn the_outcome_is_read_after_the_lock_was_granted() {
    let database = database();
    let mut observer = Observer::of(&database);
    let lock = "pg_advisory_xact_lock(resource_control.lock_key('once charge 7'))";
    let holder = &mut database.connect();
    run(holder, &format!("BEGIN; SELECT {lock}"));
    thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let granted = format!("WITH granted AS MATERIALIZED (SELECT {lock})");
            let outcome =
                "encode((resource_control.once_outcome('charge', '7')).outcome, 'escape')";
            text(
                &mut database.connect(),
                &format!("({granted} SELECT {outcome} FROM granted)"),
            )
        });
        eventually("the statement waits for the lock", || {
            observer.all_waiting() == 1
        });
        run(
            holder,
            "INSERT INTO resource_control.once VALUES ('charge', '7', 'done'); COMMIT",
        );
        assert_eq!(looking.join().unwrap(), "done");
    });
}

#[test]
fn a_timeout_of_the_session_ends_a_wait() {
    let database = database();
    let pool = pool(&database, 1);
    let holder = &mut database.connect();
    run(
        holder,
        "BEGIN; SELECT pg_advisory_xact_lock((number >> 32)::int, (number << 32 >> 32)::int) \
         FROM resource_control.lock_key('once charge ') AS number",
    );
    for setting in ["lock_timeout", "statement_timeout"] {
        // A session for each setting, because on a slow machine even resetting the timeout may time
        // out.
        on_one(&crate::half::pool(&database, 1), |conn| {
            wait(execute(conn, &format!("SET {setting} = '20ms'"))).unwrap();
            let waited = charge(&CHARGE, conn, "done");
            assert_matches!(waited, Err(Error::Database(_)));
        });
    }
    assert_eq!(
        Observer::of(&database).all_held(),
        1,
        "only the holder's lock"
    );
    run(holder, "COMMIT");
    assert_undone(&CHARGE, &pool, &database);
}

#[test]
fn on_a_standby_a_run_is_an_error() {
    let cluster = Cluster::start();
    install(&mut cluster.endpoint("postgres").connect());
    let standby = cluster.standby();
    let pool = make_pool(&standby.url("postgres"), 1, Duration::from_secs(20));
    assert_matches!(charged(&CHARGE, &pool, "done"), Err(Error::Standby));
}

/// The duplicates do not occupy the connections of the pool while the first call works.
#[test]
fn of_fifty_twins_one_runs_and_all_others_are_busy_at_once() {
    const TWINS: usize = 50;
    let database = database();
    let pool = pool(&database, 5);
    let (busy, start) = (AtomicUsize::new(0), Barrier::new(TWINS));
    let (is_inside, may_end) = (AtomicBool::new(false), AtomicBool::new(false));
    let twin = || -> Result<Attempt<Done>, Error> {
        on_one(&pool, |conn| {
            wait(CHARGE.try_run(
                conn,
                work!(|conn| {
                    reply!(execute(conn, EFFECT))?;
                    assert!(
                        !is_inside.swap(true, Ordering::SeqCst),
                        "two callers do the work"
                    );
                    eventually("all other callers have an outcome", || {
                        may_end.load(Ordering::SeqCst)
                    });
                    Ok("done")
                }),
            ))
        })
    };
    let done: Vec<Done> = thread::scope(|scope| {
        let twins: Vec<_> = (0..TWINS)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    let done = twin().unwrap().acquired();
                    if done.is_none() {
                        busy.fetch_add(1, Ordering::SeqCst);
                    }
                    done
                })
            })
            .collect();
        eventually("all other callers are busy", || {
            busy.load(Ordering::SeqCst) == TWINS - 1
        });
        // Meanwhile the other connections of the pool serve other calls.
        for _ in 0..10 {
            wait(on_first(&pool, "SELECT 1")).unwrap();
        }
        let other = charged(&CHARGE.key("another"), &pool, "other").unwrap();
        assert_eq!(other, first("other"));
        may_end.store(true, Ordering::SeqCst);
        let done = twins.into_iter().map(|it| it.join().unwrap());
        done.flatten().collect()
    });
    assert_eq!(done, [first("done")]);
    assert_eq!(number(&mut database.connect(), EFFECTS), 2);
    assert_eq!(twin().unwrap().acquired(), Some(before("done")));
    assert_pool_whole(&pool, &database);
}

/// Charges on a connection of the pool, for a request.
fn charged_for(request: Option<&str>, key: &str, pool: &PgPool) -> Result<Done, Error> {
    let once = CHARGE.key(key);
    let once = match request {
        Some(request) => once.fingerprint(request),
        None => once,
    };
    charged(&once, pool, "done")
}

#[test]
fn another_request_with_the_same_key_is_refused() {
    let database = database();
    let pool = pool(&database, 1);
    let conn = &mut database.connect();
    // An empty request and a long one are requests, too.
    let long = "x".repeat(100_000);
    for (key, request, other) in [("a", "4200", "9900"), ("b", "", "1"), ("c", &long, "")] {
        let done = charged_for(Some(request), key, &pool).unwrap();
        assert_eq!(done, first("done"));
        for _ in 0..2 {
            let refused = charged_for(Some(other), key, &pool);
            assert_matches!(refused, Err(Error::OtherRequest("charge")));
            assert_eq!(
                charged_for(Some(request), key, &pool).unwrap(),
                before("done")
            );
        }
        // A call without a fingerprint gets the outcome.
        assert_eq!(charged_for(None, key, &pool).unwrap(), before("done"));
    }
    assert_eq!(number(conn, EFFECTS), 3);
    let hashed = "(SELECT count(*) FROM resource_control.once WHERE (key, fingerprint) IN
        (('a', sha256('4200')), ('b', sha256('')), ('c', sha256(repeat('x', 100000)::bytea))))";
    assert_eq!(number(conn, hashed), 3);
    assert_pool_whole(&pool, &database);
}

#[test]
fn where_no_fingerprint_was_stored_nothing_is_compared() {
    let database = database();
    let pool = pool(&database, 1);
    assert_eq!(charged_for(None, "a", &pool).unwrap(), first("done"));
    for request in [Some("4200"), Some("9900"), None] {
        assert_eq!(charged_for(request, "a", &pool).unwrap(), before("done"));
    }
    let none = "(SELECT count(*) FROM resource_control.once WHERE fingerprint IS NULL)";
    assert_eq!(number(&mut database.connect(), none), 1);
}

/// Failed work stores no fingerprint, so that another request may succeed under the key afterwards.
#[test]
fn the_fingerprint_of_work_that_fails_is_forgotten() {
    let database = database();
    let pool = pool(&database, 1);
    let failed: Result<Done, Error> = on_one(&pool, |conn| {
        wait(
            CHARGE
                .key("a")
                .fingerprint("1")
                .run(conn, work!(|_conn| Err::<&str, _>(Error::TimedOut))),
        )
    });
    assert_matches!(failed, Err(Error::TimedOut));
    assert_eq!(charged_for(Some("2"), "a", &pool).unwrap(), first("done"));
    assert_matches!(
        charged_for(Some("1"), "a", &pool),
        Err(Error::OtherRequest(_))
    );
}
