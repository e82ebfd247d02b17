//! What works behind PgBouncer, and how the rest is refused.
//!
//! Run by `scripts/test with pgbouncer`, which installs it.

mod locking;
mod migrating;
mod working;

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool};
use diesel_interlock::PgPool;
use workbench::{Endpoint, PgBouncer};

/// Switches prepared statements off behind PgBouncer before 1.21, which does not support them in
/// transaction mode: <https://www.pgbouncer.org/changelog.html>.
#[derive(Debug)]
struct NoStatementCache;

impl<E> CustomizeConnection<PgConnection, E> for NoStatementCache {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), E> {
        if !PgBouncer::follows_prepared_statements() {
            conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        }
        Ok(())
    }
}

fn pool(pooler: &Endpoint, size: u32) -> PgPool {
    Pool::builder()
        .max_size(size)
        .min_idle(Some(0))
        .connection_customizer(Box::new(NoStatementCache))
        .build(ConnectionManager::new(pooler.url()))
        .unwrap()
}

fn connect(pooler: &Endpoint) -> PgConnection {
    let mut conn = pooler.connect();
    CustomizeConnection::<_, diesel::r2d2::Error>::on_acquire(&NoStatementCache, &mut conn)
        .unwrap();
    conn
}

/// Whether diesel-async, whose statements are always prepared, works behind this pooler in
/// transaction mode.
#[cfg(feature = "deadpool")]
fn follows_prepared_statements() -> bool {
    let follows = PgBouncer::follows_prepared_statements();
    if !follows {
        println!(
            "not run behind PgBouncer {:?}, which does not follow prepared statements",
            PgBouncer::version()
        );
    }
    follows
}

/// Makes a pooler with two sessions serve the next client on the other session: it lends the
/// session that was freed last.
fn turn_sessions(pooler: &Endpoint) {
    let [mut last, mut next] = [(); 2].map(|()| pooler.connect());
    last.batch_execute("BEGIN").unwrap();
    next.batch_execute("BEGIN").unwrap();
    last.batch_execute("COMMIT").unwrap();
    next.batch_execute("COMMIT").unwrap();
}

/// The number that an SQL expression returns.
fn number(conn: &mut PgConnection, expression: &str) -> i64 {
    let number = diesel::dsl::sql::<diesel::sql_types::BigInt>(expression);
    diesel::select(number).get_result(conn).unwrap()
}

/// Whether the session holds all advisory locks of the database.
fn is_held_by(conn: &mut PgConnection, pid: i32) -> bool {
    let holders = "(SELECT count(*) * 1000000000 + COALESCE(min(pid), 0) FROM (SELECT DISTINCT l.pid FROM pg_locks AS l
        JOIN pg_stat_activity AS a ON a.pid = l.pid WHERE l.locktype = 'advisory' AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS holder)";
    number(conn, holders) == 1_000_000_000 + i64::from(pid)
}

/// Ends the session that holds locks, as the error says, and waits until they are free.
fn free(conn: &mut PgConnection, pid: i32) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    conn.batch_execute(&format!("SELECT pg_terminate_backend({pid})"))
        .unwrap();
    while is_held_by(conn, pid) {
        assert!(std::time::Instant::now() < end, "the lock is still held");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
