//! The permit of an asynchronous semaphore, and its release by a task.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore as Turns, SemaphorePermit as Turn};
use tokio::time::{sleep, timeout};

use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::panics::{caught, caught_while_awaited, lock};
use crate::pool::asynchronous::{self as pool, CheckedOut, Pool};
use crate::runtime::{self, Finished};
use crate::semaphore::admission::Claimed;
use crate::semaphore::held::{HeldSlot, LateRelease, PATIENCE, PAUSE};
use crate::semaphore::{Admission, Claim, Full, operations, rules, wakeups};
use crate::session::Asynchronous;

/// A slot of a semaphore, held until the permit is released, dropped or timed out. A permit holds no connection.
///
/// The methods of [`Semaphore`](crate::asynchronous::Semaphore) make permits.
///
/// # Release
///
/// [`release`](Self::release) frees the slot in one round trip, and returns an error if the permit had timed out.
/// [`run`](Self::run) awaits some work and then releases the permit.
///
/// Dropping a permit also frees the slot, and never blocks: a task on the runtime on which the slot was acquired releases it, and
/// retries until the permit has timed out, or its pool is closed. Only a few of these tasks per service wait for a connection at
/// the same time, so many permits that are dropped at once do not take all connections from others. A permit may be dropped
/// anywhere: on any thread, in another runtime, or outside of one. If the runtime was dropped, the slot is free after the timeout.
/// A current-thread runtime that nobody drives releases the slot when it is driven again, unless the slot has timed out before.
///
/// A release changes only the permit's own request. A release after the timeout frees nothing, and only marks that request as
/// timed out.
///
/// # Cancelled handlers
///
/// Keep the permit as long as the request runs. If a handler is dropped because its client disconnected, the permit is
/// dropped with it, and the slot is free while the service may still be at work. Make the call in a separate task, and move
/// the permit there.
#[must_use = "if unused the slot is released at once"]
#[clippy::has_significant_drop]
pub struct Permit<P: Pool> {
    slot: HeldSlot,
    pool: P,
    runtime: Handle,
    /// Whether a drop has nothing left to release.
    is_over: bool,
}

impl<P: Pool> Permit<P> {
    pub(super) fn new(slot: HeldSlot, pool: P, runtime: Handle) -> Self {
        Self {
            slot,
            pool,
            runtime,
            is_over: false,
        }
    }

    /// Returns the fencing token: each new holder of this slot gets a larger one.
    ///
    /// The token is the `id` of the request. Tokens are ordered within a [slot](Claim::slot), not across the slots of a
    /// service.
    pub const fn fencing_token(&self) -> i64 {
        self.slot.claim.id
    }

    /// Returns the claim as plain data: the slot, when it was claimed, and when it expires.
    pub const fn claim(&self) -> &Claim {
        &self.slot.claim
    }

    /// Returns how long the permit lasts at least, for the timeout of the work itself. Zero if it may have timed out.
    ///
    /// This sends nothing. It counts on this machine, from before the claim was sent, by the monotonic or the wall clock. The one
    /// that has advanced more is used. The database clock decides when the permit times out.
    pub fn remaining(&self) -> Duration {
        self.slot.remaining()
    }

    /// Extends the permit to a full timeout from now, and returns the time at which it expires, by the database's clock. Never
    /// shortens it. Returns `DateTime::MAX_UTC` if an operator has set `infinity`.
    ///
    /// One round trip besides the pool's own check-out: `SELECT resource_control.renew_service_request($1, $2)`. If the
    /// future is dropped, the renewal may take place, but [`remaining`](Self::remaining) and [`claim`](Self::claim) do not
    /// show it.
    ///
    /// # Errors
    ///
    /// - [`Error::TimedOut`] if the permit had timed out. Stop the work, because another holder may have taken the slot.
    /// - [`Error::TransactionInPool`] if an earlier user of the connection had left a transaction open. The permit was not
    ///   renewed.
    /// - [`Error::Pool`] if the pool had no connection in time. The permit was not renewed.
    /// - [`Error::Database`] for anything else. The permit may have been renewed.
    pub async fn renew(&mut self) -> Result<DateTime<Utc>> {
        let renewed = self.renew_inner().await;
        self.slot.record_renewal(&renewed);
        renewed
    }

