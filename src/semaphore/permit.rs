//! The permit of a semaphore.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use super::keep::{Trust, keep};
use super::sql;
use crate::call::{ask, ask_surely};
use crate::error::{Error, Result};
use crate::event::{Outcome, Subject};
use crate::mode::{Mode, PATIENCE};
use crate::pool::{Pool, Reply};
use crate::waiting::{self, Database, What};

/// A permit that is held: a slot of its service, and no connection.
///
/// A drop releases it, without an error and without waiting for a connection: at once if the pool can lend one, and otherwise in
/// the background as soon as it can. [`release`](Self::release) does the same, and reports a permit that had expired.
///
/// A permit believes in its slot until it [is lost](Self::is_lost), which is a tenth of its timeout, and a second at most, before
/// the database lets another holder in. That is counted by the monotonic clock of this machine, from when the claim or the last good
/// renewal was sent. Only a process that was suspended may believe in it for longer: a [`Fence`](crate::Fence) protects data
/// of the database from it.
///
/// # Errors
///
/// [`Error::PermitLost`] if the permit has expired, and those of the [semaphore](crate::semaphore::Semaphore#errors).
#[must_use = "if unused, the permit is released at once"]
pub struct Permit<P: Pool> {
    /// `None` once it is released.
    held: Option<Held<P>>,
    token: i64,
    trust: Arc<Trust>,
}

/// Where a permit belongs to.
pub(super) struct Service<P: Pool> {
    pub(super) pool: P,
    pub(super) runtime: <P::Mode as Mode>::Runtime,
    pub(super) subject: Subject,
    pub(super) name: Arc<str>,
    pub(super) timeout: Duration,
    pub(super) database: Database,
    /// Whether a completion was sent that has no reply, and may have been done.
    pub(super) is_unanswered: AtomicBool,
}

/// What ends or renews a permit.
pub(super) struct Held<P: Pool> {
    service: Arc<Service<P>>,
    id: i64,
    trust: Arc<Trust>,
}

impl<P: Pool> Permit<P> {
    pub(super) fn new(service: Service<P>, id: i64, sent: Instant, is_kept: bool) -> Self {
        let trust = Arc::new(Trust::new(service.subject, sent, service.timeout));
        let held = Held {
            service: Arc::new(service),
            id,
            trust: trust.clone(),
        };
        if is_kept {
            let renewed = held.clone();
            let renew = move |limit| renewed.clone().renewal(limit);
            P::Mode::beside(
                &held.service.runtime,
                keep::<P::Mode, _>(trust.clone(), renew),
            );
        }
        Self {
            token: id,
            held: Some(held),
            trust,
        }
    }

    /// Returns a number that is larger than those of all earlier holders of the same slot: the `id` of the request.
    ///
    /// With one slot, a [`Fence`](crate::Fence) that is passed with it refuses all earlier holders. With several slots there must be
    /// a fence for each.
    pub const fn fencing_token(&self) -> i64 {
        self.token
    }

    /// Returns for how long the permit may still be relied on, unless it is renewed. No round trip.
    pub fn remaining(&self) -> Duration {
        self.trust.until().saturating_duration_since(Instant::now())
    }

    /// Returns whether the permit must not be relied on any more: what it protects must stop now. No round trip, and once true for
    /// ever.
    pub fn is_lost(&self) -> bool {
        self.trust.is_lost()
    }

    /// Waits until the permit is lost, for at most `timeout`. Returns whether it is. No round trip.
    pub fn wait_for_loss(&self, timeout: Duration) -> Reply<'_, P, bool> {
        P::Mode::drive(async move {
            let deadline = Instant::now().checked_add(timeout);
            self.trust.lost::<P::Mode>(deadline).await;
            self.is_lost()
        })
    }

    /// Waits until the permit is lost: never, for as long as it renews itself in time. No round trip.
    pub fn lost(&self) -> Reply<'_, P, ()> {
        P::Mode::drive(self.trust.lost::<P::Mode>(None))
    }

    /// Extends the permit to its timeout from now. One round trip: `SELECT resource_control.renew_service_request($1, $2, $3)`.
    pub fn renew(&self) -> Reply<'_, P, Result<()>> {
        P::Mode::drive(async move {
            let Some(held) = self.held.clone() else {
                unreachable!("only its end takes it")
            };
            let service = held.service.clone();
            let renewal = async {
                let renewed = held.renewal(None).await?;
                if self.trust.renewed(renewed) {
                    Ok(Renewed)
                } else {
                    Err(Error::PermitLost(service.name.to_string()))
                }
            };
            let renewed = service.subject.tell("renew", renewal).await;
            renewed.map(|Renewed| ())
        })
    }

    /// Releases the permit. One round trip: `SELECT resource_control.complete_service_request($1, $2, true)`.
    ///
    /// If the database cannot be reached it is an error, and the release follows in the background.
    pub fn release(mut self) -> Reply<'static, P, Result<()>> {
        P::Mode::drive(async move {
            let Some(held) = self.end() else {
                unreachable!("only its end takes it")
            };
            let runtime = held.service.runtime.clone();
            P::Mode::surely(&runtime, None, held.release("release", None)).await
        })
    }

    /// Leaves the request to another process, which [completes](crate::semaphore::Semaphore::complete) it by this token, or to its
    /// timeout. No round trip. It is no longer renewed.
    pub fn detach(mut self) -> i64 {
        self.end();
        self.trust.tell(|subject, since| {
            let held = Some(since.elapsed());
            subject.event("detach", "detached", Duration::ZERO, held, None);
        });
        self.token
    }

    pub(crate) const fn trust(&self) -> &Arc<Trust> {
        &self.trust
    }

    fn end(&mut self) -> Option<Held<P>> {
        self.trust.end();
        self.held.take()
    }
}

