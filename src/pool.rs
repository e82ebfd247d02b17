//! The pools that a handle can be made for.

#[cfg(feature = "bb8")]
mod bb8;
#[cfg(feature = "deadpool")]
mod deadpool;
#[cfg(feature = "r2d2")]
mod r2d2;

use std::ops::DerefMut;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::mode::{self, Mode, PATIENCE};
use crate::sealed::Sealed;
use crate::session::Session;

#[cfg(feature = "bb8")]
pub use self::bb8::Bb8Pool;
#[cfg(feature = "deadpool")]
pub use self::deadpool::DeadPool;
#[cfg(feature = "r2d2")]
pub use self::r2d2::PgPool;

/// A pool of connections: Diesel's r2d2 pool, and diesel-async's deadpool and bb8. The trait is
/// sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a pool of PostgreSQL connections that this crate knows",
    label = "not a pool of Diesel's r2d2, or of diesel-async's deadpool or bb8",
    note = "import the handle of your pool: `diesel_interlock::AdvisoryLock` for r2d2, \
            `diesel_interlock::deadpool::AdvisoryLock` for deadpool, \
            `diesel_interlock::bb8::AdvisoryLock` for bb8",
    note = "a wrapper of a pool is given as the pool inside: `&**wrapper`, `wrapper.get_ref()` or \
         `&wrapper.0`"
)]
pub trait Pool: Sealed + Clone + Send + Sync + 'static {
    /// The half that the pool belongs to.
    type Mode: Mode;

    /// A connection out of this pool, which its drop gives back.
    type Pinned: PoolConnection<Target = <Self::Mode as Mode>::Connection>;

    /// Takes a connection. Waits for it as long as the pool's own settings allow; a blocking pool
    /// waits no longer than `limit`, and an asynchronous one is dropped then. The future of a
    /// blocking pool is ready when it is first polled.
    fn check_out(
        &self,
        limit: Option<Duration>,
    ) -> impl Future<Output = Result<Self::Pinned>> + Send;

    /// Whether the pool can spare one of its connections for a waiter, which then waits on the
    /// server. If not, it polls. A pool of one spares none.
    fn can_spare(&self) -> bool;

    /// How many connections the pool could give without opening one.
    fn idle(&self) -> usize;

    /// How many connections the pool has at most.
    fn max_size(&self) -> usize;
}

/// Implements `Debug` for a type over a pool. A derive would require that of the pool, too.
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

/// Takes a connection, and replaces those whose sessions are known to have ended: nothing was sent
/// on them.
pub(crate) async fn check_out<P: Pool>(pool: &P, limit: Option<Duration>) -> Result<P::Pinned> {
    loop {
        let mut conn = pool.check_out(limit).await?;
        if !conn.is_closed() {
            return Ok(conn);
        }
        conn.discard();
    }
}

/// A connection out of a [`Pool`].
pub trait PoolConnection: Sealed + DerefMut + Send + 'static {
    /// Ends the session. The connection does not go back to its pool.
    fn discard(self);
}

/// What an operation over a pool `P` returns: a [`Result<T>`] over r2d2, and a future of it over
/// deadpool and bb8.
pub type Reply<'a, P, T> = <<P as Pool>::Mode as Mode>::Reply<'a, Result<T>>;

/// The connection inside a pool `P`: `PgConnection` over r2d2, and `AsyncPgConnection` over
/// deadpool and bb8.
pub type Connection<P> = <<P as Pool>::Mode as Mode>::Connection;

/// A connection for a few statements. Its drop gives it back, unless a transaction was left open on
/// it. If the reply to a statement was not read, that is waited for first.
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

    /// The connection, on which something is about to be sent. Call
    /// [`note_reply`](Self::note_reply) once the reply was read.
    pub(crate) fn conn(&mut self) -> &mut Connection<P> {
        // The worst, until then.
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

    /// That on which it was borrowed.
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
            return P::Mode::leave(&self.runtime, read_reply(busy));
        }
        P::Mode::inside(&self.runtime, || {
            if !self.is_busy && conn.transaction().is_none() {
                drop(conn);
            } else {
                conn.discard();
                mode::note_closed();
            }
        });
    }
}

/// Waits for the reply to the statement of a dropped future, so that the pool gives no connection
/// whose server is silent.
async fn read_reply<P: Pool>(mut borrowed: Borrowed<P>) {
    let deadline = Some(Instant::now() + PATIENCE);
    let replied = P::Mode::within(deadline, borrowed.conn().batch("")).await;
    // Otherwise its drop discards it.
    if matches!(replied, Some(Ok(()))) {
        borrowed.note_reply();
    }
}

/// Waits until everything that was dropped in this process is released: guards, permits, terms,
/// ticks, and futures half way. Returns whether all were within `limit`: each release was
/// confirmed, or what it releases has expired, or its connection was closed over a second ago, so
/// that the server has noticed, unless its `client_connection_check_interval` is longer. Sends
/// nothing of its own. While the database is away, releases are tried again, until what they
/// release has expired. What was dropped on a connection of the caller (`with_on`,
/// `transaction`, `Once::run`) is not waited for: it ends with its statement, or with the
/// connection.
///
/// Call it at the end of `main`, or of a test. A runtime that ends drops its tasks, and a process
/// that ends its threads: a permit or a leader's term would then be free only when its time is
/// over. A task that was aborted has dropped what it held when its handle says that it has ended.
///
#[cfg_attr(
    feature = "deadpool",
    doc = r#"
```
use std::time::Duration;

use diesel_interlock::deadpool::{Leader, PgPool};

static DISPATCHER: Leader = Leader::named("dispatcher", Duration::from_secs(15));

async fn run(pool: PgPool, shutdown: impl Future<Output = ()>) {
    tokio::select! {
        _ = DISPATCHER.lead(&pool, |_| std::future::pending()) => {}
        () = shutdown => {}
    }
    diesel_interlock::drain(&pool, Duration::from_secs(5)).await;
}
# use diesel::{QueryDsl, RunQueryDsl};
# use diesel_async::{AsyncPgConnection, pooled_connection::AsyncDieselConnectionManager};
# use diesel_interlock::monitor::views::leader;
# let database = workbench::Database::new();
# diesel_interlock::migrations::install(&database.pool(1))?;
# let conn = &mut database.connect();
# let mut leaders = || leader::table.count().get_result::<i64>(conn).unwrap();
# let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
# runtime.block_on(async {
#     let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(database.url());
#     let pool = PgPool::builder(manager).build().unwrap();
#     let shutdown = async {
#         while leaders() == 0 {
#             tokio::time::sleep(Duration::from_millis(5)).await;
#         }
#     };
#     run(pool, shutdown).await;
# });
# drop(runtime);
# assert_eq!(leaders(), 0);
# Ok::<(), Box<dyn std::error::Error>>(())
```
"#
)]
pub fn drain<P: Pool>(pool: &P, limit: Duration) -> <P::Mode as Mode>::Reply<'_, bool> {
    // The pool says which half waits.
    let _ = pool;
    P::Mode::drive(async move {
        let deadline = Instant::now().checked_add(limit);
        while !mode::has_drained() {
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return false;
            }
            mode::pause::<P::Mode>(Duration::from_millis(1)).await;
        }
        true
    })
}
