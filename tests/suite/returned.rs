//! What has returned has released: after an operation has returned the error of its work, the next
//! try is not refused because of it, and no open transaction is back in the pool. A timeout of zero
//! is one try.

use std::env;
use std::process::exit;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use workbench::{Database, RoundTrips};

use crate::assert_matches;
use crate::half::schedule::RunDue;
use crate::half::*;
use crate::support::{
    IN_FLIGHT, Observer, Process, Wanted, assert_pool_whole, eventually, hourly, in_a_quick_round,
    installed, number, once_at_least, run,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("returned");
const SLOT: Semaphore = Semaphore::named("returned", 1, Duration::from_secs(3600));
const TICK: Schedule = Schedule::named("returned");
const UNITS: RateLimit = RateLimit::named("returned", Quota::per_hour(1));

/// How often a test repeats its round, so that it does not pass by luck.
const TIMES: usize = 200;

/// Whether a release may have been left to the background, because it took longer than two seconds.
fn is_slow(began: Instant) -> bool {
    began.elapsed() > Duration::from_secs(2)
}

#[test]
fn a_lock_is_free_when_the_error_of_the_work_is_returned() {
    let database = Database::new();
    for Wanted { lock, .. } in Wanted::one_and_several(&LOCK) {
        let pool = pool(&database, 2);
        for _ in 0..TIMES {
            let began = Instant::now();
            let failed: Result<()> = wait(lock.with(&pool, work!(|_conn| Err(Error::TimedOut))));
            assert_matches!(failed, Err(Error::TimedOut));
            let attempt = wait(lock.try_acquire(&pool)).unwrap();
            if attempt.is_busy() && is_slow(began) {
                continue;
            }
            assert!(attempt.is_acquired());
            let began = Instant::now();
            let failed: Result<Attempt<()>> =
                wait(attempt.run(work!(|_conn| Err(Error::TimedOut))));
            assert_matches!(failed, Err(Error::TimedOut));
            let attempt = wait(lock.try_acquire(&pool)).unwrap();
            assert!(attempt.is_acquired() || is_slow(began));
            if let Some(guard) = attempt.acquired() {
                wait(guard.release()).unwrap();
            }
        }
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn on_a_lent_connection_nothing_is_held_when_the_error_of_the_work_is_returned() {
    static ONCE: Once = Once::named("returned");
    let database = installed();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    for _ in 0..TIMES {
        let mut assert_over = |failed: Result<()>| {
            assert_matches!(failed, Err(Error::TimedOut));
            assert_eq!(observer.all_held(), 0);
        };
        on_one(&pool, |conn| {
            assert_over(wait(
                LOCK.with_on(conn, work!(|_conn| Err(Error::TimedOut))),
            ));
            assert_over(wait(
                LOCK.transaction(conn, work!(|_conn| Err(Error::TimedOut))),
            ));
            let failed: Result<Done> =
                wait(ONCE.run(conn, work!(|_conn| Err::<Vec<u8>, _>(Error::TimedOut))));
            assert_over(failed.map(drop));
        });
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_slot_is_free_when_the_error_of_the_work_is_returned() {
    let database = installed();
    let pool = pool(&database, 2);
    let observer = &mut database.connect();
    for _ in 0..TIMES {
        let began = Instant::now();
        let failed: Result<()> = wait(SLOT.with(&pool, work!(|_permit| Err(Error::TimedOut))));
        assert_matches!(failed, Err(Error::TimedOut));
        assert!(number(observer, IN_FLIGHT) == 0 || is_slow(began));
    }
}

/// The exit codes of a program whose release was awaited, and of one where it may have been left to
/// the background.
const AWAITED: i32 = 10;
const NOT_AWAITED: i32 = 11;

/// The program of a child process: its work fails, and it exits with that error at once.
fn fail_and_exit(kind: usize, round: &str, url: &str) -> ! {
    let pool = make_pool(url, 1, Duration::from_secs(20));
    let failed_at = Mutex::new(None);
    let fail = || {
        *failed_at.lock().unwrap() = Some(Instant::now());
        Err::<(), _>(Error::TimedOut)
    };
    let has_failed = match kind {
        0 => wait(LOCK.key(round).with(&pool, work!(|_conn| fail()))).is_err(),
        1 => wait(SLOT.key(round).with(&pool, work!(|_permit| fail()))).is_err(),
        _ => {
            let tick = TICK.key(round);
            matches!(
                wait(tick.run_due(&pool, hourly, work!(|_tick| fail()))),
                Ok(RunDue::Ran)
            )
        }
    };
    assert!(has_failed);
    let failed_at = failed_at.into_inner().unwrap().expect("the work has begun");
    exit(if is_slow(failed_at) {
        NOT_AWAITED
    } else {
        AWAITED
    })
}

/// A process that exits at once would never run a release in the background.
#[test]
fn a_program_that_ends_with_the_error_of_its_work_leaves_nothing_taken() {
    const PROGRAM: &str = "INTERLOCK_TEST_PROGRAM";
    const NAME: &str =
        "suite::returned::a_program_that_ends_with_the_error_of_its_work_leaves_nothing_taken";
    if let Ok(program) = env::var(PROGRAM) {
        let mut words = program.splitn(3, ' ');
        let mut next = || words.next().expect("three words");
        let (kind, round, url) = (next().parse().unwrap(), next(), next());
        fail_and_exit(kind, round, url);
    }
    let database = installed();
    let pool = pool(&database, 1);
    let mut awaited = 0;
    for round in 0..90 {
        let kind = round % 3;
        let tick = TICK.key(round);
        if kind == 2 {
            assert!(wait(tick.trigger(&pool)).unwrap());
        }
        let program = format!("{kind} {round} {}", database.url());
        match Process::start(NAME, PROGRAM, &program).end() {
            Some(AWAITED) => awaited += 1,
            Some(NOT_AWAITED) => continue,
            code => panic!("the child process has ended with {code:?}"),
        }
        match kind {
            0 => assert!(
                wait(LOCK.key(round).try_acquire(&pool))
                    .unwrap()
                    .is_acquired()
            ),
            1 => assert!(
                wait(SLOT.key(round).try_acquire(&pool))
                    .unwrap()
                    .is_admitted()
            ),
            _ => {
                assert!(wait(tick.trigger(&pool)).unwrap());
                let ran = wait(tick.run_due(&pool, hourly, work!(|_tick| Ok::<_, Error>(()))));
                assert_eq!(ran.unwrap(), RunDue::Ran);
            }
        }
    }
    assert!(awaited > 45, "only {awaited} releases were awaited");
}

/// After failed work the release also ends a transaction that the work may have left open, in the
/// same flight.
#[test]
fn a_release_takes_one_round_trip_whether_the_work_has_failed_or_not() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = unchecked_pool(&proxy, 1);
    let before = &AtomicU64::new(0);
    let work = |fails: bool| {
        before.store(proxy.flights(), SeqCst);
        if fails { Err(Error::TimedOut) } else { Ok(()) }
    };
    let several = AdvisoryLock::all([&LOCK, &LOCK.key(1)]);
    for fails in [false, true] {
        let kinds: [(_, &dyn Fn() -> Result<()>); 3] = [
            ("a lock", &|| {
                wait(LOCK.with(&pool, work!(|_conn| work(fails))))
            }),
            ("several locks", &|| {
                wait(several.with(&pool, work!(|_conn| work(fails))))
            }),
            ("a permit", &|| {
                wait(SLOT.with(&pool, work!(|_permit| work(fails))))
            }),
        ];
        for (what, with) in kinds {
            if what == "a permit" && !NOTICES_BROKEN {
                continue; // such a pool tests the connection of the release, which is another round trip
            }
            assert_eq!(with().is_err(), fails, "{what}"); // prepares the statements
            // With this delay, messages of one flight are all sent before a reply arrives. A thread
            // that was suspended may send them later, so rounds are repeated.
            proxy.set_delay(Duration::from_millis(100), Duration::ZERO);
            once_at_least(what, || {
                assert_eq!(with().is_err(), fails, "{what}");
                proxy.flights() - before.load(SeqCst) == 1
            });
            proxy.set_delay(Duration::ZERO, Duration::ZERO);
        }
    }
}

/// The statement fails while it holds the lock of the slot: its session may not write, or a trigger
/// raises an error of a kind that Diesel knows. tokio-postgres returns an error before the server has
/// ended the transaction, so the error is returned after the reply to one more message.
#[test]
fn what_a_failed_statement_held_is_free_when_its_error_is_returned() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    let other = crate::half::pool(&database, 1);
    run(
        &mut database.connect(),
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE unique_violation; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON resource_control.service_request FOR EACH ROW
            WHEN (NEW.details = 'refused') EXECUTE FUNCTION refuse()",
    );
    let is_free = |pool: &PgPool| {
        let permit = wait(SLOT.try_acquire(pool)).unwrap().admitted();
        wait(permit.expect("the slot is free").release()).unwrap();
    };
    for _ in 0..20 {
        wait(on_first(&pool, "SET default_transaction_read_only = on")).unwrap();
        is_free(&pool);
        let mut permit = None;
        let granted = proxy.count(|| {
            permit = wait(SLOT.try_acquire(&pool)).unwrap().admitted();
        });
        wait(permit.expect("the slot is free").release()).unwrap();
        let failed = proxy.count(|| {
            let refused = wait(SLOT.details("refused").try_acquire(&pool));
            assert_matches!(refused, Err(Error::Database(_)));
        });
        assert_eq!(failed, granted + 1);
        is_free(&other);
    }
}

/// The release waits until another thread gives the only connection back.
#[test]
fn a_slot_is_free_when_the_error_is_returned_though_the_pool_was_exhausted_meanwhile() {
    let database = installed();
    let pool = pool(&database, 1);
    let (lent, returned) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    let observer = &mut database.connect();
    // A release gives up after two seconds, so a slower round proves nothing.
    for _ in 0..20 {
        let (is_free, took) = std::thread::scope(|scope| {
            let permit = wait(SLOT.acquire(&pool)).unwrap();
            scope.spawn(|| {
                on_one(&pool, |_conn| {
                    lent.wait();
                    returned.wait();
                    std::thread::sleep(Duration::from_millis(100));
                });
            });
            lent.wait();
            let failed_at = Instant::now();
            let failed: Result<()> = wait(permit.run(work!(|_permit| {
                returned.wait();
                Err(Error::TimedOut)
            })));
            assert_matches!(failed, Err(Error::TimedOut));
            (number(observer, IN_FLIGHT) == 0, failed_at.elapsed())
        });
        if is_free {
            return;
        }
        assert!(took > Duration::from_secs(2), "the slot was not free");
        eventually("the slot is free", || number(observer, IN_FLIGHT) == 0);
    }
    panic!("no round was quick");
}

#[test]
fn a_permit_is_released_though_the_sessions_of_the_pool_have_ended() {
    let database = installed();
    let pool = unchecked_pool(&database, 3);
    let permit = wait(SLOT.acquire(&pool)).unwrap();
    wait(on_all(&pool, "SELECT 1")).unwrap();
    Observer::of(&database).kill_all();
    wait(permit.release()).unwrap();
    assert_eq!(number(&mut database.connect(), IN_FLIGHT), 0);
}

#[test]
fn a_transaction_is_over_when_the_error_of_a_work_is_returned_that_left_a_nested_one_open() {
    if !NOTICES_BROKEN {
        return; // the pool lends the marked connection again, as it does after Diesel's own transactions
    }
    let database = Database::new();
    let pool = pool(&database, 2);
    for _ in 0..TIMES {
        let failed: Result<()> = on_one(&pool, |conn| {
            wait(LOCK.transaction(
                conn,
                work!(|conn| {
                    reply!(begin_inside(conn))?;
                    Err(Error::TimedOut)
                }),
            ))
        });
        assert_matches!(failed, Err(Error::TimedOut));
        assert_eq!(Observer::of(&database).all_held(), 0);
    }
    assert_pool_whole(&pool, &database);
}

/// The next user of the connection would write into a transaction that nobody commits.
#[test]
fn no_transaction_of_plain_sql_goes_back_into_the_pool_after_a_failed_work() {
    let database = Database::new();
    for aborts in [false, true] {
        for Wanted { lock, .. } in Wanted::one_and_several(&LOCK) {
            let mut observer = Observer::of(&database);
            let pool = pool(&database, 1);
            // A reply that takes longer than two seconds costs the connection.
            let held = in_a_quick_round(Duration::from_secs(2), || {
                let failed: Result<()> = wait(lock.with(
                    &pool,
                    work!(|conn| {
                        reply!(execute(conn, "BEGIN; SELECT 1"))?;
                        if aborts {
                            reply!(execute(conn, "SELECT 1/0"))?;
                        }
                        Err(Error::TimedOut)
                    }),
                ));
                failed.unwrap_err();
                observer.all_held()
            });
            // In the blocking half the connection is discarded, and the server frees the lock
            // later.
            assert!(held == 0 || !IS_ASYNC);
            eventually("nothing is held", || observer.all_held() == 0);
            assert_pool_whole(&pool, &database);
        }
    }
}

#[test]
fn in_a_test_transaction_a_failed_work_under_a_lock_ends_nothing() {
    let database = Database::new();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| {
        begin_test(conn);
        wait(execute(conn, "CREATE TABLE mine ()")).unwrap();
        let failed: Result<()> = wait(LOCK.with_on(
            conn,
            work!(|conn| {
                reply!(execute(conn, "SELECT FROM mine"))?;
                Err(Error::TimedOut)
            }),
        ));
        assert_matches!(failed, Err(Error::TimedOut));
        wait(execute(conn, "SELECT FROM mine")).unwrap();
    });
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn a_timeout_of_zero_is_one_try() {
    let database = installed();
    for _ in 0..TIMES / 20 {
        // A pool without a connection yet, so that the try waits for one.
        let pool = pool(&database, 2);
        for Wanted { lock, .. } in Wanted::one_and_several(&LOCK) {
            let guard = wait(lock.acquire_timeout(&pool, Duration::ZERO)).unwrap();
            let busy = wait(lock.acquire_timeout(&pool, Duration::ZERO)).unwrap();
            assert!(busy.is_busy());
            wait(guard.acquired().unwrap().release()).unwrap();
        }
        let permit = wait(SLOT.acquire_timeout(&pool, Duration::ZERO)).unwrap();
        let full = wait(SLOT.acquire_timeout(&pool, Duration::ZERO)).unwrap();
        assert_matches!(full, Admission::Full(_));
        wait(permit.admitted().unwrap().release()).unwrap();
        let check = wait(UNITS.acquire_timeout(&pool, Duration::ZERO)).unwrap();
        assert!(check.is_allowed());
        let check = wait(UNITS.acquire_timeout(&pool, Duration::ZERO)).unwrap();
        assert!(check.is_limited());
        wait(UNITS.reset(&pool)).unwrap();
    }
}