    async fn renew_inner(&mut self) -> Result<DateTime<Utc>> {
        let mut conn = pool::check_out(&self.pool, None).await?;
        let timeout = rules::interval(&self.slot.service, self.slot.timeout)?;
        let id = self.slot.claim.id;
        let sent = Moment::now();
        let renewal = async move {
            let mut session = Asynchronous::pooled(&mut conn);
            operations::renew(&mut session, id, timeout).await
        };
        let renewed = Finished::new(self.runtime.clone(), renewal).await?;
        self.slot.renewed(sent, renewed)
    }

    /// Releases the permit, which frees the slot.
    ///
    /// One round trip besides the pool's own check-out: `SELECT resource_control.complete_service_request($1)`. If the
    /// future is dropped, the permit is released all the same, as by a drop.
    ///
    /// # Errors
    ///
    /// - [`Error::TimedOut`] if the permit had timed out. Part of the work may have run while more requests than allowed
    ///   were in flight. The request is marked as timed out.
    /// - [`Error::Pool`], [`Error::TransactionInPool`] and [`Error::Database`]. The release is then retried in the
    ///   background, as for a dropped permit.
    pub async fn release(self) -> Result<()> {
        match pool::check_out(&self.pool, None).await {
            Ok(conn) => Finished::new(self.runtime.clone(), self.release_on(conn)).await,
            Err(error) => {
                let released = Err(error);
                self.slot.record_release(&released);
                released
            }
        }
    }

    async fn release_on(mut self, mut conn: CheckedOut<P::Connection>) -> Result<()> {
        let mut session = Asynchronous::pooled(&mut conn);
        let completed = operations::complete(&mut session, self.slot.claim.id).await;
        self.is_over = completed.is_ok();
        drop(conn);
        if self.is_over {
            wakeups::wake_one(&self.slot.service);
        }
        let released = completed.and_then(|completed| self.slot.completed(completed));
        self.slot.record_release(&released);
        released
    }

    /// Runs `work`, releases the permit, and returns the value of `work`.
    ///
    /// If `work` fails or panics, or the future is dropped, the permit is dropped, which releases it as well.
    ///
    /// # Errors
    ///
    /// The error of `work`. If `work` succeeded, the errors of [`release`](Self::release). If the permit had timed out, part
    /// of the work may have run without a slot.
    pub async fn run<T, E, F>(mut self, work: F) -> Result<T, E>
    where
        F: AsyncFnOnce(&mut Permit<P>) -> Result<T, E>,
        E: From<Error>,
    {
        let value = work(&mut self).await?;
        self.release().await?;
        Ok(value)
    }

    /// Turns the permit into its claim, for work that ends elsewhere.
    ///
    /// Afterwards only [`Semaphore::complete_on`](crate::asynchronous::Semaphore::complete_on) or the timeout frees the slot.
    pub fn into_claim(mut self) -> Claim {
        self.is_over = true;
        self.slot.claim.clone()
    }
}

impl<P: Pool> Claimed for Permit<P> {
    fn claimed(&self) -> Result<&Claim, &Full> {
        Ok(&self.slot.claim)
    }
}

impl<P: Pool> Admission<Permit<P>> {
    /// Runs `work` with the permit, releases it, and returns the value of `work`. On a full semaphore `work` does not run.
    ///
    /// # Errors
    ///
    /// As [`Permit::run`].
    pub async fn run<T, E, F>(self, work: F) -> Result<Admission<T>, E>
    where
        F: AsyncFnOnce(&mut Permit<P>) -> Result<T, E>,
        E: From<Error>,
    {
        match self {
            Admission::Admitted(permit) => permit.run(work).await.map(Admission::Admitted),
            Admission::Full(full) => Ok(Admission::Full(full)),
        }
    }
}

impl<P: Pool> Drop for Permit<P> {
    fn drop(&mut self) {
        if !self.is_over {
            let release = release_dropped(self.slot.clone(), self.pool.clone());
            runtime::leave_to(&self.runtime, release);
        }
    }
}

impl<P: Pool> fmt::Debug for Permit<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("slot", &self.slot)
            .field("is_over", &self.is_over)
            .finish_non_exhaustive()
    }
}

