//! A wait of more than five seconds is logged once, with the reason for the wait.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use workbench::Database;

use crate::half::{
    AdvisoryLock, Error, Once, Semaphore, begin, end, make_pool, on_one, pool, wait,
};
use crate::support::log::Log;
use crate::support::{backend_pid, eventually, foreign_holder, installed};

const HOUR: Duration = Duration::from_secs(3600);

/// The one warning of the handle with this name.
fn warning(name: &'static str) -> String {
    let log = Log::of(name);
    eventually("the wait is logged", || !log.long_waits().is_empty());
    log.long_waits().remove(0)
}

/// Runs `waits` on a thread until `warned` has returned, which then ends the wait.
fn while_it_waits(waits: impl FnOnce() + Send, warned: impl FnOnce()) {
    thread::scope(|scope| {
        let waiting = scope.spawn(waits);
        warned();
        waiting.join().unwrap();
    });
}

#[test]
fn a_wait_for_a_lock_of_this_process_names_its_session() {
    const NAME: &str = "long wait for its own";
    static LOCK: AdvisoryLock = AdvisoryLock::named(NAME);
    Log::of(NAME);
    let database = Database::new();
    let pool = pool(&database, 3);
    let guard = wait(LOCK.acquire(&pool)).unwrap();
    let pid = guard.backend_pid();
    while_it_waits(
        || drop(wait(LOCK.acquire_timeout(&pool, HOUR)).unwrap()),
        || {
            let whose = format!("the session with pid {pid}, of this process itself, holds it");
            let message = warning(NAME);
            assert!(message.contains(&whose), "{message}");
            wait(guard.release()).unwrap();
        },
    );
    assert_eq!(Log::of(NAME).long_waits().len(), 1);
}

#[test]
fn a_wait_for_a_lock_of_another_process_names_its_session() {
    const NAME: &str = "long wait for another";
    static LOCK: AdvisoryLock = AdvisoryLock::named(NAME);
    Log::of(NAME);
    let database = Database::new();
    let pool = pool(&database, 3);
    let mut holder = foreign_holder(&database, LOCK.lock_key());
    let whose = format!("the session with pid {} holds it", backend_pid(&mut holder));
    let with_on = || {
        on_one(&pool, |conn| {
            wait(LOCK.with_on(conn, work!(|_conn| Ok::<_, Error>(())))).unwrap();
        });
    };
    while_it_waits(
        || while_it_waits(with_on, || drop(wait(LOCK.acquire(&pool)).unwrap())),
        || {
            eventually("both waits are logged", || {
                Log::of(NAME).long_waits().len() == 2
            });
            drop(holder);
        },
    );
    let messages = Log::of(NAME).long_waits();
    assert!(
        messages.iter().all(|it| it.contains(&whose)),
        "{messages:?}"
    );
    assert_eq!(messages.len(), 2);
}

