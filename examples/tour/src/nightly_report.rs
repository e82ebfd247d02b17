//! The session lock: with PostgreSQL's bare functions on connections of a pool, and with a guard
//! whose work fails.

use std::error::Error;
use std::panic::{self, AssertUnwindSafe};

use diesel::connection::SimpleConnection;
use diesel_interlock::AdvisoryLock;
use workbench::Database;

use crate::look::{assert_free, assert_held_by, assert_pool_is_whole, holders, pid, text};

pub(crate) static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");

pub(crate) fn a_lock_that_stays_in_the_pool(database: &Database) -> Result<(), Box<dyn Error>> {
    println!("\n2. A session lock and a connection pool");
    let pool = database.pool(2);
    let observer = &mut database.connect();
    let key = NIGHTLY.lock_key().id()?;

    println!("\n  PostgreSQL's functions, each on any connection that the pool gives");
    let (mut first, mut second) = (pool.get()?, pool.get()?);
    let (holder, other) = (pid(&mut first)?, pid(&mut second)?);
    let locked = text(&mut first, &format!("pg_try_advisory_lock({key})"))?;
    assert_eq!(locked, "true");
    println!("    · pid {holder}: pg_try_advisory_lock({key}) returns {locked}");
    drop(first); // back to the pool, while the report is written

    let unlocked = text(&mut second, &format!("pg_advisory_unlock({key})"))?;
    assert_eq!(unlocked, "false");
    drop(second);
    println!("    ✗ pid {other}: pg_advisory_unlock({key}) returns {unlocked}");
    assert_eq!(holders(observer)?, holder);
    assert!(NIGHTLY.try_acquire(&database.pool(1))?.is_busy());
    println!("    ✗ pg_locks: held by pid {holder}, idle in the pool; nobody else gets it");
    // Only the session itself can release it, and the pool does not show which connection that is.
    for conn in &mut [pool.get()?, pool.get()?] {
        conn.batch_execute("SELECT pg_advisory_unlock_all()")?;
    }

    println!("\n  The guard: let mut guard = NIGHTLY.acquire(&pool)?");
    let mut guard = NIGHTLY.acquire(&pool)?;
    let working = pid(guard.conn())?; // the report
    assert_eq!(working, guard.backend_pid().to_string());
    assert_held_by(guard.backend_pid(), observer)?;
    guard.release()?;
    println!("    ✓ guard.release() returns Ok(())");
    assert_free(observer)?;
    assert_pool_is_whole(&pool)
}

pub(crate) fn three_guards_that_end_badly(database: &Database) -> Result<(), Box<dyn Error>> {
    println!("\n3. However the work under a guard ends, the lock is freed");
    let pool = database.pool(2);
    let observer = &mut database.connect();

    println!("\n  The work panics");
    let guard = NIGHTLY.acquire(&pool)?;
    assert_held_by(guard.backend_pid(), observer)?;
    let panicked = panic::catch_unwind(AssertUnwindSafe(move || {
        let _guard = guard;
        panic::resume_unwind(Box::new("out of paper")); // a panic without its report
    }));
    assert!(panicked.is_err());
    println!("    · panic!(\"out of paper\")");
    assert_free(observer)?;
    assert_pool_is_whole(&pool)?;

    println!("\n  The guard is dropped inside an aborted transaction");
    let mut guard = NIGHTLY.acquire(&pool)?;
    assert_held_by(guard.backend_pid(), observer)?;
    guard.conn().batch_execute("BEGIN")?; // Diesel does not know of it
    let error = guard.conn().batch_execute("SELECT 1 / 0").unwrap_err();
    assert!(guard.conn().batch_execute("SELECT 1").is_err());
    println!("    · BEGIN; SELECT 1 / 0: {error}");
    drop(guard);
    assert_free(observer)?;
    assert_pool_is_whole(&pool)?;

    println!("\n  The server ends the session that has the lock");
    let mut guard = NIGHTLY.acquire(&pool)?;
    let pid = guard.backend_pid();
    assert_held_by(pid, observer)?;
    let terminate = format!("pg_terminate_backend({pid})");
    assert_eq!(text(observer, &terminate)?, "true");
    println!("    · {terminate}");
    assert_free(observer)?;
    assert!(!guard.is_held()?);
    println!("    ✓ guard.is_held() returns false: the work can tell that it has lost the lock");
    let error = guard.release().unwrap_err();
    println!("    ✓ guard.release() returns an error: {error}");
    assert_pool_is_whole(&pool)
}
