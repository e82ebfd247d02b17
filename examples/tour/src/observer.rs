//! What is looked up to prove it, from another session.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{Integer, Text};
use diesel_interlock::PgPool;

use crate::screen::good;

/// Who holds an advisory lock in this database: pids, and what their sessions do.
pub(crate) fn holders(observer: &mut PgConnection) -> QueryResult<Vec<(i32, String)>> {
    sql::<(Integer, Text)>(
        "SELECT pid, state FROM pg_locks JOIN pg_stat_activity USING (pid) \
         WHERE locktype = 'advisory' AND granted AND datname = current_database() \
         AND database = datid",
    )
    .load(observer)
}

pub(crate) fn assert_held_by(pid: i32, observer: &mut PgConnection) -> QueryResult<()> {
    assert_eq!(holders(observer)?, [(pid, "idle".to_owned())]);
    good(format!("pg_locks: held by pid {pid}"));
    Ok(())
}

/// Looks until nobody holds a lock: PostgreSQL frees the locks of a session as it ends, some
/// milliseconds after its connection was discarded.
pub(crate) fn assert_free(observer: &mut PgConnection) -> QueryResult<()> {
    let start = Instant::now();
    while !holders(observer)?.is_empty() {
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "a lock is still held"
        );
        thread::sleep(Duration::from_millis(1));
    }
    good(format!(
        "pg_locks: nobody holds it, after less than {} ms",
        start.elapsed().as_millis() + 1
    ));
    Ok(())
}

/// The pool gives out as many connections as it should, and they work.
pub(crate) fn assert_pool_is_whole(pool: &PgPool) -> Result<(), Box<dyn Error>> {
    let mut conns = Vec::new();
    let mut pids = Vec::new();
    for _ in 0..pool.max_size() {
        let mut conn = pool.get()?;
        pids.push(conn.transaction(|conn| pid(conn))?);
        conns.push(conn);
    }
    good(format!(
        "the pool gives out its {} connections, pids {pids:?}",
        conns.len()
    ));
    Ok(())
}

pub(crate) fn pid(conn: &mut PgConnection) -> QueryResult<i32> {
    diesel::select(sql::<Integer>("pg_backend_pid()")).get_result(conn)
}

/// Looks until there is something to see, for ten seconds.
pub(crate) fn eventually<T, E>(
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>, E>,
) -> Result<T, E> {
    let start = Instant::now();
    loop {
        if let Some(seen) = look()? {
            return Ok(seen);
        }
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "not within ten seconds: {what}"
        );
        thread::sleep(Duration::from_millis(5));
    }
}
