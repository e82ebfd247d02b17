//! The permit of a semaphore, and its release in the background.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::operations;
use super::rules;
use super::wakeups;
use super::{Admission, Claim, Semaphore};
use crate::background::{Background, Chore, Mark};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::events::{self, Event, Outcome, Subject};
use crate::panics::caught;
use crate::pool::{self, PgPool, PooledPgConnection};
use crate::session::{Blocking, now};
use crate::time::Timestamp;

/// A slot of a semaphore, held until the permit is released, dropped or timed out. A permit holds no connection.
///
/// The methods of [`Semaphore`] make permits.
///
/// # Release
///
/// [`release`](Self::release) frees the slot in one round trip, and returns an error if the permit had timed out.
/// [`run`](Self::run) runs a closure and then releases the permit.
///
/// Dropping a permit also frees the slot, and never waits for a connection. If the pool has an idle connection, the
/// drop releases the permit on it. Otherwise it leaves the release to a background thread, which is started on first
/// use, one for each pool. A release that the thread cannot send, because the pool stays exhausted or the program ends,
/// is lost, and the slot is free after the timeout.
///
/// A release changes only the permit's own request. A release after the timeout changes nothing.
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
    claim: Claim,
    service: Cow<'static, str>,
    /// The timeout of the semaphore, for renewals.
    timeout: Duration,
    pool: PgPool,
    mark: Mark,
    /// Before the claim, or the latest renewal, was sent.
    sent: Moment,
    /// How long the permit lasts from then on. Zero once the server has reported that it timed out.
    lasts: Duration,
    since: Instant,
    /// Whether a drop has nothing left to release.
    is_over: bool,
}

impl Permit {
    /// `sent` is when the claim was sent, or before. `mark` is that of the connection that sent it.
    pub(super) fn new(
        semaphore: &Semaphore,
        claim: Claim,
        pool: PgPool,
        mark: Mark,
        sent: Moment,
    ) -> Self {
        Self {
            claim,
            service: semaphore.service.clone(),
            timeout: semaphore.timeout,
            pool,
            mark,
            sent,
            lasts: semaphore.timeout,
            since: Instant::now(),
            is_over: false,
        }
    }

    /// Returns the fencing token: each new holder of this slot gets a larger one.
    ///
    /// A service or a [`Fence`](crate::Fence) refuses a token that is smaller than one it has seen for the same slot.
    /// The token is the `id` of the request. Tokens are ordered within a [slot](Claim::slot), not across the slots of a
    /// service.
    pub const fn fencing_token(&self) -> i64 {
        self.claim.id
    }

    /// Returns the claim as plain data: the slot, when it was claimed, and when it expires.
    pub const fn claim(&self) -> &Claim {
        &self.claim
    }

    /// Returns how long the permit lasts at least, for the timeout of the work itself. Zero if it may have timed out.
    ///
    /// This sends nothing. It counts on this machine, from before the claim was sent, by the monotonic clock or the
    /// wall clock. The one that has advanced more counts, because the monotonic clock stops while the machine is
    /// suspended. If the wall clock is set forward, the result is too small until the clock is corrected or the permit is renewed.
    ///
    /// The database clock decides when the permit times out. If that clock is set forward, the permit times out earlier
    /// than this method returns.
    pub fn remaining(&self) -> Duration {
        self.lasts.saturating_sub(self.sent.elapsed())
    }

