//! The pools that a handle can be made for.
//!
//! **The reply of a dropped call is awaited in the background**, for two seconds, before the
//! connection is returned to the pool. So no pool gives out a connection with a silent server, and
//! a dropped call does not cost a session.

#[cfg(feature = "bb8")]
mod bb8;
#[cfg(feature = "deadpool")]
mod deadpool;
#[cfg(feature = "r2d2")]
mod r2d2;

use std::ops::DerefMut;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::mode::{Mode, PATIENCE};
use crate::sealed::Sealed;
use crate::session::Session;
use crate::unfinished::note_closed;

#[cfg(feature = "bb8")]
pub use self::bb8::Bb8Pool;
#[cfg(feature = "deadpool")]
pub use self::deadpool::DeadPool;
#[cfg(feature = "r2d2")]
pub use self::r2d2::PgPool;

/// A connection pool: Diesel's r2d2 pool, or diesel-async's deadpool or bb8. The trait is sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a pool of PostgreSQL connections that this crate knows",
    label = "not a pool of Diesel's r2d2, or of diesel-async's deadpool or bb8",
    note = "import the handle of your pool: `diesel_interlock::AdvisoryLock` for r2d2, \
            `diesel_interlock::deadpool::AdvisoryLock` for deadpool, \
            `diesel_interlock::bb8::AdvisoryLock` for bb8",
    note = "if it is one of these pools, enable its feature, and look for a second version with \
            `cargo tree -d`: this crate needs diesel 2.3, and diesel-async 0.9",
    note = "a wrapper of a pool is given as the pool inside: `&**wrapper`, `wrapper.get_ref()` or \
         `&wrapper.0`"
)]
pub trait Pool: Sealed + Clone + Send + Sync + 'static {
    /// Whether operations on this pool block or are futures.
    type Mode: Mode;

    /// A connection from this pool, which is returned to the pool when dropped.
    type Pinned: PoolConnection<Target = <Self::Mode as Mode>::Connection>;

    /// Takes a connection from the pool. Waits for as long as the pool's own settings allow, and a
    /// blocking pool no longer than `limit`. An asynchronous pool ignores `limit`, because its
    /// caller drops the future then. The future of a blocking pool is ready when it is first
    /// polled.
    fn check_out(
        &self,
        limit: Option<Duration>,
    ) -> impl Future<Output = Result<Self::Pinned>> + Send;

    /// Whether the pool can spare one of its connections for a waiter. If it can, the waiter keeps
    /// its connection and waits on the server; if it cannot, the waiter polls. A pool of one spares
    /// none.
    fn can_spare(&self) -> bool;

    /// How many connections the pool can give without opening a new one.
    fn idle(&self) -> usize;

    /// The largest number of connections that the pool may have.
    fn max_size(&self) -> usize;
}

/// Implements `Debug` for a type over a pool. A derive would require `Debug` of the pool, too.
macro_rules! debug {
    ($type:ident |$this:ident| $($field:ident = $value:expr),*) => {
        impl<P: Pool> std::fmt::Debug for $type<P> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $this = self;
                f.debug_struct(stringify!($type))
                    $(.field(stringify!($field), &$value))*
                    .finish_non_exhaustive()
            }
        }
    };
}
pub(crate) use debug;

/// Takes a connection. If its session is known to have ended, takes another one instead: nothing
/// was sent on the first.
pub(crate) async fn check_out<P: Pool>(pool: &P, limit: Option<Duration>) -> Result<P::Pinned> {
    loop {
        let mut conn = pool.check_out(limit).await?;
        if !conn.is_closed() {
            return Ok(conn);
        }
        conn.discard();
    }
}

/// A connection from a [`Pool`].
pub trait PoolConnection: Sealed + DerefMut + Send + 'static {
    /// Discards the connection: its session ends, and it is not returned to its pool.
    fn discard(self);
}

/// What an operation on a pool `P` returns: a [`Result<T>`] with r2d2, and a future of a
/// `Result<T>` with deadpool and bb8.
pub type Reply<'a, P, T> = <<P as Pool>::Mode as Mode>::Reply<'a, Result<T>>;

/// The connection of a pool `P`: `PgConnection` with r2d2, and `AsyncPgConnection` with deadpool
/// and bb8.
pub type ConnectionOf<P> = <<P as Pool>::Mode as Mode>::Connection;

/// A pooled connection for a few statements. Its drop returns it to the pool, unless a transaction
/// was left open on it. If the reply to a statement was not read, the drop waits for the reply
/// first.
pub(crate) struct Borrowed<P: Pool> {
    conn: Option<P::Pinned>,
    runtime: <P::Mode as Mode>::Runtime,
    /// Whether the reply to a statement was not read.
    is_busy: bool,
    /// Whether a drop waits for that reply.
    waits: bool,
}

impl<P: Pool> Borrowed<P> {
    pub(crate) async fn new(pool: &P, limit: Option<Duration>) -> Result<Self> {
        let runtime = P::Mode::runtime()?;
        Ok(Self {
            conn: Some(check_out(pool, limit).await?),
            runtime,
            is_busy: false,
            waits: true,
        })
    }

    /// The connection, for a statement that is about to be sent. Call
    /// [`note_reply`](Self::note_reply) once the reply was read.
    pub(crate) fn conn(&mut self) -> &mut ConnectionOf<P> {
        // The worst case, until `note_reply`.
        self.is_busy = true;
        self.conn
            .as_mut()
            .unwrap_or_else(|| unreachable!("only the drop takes it"))
    }

    pub(crate) const fn discards_when_busy(&mut self) {
        self.waits = false;
    }

    pub(crate) const fn note_reply(&mut self) {
        self.is_busy = false;
    }

    /// The runtime on which the connection was borrowed.
    pub(crate) fn runtime(&self) -> <P::Mode as Mode>::Runtime {
        self.runtime.clone()
    }

    /// Ends the session.
    pub(crate) fn discard(mut self) {
        let conn = self.conn.take();
        P::Mode::inside(&self.runtime, || conn.map(PoolConnection::discard));
    }
}

impl<P: Pool> Drop for Borrowed<P> {
    fn drop(&mut self) {
        let Some(mut conn) = self.conn.take() else {
            return;
        };
        if self.is_busy && self.waits && !std::thread::panicking() {
            let busy = Self {
                conn: Some(conn),
                runtime: self.runtime.clone(),
                is_busy: true,
                waits: false,
            };
            return P::Mode::finish_later(&self.runtime, read_reply(busy));
        }
        P::Mode::inside(&self.runtime, || {
            if !self.is_busy && conn.transaction().is_none() {
                drop(conn);
            } else {
                conn.discard();
                note_closed();
            }
        });
    }
}

/// Waits for the reply to the statement of a dropped future, so that the pool gives nobody a
/// connection on which the server is silent.
async fn read_reply<P: Pool>(mut borrowed: Borrowed<P>) {
    let deadline = Some(Instant::now() + PATIENCE);
    let replied = P::Mode::within(deadline, borrowed.conn().batch("")).await;
    // Otherwise the drop of `borrowed` discards the connection.
    if matches!(replied, Some(Ok(()))) {
        borrowed.note_reply();
    }
}
