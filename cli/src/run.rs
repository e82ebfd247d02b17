//! `interlock run`: a command under a session lock, or under a permit that renews itself.

use std::ffi::OsString;
use std::fmt::Display;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use diesel_interlock::{
    AdvisoryLock, AdvisoryLockGuard, Error, LockKey, Permit, PgPool, Semaphore,
};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use nix::unistd::gethostname;

use crate::database::SILENCE;
use crate::job::{self, Job};
use crate::{Failure, database, duration, say};

/// A wait is cut into such pieces, between which it sees that it is to end. As often a session lock is looked at.
const PIECE: Duration = Duration::from_secs(1);
const LOST: &str = "it is held no longer, or the database does not say so: the session has ended, or the permit is over";
/// How long a command has to end after SIGTERM, and the release may take.
const GRACE: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The name of the lock; with --lease, that of the semaphore
    name: String,
    /// Waits for at most so long, such as 30s or 10m
    #[arg(long, value_parser = duration, value_name = "DURATION", default_value = "0s", hide_default_value = true)]
    wait: Duration,
    /// Takes a permit that renews itself instead of a session lock: it holds no connection, works behind a pooler, and needs the
    /// schema. After a crash it is free when DURATION is over, 3 seconds at least
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    lease: Option<Duration>,
    /// How many commands may run at a time
    #[arg(long, value_name = "N", requires = "lease", default_value_t = 1)]
    slots: u32,
    /// Takes the shared form of the lock: many may hold it while nobody has the exclusive one
    #[arg(long, conflicts_with = "lease")]
    shared: bool,
    /// The exit status if another one holds it
    #[arg(short = 'E', long, value_name = "N", default_value_t = 1)]
    conflict_exit_code: u8,
    /// The command
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// What the main thread is told.
enum Event {
    Signal(Signal),
    /// From now on it may be held.
    Connected,
    /// It is held, with this fencing token. Told again whenever that was seen.
    Held(Option<i64>),
    /// It was busy until the end of the wait.
    Busy,
    Failed(Failure),
    Lost,
    Command(nix::Result<WaitStatus>),
    Released,
}

impl Run {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        if job::is_ignored(Signal::SIGCHLD) {
            return Err(system(
                "SIGCHLD is ignored, so the end of the command could not be seen: `env --default-signal=CHLD` sets it back",
            ));
        }
        let signals = job::block().map_err(system)?;
        let url = database::url(&self.name)?;
        let (sender, events) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let told = sender.clone();
        beside(move || {
            while signals
                .wait()
                .is_ok_and(|it| told.send(Event::Signal(it)).is_ok())
            {}
        })?;
        let (told, wait, of) = (sender.clone(), self.wait, Of::new(&self));
        beside(move || hold(&of, &url, wait, &told, &ended))?;

        let (patience, mut pieces) = (self.wait.saturating_add(SILENCE), Pieces::new());
        let mut may_be_held = false;
        let token = loop {
            match pieces.next(&events)? {
                Some(Event::Held(token)) => break token,
                Some(Event::Connected) => may_be_held = true,
                Some(Event::Busy) => return Ok(self.conflict_exit_code.into()),
                Some(Event::Failed(failure)) => return Err(failure),
                Some(Event::Signal(Signal::SIGTSTP)) => job::stop(),
                Some(Event::Signal(signal)) if !job::is_ignored(signal) => {
                    // A permit may be on its way. It is released.
                    drop(end);
                    if may_be_held {
                        until(&events, GRACE);
                    }
                    return Ok(128 + signal as i32);
                }
                None if pieces.silence >= patience => return Err(database::silent()),
                _ => {}
            }
        };
        let started = Job::start(&self.command, token).map_err(system);
        let attended = started.and_then(|mut job| {
            attend(&mut job, &events, sender).inspect_err(|_| {
                // It must not run on without the lock.
                job.send(Signal::SIGKILL);
                let _ = Job::wait(job.pid);
            })
        });
        drop(end);
        let is_lost = matches!(attended, Ok(Failure::LOST));
        match until(&events, if is_lost { PIECE } else { GRACE }) {
            _ if is_lost => {}
            Some(Event::Failed(failure)) => {
                say!("{failure}");
                if failure.status == Failure::LOST {
                    return Ok(Failure::LOST);
                }
            }
            None => say!(
                "the database has not confirmed the release, and so not that it was held to the end"
            ),
            _ => {}
        }
        attended
    }
}

