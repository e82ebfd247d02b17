//! Rate limits over a pool and on a connection, blocking.

use std::future::{Future, ready};
use std::thread;
use std::time::Duration;

use diesel::pg::PgConnection;

#[cfg(feature = "r2d2")]
use super::rules;
use super::{Check, CheckAll, RateLimit, RateLimitState, Reservation, Reserve};
use super::{operations, waiting};
use crate::clock::Deadline;
use crate::error::Result;
use crate::events::{self, Outcome};
#[cfg(feature = "r2d2")]
use crate::pool::{self, PgPool, PooledPgConnection};
use crate::session::{Blocking, now};

/// # Checks
///
/// A check is one round trip, and one more to prepare the statement, once per connection:
/// ```sql
/// SELECT resource_control.spend_rate_limit($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
/// ```
/// Most limited calls only read: they lock no row and assign no transaction id. Any other check locks the row of the key, reads the
/// clock, and decides anew. It waits at most 250 milliseconds for a transaction that has locked the row, and is then limited as
/// [`Contended`](crate::LimitedReason::Contended). At a key that many use, it may meet one transaction after the other. If their
/// commits are slow, these waits add up.
///
/// Where the session's default isolation level is stricter than READ COMMITTED, a serialization failure is retried once, in a
/// separate READ COMMITTED transaction. After an error that Diesel does not classify, one more round trip queries the catalogue,
/// because a function, a table or a privilege may be missing.
///
/// # Errors of checks
///
/// - [`Error::Input`](crate::Error::Input) for a name that is empty or longer than 1,000 bytes, for a key likewise, for a NUL
///   character in them, for a quota that is out of range, and for a cost of zero. Nothing was sent. Also for a
///   [cost above the burst](crate::error::Input::CostAboveBurst) of the program's quota, which the database refuses.
/// - [`Misplaced::SpendInTransaction`](crate::error::Misplaced::SpendInTransaction) if a transaction is open on the connection,
///   except the one that `begin_test_transaction` opened. On a borrowed connection, resets, give-backs and pruning are allowed in a
///   transaction that plain SQL has opened, and take effect when it commits.
/// - [`Error::Pool`](crate::Error::Pool) if the pool had no connection in time, and
///   [`Error::TransactionInPool`](crate::Error::TransactionInPool) if an earlier user of the connection had left a
///   transaction open.
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled) and
///   [`Schema::MissingRights`](crate::error::Schema::MissingRights).
/// - [`Error::ReadOnly`](crate::Error::ReadOnly) on a standby and in a read-only session, unless no units are left there: then
///   the call is limited.
/// - [`Error::StrictIsolation`](crate::Error::StrictIsolation) for a serialization failure inside a test transaction.
/// - [`Error::Database`](crate::Error::Database) for anything else. If the connection broke, the units may have been spent. While a
///   session has locked the whole table, as `VACUUM FULL` and `ALTER TABLE` do, a check fails after 250 milliseconds.
impl RateLimit {
    /// Spends the units of a call if the limit allows it, through a connection from the pool. Never waits for units.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows, and at most 250 milliseconds for another
    /// transaction, as [above](#checks).
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks).
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel_interlock::{Check, Error, PgPool, Quota, RateLimit};
    ///
    /// static API: RateLimit = RateLimit::named("api", Quota::per_minute(100).burst(20));
    ///
    /// fn status(pool: &PgPool, customer: i64) -> Result<u16, Error> {
    ///     let check = API.key(customer).check(pool)?;
    ///     for (name, value) in check.headers().fields() {
    ///         println!("{name}: {value}"); // to the response
    ///     }
    ///     Ok(if check.is_allowed() { 200 } else { 429 })
    /// }
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # let pool = database.pool(1);
    /// # for _ in 0..20 { assert_eq!(status(&pool, 7)?, 200); }
    /// # assert_eq!(status(&pool, 7)?, 429);
    /// # Ok::<(), Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn check(&self, pool: &PgPool) -> Result<Check> {
        let check = async {
            let mut conn = check_out(pool, &[self])?;
            operations::check(&mut Blocking::pooled(&mut conn), self).await
        };
        self.observed("check", check, Check::outcome)
    }

    /// Spends the units of a call if the limit allows it, on the given connection. Never waits for units.
    ///
    /// # Blocking
    ///
    /// Waits at most 250 milliseconds for another transaction, as [above](#checks).
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks).
    pub fn check_on(&self, conn: &mut PgConnection) -> Result<Check> {
        let session = &mut Blocking::lent(conn);
        self.observed("check", operations::check(session, self), Check::outcome)
    }

    /// Checks several limits, through a connection from the pool: spends the units of all of them, or of none.
    ///
    /// One round trip: `SELECT resource_control.check_rate_limits($1, …)`. A limited call mostly only reads. The same key given
    /// twice is checked for the sum of the costs. The check first reads all limits. If some refuse, the outcome is that of the
    /// limit with the longest wait. If none does, it spends the units key by key, and the first limit that then refuses is the
    /// outcome. One [durable](Self::durable) limit makes the whole check wait for the disk.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows. The keys are locked in the byte order of name
    /// and key. The check waits for another transaction at most 250 milliseconds at the first key, and at most 25 at each
    /// later one, because it holds the earlier keys meanwhile.
    ///
    /// Give a limit that all customers share a name that sorts last, such as `everyone` after `customer`. The check then waits at a
    /// customer's key before it locks the shared one. If the shared limit sorts first, about 40 calls a second that meet the locked
    /// key of one customer keep the shared limit locked all the time, and other calls are limited as
    /// [`Contended`](crate::LimitedReason::Contended). Let `idle_in_transaction_session_timeout` end forgotten transactions.
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks), and
    /// [`Input::DifferentQuotas`](crate::error::Input::DifferentQuotas).
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel_interlock::{CheckAll, Error, PgPool, Quota, RateLimit};
    ///
    /// static TENANT: RateLimit = RateLimit::named("by tenant", Quota::per_minute(100));
    /// static EVERYONE: RateLimit = RateLimit::named("everyone", Quota::per_second(500)); // sorts last
    ///
    /// fn status(pool: &PgPool, tenant: i64) -> Result<u16, Error> {
    ///     Ok(match RateLimit::check_all(pool, &[&TENANT.key(tenant), &EVERYONE])? {
    ///         CheckAll::Allowed(_) => 200,
    ///         CheckAll::Limited { by: 0, .. } => 429, // this tenant's own limit
    ///         CheckAll::Limited { .. } => 503,
    ///     })
    /// }
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # assert_eq!(status(&database.pool(1), 7)?, 200);
    /// # Ok::<(), Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn check_all(pool: &PgPool, limits: &[&RateLimit]) -> Result<CheckAll> {
        let check = async {
            let mut conn = check_out(pool, limits)?;
            operations::check_all(&mut Blocking::pooled(&mut conn), limits).await
        };
        now(operations::observed_all(limits, check))
    }

    /// As [`check_all`](Self::check_all), on the given connection.
    ///
    /// # Blocking
    ///
    /// As [`check_all`](Self::check_all), without the pool.
    ///
    /// # Errors
    ///
    /// As [`check_all`](Self::check_all).
    pub fn check_all_on(conn: &mut PgConnection, limits: &[&RateLimit]) -> Result<CheckAll> {
        let session = &mut Blocking::lent(conn);
        let check = operations::check_all(session, limits);
        now(operations::observed_all(limits, check))
    }

    /// Spends the units of a call in advance, if the wait for them is at most `max_wait`, through a connection from the pool.
    /// Does not wait for them: the outcome has the wait.
    ///
    /// One round trip. Reservations are served in the order in which they were made, and a plain check is limited while
    /// reservations are ahead of it. If the wait would be longer, nothing is spent. `max_wait` counts as 366 days at most.
    ///
    /// # Blocking
    ///
    /// As [`check`](Self::check).
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::{Error, PgPool, Quota, RateLimit, Reserve};
    ///
    /// static MAILS: RateLimit = RateLimit::named("mails", Quota::per_second(10).burst(1));
    ///
    /// fn send(pool: &PgPool) -> Result<(), Error> {
    ///     let Reserve::Reserved(reservation) = MAILS.reserve(pool, Duration::from_secs(1))? else {
    ///         return Ok(()); // the queue is longer than a second
    ///     };
    ///     std::thread::sleep(reservation.wait); // no connection is held meanwhile
    ///     Ok(())
    /// }
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # send(&database.pool(1))?;
    /// # Ok::<(), Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn reserve(&self, pool: &PgPool, max_wait: Duration) -> Result<Reserve> {
        let reserve = async {
            let mut conn = check_out(pool, &[self])?;
            operations::reserve(&mut Blocking::pooled(&mut conn), self, max_wait).await
        };
        self.observed("reserve", reserve, Reserve::outcome)
    }

    /// As [`reserve`](Self::reserve), on the given connection.
    ///
    /// # Blocking
    ///
    /// As [`check_on`](Self::check_on).
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks).
    pub fn reserve_on(&self, conn: &mut PgConnection, max_wait: Duration) -> Result<Reserve> {
        let session = &mut Blocking::lent(conn);
        let reserve = operations::reserve(session, self, max_wait);
        self.observed("reserve", reserve, Reserve::outcome)
    }

    /// Spends the units of a call, and waits until they may be used, for at most `timeout`. Holds no connection while it waits.
    ///
    /// One round trip: this is [`reserve`](Self::reserve), and then a sleep. While another transaction has locked the key, it
    /// polls, at most every 20 milliseconds. Calls are served in the order in which they came. If the wait would be too long, the
    /// call is limited at once, and nothing is spent. If the process ends during the sleep, the units stay spent.
    ///
    /// # Blocking
    ///
    /// Waits for at most `timeout`, including the check-out, and for one more round trip. In that round trip it waits at most 250
    /// milliseconds for another transaction, as [above](#checks). The pool's own `connection_timeout` may end the check-out sooner.
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks).
    #[cfg(feature = "r2d2")]
    pub fn acquire_timeout(&self, pool: &PgPool, timeout: Duration) -> Result<Check> {
        let deadline = Deadline::after(timeout);
        let acquire = async {
            rules::check_each(&[self])?; // before the pool is asked
            wait(deadline, || {
                let mut conn = pool::check_out(pool, Some(deadline.remaining()))?;
                let session = &mut Blocking::pooled(&mut conn);
                now(operations::reserve(session, self, deadline.remaining()))
            })
        };
        self.observed("reserve", acquire, Check::outcome)
    }

    /// As [`acquire_timeout`](Self::acquire_timeout), on the given connection, which it occupies while it waits. No transaction
    /// may be open.
    ///
    /// # Blocking
    ///
    /// Waits for `timeout` at most, and for a round trip, which waits at most 250 milliseconds for another transaction, as
    /// [above](#checks).
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks).
    pub fn acquire_timeout_on(&self, conn: &mut PgConnection, timeout: Duration) -> Result<Check> {
        let deadline = Deadline::after(timeout);
        let acquire = async {
            wait(deadline, || {
                let session = &mut Blocking::lent(conn);
                now(operations::reserve(session, self, deadline.remaining()))
            })
        };
        self.observed("reserve", acquire, Check::outcome)
    }

    /// Reads what is left of the key, through a connection from the pool. Spends nothing.
    ///
    /// One round trip: `SELECT resource_control.peek_rate_limit($1, $2, $3, $4, $5)`. On a standby it reads what the standby has
    /// replayed.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows.
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks), of which `SpendInTransaction` and `ReadOnly` do not occur.
    #[cfg(feature = "r2d2")]
    pub fn peek(&self, pool: &PgPool) -> Result<RateLimitState> {
        let mut conn = check_out(pool, &[self])?;
        now(operations::peek(&mut Blocking::pooled(&mut conn), self))
    }

    /// As [`peek`](Self::peek), on the given connection, also inside a transaction.
    ///
    /// # Errors
    ///
    /// As [`peek`](Self::peek).
    pub fn peek_on(&self, conn: &mut PgConnection) -> Result<RateLimitState> {
        now(operations::peek(&mut Blocking::lent(conn), self))
    }

    /// Makes the key full, through a connection from the pool, as after a login that succeeded. Returns whether units
    /// were missing.
    ///
    /// One round trip: `SELECT resource_control.reset_rate_limit($1, $2, $3)`, which deletes the row.
    ///
    /// # Blocking
    ///
    /// As [`check`](Self::check).
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks), and [`Error::Contended`](crate::Error::Contended) if another transaction has
    /// locked the key for 250 milliseconds.
    #[cfg(feature = "r2d2")]
    pub fn reset(&self, pool: &PgPool) -> Result<bool> {
        let mut conn = check_out(pool, &[self])?;
        let session = &mut Blocking::pooled(&mut conn);
        Ok(now(operations::reset(session, self, false))? > 0)
    }

    /// As [`reset`](Self::reset), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`reset`](Self::reset).
    pub fn reset_on(&self, conn: &mut PgConnection) -> Result<bool> {
        Ok(now(operations::reset(&mut Blocking::lent(conn), self, false))? > 0)
    }

    /// Makes all keys of the name full, through a connection from the pool. Returns how many had units missing.
    ///
    /// One round trip, and one transaction. Calls for these keys wait until it commits.
    ///
    /// # Blocking
    ///
    /// As [`check`](Self::check), and as long as it takes to delete the rows.
    ///
    /// # Errors
    ///
    /// As [`reset`](Self::reset).
    #[cfg(feature = "r2d2")]
    pub fn reset_all(&self, pool: &PgPool) -> Result<u64> {
        let mut conn = check_out(pool, &[self])?;
        now(operations::reset(
            &mut Blocking::pooled(&mut conn),
            self,
            true,
        ))
    }

    /// As [`reset_all`](Self::reset_all), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`reset`](Self::reset).
    pub fn reset_all_on(&self, conn: &mut PgConnection) -> Result<u64> {
        now(operations::reset(&mut Blocking::lent(conn), self, true))
    }

    /// Deletes the rows of all full keys, of all rate limits, through a connection from the pool. Returns how many keys it deleted.
    ///
    /// A full key needs no row, so this changes no limit. It walks the table in steps of 1,000 rows, each of which is one round
    /// trip and one transaction: `SELECT resource_control.prune_rate_limits($1, $2, $3)`. Call it once a day, for example.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows, and at most 50 milliseconds for each key
    /// that another transaction has locked, which it then skips.
    ///
    /// # Errors
    ///
    /// See [errors of checks](#errors-of-checks).
    #[cfg(feature = "r2d2")]
    pub fn prune(pool: &PgPool) -> Result<u64> {
        let mut conn = pool::check_out(pool, None)?;
        now(operations::prune(&mut Blocking::pooled(&mut conn)))
    }

    /// As [`prune`](Self::prune), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`prune`](Self::prune).
    pub fn prune_on(conn: &mut PgConnection) -> Result<u64> {
        now(operations::prune(&mut Blocking::lent(conn)))
    }

    fn observed<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T>>,
        outcome: impl FnOnce(&T) -> Outcome,
    ) -> Result<T> {
        now(events::observe(operation, self.subject(), call, outcome))
    }
}

/// Checks the arguments before the pool is asked.
#[cfg(feature = "r2d2")]
fn check_out(pool: &PgPool, limits: &[&RateLimit]) -> Result<PooledPgConnection> {
    rules::check_each(limits)?;
    pool::check_out(pool, None)
}

/// Reserves, and sleeps until the units may be used.
fn wait(deadline: Deadline, mut reserve: impl FnMut() -> Result<Reserve>) -> Result<Check> {
    let reserved = waiting::for_reservation(
        deadline,
        || ready(reserve().map(Reserve::into_result)),
        |pause| async move { thread::sleep(pause) },
    );
    Ok(match now(reserved)? {
        Ok(Reservation { spent, wait }) => {
            thread::sleep(wait);
            Check::Allowed(spent)
        }
        Err(limited) => Check::Limited(limited),
    })
}
