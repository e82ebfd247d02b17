//! Workers of the blocking half: threads over r2d2.

mod article;
mod copies;
mod fenced_writes;
mod limits_in_sql;
mod rate_limits;
mod second_server;
mod semaphores;
mod session_locks;
mod throttles;
mod transaction_locks;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool};
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel_interlock::{Error, PgPool};
use fastrand::Rng;

use super::instructions::is_resting;
use super::report::{report, violation};
use super::{CONNECTIONS, IMPATIENCE, LOOK, Settings, WHOLE, errors, is_deliberate};
use crate::chance::Chance;
use crate::clock;
use crate::record::{Outcome, Primitive, Record};

/// More threads than connections, so that the pool is often exhausted.
const THREADS: u64 = 5;

/// Works until the worker is to rest, and checks its pool. The connections stay open.
pub(super) fn run(settings: &Settings) -> ! {
    let pool = pool_of(settings, &settings.url);
    // For the queries of the watches, which must always find a connection.
    let watch_pool = pool_of(settings, &settings.url);
    let second_server = pool_of(settings, &settings.second_server);
    let mut random = Rng::with_seed(settings.seed);
    thread::scope(|scope| {
        if !settings.shared_sessions {
            scope.spawn(|| second_server::work(&second_server));
        }
        for _ in 0..THREADS {
            let mut worker = WorkerThread {
                pool: pool.clone(),
                watch_pool: watch_pool.clone(),
                settings,
                random: random.fork(),
            };
            scope.spawn(move || {
                while !is_resting() {
                    worker.work();
                }
            });
        }
    });
    report(&check_pool(&pool));
    loop {
        thread::park();
    }
}

/// One thread of a worker.
struct WorkerThread<'a> {
    pool: PgPool,
    watch_pool: PgPool,
    settings: &'a Settings,
    random: Rng,
}

type Work = fn(&mut WorkerThread<'_>) -> Result<Outcome, Error>;

impl WorkerThread<'_> {
    /// Pauses a little, and performs one operation.
    fn work(&mut self) {
        thread::sleep(self.random.millis(0, 30));
        let (what, work): (_, Work) = match self.random.u64(..12) {
            0..=3 if !self.settings.shared_sessions => {
                (Primitive::SessionLock, session_locks::work)
            }
            0..=5 => (Primitive::TransactionLock, transaction_locks::work),
            6..=7 => (Primitive::Throttle, throttles::work),
            8..=9 => (Primitive::Semaphore, semaphores::work),
            _ => (Primitive::RateLimit, rate_limits::work),
        };
        let began = clock::now();
        let done = catch_unwind(AssertUnwindSafe(|| work(self)));
        let outcome = match done {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                errors::examine(what, &error);
                Outcome::Failed
            }
            Err(panic) if is_deliberate(&*panic) => Outcome::Done,
            Err(_) => {
                violation(format!("a panic in {}", what.name()));
                Outcome::Failed
            }
        };
        report(&Record::Did {
            what,
            outcome,
            began,
        });
    }

    /// Checks out a connection, and checks that its last user left neither a lock nor an open transaction.
    fn connection(&self) -> Result<diesel_interlock::PooledPgConnection, Error> {
        let mut conn = self.pool.get()?;
        match conn.batch_execute(LOOK) {
            Err(DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, found)) => {
                violation(format!("the pool gave a connection {}", found.message()));
            }
            looked => looked?,
        }
        Ok(conn)
    }

    /// Checks out all connections of the pool for a while.
    fn exhaust_pool(&mut self) {
        let until = Instant::now() + self.random.millis(100, 400);
        let mut taken = Vec::new();
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            match self.pool.get_timeout(left) {
                Ok(conn) => taken.push(conn),
                Err(_) => break,
            }
            if taken.len() as u32 == CONNECTIONS {
                thread::sleep(until.saturating_duration_since(Instant::now()));
            }
        }
    }
}

fn pool_of(settings: &Settings, url: &str) -> PgPool {
    Pool::builder()
        .max_size(CONNECTIONS)
        .min_idle(Some(0))
        .connection_timeout(Duration::from_secs(2))
        // A check would hide what is left on a connection.
        .test_on_check_out(settings.tests_connections)
        .connection_customizer(Box::new(SessionSettings(settings.clone())))
        .build_unchecked(ConnectionManager::new(url))
}

/// The settings of every session.
#[derive(Debug)]
struct SessionSettings(Settings);

impl CustomizeConnection<PgConnection, diesel::r2d2::Error> for SessionSettings {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), diesel::r2d2::Error> {
        if self.0.shared_sessions {
            conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        }
        if self.0.impatient {
            conn.batch_execute(IMPATIENCE)
                .map_err(diesel::r2d2::Error::QueryError)?;
        }
        Ok(())
    }
}

/// Reports whether the pool gives all its connections at once, and whether each of them works.
fn check_pool(pool: &PgPool) -> Record {
    let end = Instant::now() + WHOLE;
    let mut given = Vec::new();
    while (given.len() as u32) < CONNECTIONS && Instant::now() < end {
        let Ok(mut conn) = pool.get() else { continue };
        if diesel::sql_query("SELECT 1").execute(&mut conn).is_ok() {
            given.push(conn);
        }
    }
    Record::Rested {
        given: given.len() as u32,
        of: CONNECTIONS,
    }
}
