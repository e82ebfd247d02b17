//! The lock or permit of `interlock run`. It is held on a separate thread, because a database that
//! does not reply must not block the main thread, which supervises the command.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{
    AdvisoryLock, AdvisoryLockGuard, Error, LockKey, Permit, PgPool, Semaphore, check_exclusion,
};
use nix::unistd::gethostname;

use crate::database::{Schema, Sessions};
use crate::{Failure, database, holders, ps, say};

/// A wait is cut into pieces of this length, and checks between them whether it should end. This is
/// also how often a session lock is checked.
pub(crate) const PIECE: Duration = Duration::from_secs(1);

/// After a wait of this length, a message says who holds the lock.
pub(crate) const WORTH_SAYING: Duration = Duration::from_secs(5);

/// How long one attempt waits for a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// What the thread that holds the lock or permit reports to the main thread.
pub(crate) enum News {
    /// From now on the lock may be held.
    Connected,
    /// The lock is held, with this fencing token. Sent again after every check that confirms it.
    Held(Option<i64>),
    /// The wait is long. The holders, as far as they are known.
    Waits(Vec<String>),
    /// The lock was busy until the end of the wait. The holders, as far as they are known.
    Busy(Vec<String>),
    Failed(Failure),
    Lost,
    Released,
}

/// Takes the lock or permit, checks whether it is still held, and releases it when the other side
/// of `end` is dropped.
pub(crate) fn hold(of: &Of, url: &str, wait: Duration, end: &Receiver<()>, tell: impl Fn(News)) {
    let began = Instant::now();
    let held = connected(url, wait).and_then(|(sessions, is_away)| {
        tell(News::Connected);
        let Some(mut held) = take(of, &sessions, is_away, began, wait, end, &tell)? else {
            return Ok(Err(of.holders(&sessions.pool)));
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
        Ok(Ok((held, token)))
    });
    let (mut held, token) = match held {
        Ok(Ok(held)) => held,
        Ok(Err(holders)) => return tell(News::Busy(holders)),
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
                // The command may have ended before the main thread received `Lost`.
                return tell(News::Failed(Failure::new(Failure::LOST, of.lost())));
            }
            // An error of the server, such as a missing right, is also a reply, and the session
            // that sends it still holds the lock.
            Err(error) if !error.is_unavailable() => tell(News::Held(token)),
            // The main thread counts the time without news, and decides.
            Err(_) => {}
        }
    }
    tell(match held.release() {
        Ok(()) => News::Released,
        Err(error) => News::Failed(error.into()),
    });
}

/// Connects. If the database cannot be reached, says so at once, and goes on: the database may be
/// back before the wait is over. Returns also whether it is away.
fn connected(url: &str, wait: Duration) -> Result<(Sessions, bool), Failure> {
    let is_away = match database::connect(url) {
        Err(failure) if failure.status == Failure::UNAVAILABLE && !wait.is_zero() => {
            say!("{failure}");
            say!("retrying until the wait is over");
            true
        }
        connected => {
            drop(connected?);
            false
        }
    };
    Ok((database::sessions(url)?, is_away))
}

/// Waits piece by piece. An outage of the database does not end the wait.
fn take(
    of: &Of,
    sessions: &Sessions,
    mut was_away: bool,
    began: Instant,
    wait: Duration,
    end: &Receiver<()>,
    tell: &impl Fn(News),
) -> Result<Option<Held>, Failure> {
    let (mut was_busy, mut is_checked, mut is_explained) = (false, false, false);
    loop {
        let rest = wait.saturating_sub(began.elapsed());
        if end.try_recv() == Err(TryRecvError::Disconnected) {
            return Ok(None);
        }
        let is_last = rest <= PIECE;
        // Limited to the rest of the wait, which may be shorter than the pool's own timeout.
        let mut attempt = || -> Result<_, Failure> {
            if was_away {
                // The pool would try until its timeout, which may be longer than the wait.
                drop(database::connect(&sessions.url)?);
            }
            if !is_checked {
                of.check(sessions)?;
                is_checked = true;
                // On a slow network it takes longer than a piece to connect, so this is done
                // before.
                drop(sessions.pool.get());
            }
            drop(sessions.get(rest.clamp(PIECE, CONNECTION_TIMEOUT))?);
            Ok(of.take(&sessions.pool, rest.min(PIECE))?)
        };
        let taken = attempt();
        let is_away = matches!(&taken, Err(failure) if failure.status == Failure::UNAVAILABLE);
        was_away = is_away;
        match taken {
            Ok(None) if !is_last => {
                was_busy = true;
                if !is_explained && began.elapsed() >= WORTH_SAYING {
                    is_explained = true;
                    tell(News::Waits(of.holders(&sessions.pool)));
                }
            }
            Err(_) if is_away && is_last && was_busy => return Ok(None),
            Err(failure) if is_away && !rest.is_zero() => {
                if was_busy {
                    say!("{failure}");
                }
                was_busy = false;
                thread::sleep(Duration::from_millis(100));
            }
            taken => return taken,
        }
    }
}

