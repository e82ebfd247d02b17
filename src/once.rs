//! Work that is done once: a request that a client may send again.

// **A transaction lock first and an insert at the end**, instead of an insert that a concurrent run
// waits for. A dropped future stops waiting for this lock within a second, no row has to be updated
// later, and no isolation level makes the wait fail.
//
// **The outcome is bytes**, because only the application can say what a client gets again. A
// fingerprint is bytes for the same reason: only the application knows what tells two of its
// requests apart.
//
// **The lock of a key is in the key space of pairs.** Clients choose the keys, and FNV-1a can be
// inverted, but no named lock is a pair. So a client cannot choose a key that collides with a named
// lock.

mod doing;
pub(crate) mod sql;

use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use diesel::data_types::PgTimestamp;
use diesel::result::Error as DieselError;

use crate::advisory::sql::Lock;
use crate::advisory::xact;
use crate::advisory::{Attempt, Locks};
use crate::error::{Error, Result};
use crate::event::{Event, Subject};
use crate::input;
use crate::key::fnv1a;
use crate::metrics::Raised;
use crate::pool::{ConnectionOf, Pool, impl_debug};
#[cfg(feature = "r2d2")]
use crate::session::run_ready;
use crate::session::{Session, classify, is_read_only};
use crate::transaction::Own;

pub use self::doing::{Begun, Doing};

/// Does work once for each key, however often and on however many instances it is requested: for
/// example a POST with an idempotency key.
///
/// The work and the mark that it is done commit together, in one transaction. A later call with the
/// same key gets the bytes that the work returned. A call at the same time waits for the first one,
/// and then gets its bytes, too. If the first call fails, is dropped or crashes, its transaction is
/// rolled back, and the next call does the work.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::{Done, Error, Once};
///
/// static CHARGE: Once = Once::named("charge");
///
/// /// The reply to a POST with this body.
/// fn charge(conn: &mut PgConnection, key: &str, cents: i32) -> Result<String, Error> {
///     let once = CHARGE.key(key).fingerprint(cents.to_string());
///     let done: Result<Done, Error> = once.run(conn, |conn| {
///         let id = insert_charge(conn, cents)?;
///         Ok(format!("{cents} cents, number {id}"))
///     });
///     Ok(String::from_utf8_lossy(done?.bytes()).into_owned())
/// }
/// # diesel::table! { charge (id) { id -> Integer, cents -> Integer, } }
/// # fn insert_charge(conn: &mut PgConnection, cents: i32) -> QueryResult<i32> {
/// #     let insert = diesel::insert_into(charge::table).values(charge::cents.eq(cents));
/// #     insert.returning(charge::id).get_result(conn)
/// # }
/// # let database = workbench::Database::new();
/// # diesel_interlock::migrations::install(&database.pool(1))?;
/// # let conn = &mut database.connect();
/// # let table = "CREATE TABLE charge (id serial PRIMARY KEY, cents integer NOT NULL)";
/// # diesel::sql_query(table).execute(conn)?;
/// let first = charge(conn, "0191e9c8", 4200)?;
/// assert_eq!(charge(conn, "0191e9c8", 4200)?, first); // and not charged again
/// let other = charge(conn, "0191e9c8", 9900);
/// assert!(matches!(other, Err(Error::OtherRequest(_))));
/// # assert_eq!(charge::table.count().get_result(conn), Ok(1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// An `Err` of the work is rolled back and not stored. To store a refusal, such as a declined card,
/// return it as `Ok` with bytes that say so. What the work does outside the database is not rolled
/// back: pass the key on to those services, so that they can be idempotent, too.
///
/// The bytes are yours to define: usually the reply. If a client might reuse a key for another
/// request, give the request to [`fingerprint`](Self::fingerprint), and the other one is refused.
/// If clients choose the keys, put the client's identity into the key. A key is remembered until it
/// is [pruned](crate::prune::once).
///
/// # Transactions and waiting
///
/// Call it on a connection that is not in a transaction: it opens one at READ COMMITTED. Inside a
/// test transaction it opens a savepoint instead.
///
/// The transaction holds a transaction lock, whose key is a pair of `int`: the two halves of the
/// number of `LockKey::parts(["once", name, key])`. Because clients choose these keys, they are
/// kept apart from named locks: pairs can collide only with each other and with an application's
/// own pairs.
///
/// Calls at the same time [wait](crate::advisory::AdvisoryLock#transaction-locks) on that lock,
/// each with its connection, under the session's `statement_timeout` and `lock_timeout`. All of
/// this works behind a pooler in transaction mode.
///
/// # Errors
///
/// [`Error::Input`], [`Error::OtherRequest`], [`Error::InsideTransaction`],
/// [`Error::TransactionEnded`], [`Error::Standby`], [`Error::NotInstalled`] and
/// [`Error::Database`]; and, if it must wait inside a test transaction
/// at REPEATABLE READ, [`Error::RepeatableRead`]. If the connection was lost during the COMMIT,
/// call again: the next call tells whether the work was done.
#[must_use = "nothing is done until it is run"]
#[derive(Clone)]
pub struct Once<P: Pool> {
    name: &'static str,
    key: Option<String>,
    request: Option<Vec<u8>>,
    pool: PhantomData<fn(&P)>,
}

