//! A row that is held for a limited time: the common part of a permit, a leader's term and a run of
//! a schedule. How long the holder may rely on the row, and how the lease is renewed, lost and
//! ended.
//!
//! **Permits, terms and runs share one lease.** For all three, the same code decides how long a
//! holder trusts its row, when it renews the row, who reports a loss, and that no end is stored
//! after a loss was reported.
//!
//! **Trust ends before the database lets another holder in.** A holder trusts its permit until the
//! time when its last successful renewal was *sent*, plus the timeout, less a margin (a tenth of
//! the timeout, at most a second). The time is measured on the monotonic clock.
//!
//! **A renewal waits in the pool's own queue until trust ends.** With a shorter timeout it would
//! lose its place in that queue, and starve in competition with code that takes and returns
//! connections without a pause.
//!
//! **A renewal is due a third of the timeout after the last one was *sent***. If it were due a
//! third after the last *reply*, slow replies would delay the renewals until trust ends.
//!
//! **A renewal without a reply is sent again after two fifths of the timeout**, in the asynchronous
//! half, while the first try continues. The reason is that a pool may give out a connection on
//! which the statement of a dropped future still runs. If the second try began sooner, a slow
//! server would get twice the work.
//!
//! **A task or thread for each permit that renews itself.** Pools have no identity by which permits
//! could be grouped, and a hundred permits of 30 s cause only ten statements a second.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use diesel::sql_types::Bool;

use crate::alarm::{Alarm, Sleepers, jitter, lock};
use crate::call::{ask_again, ask_detached};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::metrics::Raised;
use crate::mode::Mode;
use crate::pool::Pool;
use crate::statement::Statement;
use crate::sync::{AtomicBool, Instant, Mutex, MutexGuard, Ordering::SeqCst};

/// The shortest timeout of a lease that renews itself, because its renewals must get through a busy
/// pool and a short outage.
pub(crate) const SHORTEST_KEPT: Duration = if cfg!(feature = "testing") {
    Duration::from_millis(300)
} else {
    Duration::from_secs(3)
};

/// How a lease finds its row, and recognizes it as its own.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// The name of the service or the schedule.
    pub(crate) name: Arc<str>,
    /// The fencing token.
    pub(crate) token: i64,
    /// A random number that the claim has stored in the row, because tokens may repeat after a
    /// failover that has lost commits.
    pub(crate) claim: i64,
}

/// Returns a random number for a new claim.
pub(crate) fn claim_number() -> i64 {
    fastrand::i64(1..)
}

/// Makes the statement that renews a row for a time. The statement returns whether the row was
/// held.
pub(crate) type Renewal = fn(&Row, Duration) -> Statement<Bool>;

/// What a granted claim has, and what its renewals need.
pub(crate) struct Grant<P: Pool> {
    pub(crate) pool: P,
    pub(crate) runtime: <P::Mode as Mode>::Runtime,
    pub(crate) subject: Subject,
    pub(crate) row: Row,
    pub(crate) timeout: Duration,
    pub(crate) renewal: Renewal,
    /// The longest time for which the row may be held, if there is one, and the statement that
    /// stores that it was exceeded.
    pub(crate) longest: Option<(Duration, Renewal)>,
    /// When the claim was sent.
    pub(crate) sent: Instant,
}

/// A row that is held for a limited time. The holder relies on the row for a little less time than
/// the database does, so the holder stops before the database lets another one in. The time is
/// counted by the monotonic clock of this machine, from when the claim or the last good renewal was
/// *sent*.
pub(crate) struct Lease<P: Pool> {
    pub(crate) grant: Grant<P>,
    since: Instant,
    /// When the holder has held the row for the longest time that it may.
    ends: Option<Instant>,
    state: Mutex<State>,
    /// The tasks or threads that wait for the end of the lease.
    pub(crate) sleepers: Sleepers,
    /// When the next renewal is due.
    renewal_due: Alarm,
    /// Whether a statement that ends the row was sent and has had no reply, so it may have been
    /// executed.
    is_unanswered: AtomicBool,
}