/// The wait is a single statement, so another thread watches its time.
#[test]
fn a_wait_for_a_transaction_lock_says_whether_this_process_holds_it() {
    const OWN: &str = "long wait for its own transaction";
    const OTHER: &str = "long wait for another transaction";
    static LOCK_OF_OWN: AdvisoryLock = AdvisoryLock::named(OWN);
    static LOCK_OF_OTHER: AdvisoryLock = AdvisoryLock::named(OTHER);
    let _ = [OWN, OTHER].map(Log::of);
    let database = Database::new();
    let pool = pool(&database, 3);
    // This process held the lock before.
    on_one(&pool, |conn| {
        wait(LOCK_OF_OTHER.transaction(conn, work!(|_conn| Ok::<_, Error>(())))).unwrap();
    });
    let holder = foreign_holder(&database, LOCK_OF_OTHER.lock_key());
    let (held, is_held) = mpsc::channel();
    let (ends, end_of_work) = mpsc::channel();
    let end_of_work = Mutex::new(end_of_work);
    let holds = || {
        on_one(&pool, |conn| {
            wait(LOCK_OF_OWN.transaction(
                conn,
                work!(|_conn| {
                    held.send(()).unwrap();
                    end_of_work.lock().unwrap().recv().unwrap();
                    Ok::<_, Error>(())
                }),
            ))
            .unwrap();
        });
    };
    let waits = |lock: &AdvisoryLock| {
        on_one(&pool, |conn| {
            begin(conn);
            wait(lock.acquire_xact(conn)).unwrap();
            end(conn);
        });
    };
    thread::scope(|scope| {
        // A failure drops it, which ends the work.
        let ends = ends;
        scope.spawn(holds);
        is_held.recv().unwrap();
        let of_own = scope.spawn(|| waits(&LOCK_OF_OWN));
        let of_other = scope.spawn(|| waits(&LOCK_OF_OTHER));
        let message = warning(OWN);
        assert!(
            message.ends_with("another session, of this process itself, holds it"),
            "{message}"
        );
        let message = warning(OTHER);
        assert!(message.ends_with("another session holds it"), "{message}");
        ends.send(()).unwrap();
        drop(holder);
        of_own.join().unwrap();
        of_other.join().unwrap();
    });
    assert_eq!(
        [OWN, OTHER].map(|name| Log::of(name).long_waits().len()),
        [1, 1]
    );
}

#[test]
fn a_wait_for_work_of_another_session_is_logged() {
    const NAME: &str = "long wait for a twin";
    static ONCE: Once = Once::named(NAME);
    Log::of(NAME);
    let database = installed();
    let pool = pool(&database, 2);
    let (begins, has_begun) = mpsc::channel();
    let (ends, end_of_work) = mpsc::channel();
    let done = |work: &(dyn Fn() + Sync)| {
        on_one(&pool, |conn| {
            wait(ONCE.run(
                conn,
                work!(|_conn| {
                    work();
                    Ok::<_, Error>("done")
                }),
            ))
            .unwrap()
            .is_first()
        })
    };
    let end_of_work = Mutex::new(end_of_work);
    thread::scope(|scope| {
        // A failure drops it, which ends the work.
        let ends = ends;
        let first = scope.spawn(|| {
            done(&|| {
                begins.send(()).unwrap();
                end_of_work.lock().unwrap().recv().unwrap();
            })
        });
        has_begun.recv().unwrap();
        let twin = scope.spawn(|| done(&|| ()));
        let message = warning(NAME);
        assert!(message.ends_with("another session holds it"), "{message}");
        ends.send(()).unwrap();
        assert!(first.join().unwrap() && !twin.join().unwrap());
    });
}

#[test]
fn a_wait_for_a_slot_is_logged() {
    const NAME: &str = "long wait for a slot";
    static SLOTS: Semaphore = Semaphore::named(NAME, 1, HOUR);
    Log::of(NAME);
    let database = installed();
    let pool = pool(&database, 3);
    let permit = wait(SLOTS.acquire(&pool)).unwrap();
    while_it_waits(
        || drop(wait(SLOTS.acquire(&pool)).unwrap()),
        || {
            let message = warning(NAME);
            assert!(
                message.contains("no slot is free, and the first expires in 35"),
                "{message}"
            );
            wait(permit.release()).unwrap();
        },
    );
    assert_eq!(Log::of(NAME).long_waits().len(), 1);
}

/// Guards hold all connections of the pool, and the program waits for another one.
#[test]
fn a_wait_for_a_connection_of_the_pool_is_logged() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("long wait for a connection");
    const SIZE: u32 = 7;
    let log = Log::of("");
    let database = Database::new();
    let pool = make_pool(&database.url(), SIZE, HOUR);
    let guards: Vec<_> = (0..SIZE)
        .map(|key| wait(LOCK.key(key).acquire(&pool)).unwrap())
        .collect();
    let is_logged = || {
        log.long_waits()
            .iter()
            .any(|it| it.contains("none of its 7 is free"))
    };
    while_it_waits(
        || drop(wait(LOCK.acquire(&pool)).unwrap()),
        || {
            eventually("the wait is logged", is_logged);
            drop(guards);
        },
    );
}
