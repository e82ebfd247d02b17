//! The permit of a semaphore.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sql;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::lease::Lease;
use crate::mode::{self, Mode, PATIENCE, PATIENCE_OF_A_LOOP};
use crate::pool::{Pool, Reply, impl_debug};
use crate::unfinished::Unfinished;
use crate::waiting::{self, What};

/// A permit that is held. It occupies a slot of its service, and no connection.
///
/// Dropping a permit releases it without an error and without a wait for a connection: at once if
/// the pool has one, and otherwise in the background as soon as it has. Call
/// [`release`](Self::release) instead to learn whether the permit had expired.
///
/// A permit [is lost](Self::is_lost) shortly before its timeout: a tenth of the timeout, and at
/// most a second, before the database lets another holder in. The time is counted by the monotonic
/// clock of this machine, from when the claim or the last good renewal was sent. So the holder
/// stops first, unless its process was suspended: such a process may still rely on the permit when
/// another holder is in. Use a [`Fence`](crate::Fence) to protect data in the database from it.
///
/// # Errors
///
/// [`Error::PermitLost`] if the permit has expired, and the errors of the
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

    /// Returns the `id` of the request, which is larger than those of all earlier holders of the
    /// same slot.
    ///
    /// With one slot, a [`Fence`](crate::Fence) that is passed with this token refuses all earlier
    /// holders. With several slots, use one fence per slot.
    pub fn fencing_token(&self) -> i64 {
        self.lease.grant.row.token
    }

    /// Returns how much longer you can rely on the permit unless it is renewed. No round trip.
    pub fn remaining(&self) -> Duration {
        self.lease.until().saturating_duration_since(Instant::now())
    }

    /// Returns whether the permit is lost, so that the work it protects must stop now. Once lost,
    /// it stays lost. No round trip.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Waits until the permit is lost, for at most `timeout`, and returns whether it is lost. No
    /// round trip.
    pub fn wait_for_loss(&self, timeout: Duration) -> <P::Mode as Mode>::Reply<'_, bool> {
        P::Mode::drive(self.lease.wait_for_loss(timeout))
    }

    /// Waits until the permit is lost. Never returns while the permit renews itself in time. No
    /// round trip.
    pub fn lost(&self) -> <P::Mode as Mode>::Reply<'_, ()> {
        P::Mode::drive(self.lease.lost())
    }

    /// Extends the permit to its timeout from now. A lost permit cannot be extended, and then
    /// nothing is sent.
    ///
    /// One round trip: `SELECT resource_control.renew_service_request($1, $2, $3, $4)`.
    pub fn renew(&self) -> Reply<'_, P, ()> {
        let subject = self.lease.grant.subject;
        P::Mode::drive(subject.observe_as("renew", |()| "renewed", self.lease.renew()))
    }

    /// Releases the permit, and reports an error if it had expired.
    ///
    /// One round trip: `SELECT resource_control.complete_service_request($1, $2, true, $3)`.
    ///
    /// If the database cannot be reached, this returns an error and the release is retried in the
    /// background. A handler that has succeeded and should reply at once can drop the permit
    /// instead: the release then happens after the reply.
    pub fn release(self) -> Reply<'static, P, ()> {
        P::Mode::drive(self.complete("release", None))
    }

    /// Releases the permit of a loop that may be about to end. So a blocking loop waits for a
    /// connection only shortly; a future can be dropped.
    pub(crate) async fn release_soon(self) {
        // No error is lost: an event reports a lost permit, and a row that could not be completed
        // expires.
        let _ = self.complete("release", Some(PATIENCE_OF_A_LOOP)).await;
    }

    /// Releases the permit after the work, before it returns, so that a try right after it finds
    /// the slot free. After a success it returns the errors of the release; after a failure it
    /// releases as a drop does.
    async fn release_after<T, E: From<Error>>(self, outcome: Result<T, E>) -> Result<T, E> {
        if outcome.is_ok() {
            self.complete("release", None).await?;
        } else {
            let _ = self.complete("drop", None).await;
        }
        outcome
    }

    async fn complete(mut self, operation: &'static str, patience: Option<Duration>) -> Result<()> {
        let lease = self.end(operation);
        let runtime = lease.grant.runtime.clone();
        P::Mode::run_detached(&runtime, None, release(lease, operation, patience)).await
    }

    /// Hands the request over to another process, and returns its token. The permit is no longer
    /// renewed. No round trip.
    ///
    /// The other process [completes](crate::semaphore::Semaphore::complete) the request by this
    /// token. If it does not, the slot is free after the timeout.
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
            P::Mode::finish_later(&runtime, async move {
                drop(release(lease, "drop", Some(Duration::ZERO)).await);
            });
        }
    }
}

