//! Work that is done once: a request that a client may repeat.

mod done;
mod sql;

use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use diesel::data_types::PgTimestamp;
use diesel::result::Error as DieselError;

pub use self::done::Done;
use crate::advisory::sql::Lock;
use crate::advisory::xact;
use crate::advisory::{Attempt, Locks};
use crate::call::{ended, in_batches};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::input;
use crate::key::fnv1a;
use crate::mode::Mode;
use crate::pool::{Connection, Pool, Reply, debug};
use crate::session::Session;
#[cfg(feature = "r2d2")]
use crate::session::now;
use crate::time::LONGEST;
use crate::transaction::Own;

/// Work that is done once for each key, however often and on however many instances it is asked for: a POST with an idempotency key.
///
/// The work and the mark that it is done commit together, in one transaction. A later call gets the bytes that the work has returned,
/// and so does a call at the same time, which waits for the first one. If the first one fails, is dropped or crashes, it is rolled
/// back, and the next one does the work.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::{Done, Once};
///
/// static CHARGE: Once = Once::named("charge");
///
/// /// The reply to a POST, and none to one that has another amount under the same key, which is refused.
/// fn charge(conn: &mut PgConnection, key: &str, cents: i32) -> QueryResult<Option<String>> {
///     let done: QueryResult<Done> = CHARGE.key(key).run(conn, |conn| {
///         let id = insert_charge(conn, cents)?;
///         Ok(format!("{cents} cents, number {id}"))
///     });
///     let reply = String::from_utf8_lossy(done?.bytes()).into_owned();
///     Ok(Some(reply).filter(|reply| reply.starts_with(&format!("{cents} cents"))))
/// }
/// # diesel::table! { charge (id) { id -> Integer, cents -> Integer, } }
/// # fn insert_charge(conn: &mut PgConnection, cents: i32) -> QueryResult<i32> {
/// #     diesel::insert_into(charge::table).values(charge::cents.eq(cents)).returning(charge::id).get_result(conn)
/// # }
/// # let database = workbench::Database::new();
/// # diesel_interlock::migrations::install(&database.pool(1))?;
/// # let conn = &mut database.connect();
/// # diesel::sql_query("CREATE TABLE charge (id serial PRIMARY KEY, cents integer NOT NULL)").execute(conn)?;
/// let first = charge(conn, "0191e9c8", 4200)?;
/// assert_eq!(charge(conn, "0191e9c8", 4200)?, first); // and not charged again
/// assert_eq!(charge(conn, "0191e9c8", 9900)?, None);
/// # assert_eq!(charge::table.count().get_result(conn), Ok(1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// An `Err` of the work rolls back and is not stored. A refusal that shall stand is an `Ok`, whose bytes say so. What the work does
/// outside the database is not rolled back with it: pass the key on to those services.
///
/// The bytes are the application's: a reply, and where the same key may come with another request, what tells the two apart. Where
/// clients choose the keys, the key contains the client. A key is remembered until it is [pruned](Self::prune).
///
/// # Transactions and waiting
///
/// The transaction is READ COMMITTED, on a connection outside a transaction; inside that of a test it is a savepoint. It holds the
/// transaction lock of the pair of `int` that are the halves of the number of `LockKey::parts(["once", name, key])`. Clients choose
/// these keys, and in the pairs they meet only each other and an application's own pairs: no named lock. Calls at the same time [wait](crate::advisory::AdvisoryLock#transaction-locks) on that lock, each
/// with its connection, under the session's `statement_timeout` and `lock_timeout`. It works behind a pooler in transaction mode.
///
/// # Errors
///
/// [`Error::Input`], [`Error::InsideTransaction`], [`Error::TransactionEnded`], [`Error::Standby`], [`Error::NotInstalled`] and
/// [`Error::Database`], and inside a test's transaction at REPEATABLE READ [`Error::RepeatableRead`], if it must wait. After a
/// connection that was lost during the COMMIT, the next call tells whether the work is done.
#[must_use = "nothing is done until it is run"]
#[derive(Clone)]
pub struct Once<P: Pool> {
    name: &'static str,
    key: Option<String>,
    pool: PhantomData<fn(&P)>,
}

