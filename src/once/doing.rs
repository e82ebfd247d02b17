//! Work that is done once, on a connection that a handler may keep: what [`Once::run`] lends to a
//! closure, owned.
//!
//! **A client that hangs up costs no session.** A begin and a finish go on in the background if
//! their future is dropped, because diesel-async does not know whether a transaction is open after
//! the future of a `BEGIN` or `COMMIT` was dropped. What a begin yields is then dropped, and so
//! rolled back.

use std::fmt;
use std::mem;
use std::time::{Duration, Instant};

use super::{Entered, Found, Mark, Once};
use crate::error::{Error, Result};
use crate::event::Outcome;
use crate::mode::{Mode, PATIENCE};
use crate::pool::{Checkout, ConnectionOf, Pool, Reply};
use crate::session::is_closed;
use crate::transaction::LeftOpen;

/// How long a begin or a finish goes on after its future was dropped.
const LIMIT: Option<Duration> = Some(Duration::from_secs(2 * PATIENCE.as_secs()));

/// What [`Once::begin`] has found.
#[must_use = "the work is to be done, or was done, or is being done"]
pub enum Begun<P: Pool> {
    /// This call is to do the work, in this transaction.
    First(Doing<P>),
    /// The work was done before. These are the bytes that it was finished with.
    Before(Vec<u8>),
    /// Another call with this key is at work.
    Busy,
}

/// The transaction of work that is done once, on a connection of the pool, from [`Once::begin`].
///
/// [`finish`](Self::finish) commits it. A drop rolls it back: in the blocking half at once, in the
/// asynchronous half in the background, for which [`drain`](crate::drain()) waits. Either way the
/// connection returns to its pool. If the server does not reply within two seconds, for example
/// because a statement still runs, the connection is closed instead.
#[must_use = "a drop rolls the work back"]
pub struct Doing<P: Pool> {
    once: Once<P>,
    /// `None` once it was finished or dropped.
    open: Option<Open<P>>,
}

struct Open<P: Pool> {
    checkout: Checkout<P>,
    transaction: LeftOpen,
    mark: Mark,
}

impl<P: Pool> Once<P> {
    /// Opens the transaction of the work on a connection of the pool, and returns it. If the work
    /// was done before, returns its bytes instead, and `Busy` while another call with this key is
    /// at work: it never waits for one.
    ///
    /// Use it where [`run`](Self::run) cannot lend its connection to a closure, for example in a
    /// layer in front of handlers. Whoever has begun keeps a connection until the end, and may wait
    /// for itself if it takes a second one from the same pool.
    ///
    /// Two round trips: `BEGIN`, and a statement that takes the lock and looks. One more if there
    /// is nothing to do. A session that turns out to have ended is replaced, because a repetition
    /// changes nothing.
    pub fn begin<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Begun<P>> {
        P::Mode::drive(self.subject().observe("begin", self.begin_unreported(pool)))
    }

    async fn begin_unreported(&self, pool: &P) -> Result<Begun<P>> {
        self.check()?;
        let (once, pool) = (self.clone(), pool.clone());
        let mut checkout = Checkout::new(&pool, None).await?;
        P::Mode::run_detached(&checkout.runtime(), LIMIT, async move {
            let (mut sessions, mut is_elsewhere) = (0..pool.max_size(), false);
            loop {
                let begun = once.begin_on(checkout).await;
                let is_repeated = match &begun {
                    Err(Error::Database(error)) if is_closed(error) => sessions.next().is_some(),
                    Err(Error::Standby) => !mem::replace(&mut is_elsewhere, true),
                    _ => false,
                };
                if !is_repeated {
                    return begun;
                }
                checkout = Checkout::new(&pool, None).await?;
            }
        })
        .await
    }

    async fn begin_on(&self, mut checkout: Checkout<P>) -> Result<Begun<P>> {
        // A statement of the work may still run, and a rollback waits for it, too.
        checkout.discards_when_dropped();
        let begun = match self.enter_unreported(checkout.conn(), false).await {
            Ok(Some(Entered { transaction, found })) => match found {
                Found::Done(outcome) => transaction.end(Ok(Ok(Begun::Before(outcome)))).await,
                Found::New(mark) => Ok(Err((transaction.leave_open(), mark))),
            },
            Ok(None) => Ok(Ok(Begun::Busy)),
            Err(Error::InsideTransaction) => Err(Error::DirtyConnection),
            Err(error) => Err(error),
        };
        let begun = match begun {
            Ok(Ok(begun)) => Ok(begun),
            Ok(Err((transaction, mark))) => {
                let open = Open {
                    checkout,
                    transaction,
                    mark,
                };
                // The request was compared, and may be long.
                let once = Once {
                    key: self.key.clone(),
                    request: None,
                    ..*self
                };
                return Ok(Begun::First(Doing {
                    once,
                    open: Some(open),
                }));
            }
            Err(error) => Err(error),
        };
        match begun {
            Err(Error::DirtyConnection | Error::Standby) => checkout.discard(),
            _ => checkout.give_back(),
        }
        begun
    }
}

