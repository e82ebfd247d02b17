//! Semaphores over a pool and on a connection, asynchronous.

mod permit;

use std::borrow::Cow;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel_async::AsyncPgConnection;

pub use self::permit::Permit;
use super::held::HeldSlot;
use super::wakeups::{self, Waiter};
use super::{Admission, Claim, operations, rules, waiting};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::pool::asynchronous::{self as pool, Pool};
use crate::runtime::{self, Finished};
use crate::session::Asynchronous;
use crate::text::Name;

/// A limit on the number of concurrent requests to a service, across all instances. No connection is held while a request
/// runs.
///
/// The same semaphore as [`diesel_interlock::Semaphore`](crate::Semaphore), for asynchronous connections. Both halves of a
/// process wake each other's waiters.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::asynchronous::{Pool, Semaphore};
/// use diesel_interlock::{Admission, Error};
///
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
///
/// async fn geocode<P: Pool>(pool: &P, q: &str) -> Result<Option<String>, Error> {
///     let Admission::Admitted(permit) = GEOCODER.try_acquire(pool).await? else {
///         return Ok(None); // four are in flight
///     };
///     let street = call_geocoder(q, permit.fencing_token()).await; // no connection is held meanwhile
///     permit.release().await?; // an error if the permit had timed out
///     Ok(Some(street))
/// }
/// # async fn call_geocoder(q: &str, _: i64) -> String { q.to_owned() }
/// # #[cfg(all(feature = "deadpool", feature = "migrations", feature = "postgres"))]
/// # fn main() -> Result<(), Error> {
/// #     let database = workbench::Database::new();
/// #     diesel_interlock::migrations::install(&mut database.connect())?;
/// #     let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
/// #     let pool = database.deadpool(1);
/// #     assert_eq!(runtime.block_on(geocode(&pool, "Main St"))?.as_deref(), Some("Main St"));
/// #     Ok(())
/// # }
/// # #[cfg(not(all(feature = "deadpool", feature = "migrations", feature = "postgres")))]
/// # fn main() {}
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a semaphore does nothing until a slot is acquired"]
pub struct Semaphore(crate::Semaphore);

impl From<crate::Semaphore> for Semaphore {
    fn from(semaphore: crate::Semaphore) -> Self {
        Self(semaphore)
    }
}

impl AsRef<crate::Semaphore> for Semaphore {
    fn as_ref(&self) -> &crate::Semaphore {
        &self.0
    }
}

impl Semaphore {
    /// Makes the semaphore of a service. As [`Semaphore::named`](crate::Semaphore::named).
    pub const fn named(service: &'static str, slots: u32, timeout: Duration) -> Self {
        Self(crate::Semaphore::named(service, slots, timeout))
    }

    /// As [`named`](Self::named), for a service whose name is known only at run time, such as one per tenant.
    pub fn new(service: impl Into<String>, slots: u32, timeout: Duration) -> Self {
        Self(crate::Semaphore::new(service, slots, timeout))
    }

    /// Returns the semaphore with the details of its requests in the log. As [`Semaphore::details`](crate::Semaphore::details).
    pub fn details(&self, details: impl Into<Cow<'static, str>>) -> Self {
        Self(self.0.details(details))
    }

    /// Returns the name of the service.
    pub fn service(&self) -> &str {
        self.0.service()
    }

    /// Returns how many requests may be in flight.
    pub const fn slots(&self) -> u32 {
        self.0.slots()
    }

    /// Returns how long a request lasts if it is neither released nor renewed.
    pub const fn timeout(&self) -> Duration {
        self.0.timeout()
    }
}

/// # Claims
///
/// Statements, round trips and errors are those of the [blocking half](crate::Semaphore#claims). Outside a runtime an
/// operation with a pool returns [`Error::NoRuntime`].
///
/// # Dropped futures
///
/// If the future of an operation with a pool is dropped while it waits for a connection, nothing was sent. If it is dropped
/// later, a task on its runtime finishes the statement, and releases the slot that a claim got, in one more round trip.
/// A runtime that is dropped at that moment leaves the slot to its timeout. A current-thread runtime that nobody drives releases
/// the slot when it is driven again, unless the slot has timed out before.
impl Semaphore {
    /// Claims a slot if one is free, through a connection from the pool. Never waits for a slot.
    ///
    /// One round trip besides the pool's own check-out, and the connection is back in the pool when this returns. A full
    /// semaphore is [`Admission::Full`], which says when to retry.
    ///
    /// # Errors
    ///
    /// See [errors of claims](crate::Semaphore#errors-of-claims), and [`Error::NoRuntime`].
    pub async fn try_acquire<P: Pool>(&self, pool: &P) -> Result<Admission<Permit<P>>> {
        operations::observed(&self.0, self.claim_from(pool, None)).await
    }

    /// Claims a slot, and waits indefinitely until one is free. Holds no connection while it waits.
    ///
    /// Polls as [`acquire_timeout`](Self::acquire_timeout) does.
    ///
    /// # Errors
    ///
    /// See [errors of claims](crate::Semaphore#errors-of-claims), and [`Error::NoRuntime`]. [`Error::Pool`] is possible only
    /// for the first check-out.
    pub async fn acquire<P: Pool>(&self, pool: &P) -> Result<Permit<P>> {
        let wait = async {
            loop {
                if let Admission::Admitted(permit) = self.wait(pool, Duration::MAX).await? {
                    return Ok(permit);
                }
            }
        };
        operations::observed(&self.0, wait).await
    }

