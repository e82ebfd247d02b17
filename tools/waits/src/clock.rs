//! The clock of the model, and its tasks.
//!
//! Time stands still while a task works, and jumps to the next timer when all tasks sleep. Without a
//! timer they would sleep for ever, so the execution fails. At every lock, flag and sleep, shuttle
//! chooses the task that runs next.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::{Add, Sub};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};

/// Timers that are due within this many nanoseconds fire together, in any order.
const LATE: u64 = 50_000;

/// A time of the model, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Instant(u64);

impl Instant {
    /// Two calls never return the same time.
    pub(crate) fn now() -> Self {
        CLOCK.with_borrow_mut(|clock| {
            clock.now += 1;
            Self(clock.now)
        })
    }

    pub(crate) fn elapsed(self) -> Duration {
        Self::now().duration_since(self)
    }

    pub(crate) const fn duration_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    pub(crate) const fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.duration_since(earlier)
    }

    pub(crate) fn checked_add(self, duration: Duration) -> Option<Self> {
        let nanoseconds = duration.as_nanos().try_into().ok()?;
        self.0.checked_add(nanoseconds).map(Self)
    }

    pub(crate) fn checked_sub(self, duration: Duration) -> Option<Self> {
        let nanoseconds = duration.as_nanos().try_into().ok()?;
        self.0.checked_sub(nanoseconds).map(Self)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        self.checked_add(duration).unwrap()
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        self.checked_sub(duration).unwrap()
    }
}

#[derive(Default)]
struct Clock {
    now: u64,
    timers: BTreeMap<(u64, u64), Waker>,
    last_timer: u64,
    /// The number of tasks that do not sleep.
    at_work: usize,
    /// The number of tasks that have not ended, without the main one.
    tasks: usize,
    main: Option<Arc<Parker>>,
    /// Checks that run when all tasks sleep, with the time of the next timer.
    invariants: Vec<Box<dyn Fn(Instant)>>,
}

thread_local! {
    static CLOCK: RefCell<Clock> = RefCell::default();
}

shuttle::thread_local! {
    static ME: Arc<Parker> = Arc::default();
}

/// Locks a mutex of the model itself, which shuttle does not schedule, also after a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a task sleeps on.
#[derive(Debug, Default)]
pub(crate) struct Parker(Mutex<Parked>);

#[derive(Debug, Default)]
struct Parked {
    is_asleep: bool,
    is_notified: bool,
    task: Option<Waker>,
}

/// The parker of this task.
pub(crate) fn me() -> Arc<Parker> {
    ME.with(Clone::clone)
}

impl Parker {
    pub(crate) fn unpark(&self) {
        let mut parked = lock(&self.0);
        parked.is_notified = true;
        if std::mem::take(&mut parked.is_asleep) {
            CLOCK.with_borrow_mut(|clock| clock.at_work += 1);
        }
        let task = parked.task.take();
        drop(parked);
        task.inspect(Waker::wake_by_ref);
    }

    /// Sleeps until it is woken, or until `due`. Only the task of the parker calls this.
    pub(crate) fn park(self: &Arc<Self>, due: Option<Instant>) {
        let timer = due.map(|due| Timer::new(due, Waker::from(self.clone())));
        {
            let mut parked = lock(&self.0);
            if std::mem::take(&mut parked.is_notified) {
                return;
            }
            parked.is_asleep = true;
        }
        rest();
        shuttle::future::block_on(poll_fn(|context| {
            let mut parked = lock(&self.0);
            if parked.is_asleep {
                parked.task = Some(context.waker().clone());
                return Poll::Pending;
            }
            parked.is_notified = false;
            Poll::Ready(())
        }));
        drop(timer);
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.unpark();
    }
}

/// Notes that a task sleeps or ends. If all do, moves the clock.
fn rest() {
    let is_last = CLOCK.with_borrow_mut(|clock| {
        clock.at_work -= 1;
        clock.at_work == 0
    });
    if is_last {
        advance();
    }
}

fn advance() {
    let next = CLOCK.with_borrow(|clock| clock.timers.keys().next().map(|(due, _)| *due));
    let Some(next) = next else {
        panic!("all sleep for ever");
    };
    let invariants = CLOCK.with_borrow_mut(|clock| std::mem::take(&mut clock.invariants));
    for invariant in &invariants {
        invariant(Instant(next));
    }
    let woken = CLOCK.with_borrow_mut(|clock| {
        clock.invariants = invariants;
        let later = clock.timers.split_off(&(next + LATE, 0));
        let due = std::mem::replace(&mut clock.timers, later);
        let last = due.keys().next_back().map_or(next, |(due, _)| *due);
        clock.now = clock.now.max(last);
        due
    });
    woken.into_values().for_each(Waker::wake);
}

