use std::fmt;
use std::panic::catch_unwind;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;
use tokio::runtime::Handle;
use tokio::time::{sleep, sleep_until, timeout_at};

use super::{Mode, select};
use crate::alarm::{Alarm, lock};
use crate::error::{Error, Result};
use crate::sealed::Sealed;
use crate::session::asynchronous::Boxed;
use crate::unfinished::Unfinished;

/// The asynchronous half, of deadpool and bb8: an operation returns a future, an [`Operation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Async {}

/// A future of the asynchronous half. Nothing happens before it is awaited.
///
/// It may be dropped at any time, for example by `tokio::time::timeout` or `select!`: a lock that
/// was not delivered is released.
#[must_use = "nothing happens before it is awaited"]
pub struct Operation<'a, T>(Boxed<'a, T>);

impl<T> Future for Operation<'_, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.0.as_mut().poll(context)
    }
}

impl<T> fmt::Debug for Operation<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").finish_non_exhaustive()
    }
}

fn spawn(runtime: &Handle, operation: impl Future<Output = ()> + Send + 'static) {
    let _entered = runtime.enter();
    runtime.spawn(operation);
}

impl Sealed for Async {}

impl Mode for Async {
    type Connection = AsyncPgConnection;
    type Reply<'a, T: Send + 'a> = Operation<'a, T>;
    type Runtime = Handle;

    fn drive<'a, T: Send + 'a>(operation: impl Future<Output = T> + Send + 'a) -> Operation<'a, T> {
        Operation(Box::pin(operation))
    }

    /// Where a runtime has no timers, tokio panics when one is made, and says so nowhere else.
    fn runtime() -> Result<Handle> {
        let runtime = Handle::try_current().map_err(|_| Error::NoRuntime)?;
        match catch_unwind(|| drop(sleep(Duration::ZERO))) {
            Ok(()) => Ok(runtime),
            Err(_) => Err(Error::NoRuntime),
        }
    }

    /// A runtime that has ended drops the operation at once.
    fn finish_later(runtime: &Handle, operation: impl Future<Output = ()> + Send + 'static) {
        let unfinished = Unfinished::new();
        spawn(runtime, async move {
            operation.await;
            drop(unfinished);
        });
    }

    async fn run_detached<T: Send + 'static>(
        runtime: &Handle,
        patience: Option<Duration>,
        operation: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // The runtime of the caller, because the one where a permit was claimed may have ended.
        let runtime = Handle::try_current().unwrap_or_else(|_| runtime.clone());
        let caller = Caller::new(patience);
        let gone = caller.0.clone();
        let operation = async move {
            let value = select(Self::sleep(&gone.alarm, None), operation).await;
            // In this order: the drop of the value may leave more operations, and `gone` counts
            // this one until then.
            (value, gone)
        };
        match runtime.spawn(operation).await.map(|(value, _)| value) {
            Ok(Some(value)) => value,
            // Only after a drop of this future does the task give up, so nobody waits here.
            Ok(None) => std::future::pending().await,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime has ended. It drops this future, too, unless another one polls it.
                Err(_) => Err(Error::NoRuntime),
            },
        }
    }

    fn in_background(runtime: &Handle, operation: impl Future<Output = ()> + Send + 'static) {
        spawn(runtime, operation);
    }

    fn inside<T>(runtime: &Handle, drops: impl FnOnce() -> T) -> T {
        let _entered = runtime.enter();
        drops()
    }

    async fn within<T: Send>(
        deadline: Option<Instant>,
        operation: impl Future<Output = T> + Send,
    ) -> Option<T> {
        let mut operation = pin!(operation);
        // Without a runtime or its timers the operation itself says so.
        if let Some(deadline) = deadline.filter(|_| Self::runtime().is_ok()) {
            match timeout_at(deadline.into(), operation.as_mut()).await {
                Ok(value) => return Some(value),
                // A paused clock jumps to the next timer whenever the runtime waits for a server,
                // so it says nothing about that server.
                Err(_) if Instant::now() < deadline => {}
                Err(_) => return None,
            }
        }
        Some(operation.await)
    }

    async fn sleep(alarm: &Alarm, deadline: Option<Instant>) {
        alarm.wait(deadline, |due| sleep_until(due.into())).await;
    }
}

/// The future that awaits a task. Its drop lets the task go on for at most the given patience, as
/// an operation that nobody awaits.
struct Caller(Arc<Gone>, Option<Duration>);

/// Tells the task whether its caller is gone.
struct Gone {
    alarm: Alarm,
    /// Set once the caller is gone, and kept until the task ends.
    unfinished: Mutex<Option<Unfinished>>,
}

impl Caller {
    fn new(patience: Option<Duration>) -> Self {
        let gone = Gone {
            alarm: Alarm::unset(),
            unfinished: Mutex::new(None),
        };
        Self(Arc::new(gone), patience)
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        *lock(&self.0.unfinished) = Some(Unfinished::new());
        if let Some(patience) = self.1 {
            self.0.alarm.set(Instant::now() + patience);
        }
    }
}