/// Waits for the command, and looks after it. Returns its exit status, or that the lock was lost.
fn attend(job: &mut Job, events: &Receiver<Event>, sender: Sender<Event>) -> Result<i32, Failure> {
    let pid = job.pid;
    beside(move || {
        let mut is_there = true;
        while is_there {
            let status = Job::wait(pid);
            is_there = matches!(status, Ok(WaitStatus::Stopped(..)));
            is_there &= sender.send(Event::Command(status)).is_ok();
        }
    })?;
    let (mut pieces, mut kill_at) = (Pieces::new(), None);
    let status = loop {
        let event = pieces.next(events)?;
        let is_lost =
            matches!(event, Some(Event::Lost)) || event.is_none() && pieces.silence >= SILENCE;
        match event {
            Some(Event::Command(Ok(WaitStatus::Exited(_, status)))) => break status,
            Some(Event::Command(Ok(WaitStatus::Signaled(_, signal, _)))) => {
                break 128 + signal as i32;
            }
            Some(Event::Command(Ok(WaitStatus::Stopped(_, signal)))) => job.stopped(signal),
            Some(Event::Command(Err(error))) => return Err(system(error)),
            Some(Event::Signal(signal)) => job.send(signal),
            Some(Event::Held(_)) => pieces.silence = Duration::ZERO,
            _ if is_lost && kill_at.is_none() => {
                job.send(Signal::SIGTERM);
                kill_at = Some(Instant::now() + GRACE);
                say!("{LOST}");
            }
            _ if kill_at.is_some_and(|at| at <= Instant::now()) => job.send(Signal::SIGKILL),
            _ => {}
        }
    };
    let Some(kill_at) = kill_at else {
        return Ok(status);
    };
    // What the command has left running must end, too.
    while job.is_there() && Instant::now() < kill_at {
        thread::sleep(Duration::from_millis(20));
    }
    job.end_group();
    Ok(Failure::LOST)
}

/// The time without a sign of life, counted in pieces, because while this process is stopped nothing can be heard.
struct Pieces {
    next: Instant,
    silence: Duration,
}

impl Pieces {
    fn new() -> Self {
        Self {
            next: Instant::now() + PIECE,
            silence: Duration::ZERO,
        }
    }

    /// The next event, or none at the end of a piece.
    fn next(&mut self, events: &Receiver<Event>) -> Result<Option<Event>, Failure> {
        let rest = self.next.saturating_duration_since(Instant::now());
        match events.recv_timeout(rest) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => {
                self.silence += PIECE;
                self.next = Instant::now() + PIECE;
                Ok(None)
            }
            Err(error) => Err(system(error)),
        }
    }
}

/// Waits until the holder says that it holds nothing.
fn until(events: &Receiver<Event>, limit: Duration) -> Option<Event> {
    let end = Instant::now() + limit;
    loop {
        let rest = end.saturating_duration_since(Instant::now());
        let event = events.recv_timeout(rest).ok()?;
        if matches!(event, Event::Busy | Event::Failed(_) | Event::Released) {
            return Some(event);
        }
    }
}

/// Takes it, looks whether it is still held, and releases it: on a thread of its own, because a database that does not reply must
/// not keep the main thread from the command.
fn hold(of: &Of, url: &str, wait: Duration, told: &Sender<Event>, end: &Receiver<()>) {
    let began = Instant::now();
    let held = connected(url, wait).and_then(|pool| {
        let _ = told.send(Event::Connected);
        let Some(mut held) = take(of, &pool, began, wait, end)? else {
            return Ok(None);
        };
        let token = held.token().map_err(|error| {
            let is_moved = matches!(error, Error::SessionMoved { .. });
            let status = if is_moved {
                Failure::SET_UP
            } else {
                Failure::UNAVAILABLE
            };
            Failure::new(status, error)
        })?;
        Ok(Some((held, token)))
    });
    let (mut held, token) = match held {
        Ok(Some(held)) => held,
        Ok(None) => return drop(told.send(Event::Busy)),
        Err(failure) => return drop(told.send(Event::Failed(failure))),
    };
    let _ = told.send(Event::Held(token));
    while end.recv_timeout(held.pause()) == Err(RecvTimeoutError::Timeout) {
        match held.is_held() {
            Ok(true) => drop(told.send(Event::Held(token))),
            Ok(false) => {
                let _ = told.send(Event::Lost);
                let _ = end.recv();
                drop(held);
                // The command may have ended before that was heard.
                return drop(told.send(Event::Failed(Failure::new(Failure::LOST, LOST))));
            }
            // An error, such as for want of a right, is a reply of the session that holds the lock.
            Err(error) if !error.is_unavailable() => drop(told.send(Event::Held(token))),
            // Silence, if it goes on.
            Err(_) => {}
        }
    }
    let _ = told.send(match held.release() {
        Ok(()) => Event::Released,
        Err(error) => Event::Failed(error.into()),
    });
}

