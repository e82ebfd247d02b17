//! Local rate limits over a pool, asynchronous.

use std::fmt;
use std::sync::{Arc, Mutex};

use tokio::runtime::Handle;

use super::taking::LONGEST_WAIT;
use super::{Known, Local, give_back};
use crate::clock::Deadline;
use crate::error::Result;
use crate::events;
use crate::panics::lock;
use crate::pool::asynchronous::{self as pool, Pool};
use crate::rate_limit::asynchronous::RateLimit;
use crate::rate_limit::{self, Check};
use crate::runtime::{self, Finished};
use crate::session::Asynchronous;
use crate::text::{Name, SentName};

/// A rate limit of which this process takes several units of a key at a time, and hands them out without a round trip.
///
/// The same as `LocalRateLimit` of the blocking half, which has the promise and its reasons: over all processes, at most
/// `burst + chunk + W × N / period` units are allowed for a key in any span W. [`RateLimit::local`] makes it. Make one per
/// process and limit, and clone it: the clones share what was taken.
///
/// Dropping the last clone gives back what was not used, in a task of the runtime that took it, if the pool has an idle
/// connection. It never waits for one. Without a runtime, what was not used comes back with time.
pub struct LocalRateLimit<P: Pool> {
    shared: Arc<Shared<P>>,
}

impl<P: Pool> Clone for LocalRateLimit<P> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl RateLimit {
    /// Makes a limit that takes up to `chunk` units of a key at a time, fewer if fewer are left, and hands them out without a
    /// round trip. As `RateLimit::local` of the blocking half.
    ///
    /// # Errors
    ///
    /// [`Error::Input`](crate::Error::Input) for a name or a quota that is refused, and for a chunk of zero.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel_interlock::asynchronous::{LocalRateLimit, Pool, RateLimit};
    /// use diesel_interlock::{Error, Quota};
    ///
    /// static API: RateLimit = RateLimit::named("api", Quota::per_minute(6000).burst(1000));
    ///
    /// async fn serve<P: Pool>(local: &LocalRateLimit<P>, customer: &str) -> Result<u16, Error> {
    ///     Ok(if local.check(customer, 1).await?.is_allowed() { 200 } else { 429 })
    /// }
    /// # #[cfg(all(feature = "deadpool", feature = "migrations", feature = "postgres"))]
    /// # fn main() -> Result<(), Error> {
    /// # workbench::block_on(async {
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # let pool = database.deadpool(1);
    /// let local = API.local(&pool, 50)?; // at start-up
    /// # for _ in 0..60 { assert_eq!(serve(&local, "7").await?, 200); }
    /// # Ok(())
    /// # })
    /// # }
    /// # #[cfg(not(all(feature = "deadpool", feature = "migrations", feature = "postgres")))]
    /// # fn main() {}
    /// ```
    pub fn local<P: Pool>(&self, pool: &P, chunk: u32) -> Result<LocalRateLimit<P>> {
        let shared = Shared {
            local: Local::of(self.as_ref(), chunk)?,
            pool: pool.clone(),
            runtime: Mutex::default(),
        };
        Ok(LocalRateLimit {
            shared: Arc::new(shared),
        })
    }
}

impl<P: Pool> LocalRateLimit<P> {
    /// Spends the units of a call for the key, from those that this process has taken. If they are too few, takes more, in one
    /// round trip.
    ///
    /// The empty key is the limit without a key. The outcome tells what is left as far as this process knows. If another task is
    /// already taking enough units for both calls, this waits for that task for at most 250 milliseconds.
    ///
    /// # Dropped futures
    ///
    /// If the future is dropped while it takes units, or waits for a connection to do so, a task finishes that, and the
    /// process keeps what was taken for other calls. The units of the call itself may be spent.
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks). If units must be taken outside a runtime,
    /// [`Error::NoRuntime`](crate::Error::NoRuntime).
    pub async fn check(&self, key: &str, cost: u32) -> Result<Check> {
        match self.shared.local.known(key, cost)? {
            Known::Outcome(check) => Ok(check),
            // In a box, because most calls need no place for it.
            Known::Missing(_) => Box::pin(self.take(key, cost)).await,
        }
    }

    async fn take(&self, key: &str, cost: u32) -> Result<Check> {
        let local = &self.shared.local;
        let check = async {
            let mut limit = local.limit_of(key)?; // before the pool is asked
            // A dropped call is finished by a task without the prefix of a test.
            limit.sent_name = SentName::of(&Name::anywhere(&limit.name));
            let runtime = runtime::current()?;
            let taking = match local.announce(key, cost) {
                Ok(taking) => taking,
                Err(completion) => {
                    completion.awaited(LONGEST_WAIT).await;
                    if let Known::Outcome(check) = local.known(key, cost)? {
                        return Ok(check);
                    }
                    local.announce_alone(key, cost)
                }
            };
            *lock(&self.shared.runtime) = Some(runtime.clone());
            let shared = Arc::clone(&self.shared);
            let take = async move {
                let taken = shared.take(&limit, cost).await;
                drop(taking);
                taken
            };
            Finished::new(runtime, take).await
        };
        events::observe("check", local.limit.subject(), check, Check::outcome).await
    }
}

impl<P: Pool> fmt::Debug for LocalRateLimit<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalRateLimit")
            .field("limit", &self.shared.local.limit)
            .field("chunk", &self.shared.local.chunk)
            .finish_non_exhaustive()
    }
}

/// What a value shares with the futures that take units, which may be finished after it was dropped.
struct Shared<P: Pool> {
    local: Local,
    pool: P,
    /// The runtime that took units last.
    runtime: Mutex<Option<Handle>>,
}

impl<P: Pool> Shared<P> {
    async fn take(&self, limit: &rate_limit::RateLimit, cost: u32) -> Result<Check> {
        let mut conn = pool::check_out(&self.pool, None).await?;
        let session = &mut Asynchronous::pooled(&mut conn);
        self.local.take(session, limit, cost).await
    }
}

impl<P: Pool> Drop for Shared<P> {
    fn drop(&mut self) {
        let unused = self.local.forget();
        let Some(runtime) = lock(&self.runtime).take().filter(|_| !unused.is_empty()) else {
            return;
        };
        let pool = self.pool.clone();
        runtime::leave_to(&runtime, async move {
            if let Some(mut conn) = pool::try_check_out(&pool).await {
                give_back(
                    &mut Asynchronous::pooled(&mut conn),
                    &unused,
                    Deadline::NEVER,
                )
                .await;
            }
        });
    }
}
