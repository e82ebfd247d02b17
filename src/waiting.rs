//! The one wait: for locks, slots and units.
//!
//! Those of this process who wait for the same thing stand in a queue, in the order in which they came. Only the oldest does
//! something, on a connection that it holds only meanwhile; all others sleep.
//!
//! - For a session lock it waits on the server, where processes take turns, if the pool can spare a connection for that. If the
//!   pool cannot, it polls.
//! - For a slot of a semaphore it polls, at the hint of the refusal, because no queue on the server outlives a transaction.
//! - For units of a rate limit it sleeps until they are refilled.
//!
//! A release in this process wakes the oldest at once. No order is promised.

use std::any::TypeId;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use crate::alarm::{Alarm, jittered, lock};
use crate::key::LockId;
use crate::mode::Mode;
use crate::pool::Pool;

/// How long the oldest waits on the server at a time. A waiter holds a snapshot, for which a `CREATE INDEX CONCURRENTLY` of the
/// holder waits: a deadlock, unless the slice is shorter than `deadlock_timeout`. A session whose future was dropped waits on
/// until the end of its slice.
const SLICE: Duration = Duration::from_millis(200);
/// What remains for the reply of the server before a deadline.
const MARGIN: Duration = Duration::from_millis(10);
/// The pauses of the oldest where it polls.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// The pause of all others. A pool has no identity, so they may wait for the same key in another database.
const REST: Duration = Duration::from_secs(1);

/// What is waited for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum What {
    Lock(LockId),
    Slot(Arc<str>),
    /// The name of the limit, and the key.
    Units(&'static str, Arc<str>),
}

/// What is waited for, over which kind of pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Topic(What, TypeId);

impl Topic {
    pub(crate) fn of<P: Pool>(what: What) -> Self {
        Self(what, TypeId::of::<P>())
    }

    /// On connections that callers lend.
    pub(crate) fn lent(what: What) -> Self {
        Self(what, TypeId::of::<()>())
    }
}

type Queues = HashMap<Topic, VecDeque<Arc<Alarm>>>;

/// Those who wait in this process, for each topic the oldest first.
static QUEUES: LazyLock<Mutex<Queues>> = LazyLock::new(Mutex::default);
/// The number of topics, which spares those who need no queue a look.
static NUMBER: AtomicUsize = AtomicUsize::new(0);

/// Something was released in this process: the oldest who waits for it tries at once.
pub(crate) fn released(topic: &Topic) {
    if NUMBER.load(Ordering::SeqCst) > 0 {
        if let Some(oldest) = lock(&QUEUES).get(topic).and_then(VecDeque::front) {
            oldest.set(Instant::now());
        }
    }
}

/// The turns of one who waits. Its drop leaves the queue.
///
/// ```text
/// let mut turns = Turns::new(topic, deadline);
/// while turns.next::<M>().await { /* try, and return what was granted */ }
/// // the deadline is over
/// ```
#[derive(Debug)]
pub(crate) struct Turns {
    topic: Topic,
    deadline: Option<Instant>,
    /// When the last try began.
    began: Option<Instant>,
    pause: Duration,
    /// What the server has said about the next try.
    retry_after: Option<Duration>,
    place: Option<Arc<Alarm>>,
    /// Whether any try was refused, and not only cut off by the deadline.
    was_refused: bool,
}

impl Turns {
    pub(crate) fn new(topic: Topic, deadline: Option<Instant>) -> Self {
        Self {
            topic,
            deadline,
            began: None,
            pause: FIRST_PAUSE,
            retry_after: None,
            place: None,
            was_refused: false,
        }
    }

    pub(crate) fn refused(&mut self) {
        self.was_refused = true;
    }

    /// Goes over to the queue of this, of several things that are waited for.
    pub(crate) fn wait_for(&mut self, topic: Topic) {
        if topic != self.topic {
            self.leave();
            self.topic = topic;
            // No sooner than after a refusal by the one before.
            let due = Instant::now() + jittered(self.pause);
            self.join(|alarm, _| alarm.set(due));
        }
    }

    pub(crate) const fn was_refused(&self) -> bool {
        self.was_refused
    }

    /// As [`new`](Self::new), for one whose first try is made at once, before the first turn.
    pub(crate) fn after_a_try(topic: Topic, deadline: Option<Instant>) -> Self {
        let mut turns = Self::new(topic, deadline);
        turns.began = Some(Instant::now());
        turns
    }

