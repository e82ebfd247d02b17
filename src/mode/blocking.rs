use std::future::ready;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use diesel::PgConnection;

use super::{Left, Mode};
use crate::alarm::{Alarm, lock};
use crate::error::Result;
use crate::sealed::Sealed;
use crate::session::now;
use crate::statement::Database;

/// The blocking half, of r2d2: an operation blocks the thread until it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Blocking {}

impl Sealed for Blocking {}

impl Mode for Blocking {
    type Connection = PgConnection;
    type Reply<'a, T: Send + 'a> = T;
    type Runtime = ();

    fn drive<'a, T: Send + 'a>(operation: impl Future<Output = T> + Send + 'a) -> T {
        now(operation)
    }

    fn runtime() -> Result<()> {
        Ok(())
    }

    /// A panic, for example in a connection's instrumentation, is caught: a second panic while the
    /// first unwinds would end the process.
    fn finish_later((): &(), operation: impl Future<Output = ()> + Send + 'static) {
        let _ = catch_unwind(AssertUnwindSafe(|| now(operation)));
    }

    fn surely<T: Send + 'static>(
        (): &(),
        _: Option<Duration>,
        operation: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = T> + Send {
        ready(now(operation))
    }

    /// If no thread can be started, the operation is not run, and what it would have ended expires
    /// at its timeout.
    fn in_background((): &(), operation: impl Future<Output = ()> + Send + 'static) {
        let _ = thread::Builder::new()
            .name("diesel_interlock".into())
            .spawn(move || now(operation));
    }

    fn retry_later<F: Future<Output = bool> + Send + 'static>(
        (): &(),
        database: Database,
        operation: impl Fn(Option<Duration>) -> F + Send + 'static,
    ) {
        let late = Late {
            try_once: Box::new(move |limit| now(operation(Some(limit)))),
            _left: Left::new(),
        };
        let mut queues = lock(&LATE);
        let is_new = !queues.iter().any(|queue| queue.database == database);
        if is_new {
            let started = thread::Builder::new()
                .name("diesel_interlock late".into())
                .spawn(move || finish_late(database));
            // Without a thread the operation is not run, and what it would have ended expires at
            // its timeout.
            if started.is_err() {
                return;
            }
            queues.push(Queue {
                database,
                waiting: Vec::new(),
            });
        }
        if let Some(queue) = queues.iter_mut().find(|queue| queue.database == database) {
            queue.waiting.push(late);
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
}

/// An operation that could not be done at once.
struct Late {
    /// Tries the operation, and waits for a connection no longer than the argument. Returns whether
    /// it is done.
    try_once: Box<dyn Fn(Duration) -> bool + Send>,
    _left: Left,
}

/// The operations that wait for the thread of a database. There may be many, if many handles are
/// dropped while a pool has no connection.
struct Queue {
    database: Database,
    waiting: Vec<Late>,
}

/// One queue for each database, so that a silent database does not hold up the others.
static LATE: Mutex<Vec<Queue>> = Mutex::new(Vec::new());

/// The thread of the late operations of a database. It ends when nothing is left.
fn finish_late(database: Database) {
    let mut waiting: Vec<Late> = Vec::new();
    loop {
        {
            let mut queues = lock(&LATE);
            if let Some(queue) = queues.iter_mut().find(|queue| queue.database == database) {
                waiting.append(&mut queue.waiting);
            }
            if waiting.is_empty() {
                queues.retain(|queue| queue.database != database);
                return;
            }
        }
        // One operation waits in the queue of its pool. Then all others try without waiting,
        // because their pools may have a free connection.
        let (round, first) = (Instant::now(), waiting.remove(0));
        let is_first_done = first.is_done(ROUND);
        waiting.retain(|late| !late.is_done(Duration::ZERO));
        if !is_first_done {
            waiting.push(first);
            thread::sleep(ROUND.saturating_sub(round.elapsed()));
        }
    }
}

const ROUND: Duration = Duration::from_secs(1);

impl Late {
    /// An operation that panics, for example in the user's instrumentation, is given up.
    fn is_done(&self, limit: Duration) -> bool {
        catch_unwind(AssertUnwindSafe(|| (self.try_once)(limit))).unwrap_or(true)
    }
}
