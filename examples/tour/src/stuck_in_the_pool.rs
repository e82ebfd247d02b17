//! The session lock, on any connection that the pool gives and on one that is pinned.

use std::error::Error;

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Bool;
use workbench::Database;

use crate::NIGHTLY;
use crate::observer::{assert_held_by, assert_pool_is_whole, holders, pid};
use crate::screen::{bad, good, note, say, title};

pub(crate) fn a_lock_that_got_stuck_in_the_pool(database: &Database) -> Result<(), Box<dyn Error>> {
    title("2. A session lock and a connection pool");
    let pool = database.pool(2);
    let mut observer = database.connect();

    say("PostgreSQL's functions, each on any connection that the pool gives");
    let number = NIGHTLY.lock_key().id()?;
    let mut first = pool.get()?;
    let mut second = pool.get()?; // another request has the other connection
    let holder = pid(&mut first)?;
    let locked: bool = diesel::select(sql::<Bool>(&format!("pg_try_advisory_lock({number})")))
        .get_result(&mut first)?;
    assert!(locked);
    note(format!(
        "pid {holder}: pg_try_advisory_lock({number}) returns {locked}"
    ));
    drop(first); // back to the pool, while the report is written

    let other = pid(&mut second)?;
    let unlocked: bool = diesel::select(sql::<Bool>(&format!("pg_advisory_unlock({number})")))
        .get_result(&mut second)?;
    assert!(!unlocked);
    drop(second);
    bad(format!(
        "pid {other}: pg_advisory_unlock({number}) returns {unlocked}"
    ));

    assert_eq!(holders(&mut observer)?, [(holder, "idle".to_owned())]);
    assert!(NIGHTLY.try_acquire(&database.pool(1))?.is_busy());
    bad(format!(
        "pg_locks: held by pid {holder}, idle in the pool; nobody else gets it"
    ));

    // Only the session itself can free it, and the pool does not say which of the two that is.
    for conn in &mut [pool.get()?, pool.get()?] {
        conn.batch_execute("SELECT pg_advisory_unlock_all()")?;
    }

    say("The guard: let mut guard = NIGHTLY.acquire(&pool)?");
    let mut guard = NIGHTLY.acquire(&pool)?;
    let working = pid(guard.conn())?; // the report is written on the connection that has the lock
    assert_eq!(working, guard.backend_pid());
    assert_held_by(guard.backend_pid(), &mut observer)?;
    guard.release()?;
    good("guard.release() returns Ok(())");
    assert_eq!(holders(&mut observer)?, []);
    good("pg_locks: nobody holds it");
    assert_pool_is_whole(&pool)
}
