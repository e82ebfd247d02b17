//! `interlock run`: a command under a session lock, or under a permit that renews itself.

use std::ffi::OsString;
use std::fmt::Display;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;

use crate::database::SILENCE;
use crate::hold::{News, Of, PIECE, WORTH_SAYING, hold};
use crate::job::{self, Job};
use crate::{Failure, database, duration, ps, say};

/// `EX_CANTCREAT` of sysexits, which commands hardly ever return.
pub(crate) const BUSY: u8 = 73;

/// How long the command may take to end after SIGTERM, and how long the release may take.
const GRACE: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The name of the lock; with --lease, that of the semaphore
    name: String,
    /// Waits for the lock for at most this time, such as 30s or 10m
    #[arg(long, value_parser = duration, value_name = "DURATION", default_value = "0s", hide_default_value = true)]
    wait: Duration,
    /// Takes a permit that renews itself instead of a session lock: it holds no connection, works
    /// behind a pooler, and needs the schema. After a crash it stays taken for DURATION, which must
    /// be at least 3 seconds
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    lease: Option<Duration>,
    /// How many commands may run at a time
    #[arg(long, value_name = "N", requires = "lease", default_value_t = 1)]
    slots: u32,
    /// Takes the shared form of the lock: many may hold it while nobody has the exclusive one
    #[arg(long, conflicts_with = "lease")]
    shared: bool,
    /// The exit status if the lock is busy
    #[arg(short = 'E', long, value_name = "N", default_value_t = BUSY)]
    conflict_exit_code: u8,
    /// Does not print who holds a busy lock
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// What the other threads send to the main thread.
enum Event {
    Signal(Signal),
    Command(nix::Result<WaitStatus>),
    Holder(News),
    /// Why the database does not reply.
    Silence(String),
}

impl Run {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        if job::is_ignored(Signal::SIGCHLD) {
            return Err(system(
                "SIGCHLD is ignored, so the end of the command could not be seen: run interlock \
                    under `env --default-signal=CHLD`",
            ));
        }
        let signals = job::block().map_err(system)?;
        let url = database::url(&self.name)?;
        let (sender, events) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let to_main = sender.clone();
        spawn(move || {
            while signals
                .wait()
                .is_ok_and(|it| to_main.send(Event::Signal(it)).is_ok())
            {}
        })?;
        let (to_main, wait, name) = (sender.clone(), self.wait, self.name);
        let shown = ps::plain(&name);
        let of = match self.lease {
            None => Of::lock(name, self.shared)?,
            Some(lease) => Of::permit(name, self.slots, lease),
        };
        let lost = format!("{shown}: {}", of.lost());
        let url_of_holder = url.clone();
        spawn(move || {
            hold(&of, &url_of_holder, wait, &ended, |news| {
                let _ = to_main.send(Event::Holder(news));
            });
        })?;

        let (patience, mut pieces) = (wait.saturating_add(SILENCE), Pieces::new());
        let (mut may_be_held, mut is_explained) = (false, false);
        let token = loop {
            match pieces.next(&events)? {
                Some(Event::Holder(News::Held(token))) => break token,
                Some(Event::Holder(News::Connected)) => may_be_held = true,
                Some(Event::Holder(News::Busy(holders))) => {
                    if !self.quiet {
                        busy(&shown, "is busy", &holders);
                    }
                    return Ok(self.conflict_exit_code.into());
                }
                Some(Event::Holder(News::Failed(failure))) => return Err(failure),
                Some(Event::Holder(News::Waits(holders))) => {
                    is_explained = true;
                    if !self.quiet {
                        busy(&shown, "waits", &holders);
                    }
                }
                Some(Event::Silence(why)) => say!("{shown}: {why}"),
                Some(Event::Signal(Signal::SIGTSTP)) => job::stop(),
                Some(Event::Signal(signal)) if !job::is_ignored(signal) => {
                    // A claim may have been sent. If it is granted, the holder releases it.
                    drop(end);
                    if may_be_held {
                        until(&events, GRACE);
                    }
                    return Ok(128 + signal as i32);
                }
                None if pieces.silence >= patience => return Err(database::silent()),
                // If the database replied, the holder would have sent `Waits` by now.
                None if !is_explained && pieces.silence >= WORTH_SAYING + PIECE => {
                    is_explained = true;
                    let (to_main, url) = (sender.clone(), url.clone());
                    spawn(move || {
                        if let Some(why) = Of::silence(&url) {
                            let _ = to_main.send(Event::Silence(why));
                        }
                    })?;
                }
                _ => {}
            }
        };
        let started = Job::start(&self.command, token).map_err(system);
        let attended = started.and_then(|mut job| {
            attend(&mut job, &events, sender, &lost).inspect_err(|_| {
                // The command must not run on without the lock.
                job.send(Signal::SIGKILL);
                let _ = Job::wait(job.pid);
            })
        });
        drop(end);
        let is_lost = matches!(attended, Ok(None));
        match until(&events, if is_lost { PIECE } else { GRACE }) {
            _ if is_lost => {}
            Some(News::Failed(failure)) => {
                say!("{failure}");
                if failure.status == Failure::LOST {
                    return Ok(Failure::LOST);
                }
            }
            None => say!(
                "the database has not confirmed the release, so it is not certain that the lock \
                    was held to the end"
            ),
            _ => {}
        }
        attended.map(|status| status.unwrap_or(Failure::LOST))
    }
}

