//! Rate limits over a pool and on a connection, asynchronous.

use std::fmt;
use std::time::Duration;

use diesel_async::AsyncPgConnection;
use tokio::runtime::Handle;
use tokio::time::sleep;

use super::{Check, CheckAll, Quota, RateLimitState, Reservation, Reserve, Spent};
use super::{operations, rules, waiting};
use crate::clock::Deadline;
use crate::error::Result;
use crate::events;
use crate::pool::asynchronous::{self as pool, CheckedOut, Pool};
use crate::runtime::{self, Finished};
use crate::session::Asynchronous;

/// A limit of N units per period, with a burst, for each key, across all instances.
///
/// The same rate limit as [`diesel_interlock::RateLimit`](crate::RateLimit), for asynchronous connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a rate limit does nothing until it is checked"]
pub struct RateLimit(pub(crate) crate::RateLimit);

impl From<crate::RateLimit> for RateLimit {
    fn from(limit: crate::RateLimit) -> Self {
        Self(limit)
    }
}

impl AsRef<crate::RateLimit> for RateLimit {
    fn as_ref(&self) -> &crate::RateLimit {
        &self.0
    }
}

impl RateLimit {
    /// Makes a rate limit. As [`RateLimit::named`](crate::RateLimit::named).
    pub const fn named(name: &'static str, quota: Quota) -> Self {
        Self(crate::RateLimit::named(name, quota))
    }

    /// As [`named`](Self::named), for a name that is known only at run time.
    pub fn new(name: impl Into<String>, quota: Quota) -> Self {
        Self(crate::RateLimit::new(name, quota))
    }

    /// Waits for the disk with each check. As [`RateLimit::durable`](crate::RateLimit::durable).
    pub const fn durable(mut self) -> Self {
        self.0.durable = true;
        self
    }

    /// Returns the limit of one key. As [`RateLimit::key`](crate::RateLimit::key).
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self(self.0.key(key))
    }

    /// Returns the limit with another cost of a call. As [`RateLimit::cost`](crate::RateLimit::cost).
    pub fn cost(&self, units: u32) -> Self {
        Self(self.0.cost(units))
    }

    /// Returns the limit with the bytes of the parameter `pk`. As
    /// [`RateLimit::partition_key`](crate::RateLimit::partition_key).
    pub fn partition_key(&self, bytes: impl AsRef<[u8]>) -> Self {
        Self(self.0.partition_key(bytes))
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the quota of the program.
    pub const fn quota(&self) -> Quota {
        self.0.quota()
    }
}

