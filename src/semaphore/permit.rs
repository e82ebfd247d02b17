//! The permit of a semaphore.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::admission::Claim;
use super::late::{self, Release};
use super::{Semaphore, handover, query};
use crate::background::Mark;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::events::{self, Event, Outcome, Subject};
use crate::panics::caught;
use crate::pool::{self, PgPool};
use crate::time::Timestamp;
use crate::transaction;

/// A slot of a semaphore, ours until it is released or times out. Holds no connection.
///
/// Made by [`Semaphore`].
///
/// # Release
///
/// [`release`](Self::release) gives the slot back in one round trip, and tells whether the permit had
/// timed out. Dropping the permit never waits for a connection: it tries the pool for one that is idle,
/// and otherwise leaves the release to a thread of this crate, which is started when it is first
/// needed, one for each pool. What cannot be delivered, because the pool stays exhausted or the program ends, ends by its
/// time-out.
///
/// A permit must live as long as the request does: where an async handler is dropped because its client
/// hung up, the slot is free while the service may still be at work. Make the call to its end on a
/// blocking thread, or in a task of its own, that has the permit.
///
/// A release touches only the permit's own request, and a late one changes nothing.
#[derive(Debug)]
#[must_use = "if unused the slot is released at once"]
#[clippy::has_significant_drop]
pub struct Permit {
    claim: Claim,
    semaphore: Semaphore,
    pool: PgPool,
    mark: Mark,
    /// Before the claim, or the latest renewal, was sent.
    sent: Moment,
    /// From then on; zero once the server has said that it is over.
    lasts: Duration,
    since: Instant,
    released: bool,
}

impl Permit {
    /// `sent` is when the claim was sent, or before; `mark` is that of the connection that sent it.
    pub(super) fn new(
        semaphore: &Semaphore,
        claim: Claim,
        pool: PgPool,
        mark: Mark,
        sent: Moment,
    ) -> Self {
        Self {
            claim,
            semaphore: semaphore.clone(),
            pool,
            mark,
            sent,
            lasts: semaphore.timeout,
            since: Instant::now(),
            released: false,
        }
    }

    /// A number that grows from each holder of this slot to its next: what a service, or a table, is to
    /// refuse when it has seen a greater one for the same slot.
    ///
    /// It is the `id` of the request. Ordered within a [slot](Claim::slot), not within a service.
    pub const fn fencing_token(&self) -> i64 {
        self.claim.id
    }

    /// The claim as plain data: which slot, since when, until when.
    pub const fn claim(&self) -> &Claim {
        &self.claim
    }

    /// How long until it times out, at least: zero when it may have. For the time limit of the request
    /// itself.
    ///
    /// Counts on this machine, from before the claim was sent, by the monotonic or the wall clock,
    /// whichever says that more time has passed: the monotonic clock stops while the machine is
    /// suspended. A wall clock that was set forward makes it too small, until it is set right or the
    /// permit is renewed.
    ///
    /// The time-out itself is decided by the database's clock. Where that is set forward, the permit
    /// times out earlier than this tells.
    pub fn remaining(&self) -> Duration {
        self.lasts.saturating_sub(self.sent.elapsed())
    }

    /// Extends the permit to a full timeout from now, never shortens it, and returns when it expires by
    /// the database's clock.
    ///
    /// One round trip beyond the pool's own check-out:
    /// `SELECT resource_control.renew_service_request($1, $2)`.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool is set to wait.
    ///
    /// # Errors
    ///
    /// - [`Error::TimedOut`] if it had timed out. It is over: stop what it was for.
    /// - [`Error::TransactionInPool`](crate::Error::TransactionInPool) if the pool gave a connection that
    ///   somebody had left in a transaction. It is as it was.
    /// - [`Error::Pool`](crate::Error::Pool), [`Error::Database`] and their like. It is as it was, or
    ///   renewed.
    pub fn renew(&mut self) -> Result<DateTime<Utc>> {
        let renewed = self.renew_inner();
        events::record(&Event::of("renew", self.subject(), &renewed, |_| {
            Outcome::Renewed
        }));
        renewed
    }

