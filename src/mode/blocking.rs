use std::future::ready;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use diesel::PgConnection;

use super::Mode;
use crate::alarm::Alarm;
use crate::error::Result;
use crate::sealed::Sealed;
use crate::session::run_ready;

/// The blocking half, of r2d2: an operation blocks the thread until it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Blocking {}

impl Sealed for Blocking {}

impl Mode for Blocking {
    type Connection = PgConnection;
    type Reply<'a, T: Send + 'a> = T;
    type Runtime = ();

    fn drive<'a, T: Send + 'a>(operation: impl Future<Output = T> + Send + 'a) -> T {
        run_ready(operation)
    }

    fn runtime() -> Result<()> {
        Ok(())
    }

    /// A panic, for example in a connection's instrumentation, is caught: a second panic while the
    /// first unwinds would end the process.
    fn finish_later((): &(), operation: impl Future<Output = ()> + Send + 'static) {
        let _ = catch_unwind(AssertUnwindSafe(|| run_ready(operation)));
    }

    fn run_detached<T: Send + 'static>(
        (): &(),
        _: Option<Duration>,
        operation: impl Future<Output = Result<T>> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send {
        ready(run_ready(operation))
    }

    /// If no thread can be started, the operation is not run, and what it would have ended expires
    /// at its timeout.
    fn in_background((): &(), operation: impl Future<Output = ()> + Send + 'static) {
        let _ = thread::Builder::new()
            .name("diesel_interlock".into())
            .spawn(move || run_ready(operation));
    }

    fn inside<T>((): &(), drops: impl FnOnce() -> T) -> T {
        drops()
    }

    fn within<T: Send>(
        _: Option<Instant>,
        operation: impl Future<Output = T> + Send,
    ) -> impl Future<Output = Option<T>> + Send {
        ready(Some(run_ready(operation)))
    }

    fn sleep(alarm: &Alarm, deadline: Option<Instant>) -> impl Future<Output = ()> + Send {
        alarm.block(deadline);
        ready(())
    }
}
