use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;
use tokio::runtime::Handle;
use tokio::time::{sleep, sleep_until, timeout, timeout_at};
use tokio_postgres::{CancelToken, NoTls};

use super::Mode;
use crate::alarm::Alarm;
use crate::error::{Error, Result};
use crate::session::asynchronous::Boxed;

/// Operations return a future of what they are documented to return: a [`Running`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Async {}

/// An operation of the asynchronous half. Nothing happens before it is awaited.
///
/// It may be dropped at any time, as by `tokio::time::timeout` or `select!`: a lock that was not delivered is released.
#[must_use = "nothing happens before it is awaited"]
pub struct Running<'a, T>(Boxed<'a, T>);

impl<T> Future for Running<'_, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.0.as_mut().poll(context)
    }
}

impl<T> fmt::Debug for Running<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").finish_non_exhaustive()
    }
}

impl Mode for Async {
    type Connection = AsyncPgConnection;
    type Reply<'a, T: Send + 'a> = Running<'a, T>;
    type Runtime = Handle;
    type Token = CancelToken;

    fn drive<'a, T: Send + 'a>(operation: impl Future<Output = T> + Send + 'a) -> Running<'a, T> {
        Running(Box::pin(operation))
    }

    fn runtime() -> Result<Handle> {
        Handle::try_current().map_err(|_| Error::NoRuntime)
    }

    /// A runtime that has ended drops the operation at once.
    fn leave(runtime: &Handle, operation: impl Future<Output = ()> + Send + 'static) {
        let _entered = runtime.enter();
        runtime.spawn(operation);
    }

    async fn surely<T: Send + 'static>(
        runtime: &Handle,
        operation: impl Future<Output = T> + Send + 'static,
    ) -> T {
        match runtime.spawn(operation).await {
            Ok(value) => value,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime shuts down, and drops this future, too.
                Err(_) => std::future::pending().await,
            },
        }
    }

    fn beside(runtime: &Handle, operation: impl Future<Output = ()> + Send + 'static) {
        Self::leave(runtime, operation);
    }

    fn later<F: Future<Output = bool> + Send + 'static>(
        runtime: &Handle,
        operation: impl Fn(Option<Duration>) -> F + Send + 'static,
    ) {
        let mut pause = Duration::from_millis(10);
        Self::leave(runtime, async move {
            while !operation(None).await {
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        });
    }

    fn inside<T>(runtime: &Handle, drops: impl FnOnce() -> T) -> T {
        let _entered = runtime.enter();
        drops()
    }

    async fn within<T: Send>(
        deadline: Option<Instant>,
        operation: impl Future<Output = T> + Send,
    ) -> Option<T> {
        match deadline {
            Some(deadline) => timeout_at(deadline.into(), operation).await.ok(),
            None => Some(operation.await),
        }
    }

    async fn sleep(alarm: &Alarm, deadline: Option<Instant>) {
        while let Some(due) = alarm.pending(deadline) {
            let mut timer = pin!(sleep_until(due.into()));
            poll_fn(|context| {
                if alarm.register(context.waker(), due, deadline) {
                    timer.as_mut().poll(context)
                } else {
                    Poll::Ready(())
                }
            })
            .await;
        }
    }

    fn token(conn: &AsyncPgConnection) -> CancelToken {
        conn.cancel_token()
    }

    async fn cancel(token: &CancelToken) {
        let _ = timeout(Duration::from_secs(1), token.cancel_query(NoTls)).await;
    }
}