/// A database that cannot be reached is said at once, and may be there before the wait is over.
fn connected(url: &str, wait: Duration) -> Result<PgPool, Failure> {
    match database::connect(url) {
        Err(failure) if failure.status == Failure::UNAVAILABLE && !wait.is_zero() => {
            say!("{failure}");
            say!("trying again until the wait is over");
        }
        connected => drop(connected?),
    }
    database::pool_that_waits(url)
}

/// Waits piece by piece. A database that is away for a moment does not end a wait.
fn take(
    of: &Of,
    pool: &PgPool,
    began: Instant,
    wait: Duration,
    end: &Receiver<()>,
) -> Result<Option<Held>, Error> {
    let mut was_busy = false;
    loop {
        let rest = wait.saturating_sub(began.elapsed());
        if end.try_recv() == Err(TryRecvError::Disconnected) {
            return Ok(None);
        }
        let is_last = rest <= PIECE;
        match of.take(pool, rest.min(PIECE)) {
            Ok(None) if !is_last => was_busy = true,
            Err(error) if error.is_unavailable() && is_last && was_busy => return Ok(None),
            Err(error) if error.is_unavailable() && !is_last => {
                if was_busy {
                    say!("{}", Failure::from(error));
                }
                was_busy = false;
                thread::sleep(Duration::from_millis(100));
            }
            taken => return taken,
        }
    }
}

/// What is to be held.
enum Of {
    Lock(AdvisoryLock),
    Permit(Semaphore),
}

enum Held {
    Lock(Box<AdvisoryLockGuard>),
    Permit(Permit),
}

impl Of {
    fn new(run: &Run) -> Self {
        let name = run.name.clone();
        let Some(lease) = run.lease else {
            let lock = AdvisoryLock::new(LockKey::from(name));
            return Self::Lock(if run.shared { lock.shared() } else { lock });
        };
        let host = gethostname().unwrap_or_default();
        let details = format!(
            "interlock {} on {}",
            std::process::id(),
            host.to_string_lossy()
        );
        let semaphore = Semaphore::named(name.leak(), run.slots, lease);
        Self::Permit(semaphore.keep_alive().details(details))
    }

    fn take(&self, pool: &PgPool, limit: Duration) -> Result<Option<Held>, Error> {
        match self {
            Self::Lock(lock) => {
                let attempt = if limit.is_zero() {
                    lock.try_acquire(pool)?
                } else {
                    lock.acquire_timeout(pool, limit)?
                };
                Ok(attempt.acquired().map(|guard| Held::Lock(guard.into())))
            }
            Self::Permit(semaphore) => {
                let admission = if limit.is_zero() {
                    semaphore.try_acquire(pool)?
                } else {
                    semaphore.acquire_timeout(pool, limit)?
                };
                Ok(admission.admitted().map(Held::Permit))
            }
        }
    }
}

impl Held {
    /// None without the schema, which session locks do not need.
    fn token(&mut self) -> Result<Option<i64>, Error> {
        match self {
            Self::Permit(permit) => Ok(Some(permit.fencing_token())),
            Self::Lock(guard) => match guard.fencing_token() {
                Ok(token) => Ok(Some(token)),
                Err(error @ (Error::LockLost(_) | Error::SessionMoved { .. })) => Err(error),
                Err(Error::NotInstalled) => Ok(None),
                Err(error) => {
                    say!("no INTERLOCK_TOKEN: {error}");
                    Ok(None)
                }
            },
        }
    }

    /// A round trip for a lock. A permit knows.
    fn is_held(&mut self) -> Result<bool, Error> {
        match self {
            Self::Lock(guard) => guard.is_held(),
            Self::Permit(permit) => Ok(!permit.is_lost()),
        }
    }

    fn pause(&self) -> Duration {
        match self {
            Self::Lock(_) => PIECE,
            Self::Permit(_) => PIECE / 10,
        }
    }

    fn release(self) -> Result<(), Error> {
        match self {
            Self::Lock(guard) => guard.release(),
            Self::Permit(permit) => permit.release(),
        }
    }
}

fn beside(work: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let started = thread::Builder::new().spawn(work);
    started.map(drop).map_err(system)
}

fn system(error: impl Display) -> Failure {
    Failure::new(Failure::SYSTEM, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_in_which_the_process_was_stopped_is_no_silence() {
        let (_sender, events) = mpsc::channel();
        let mut pieces = Pieces::new();
        pieces.next = Instant::now().checked_sub(2 * SILENCE).unwrap();
        assert!(pieces.next(&events).unwrap().is_none());
        assert!(pieces.silence < SILENCE);
    }
}