/// A timer. Dropping cancels it.
struct Timer((u64, u64));

impl Timer {
    fn new(due: Instant, waker: Waker) -> Self {
        CLOCK.with_borrow_mut(|clock| {
            clock.last_timer += 1;
            let timer = (due.0, clock.last_timer);
            clock.timers.insert(timer, waker);
            Self(timer)
        })
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        CLOCK.with_borrow_mut(|clock| clock.timers.remove(&self.0));
    }
}

/// Is ready at a time.
pub(crate) async fn sleep_until(due: Instant) {
    let mut timer = None;
    poll_fn(|context| {
        timer = None;
        if has_come(due) {
            return Poll::Ready(());
        }
        timer = Some(Timer::new(due, context.waker().clone()));
        Poll::Pending
    })
    .await;
}

/// Polls a future until it is ready.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    run_until(future, u32::MAX, None).unwrap()
}

/// Polls a future this often, or until a time, and drops it then.
pub(crate) fn run_until<T>(
    future: impl Future<Output = T>,
    polls: u32,
    end: Option<Instant>,
) -> Option<T> {
    let (me, mut future) = (me(), pin!(future));
    let waker = Waker::from(me.clone());
    for _ in 0..polls {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return Some(value),
            Poll::Pending => me.park(end),
        }
        if end.is_some_and(has_come) {
            break;
        }
    }
    None
}

/// Whether a time has come. The clock does not tick, because only the model asks.
fn has_come(time: Instant) -> bool {
    CLOCK.with_borrow(|clock| clock.now >= time.0)
}

/// Blocks this task.
pub(crate) fn pause(duration: Duration) {
    let (me, due) = (me(), Instant::now() + duration);
    while !has_come(due) {
        me.park(Some(due));
    }
}

/// Starts a task.
pub(crate) fn spawn(work: impl FnOnce() + Send + 'static) {
    CLOCK.with_borrow_mut(|clock| {
        clock.at_work += 1;
        clock.tasks += 1;
    });
    shuttle::thread::spawn(move || {
        work();
        let main = CLOCK.with_borrow_mut(|clock| {
            clock.tasks -= 1;
            clock.main.clone().filter(|_| clock.tasks == 0)
        });
        match main {
            Some(main) => {
                main.unpark();
                CLOCK.with_borrow_mut(|clock| clock.at_work -= 1);
            }
            None => rest(),
        }
    });
}

/// Adds an invariant, which is checked whenever all tasks sleep, with the time of the next timer.
pub(crate) fn invariant(look: impl Fn(Instant) + 'static) {
    CLOCK.with_borrow_mut(|clock| clock.invariants.push(Box::new(look)));
}

/// Waits for all tasks.
pub(crate) fn join() {
    while CLOCK.with_borrow(|clock| clock.tasks) > 0 {
        me().park(None);
    }
}

/// Runs a scenario under random and PCT schedules.
#[track_caller]
pub(crate) fn explore(scenario: impl Fn() + Send + Sync + 'static) {
    let scenario = move || {
        crate::sync::reset();
        CLOCK.set(Clock {
            at_work: 1,
            main: Some(me()),
            now: 1_000_000_000_000,
            ..Clock::default()
        });
        fastrand::seed(thread_rng().r#gen());
        scenario();
        join();
        CLOCK.with_borrow_mut(|clock| clock.invariants.clear());
    };
    let scenario = Arc::new(scenario);
    let number = |name, default| std::env::var(name).map_or(default, |it| it.parse().unwrap());
    let (schedules, seed) = (number("SCHEDULES", 1000) as usize, number("SEED", 1));
    let mut config = shuttle::Config::new();
    config.stack_size = 0x20000;
    config.failure_persistence = shuttle::FailurePersistence::None;
    let random = shuttle::scheduler::RandomScheduler::new_from_seed(seed, schedules);
    let run = scenario.clone();
    shuttle::Runner::new(random, config.clone()).run(move || run());
    let pct = shuttle::scheduler::PctScheduler::new_from_seed(seed, 3, schedules);
    shuttle::Runner::new(pct, config).run(move || scenario());
}