impl<P: Pool> Drop for Permit<P> {
    fn drop(&mut self) {
        if let Some(held) = self.end() {
            let runtime = held.service.runtime.clone();
            P::Mode::leave(&runtime, async move {
                drop(held.release("drop", Some(Duration::ZERO)).await);
            });
        }
    }
}

impl<P: Pool> Held<P> {
    /// Completes the request: now, or later if the database cannot be reached, until it has expired anyway.
    async fn release(self, operation: &'static str, limit: Option<Duration>) -> Result<()> {
        let began = Instant::now();
        let give_up = began.checked_add(self.service.timeout);
        let patience = match operation {
            "drop" => Some(began + PATIENCE.min(self.service.timeout)),
            _ => give_up,
        };
        let mut completed = self.complete(limit, patience).await;
        if completed.is_err() && give_up.is_some_and(|give_up| give_up <= Instant::now()) {
            // It has expired meanwhile.
            completed = Err(Error::PermitLost(self.service.name.to_string()));
        }
        let is_done = is_final(&completed);
        // A drop returns no error, so it tells only what it came to in the end.
        if is_done || operation == "release" {
            self.tell(operation, began, &completed);
        }
        if !is_done {
            let service = self.service.clone();
            P::Mode::later(&service.runtime, service.database, move |limit| {
                let held = self.clone();
                async move {
                    let completed = held.complete(limit, Some(Instant::now() + PATIENCE)).await;
                    let is_over = give_up.is_some_and(|give_up| give_up < Instant::now());
                    let is_done = is_over || is_final(&completed);
                    if is_done && operation == "drop" {
                        held.tell(operation, began, &completed);
                    }
                    is_done
                }
            });
        }
        completed
    }

    async fn complete(&self, limit: Option<Duration>, deadline: Option<Instant>) -> Result<()> {
        let Service {
            pool,
            name,
            is_unanswered,
            ..
        } = &*self.service;
        let complete = ask(pool, limit, [sql::complete(name, self.id)]);
        let reply = P::Mode::within(deadline, complete).await;
        let reply: Result<(bool, _)> = reply.unwrap_or(Err(Error::TimedOut));
        // Also if it failed: who waits looks how it stands.
        waiting::released(&What::Slot(name.clone()));
        match reply {
            Ok((true, _)) => Ok(()),
            // One before has done it, unless it has expired.
            Ok((false, _)) if is_unanswered.load(SeqCst) && self.trust.until() > Instant::now() => {
                Ok(())
            }
            Ok((false, _)) => Err(Error::PermitLost(name.to_string())),
            Err(error) => {
                is_unanswered.fetch_or(!matches!(error, Error::Pool(_)), SeqCst);
                Err(error)
            }
        }
    }

    /// Returns when the renewal was sent, if the permit was in flight. A drop of the future does not stop it.
    async fn renewal(self, limit: Option<Duration>) -> Result<Option<Instant>> {
        let Service {
            pool,
            name,
            timeout,
            ..
        } = &*self.service;
        let renew = sql::renew(name, self.id, *timeout);
        let reply = move |was_in_flight: bool, sent| was_in_flight.then_some(sent);
        ask_surely(pool, limit, renew, reply).await
    }

    fn tell(&self, operation: &'static str, began: Instant, released: &Result<()>) {
        self.trust
            .tell(|subject, since| subject.ended(operation, began, since, released));
    }
}

struct Renewed;

impl Outcome for Renewed {
    fn word(&self) -> &'static str {
        "renewed"
    }
}

/// Whether another try would come to nothing else.
fn is_final(completed: &Result<()>) -> bool {
    match completed {
        Ok(()) | Err(Error::PermitLost(_) | Error::NotInstalled) => true,
        Err(_) => false,
    }
}

impl<P: Pool> Clone for Held<P> {
    fn clone(&self) -> Self {
        Self {
            service: self.service.clone(),
            id: self.id,
            trust: self.trust.clone(),
        }
    }
}

impl<P: Pool> fmt::Debug for Permit<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("fencing_token", &self.token)
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "r2d2")]
impl Permit<crate::pool::PgPool> {
    /// Runs `work`, releases the permit, and returns the value of `work`.
    ///
    /// After an error of `work` the permit is released as by a drop. A permit that expired while `work` succeeded is an error.
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
    /// After an error of `work` the permit is released as by a drop. A permit that expired while `work` succeeded is an error.
    pub async fn run<T, E: From<Error>>(
        self,
        work: impl AsyncFnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let value = work(&self).await?;
        self.release().await?;
        Ok(value)
    }
}