    /// Sleeps until it is time for the next try. Returns `false` once the deadline is over, but never before the first try.
    pub(crate) async fn next<M: Mode>(&mut self) -> bool {
        if self.began.is_some() || self.is_contended() {
            let alarm = self.postpone();
            M::sleep(&alarm, self.deadline).await;
        }
        let now = Instant::now();
        let is_first = self.began.replace(now).is_none();
        is_first || self.deadline.is_none_or(|deadline| deadline > now)
    }

    /// For how long this one may wait on the server now. `None` unless it is the oldest.
    pub(crate) fn slice(&mut self) -> Option<Duration> {
        let rest = self.deadline.map_or(SLICE, |deadline| {
            let rest = deadline.saturating_duration_since(Instant::now());
            rest.saturating_sub(MARGIN)
        });
        let is_oldest = self.join(|_, is_oldest| is_oldest);
        (is_oldest && rest >= MARGIN).then_some(rest.min(SLICE))
    }

    /// It has waited on the server, and needs no pause now.
    pub(crate) fn has_waited(&mut self) {
        self.retry_after = Some(Duration::ZERO);
    }

    /// The next try is useless before that.
    pub(crate) fn not_before(&mut self, retry_after: Duration) {
        self.retry_after = Some(retry_after);
    }

    /// The next try is worth it after that, or sooner.
    pub(crate) fn not_after(&mut self, retry_after: Duration) {
        let soonest = Duration::from_millis(1);
        self.retry_after = Some(jittered(self.pause).min(retry_after.max(soonest)));
    }

    /// Whether others wait for the same already.
    fn is_contended(&self) -> bool {
        NUMBER.load(Ordering::SeqCst) > 0 && lock(&QUEUES).contains_key(&self.topic)
    }

    /// Sets the alarm for the next try, unless a release has set it since the last one began.
    fn postpone(&mut self) -> Arc<Alarm> {
        let (began, deadline, now) = (self.began, self.deadline, Instant::now());
        let pause = self
            .retry_after
            .take()
            .unwrap_or_else(|| jittered(self.pause));
        self.pause = self.pause.mul_f64(1.5).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.join(|alarm, is_oldest| {
            if began.is_none_or(|began| alarm.due(None) <= began) {
                alarm.set(if !is_oldest {
                    // Once in a while, and once before the deadline.
                    let half = deadline.map(|deadline| deadline.saturating_duration_since(now) / 2);
                    now + half.unwrap_or(REST).min(REST)
                } else if began.is_none() {
                    now
                } else {
                    now.checked_add(pause).unwrap_or(now + REST)
                });
            }
            alarm.clone()
        })
    }

    /// Joins the queue, and looks whether this one is the oldest.
    fn join<T>(&mut self, look: impl FnOnce(&Arc<Alarm>, bool) -> T) -> T {
        let mut queues = lock(&QUEUES);
        let queue = queues.entry(self.topic.clone()).or_default();
        let alarm = self.place.get_or_insert_with(|| {
            let alarm = Arc::new(Alarm::new(Instant::now()));
            queue.push_back(alarm.clone());
            alarm
        });
        let oldest = queue.front();
        let is_oldest = oldest.is_some_and(|oldest| Arc::ptr_eq(oldest, alarm));
        let looked = look(alarm, is_oldest);
        NUMBER.store(queues.len(), Ordering::SeqCst);
        looked
    }

    /// The next one is then the oldest, and tries at once. Also if this one was granted what it waited for, because the next one
    /// then waits on the server, or finds another slot.
    fn leave(&mut self) {
        let Some(place) = self.place.take() else {
            return;
        };
        let mut queues = lock(&QUEUES);
        let Some(queue) = queues.get_mut(&self.topic) else {
            return;
        };
        let was_oldest = queue
            .front()
            .is_some_and(|oldest| Arc::ptr_eq(oldest, &place));
        queue.retain(|other| !Arc::ptr_eq(other, &place));
        match queue.front() {
            Some(oldest) if was_oldest => oldest.set(Instant::now()),
            Some(_) => {}
            None => drop(queues.remove(&self.topic)),
        }
        NUMBER.store(queues.len(), Ordering::SeqCst);
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        self.leave();
    }
}