/// The shortest and the longest pause between two tries of a late release.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Completes the request, now or, if the database cannot be reached, in the background until the
/// request has expired anyway. Waits for a connection for `patience`, or for as long as for a
/// reply.
async fn release<P: Pool>(
    lease: Arc<Lease<P>>,
    operation: &'static str,
    patience: Option<Duration>,
) -> Result<()> {
    let began = Instant::now();
    let give_up = began.checked_add(lease.grant.timeout);
    let longest = match operation {
        "drop" => PATIENCE,
        // The caller is waiting, so stop soon: the background can complete the request just as
        // well.
        _ => 5 * PATIENCE,
    };
    let longest = longest.min(lease.grant.timeout);
    let connect_by = began + patience.unwrap_or(longest);
    let mut completed = complete(&lease, connect_by, began + longest).await;
    if completed.is_ok() && lease.is_lost() {
        // The row may still have been in flight, but the holder has seen the loss and may have told
        // others.
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
    // A drop returns no error, so it reports only how the release ended. A `release` that failed
    // reports its error now.
    if is_done || operation == "release" {
        report(&lease, &completed);
    }
    if !is_done {
        // A thread or a task of its own, because a late release still occupies its slot: there are
        // at most as many as this process has slots.
        let (runtime, unfinished) = (lease.grant.runtime.clone(), Unfinished::new());
        P::Mode::in_background(&runtime, async move {
            let mut pause = FIRST_PAUSE;
            loop {
                let deadline = Instant::now() + PATIENCE;
                let completed = complete(&lease, deadline, deadline).await;
                let is_over = give_up.is_some_and(|give_up| give_up < Instant::now());
                if is_over || is_final(&completed) {
                    report(&lease, &completed);
                    break;
                }
                mode::pause::<P::Mode>(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            drop(unfinished);
        });
    }
    completed
}

async fn complete<P: Pool>(lease: &Lease<P>, connect_by: Instant, deadline: Instant) -> Result<()> {
    let complete = sql::complete(&lease.grant.row);
    let completed = lease
        .send_end(complete, Some(connect_by), Some(deadline))
        .await;
    // Wake the next waiter even after a failure: it then finds out for itself whether a slot is
    // free.
    waiting::wake_oldest(&What::Slot(lease.grant.row.name.clone()));
    completed
}

/// Whether the result is final, because another try would have the same one.
fn is_final(completed: &Result<()>) -> bool {
    match completed {
        Ok(()) | Err(Error::PermitLost(_) | Error::NotInstalled) => true,
        Err(_) => false,
    }
}

impl_debug!(
    Permit | this | fencing_token = this.fencing_token(),
    remaining = this.remaining()
);

#[cfg(feature = "r2d2")]
impl<M> Permit<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Runs `work`, releases the permit, and returns the value of `work`.
    ///
    /// If the permit expired and `work` succeeded, the result is an error. In each case the slot is
    /// free when this returns, unless the database is away, or the pool has no connection, for ten
    /// seconds (two if `work` failed): then the slot is released in the background.
    pub fn run<T, E: From<Error>>(self, work: impl FnOnce(&Self) -> Result<T, E>) -> Result<T, E> {
        let outcome = work(&self);
        crate::session::run_ready(self.release_after(outcome))
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = mode::Async>> Permit<P> {
    /// Runs `work`, releases the permit, and returns the value of `work`. In everything else like
    /// the blocking `run`; a future that is dropped releases as a drop of the permit.
    pub async fn run<T, E: From<Error>>(
        self,
        work: impl AsyncFnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let outcome = work(&self).await;
        self.release_after(outcome).await
    }
}
