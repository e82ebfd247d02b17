//! The permit of a semaphore, and its release in the background.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::admission::Claimed;
use super::held::{HeldSlot, LateRelease, PATIENCE};
use super::operations;
use super::rules;
use super::wakeups;
use super::{Admission, Claim, Full};
use crate::background::{Background, Chore, Mark};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::panics::caught;
use crate::pool::{self, PgPool, PooledPgConnection};
use crate::session::{Blocking, now};

/// A slot of a semaphore, held until the permit is released, dropped or timed out. A permit holds no connection.
///
/// The methods of [`Semaphore`](crate::Semaphore) make permits.
///
/// # Release
///
/// [`release`](Self::release) frees the slot in one round trip, and returns an error if the permit had timed out.
/// [`run`](Self::run) runs a closure and then releases the permit.
///
/// Dropping a permit also frees the slot, and never waits for a connection. If the pool has an idle connection, the drop releases
/// the permit on it. Otherwise it leaves the release to a background thread, which is started on first use, one for each pool. The
/// thread waits for a connection for at most ten seconds at a time, and retries until the permit has timed out. If the pool stays
/// exhausted or the program ends, the release is lost, and the slot is free after the timeout.
///
/// A release changes only the permit's own request. A release after the timeout frees nothing, and only marks that request as
/// timed out.
///
/// # Asynchronous handlers
///
/// Keep the permit as long as the request runs. If an asynchronous handler is dropped because its client disconnected,
/// the permit is dropped with it, and the slot is free while the service may still be at work. Make the call on a
/// blocking thread or in a separate task, and move the permit there.
#[derive(Debug)]
#[must_use = "if unused the slot is released at once"]
#[clippy::has_significant_drop]
pub struct Permit {
    slot: HeldSlot,
    pool: PgPool,
    mark: Mark,
    /// Whether a drop has nothing left to release.
    is_over: bool,
}

impl Permit {
    /// `mark` is that of the connection that sent the claim.
    pub(super) fn new(slot: HeldSlot, pool: PgPool, mark: Mark) -> Self {
        Self {
            slot,
            pool,
            mark,
            is_over: false,
        }
    }

    /// Returns the fencing token: each new holder of this slot gets a larger one.
    ///
    /// A service or a [`Fence`](crate::Fence) refuses a token that is smaller than one it has seen for the same slot.
    /// The token is the `id` of the request. Tokens are ordered within a [slot](Claim::slot), not across the slots of a
    /// service.
    pub const fn fencing_token(&self) -> i64 {
        self.slot.claim.id
    }

    /// Returns the claim as plain data: the slot, when it was claimed, and when it expires.
    pub const fn claim(&self) -> &Claim {
        &self.slot.claim
    }

    /// Returns a lower bound of the time that the permit still lasts, for use as a timeout of the work. Zero if the permit may have
    /// timed out.
    ///
    /// This sends nothing. The time counts on this machine from before the claim was sent. The monotonic and the wall clock are
    /// read, and the one that has advanced more counts, because the monotonic clock stops while the machine is suspended. If the
    /// wall clock is set forward, the result is too small until the clock is corrected or the permit is renewed.
    ///
    /// The database clock decides when the permit times out. The bound assumes that nobody sets that clock forward.
    pub fn remaining(&self) -> Duration {
        self.slot.remaining()
    }

    /// Extends the permit to a full timeout from now, and returns the time at which it expires, by the database's clock. Never
    /// shortens it. Returns `DateTime::MAX_UTC` if an operator has set `infinity`.
    ///
    /// One round trip besides the pool's own check-out:
    /// `SELECT resource_control.renew_service_request($1, $2)`.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows.
    ///
    /// # Errors
    ///
    /// - [`Error::TimedOut`] if the permit had timed out. Stop the work, because another holder may have taken the
    ///   slot.
    /// - [`Error::TransactionInPool`](crate::Error::TransactionInPool) if an earlier user of the connection had left a
    ///   transaction open. The permit was not renewed.
    /// - [`Error::Pool`](crate::Error::Pool) if the pool had no connection in time. The permit was not renewed.
    /// - [`Error::Database`] for anything else. The permit may have been renewed.
    pub fn renew(&mut self) -> Result<DateTime<Utc>> {
        let renewed = self.renew_inner();
        self.slot.record_renewal(&renewed);
        renewed
    }