    fn renew_inner(&mut self) -> Result<DateTime<Utc>> {
        let mut conn = pool::check_out(&self.pool, None)?;
        let interval = self.semaphore.interval()?;
        let sent = Moment::now();
        let renewed = transaction::refuse_left_open(&mut conn, |conn| {
            query::renew(conn, self.claim.id, interval)
        })?;
        drop(conn);
        match renewed.map(Timestamp::at) {
            Some(expires_at) => {
                (self.sent, self.lasts) = (sent, self.semaphore.timeout);
                self.claim.expires_at = expires_at.unwrap_or(self.claim.expires_at);
                Ok(self.claim.expires_at)
            }
            None => {
                self.lasts = Duration::ZERO;
                Err(self.timed_out())
            }
        }
    }

    /// Gives the slot back.
    ///
    /// One round trip beyond the pool's own check-out:
    /// `SELECT resource_control.complete_service_request($1)`.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool is set to wait.
    ///
    /// # Errors
    ///
    /// - [`Error::TimedOut`] if it had timed out: part of the work may have run while more than the
    ///   allowed requests were in flight. Nothing was changed.
    /// - [`Error::TransactionInPool`](crate::Error::TransactionInPool) if the pool gave a connection that
    ///   somebody had left in a transaction; [`Error::Pool`](crate::Error::Pool), [`Error::Database`] and
    ///   their like. The release is then tried again in the background, as if the permit were dropped.
    pub fn release(mut self) -> Result<()> {
        let released = self.release_inner();
        self.record_release(&released);
        released
    }

    fn release_inner(&mut self) -> Result<()> {
        let mut conn = pool::check_out(&self.pool, None)?;
        let completed = late::complete(&mut conn, self.claim.id)?;
        self.released = true;
        drop(conn);
        handover::wake_one(&self.semaphore.service);
        if completed {
            Ok(())
        } else {
            Err(self.timed_out())
        }
    }

    /// Answers the claim, which nothing releases any more but
    /// [`Semaphore::complete_on`] and the time-out: for work that ends elsewhere.
    pub fn into_claim(mut self) -> Claim {
        self.released = true;
        self.claim.clone()
    }

    fn subject(&self) -> Subject<'_> {
        Subject::Semaphore {
            service: &self.semaphore.service,
            id: Some(self.claim.id),
        }
    }

    fn record_release(&self, released: &Result<()>) {
        let event = Event::of("release", self.subject(), released, |()| Outcome::Released);
        events::record(&event.held_since(self.since));
    }

    fn timed_out(&self) -> Error {
        Error::TimedOut {
            service: self.semaphore.service.to_string(),
            id: self.claim.id,
        }
    }

    /// Answers whether there is nothing more to do.
    fn release_without_waiting(&self) -> bool {
        let Some(mut conn) = self.pool.try_get() else {
            return false;
        };
        let Ok(completed) = late::complete(&mut conn, self.claim.id) else {
            return false;
        };
        drop(conn);
        handover::wake_one(&self.semaphore.service);
        let released = completed.then_some(()).ok_or_else(|| self.timed_out());
        self.record_release(&released);
        true
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.released {
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
            let release = Release {
                service: self.semaphore.service.clone(),
                id: self.claim.id,
                deadline: self.sent.monotonic().checked_add(self.lasts),
            };
            late::deliver(&self.pool, self.mark, release);
        }
    }
}

#[cfg(all(test, feature = "migrations"))]
mod tests {
    use super::*;
    use crate::clock;

    const TIMEOUT: Duration = Duration::from_secs(600);

    /// What is promised on a machine that was suspended.
    #[test]
    fn a_suspended_machine_uses_up_a_permit_and_a_renewal_restores_it() {
        let database = workbench::Database::new();
        crate::migrations::install(&mut database.connect()).unwrap();
        let pool = database.pool(1);
        let semaphore = Semaphore::named("suspended", 1, TIMEOUT);
        let mut permit = semaphore.try_acquire(&pool).unwrap().acquired().unwrap();
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
