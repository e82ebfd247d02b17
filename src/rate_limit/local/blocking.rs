//! Local rate limits over a pool, blocking.

use std::fmt;
use std::time::Duration;

use super::taking::LONGEST_WAIT;
use super::{Known, Local, give_back};
use crate::clock::Deadline;
use crate::error::Result;
use crate::events;
use crate::panics::caught;
use crate::pool::{self, PgPool};
use crate::rate_limit::{Check, RateLimit};
use crate::session::{Blocking, now};

/// How long a drop gives units back.
const LONGEST_DROP: Duration = Duration::from_secs(1);

/// A rate limit of which this process takes several units of a key at a time, and hands them out without a round trip.
///
/// [`RateLimit::local`] makes it. Keep one value per process and limit, because what it has taken is of no use to others.
///
/// Over all processes, however many they are, at most `burst + chunk + W × N / period` units are allowed for a key in any span W,
/// where the cost of a call counts as the chunk if it is larger. To keep this promise, a process may use the units that it has
/// taken for `units × period / N` only, counted from just before it asked for them. Then they are void. A process that takes units
/// and does not use them keeps others waiting, so use chunks that are well below the burst divided by the number of instances.
///
/// Calls that find too few units of a key at the same time share a round trip. One call takes a chunk. The others wait for it, for
/// at most 250 milliseconds, as far as the chunk is enough for them, too. So a process takes no more chunks than its calls need.
///
/// The process remembers for at most a second that a key is limited, and for each cost only until a call of that cost may pass. At
/// most 10,000 keys are known. For a new one, the key that was first used longest ago is forgotten, with the units that were taken
/// for it, which come back with time. Errors are not remembered.
///
/// A call is allowed if the units in hand are enough for it, even if its cost is above the burst.
///
/// Dropping the value gives back what was not used, if the pool has an idle connection. It never waits for one. It takes one round
/// trip for each key, and begins none after a second.
pub struct LocalRateLimit {
    local: Local,
    pool: PgPool,
}

impl RateLimit {
    /// Makes a limit that takes up to `chunk` units of a key at a time, fewer if fewer are left, and hands them out without a
    /// round trip.
    ///
    /// The key and the cost of this value do not count, because each [`check`](LocalRateLimit::check) has its own. Nothing is
    /// sent.
    ///
    /// # Errors
    ///
    /// [`Error::Input`](crate::Error::Input) for a name or a quota that is refused, and for a chunk of zero.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel_interlock::{Error, LocalRateLimit, PgPool, Quota, RateLimit};
    ///
    /// static API: RateLimit = RateLimit::named("api", Quota::per_minute(6000).burst(1000));
    ///
    /// fn serve(local: &LocalRateLimit, customer: &str) -> Result<u16, Error> {
    ///     Ok(if local.check(customer, 1)?.is_allowed() { 200 } else { 429 })
    /// }
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # let pool = database.pool(1);
    /// let local = API.local(&pool, 50)?; // at start-up
    /// # for _ in 0..60 { assert_eq!(serve(&local, "7")?, 200); }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn local(&self, pool: &PgPool, chunk: u32) -> Result<LocalRateLimit> {
        Ok(LocalRateLimit {
            local: Local::of(self, chunk)?,
            pool: pool.clone(),
        })
    }
}

impl LocalRateLimit {
    /// Spends the units of a call for the key, from those that this process has taken. If they are too few, takes more, in one
    /// round trip.
    ///
    /// The empty key is the limit without a key. The outcome tells what is left as far as this process knows.
    ///
    /// # Blocking
    ///
    /// Only if units must be taken: at most 250 milliseconds for another thread that takes them, and then as
    /// [`RateLimit::check`].
    ///
    /// # Errors
    ///
    /// See [errors of checks](RateLimit#errors-of-checks).
    pub fn check(&self, key: &str, cost: u32) -> Result<Check> {
        match self.local.known(key, cost)? {
            Known::Outcome(check) => Ok(check),
            Known::Missing(_) => self.take(key, cost),
        }
    }

    fn take(&self, key: &str, cost: u32) -> Result<Check> {
        let check = async {
            let limit = self.local.limit_of(key)?; // before the pool is asked
            let _taking = match self.local.announce(key, cost) {
                Ok(taking) => taking,
                Err(completion) => {
                    completion.wait(LONGEST_WAIT);
                    if let Known::Outcome(check) = self.local.known(key, cost)? {
                        return Ok(check);
                    }
                    self.local.announce_alone(key, cost)
                }
            };
            let mut conn = pool::check_out(&self.pool, None)?;
            let session = &mut Blocking::pooled(&mut conn);
            self.local.take(session, &limit, cost).await
        };
        let subject = self.local.limit.subject();
        now(events::observe("check", subject, check, Check::outcome))
    }
}

impl fmt::Debug for LocalRateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalRateLimit")
            .field("limit", &self.local.limit)
            .field("chunk", &self.local.chunk)
            .finish_non_exhaustive()
    }
}

impl Drop for LocalRateLimit {
    fn drop(&mut self) {
        let unused = self.local.forget();
        if unused.is_empty() {
            return;
        }
        let _ = caught(|| {
            if let Some(mut conn) = self.pool.try_get() {
                let session = &mut Blocking::pooled(&mut conn);
                now(give_back(session, &unused, Deadline::after(LONGEST_DROP)));
            }
        });
    }
}
