//! The blocking and the asynchronous half: who drives an operation, what it returns, how it pauses,
//! and how a drop finishes it.

#[cfg(feature = "async")]
mod asynchronous;
#[cfg(feature = "r2d2")]
mod blocking;

use std::time::{Duration, Instant};

use crate::alarm::{Alarm, Stop};
use crate::error::Result;
use crate::sealed::Sealed;
use crate::session::Session;

#[cfg(feature = "async")]
pub use self::asynchronous::{Async, Operation};
#[cfg(feature = "r2d2")]
pub use self::blocking::Blocking;

/// How the operations of a handle run: they block, or they are futures, depending on the pool. The
/// trait is sealed.
pub trait Mode: Sealed + Sized + Send + Sync + 'static {
    /// The connection of this half: `PgConnection` or `AsyncPgConnection`.
    type Connection: Session;

    /// What an operation returns: a `T` if it blocks, and otherwise a future of a `T`.
    type Reply<'a, T: Send + 'a>;

    /// What a `Drop` needs to finish an operation: nothing, or a runtime.
    #[doc(hidden)]
    type Runtime: Clone + Send + Sync;

    #[doc(hidden)]
    fn drive<'a, T: Send + 'a>(
        operation: impl Future<Output = T> + Send + 'a,
    ) -> Self::Reply<'a, T>;

    #[doc(hidden)]
    fn runtime() -> Result<Self::Runtime>;

    /// Finishes an operation for a `Drop`: at once, or in a task.
    #[doc(hidden)]
    fn finish_later(runtime: &Self::Runtime, operation: impl Future<Output = ()> + Send + 'static);

    /// Runs an operation to its end: on this thread, or in a task of the runtime that polls this
    /// future. If this future is dropped, the task goes on for at most `patience`, and its value is
    /// dropped. If the runtime ends first, it fails. The operation must borrow nothing, or the
    /// compiler finds the futures around it not to be `Send`.
    #[doc(hidden)]
    fn run_detached<T: Send + 'static>(
        runtime: &Self::Runtime,
        patience: Option<Duration>,
        operation: impl Future<Output = Result<T>> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send;

    /// Runs an operation in the background: on a thread of its own, or in a task.
    #[doc(hidden)]
    fn in_background(runtime: &Self::Runtime, operation: impl Future<Output = ()> + Send + 'static);

    /// Drops what belongs to a pool, inside the runtime, which the pool may need for that.
    #[doc(hidden)]
    fn inside<T>(runtime: &Self::Runtime, drops: impl FnOnce() -> T) -> T;

    /// Awaits an operation until a deadline, and drops it then. A blocking operation is not
    /// interrupted.
    #[doc(hidden)]
    fn within<T: Send>(
        deadline: Option<Instant>,
        operation: impl Future<Output = T> + Send,
    ) -> impl Future<Output = Option<T>> + Send;

    /// Pauses until the alarm is due, or the deadline is over.
    #[doc(hidden)]
    fn sleep(alarm: &Alarm, deadline: Option<Instant>) -> impl Future<Output = ()> + Send;
}

/// How long the statement of a dropped future or guard may go without a reply. After that, its
/// connection is closed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// How long a blocking loop waits for a connection at a time, so that a stop soon ends it.
pub(crate) const PATIENCE_OF_A_LOOP: Duration = Duration::from_secs(1);

/// Pauses for a time, or until `stop` is stopped.
pub(crate) async fn pause_until_stop<M: Mode>(stop: &Stop, pause: Duration) {
    let sleeper = stop.sleepers().join(Instant::now() + pause);
    if !stop.is_stopped() {
        M::sleep(&sleeper.alarm, None).await;
    }
}

/// Pauses for a time.
pub(crate) async fn pause<M: Mode>(pause: Duration) {
    M::sleep(&Alarm::new(Instant::now() + pause), None).await;
}

/// Awaits `work`. If `happens` is ready before it, drops `work` and returns `None`.
#[cfg(feature = "async")]
pub(crate) async fn select<T>(
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