/// # Checks
///
/// Statements, round trips and errors are those of the [blocking half](crate::RateLimit#checks). Outside a runtime an operation
/// with a pool returns [`Error::NoRuntime`](crate::Error::NoRuntime).
///
/// # Dropped futures
///
/// If the future of a check, a reservation or a reset is dropped, the operation may take place all the same, and the units stay
/// spent. A dropped [`acquire_timeout`](Self::acquire_timeout) cancels its reservation. If the future of a form that takes a
/// connection is dropped inside a transaction that plain SQL has opened, that transaction may commit without waiting for the disk.
impl RateLimit {
    /// Spends the units of a call if the limit allows it, through a connection from the pool. Never waits for units.
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks), and [`Error::NoRuntime`](crate::Error::NoRuntime).
    pub async fn check<P: Pool>(&self, pool: &P) -> Result<Check> {
        let limit = &self.0;
        let check = async {
            let mut conn = check_out(pool, &[&self.0]).await?;
            operations::check(&mut Asynchronous::pooled(&mut conn), limit).await
        };
        events::observe("check", limit.subject(), check, Check::outcome).await
    }

    /// As [`check`](Self::check), on the given connection.
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks).
    pub async fn check_on(&self, conn: &mut AsyncPgConnection) -> Result<Check> {
        let limit = &self.0;
        let session = &mut Asynchronous::lent(conn);
        let check = operations::check(session, limit);
        events::observe("check", limit.subject(), check, Check::outcome).await
    }

    /// Checks several limits, through a connection from the pool: spends the units of all of them, or of none. As
    /// [`RateLimit::check_all`](crate::RateLimit::check_all).
    ///
    /// # Errors
    ///
    /// As [`RateLimit::check_all`](crate::RateLimit::check_all).
    pub async fn check_all<P: Pool>(pool: &P, limits: &[&RateLimit]) -> Result<CheckAll> {
        let limits: Vec<_> = limits.iter().map(|limit| &limit.0).collect();
        let check = async {
            let mut conn = check_out(pool, &limits).await?;
            operations::check_all(&mut Asynchronous::pooled(&mut conn), &limits).await
        };
        operations::observed_all(&limits, check).await
    }

    /// As [`check_all`](Self::check_all), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`RateLimit::check_all`](crate::RateLimit::check_all).
    pub async fn check_all_on(
        conn: &mut AsyncPgConnection,
        limits: &[&RateLimit],
    ) -> Result<CheckAll> {
        let limits: Vec<_> = limits.iter().map(|limit| &limit.0).collect();
        let session = &mut Asynchronous::lent(conn);
        let check = operations::check_all(session, &limits);
        operations::observed_all(&limits, check).await
    }

    /// Spends the units of a call in advance, if the wait for them is at most `max_wait`. Does not wait for them. As
    /// [`RateLimit::reserve`](crate::RateLimit::reserve).
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks).
    pub async fn reserve<P: Pool>(&self, pool: &P, max_wait: Duration) -> Result<Reserve> {
        let limit = &self.0;
        let reserve = async {
            let mut conn = check_out(pool, &[&self.0]).await?;
            operations::reserve(&mut Asynchronous::pooled(&mut conn), limit, max_wait).await
        };
        events::observe("reserve", limit.subject(), reserve, Reserve::outcome).await
    }

    /// As [`reserve`](Self::reserve), on the given connection.
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks).
    pub async fn reserve_on(
        &self,
        conn: &mut AsyncPgConnection,
        max_wait: Duration,
    ) -> Result<Reserve> {
        let limit = &self.0;
        let session = &mut Asynchronous::lent(conn);
        let reserve = operations::reserve(session, limit, max_wait);
        events::observe("reserve", limit.subject(), reserve, Reserve::outcome).await
    }

    /// Spends the units of a call, and waits until they may be used, for at most `timeout`. Holds no connection while it waits.
    ///
    /// As [`RateLimit::acquire_timeout`](crate::RateLimit::acquire_timeout). If the future is dropped after the call was sent, a
    /// task [cancels](Self::cancel) the reservation through a connection from the pool. On a connection that you lend, nothing
    /// could cancel the reservation, so there is no `acquire_timeout_on`: use [`reserve_on`](Self::reserve_on) there.
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks), and [`Error::NoRuntime`](crate::Error::NoRuntime).
    pub async fn acquire_timeout<P: Pool>(&self, pool: &P, timeout: Duration) -> Result<Check> {
        let deadline = Deadline::after(timeout);
        let acquire = async {
            let runtime = checked(&[&self.0])?;
            let reserve = || async {
                let mut conn = pool::check_out(pool, Some(deadline.remaining())).await?;
                // Owns all that it needs, so that the runtime can finish it.
                let (limit, pool, handle) = (self.0.clone(), pool.clone(), runtime.clone());
                let reserve = async move {
                    let session = &mut Asynchronous::pooled(&mut conn);
                    let reserve = operations::reserve(session, &limit, deadline.remaining());
                    let reserved = reserve.await?.into_result();
                    drop(conn);
                    Ok(reserved.map(|reservation| Waiting::new(reservation, pool, handle)))
                };
                Finished::new(runtime.clone(), reserve).await
            };
            Ok(
                match waiting::for_reservation(deadline, reserve, sleep).await? {
                    Ok(waiting) => Check::Allowed(waiting.wait().await),
                    Err(limited) => Check::Limited(limited),
                },
            )
        };
        events::observe("reserve", self.0.subject(), acquire, Check::outcome).await
    }

    /// Reads what is left of the key. As [`RateLimit::peek`](crate::RateLimit::peek).
    ///
    /// # Errors
    ///
    /// As [`RateLimit::peek`](crate::RateLimit::peek).
    pub async fn peek<P: Pool>(&self, pool: &P) -> Result<RateLimitState> {
        let mut conn = check_out(pool, &[&self.0]).await?;
        operations::peek(&mut Asynchronous::pooled(&mut conn), &self.0).await
    }

    /// As [`peek`](Self::peek), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`RateLimit::peek`](crate::RateLimit::peek).
    pub async fn peek_on(&self, conn: &mut AsyncPgConnection) -> Result<RateLimitState> {
        operations::peek(&mut Asynchronous::lent(conn), &self.0).await
    }

    /// Makes the key full. Returns whether units were missing. As [`RateLimit::reset`](crate::RateLimit::reset).
    ///
    /// # Errors
    ///
    /// As [`RateLimit::reset`](crate::RateLimit::reset).
    pub async fn reset<P: Pool>(&self, pool: &P) -> Result<bool> {
        let mut conn = check_out(pool, &[&self.0]).await?;
        let session = &mut Asynchronous::pooled(&mut conn);
        Ok(operations::reset(session, &self.0, false).await? > 0)
    }

    /// As [`reset`](Self::reset), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`RateLimit::reset`](crate::RateLimit::reset).
    pub async fn reset_on(&self, conn: &mut AsyncPgConnection) -> Result<bool> {
        let session = &mut Asynchronous::lent(conn);
        Ok(operations::reset(session, &self.0, false).await? > 0)
    }

    /// Makes all keys of the name full. Returns how many had units missing. As
    /// [`RateLimit::reset_all`](crate::RateLimit::reset_all).
    ///
    /// # Errors
    ///
    /// As [`RateLimit::reset`](crate::RateLimit::reset).
    pub async fn reset_all<P: Pool>(&self, pool: &P) -> Result<u64> {
        let mut conn = check_out(pool, &[&self.0]).await?;
        operations::reset(&mut Asynchronous::pooled(&mut conn), &self.0, true).await
    }

    /// As [`reset_all`](Self::reset_all), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`RateLimit::reset`](crate::RateLimit::reset).
    pub async fn reset_all_on(&self, conn: &mut AsyncPgConnection) -> Result<u64> {
        operations::reset(&mut Asynchronous::lent(conn), &self.0, true).await
    }

    /// Deletes the rows of all full keys, of all rate limits. As [`RateLimit::prune`](crate::RateLimit::prune).
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks).
    pub async fn prune<P: Pool>(pool: &P) -> Result<u64> {
        runtime::current()?;
        let mut conn = pool::check_out(pool, None).await?;
        operations::prune(&mut Asynchronous::pooled(&mut conn)).await
    }

    /// As [`prune`](Self::prune), on the given connection.
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks).
    pub async fn prune_on(conn: &mut AsyncPgConnection) -> Result<u64> {
        operations::prune(&mut Asynchronous::lent(conn)).await
    }

    /// Gives back units that were not used. Returns how many units that was worth, rounded up. As `Spent::give_back` of the
    /// blocking half.
    ///
    /// # Errors
    ///
    /// [`Input::BadUnits`](crate::error::Input::BadUnits) for zero units, and for more units than are left to give back, and the
    /// [errors of checks](crate::RateLimit#errors-of-checks).
    pub async fn give_back<P: Pool>(pool: &P, spent: &Spent, units: u32) -> Result<u32> {
        runtime::current()?;
        let mut conn = pool::check_out(pool, None).await?;
        operations::give_back(&mut Asynchronous::pooled(&mut conn), spent, units).await
    }

    /// As [`give_back`](Self::give_back), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`give_back`](Self::give_back).
    pub async fn give_back_on(
        conn: &mut AsyncPgConnection,
        spent: &Spent,
        units: u32,
    ) -> Result<u32> {
        operations::give_back(&mut Asynchronous::lent(conn), spent, units).await
    }

    /// Gives back all units of a reservation that were not given back yet. Returns how many units that was worth, rounded up.
    /// Until they may be used, they come back in full, with the same exceptions as `Reservation::cancel` of the blocking half.
    ///
    /// One round trip. If no units are left, this returns zero, takes no connection, and sends nothing.
    ///
    /// # Errors
    ///
    /// See [errors of checks](crate::RateLimit#errors-of-checks).
    pub async fn cancel<P: Pool>(pool: &P, reservation: Reservation) -> Result<u32> {
        if reservation.spent.is_given_back() {
            return Ok(0);
        }
        runtime::current()?;
        let mut conn = pool::check_out(pool, None).await?;
        operations::cancel(&mut Asynchronous::pooled(&mut conn), &reservation).await
    }

    /// As [`cancel`](Self::cancel), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`cancel`](Self::cancel).
    pub async fn cancel_on(conn: &mut AsyncPgConnection, reservation: Reservation) -> Result<u32> {
        operations::cancel(&mut Asynchronous::lent(conn), &reservation).await
    }
}

