//! A session prepares a fixed number of statements, whatever keys there are, and the statistics of
//! the server have a fixed number of entries.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use diesel::PgConnection;
use workbench::{Cluster, StopMode};

use crate::half::*;
use crate::support::{
    Observer, assert_few_are_prepared, eventually, foreign_holder, install, installed, number,
    once_at_least, run, text,
};

const HOUR: Duration = Duration::from_secs(3600);
static LOCK: AdvisoryLock = AdvisoryLock::named("prepared");
static ONCE: Once = Once::named("prepared");
static LIMIT: RateLimit = RateLimit::named("prepared", Quota::per_day(24).burst(1000));

/// Several locks of all kinds. How many there are depends on the key.
fn several(key: usize) -> AdvisoryLock {
    let all: Vec<_> = (0..2 + key % 9)
        .map(|place| {
            let lock = match place % 2 {
                0 => LOCK.key(format!("{key} {place}")),
                _ => AdvisoryLock::new(LockKey::pair(key as i32, place as i32)),
            };
            if place % 4 < 2 { lock } else { lock.shared() }
        })
        .collect();
    AdvisoryLock::all(&all)
}

fn with_a_guard(mut guard: AdvisoryLockGuard, key: usize) {
    assert!(wait(guard.is_held()).unwrap());
    assert!(wait(guard.fencing_token()).unwrap() > 0);
    if key % 2 == 0 {
        wait(guard.release()).unwrap();
    }
}

/// Waits on the server for a lock, which `holder` gives up as soon as the wait has begun.
fn waited_for(
    lock: &AdvisoryLock,
    busy: &LockKey,
    pool: &PgPool,
    observer: &mut Observer,
    holder: PgConnection,
) {
    thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(wait(lock.acquire(pool)).unwrap().release()).unwrap());
        eventually("the lock is awaited on the server", || {
            observer.waiters(busy) == 1
        });
        drop(holder);
        waiting.join().unwrap();
    });
}

#[test]
fn neither_keys_nor_numbers_of_locks_add_prepared_statements() {
    // A reply that takes longer than two seconds after a drop costs the session, so rounds are
    // repeated.
    once_at_least("no session is replaced", do_everything);
}

