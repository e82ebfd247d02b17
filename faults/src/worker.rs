//! A worker is a process that uses every primitive through a pool, as an instance of an application does.

mod asynchronous;
mod blocking;
mod bookings;
mod errors;
mod grants;
mod instructions;
mod lateness;
mod report;
mod requests;
mod sections;
mod spends;
mod writes;

use std::any::Any;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub(crate) use self::instructions::Instruction;

const CONNECTIONS: u32 = 4;

/// How long a pool may take to give all its connections again.
const WHOLE: Duration = Duration::from_secs(30);

/// The settings that a worker is started with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) pool: PoolKind,
    pub(crate) url: String,
    /// The URL of a second server, as the worker sees it.
    pub(crate) second_server: String,
    pub(crate) seed: u64,
    /// Whether a pooler in transaction mode is in between, which permits no session locks, no cached statements and no
    /// settings of the session.
    pub(crate) shared_sessions: bool,
    /// Whether the pool tests a connection at check-out.
    pub(crate) tests_connections: bool,
    /// Whether the sessions have timeouts.
    pub(crate) impatient: bool,
}

/// The pool of a worker, which decides which half of the crate it uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PoolKind {
    R2d2,
    Deadpool,
    Bb8,
}

/// Works until the instruction to rest arrives on the standard input, and ends when the standard input ends.
pub(crate) fn run(settings: Settings) -> ExitCode {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !is_deliberate(info.payload()) {
            default_hook(info);
        }
    }));
    thread::spawn(instructions::follow);
    match settings.pool {
        PoolKind::R2d2 => blocking::run(&settings),
        PoolKind::Deadpool | PoolKind::Bb8 => asynchronous::run(settings),
    }
}

/// One message of the simple protocol, which is a transaction unless one is open already.
const LOOK: &str = "DO $$ BEGIN
    IF now() <> statement_timestamp() THEN RAISE check_violation USING MESSAGE = 'in a transaction'; END IF;
    IF EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory') THEN
        RAISE check_violation USING MESSAGE = 'with a lock';
    END IF;
END $$";

/// Shorter than a slice of a wait, and than many waits.
const IMPATIENCE: &str = "SET statement_timeout = '300ms'; SET lock_timeout = '50ms'; \
    SET idle_in_transaction_session_timeout = '300ms'";

/// The payload of the panics that are faults.
struct Deliberate;

fn panic_deliberately() -> ! {
    std::panic::panic_any(Deliberate)
}

fn is_deliberate(payload: &(dyn Any + Send)) -> bool {
    payload.is::<Deliberate>()
}
