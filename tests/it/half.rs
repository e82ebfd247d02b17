//! The half of the crate under test: the blocking one.
//!
//! The files that take these names from here are compiled for the asynchronous half, too: see `tests/it/asynchronous/suite.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

pub(crate) use diesel::connection::AnsiTransactionManager;
use diesel::connection::{InstrumentationEvent, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{
    ConnectionManager, CustomizeConnection, HandleEvent, Pool, R2D2Connection, TestCustomizer,
    event,
};
pub(crate) use diesel_interlock::*;
pub(crate) use workbench::{Cluster, Database, RoundTrips, StopMode};

/// What a file of tests imports as a whole.
pub(crate) mod prelude {
    pub(crate) use diesel::prelude::*;
}

/// Whether a dropped guard or permit leaves its release to a task, so that it may be held for a moment longer.
pub(crate) const IS_ASYNCHRONOUS: bool = false;

/// Whether a session is compared with another of the pool before its first lock.
pub(crate) const COMPARES_SESSIONS: bool = true;

/// Whether a pool lends a connection to the caller that has waited longest.
pub(crate) const IS_FAIR: bool = true;

/// A stack for one of a thousand threads that call the crate, in bytes.
pub(crate) const SMALL_STACK: usize = 256 * 1024;

/// A pool over the proxy whose checkout sends nothing, so that only the round trips of the crate are counted.
pub(crate) fn silent_pool(proxy: &RoundTrips, size: u32) -> PgPool {
    Pool::builder()
        .max_size(size)
        .test_on_check_out(false)
        .build(ConnectionManager::new(proxy.url()))
        .unwrap()
}

/// A pool whose connections are not checked, and from which a checkout waits for at most `patience`.
pub(crate) fn unchecked_pool(url: &str, size: u32, patience: Duration) -> PgPool {
    Pool::builder()
        .max_size(size)
        .test_on_check_out(false)
        .connection_timeout(patience)
        .build_unchecked(ConnectionManager::new(url))
}

/// As [`unchecked_pool`], and tells how often it had no connection to give in time.
pub(crate) fn unchecked_pool_and_timeouts(
    url: &str,
    size: u32,
    patience: Duration,
) -> (PgPool, impl Fn() -> u32 + Send + Sync + use<>) {
    #[derive(Debug)]
    struct Timeouts(Arc<AtomicU32>);
    impl HandleEvent for Timeouts {
        fn handle_timeout(&self, _: event::TimeoutEvent) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let count = Arc::new(AtomicU32::new(0));
    let pool = Pool::builder()
        .max_size(size)
        .test_on_check_out(false)
        .connection_timeout(patience)
        .event_handler(Box::new(Timeouts(Arc::clone(&count))))
        .build_unchecked(ConnectionManager::new(url));
    (pool, move || count.load(Ordering::Relaxed))
}

/// A pool from which a checkout waits for at most `patience`.
pub(crate) fn pool_with_patience(database: &Database, size: u32, patience: Duration) -> PgPool {
    Pool::builder()
        .max_size(size)
        .connection_timeout(patience)
        .build_unchecked(database.manager())
}

/// A pool each of whose connections has this instrumentation.
pub(crate) fn instrumented_pool(
    database: &Database,
    size: u32,
    instrumentation: fn(InstrumentationEvent<'_>),
) -> PgPool {
    #[derive(Debug)]
    struct Instrument(fn(InstrumentationEvent<'_>));
    impl CustomizeConnection<PgConnection, diesel::r2d2::Error> for Instrument {
        fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), diesel::r2d2::Error> {
            conn.set_instrumentation(self.0);
            Ok(())
        }
    }
    Pool::builder()
        .max_size(size)
        .connection_customizer(Box::new(Instrument(instrumentation)))
        .build(database.manager())
        .unwrap()
}

/// A pool each of whose connections is in a test transaction.
pub(crate) fn pool_in_test_transactions(database: &Database, size: u32) -> PgPool {
    Pool::builder()
        .max_size(size)
        .connection_customizer(Box::new(TestCustomizer))
        .build(database.manager())
        .unwrap()
}

/// How many connections of the pool are not in use.
pub(crate) fn idle_connections(pool: &PgPool) -> u32 {
    pool.state().idle_connections
}

/// A pool each of whose connections runs `sql` when it is opened.
pub(crate) fn pool_that_runs(database: &Database, size: u32, sql: &str) -> PgPool {
    #[derive(Debug)]
    struct Run(String);
    impl CustomizeConnection<PgConnection, diesel::r2d2::Error> for Run {
        fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), diesel::r2d2::Error> {
            Ok(conn.batch_execute(&self.0)?)
        }
    }
    Pool::builder()
        .max_size(size)
        .connection_customizer(Box::new(Run(sql.to_owned())))
        .build(database.manager())
        .unwrap()
}

/// Rolls back a transaction that Diesel opened and that was aborted. Diesel's manager refuses to, once the connection is
/// marked as broken.
pub(crate) fn roll_back(conn: &mut PgConnection) {
    SimpleConnection::batch_execute(conn, "ROLLBACK").unwrap();
}

/// Whether a pool would discard the connection.
pub(crate) fn is_broken(conn: &mut PgConnection) -> bool {
    R2D2Connection::is_broken(conn)
}

pub(crate) fn give_back(pool: &PgPool, spent: &Spent, units: u32) -> Result<u32> {
    spent.give_back(pool, units)
}

pub(crate) fn give_back_on(conn: &mut PgConnection, spent: &Spent, units: u32) -> Result<u32> {
    spent.give_back_on(conn, units)
}

pub(crate) fn cancel(pool: &PgPool, reservation: Reservation) -> Result<u32> {
    reservation.cancel(pool)
}

pub(crate) fn cancel_on(conn: &mut PgConnection, reservation: Reservation) -> Result<u32> {
    reservation.cancel_on(conn)
}