#[derive(Debug)]
struct State {
    until: Instant,
    phase: Phase,
    /// Whether the end of the lease is not to be reported as an event: it was reported, or it is a
    /// term or a run that has not begun.
    is_reported: bool,
    /// Whether the holder has asked, and so knows of the loss.
    was_heard: bool,
}

#[derive(Debug)]
enum Phase {
    Held(Raised),
    /// The end is being sent, so a renewal that finds no row means no loss.
    #[allow(dead_code)] // its drop lowers the gauge
    Ending(Raised),
    Released,
    Lost,
}

impl<P: Pool> Lease<P> {
    pub(crate) fn new(grant: Grant<P>) -> Arc<Self> {
        let since = Instant::now();
        let ends = grant
            .longest
            .and_then(|(limit, _)| since.checked_add(limit));
        let state = State {
            until: not_after(grant.sent + trusted(grant.timeout), ends),
            phase: Phase::Held(Raised::held(grant.subject)),
            is_reported: grant.subject.begins_later(),
            was_heard: false,
        };
        Arc::new(Self {
            renewal_due: Alarm::new(not_after(grant.sent + grant.timeout / 3, ends)),
            grant,
            since,
            ends,
            state: Mutex::new(state),
            sleepers: Sleepers::default(),
            is_unanswered: AtomicBool::new(false),
        })
    }

    /// Begins a term or a run, unless its lease is over, because the reply to the claim was late.
    /// What has not begun was never held, so its end is not reported, by whomever it is noticed.
    pub(crate) fn begin(&self) -> bool {
        let mut state = lock(&self.state);
        let is_held = matches!(state.phase, Phase::Held(_)) && state.until > Instant::now();
        state.is_reported = !is_held;
        is_held
    }

    pub(crate) fn until(&self) -> Instant {
        lock(&self.state).until
    }

    /// Tells the holder whether the lease is lost. Whoever notices the loss first also reports it
    /// as an event.
    pub(crate) fn is_lost(&self) -> bool {
        let mut state = lock(&self.state);
        let is_lost = match state.phase {
            Phase::Lost => true,
            Phase::Released => false,
            Phase::Held(_) | Phase::Ending(_) => state.until <= Instant::now(),
        };
        state.was_heard |= is_lost;
        if is_lost && !matches!(state.phase, Phase::Lost) {
            self.lose(state, "is_lost");
        }
        is_lost
    }

    /// Whether the holder knows that the lease is lost.
    pub(crate) fn was_heard(&self) -> bool {
        lock(&self.state).was_heard
    }

    /// Whether the lease is lost or released.
    pub(crate) fn is_over(&self) -> bool {
        let state = lock(&self.state);
        matches!(state.phase, Phase::Released | Phase::Lost) || state.until <= Instant::now()
    }

    /// Whether the row was held for longer than it may be. The lease is then lost.
    pub(crate) fn has_overrun(&self) -> bool {
        self.ends.is_some_and(|ends| ends <= Instant::now())
    }

    /// Waits until the lease is over, or until the deadline.
    pub(crate) async fn wait_until_over(&self, deadline: Option<Instant>) {
        while !self.is_over() && deadline.is_none_or(|deadline| deadline > Instant::now()) {
            let sleeper = self.sleepers.join(self.until());
            if !self.is_over() {
                P::Mode::sleep(&sleeper.alarm, deadline).await;
            }
        }
    }

    /// Waits until the lease is lost, for at most `timeout`. Tells the holder whether it is lost.
    pub(crate) async fn wait_for_loss(&self, timeout: Duration) -> bool {
        self.wait_until_over(Instant::now().checked_add(timeout))
            .await;
        self.is_lost()
    }

    /// Waits until the lease is lost or released. Tells the holder of a loss.
    pub(crate) async fn lost(&self) {
        self.wait_until_over(None).await;
        self.is_lost();
    }

