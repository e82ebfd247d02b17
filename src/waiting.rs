//! The one wait: for locks, slots and units.
//!
//! The first try is made at once. Those of this process who were refused stand in a queue, in the
//! order in which they came: one for each thing that is waited for in each database. Only the
//! oldest does something, on a connection that it holds only meanwhile; all others sleep.
//!
//! - For a session lock it waits on the server, where processes take turns, if the pool can spare a
//!   connection for that. If the pool cannot, it polls.
//! - For a slot of a semaphore it polls, at the hint of the refusal, because no queue on the server
//!   outlives a transaction.
//! - For units of a rate limit it sleeps until they are refilled.
//!
//! A release in this process wakes the oldest at once. The oldest may be a future that nobody
//! polls, or its pool may be empty. So the n-th tries, too, after about n − 1 seconds. No order is
//! promised.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use crate::alarm::{Alarm, jitter, lock};
use crate::key::LockId;
use crate::mode::Mode;
use crate::statement::Database;

/// How long the oldest waits on the server at a time. A waiter holds a snapshot, for which a
/// `CREATE INDEX CONCURRENTLY` of the holder waits: a deadlock, unless the slice is shorter than
/// `deadlock_timeout`. A session whose future was dropped waits on until the end of its slice.
const SLICE: Duration = Duration::from_millis(200);
/// The pauses of the oldest where it polls.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);

/// What is waited for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum What {
    Lock(LockId),
    Slot(Arc<str>),
    /// The name of the limit, and the key.
    Units(&'static str, Arc<str>),
}

/// Those who wait for a thing in a database.
#[derive(Debug)]
struct Queue {
    database: Database,
    /// The oldest first.
    waiting: VecDeque<Arc<Alarm>>,
    share: Share,
}

/// The queues of each thing, one for each database.
type Queues = HashMap<What, Vec<Queue>>;

/// The share of this process in slots, for which processes have no queue on the server. A release
/// wakes a waiter of this process at once, while those of others poll. So a process that has lived
/// on its own releases for a span leaves what is free to the others for as long as one of their
/// polls takes. If none of them takes it, the next span is longer.
#[derive(Debug)]
struct Share {
    since: Option<Instant>,
    span: Duration,
    /// Until when what is free is left to others.
    yields_until: Option<Instant>,
}

impl Share {
    const SHORTEST: Duration = Duration::from_millis(500);
    const LONGEST: Duration = Duration::from_secs(10);
    /// The longest pause of a poll, and some for its round trip.
    const YIELD: Duration = Duration::from_millis(140);
    /// How much later newcomers try.
    const AFTER_THE_OLDEST: Duration = Duration::from_millis(20);

    /// A slot was released in this process. Returns when its oldest may try.
    fn note_release(&mut self, now: Instant) -> Instant {
        if let Some(until) = self.yields_until {
            return until.max(now);
        }
        let since = *self.since.get_or_insert(now);
        if now.duration_since(since) < self.span {
            return now;
        }
        let until = now + Self::YIELD;
        self.yields_until = Some(until);
        until
    }

    /// The oldest has tried: whether others had taken what was left to them.
    fn note_try(&mut self, now: Instant, is_taken: bool) {
        if self.yields_until.is_some_and(|until| until <= now) {
            self.yields_until = None;
            self.since = if is_taken { None } else { Some(now) };
            self.span = if is_taken {
                Self::SHORTEST
            } else {
                (self.span * 2).min(Self::LONGEST)
            };
        }
    }
}

/// Those who wait in this process.
static QUEUES: LazyLock<Mutex<Queues>> = LazyLock::new(Mutex::default);
/// The number of things, which spares those who need no queue a look.
static NUMBER: AtomicUsize = AtomicUsize::new(0);

/// Something was released in this process: in each database the oldest who waits for it tries at
/// once.
pub(crate) fn wake_oldest(what: &What) {
    if NUMBER.load(Ordering::SeqCst) > 0 {
        let now = Instant::now();
        let mut oldest = Vec::new();
        for queue in lock(&QUEUES).get_mut(what).into_iter().flatten() {
            let due = match what {
                What::Slot(_) => queue.share.note_release(now),
                What::Lock(_) | What::Units(..) => now,
            };
            oldest.extend(queue.waiting.front().map(|alarm| (alarm.clone(), due)));
        }
        // A waker runs code of others, and so never under the mutex.
        for (alarm, due) in oldest {
            alarm.set(due);
        }
    }
}