impl<P: Pool> Doing<P> {
    /// Returns the connection, inside the open READ COMMITTED transaction. Leave its end to
    /// [`finish`](Self::finish) or a drop.
    pub fn conn(&mut self) -> &mut ConnectionOf<P> {
        match &mut self.open {
            Some(open) => open.checkout.conn(),
            None => unreachable!("only what consumes it takes the connection"),
        }
    }

    /// Stores these bytes and commits them together with the work.
    ///
    /// Two round trips: an `INSERT` into `resource_control.once`, and `COMMIT`. After an error the
    /// work is rolled back, with one exception: if the reply to the `COMMIT` was lost, which
    /// [is unavailable](Error::is_unavailable), the next `begin` tells whether it was committed. A
    /// future that is dropped after its first poll may still commit.
    pub fn finish(self, outcome: impl Into<Vec<u8>>) -> Reply<'static, P, ()> {
        let outcome = outcome.into();
        P::Mode::drive(async move {
            let (subject, runtime) = (self.once.subject(), self.open().checkout.runtime());
            let finished = P::Mode::run_detached(&runtime, LIMIT, self.commit(outcome));
            subject.observe_as("finish", |()| "first", finished).await
        })
    }

    /// Rolls the work back, and returns once it is: then the next call finds the key free. A drop
    /// does the same in the background.
    ///
    /// One round trip: `ROLLBACK`.
    pub fn roll_back(self) -> <P::Mode as Mode>::Reply<'static, ()> {
        P::Mode::drive(async move {
            let runtime = self.open().checkout.runtime();
            let rolled_back = async move {
                self.undo().await;
                Ok(())
            };
            // An error says that the runtime has ended, and the connection with it.
            let _ = P::Mode::run_detached(&runtime, LIMIT, rolled_back).await;
        })
    }

    fn open(&self) -> &Open<P> {
        match &self.open {
            Some(open) => open,
            None => unreachable!("only what consumes it takes the connection"),
        }
    }

    async fn commit(mut self, outcome: Vec<u8>) -> Result<()> {
        let Some(open) = self.open.take() else {
            return Ok(());
        };
        let mut checkout = open.checkout;
        let transaction = open.transaction.on(checkout.conn());
        let done = self.once.finish(transaction, open.mark, Ok(outcome)).await;
        checkout.give_back();
        done.map(drop)
    }

    async fn undo(mut self) {
        if let Some(open) = self.open.take() {
            open.roll_back().await;
            self.once.subject().event("roll_back", "undone").emit();
        }
    }
}

impl<P: Pool> Open<P> {
    /// Rolls back, and returns the connection to its pool. Without a reply in time, discards it.
    async fn roll_back(self) {
        let mut checkout = self.checkout;
        let rolled_back = self.transaction.on(checkout.conn()).roll_back();
        if P::Mode::within(Some(Instant::now() + PATIENCE), rolled_back)
            .await
            .is_some()
        {
            checkout.give_back();
        }
    }
}

impl<P: Pool> Drop for Doing<P> {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            let (runtime, once) = (open.checkout.runtime(), self.once.clone());
            let open = Some(open);
            P::Mode::finish_later(&runtime, Self { once, open }.undo());
        }
    }
}

impl<P: Pool> Outcome for Begun<P> {
    fn word(&self) -> &'static str {
        match self {
            Self::First(_) => "begun",
            Self::Before(_) => "before",
            Self::Busy => "busy",
        }
    }
}

impl<P: Pool> fmt::Debug for Begun<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First(doing) => f.debug_tuple("First").field(doing).finish(),
            Self::Before(outcome) => f.debug_tuple("Before").field(outcome).finish(),
            Self::Busy => f.write_str("Busy"),
        }
    }
}

impl<P: Pool> fmt::Debug for Doing<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doing")
            .field("once", &self.once)
            .finish_non_exhaustive()
    }
}