/// Prints the first holder, and how many more there are, in one line.
fn busy(name: &str, does: &str, holders: &[String]) {
    let more = match holders.len() {
        0 | 1 => String::new(),
        all => format!(", and {} more", all - 1),
    };
    match holders.first() {
        Some(first) => say!("{name} {does}: {first}{more}"),
        None => say!("{name} {does}"),
    }
}

/// Supervises the command until it ends. Returns its exit status, or none if the lock was lost.
fn attend(
    job: &mut Job,
    events: &Receiver<Event>,
    sender: Sender<Event>,
    lost: &str,
) -> Result<Option<i32>, Failure> {
    let pid = job.pid;
    spawn(move || {
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
        let is_lost = matches!(event, Some(Event::Holder(News::Lost)))
            || event.is_none() && pieces.silence >= SILENCE;
        match event {
            Some(Event::Command(Ok(WaitStatus::Exited(_, status)))) => break status,
            Some(Event::Command(Ok(WaitStatus::Signaled(_, signal, _)))) => {
                break 128 + signal as i32;
            }
            Some(Event::Command(Ok(WaitStatus::Stopped(_, signal)))) => job.stopped(signal),
            Some(Event::Command(Err(error))) => return Err(system(error)),
            Some(Event::Signal(signal)) => job.send(signal),
            _ if is_lost && kill_at.is_none() => {
                job.send(Signal::SIGTERM);
                kill_at = Some(Instant::now() + GRACE);
                say!("{lost}; the command is ended");
            }
            _ if kill_at.is_some_and(|at| at <= Instant::now()) => job.send(Signal::SIGKILL),
            _ => {}
        }
    };
    let Some(kill_at) = kill_at else {
        return Ok(Some(status));
    };
    // Processes that the command has left running must end, too.
    while job.is_there() && Instant::now() < kill_at {
        thread::sleep(Duration::from_millis(20));
    }
    job.end_group();
    Ok(None)
}

/// The time without news, counted in pieces, because while this process is stopped no news can
/// arrive, and that time must not count.
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
            Ok(event) => {
                if matches!(event, Event::Holder(News::Held(_))) {
                    self.silence = Duration::ZERO;
                }
                Ok(Some(event))
            }
            Err(RecvTimeoutError::Timeout) => {
                self.silence += PIECE;
                self.next = Instant::now() + PIECE;
                Ok(None)
            }
            Err(error) => Err(system(error)),
        }
    }
}

/// Waits until the holder reports that it holds nothing.
fn until(events: &Receiver<Event>, limit: Duration) -> Option<News> {
    let end = Instant::now() + limit;
    loop {
        let rest = end.saturating_duration_since(Instant::now());
        if let Event::Holder(news @ (News::Busy(_) | News::Failed(_) | News::Released)) =
            events.recv_timeout(rest).ok()?
        {
            return Some(news);
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
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
    fn the_time_while_the_process_was_stopped_does_not_count_as_silence() {
        let (_sender, events) = mpsc::channel();
        let mut pieces = Pieces::new();
        pieces.next = Instant::now().checked_sub(2 * SILENCE).unwrap();
        assert!(pieces.next(&events).unwrap().is_none());
        assert!(pieces.silence < SILENCE);
    }

    #[test]
    fn silence_ends_when_the_lock_is_confirmed() {
        let (sender, events) = mpsc::channel();
        let mut pieces = Pieces::new();
        pieces.silence = SILENCE;
        for (event, silence) in [
            (Event::Signal(Signal::SIGHUP), SILENCE),
            (Event::Holder(News::Held(None)), Duration::ZERO),
        ] {
            sender.send(event).unwrap();
            // A slow machine may count a piece before it reads the event.
            while pieces.next(&events).unwrap().is_none() {}
            assert_eq!(pieces.silence.min(SILENCE), silence);
        }
    }
}
