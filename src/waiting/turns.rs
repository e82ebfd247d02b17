//! The queues of this process, and the tries of one waiter.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::share::Share;
use super::{AFTER_THE_OLDEST, FIRST_PAUSE, LONGEST_PAUSE, SECOND, SLICE};
use crate::alarm::{Alarm, jitter, lock};
use crate::key::LockId;
use crate::long_wait::LONG;
use crate::mode::Mode;
use crate::statement::Database;
use crate::sync::{AtomicUsize, Instant, LazyLock, Mutex, Ordering};

/// What is waited for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum What {
    Lock(LockId),
    Slot(Arc<str>),
    /// The name of the limit, and the key.
    Units(&'static str, Arc<str>),
}

/// The waiters of this process for one thing in one database.
#[derive(Debug)]
struct Queue {
    database: Database,
    /// By units, and of equal units the oldest first.
    waiting: VecDeque<Waiter>,
    share: Share,
}

impl Queue {
    fn index(&self, alarm: &Arc<Alarm>) -> Option<usize> {
        let mut waiting = self.waiting.iter();
        waiting.position(|it| Arc::ptr_eq(&it.alarm, alarm))
    }
}

#[derive(Debug)]
struct Waiter {
    /// How many units of a rate limit it waits for: 0 for a lock or a slot.
    units: u32,
    alarm: Arc<Alarm>,
}

/// The queues of each thing, one for each database.
type Queues = HashMap<What, Vec<Queue>>;

/// The queues of this process.
static QUEUES: LazyLock<Mutex<Queues>> = LazyLock::new(Mutex::default);
/// The number of awaited things: if it is 0, a release need not look at the queues.
static NUMBER: AtomicUsize = AtomicUsize::new(0);
/// How often units of a rate limit were given back in this process, by a reset or a refund.
static GIVEN_BACK: AtomicUsize = AtomicUsize::new(0);

/// Wakes the oldest waiter for what was released in this process, in each database, so that it
/// tries at once.
pub(crate) fn wake_oldest(what: &What) {
    if matches!(what, What::Units(..)) {
        GIVEN_BACK.fetch_add(1, Ordering::SeqCst);
    }
    if NUMBER.load(Ordering::SeqCst) > 0 {
        let now = Instant::now();
        let mut oldest = Vec::new();
        for queue in lock(&QUEUES).get_mut(what).into_iter().flatten() {
            let due = match what {
                What::Slot(_) => queue.share.note_release(now),
                What::Lock(_) | What::Units(..) => now,
            };
            oldest.extend(queue.waiting.front().map(|it| (it.alarm.clone(), due)));
        }
        // A waker runs foreign code, so it is never called under the mutex.
        for (alarm, due) in oldest {
            alarm.set(due);
        }
    }
}

/// Delays a newcomer while this process leaves the slots of a service to others, and a moment
/// longer. So the oldest tries first, and does not mistake what the newcomer takes for the slot of
/// another process. A newcomer without the time for that tries at once.
pub(crate) async fn let_others_pass<M: Mode>(what: &What, deadline: Option<Instant>) {
    if NUMBER.load(Ordering::SeqCst) == 0 {
        return;
    }
    let until = {
        let queues = lock(&QUEUES);
        let of_what = queues.get(what).into_iter().flatten();
        of_what.filter_map(|queue| queue.share.yields_until).max()
    };
    let end = until.map(|until| until + AFTER_THE_OLDEST);
    if let Some(end) = end.filter(|end| deadline.is_none_or(|deadline| *end < deadline)) {
        M::sleep(&Alarm::new(end), None).await;
    }
}