    fn renew_inner(&mut self) -> Result<DateTime<Utc>> {
        let mut conn = pool::check_out(&self.pool, None)?;
        let timeout = rules::interval(&self.slot.service, self.slot.timeout)?;
        let sent = Moment::now();
        let renewed = now(operations::renew(
            &mut Blocking::pooled(&mut conn),
            self.slot.claim.id,
            timeout,
        ))?;
        drop(conn);
        self.slot.renewed(sent, renewed)
    }

    /// Releases the permit, which frees the slot.
    ///
    /// One round trip besides the pool's own check-out:
    /// `SELECT resource_control.complete_service_request($1)`.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows.
    ///
    /// # Errors
    ///
    /// - [`Error::TimedOut`] if the permit had timed out. Part of the work may have run while more requests than
    ///   allowed were in flight. The request is marked as timed out.
    /// - [`Error::Pool`](crate::Error::Pool), [`Error::TransactionInPool`](crate::Error::TransactionInPool) and
    ///   [`Error::Database`]. The release is then retried in the background, as for a dropped permit.
    pub fn release(mut self) -> Result<()> {
        let released = self.release_inner();
        self.slot.record_release(&released);
        released
    }

    fn release_inner(&mut self) -> Result<()> {
        let mut conn = pool::check_out(&self.pool, None)?;
        let completed = complete(&mut conn, self.slot.claim.id)?;
        self.is_over = true;
        drop(conn);
        wakeups::wake_one(&self.slot.service);
        self.slot.completed(completed)
    }

    /// Runs `work`, releases the permit, and returns the value of `work`.
    ///
    /// If `work` fails or panics, the permit is dropped, which releases it as well.
    ///
    /// # Blocking
    ///
    /// After `work`, as [`release`](Self::release).
    ///
    /// # Errors
    ///
    /// The error of `work`. If `work` succeeded, the errors of [`release`](Self::release). If the permit had timed out,
    /// part of the work may have run without a slot.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::{Error, PgPool, Semaphore};
    ///
    /// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    ///
    /// fn geocode(pool: &PgPool, q: &str) -> Result<String, Error> {
    ///     GEOCODER.acquire(pool)?.run(|permit| {
    ///         Ok(format!("{q} within {:?}", permit.remaining())) // a call with a timeout
    ///     })
    /// }
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # assert!(geocode(&database.pool(1), "Main St")?.starts_with("Main St within 2"));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn run<T, E, F>(mut self, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut Permit) -> Result<T, E>,
        E: From<Error>,
    {
        let value = work(&mut self)?;
        self.release()?;
        Ok(value)
    }

    /// Turns the permit into its claim, for work that ends elsewhere.
    ///
    /// Afterwards only [`Semaphore::complete_on`](crate::Semaphore::complete_on) or the timeout frees the slot.
    pub fn into_claim(mut self) -> Claim {
        self.is_over = true;
        self.slot.claim.clone()
    }

    /// Releases the permit on an idle connection. Returns whether nothing is left to release.
    fn release_without_waiting(&self) -> bool {
        let Some(mut conn) = self.pool.try_get() else {
            return false;
        };
        let Ok(completed) = complete(&mut conn, self.slot.claim.id) else {
            return false;
        };
        drop(conn);
        wakeups::wake_one(&self.slot.service);
        self.slot.record_release(&self.slot.completed(completed));
        true
    }
}

impl Claimed for Permit {
    fn claimed(&self) -> Result<&Claim, &Full> {
        Ok(&self.slot.claim)
    }
}