/// The outcome of work that is done once: the bytes that the work returned, in this call or before.
#[must_use = "the outcome may be that of another request with the same key"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done {
    /// This call did the work, and committed it.
    First(Vec<u8>),
    /// The work was done before. These are the bytes that it returned then.
    Before(Vec<u8>),
}

impl Done {
    /// Returns whether this call did the work.
    pub const fn is_first(&self) -> bool {
        matches!(self, Self::First(_))
    }

    /// Returns the bytes that the work returned when it was done.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::First(bytes) | Self::Before(bytes) => bytes,
        }
    }

    /// Returns the bytes that the work returned when it was done.
    pub fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::First(bytes) | Self::Before(bytes) => bytes,
        }
    }
}

/// A transaction that holds the lock, and what it has found.
struct Entered<'c, S: Session> {
    transaction: Own<'c, S>,
    found: Found,
}

/// What a transaction that holds the lock has found.
enum Found {
    /// The work was done, with this outcome.
    Done(Vec<u8>),
    /// The work is to be done.
    New(Mark),
}

/// What is stored with an outcome.
struct Mark {
    /// When the server began the transaction.
    began: PgTimestamp,
    fingerprint: Option<Vec<u8>>,
}

impl<P: Pool> Once<P> {
    /// Names the work. Without a [key](Self::key), it is done once in the life of the database.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            key: None,
            request: None,
            pool: PhantomData,
        }
    }

    /// Returns the work for one key, such as an idempotency key. A second call replaces the first
    /// key.
    ///
    /// An empty key is an error, because all requests without a key would share it.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            key: Some(input::show(key)),
            request: self.request.clone(),
            ..*self
        }
    }

    /// Returns the work for one request, given by the bytes that tell it from other requests, such
    /// as its body. A second call replaces the first bytes.
    ///
    /// The server stores their SHA-256 with the outcome. A later call with the same key and other
    /// bytes is [`Error::OtherRequest`]. Nothing is compared if the key was stored without a
    /// fingerprint, or if this call has none. The bytes are sent once, in the statement that takes
    /// the lock, so there is no round trip more.
    pub fn fingerprint(&self, request: impl Into<Vec<u8>>) -> Self {
        Self {
            key: self.key.clone(),
            request: Some(request.into()),
            ..*self
        }
    }

    async fn run_on<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut ConnectionOf<P>,
        waits: bool,
        work: impl AsyncFnOnce(&mut ConnectionOf<P>) -> Result<T, E>,
    ) -> Result<Attempt<Done>, E> {
        let Some((entered, took)) = self.enter(conn, waits).await? else {
            return Ok(Attempt::Busy);
        };
        let Entered { transaction, found } = entered;
        let done = match found {
            Found::Done(outcome) => transaction.end(Ok(Done::Before(outcome))).await,
            Found::New(mark) => {
                let worked = work(transaction.conn).await;
                let done = self.finish(transaction, mark, worked).await;
                done.map(Done::First)
            }
        };
        let outcome = match &done {
            Ok(Done::First(_)) => "first",
            Ok(Done::Before(_)) => "before",
            Err(_) => "failed",
        };
        self.report(waits, took, outcome, None);
        done.map(Attempt::Acquired)
    }

    /// Opens the transaction, takes the lock, and only then looks for a stored outcome. Also
    /// returns how long that took. `None` if another call holds the lock and this one does not
    /// wait.
    async fn enter<'c>(
        &self,
        conn: &'c mut ConnectionOf<P>,
        waits: bool,
    ) -> Result<Option<(Entered<'c, ConnectionOf<P>>, Duration)>> {
        let began = Instant::now();
        let entered = {
            let _waiting = Raised::waiting(self.subject());
            self.enter_unreported(conn, waits).await
        };
        let took = began.elapsed();
        match &entered {
            // Reported later, with the outcome of the work.
            Ok(Some(_)) => {}
            Ok(None) => self.report(waits, took, "busy", None),
            Err(error) => self.report(waits, took, "failed", Some(error)),
        }
        Ok(entered?.map(|entered| (entered, took)))
    }

    async fn enter_unreported<'c>(
        &self,
        conn: &'c mut ConnectionOf<P>,
        waits: bool,
    ) -> Result<Option<Entered<'c, ConnectionOf<P>>>> {
        self.check()?;
        let transaction = Own::begin(conn).await?;
        match self.look(transaction.conn, waits).await {
            Ok(Some(found)) => Ok(Some(Entered { transaction, found })),
            Ok(None) => transaction.end(Ok(None)).await,
            Err(error) => Err(transaction.fail(error).await),
        }
    }

    /// Reports how a call ended, and how long it took without the work.
    fn report(&self, waits: bool, took: Duration, outcome: &'static str, error: Option<&Error>) {
        let operation = if waits { "run" } else { "try_run" };
        Event {
            took,
            waits: true,
            error,
            ..self.subject().event(operation, outcome)
        }
        .emit();
    }

    const fn subject(&self) -> Subject {
        Subject {
            primitive: "once",
            name: self.name,
        }
    }

    async fn look<S: Session>(&self, session: &mut S, waits: bool) -> Result<Option<Found>> {
        let (name, key) = (self.name, self.stored_key());
        let number = fnv1a(&input::join(["once", name, key]));
        let pair = ((number >> 32) as i32, number as i32);
        let lock = Locks::from(Lock::new(pair.into(), false)?);
        let statement = sql::look(pair, name, key, self.request.as_deref());
        let look: sql::Look = loop {
            let look: sql::Look = session.one(&statement).await?;
            match look.is_ours {
                Some(true) => break look,
                Some(false) if !waits => return Ok(None),
                Some(false) => drop(xact::wait(session, &lock, None, self.subject()).await?),
                None => return Err(Error::Standby),
            }
        };
        let (began, fingerprint) = (look.began, look.given);
        Ok(Some(match (look.outcome, look.stored) {
            (None, _) => Found::New(Mark { began, fingerprint }),
            (_, Some(stored)) if fingerprint.is_some_and(|given| given != stored) => {
                return Err(Error::OtherRequest(name));
            }
            (Some(outcome), _) => Found::Done(outcome),
        }))
    }

    /// Stores the outcome of the work, and commits both. Rolls back if the work failed.
    async fn finish<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        transaction: Own<'_, ConnectionOf<P>>,
        mark: Mark,
        worked: Result<T, E>,
    ) -> Result<Vec<u8>, E> {
        let outcome = match worked {
            Ok(outcome) => outcome.into(),
            Err(error) => return transaction.end(Err(error)).await,
        };
        let Mark { began, fingerprint } = mark;
        let store = sql::store(self.name, self.stored_key(), &outcome, fingerprint, began);
        let done = match transaction.conn.one(&store).await {
            Ok(true) => Ok(outcome),
            Ok(false) | Err(DieselError::NotFound) => Err(Error::TransactionEnded),
            // The try has found that the server may write, so the work has made the transaction
            // read only.
            Err(error) if is_read_only(&error) => Err(error.into()),
            Err(error) => Err(classify(transaction.conn, error).await),
        };
        transaction.end(done.map_err(E::from)).await
    }

    fn check(&self) -> Result<()> {
        input::name(self.name)?;
        self.key.as_deref().map_or(Ok(()), input::name)
    }

    fn stored_key(&self) -> &str {
        self.key.as_deref().unwrap_or_default()
    }
}