/// The transaction in which the lock is held, when the server began it, and the outcome if there is one.
struct Entered<'c, S: Session> {
    transaction: Own<'c, S>,
    began: PgTimestamp,
    outcome: Option<Vec<u8>>,
    took: Duration,
    operation: &'static str,
}

const fn operation(waits: bool) -> &'static str {
    if waits { "run" } else { "try_run" }
}

impl<P: Pool> Once<P> {
    /// Names the work. Without a key it is done once in the life of the database.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            key: None,
            pool: PhantomData,
        }
    }

    /// Returns the work of one request. An empty key is refused, because all requests without one would have it. A second key
    /// replaces the first.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            key: Some(input::shown(key)),
            ..*self
        }
    }

    /// Forgets what was done longer ago than `older_than`, of all names, and returns how many. A client that repeats such a request
    /// has it done again. A round trip for each 10,000, a `DELETE` that reads the table.
    pub fn prune(pool: &P, older_than: Duration) -> Reply<'_, P, u64> {
        P::Mode::drive(async move {
            if older_than > LONGEST {
                return Err(Error::input("an age is 1,000 years at most"));
            }
            in_batches(pool, sql::prune(older_than)).await
        })
    }

    /// Opens the transaction, takes the lock, and then looks whether it is done. `None` if another call holds the lock, and this one is
    /// not to wait.
    async fn enter<'c>(
        &self,
        conn: &'c mut Connection<P>,
        waits: bool,
    ) -> Result<Option<Entered<'c, Connection<P>>>> {
        let (start, operation) = (Instant::now(), operation(waits));
        let entered = async {
            self.check()?;
            let transaction = Own::begin(conn).await?;
            match self.look(transaction.conn, waits).await {
                Ok(Some((outcome, began))) => Ok(Some(Entered {
                    transaction,
                    began,
                    outcome,
                    took: start.elapsed(),
                    operation,
                })),
                Ok(None) => transaction.end(Ok(None)).await,
                Err(error) => Err(transaction.failed(error).await),
            }
        };
        let entered = self.subject().waiting(entered).await;
        let took = start.elapsed();
        match &entered {
            Ok(Some(_)) => {}
            Ok(None) => self.subject().waited(operation, "busy", took, None),
            Err(error) => self
                .subject()
                .waited(operation, "failed", took, Some(error)),
        }
        entered
    }

    /// Tells what it came to, and how long that took without the work.
    fn told<E>(
        &self,
        operation: &'static str,
        took: Duration,
        done: Result<Done, E>,
    ) -> Result<Done, E> {
        let outcome = match &done {
            Ok(Done::First(_)) => "first",
            Ok(Done::Before(_)) => "before",
            Err(_) => "failed",
        };
        self.subject().waited(operation, outcome, took, None);
        done
    }

    const fn subject(&self) -> Subject {
        Subject {
            primitive: "once",
            name: self.name,
        }
    }

    async fn look<S: Session>(
        &self,
        session: &mut S,
        waits: bool,
    ) -> Result<Option<(Option<Vec<u8>>, PgTimestamp)>> {
        let (name, key) = (self.name, self.stored_key());
        let number = fnv1a(&input::joined(["once", name, key]));
        let pair = ((number >> 32) as i32, number as i32);
        let lock = Locks::from(Lock::new(pair.into(), false)?);
        loop {
            match session.one(&sql::look(pair, name, key)).await? {
                (Some(true), outcome, began) => return Ok(Some((outcome, began))),
                (Some(false), ..) if !waits => return Ok(None),
                (Some(false), ..) => drop(xact::wait(session, &lock, None).await?),
                (None::<bool>, ..) => return Err(Error::Standby),
            }
        }
    }

    /// Stores what came of the work, and commits both.
    async fn finish<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        transaction: Own<'_, Connection<P>>,
        began: PgTimestamp,
        worked: Result<T, E>,
    ) -> Result<Done, E> {
        let outcome = match worked {
            Ok(outcome) => outcome.into(),
            Err(error) => return transaction.end(Err(error)).await,
        };
        let store = sql::store(self.name, self.stored_key(), &outcome, began);
        let done = match transaction.conn.one(&store).await {
            Ok(true) => Ok(Done::First(outcome)),
            Ok(false) | Err(DieselError::NotFound) => Err(Error::TransactionEnded),
            Err(error) => Err(ended(transaction.conn, error).await),
        };
        transaction.end(done.map_err(E::from)).await
    }

    fn check(&self) -> Result<()> {
        input::name(self.name)?;
        match self.key.as_deref() {
            None => Ok(()),
            Some("") => Err(Error::input(
                "the key of what is done once must not be empty",
            )),
            Some(key) => input::text(key),
        }
    }

    fn stored_key(&self) -> &str {
        self.key.as_deref().unwrap_or_default()
    }
}

