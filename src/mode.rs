//! The two halves: who drives an operation, what it returns, how it pauses, and what a drop leaves behind.

#[cfg(feature = "async")]
mod asynchronous;
#[cfg(feature = "r2d2")]
mod blocking;

use std::time::{Duration, Instant};

use crate::alarm::Alarm;
use crate::error::Result;
use crate::session::Session;

#[cfg(feature = "async")]
pub use self::asynchronous::{Async, Running, released};
#[cfg(feature = "r2d2")]
pub use self::blocking::Blocking;

/// How the operations of a handle run: they block, or they are futures. The pools say which; nobody else implements it.
pub trait Mode: Sized + Send + Sync + 'static {
    /// The connection that this half works on: `PgConnection` or `AsyncPgConnection`.
    type Connection: Session;

    /// What an operation returns: a `T` if it blocks, and otherwise a future of it.
    type Reply<'a, T: Send + 'a>;

    /// What a `Drop` needs to finish an operation: nothing, or a runtime.
    #[doc(hidden)]
    type Runtime: Clone + Send + Sync;

    /// What cancels a statement that still runs although its future was dropped.
    #[doc(hidden)]
    type Token: Send + Sync;

    #[doc(hidden)]
    fn drive<'a, T: Send + 'a>(
        operation: impl Future<Output = T> + Send + 'a,
    ) -> Self::Reply<'a, T>;

    #[doc(hidden)]
    fn runtime() -> Result<Self::Runtime>;

    /// Finishes an operation for a `Drop`: at once, or in a task.
    #[doc(hidden)]
    fn leave(runtime: &Self::Runtime, operation: impl Future<Output = ()> + Send + 'static);

    /// Does an operation to its end: on this thread, or in a task, which goes on if this future is dropped. What it then
    /// returns is dropped. It must hold nothing that has a lifetime, or the compiler finds the futures above not to be `Send`.
    #[doc(hidden)]
    fn surely<T: Send + 'static>(
        runtime: &Self::Runtime,
        operation: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = T> + Send;

    /// Does an operation beside the program: on a thread of its own, or in a task.
    #[doc(hidden)]
    fn beside(runtime: &Self::Runtime, operation: impl Future<Output = ()> + Send + 'static);

    /// Repeats what a `Drop` could not do, until it returns `true`: on the one thread of the process for that, or in a task. A
    /// blocking operation waits no longer than its argument.
    #[doc(hidden)]
    fn later<F: Future<Output = bool> + Send + 'static>(
        runtime: &Self::Runtime,
        operation: impl Fn(Option<Duration>) -> F + Send + 'static,
    );

    /// Drops what belongs to a pool, which may need the runtime for that.
    #[doc(hidden)]
    fn inside<T>(runtime: &Self::Runtime, drops: impl FnOnce() -> T) -> T;

    /// Awaits an operation until a deadline, and drops it then. A blocking operation is not interrupted.
    #[doc(hidden)]
    fn within<T: Send>(
        deadline: Option<Instant>,
        operation: impl Future<Output = T> + Send,
    ) -> impl Future<Output = Option<T>> + Send;

    /// Pauses until the alarm is due, or the deadline is over.
    #[doc(hidden)]
    fn sleep(alarm: &Alarm, deadline: Option<Instant>) -> impl Future<Output = ()> + Send;

    #[doc(hidden)]
    fn token(conn: &Self::Connection) -> Self::Token;

    #[doc(hidden)]
    fn cancel(token: &Self::Token) -> impl Future<Output = ()> + Send;
}

/// Pauses for a time.
pub(crate) async fn pause<M: Mode>(pause: Duration) {
    M::sleep(&Alarm::new(Instant::now() + pause), None).await;
}

/// Awaits work, unless something happens before it is done. It is dropped then.
#[cfg(feature = "async")]
pub(crate) async fn unless<T>(
    happens: impl Future<Output = ()>,
    work: impl Future<Output = T>,
) -> Option<T> {
    use std::task::Poll;
    let (mut happens, mut work) = (std::pin::pin!(happens), std::pin::pin!(work));
    std::future::poll_fn(|context| match happens.as_mut().poll(context) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => work.as_mut().poll(context).map(Some),
    })
    .await
}
