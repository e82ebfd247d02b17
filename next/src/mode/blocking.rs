use std::future::ready;
use std::thread;
use std::time::Instant;

use diesel::PgConnection;

use super::Mode;
use crate::alarm::Alarm;
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

    fn leave((): &(), operation: impl Future<Output = ()> + Send + 'static) {
        now(operation);
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
