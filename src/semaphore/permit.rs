//! The permit of a semaphore.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sql;
use crate::call::ask;
use crate::error::{Error, Result};
use crate::event::{Event, Outcome};
use crate::lease::Lease;
use crate::mode::{Mode, PATIENCE};
use crate::pool::{Pool, Reply, debug};
use crate::waiting::{self, What};

/// A permit that is held: a slot of its service, and no connection.
///
/// A drop releases it, without an error and without waiting for a connection: at once if the pool
/// can give one, and otherwise in the background as soon as it can. [`release`](Self::release) does
/// the same, and reports a permit that had expired.
///
/// A permit believes in its slot until it [is lost](Self::is_lost), which is a tenth of its
/// timeout, and a second at most, before the database lets another holder in. That is counted by
/// the monotonic clock of this machine, from when the claim or the last good renewal was sent. Only
/// a process that was suspended may believe in it for longer: a [`Fence`](crate::Fence) protects
/// data of the database from it.
///
/// # Errors
///
/// [`Error::PermitLost`] if the permit has expired, and those of the
/// [semaphore](crate::semaphore::Semaphore#errors).
#[must_use = "if unused, the permit is released at once"]
pub struct Permit<P: Pool> {
    lease: Arc<Lease<P>>,
    is_ended: bool,
}

impl<P: Pool> Permit<P> {
    pub(super) const fn new(lease: Arc<Lease<P>>) -> Self {
        Self {
            lease,
            is_ended: false,
        }
    }

    /// Returns a number that is larger than those of all earlier holders of the same slot: the `id`
    /// of the request.
    ///
    /// With one slot, a [`Fence`](crate::Fence) that is passed with it refuses all earlier holders.
    /// With several slots there must be a fence for each.
    pub fn fencing_token(&self) -> i64 {
        self.lease.grant.row.token
    }

    /// Returns for how long the permit may still be relied on, unless it is renewed. No round trip.
    pub fn remaining(&self) -> Duration {
        self.lease.until().saturating_duration_since(Instant::now())
    }

    /// Returns whether the permit must not be relied on any more: what it protects must stop now.
    /// No round trip, and once true for ever.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Waits until the permit is lost, for at most `timeout`. Returns whether it is. No round trip.
    pub fn wait_for_loss(&self, timeout: Duration) -> <P::Mode as Mode>::Reply<'_, bool> {
        P::Mode::drive(async move {
            let deadline = Instant::now().checked_add(timeout);
            self.lease.wait_for_loss(deadline).await;
            self.is_lost()
        })
    }

    /// Waits until the permit is lost: never, for as long as it renews itself in time. No round
    /// trip.
    pub fn lost(&self) -> <P::Mode as Mode>::Reply<'_, ()> {
        P::Mode::drive(async move {
            self.lease.wait_for_loss(None).await;
            self.is_lost();
        })
    }

    /// Extends the permit to its timeout from now. One round trip: `SELECT
    /// resource_control.renew_service_request($1, $2, $3, $4)`. A permit that is lost is not
    /// extended, and nothing is sent.
    pub fn renew(&self) -> Reply<'_, P, ()> {
        P::Mode::drive(async move {
            let renew = async { self.lease.renew().await.map(|()| Renewed) };
            let renewed = self.lease.grant.subject.observe("renew", renew).await;
            renewed.map(|Renewed| ())
        })
    }

    /// Releases the permit. One round trip: `SELECT resource_control.complete_service_request($1,
    /// $2, true, $3)`.
    ///
    /// If the database cannot be reached it is an error, and the release follows in the background.
    /// Where the work has succeeded and a handler shall reply at once, drop the permit instead: the
    /// release then follows behind the reply.
    pub fn release(mut self) -> Reply<'static, P, ()> {
        P::Mode::drive(async move {
            let lease = self.end("release");
            let runtime = lease.grant.runtime.clone();
            P::Mode::surely(&runtime, None, release(lease, "release", None)).await
        })
    }

    /// As [`release`](Self::release), of a loop that is to end: waits for a connection no longer
    /// than a second.
    pub(crate) async fn release_soon(mut self) {
        let lease = self.end("release");
        let runtime = lease.grant.runtime.clone();
        let limit = Some(Duration::from_secs(1));
        // An event tells that it was lost, and a row that was not given up falls free.
        let _ = P::Mode::surely(&runtime, None, release(lease, "release", limit)).await;
    }

    /// Leaves the request to another process, which
    /// [completes](crate::semaphore::Semaphore::complete) it by this token, or to its timeout. No
    /// round trip. It is no longer renewed.
    pub fn detach(mut self) -> i64 {
        let lease = self.end("detach");
        lease.report(|subject, since| {
            Event {
                held: Some(since.elapsed()),
                ..subject.event("detach", "detached")
            }
            .emit();
        });
        lease.grant.row.token
    }

    pub(crate) const fn lease(&self) -> &Arc<Lease<P>> {
        &self.lease
    }

    fn end(&mut self, operation: &'static str) -> Arc<Lease<P>> {
        self.is_ended = true;
        self.lease.end(operation);
        self.lease.clone()
    }
}