/// The tries of one waiter, and its place in the queue. Its drop leaves the queue.
///
/// ```text
/// let mut turns = Turns::new(deadline);
/// while turns.next::<M>().await { /* try, and return what was granted, or call `note_refusal` */ }
/// // the deadline is over
/// ```
#[derive(Debug)]
pub(crate) struct Turns {
    deadline: Option<Instant>,
    units: u32,
    /// When the first try began.
    since: Option<Instant>,
    is_reported: bool,
    /// When the last try began, and how often units had been given back by then.
    began: Option<Instant>,
    given_back: usize,
    pause: Duration,
    /// The pause before the next try, where it is known.
    retry_after: Option<Duration>,
    /// How long the quickest refusal took: a round trip, or two if the statement was prepared
    /// first.
    trip: Duration,
    place: Option<Place>,
    /// Whether the server has refused at least one try. If not, the deadline has cut off all of
    /// them.
    was_refused: bool,
}

#[derive(Debug)]
struct Place {
    what: What,
    database: Database,
    alarm: Arc<Alarm>,
}

impl Place {
    /// Calls `look` with the queue and the index of this waiter in it.
    fn look<T>(&self, look: impl FnOnce(&mut Queue, usize) -> T) -> Option<T> {
        let mut queues = lock(&QUEUES);
        let of_what = queues.get_mut(&self.what)?;
        let queue = of_what
            .iter_mut()
            .find(|queue| queue.database == self.database)?;
        let index = queue.index(&self.alarm)?;
        Some(look(queue, index))
    }
}

impl Turns {
    pub(crate) const fn new(deadline: Option<Instant>) -> Self {
        Self::for_units(0, deadline)
    }

    pub(crate) const fn for_units(units: u32, deadline: Option<Instant>) -> Self {
        Self {
            deadline,
            units,
            since: None,
            is_reported: false,
            began: None,
            given_back: 0,
            pause: FIRST_PAUSE,
            retry_after: None,
            trip: Duration::ZERO,
            place: None,
            was_refused: false,
        }
    }