/// Waits while this process leaves the slots of a service to others, and a moment more, so that the
/// oldest tries before this newcomer, and does not take its grant for one of another process.
pub(crate) async fn let_others_pass<M: Mode>(what: &What, deadline: Option<Instant>) {
    if NUMBER.load(Ordering::SeqCst) == 0 {
        return;
    }
    let until = {
        let queues = lock(&QUEUES);
        let of_what = queues.get(what).into_iter().flatten();
        of_what.filter_map(|queue| queue.share.yields_until).max()
    };
    if let Some(until) = until {
        M::sleep(&Alarm::new(until + Share::AFTER_THE_OLDEST), deadline).await;
    }
}

/// The turns of one who waits. Its drop leaves the queue.
///
/// ```text
/// let mut turns = Turns::new(deadline);
/// while turns.next::<M>().await { /* try, and return what was granted, or call `note_refusal` */ }
/// // the deadline is over
/// ```
#[derive(Debug)]
pub(crate) struct Turns {
    deadline: Option<Instant>,
    /// When the last try began.
    began: Option<Instant>,
    pause: Duration,
    /// What the server has said about the next try.
    retry_after: Option<Duration>,
    /// How long the quickest refusal took: a round trip, or two if the statement was prepared
    /// first.
    trip: Duration,
    place: Option<Place>,
    /// Whether any try was refused, and not only cut off by the deadline.
    was_refused: bool,
}

#[derive(Debug)]
struct Place {
    what: What,
    database: Database,
    alarm: Arc<Alarm>,
}

impl Place {
    /// Looks at the queue, and at the place in it.
    fn look<T>(&self, look: impl FnOnce(&mut Queue, usize) -> T) -> Option<T> {
        let mut queues = lock(&QUEUES);
        let of_what = queues.get_mut(&self.what)?;
        let queue = of_what
            .iter_mut()
            .find(|queue| queue.database == self.database)?;
        let alarms = queue.waiting.iter();
        let index = { alarms }.position(|alarm| Arc::ptr_eq(alarm, &self.alarm))?;
        Some(look(queue, index))
    }
}

impl Turns {
    pub(crate) const fn new(deadline: Option<Instant>) -> Self {
        Self {
            deadline,
            began: None,
            pause: FIRST_PAUSE,
            retry_after: None,
            trip: Duration::ZERO,
            place: None,
            was_refused: false,
        }
    }

    /// The server has refused this, to a statement that was sent then. Joins the queue, unless it
    /// stands in it.
    pub(crate) fn note_refusal(&mut self, what: What, database: Database, sent: Instant) {
        // The shortest, because a reply may have waited for others.
        self.trip = if self.was_refused {
            self.trip.min(sent.elapsed())
        } else {
            sent.elapsed()
        };
        self.was_refused = true;
        if let Some(place) = &self.place {
            if place.what == what && place.database == database {
                place.look(|queue, index| {
                    if index == 0 {
                        queue.share.note_try(Instant::now(), true);
                    }
                });
                return;
            }
            // Another one of several things.
            self.leave();
        }
        self.join(what, database);
    }

    /// The server was busy with this for too long to say. Joins a queue, unless it stands in one.
    pub(crate) fn note_lock(&mut self, what: What) {
        // Which database it was is not told.
        const UNKNOWN: Database = Database(i32::MIN);
        if self.place.is_none() {
            self.join(what, UNKNOWN);
        }
    }

    fn join(&mut self, what: What, database: Database) {
        let now = Instant::now();
        // Not after `began`, so that the oldest pauses, unless a release sets it meanwhile.
        let alarm = Arc::new(Alarm::new(self.began.unwrap_or(now)));
        let mut queues = lock(&QUEUES);
        let of_what = queues.entry(what.clone()).or_default();
        let i = match of_what.iter().position(|queue| queue.database == database) {
            Some(i) => i,
            None => {
                of_what.push(Queue {
                    database,
                    waiting: VecDeque::new(),
                    share: Share {
                        since: None,
                        span: Share::SHORTEST,
                        yields_until: None,
                    },
                });
                of_what.len() - 1
            }
        };
        let queue = &mut of_what[i].waiting;
        if !queue.is_empty() {
            alarm.set(now + after(queue.len()));
        }
        queue.push_back(alarm.clone());
        NUMBER.store(queues.len(), Ordering::SeqCst);
        drop(queues);
        self.place = Some(Place {
            what,
            database,
            alarm,
        });
    }

    pub(crate) const fn was_refused(&self) -> bool {
        self.was_refused
    }

    /// Whether there is no time for another reply: the deadline is within two and a half round
    /// trips.
    pub(crate) fn is_over(&self) -> bool {
        let end = Instant::now() + self.trip.mul_f64(2.5);
        self.deadline.is_some_and(|deadline| deadline <= end)
    }

