//! Queries and assertions that verify what the tour prints.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Text;
use diesel_interlock::PgPool;

/// The value of an SQL expression, as text.
pub(crate) fn text(conn: &mut PgConnection, expression: &str) -> QueryResult<String> {
    diesel::select(sql::<Text>(&format!("({expression})::text"))).get_result(conn)
}

pub(crate) fn pid(conn: &mut PgConnection) -> QueryResult<String> {
    text(conn, "pg_backend_pid()")
}

/// The pids of the sessions that hold an advisory lock in this database.
pub(crate) fn holders(observer: &mut PgConnection) -> QueryResult<String> {
    let holders = "SELECT coalesce(string_agg(pid::text, ' '), '') FROM pg_locks
        JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted
        AND database = datid AND datname = current_database()";
    text(observer, holders)
}

pub(crate) fn assert_held_by(pid: i32, observer: &mut PgConnection) -> QueryResult<()> {
    assert_eq!(holders(observer)?, pid.to_string());
    println!("    ✓ pg_locks: held by pid {pid}");
    Ok(())
}

/// PostgreSQL frees the locks of a session some milliseconds after its connection was closed.
pub(crate) fn assert_free(observer: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    eventually("nobody holds the lock", || {
        Ok(holders(observer)?.is_empty().then_some(()))
    })?;
    let milliseconds = start.elapsed().as_millis() + 1;
    println!("    ✓ pg_locks: nobody holds it, after less than {milliseconds} ms");
    Ok(())
}

/// Asserts that the pool gives out all its connections, and that they work.
pub(crate) fn assert_pool_is_whole(pool: &PgPool) -> Result<(), Box<dyn Error>> {
    let mut both = [pool.get()?, pool.get()?];
    let [first, second] = both
        .each_mut()
        .map(|conn| conn.transaction(|conn| pid(conn)));
    println!(
        "    ✓ the pool gives out its 2 connections, pids {} and {}",
        first?, second?
    );
    Ok(())
}

/// Polls until there is a result, for at most half a minute.
pub(crate) fn eventually<T>(
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(seen) = look()? {
            return Ok(seen);
        }
        assert!(Instant::now() < end, "not within half a minute: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