    /// Notes that the server has refused `what`, to a statement that was sent at `sent`. Joins the
    /// queue, unless this waiter is in it already.
    pub(crate) fn note_refusal(&mut self, what: What, database: Database, sent: Instant) {
        // The shortest time, because other statements may have delayed a reply.
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
            // Of several locks, another one is busy now.
            self.leave();
        }
        self.join(what, database);
    }

    /// Notes that the server was busy with `what` for too long to say more. Joins a queue, unless
    /// this waiter is in one already.
    pub(crate) fn note_lock(&mut self, what: What) {
        // The error does not tell which database it was.
        const UNKNOWN: Database = Database(i32::MIN);
        if self.place.is_none() {
            self.join(what, UNKNOWN);
        }
    }

    fn join(&mut self, what: What, database: Database) {
        let now = Instant::now();
        // Not later than `began`, so that `postpone` sets the pause of the oldest, unless a release
        // sets the alarm meanwhile.
        let alarm = Arc::new(Alarm::new(self.began.unwrap_or(now)));
        let mut queues = lock(&QUEUES);
        let of_what = queues.entry(what.clone()).or_default();
        let i = match of_what.iter().position(|queue| queue.database == database) {
            Some(i) => i,
            None => {
                of_what.push(Queue {
                    database,
                    waiting: VecDeque::new(),
                    share: Share::new(),
                });
                of_what.len() - 1
            }
        };
        let queue = &mut of_what[i].waiting;
        let units = self.units;
        let index = queue.partition_point(|it| it.units <= units);
        if index > 0 {
            alarm.set(now + after(index));
        }
        let waiter = Waiter {
            units,
            alarm: alarm.clone(),
        };
        // Those behind keep their alarms: at worst they try a second early.
        queue.insert(index, waiter);
        NUMBER.store(queues.len(), Ordering::SeqCst);
        drop(queues);
        self.place = Some(Place {
            what,
            database,
            alarm,
        });
    }

    /// How long this wait has lasted, if that is long and was not reported yet.
    pub(crate) fn note_long_wait(&mut self) -> Option<Duration> {
        let waited = self.since?.elapsed();
        let is_new = waited > LONG && !std::mem::replace(&mut self.is_reported, true);
        is_new.then_some(waited)
    }

    pub(crate) const fn was_refused(&self) -> bool {
        self.was_refused
    }

    /// Whether there is no time for another reply: the deadline is less than two and a half round
    /// trips away.
    pub(crate) fn is_over(&self) -> bool {
        let end = Instant::now() + self.trip.mul_f64(2.5);
        self.deadline.is_some_and(|deadline| deadline <= end)
    }

    /// Sleeps until the next try; the first try is at once. Returns `false` once the deadline is
    /// too close, but never before the first try.
    pub(crate) async fn next<M: Mode>(&mut self) -> bool {
        if self.began.is_some() {
            let alarm = self.postpone();
            if !self.is_over() {
                // It may sleep until just before the deadline, because a release may wake it.
                let margin = self.trip.mul_f64(2.5);
                let last = self
                    .deadline
                    .and_then(|deadline| deadline.checked_sub(margin));
                M::sleep(&alarm, last).await;
            }
        }
        self.given_back = GIVEN_BACK.load(Ordering::SeqCst);
        let now = Instant::now();
        self.since.get_or_insert(now);
        let is_first = self.began.replace(now).is_none();
        is_first || !self.is_over()
    }

    /// How long this waiter may wait on the server now. `None` unless it is the oldest and has the
    /// time.
    pub(crate) fn slice(&self) -> Option<Duration> {
        let rest = self.deadline.map_or(SLICE, |deadline| {
            let rest = deadline.saturating_duration_since(Instant::now());
            rest.saturating_sub(self.trip.mul_f64(2.5))
        });
        (self.index() == Some(0) && rest >= FIRST_PAUSE).then_some(rest.min(SLICE))
    }

    /// Notes that this waiter has waited on the server, so the next try needs no pause.
    pub(crate) fn note_wait(&mut self) {
        self.retry_after = Some(Duration::ZERO);
    }

    /// The next try is useless before `retry_after`, for this waiter and for those behind it, who
    /// want as many units or more.
    ///
    /// But units may have been given back while the refusal was on its way, before this waiter was
    /// in the queue to be woken. Then it tries again at once.
    pub(crate) fn not_before(&mut self, retry_after: Duration) {
        let is_late = GIVEN_BACK.load(Ordering::SeqCst) != self.given_back;
        self.retry_after = Some(if is_late { Duration::ZERO } else { retry_after });
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

    /// Sets the alarm for the next try, unless a release has set it since the last try began.
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

    /// Leaves the queue. If this waiter was the oldest, the next one tries at once, even if this
    /// one was granted what it waited for: the next one then waits on the server, or finds another
    /// slot.
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
                let index = queue.index(&place.alarm);
                let (share, queue) = (&mut queue.share, &mut queue.waiting);
                if let Some(index) = index {
                    queue.remove(index);
                    if index == 0 {
                        share.note_try(Instant::now(), false);
                    }
                    // The waiters behind have moved up. To keep this cheap, a waiter is told only
                    // when it becomes the 1st, 2nd, 3rd, 5th, 9th …, which is soon enough.
                    let told = [0].into_iter().chain((0..).map(|n| 1 << n));
                    let told = told.take_while(|i| *i < queue.len());
                    nearer.extend(
                        told.filter(|i| *i >= index)
                            .map(|i| (i, queue[i].alarm.clone())),
                    );
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
            let due = (now + after(index)).max(soonest);
            if index == 0 {
                // Also if it is at work, about to sleep for as long as the second does.
                alarm.set(due);
            } else {
                alarm.advance(due);
            }
        }
    }
}

/// How long the waiter at this index sleeps before it tries, too, in case the oldest does nothing.
fn after(index: usize) -> Duration {
    SECOND.saturating_mul(u32::try_from(index).unwrap_or(u32::MAX))
}

impl Drop for Turns {
    fn drop(&mut self) {
        self.leave();
    }
}