    /// Sleeps until it is time for the next try: at once before the first. Returns `false` once the
    /// deadline is too close, but never before the first try.
    pub(crate) async fn next<M: Mode>(&mut self) -> bool {
        if self.began.is_some() {
            let alarm = self.postpone();
            if !self.is_over() {
                // A release may come until then.
                let margin = self.trip.mul_f64(2.5);
                let last = self
                    .deadline
                    .and_then(|deadline| deadline.checked_sub(margin));
                M::sleep(&alarm, last).await;
            }
        }
        let is_first = self.began.replace(Instant::now()).is_none();
        is_first || !self.is_over()
    }

    /// For how long this one may wait on the server now. `None` unless it is the oldest.
    pub(crate) fn slice(&self) -> Option<Duration> {
        let rest = self.deadline.map_or(SLICE, |deadline| {
            let rest = deadline.saturating_duration_since(Instant::now());
            rest.saturating_sub(self.trip.mul_f64(2.5))
        });
        (self.index() == Some(0) && rest >= FIRST_PAUSE).then_some(rest.min(SLICE))
    }

    /// It has waited on the server, and needs no pause now.
    pub(crate) fn note_wait(&mut self) {
        self.retry_after = Some(Duration::ZERO);
    }

    /// The next try is useless before that. If it is long, those behind this one go first, who may
    /// want less.
    pub(crate) fn not_before(&mut self, retry_after: Duration) {
        self.retry_after = Some(retry_after);
        if let (Some(place), true) = (&self.place, retry_after > SECOND) {
            place.look(|queue, index| {
                if let Some(alarm) = queue.waiting.remove(index) {
                    queue.waiting.push_back(alarm);
                }
            });
        }
    }

    /// Retries after `retry_after` at the latest.
    pub(crate) fn not_after(&mut self, retry_after: Duration) {
        let soonest = Duration::from_millis(1);
        self.retry_after = Some(jitter(self.pause).min(retry_after.max(soonest)));
    }

    /// The place in the queue, from 0 for the oldest.
    fn index(&self) -> Option<usize> {
        self.place.as_ref()?.look(|_, index| index)
    }

    /// Sets the alarm for the next try, unless a release has set it since the last one began.
    fn postpone(&mut self) -> Arc<Alarm> {
        let pause = self
            .retry_after
            .take()
            .unwrap_or_else(|| jitter(self.pause));
        self.pause = self.pause.mul_f64(1.5).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        let pause = match self.index() {
            None | Some(0) => pause,
            Some(index) => after(index),
        };
        let now = Instant::now();
        let due = now.checked_add(pause).unwrap_or(now + SECOND);
        let Some(place) = &self.place else {
            return Arc::new(Alarm::new(due));
        };
        place.alarm.postpone(self.began.unwrap_or(now), due);
        place.alarm.clone()
    }

    /// The next one is then the oldest, and tries at once. Also if this one was granted what it
    /// waited for, because the next one then waits on the server, or finds another slot.
    fn leave(&mut self) {
        let Some(place) = self.place.take() else {
            return;
        };
        let (mut nearer, mut yields_until) = (Vec::new(), None);
        {
            let mut queues = lock(&QUEUES);
            let Some(of_what) = queues.get_mut(&place.what) else {
                return;
            };
            let mut is_empty = false;
            if let Some(queue) = of_what.iter_mut().find(|it| it.database == place.database) {
                let (share, queue) = (&mut queue.share, &mut queue.waiting);
                let index = queue.iter().position(|it| Arc::ptr_eq(it, &place.alarm));
                if let Some(index) = index {
                    queue.remove(index);
                    if index == 0 {
                        share.note_try(Instant::now(), false);
                    }
                    // Those behind it have come nearer. Each is woken when it is the 1st, 2nd, 3rd,
                    // 5th, 9th …, which is soon enough.
                    let told = [0].into_iter().chain((0..).map(|n| 1 << n));
                    let told = told.take_while(|i| *i < queue.len());
                    nearer.extend(told.filter(|i| *i >= index).map(|i| (i, queue[i].clone())));
                }
                yields_until = share.yields_until;
                is_empty = queue.is_empty();
            }
            if is_empty {
                of_what.retain(|queue| !queue.waiting.is_empty());
                if of_what.is_empty() {
                    queues.remove(&place.what);
                }
            }
            NUMBER.store(queues.len(), Ordering::SeqCst);
        }
        let now = Instant::now();
        let soonest = yields_until.map_or(now, |until| until.max(now));
        for (index, alarm) in nearer {
            alarm.advance((now + after(index)).max(soonest));
        }
    }
}

/// How long the one at this place behind the oldest sleeps, in case the oldest does nothing.
fn after(index: usize) -> Duration {
    SECOND.saturating_mul(u32::try_from(index).unwrap_or(u32::MAX))
}

impl Drop for Turns {
    fn drop(&mut self) {
        self.leave();
    }
}
