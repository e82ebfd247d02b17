use std::future::ready;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use diesel::PgConnection;

use super::Mode;
use crate::alarm::{Alarm, lock};
use crate::error::Result;
use crate::session::now;

/// Operations block the thread, and return what they are documented to return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Blocking {}

impl Mode for Blocking {
    type Connection = PgConnection;
    type Reply<'a, T: Send + 'a> = T;
    type Runtime = ();
    type Token = ();

    fn drive<'a, T: Send + 'a>(operation: impl Future<Output = T> + Send + 'a) -> T {
        now(operation)
    }

    fn runtime() -> Result<()> {
        Ok(())
    }

    /// A panic, as of a connection's instrumentation, stays here: a second one while the first unwinds would end the process.
    fn leave((): &(), operation: impl Future<Output = ()> + Send + 'static) {
        let _ = catch_unwind(AssertUnwindSafe(|| now(operation)));
    }

    fn surely<T: Send + 'static>(
        (): &(),
        operation: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = T> + Send {
        ready(now(operation))
    }

    /// If no thread can be had it is not done, and what it would have ended ends by its timeout.
    fn beside((): &(), operation: impl Future<Output = ()> + Send + 'static) {
        let _ = thread::Builder::new()
            .name("diesel_interlock".into())
            .spawn(move || now(operation));
    }

    fn later<F: Future<Output = bool> + Send + 'static>(
        (): &(),
        operation: impl Fn(Option<Duration>) -> F + Send + 'static,
    ) {
        let mut late = lock(&LATE);
        late.waiting
            .push(Box::new(move |limit| now(operation(Some(limit)))));
        if !late.has_thread {
            let started = thread::Builder::new()
                .name("diesel_interlock late".into())
                .spawn(finish_late);
            late.has_thread = started.is_ok();
        }
    }

    fn inside<T>((): &(), drops: impl FnOnce() -> T) -> T {
        drops()
    }

    fn within<T: Send>(
        _: Option<Instant>,
        operation: impl Future<Output = T> + Send,
    ) -> impl Future<Output = Option<T>> + Send {
        ready(Some(now(operation)))
    }

    fn sleep(alarm: &Alarm, deadline: Option<Instant>) -> impl Future<Output = ()> + Send {
        alarm.block(deadline);
        ready(())
    }

    fn token(_: &PgConnection) {}

    fn cancel((): &()) -> impl Future<Output = ()> + Send {
        ready(())
    }
}

/// What could not be done at once. Returns whether it is done.
type Late = Box<dyn Fn(Duration) -> bool + Send>;

/// They wait in one queue for one thread, because those that are dropped while a pool has no connection may be many.
struct Queue {
    waiting: Vec<Late>,
    has_thread: bool,
}

static LATE: Mutex<Queue> = Mutex::new(Queue {
    waiting: Vec::new(),
    has_thread: false,
});

/// The thread that does it. It ends when nothing is left.
fn finish_late() {
    let mut waiting: Vec<Late> = Vec::new();
    loop {
        {
            let mut late = lock(&LATE);
            waiting.append(&mut late.waiting);
            if waiting.is_empty() {
                late.has_thread = false;
                return;
            }
        }
        // One waits in the queue of its pool. Then all others look, because their pools may have something to give.
        let (round, first) = (Instant::now(), waiting.remove(0));
        let is_first_done = is_done(&first, ROUND);
        waiting.retain(|late| !is_done(late, Duration::ZERO));
        if !is_first_done {
            waiting.push(first);
            thread::sleep(ROUND.saturating_sub(round.elapsed()));
        }
    }
}

const ROUND: Duration = Duration::from_secs(1);

/// One that panics, as in an instrumentation of the user's, is given up.
fn is_done(late: &Late, limit: Duration) -> bool {
    catch_unwind(AssertUnwindSafe(|| late(limit))).unwrap_or(true)
}