    /// Claims a slot, and waits for a connection and a slot for at most `timeout`. Holds no connection while it waits.
    ///
    /// A wait polls, as [in the blocking half](crate::Semaphore#claims): the pauses between two polls grow from 2 to 100
    /// milliseconds on average, and all waiters of a process, threads and tasks together, poll about two hundred times per
    /// second at most. A release in the same process also wakes one waiter at once. The order of the waiters is not
    /// guaranteed.
    ///
    /// A timeout of zero is one attempt, on an idle connection or on one that the pool opens. It waits for this connection for at
    /// most a second (bb8: 50 milliseconds). The last poll of a wait does the same, after the timeout. Once the wait has begun, a
    /// poll for which the pool has no connection in time does not end it, unless the pool was [closed](Pool::is_closed). The
    /// runtime needs its timers (`enable_time`).
    ///
    /// # Errors
    ///
    /// See [errors of claims](crate::Semaphore#errors-of-claims), and [`Error::NoRuntime`]. [`Error::Pool`] is possible only
    /// for the first check-out. If no slot is free within the timeout, the outcome is [`Admission::Full`] and not an error.
    pub async fn acquire_timeout<P: Pool>(
        &self,
        pool: &P,
        timeout: Duration,
    ) -> Result<Admission<Permit<P>>> {
        operations::observed(&self.0, self.wait(pool, timeout)).await
    }

    /// Waits for a slot, runs `work` with its permit, and releases it: [`acquire`](Self::acquire), then [`Permit::run`].
    ///
    /// # Errors
    ///
    /// The error of `work`, the [errors of claims](crate::Semaphore#errors-of-claims), and the errors of
    /// [`Permit::release`].
    pub async fn with<P, T, E, F>(&self, pool: &P, work: F) -> Result<T, E>
    where
        P: Pool,
        F: AsyncFnOnce(&mut Permit<P>) -> Result<T, E>,
        E: From<Error>,
    {
        self.acquire(pool).await?.run(work).await
    }

    /// Claims a slot if one is free, on the given connection, and returns it as plain data. Never waits for a slot.
    ///
    /// One round trip. The slot stays taken until [`complete_on`](Self::complete_on) is called with the claim's `id`, in any
    /// process, or until its timeout. If the future is dropped, a slot may have been claimed. It is free again after its
    /// timeout.
    ///
    /// # Errors
    ///
    /// See [errors of claims](crate::Semaphore#errors-of-claims).
    pub async fn claim_on(&self, conn: &mut AsyncPgConnection) -> Result<Admission<Claim>> {
        let session = &mut Asynchronous::lent(conn);
        operations::observed(&self.0, operations::claim(session, &self.0)).await
    }

    /// Ends a request and frees its slot. Returns whether this call ended it. As
    /// [`Semaphore::complete_on`](crate::Semaphore::complete_on).
    ///
    /// If the future is dropped, the request may have been ended.
    ///
    /// # Errors
    ///
    /// As in the blocking half.
    pub async fn complete_on(&self, conn: &mut AsyncPgConnection, id: i64) -> Result<bool> {
        let completed = operations::complete(&mut Asynchronous::lent(conn), id).await?;
        wakeups::wake_one(self.service());
        Ok(completed)
    }

    /// Extends a request to a full timeout from now, and returns the time at which it expires. Never shortens it. Returns `None` if
    /// the request had ended or timed out before. As [`Semaphore::renew_on`](crate::Semaphore::renew_on).
    ///
    /// If the future is dropped, the request may have been extended.
    ///
    /// # Errors
    ///
    /// As in the blocking half.
    pub async fn renew_on(
        &self,
        conn: &mut AsyncPgConnection,
        id: i64,
    ) -> Result<Option<DateTime<Utc>>> {
        let timeout = rules::interval(self.service(), self.timeout())?;
        operations::renew(&mut Asynchronous::lent(conn), id, timeout).await
    }

    /// Claims a slot through the pool, whose check-out takes `limit` at most.
    async fn claim_from<P: Pool>(
        &self,
        pool: &P,
        limit: Option<Duration>,
    ) -> Result<Admission<Permit<P>>> {
        self.0.checked(Name::anywhere)?; // before the pool is asked
        let runtime = runtime::current()?;
        let mut conn = pool::check_out(pool, limit).await?;
        // The claim owns all that it needs, so that the runtime can finish it.
        let (semaphore, pool, handle) = (self.0.clone(), pool.clone(), runtime.clone());
        let claim = async move {
            // Before the claim is sent, so that the permit never lasts longer here than in the database.
            let sent = Moment::now();
            let claimed = operations::claim(&mut Asynchronous::pooled(&mut conn), &semaphore).await;
            drop(conn);
            Ok(claimed?.map(|claim| {
                let slot = HeldSlot::new(&semaphore, claim, sent);
                Permit::new(slot, pool, handle)
            }))
        };
        Finished::new(runtime, claim).await
    }

    /// Polls until a slot is free, or `timeout` has passed.
    async fn wait<P: Pool>(&self, pool: &P, timeout: Duration) -> Result<Admission<Permit<P>>> {
        let waiter = Waiter::register(self.0.service.clone());
        waiting::for_slot(
            &waiter,
            timeout,
            |limit| self.claim_from(pool, Some(limit)),
            |pause| waiter.woken(pause),
            || pool.is_closed(),
        )
        .await
    }
}
