//! For how long a permit or a lease may be relied on, and its renewing.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::alarm::{Alarm, Sleepers, jittered, lock};
use crate::error::Result;
use crate::mode::Mode;

/// What a holder believes in: by the monotonic clock of this machine, from when its last good renewal was sent.
#[derive(Debug)]
pub(crate) struct Trust {
    timeout: Duration,
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
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Released,
    Lost,
}

impl Trust {
    pub(crate) fn new(sent: Instant, timeout: Duration) -> Self {
        let state = State {
            until: sent + trusted(timeout),
            end: None,
        };
        Self {
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
            (None, _) => {
                state.end = Some(End::Lost);
                drop(state);
                self.sleepers.wake();
                false
            }
            (Some(_), _) => false,
        }
    }

    /// Its holder ends it: there is nothing to renew any more.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        let is_lost = state.until <= Instant::now();
        state
            .end
            .get_or_insert(if is_lost { End::Lost } else { End::Released });
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
    renew: impl Fn(Option<Duration>) -> F + Send,
) where
    F: Future<Output = Result<Option<Instant>>> + Send,
{
    let pause = (trust.timeout / 20).min(Duration::from_millis(100));
    loop {
        M::sleep(&trust.due, None).await;
        if trust.is_over() {
            return;
        }
        let until = trust.until();
        let limit = until.saturating_duration_since(Instant::now());
        match M::within(Some(until), renew(Some(limit))).await {
            Some(Ok(renewed)) if trust.renewed(renewed) => {}
            Some(Err(_)) => trust.due.set(Instant::now() + jittered(pause)),
            _ => return,
        }
        // The end may have set it before.
        if trust.is_over() {
            return;
        }
    }
}