/// Calls every operation with many keys and numbers of locks. Asserts that the sessions prepare
/// nothing new after the first calls, and returns whether they are still the same sessions.
fn do_everything() -> bool {
    let database = installed();
    let pool = pool(&database, 2);
    let mut observer = Observer::of(&database);
    on_one(&pool, |_conn| wait(on_first(&pool, "SELECT 1")).unwrap());
    let others =
        "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let both = text(
        observer.conn(),
        &format!("(SELECT array_agg(pid) {others})"),
    );
    let mut other = database.connect();
    for key in 0..520 {
        let lock = LOCK.key(key);
        let id = lock.lock_key().id().unwrap();
        match key % 13 {
            0 => with_a_guard(
                wait(lock.try_acquire(&pool)).unwrap().acquired().unwrap(),
                key,
            ),
            1 => with_a_guard(wait(lock.shared().acquire(&pool)).unwrap(), key),
            2 => with_a_guard(wait(several(key).acquire(&pool)).unwrap(), key),
            3 => {
                run(&mut other, &format!("SELECT pg_advisory_lock({id})"));
                assert!(wait(lock.try_acquire(&pool)).unwrap().is_busy());
                let all = AdvisoryLock::all([&lock, &several(key)]);
                assert!(wait(all.try_acquire(&pool)).unwrap().is_busy());
                let timeout = Duration::from_millis(key as u64 % 15);
                // The timeout may be too short for a reply.
                let waited = wait(all.acquire_timeout(&pool, timeout));
                assert!(waited.is_err() || waited.unwrap().is_busy());
                run(&mut other, &format!("SELECT pg_advisory_unlock({id})"));
            }
            4 if key % 5 == 0 => {
                let all = AdvisoryLock::all([&several(key), &lock]);
                for wanted in [&lock, &all] {
                    let holder = foreign_holder(&database, lock.lock_key());
                    waited_for(wanted, lock.lock_key(), &pool, &mut observer, holder);
                }
            }
            4 | 5 => on_one(&pool, |conn| {
                let locked: Result<()> = wait(lock.transaction(
                    conn,
                    work!(|conn| {
                        let _ = reply!(several(key).try_acquire_xact(conn))?;
                        reply!(LOCK.key(format!("more {key}")).acquire_xact(conn))?;
                        let timeout = Duration::from_millis(key as u64);
                        let _ = reply!(LOCK.key("timeout").acquire_xact_timeout(conn, timeout))?;
                        Ok(())
                    }),
                ));
                locked.unwrap();
            }),
            6 => on_one(&pool, |conn| {
                let done: Result<()> = wait(several(key).with_on(conn, work!(|_conn| Ok(()))));
                done.unwrap();
                let done: Result<_> = wait(lock.try_with_on(conn, work!(|_conn| Ok(()))));
                assert!(done.unwrap().is_acquired());
            }),
            7 => on_one(&pool, |conn| {
                for is_first in [true, false] {
                    let done = wait(
                        ONCE.key(key)
                            .run(conn, work!(|_conn| Ok::<_, Error>("done"))),
                    )
                    .unwrap();
                    assert_eq!(done.is_first(), is_first);
                }
            }),
            8 => {
                let slots = 1 + key as u32 % 40;
                let semaphore = Semaphore::named("prepared", slots, HOUR).key(key);
                let permit = wait(semaphore.acquire(&pool)).unwrap();
                wait(permit.renew()).unwrap();
                wait(permit.release()).unwrap();
                let id = wait(semaphore.acquire(&pool)).unwrap().detach();
                assert!(wait(semaphore.renew(&pool, id)).unwrap());
                assert!(wait(semaphore.complete(&pool, id)).unwrap());
            }
            9 => {
                let limit = LIMIT.key(key).quota(Quota::per_day(1 + key as u32));
                let check = wait(limit.check(&pool)).unwrap();
                let _ = wait(limit.peek(&pool)).unwrap();
                wait(limit.refund(&pool, &check.allowed().unwrap(), 1)).unwrap();
                let timeout = HOUR + Duration::from_millis(key as u64);
                let _ = wait(limit.clone().durable().acquire_timeout(&pool, timeout)).unwrap();
                wait(limit.reset(&pool)).unwrap();
            }
            10 => {
                let limits: Vec<_> = (0..1 + (key / 13).min(40) % 40)
                    .map(|place| LIMIT.key(format!("{key} {place}")))
                    .collect();
                let limits: Vec<_> = limits.iter().collect();
                assert!(
                    wait(RateLimit::check_all(&limits, &pool))
                        .unwrap()
                        .is_allowed()
                );
            }
            11 => {
                let throttle = Throttle::named("prepared", HOUR).key(key);
                assert!(wait(throttle.attempt(&pool)).unwrap().is_granted());
                assert!(wait(throttle.attempt(&pool)).unwrap().is_denied());
            }
            _ => {
                let done: Result<()> = wait(lock.with(&pool, work!(|_conn| Ok(()))));
                done.unwrap();
            }
        }
    }
    assert_few_are_prepared(&pool);
    let are_left = format!("(SELECT count(*) {others} AND pid = ANY ('{both}'))");
    number(observer.conn(), &are_left) == 2
}