/// Checks the arguments before the pool is asked, and returns the runtime that polls this.
fn checked(limits: &[&crate::RateLimit]) -> Result<Handle> {
    rules::check_each(limits)?;
    runtime::current()
}

async fn check_out<P: Pool>(
    pool: &P,
    limits: &[&crate::RateLimit],
) -> Result<CheckedOut<P::Connection>> {
    checked(limits)?;
    pool::check_out(pool, None).await
}

/// A reservation whose moment is awaited. Dropping it cancels the reservation.
struct Waiting<P: Pool> {
    reservation: Option<Reservation>,
    pool: P,
    runtime: Handle,
}

impl<P: Pool> Waiting<P> {
    fn new(reservation: Reservation, pool: P, runtime: Handle) -> Self {
        Self {
            reservation: Some(reservation),
            pool,
            runtime,
        }
    }

    /// Sleeps until the units may be used.
    async fn wait(mut self) -> Spent {
        let wait = self.reservation.as_ref().map(|it| it.wait);
        if let Some(wait) = wait.filter(|wait| !wait.is_zero()) {
            sleep(wait).await;
        }
        match self.reservation.take() {
            Some(Reservation { spent, .. }) => spent,
            None => unreachable!("only this function and the drop take it"),
        }
    }
}

impl<P: Pool> Drop for Waiting<P> {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            let pool = self.pool.clone();
            runtime::leave_to(&self.runtime, async move {
                // If this fails, the units stay spent.
                let _ = RateLimit::cancel(&pool, reservation).await;
            });
        }
    }
}