    /// Sends a renewal. Returns when it was sent, or `None` if the row was not held any more.
    async fn send_renewal(self: Arc<Self>, deadline: Option<Instant>) -> Result<Option<Instant>> {
        let renew = (self.grant.renewal)(&self.grant.row, self.grant.timeout);
        let reply = |was_held: bool, sent| was_held.then_some(sent);
        ask_detached(&self.grant.pool, deadline, renew, reply).await
    }

    /// Renews the lease once, unless it is lost.
    pub(crate) async fn renew(self: &Arc<Self>) -> Result<()> {
        if !self.is_lost() {
            let renewed = self.clone().send_renewal(None).await?;
            if self.note_renewal(renewed) {
                return Ok(());
            }
        }
        Err(self.loss())
    }

    pub(crate) fn loss(&self) -> Error {
        Error::PermitLost(self.grant.row.name.to_string())
    }

    /// Notes the reply to a renewal: when it was sent, or `None` if the row was not held. Returns
    /// whether the lease is still held. A lost lease stays lost, because its holder may know of the
    /// loss.
    ///
    /// The next renewal is due a third of the timeout after this one was *sent*, because the reply
    /// of a slow server may take longer than that.
    fn note_renewal(&self, sent: Option<Instant>) -> bool {
        let mut state = lock(&self.state);
        match (&state.phase, sent) {
            (Phase::Held(_) | Phase::Ending(_), Some(sent)) if state.until > Instant::now() => {
                let until = state.until.max(sent + trusted(self.grant.timeout));
                state.until = not_after(until, self.ends);
                let renewal_due = sent + self.grant.timeout / 3;
                self.renewal_due.set(not_after(renewal_due, self.ends));
                true
            }
            (Phase::Held(_), _) => {
                self.lose(state, "keep_alive");
                false
            }
            _ => false,
        }
    }

    fn lose(&self, mut state: MutexGuard<'_, State>, operation: &'static str) {
        state.phase = Phase::Lost;
        let was_reported = std::mem::replace(&mut state.is_reported, true);
        drop(state);
        self.sleepers.wake();
        if !was_reported {
            let operation = if self.has_overrun() {
                "longest"
            } else {
                operation
            };
            self.grant
                .subject
                .end(operation, Instant::now(), self.since, &Err(self.loss()));
        }
    }

    /// Reports the end of the lease by a function of the subject and the beginning, unless it was
    /// reported before.
    pub(crate) fn report(&self, report: impl FnOnce(Subject, Instant)) {
        let was_reported = std::mem::replace(&mut lock(&self.state).is_reported, true);
        if !was_reported {
            report(self.grant.subject, self.since);
        }
    }

    /// Notes that the holder is about to send the end. A renewal on its way may then find no row,
    /// which must not be taken for a loss.
    pub(crate) fn begin_end(&self) {
        let phase = &mut lock(&self.state).phase;
        *phase = match std::mem::replace(phase, Phase::Lost) {
            Phase::Held(raised) => Phase::Ending(raised),
            other => other,
        };
    }

    /// Ends the lease: nothing is renewed any more. If the holder is too late, the lease is lost.
    pub(crate) fn end(&self, operation: &'static str) {
        let mut state = lock(&self.state);
        let is_too_late = state.until <= Instant::now();
        self.renewal_due.set(Instant::now());
        match state.phase {
            Phase::Held(_) if is_too_late => return self.lose(state, operation),
            Phase::Held(_) | Phase::Ending(_) => state.phase = Phase::Released,
            Phase::Released | Phase::Lost => {}
        }
        drop(state);
        self.sleepers.wake();
    }

    /// Sends a statement that ends the row and returns whether the row was held. Waits for a
    /// connection until `connect_by`, and for the reply until the deadline. The row is ended only
    /// once, so the statement may be sent again.
    ///
    /// If the row was not held, and the lease has not run out, an earlier end whose reply was lost
    /// may have ended the row, which is a success.
    pub(crate) async fn send_end(
        &self,
        end: Statement<Bool>,
        connect_by: Option<Instant>,
        deadline: Option<Instant>,
    ) -> Result<()> {
        let unanswered = &self.is_unanswered;
        match ask_again(&self.grant.pool, connect_by, deadline, end, unanswered).await {
            Ok(true) => Ok(()),
            Ok(false) if unanswered.load(SeqCst) && self.until() > Instant::now() => Ok(()),
            Ok(false) => Err(self.loss()),
            Err(error) => Err(error),
        }
    }