#[cfg(feature = "r2d2")]
impl<M> Once<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Runs `work` in its own transaction and stores the bytes that it returns. If the work was
    /// done before, returns the bytes of that time instead.
    ///
    /// Four round trips in addition to those of `work`: `BEGIN`, a statement that takes the lock
    /// and looks, an `INSERT` into `resource_control.once`, and `COMMIT`. Three if the work was
    /// done before. A call that waits sends three more.
    pub fn run<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<Done, E> {
        let done = run_ready(self.run_on(conn, true, async |conn| work(conn)))?;
        Ok(done.of_endless_wait()?)
    }

    /// Runs `work` as [`run`](Self::run) does, but never waits: returns `Busy` while another call
    /// with this key is at work.
    ///
    /// Use it for example in a handler that then replies 409. Three round trips if it is busy.
    pub fn try_run<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<Attempt<Done>, E> {
        run_ready(self.run_on(conn, false, async |conn| work(conn)))
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Once<P> {
    /// Runs `work` in its own transaction and stores the bytes that it returns. If the work was
    /// done before, returns the bytes of that time instead. In everything else like the blocking
    /// `run`; a future that is dropped rolls the work back.
    pub async fn run<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Done, E> {
        let done = self.run_on(conn, true, work).await?;
        Ok(done.of_endless_wait()?)
    }

    /// Runs `work` as [`run`](Self::run) does, but never waits: returns `Busy` while another call
    /// with this key is at work.
    pub async fn try_run<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Attempt<Done>, E> {
        self.run_on(conn, false, work).await
    }
}

impl_debug!(Once | this | name = this.name, key = this.key);
