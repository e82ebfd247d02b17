//! What `interlock run` holds, on a thread of its own, because a database that does not reply must not keep the main thread from the
//! command.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{
    AdvisoryLock, AdvisoryLockGuard, Error, LockKey, Permit, PgPool, Semaphore,
};
use nix::unistd::gethostname;

use crate::{Failure, database, say};

/// A wait is cut into such pieces, between which it sees that it is to end. As often a session lock is looked at.
pub(crate) const PIECE: Duration = Duration::from_secs(1);
pub(crate) const LOST: &str = "it is held no longer, or the database does not say so: the session has ended, or the permit is over";

/// What became of it.
pub(crate) enum News {
    /// From now on it may be held.
    Connected,
    /// It is held, with this fencing token. Told again whenever that was seen.
    Held(Option<i64>),
    /// It was busy until the end of the wait.
    Busy,
    Failed(Failure),
    Lost,
    Released,
}

/// Takes it, looks whether it is still held, and releases it when the other side of `end` is dropped.
pub(crate) fn hold(of: &Of, url: &str, wait: Duration, end: &Receiver<()>, tell: impl Fn(News)) {
    let began = Instant::now();
    let held = connected(url, wait).and_then(|pool| {
        tell(News::Connected);
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
        Ok(None) => return tell(News::Busy),
        Err(failure) => return tell(News::Failed(failure)),
    };
    tell(News::Held(token));
    while end.recv_timeout(held.pause()) == Err(RecvTimeoutError::Timeout) {
        match held.is_held() {
            Ok(true) => tell(News::Held(token)),
            Ok(false) => {
                tell(News::Lost);
                let _ = end.recv();
                drop(held);
                // The command may have ended before that was heard.
                return tell(News::Failed(Failure::new(Failure::LOST, LOST)));
            }
            // An error, such as for want of a right, is a reply of the session that holds the lock.
            Err(error) if !error.is_unavailable() => tell(News::Held(token)),
            // Silence, if it goes on.
            Err(_) => {}
        }
    }
    tell(match held.release() {
        Ok(()) => News::Released,
        Err(error) => News::Failed(error.into()),
    });
}

/// A database that cannot be reached is said at once, and may be there before the wait is over.
fn connected(url: &str, wait: Duration) -> Result<PgPool, Failure> {
    let is_there = match database::connect(url) {
        Err(failure) if failure.status == Failure::UNAVAILABLE && !wait.is_zero() => {
            say!("{failure}");
            say!("trying again until the wait is over");
            false
        }
        connected => {
            drop(connected?);
            true
        }
    };
    let pool = database::pool_that_waits(url)?;
    if is_there {
        // On a slow network to connect takes longer than a piece of the wait, and is no part of it.
        drop(pool.get());
    }
    Ok(pool)
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
pub(crate) enum Of {
    Lock(AdvisoryLock),
    Permit(Semaphore),
}

enum Held {
    Lock(Box<AdvisoryLockGuard>),
    Permit(Permit),
}

impl Of {
    pub(crate) fn lock(name: String, is_shared: bool) -> Self {
        let lock = AdvisoryLock::new(LockKey::from(name));
        Self::Lock(if is_shared { lock.shared() } else { lock })
    }

    pub(crate) fn permit(name: String, slots: u32, lease: Duration) -> Self {
        let host = gethostname().unwrap_or_default();
        let details = format!(
            "interlock {} on {}",
            std::process::id(),
            host.to_string_lossy()
        );
        let semaphore = Semaphore::named(name.leak(), slots, lease);
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