    /// Renews the lease in the background until it is over, on a thread or in a task. A failed
    /// renewal is repeated.
    ///
    /// A renewal waits for a connection until the lease would be lost. If it gave up sooner, it
    /// would lose its place in the queue of the pool each time, and might never get a connection.
    pub(crate) fn renew_in_background(self: &Arc<Self>) {
        P::Mode::in_background(&self.grant.runtime, self.clone().keep_renewing());
    }

    async fn keep_renewing(self: Arc<Self>) {
        let pause = (self.grant.timeout / 20).min(Duration::from_millis(100));
        loop {
            P::Mode::sleep(&self.renewal_due, None).await;
            if self.is_over() {
                break;
            }
            let until = Some(self.until());
            match P::Mode::within(until, self.insist(until)).await {
                Some(Ok(renewed)) if self.note_renewal(renewed) => {}
                Some(Err(_)) => self.renewal_due.set(Instant::now() + jitter(pause)),
                _ => break,
            }
            // An end wakes this loop by setting `renewal_due`, which the match above may have
            // overwritten. So look again before the next sleep.
            if self.is_over() {
                break;
            }
        }
        self.stop_renewing();
        self.store_overrun().await;
    }

    /// From now on nobody renews the lease, so if it was not ended, it is lost.
    fn stop_renewing(&self) {
        let state = lock(&self.state);
        if matches!(state.phase, Phase::Held(_)) {
            self.lose(state, "keep_alive");
        }
    }

    /// Stores that the holder was told to stop because it has held the row for too long. The holder
    /// may go on nevertheless, so the row is held until the lease expires.
    async fn store_overrun(&self) {
        let is_lost = matches!(lock(&self.state).phase, Phase::Lost);
        let Some((limit, note)) = self.grant.longest.filter(|_| is_lost && self.has_overrun())
        else {
            return;
        };
        let note = note(&self.grant.row, limit);
        let deadline = Instant::now().checked_add(self.grant.timeout);
        drop(self.send_end(note, deadline, deadline).await);
    }

    /// Sends a renewal, and a second one in parallel if the first has had no reply for two fifths
    /// of the timeout. The first good reply counts.
    ///
    /// The second is needed because a pool may give a connection on which the statement of a
    /// dropped future still runs. The delay is long because on a slow server two renewals take
    /// longer than one. A blocking renewal is not interrupted, so it gets no second one.
    async fn insist(self: &Arc<Self>, until: Option<Instant>) -> Result<Option<Instant>> {
        let patience = self.grant.timeout * 2 / 5;
        let mut first = pin!(self.clone().send_renewal(until));
        let replied = P::Mode::within(Some(Instant::now() + patience), first.as_mut()).await;
        if let Some(reply) = replied {
            return reply;
        }
        let mut second = pin!(self.clone().send_renewal(until));
        let mut failed = [false; 2];
        poll_fn(|context| {
            let tries = [
                first.as_mut() as Pin<&mut (dyn Future<Output = _> + Send)>,
                second.as_mut(),
            ];
            for (renewal, has_failed) in tries.into_iter().zip(&mut failed) {
                if *has_failed {
                    continue;
                }
                match renewal.poll(context) {
                    Poll::Ready(Err(_)) => *has_failed = true,
                    Poll::Ready(renewed) => return Poll::Ready(renewed),
                    Poll::Pending => {}
                }
            }
            match failed {
                [true, true] => Poll::Ready(Err(Error::TimedOut)),
                _ => Poll::Pending,
            }
        })
        .await
    }
}

fn not_after(time: Instant, ends: Option<Instant>) -> Instant {
    ends.map_or(time, |ends| time.min(ends))
}

/// How long the holder relies on a row after a claim or a renewal was sent.
fn trusted(timeout: Duration) -> Duration {
    timeout - (timeout / 10).min(Duration::from_secs(1))
}