impl Admission<Permit> {
    /// Runs `work` with the permit, releases it, and returns the value of `work`. On a full semaphore `work` does not
    /// run.
    ///
    /// # Blocking
    ///
    /// After `work`, as [`Permit::release`].
    ///
    /// # Errors
    ///
    /// As [`Permit::run`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::{Admission, Error, PgPool, Semaphore};
    ///
    /// static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    ///
    /// fn geocode(pool: &PgPool) -> Result<String, Error> {
    ///     let admission = GEOCODER.try_acquire(pool)?.run(|_permit| Ok::<_, Error>("Main St"))?;
    ///     Ok(match admission {
    ///         Admission::Admitted(street) => format!("200 {street}"),
    ///         Admission::Full(full) => format!("503 Retry-After: {}", full.retry_after_secs()),
    ///     })
    /// }
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # let pool = database.pool(1);
    /// # assert_eq!(geocode(&pool)?, "200 Main St");
    /// # let _permit = GEOCODER.acquire(&pool)?;
    /// # assert!(geocode(&pool)?.starts_with("503 Retry-After: "));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn run<T, E, F>(self, work: F) -> Result<Admission<T>, E>
    where
        F: FnOnce(&mut Permit) -> Result<T, E>,
        E: From<Error>,
    {
        match self {
            Admission::Admitted(permit) => permit.run(work).map(Admission::Admitted),
            Admission::Full(full) => Ok(Admission::Full(full)),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let released = caught(|| {
            let released = self.release_without_waiting();
            if !released {
                self.slot.record_deferral();
            }
            released
        });
        if !released.unwrap_or(false) {
            release_in_background(&self.pool, self.mark, self.slot.late_release());
        }
    }
}

/// Ends the request on a connection out of its pool. Returns whether this call ended it.
fn complete(conn: &mut PooledPgConnection, id: i64) -> Result<bool> {
    now(operations::complete(&mut Blocking::pooled(conn), id))
}

impl Chore for LateRelease {
    /// A pool whose connections are always in use never has an idle one. So the thread waits for a connection, as the other users
    /// of the pool do.
    fn patience(&self) -> Duration {
        PATIENCE.min(self.remaining())
    }

    fn pause(&self) -> Duration {
        LateRelease::pause(self)
    }

    fn is_over(&self) -> bool {
        LateRelease::is_over(self)
    }

    fn attend(&self, mut conn: PooledPgConnection) -> bool {
        // The caller's instrumentation may panic, each time.
        let was_sent = caught(|| complete(&mut conn, self.id)).is_some_and(|sent| sent.is_ok());
        drop(conn);
        if was_sent {
            wakeups::wake_one(&self.service);
        } else {
            self.failed();
        }
        was_sent
    }
}

/// Leaves the release to the background thread of the pool. If no thread can be started, the slot is free after its
/// timeout.
fn release_in_background(pool: &PgPool, mark: Mark, release: LateRelease) {
    static LATE_RELEASES: Background<LateRelease> = Background::new("late releases");
    LATE_RELEASES.start(pool, Some(mark), Arc::new(release));
}

#[cfg(all(test, feature = "migrations"))]
mod tests {
    use super::*;
    use crate::semaphore::held::PAUSE;
    use crate::{Semaphore, clock};

    const TIMEOUT: Duration = Duration::from_secs(600);

    /// A permit of a pool with one connection.
    fn permit(service: &'static str) -> (workbench::Database, PgPool, Permit) {
        let database = workbench::Database::new();
        crate::migrations::install(&mut database.connect()).unwrap();
        let pool = database.pool(1);
        let semaphore = Semaphore::named(service, 1, TIMEOUT);
        let permit = semaphore.try_acquire(&pool).unwrap().admitted().unwrap();
        (database, pool, permit)
    }

    #[test]
    fn a_release_that_panics_each_time_is_retried_less_and_less_often() {
        use diesel::connection::{Connection, InstrumentationEvent};

        let (_database, pool, permit) = permit("panics");
        let late = permit.slot.late_release();
        let broken = || {
            let mut conn = pool.get().unwrap();
            conn.set_instrumentation(|event: InstrumentationEvent<'_>| {
                assert!(!matches!(event, InstrumentationEvent::StartQuery { .. }));
            });
            conn
        };
        for _ in 0..12 {
            assert!(!late.attend(broken()));
        }
        assert!(Chore::pause(&late) > 4 * PAUSE);
        // The connections were discarded.
        permit.release().unwrap();
    }

    #[test]
    fn a_suspended_machine_uses_up_a_permit_and_a_renewal_restores_it() {
        let (_database, _, mut permit) = permit("suspended");
        assert!(permit.remaining() <= TIMEOUT && permit.remaining() > TIMEOUT / 2);
        clock::suspend(TIMEOUT / 2);
        assert!(permit.remaining() <= TIMEOUT / 2);
        clock::suspend(TIMEOUT);
        assert_eq!(permit.remaining(), Duration::ZERO);
        permit.renew().unwrap();
        assert!(permit.remaining() > TIMEOUT / 2);
        clock::set_back(2 * TIMEOUT);
        assert!(permit.remaining() <= TIMEOUT);
        permit.release().unwrap();
    }
}