#[cfg(feature = "r2d2")]
impl Once<crate::pool::PgPool> {
    /// Runs `work` in a transaction of its own and stores the bytes that it returns, or returns those of the time when that was done.
    ///
    /// Four round trips beside those of `work`: `BEGIN`, one that takes the lock and looks, an `INSERT` into `resource_control.once`,
    /// and `COMMIT`. Three if it was done before. A call that waits sends three more.
    pub fn run<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<Done, E> {
        let done = self.run_or_refuse(conn, true, work)?;
        Ok(done.acquired().ok_or(Error::TimedOut)?)
    }

    /// As [`run`](Self::run), but does not wait: `Busy` while another call with this key is at work, for example for a handler that
    /// replies 409. Three round trips if it is busy.
    pub fn try_run<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<Attempt<Done>, E> {
        self.run_or_refuse(conn, false, work)
    }

    fn run_or_refuse<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        waits: bool,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<Attempt<Done>, E> {
        let Some(entered) = now(self.enter(conn, waits))? else {
            return Ok(Attempt::Busy);
        };
        let (operation, took) = (entered.operation, entered.took);
        let done = match entered.outcome {
            Some(outcome) => now(entered.transaction.end(Ok(Done::Before(outcome)))),
            None => {
                let worked = work(entered.transaction.conn);
                now(self.finish(entered.transaction, entered.began, worked))
            }
        };
        self.told(operation, took, done).map(Attempt::Acquired)
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Once<P> {
    /// Runs `work` in a transaction of its own and stores the bytes that it returns, or returns those of the time when that was done.
    ///
    /// Four round trips beside those of `work`: `BEGIN`, one that takes the lock and looks, an `INSERT` into `resource_control.once`,
    /// and `COMMIT`. Three if it was done before. A call that waits sends three more.
    pub async fn run<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Done, E> {
        let done = self.run_or_refuse(conn, true, work).await?;
        Ok(done.acquired().ok_or(Error::TimedOut)?)
    }

    /// As [`run`](Self::run), but does not wait: `Busy` while another call with this key is at work, for example for a handler that
    /// replies 409. Three round trips if it is busy.
    pub async fn try_run<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Attempt<Done>, E> {
        self.run_or_refuse(conn, false, work).await
    }

    async fn run_or_refuse<T: Into<Vec<u8>>, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        waits: bool,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Attempt<Done>, E> {
        let Some(entered) = self.enter(conn, waits).await? else {
            return Ok(Attempt::Busy);
        };
        let (operation, took) = (entered.operation, entered.took);
        let done = match entered.outcome {
            Some(outcome) => entered.transaction.end(Ok(Done::Before(outcome))).await,
            None => {
                let worked = work(entered.transaction.conn).await;
                let Entered {
                    transaction, began, ..
                } = entered;
                self.finish(transaction, began, worked).await
            }
        };
        self.told(operation, took, done).map(Attempt::Acquired)
    }
}

debug!(Once | this | name = this.name, key = this.key);
