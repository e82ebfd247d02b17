use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
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

/// How many operations go on though nobody awaits them.
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// One of them, until it has ended or its runtime has dropped it.
struct Left;

impl Left {
    fn new() -> Self {
        LEFT.fetch_add(1, SeqCst);
        Self
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        LEFT.fetch_sub(1, SeqCst);
    }
}

/// Waits until everything that was dropped in this process, and whose release was left to a task, is released: guards, permits, terms,
/// ticks, and futures half way. Returns whether all were within `limit`. It sends nothing of its own; while the database is away, the
/// releases are tried again, until what they release has expired.
///
/// To be awaited at the end of `main`, or of a test, because a runtime that ends drops its tasks: a permit or a leader's seat would
/// then be free only when its time is over. A task that was aborted has dropped what it held when its handle says that it has ended.
///
/// ```
/// use std::time::Duration;
///
/// use diesel_interlock::deadpool::{Leader, PgPool};
///
/// static DISPATCHER: Leader = Leader::named("dispatcher", Duration::from_secs(15));
///
/// async fn run(pool: PgPool, shutdown: impl Future<Output = ()>) {
///     tokio::select! {
///         _ = DISPATCHER.lead(&pool, |_| std::future::pending()) => {}
///         () = shutdown => {}
///     }
///     diesel_interlock::released(Duration::from_secs(5)).await;
/// }
/// # use diesel::{QueryDsl, RunQueryDsl};
/// # use diesel_async::{AsyncPgConnection, pooled_connection::AsyncDieselConnectionManager};
/// # use diesel_interlock::monitor::views::leader;
/// # let database = workbench::Database::new();
/// # diesel_interlock::migrations::install(&database.pool(1))?;
/// # let conn = &mut database.connect();
/// # let mut leaders = || leader::table.count().get_result::<i64>(conn).unwrap();
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// #     let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(database.url());
/// #     let pool = PgPool::builder(manager).build().unwrap();
/// #     let shutdown = async {
/// #         while leaders() == 0 {
/// #             tokio::time::sleep(Duration::from_millis(5)).await;
/// #         }
/// #     };
/// #     run(pool, shutdown).await;
/// # });
/// # drop(runtime);
/// # assert_eq!(leaders(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub async fn released(limit: Duration) -> bool {
    let released = async {
        while LEFT.load(SeqCst) > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(limit, released).await.is_ok()
}

fn leave(runtime: &Handle, operation: impl Future<Output = ()> + Send + 'static) {
    let _entered = runtime.enter();
    runtime.spawn(operation);
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
        let left = Left::new();
        leave(runtime, async move {
            operation.await;
            drop(left);
        });
    }

    async fn surely<T: Send + 'static>(
        runtime: &Handle,
        operation: impl Future<Output = T> + Send + 'static,
    ) -> T {
        let left = Left::new();
        let operation = async move {
            let value = operation.await;
            // In this order: the drop of the value may leave more.
            (value, left)
        };
        match runtime.spawn(operation).await.map(|(value, _)| value) {
            Ok(value) => value,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime shuts down, and drops this future, too.
                Err(_) => std::future::pending().await,
            },
        }
    }

    fn beside(runtime: &Handle, operation: impl Future<Output = ()> + Send + 'static) {
        leave(runtime, operation);
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
