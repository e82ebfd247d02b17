//! A worker is a process that uses every primitive through a pool, as an instance of an application does.

mod article;
mod copies;
mod errors;
mod fenced_writes;
mod neighbour;
mod report;
mod semaphores;
mod session_locks;
mod throttles;
mod transaction_locks;

use std::any::Any;
use std::collections::BTreeSet;
use std::io::BufRead;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool};
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel_interlock::{Error, PgPool};
use fastrand::Rng;
use serde::{Deserialize, Serialize};

use self::report::report;
use crate::chance::Chance;
use crate::clock;
use crate::fault::Fault;
use crate::record::{Outcome, Primitive, Record};

/// More threads than connections, so that the pool is often exhausted.
const THREADS: u64 = 5;
const CONNECTIONS: u32 = 4;

/// How long a pool may take to give all its connections again.
const WHOLE: Duration = Duration::from_secs(30);

/// The settings that a worker is started with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) url: String,
    /// The URL of a second server, as the worker sees it.
    pub(crate) neighbour: String,
    pub(crate) seed: u64,
    /// Whether a pooler in transaction mode is in between, which permits no session locks, no cached statements and no
    /// settings of the session.
    pub(crate) shared_sessions: bool,
    /// Whether the pool tests a connection at check-out.
    pub(crate) tests_connections: bool,
    /// Whether the sessions have timeouts.
    pub(crate) impatient: bool,
}

/// Works until the instruction to rest arrives on the standard input, and ends when the standard input ends.
pub(crate) fn run(settings: Settings) -> ExitCode {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !is_deliberate(info.payload()) {
            default_hook(info);
        }
    }));
    thread::spawn(obey);
    let pool = pool_of(&settings, &settings.url);
    // For the queries of the watches, which must always find a connection.
    let asking = pool_of(&settings, &settings.url);
    let neighbour = pool_of(&settings, &settings.neighbour);
    let mut random = Rng::with_seed(settings.seed);
    thread::scope(|scope| {
        if !settings.shared_sessions {
            scope.spawn(|| neighbour::work(&neighbour));
        }
        for _ in 0..THREADS {
            let mut hand = Hand {
                pool: pool.clone(),
                asking: asking.clone(),
                settings: &settings,
                random: random.fork(),
            };
            scope.spawn(move || {
                while !RESTING.load(Ordering::Relaxed) {
                    hand.work();
                }
            });
        }
    });
    report(&check_pool(&pool));
    // The connections stay open, because the campaign examines them.
    loop {
        thread::park();
    }
}

/// Whether no new operation is to be started.
static RESTING: AtomicBool = AtomicBool::new(false);

/// What the campaign tells a running worker. Each instruction is one line of JSON.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Instruction {
    /// Finish the current operations and start no other.
    Rest,
    /// Inflict this fault on itself at the next opportunity.
    Inflict(Fault),
}

/// The faults that this worker is to inflict on itself at the next opportunity.
static MISHAPS: Mutex<BTreeSet<Fault>> = Mutex::new(BTreeSet::new());

fn mishaps() -> MutexGuard<'static, BTreeSet<Fault>> {
    MISHAPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Follows the instructions. At their end the campaign has ended, or no longer needs this worker.
fn obey() {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Instruction::Rest) => RESTING.store(true, Ordering::Relaxed),
            Ok(Instruction::Inflict(fault)) => _ = mishaps().insert(fault),
            Err(error) => report(&Record::Violation {
                text: format!("the campaign sent an unknown instruction: {error}: {line}"),
            }),
        }
    }
    std::process::exit(0);
}

/// One thread of a worker.
struct Hand<'a> {
    pool: PgPool,
    asking: PgPool,
    settings: &'a Settings,
    random: Rng,
}

type Work = fn(&mut Hand<'_>) -> Result<Outcome, Error>;

impl Hand<'_> {
    /// Pauses a little, and performs one operation.
    fn work(&mut self) {
        thread::sleep(self.random.millis(0, 30));
        let (what, work): (_, Work) = match self.random.u64(..10) {
            0..=3 if !self.settings.shared_sessions => {
                (Primitive::SessionLock, session_locks::work)
            }
            0..=5 => (Primitive::TransactionLock, transaction_locks::work),
            6..=7 => (Primitive::Throttle, throttles::work),
            _ => (Primitive::Semaphore, semaphores::work),
        };
        let began = clock::now();
        let done = catch_unwind(AssertUnwindSafe(|| work(self)));
        let outcome = match done {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                if let Some(violation) = errors::must_not_be(what, &error) {
                    self.violation(violation);
                }
                Outcome::Failed
            }
            Err(panic) if is_deliberate(&*panic) => Outcome::Done,
            Err(_) => {
                self.violation(format!("a panic in {}", what.name()));
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
                self.violation(format!("the pool gave a connection {}", found.message()));
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

    /// Returns whether this fault is due now, and reports it then.
    fn befalls(&self, kind: Fault) -> bool {
        let befalls = mishaps().remove(&kind);
        if befalls {
            report(&Record::Fault { kind });
        }
        befalls
    }

    fn violation(&self, text: impl Into<String>) {
        report(&Record::Violation { text: text.into() });
    }
}

/// One message of the simple protocol, which is a transaction unless one is open already.
const LOOK: &str = "DO $$ BEGIN
    IF now() <> statement_timestamp() THEN RAISE check_violation USING MESSAGE = 'in a transaction'; END IF;
    IF EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory') THEN
        RAISE check_violation USING MESSAGE = 'with a lock';
    END IF;
END $$";

/// The payload of the panics that are faults.
struct Deliberate;

fn panic_deliberately() -> ! {
    std::panic::panic_any(Deliberate)
}

fn is_deliberate(payload: &(dyn Any + Send)) -> bool {
    payload.is::<Deliberate>()
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

/// Shorter than a slice of a wait, and than many waits.
const IMPATIENCE: &str = "SET statement_timeout = '300ms'; SET lock_timeout = '50ms'; \
    SET idle_in_transaction_session_timeout = '300ms'";

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
