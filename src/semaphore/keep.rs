//! For how long a permit or a lease may be relied on, and its renewing.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::alarm::{Alarm, Sleepers, jittered, lock};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::metrics::Raised;
use crate::mode::Mode;

/// What a holder believes in: by the monotonic clock of this machine, from when its last good renewal was sent.
#[derive(Debug)]
pub(crate) struct Trust {
    subject: Subject,
    since: Instant,
    pub(crate) timeout: Duration,
    state: Mutex<State>,
    /// Those who wait for its end.
    pub(crate) sleepers: Sleepers,
    /// When the next renewal is due.
    due: Alarm,
}

#[derive(Debug)]
struct State {
    until: Instant,
    end: Option<End>,
    /// What ends it was sent, so there may be nothing to renew any more.
    is_ending: bool,
    /// Its loss was told when it was noticed.
    is_told: bool,
    /// Until its end.
    held: Option<Raised>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Released,
    Lost,
}

impl Trust {
    pub(crate) fn new(subject: Subject, sent: Instant, timeout: Duration) -> Self {
        let state = State {
            until: sent + trusted(timeout),
            end: None,
            is_ending: false,
            is_told: false,
            held: Some(Raised::held(subject)),
        };
        Self {
            subject,
            since: Instant::now(),
            timeout,
            state: Mutex::new(state),
            sleepers: Sleepers::default(),
            due: Alarm::new(sent + timeout / 3),
        }
    }

    pub(crate) fn until(&self) -> Instant {
        lock(&self.state).until
    }

    pub(crate) fn is_lost(&self) -> bool {
        let state = lock(&self.state);
        match state.end {
            Some(end) => end == End::Lost,
            None => state.until <= Instant::now(),
        }
    }

    /// Whether it is lost, or was released.
    pub(crate) fn is_over(&self) -> bool {
        let state = lock(&self.state);
        state.end.is_some() || state.until <= Instant::now()
    }

    /// Waits until it is over, or the deadline.
    pub(crate) async fn lost<M: Mode>(&self, deadline: Option<Instant>) {
        while !self.is_over() && deadline.is_none_or(|deadline| deadline > Instant::now()) {
            let sleeper = self.sleepers.join(self.until());
            if !self.is_over() {
                M::sleep(&sleeper.alarm, deadline).await;
            }
        }
    }

    /// A renewal has come back: when it was sent, or `None` if there was nothing to renew. Returns whether it is still held. What was
    /// lost once stays lost, because its holder was told so.
    ///
    /// The next one is due a third after this one was sent, because the reply of a slow server may take longer than that.
    pub(crate) fn renewed(&self, sent: Option<Instant>) -> bool {
        let mut state = lock(&self.state);
        match (state.end, sent) {
            (None, Some(sent)) if state.until > Instant::now() => {
                state.until = state.until.max(sent + trusted(self.timeout));
                self.due.set(sent + self.timeout / 3);
                true
            }
            (None, _) if !state.is_ending => {
                self.lose(state);
                false
            }
            _ => false,
        }
    }

    /// Nobody renews it any more: if it was not ended, it is lost.
    fn forsake(&self) {
        let state = lock(&self.state);
        if state.end.is_none() && !state.is_ending {
            self.lose(state);
        }
    }

    fn lose(&self, mut state: MutexGuard<'_, State>) {
        state.end = Some(End::Lost);
        state.is_told = true;
        state.held = None;
        drop(state);
        self.sleepers.wake();
        let lost = Err(Error::PermitLost(self.subject.name.to_owned()));
        self.subject
            .ended("keep_alive", Instant::now(), self.since, &lost);
    }

    /// Tells its end, unless its loss was told: whose it is, and since when it was held.
    pub(crate) fn tell(&self, tell: impl FnOnce(Subject, Instant)) {
        if !lock(&self.state).is_told {
            tell(self.subject, self.since);
        }
    }

    /// Its holder is about to end it, which a renewal on its way must not take for a loss.
    pub(crate) fn ends(&self) {
        lock(&self.state).is_ending = true;
    }

    /// Its holder ends it: there is nothing to renew any more.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        let is_lost = state.until <= Instant::now();
        state
            .end
            .get_or_insert(if is_lost { End::Lost } else { End::Released });
        state.held = None;
        drop(state);
        self.due.set(Instant::now());
        self.sleepers.wake();
    }
}

/// For how long it is relied on after it was claimed or renewed.
fn trusted(timeout: Duration) -> Duration {
    timeout - (timeout / 10).min(Duration::from_secs(1))
}

/// Renews it until it is over. A renewal that fails is repeated.
///
/// A renewal waits for a connection until the trust ends, because one that gave up sooner would lose its place in the queue of the
/// pool, and starve.
pub(crate) async fn keep<M: Mode, F>(
    trust: Arc<Trust>,
    renew: impl Fn(Option<Duration>) -> F + Send + Sync,
) where
    F: Future<Output = Result<Option<Instant>>> + Send,
{
    let pause = (trust.timeout / 20).min(Duration::from_millis(100));
    loop {
        M::sleep(&trust.due, None).await;
        if trust.is_over() {
            break;
        }
        let until = trust.until();
        let limit = until.saturating_duration_since(Instant::now());
        let renewal = insist::<M, _>(&renew, limit, trust.timeout * 2 / 5);
        match M::within(Some(until), renewal).await {
            Some(Ok(renewed)) if trust.renewed(renewed) => {}
            Some(Err(_)) => trust.due.set(Instant::now() + jittered(pause)),
            _ => break,
        }
        // The end may have set it before.
        if trust.is_over() {
            break;
        }
    }
    trust.forsake();
}

/// Renews it, and begins again beside the first try if that has no reply for so long, because a pool may lend a connection on which
/// the statement of a dropped future still runs. The first good reply counts. It is long, because on a slow server two tries are slower
/// than one. A blocking try is not interrupted.
async fn insist<M: Mode, F>(
    renew: &(impl Fn(Option<Duration>) -> F + Send + Sync),
    limit: Duration,
    patience: Duration,
) -> Result<Option<Instant>>
where
    F: Future<Output = Result<Option<Instant>>> + Send,
{
    let mut first = pin!(renew(Some(limit)));
    let replied = M::within(Some(Instant::now() + patience), first.as_mut()).await;
    if let Some(reply) = replied {
        return reply;
    }
    let mut second = pin!(renew(Some(limit.saturating_sub(patience))));
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