impl<P: Pool> Drop for Permit<P> {
    fn drop(&mut self) {
        if !self.is_ended {
            let lease = self.end("drop");
            let runtime = lease.grant.runtime.clone();
            P::Mode::leave(&runtime, async move {
                drop(release(lease, "drop", Some(Duration::ZERO)).await);
            });
        }
    }
}

/// Completes the request: now, or later if the database cannot be reached, until it has expired
/// anyway.
async fn release<P: Pool>(
    lease: Arc<Lease<P>>,
    operation: &'static str,
    limit: Option<Duration>,
) -> Result<()> {
    let began = Instant::now();
    let give_up = began.checked_add(lease.grant.timeout);
    let patience = match operation {
        "drop" => Some(began + PATIENCE.min(lease.grant.timeout)),
        // Its caller waits. What follows in the background is as good.
        _ => Some(began + (5 * PATIENCE).min(lease.grant.timeout)),
    };
    let mut completed = complete(&lease, limit, patience).await;
    if completed.is_ok() && lease.is_lost() {
        // Its holder knows it, and may have said so to others.
        completed = Err(lease.loss());
    }
    let has_expired = || give_up.is_some_and(|give_up| give_up <= Instant::now());
    if completed.is_err() && has_expired() {
        completed = Err(lease.loss());
    }
    let report = move |lease: &Lease<P>, completed: &Result<()>| {
        lease.report(|subject, since| subject.end(operation, began, since, completed));
    };
    let is_done = is_final(&completed);
    // A drop returns no error, so it tells only what became of it in the end.
    if is_done || operation == "release" {
        report(&lease, &completed);
    }
    if !is_done {
        let (runtime, database) = (lease.grant.runtime.clone(), lease.grant.database);
        P::Mode::later(&runtime, database, move |limit| {
            let lease = lease.clone();
            async move {
                let deadline = Some(Instant::now() + PATIENCE);
                let completed = complete(&lease, limit, deadline).await;
                let is_over = give_up.is_some_and(|give_up| give_up < Instant::now());
                let is_done = is_over || is_final(&completed);
                if is_done {
                    report(&lease, &completed);
                }
                is_done
            }
        });
    }
    completed
}

async fn complete<P: Pool>(
    lease: &Lease<P>,
    limit: Option<Duration>,
    deadline: Option<Instant>,
) -> Result<()> {
    let complete = ask(&lease.grant.pool, limit, [sql::complete(&lease.grant.row)]);
    let reply: Option<Result<(bool, _)>> = P::Mode::within(deadline, complete).await;
    // Also if it failed: who waits looks how it stands.
    waiting::wake_oldest(&What::Slot(lease.grant.row.name.clone()));
    let reply = reply.unwrap_or(Err(Error::TimedOut));
    lease.read_end(reply.map(|(was_in_flight, _)| was_in_flight))
}

struct Renewed;

impl Outcome for Renewed {
    fn word(&self) -> &'static str {
        "renewed"
    }
}

/// Whether another try would have the same result.
fn is_final(completed: &Result<()>) -> bool {
    match completed {
        Ok(()) | Err(Error::PermitLost(_) | Error::NotInstalled) => true,
        Err(_) => false,
    }
}

debug!(
    Permit | this | fencing_token = this.fencing_token(),
    remaining = this.remaining()
);

#[cfg(feature = "r2d2")]
impl Permit<crate::pool::PgPool> {
    /// Runs `work`, releases the permit, and returns the value of `work`.
    ///
    /// After an error of `work` the permit is released as by a drop. A permit that expired while
    /// `work` succeeded is an error.
    pub fn run<T, E: From<Error>>(self, work: impl FnOnce(&Self) -> Result<T, E>) -> Result<T, E> {
        let value = work(&self)?;
        self.release()?;
        Ok(value)
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Permit<P> {
    /// Runs `work`, releases the permit, and returns the value of `work`.
    ///
    /// After an error of `work` the permit is released as by a drop. A permit that expired while
    /// `work` succeeded is an error.
    pub async fn run<T, E: From<Error>>(
        self,
        work: impl AsyncFnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let value = work(&self).await?;
        self.release().await?;
        Ok(value)
    }
}