/// What `interlock run` is to hold.
pub(crate) enum Of {
    /// The lock and its number.
    Lock(AdvisoryLock, String),
    /// The semaphore and its name.
    Permit(Semaphore, String),
}

enum Held {
    Lock(Box<AdvisoryLockGuard>),
    Permit(Permit),
}

impl Of {
    pub(crate) fn lock(name: String, is_shared: bool) -> Result<Self, Failure> {
        let number = database::lock(&name, false)?;
        let lock = AdvisoryLock::new(LockKey::from(name));
        let lock = if is_shared { lock.shared() } else { lock };
        Ok(Self::Lock(lock, number))
    }

    pub(crate) fn permit(name: String, slots: u32, lease: Duration) -> Self {
        let host = gethostname().unwrap_or_default();
        let details = format!(
            "interlock {} on {}",
            std::process::id(),
            host.to_string_lossy()
        );
        let semaphore = Semaphore::named(name.clone().leak(), slots, lease);
        Self::Permit(semaphore.keep_alive().details(details), name)
    }

    /// For a lock: an error behind a pooler in transaction mode, where a session lock excludes
    /// nobody and outlives its holder. For a permit: an error without the schema.
    fn check(&self, sessions: &Sessions) -> Result<(), Failure> {
        if let Self::Permit(..) = self {
            let mut conn = sessions.get(CONNECTION_TIMEOUT)?;
            return Schema::of(&mut conn)?.require();
        }
        // In a separate pool, which is dropped afterwards: only the check needs two sessions, and
        // the second one would stay open for the whole wait.
        let two = database::sessions(&sessions.url)?;
        drop(two.get(CONNECTION_TIMEOUT)?);
        match check_exclusion(&two.pool) {
            Err(error @ (Error::Pool(_) | Error::TimedOut))
                if two.pool.state().connections == 1 =>
            {
                say!(
                    "cannot check whether the connection goes through a pooler in transaction \
                        mode, because that needs a second connection: {error}"
                );
            }
            checked => checked?,
        }
        drop(two);
        Ok(sessions.make_own()?)
    }

    /// The holders, a line each.
    fn holders(&self, pool: &PgPool) -> Vec<String> {
        let holders = pool.get().ok().map(|mut conn| match self {
            Self::Lock(_, number) => holders::of_lock(&mut conn, number),
            Self::Permit(_, service) => holders::of_slots(&mut conn, service),
        });
        holders.and_then(Result::ok).unwrap_or_default()
    }

    /// Why the database does not reply, if another session can see the reason.
    pub(crate) fn silence(url: &str) -> Option<String> {
        const WAITS: &str = "
            SELECT current_setting('synchronous_standby_names') AS names FROM pg_stat_activity
            WHERE wait_event = 'SyncRep' AND usename = current_user AND
                application_name = current_setting('application_name')";
        let mut conn = database::connect(url).ok()?;
        let waits = database::rows(&mut conn, WAITS).ok()?;
        let names = waits.first()?["names"].as_str()?;
        Some(format!(
            "its commit waits for a synchronous standby (synchronous_standby_names = '{names}'): see \
                `interlock doctor`"
        ))
    }

    /// The message for a lost lock or permit.
    pub(crate) fn lost(&self) -> String {
        match self {
            Self::Lock(_, number) => format!(
                "the lock {number} is no longer held, or this cannot be confirmed: its session has \
                 ended, or does not reply"
            ),
            Self::Permit(_, name) => format!(
                "the permit of {} is no longer held: it has expired because it could not be \
                 renewed, or somebody else has completed it",
                ps::plain(name)
            ),
        }
    }

    fn take(&self, pool: &PgPool, limit: Duration) -> Result<Option<Held>, Error> {
        match self {
            Self::Lock(lock, _) => {
                let attempt = if limit.is_zero() {
                    lock.try_acquire(pool)?
                } else {
                    lock.acquire_timeout(pool, limit)?
                };
                Ok(attempt.acquired().map(|guard| Held::Lock(guard.into())))
            }
            Self::Permit(semaphore, _) => {
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
    /// The fencing token. None without the schema, or without the right to use it; a session lock
    /// works without both.
    fn token(&mut self) -> Result<Option<i64>, Error> {
        match self {
            Self::Permit(permit) => Ok(Some(permit.fencing_token())),
            Self::Lock(guard) => {
                let why = match Schema::of(guard.conn()).map_err(Error::from) {
                    Ok(Schema::Usable) => match guard.fencing_token() {
                        Ok(token) => return Ok(Some(token)),
                        Err(error @ (Error::LockLost(_) | Error::SessionMoved { .. })) => {
                            return Err(error);
                        }
                        Err(error) => error.to_string(),
                    },
                    Ok(foreign @ Schema::Foreign { .. }) => {
                        foreign.why_unread().unwrap_or_default()
                    }
                    Ok(_) => return Ok(None),
                    Err(error) if error.is_unavailable() => return Err(error),
                    Err(error) => error.to_string(),
                };
                say!("INTERLOCK_TOKEN is not set: {why}");
                Ok(None)
            }
        }
    }

    /// For a lock, this is a round trip. A permit knows it from its own renewals.
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