    /// Extends the permit to a full timeout from now, and returns when it expires by the database's clock. Never
    /// shortens it.
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
        events::record(&Event::of("renew", self.subject(), &renewed, |_| {
            Outcome::Renewed
        }));
        renewed
    }

    fn renew_inner(&mut self) -> Result<DateTime<Utc>> {
        let mut conn = pool::check_out(&self.pool, None)?;
        let timeout = rules::interval(&self.service, self.timeout)?;
        let sent = Moment::now();
        let renewed = now(operations::renew(
            &mut Blocking::pooled(&mut conn),
            self.claim.id,
            timeout,
        ))?;
        drop(conn);
        match renewed.map(Timestamp::at) {
            Some(expires_at) => {
                (self.sent, self.lasts) = (sent, self.timeout);
                self.claim.expires_at = expires_at.unwrap_or(self.claim.expires_at);
                Ok(self.claim.expires_at)
            }
            None => {
                self.lasts = Duration::ZERO;
                Err(self.timed_out())
            }
        }
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
    ///   allowed were in flight. Nothing was changed.
    /// - [`Error::Pool`](crate::Error::Pool), [`Error::TransactionInPool`](crate::Error::TransactionInPool) and
    ///   [`Error::Database`]. The release is then retried in the background, as for a dropped permit.
    pub fn release(mut self) -> Result<()> {
        let released = self.release_inner();
        self.record_release(&released);
        released
    }

    fn release_inner(&mut self) -> Result<()> {
        let mut conn = pool::check_out(&self.pool, None)?;
        let completed = complete(&mut conn, self.claim.id)?;
        self.is_over = true;
        drop(conn);
        wakeups::wake_one(&self.service);
        if completed {
            Ok(())
        } else {
            Err(self.timed_out())
        }
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
    /// Afterwards only [`Semaphore::complete_on`] or the timeout frees the slot.
    pub fn into_claim(mut self) -> Claim {
        self.is_over = true;
        self.claim.clone()
    }

    fn subject(&self) -> Subject<'_> {
        Subject::Semaphore {
            service: &self.service,
            id: Some(self.claim.id),
        }
    }

    fn record_release(&self, released: &Result<()>) {
        let event = Event::of("release", self.subject(), released, |()| Outcome::Released);
        events::record(&event.held_since(self.since));
    }

    fn timed_out(&self) -> Error {
        Error::TimedOut {
            service: self.service.to_string(),
            id: self.claim.id,
        }
    }

    /// Releases the permit on an idle connection. Returns whether nothing is left to release.
    fn release_without_waiting(&self) -> bool {
        let Some(mut conn) = self.pool.try_get() else {
            return false;
        };
        let Ok(completed) = complete(&mut conn, self.claim.id) else {
            return false;
        };
        drop(conn);
        wakeups::wake_one(&self.service);
        let released = completed.then_some(()).ok_or_else(|| self.timed_out());
        self.record_release(&released);
        true
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
                let deferred = Event::new("release", self.subject(), Outcome::Deferred);
                events::record(&deferred.held_since(self.since));
            }
            released
        });
        if !released.unwrap_or(false) {
            release_in_background(
                &self.pool,
                self.mark,
                LateRelease {
                    service: self.service.clone(),
                    id: self.claim.id,
                    deadline: self.sent.monotonic().checked_add(self.lasts),
                },
            );
        }
    }
}

/// Ends the request on a connection out of its pool. Returns whether this call ended it.
fn complete(conn: &mut PooledPgConnection, id: i64) -> Result<bool> {
    now(operations::complete(&mut Blocking::pooled(conn), id))
}

/// How long the background thread waits before it retries a release.
const PAUSE: Duration = Duration::from_millis(10);

/// A release that found no idle connection, and is left to the background thread of its pool.
#[derive(Debug)]
struct LateRelease {
    service: Cow<'static, str>,
    id: i64,
    /// When the request has timed out, and there is nothing left to release. By the monotonic clock alone, because a
    /// release that comes too late changes nothing, but a release that is given up too early, after the wall clock was
    /// set forward, keeps the slot taken.
    deadline: Option<Instant>,
}

impl Chore for LateRelease {
    /// A pool whose connections are always in use never has an idle one, so the thread waits for a connection.
    const PATIENCE: Duration = PAUSE;

    fn pause(&self) -> Duration {
        PAUSE
    }

    fn is_over(&self) -> bool {
        let is_over = self.deadline.is_some_and(|end| end <= Instant::now());
        if is_over {
            let request = Subject::Semaphore {
                service: &self.service,
                id: Some(self.id),
            };
            events::record(&Event::new("release", request, Outcome::TimedOut));
        }
        is_over
    }

    fn attend(&self, mut conn: PooledPgConnection) -> bool {
        let was_sent = complete(&mut conn, self.id).is_ok();
        drop(conn);
        if was_sent {
            wakeups::wake_one(&self.service);
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
    use crate::clock;

    const TIMEOUT: Duration = Duration::from_secs(600);

    #[test]
    fn a_suspended_machine_uses_up_a_permit_and_a_renewal_restores_it() {
        let database = workbench::Database::new();
        crate::migrations::install(&mut database.connect()).unwrap();
        let pool = database.pool(1);
        let semaphore = Semaphore::named("suspended", 1, TIMEOUT);
        let mut permit = semaphore.try_acquire(&pool).unwrap().admitted().unwrap();
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