/// Releases a permit that was dropped. Retries until it has timed out, or its pool is closed.
async fn release_dropped<P: Pool>(slot: HeldSlot, pool: P) {
    let turns = turns_of(&slot.service);
    let released = caught_while_awaited(release_without_waiting(&slot, &pool, &turns)).await;
    if let Some(Ok(_)) = released {
        return;
    }
    let late = slot.late_release();
    drop(slot);
    while !caught(|| late.is_over()).unwrap_or(true) {
        if caught(|| pool.is_closed()).unwrap_or(true) {
            caught(|| late.record_timeout());
            return;
        }
        match caught_while_awaited(release_late(&late, &pool, &turns)).await {
            Some(Ok(_)) => return,
            // It is tried again soon, because the turns of a pool that works are short.
            Some(Err(NotSent::NoTurn)) => sleep(PAUSE).await,
            Some(Err(NotSent::Failed)) | None => {
                late.failed();
                sleep(late.pause()).await;
            }
        }
    }
}

/// Releases the permit on an idle connection.
async fn release_without_waiting<P: Pool>(
    slot: &HeldSlot,
    pool: &P,
    turns: &Turns,
) -> Result<(), NotSent> {
    let completed = complete(pool, turns, slot.claim.id, Duration::ZERO).await;
    match completed {
        Ok(completed) => {
            wakeups::wake_one(&slot.service);
            slot.record_release(&slot.completed(completed));
        }
        Err(_) => slot.record_deferral(),
    }
    completed.map(drop)
}

/// Releases the permit on the next connection.
async fn release_late<P: Pool>(late: &LateRelease, pool: &P, turns: &Turns) -> Result<(), NotSent> {
    let completed = complete(pool, turns, late.id, PATIENCE.min(late.remaining())).await;
    if completed.is_ok() {
        wakeups::wake_one(&late.service);
    }
    completed.map(drop)
}

/// Why a release did not reach the database.
#[derive(Debug, Clone, Copy)]
enum NotSent {
    /// It had no turn to wait for a connection, and none was idle.
    NoTurn,
    /// The pool had no connection in time, or the statement failed.
    Failed,
}

/// How long a task waits for its turn.
const PATIENCE_FOR_TURN: Duration = Duration::from_millis(100);

/// How long a task keeps its turn. A server that hangs, or a pool that is exhausted, takes longer, and must not keep the turns from
/// a pool for the same service in another database.
const LONGEST_TURN: Duration = Duration::from_secs(3);

/// The turns of each service to wait for a connection, so that a thousand permits that are dropped at once leave the pool to
/// others. By service, because a pool has no identity, and because a pool that is exhausted must not stop the releases of another
/// one. A task that has no turn in time takes an idle connection only.
static TURNS: Mutex<BTreeMap<String, Weak<Turns>>> = Mutex::new(BTreeMap::new());

fn turns_of(service: &str) -> Arc<Turns> {
    let mut all = lock(&TURNS);
    if let Some(turns) = all.get(service).and_then(Weak::upgrade) {
        return turns;
    }
    all.retain(|_, turns| turns.strong_count() > 0);
    let turns = Arc::new(Turns::new(4));
    all.insert(service.to_owned(), Arc::downgrade(&turns));
    turns
}

async fn turn(turns: &Turns) -> Option<Turn<'_>> {
    match turns.try_acquire() {
        Ok(turn) => Some(turn),
        Err(_) => timeout(PATIENCE_FOR_TURN, turns.acquire()).await.ok()?.ok(),
    }
}

/// Ends the request on a connection out of its pool, for which it waits for `patience` at most. Returns whether this call ended
/// it.
async fn complete<P: Pool>(
    pool: &P,
    turns: &Turns,
    id: i64,
    patience: Duration,
) -> Result<bool, NotSent> {
    let turn = turn(turns).await;
    let has_turn = turn.is_some();
    let mut completed = pin!(async {
        let conn = match pool::try_check_out(pool).await {
            None if !has_turn => return Err(NotSent::NoTurn),
            None if !patience.is_zero() => pool::check_out(pool, Some(patience)).await.ok(),
            idle => idle,
        };
        let mut conn = conn.ok_or(NotSent::Failed)?;
        let session = &mut Asynchronous::pooled(&mut conn);
        let completed = operations::complete(session, id).await;
        completed.map_err(|_| NotSent::Failed)
    });
    match timeout(LONGEST_TURN, &mut completed).await {
        Ok(completed) => completed,
        Err(_) => {
            drop(turn);
            completed.await
        }
    }
}
