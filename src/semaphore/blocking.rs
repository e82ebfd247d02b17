//! Semaphores over a pool and on a connection, blocking.

#[cfg(feature = "r2d2")]
use std::future::ready;
#[cfg(feature = "r2d2")]
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::pg::PgConnection;

use super::operations;
use super::rules;
#[cfg(any(feature = "r2d2", feature = "async"))]
use super::wakeups;
use super::{Admission, Claim, Semaphore};
#[cfg(feature = "r2d2")]
use super::{Permit, held::HeldSlot, waiting};
#[cfg(feature = "r2d2")]
use crate::background::Mark;
#[cfg(feature = "r2d2")]
use crate::clock::Moment;
#[cfg(feature = "r2d2")]
use crate::error::Error;
use crate::error::Result;
#[cfg(feature = "r2d2")]
use crate::pool::{self, PgPool};
use crate::session::{Blocking, now};
#[cfg(feature = "r2d2")]
use crate::text::Name;

/// # Claims
///
/// A claim is one round trip, and one more to prepare the statement, once per connection:
/// ```sql
/// SELECT resource_control.admit_service_request($1, $2, $3, $4)
/// ```
/// A claim on a full semaphore only reads. If the only free slots are those of requests that have timed out, the claim marks such
/// requests as timed out, at most a thousand. If the number of slots was lowered, it marks at most 16,000, and claims are refused
/// until no request that has timed out is unmarked. If other transactions have locked all rows that it could mark, it waits for one
/// of them for at most a quarter of a second, even if `lock_timeout` is shorter. A claim searches at most five times, and tries at
/// most a thousand slots each time. So under very many concurrent claims it may [return full although a slot is
/// free](crate::guide::growing#very-many-slots).
///
/// Where the session's default isolation level is stricter than READ COMMITTED, a serialization failure is retried once, in a
/// separate READ COMMITTED transaction. At such a level a full semaphore is first reported as a serialization failure, too, and
/// then retried, because the stricter snapshot may not show that a slot was freed. A claim that waits at such a level for the
/// previous holder's commit keeps the time at which it was sent, so its `created_at` may be earlier than the end of the previous
/// request. After an error that Diesel does not classify, one more round trip queries the catalogue, because a function, a table or
/// a privilege may be missing.
///
/// # Errors of claims
///
/// - [`Error::Input`](crate::Error::Input) if the service is empty or longer than 1,000 bytes, the number of slots is not
///   1 to 32,767, the timeout is zero or more than a thousand years, the details are longer than 8,192 bytes, or a text
///   contains a NUL character. Nothing was sent.
/// - [`Misplaced::ClaimInTransaction`](crate::error::Misplaced::ClaimInTransaction) if a transaction is open on the
///   connection, except the one that `begin_test_transaction` opened.
/// - [`Error::Pool`](crate::Error::Pool) if the pool had no connection in time, and
///   [`Error::TransactionInPool`](crate::Error::TransactionInPool) if an earlier user of the connection had left a
///   transaction open.
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled) and
///   [`Schema::MissingRights`](crate::error::Schema::MissingRights).
/// - [`Schema::SequenceBehind`](crate::error::Schema::SequenceBehind) in a copy of a database that was made without its
///   sequences.
/// - [`Error::ReadOnly`](crate::Error::ReadOnly) on a standby and in a read-only session, unless the semaphore is full there:
///   then the claim is refused.
/// - [`Error::StrictIsolation`](crate::Error::StrictIsolation) for a serialization failure inside a test transaction.
/// - [`Error::Database`](crate::Error::Database) for anything else. If the connection broke, a slot may have been
///   claimed. It is free again after the timeout.
impl Semaphore {
    /// Claims a slot if one is free, through a connection from the pool. Never waits for a slot.
    ///
    /// One round trip besides the pool's own check-out, and the connection is back in the pool when this returns. A
    /// full semaphore is [`Admission::Full`], which says when to retry. [`acquire`](Self::acquire) and
    /// [`acquire_timeout`](Self::acquire_timeout) wait.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows.
    ///
    /// # Errors
    ///
    /// See [errors of claims](#errors-of-claims).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::{Admission, Error, PgPool, Semaphore};
    ///
    /// static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    ///
    /// fn geocode(pool: &PgPool) -> Result<String, Error> {
    ///     let permit = match GEOCODER.try_acquire(pool)? {
    ///         Admission::Admitted(permit) => permit,
    ///         Admission::Full(full) => {
    ///             return Ok(format!("503 Retry-After: {}", full.retry_after_secs()));
    ///         }
    ///     };
    /// #   assert!(geocode(pool)?.starts_with("503 Retry-After: "));
    ///     permit.release()?;
    ///     Ok("200".into())
    /// }
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # assert_eq!(geocode(&database.pool(1))?, "200");
    /// # Ok::<(), Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn try_acquire(&self, pool: &PgPool) -> Result<Admission<Permit>> {
        now(operations::observed(self, async {
            self.claim_from(pool, None)
        }))
    }

    /// Claims a slot, and waits indefinitely until one is free. Holds no connection while it waits.
    ///
    /// [`acquire_timeout`](Self::acquire_timeout) limits the wait, and [`try_acquire`](Self::try_acquire) does not wait. See
    /// [waiting](#waiting) for the polls that it sends.
    ///
    /// # Blocking
    ///
    /// Waits for the first connection as long as the pool's `connection_timeout` allows, then indefinitely for a slot.
    ///
    /// # Errors
    ///
    /// See [errors of claims](#errors-of-claims). [`Error::Pool`](crate::Error::Pool) is possible only for the first
    /// check-out, because the wait for a slot goes on when the pool has no connection.
    #[cfg(feature = "r2d2")]
    pub fn acquire(&self, pool: &PgPool) -> Result<Permit> {
        let wait = async {
            loop {
                if let Admission::Admitted(permit) = self.wait(pool, Duration::MAX)? {
                    return Ok(permit);
                }
            }
        };
        now(operations::observed(self, wait))
    }

    /// Claims a slot, and waits for one for at most `timeout`. Holds no connection while it waits.
    ///
    /// # Waiting
    ///
    /// A wait polls. Each poll is one claim, which is one round trip besides the pool's own check-out. The pauses between
    /// the polls grow from 2 to 100 milliseconds on average, and with the number of threads that wait for the same service.
    /// All waiters of a process together poll about two hundred times per second at most, and each service gets the
    /// same share of that. A release in the same process also wakes one waiter at once. The order of the waiters is not
    /// guaranteed.
    ///
    /// Once the wait has begun, a poll for which the pool has no connection in time does not end it.
    ///
    /// # Blocking
    ///
    /// Waits for `timeout` at most, including the check-outs. The pool's own `connection_timeout` may end the first check-out
    /// sooner. A timeout of zero is one attempt, which does not wait for a connection either. Neither timeout ends a statement that
    /// gets no reply, such as r2d2's test of a connection at its check-out, or the claim itself. `tcp_user_timeout` and
    /// `keepalives_*` end it on a dead network. Behind PgBouncer, `query_wait_timeout` ends it while the server is down.
    ///
    /// # Errors
    ///
    /// See [errors of claims](#errors-of-claims). [`Error::Pool`](crate::Error::Pool) is possible only for the first
    /// check-out. If no slot is free within the timeout, the outcome is [`Admission::Full`] and not an error.
    #[cfg(feature = "r2d2")]
    pub fn acquire_timeout(&self, pool: &PgPool, timeout: Duration) -> Result<Admission<Permit>> {
        now(operations::observed(self, async {
            self.wait(pool, timeout)
        }))
    }

    /// Waits for a slot, runs `work` with its permit, and releases it: [`acquire`](Self::acquire), then
    /// [`Permit::run`].
    ///
    /// # Blocking
    ///
    /// As [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// The error of `work`, the [errors of claims](#errors-of-claims), and the errors of [`Permit::release`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::{Error, Semaphore};
    ///
    /// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    ///
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # let pool = database.pool(1);
    /// let token = GEOCODER.with(&pool, |permit| Ok::<_, Error>(permit.fencing_token()))?;
    /// # assert_eq!(token, 1);
    /// # Ok::<(), Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn with<T, E, F>(&self, pool: &PgPool, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut Permit) -> Result<T, E>,
        E: From<Error>,
    {
        self.acquire(pool)?.run(work)
    }

    /// Claims a slot if one is free, on the given connection, and returns it as plain data. Never waits for a slot.
    ///
    /// One round trip. The slot stays taken until [`complete_on`](Self::complete_on) is called with the claim's `id`,
    /// in any process, or until its timeout.
    ///
    /// # Errors
    ///
    /// See [errors of claims](#errors-of-claims).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::Semaphore;
    ///
    /// static RENDERER: Semaphore = Semaphore::named("renderer", 2, Duration::from_secs(600));
    ///
    /// # let database = workbench::Database::new();
    /// # let conn = &mut database.connect();
    /// # diesel_interlock::migrations::install(conn)?;
    /// let claim = RENDERER.claim_on(conn)?.admitted().expect("nobody else is here");
    /// let job = format!("render 7 {}", claim.id); // to a queue; later, in another process:
    /// let id = job.rsplit(' ').next().unwrap().parse()?;
    /// assert!(RENDERER.complete_on(conn, id)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn claim_on(&self, conn: &mut PgConnection) -> Result<Admission<Claim>> {
        let session = &mut Blocking::lent(conn);
        now(operations::observed(self, operations::claim(session, self)))
    }

    /// Ends a request and frees its slot. Returns whether this call ended it.
    ///
    /// `false` means that the request had ended before, or had timed out. In the second case more requests than allowed
    /// may have been in flight. No other request is changed.
    ///
    /// One round trip: `SELECT resource_control.complete_service_request($1)`. Inside a transaction, the slot is free
    /// when the transaction commits.
    ///
    /// # Errors
    ///
    /// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled) and
    ///   [`Schema::MissingRights`](crate::error::Schema::MissingRights).
    /// - [`Error::ReadOnly`](crate::Error::ReadOnly) on a standby and in a read-only transaction.
    /// - [`Error::StrictIsolation`](crate::Error::StrictIsolation) for a serialization failure inside the caller's own
    ///   transaction. It also occurs if the transaction's snapshot is older than the claim, and does not show the
    ///   request.
    /// - [`Error::Database`](crate::Error::Database) for anything else.
    pub fn complete_on(&self, conn: &mut PgConnection, id: i64) -> Result<bool> {
        let completed = now(operations::complete(&mut Blocking::lent(conn), id))?;
        #[cfg(any(feature = "r2d2", feature = "async"))]
        wakeups::wake_one(&self.service);
        Ok(completed)
    }

    /// Extends a request to a full timeout from now, and returns the time at which it expires. Never shortens it. Returns `None` if
    /// the request had ended or timed out before, and `DateTime::MAX_UTC` if an operator has set `infinity`.
    ///
    /// One round trip: `SELECT resource_control.renew_service_request($1, $2)`.
    ///
    /// # Errors
    ///
    /// As [`complete_on`](Self::complete_on), and [`Input::BadTimeout`](crate::error::Input::BadTimeout).
    pub fn renew_on(&self, conn: &mut PgConnection, id: i64) -> Result<Option<DateTime<Utc>>> {
        let timeout = rules::interval(&self.service, self.timeout)?;
        now(operations::renew(&mut Blocking::lent(conn), id, timeout))
    }

    /// Claims a slot through the pool, whose check-out takes `limit` at most.
    #[cfg(feature = "r2d2")]
    fn claim_from(&self, pool: &PgPool, limit: Option<Duration>) -> Result<Admission<Permit>> {
        self.checked(Name::anywhere)?; // before the pool is asked
        let mut conn = pool::check_out(pool, limit)?;
        // Before the claim is sent, so that the permit never lasts longer here than in the database.
        let sent = Moment::now();
        let admission = now(operations::claim(&mut Blocking::pooled(&mut conn), self))?;
        let mark = Mark::of(&mut conn);
        drop(conn);
        Ok(admission.map(|claim| {
            let slot = HeldSlot::new(self, claim, sent);
            Permit::new(slot, pool.clone(), mark)
        }))
    }

    #[cfg(feature = "r2d2")]
    fn wait(&self, pool: &PgPool, timeout: Duration) -> Result<Admission<Permit>> {
        let waiter = wakeups::Waiter::register(self.service.clone());
        now(waiting::for_slot(
            &waiter,
            timeout,
            |limit| ready(self.claim_from(pool, Some(limit))),
            |pause| {
                waiter.sleep(pause);
                ready(())
            },
            || false,
        ))
    }
}
