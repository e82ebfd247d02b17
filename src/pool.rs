//! The pools that a handle can be made for.
//!
//! **The reply of a dropped call is awaited in the background**, for two seconds, before the
//! connection is returned to the pool. So no pool gives out a connection with a silent server, and
//! a dropped call does not cost a session, unless dozens of such calls have left statements there.

#[cfg(feature = "bb8")]
mod bb8;
#[cfg(feature = "deadpool")]
mod deadpool;
#[cfg(feature = "r2d2")]
mod r2d2;

use std::ops::DerefMut;
use std::time::Instant;

use diesel::result::QueryResult;
use diesel::sql_types::BigInt;

use crate::error::Result;
use crate::event::Subject;
use crate::long_wait::{Awaited, Watched};
use crate::mode::{Mode, PATIENCE};
use crate::sealed::Sealed;
use crate::session::{Session, poll_once_quietly};
use crate::statement::Statement;
use crate::unfinished::note_closed;

#[cfg(feature = "bb8")]
pub use self::bb8::Bb8Pool;
#[cfg(feature = "deadpool")]
pub use self::deadpool::DeadPool;
#[cfg(feature = "r2d2")]
pub use self::r2d2::PgPool;

/// The error of a manager.
#[cfg(feature = "async")]
type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A connection pool: r2d2's of `PgConnection`, or deadpool's or bb8's of `AsyncPgConnection`, with
/// any manager. The trait is sealed.
///
/// The handles of a pool with a manager of your own are `advisory::AdvisoryLock<MyPool>` and so on.
/// r2d2 and bb8 ask the manager whether a connection is broken, so let its `has_broken` call
/// Diesel's, or let the pool test its connections. For every other pool, see [*Another pool or
/// connection*][page].
///
/// [page]: https://github.com/diesel-interlock/diesel_interlock/blob/main/docs/pools.md
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a pool of PostgreSQL connections that this crate knows",
    label = "neither r2d2's pool of `PgConnection`, nor deadpool's or bb8's of `AsyncPgConnection`",
    note = "if it is one of these pools, with any manager, enable its feature, and look for a \
            second version with `cargo tree -d`: this crate needs diesel 2.3, and diesel-async 0.9",
    note = "if it is a handle, such as a semaphore, the arguments are swapped: pass the pool last",
    note = "pass the pool inside a wrapper: `&*wrapper` or `&**wrapper`, `wrapper.get_ref()` or \
            `&wrapper.0`",
    note = "with a pool of another crate, use the operations that take a connection, such as \
            `lock.with_on(conn, work)` and `limit.check_on(conn)`, and for the rest a small pool \
            beside it: *Another pool or connection* in docs/pools.md"
)]
pub trait Pool: Sealed + Clone + Send + Sync + 'static {
    /// Whether operations on this pool block or are futures.
    type Mode: Mode;

    /// A connection from this pool, which is returned to the pool when dropped.
    type Pinned: PoolConnection<Target = <Self::Mode as Mode>::Connection>;

    /// Takes a connection from the pool. Waits for as long as the pool's own settings allow, and a
    /// blocking pool only until the deadline. An asynchronous pool ignores it, because its caller
    /// drops the future then. The future of a blocking pool is ready when it is first polled.
    fn check_out(
        &self,
        deadline: Option<Instant>,
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
macro_rules! impl_debug {
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
pub(crate) use impl_debug;

/// A connection from a [`Pool`].
pub trait PoolConnection: Sealed + DerefMut + Send + 'static {
    /// Discards the connection: its session ends, and it is not returned to its pool.
    fn discard(self);

    /// Whether [`discard`](Self::discard) surely closes the connection. Otherwise the pool asks a
    /// manager of the application's own whether the connection is broken, and the manager may not
    /// notice that.
    #[doc(hidden)]
    fn is_surely_closed() -> bool;
}

/// What an operation on a pool `P` returns: a [`Result<T>`] with r2d2, and a future of a
/// `Result<T>` with deadpool and bb8.
pub type Reply<'a, P, T> = <<P as Pool>::Mode as Mode>::Reply<'a, Result<T>>;

/// The connection of a pool `P`: `PgConnection` with r2d2, and `AsyncPgConnection` with deadpool
/// and bb8.
pub type ConnectionOf<P> = <<P as Pool>::Mode as Mode>::Connection;

/// A connection that was taken out of its pool. **The only place where a pooled connection is
/// discarded.** [`give_back`](Self::give_back) returns it once the reply to each statement was
/// read. A drop before that waits for the reply, and discards the connection if none comes.
pub(crate) struct Checkout<P: Pool> {
    /// `None` once it was given back or discarded.
    conn: Option<P::Pinned>,
    runtime: <P::Mode as Mode>::Runtime,
    /// Whether a drop waits for a reply.
    waits: bool,
}

impl<P: Pool> Checkout<P> {
    /// Takes a connection. If its session is known to have ended, takes another one instead:
    /// nothing was sent on the first. A manager that does not notice the end may give out the same
    /// one again, so this tries as often as the pool is large.
    pub(crate) async fn new(pool: &P, deadline: Option<Instant>) -> Result<Self> {
        let runtime = P::Mode::runtime()?;
        let mut others = 0..pool.max_size();
        loop {
            let conn = {
                let _watched = Watched::new(POOL, Awaited::Connection(pool.max_size()));
                pool.check_out(deadline).await?
            };
            let mut checkout = Self {
                conn: Some(conn),
                runtime: runtime.clone(),
                waits: true,
            };
            if !(checkout.conn().is_closed() && others.next().is_some()) {
                return Ok(checkout);
            }
            checkout.discard();
        }
    }

    pub(crate) fn conn(&mut self) -> &mut ConnectionOf<P> {
        self.conn
            .as_mut()
            .unwrap_or_else(|| unreachable!("only what consumes the check-out takes it"))
    }

    /// The runtime on which the connection was taken.
    pub(crate) fn runtime(&self) -> <P::Mode as Mode>::Runtime {
        self.runtime.clone()
    }

    pub(crate) const fn discards_when_dropped(&mut self) {
        self.waits = false;
    }

    /// Returns the connection to the pool, or discards it if a transaction was left open on it.
    pub(crate) fn give_back(mut self) {
        if self.conn().transaction().is_none() {
            let conn = self.conn.take();
            P::Mode::inside(&self.runtime, || drop(conn));
        } else {
            self.discard();
            note_closed();
        }
    }

    /// Discards the connection: its session ends.
    pub(crate) fn discard(mut self) {
        self.discard_by(END);
    }

    /// Discards the connection. If its manager may not notice that, the statement ends the session.
    pub(crate) fn discard_by(&mut self, end_session: &str) {
        if !P::Pinned::is_surely_closed() && !self.conn().is_closed() {
            // One poll sends the statement, and a blocking session also replies.
            let _ = poll_once_quietly(self.conn().batch(end_session));
        }
        self.mark();
    }

    /// Discards the connection, but ends no session by a statement, because the statement could run
    /// on the session of somebody else.
    pub(crate) fn mark(&mut self) {
        let conn = self.conn.take();
        P::Mode::inside(&self.runtime, || conn.map(PoolConnection::discard));
    }
}

/// The subject of a wait for a connection.
const POOL: Subject = Subject {
    primitive: "pool",
    name: "",
};

/// Ends the session that runs this. An aborted transaction accepts nothing but the `ROLLBACK`.
/// Behind a transaction pooler, that is the server connection which serves this message: at that
/// moment it serves no other client, but it need not be the session of an earlier statement.
const END: &str = "ROLLBACK; \
     SELECT pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())";

impl<P: Pool> Drop for Checkout<P> {
    fn drop(&mut self) {
        if self.conn.is_none() {
            return;
        }
        if self.waits && !std::thread::panicking() {
            let busy = Self {
                conn: self.conn.take(),
                runtime: self.runtime.clone(),
                waits: false,
            };
            return P::Mode::finish_later(&self.runtime, read_reply(busy));
        }
        self.discard_by(END);
        note_closed();
    }
}

/// Waits for the reply to the statement of a dropped future, so that the pool gives nobody a
/// connection on which the server is silent.
async fn read_reply<P: Pool>(mut checkout: Checkout<P>) {
    let deadline = Some(Instant::now() + PATIENCE);
    let is_usable = P::Mode::within(deadline, is_usable(checkout.conn())).await;
    // Otherwise the drop discards the connection.
    if is_usable == Some(true) {
        checkout.give_back();
    }
}

/// Whether a session replies after a future was dropped, and is not full of statements that dropped
/// futures have left. diesel-async forgets a statement if the future that prepares it is dropped,
/// and prepares it again for the next one, while the server keeps both.
pub(crate) async fn is_usable<S: Session>(session: &mut S) -> bool {
    const LEFT: &str = "SELECT pg_catalog.count(*) - pg_catalog.count(DISTINCT p.statement)
        FROM pg_catalog.pg_prepared_statements AS p";
    const MOST: i64 = 50;
    let left: QueryResult<i64> = session.one(&Statement::<BigInt>::new(LEFT, [])).await;
    left.is_ok_and(|left| left < MOST)
}