/// Waits, late releases and the end of a session are not prepared. Their keys and numbers are
/// constants of a SELECT, which `pg_stat_statements` replaces by `$1`, and not of a `DO` or a
/// `SET`, which it does not.
#[test]
fn keys_and_durations_add_no_entry_to_the_statistics() {
    const KINDS: usize = 8;
    const ENTRIES: &str = "(SELECT count(*) FROM pg_stat_statements)";

    let cluster = Cluster::start();
    let is_there =
        "(SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_stat_statements')";
    if number(&mut cluster.endpoint("postgres").connect(), is_there) == 0 {
        eprintln!("no pg_stat_statements here: not tried");
        return;
    }
    let preload = "ALTER SYSTEM SET shared_preload_libraries = pg_stat_statements";
    run(&mut cluster.endpoint("postgres").connect(), preload);
    cluster.restart(StopMode::Fast);
    let database = cluster.database();
    let admin = &mut database.connect();
    install(admin);
    run(admin, "CREATE EXTENSION pg_stat_statements");
    let pool = pool(&database, 3);
    let mut holder = database.connect();
    let mut operate = |key: usize| {
        let moment = Duration::from_millis(10 + key as u64 % 50);
        let lock = match key / KINDS % 2 {
            0 => LOCK.key(key),
            _ => AdvisoryLock::new(LockKey::pair(key as i32, -1)),
        };
        let lock = if key / KINDS % 4 < 2 {
            lock
        } else {
            lock.shared()
        };
        let all = AdvisoryLock::all([&lock, &several(key)]);
        let wanted = if key / KINDS % 8 < 4 { &lock } else { &all };
        // A `bigint` has one argument, and a pair has two.
        let id = format!("{}", lock.lock_key().id().unwrap());
        run(&mut holder, &format!("SELECT pg_advisory_lock({id})"));
        match key % KINDS {
            0 => {
                let waited = wait(wanted.acquire_timeout(&pool, moment));
                assert!(waited.is_err() || waited.unwrap().is_busy());
            }
            1 => on_one(&pool, |conn| {
                begin(conn);
                let waited = wait(wanted.acquire_xact_timeout(conn, moment)).unwrap();
                assert!(waited.is_busy());
                end(conn);
            }),
            2 | 3 => {
                let waiting = || {
                    if key % KINDS == 2 {
                        let waits = wait(wanted.acquire(&pool));
                        return wait(waits.unwrap().release());
                    }
                    on_one(&pool, |conn| {
                        wait(wanted.transaction(conn, work!(|_conn| Ok(()))))
                    })
                };
                thread::scope(|scope| {
                    let waiting = scope.spawn(waiting);
                    let mut observer = Observer::of(&database);
                    eventually("the lock is awaited", || {
                        observer.waiters(lock.lock_key()) == 1
                    });
                    run(&mut holder, &format!("SELECT pg_advisory_unlock({id})"));
                    waiting.join().unwrap().unwrap();
                });
            }
            4 => {
                let slots = Semaphore::named("one", 1, HOUR).key(key);
                let permit = wait(slots.acquire(&pool)).unwrap();
                // The timeout may be too short for a reply.
                let waited = wait(slots.acquire_timeout(&pool, moment));
                assert!(waited.is_err() || waited.unwrap().is_full());
                drop(permit);
            }
            5 => {
                let limit = LIMIT.key(key).quota(Quota::per_day(1 + key as u32));
                assert!(wait(limit.check(&pool)).unwrap().is_allowed());
                let _ = wait(limit.cost(1 + key as u32).acquire_timeout(&pool, moment));
            }
            kind => {
                // The work panics, or leaves an aborted transaction open.
                let free = LOCK.key(format!("free {key}"));
                let free = AdvisoryLock::all([&free, &several(key + 1000)]);
                let worked = catch_unwind(AssertUnwindSafe(|| {
                    on_one(&pool, |conn| {
                        let worked = free.with_on(
                            conn,
                            work!(|conn| {
                                let failing = reply!(execute(conn, "BEGIN; SELECT 1 / 0"));
                                assert!(failing.is_err() && kind == 6, "the work panics");
                                Ok::<_, Error>(())
                            }),
                        );
                        assert!(wait(worked).is_err());
                    });
                }));
                assert_eq!(worked.is_err(), kind == 7);
            }
        }
        run(&mut holder, "SELECT pg_advisory_unlock_all()");
    };
    // Each kind of operation, with each kind of lock.
    (0..8 * KINDS).for_each(&mut operate);
    let before = number(admin, ENTRIES);
    (1000..1300).for_each(&mut operate);
    let all = "(SELECT string_agg(left(query, 200), E'\\n') FROM pg_stat_statements)";
    let added = number(admin, ENTRIES) - before;
    assert!(added < 10, "{added} of {before}: {}", text(admin, all));
}

/// A wait passes its lock and limit to a `DO` block by settings. They are empty afterwards, also in
/// the caller's transaction.
#[test]
fn a_wait_leaves_nothing_in_the_settings_of_its_transaction() {
    const IS_EMPTY: &str = "DO $$ BEGIN \
         ASSERT COALESCE(current_setting('diesel_interlock.lock', true), '') = ''; \
         ASSERT COALESCE(current_setting('diesel_interlock.limit', true), '') = ''; END $$";

    let database = installed();
    let pool = pool(&database, 1);
    let lock = LOCK.key("settings");
    let holder = foreign_holder(&database, lock.lock_key());
    let moment = Duration::from_millis(20);
    on_one(&pool, |conn| {
        begin(conn);
        assert!(
            wait(lock.acquire_xact_timeout(conn, moment))
                .unwrap()
                .is_busy()
        );
        wait(execute(conn, IS_EMPTY)).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut observer = Observer::of(&database);
                eventually("the lock is awaited", || {
                    observer.waiters(lock.lock_key()) == 1
                });
                drop(holder);
            });
            assert!(
                wait(lock.acquire_xact_timeout(conn, HOUR))
                    .unwrap()
                    .is_acquired()
            );
        });
        wait(execute(conn, IS_EMPTY)).unwrap();
        end(conn);
    });
}
