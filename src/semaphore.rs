//! Semaphores over requests to a service: so many at a time, across all instances.

mod admission;
#[cfg(feature = "r2d2")]
mod handover;
#[cfg(feature = "r2d2")]
mod late;
#[cfg(feature = "r2d2")]
mod permit;
mod query;

use std::borrow::Cow;
use std::time::Duration;
#[cfg(feature = "r2d2")]
use std::time::Instant;

use chrono::{DateTime, Utc};
use diesel::data_types::PgInterval;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;

pub use self::admission::{Admission, Claim, Full};
#[cfg(feature = "r2d2")]
use self::handover::Waiter;
#[cfg(feature = "r2d2")]
pub use self::permit::Permit;
use self::query::ClaimRequest;
use crate::attempt::Attempt;
use crate::error::{Error, Result};
use crate::events::{self, What};
#[cfg(feature = "r2d2")]
use crate::pauses::{Crowd, Pauses};
#[cfg(feature = "r2d2")]
use crate::pool::{self, PgPool};
use crate::read_committed;
use crate::text;
use crate::time::{self, Timestamp};
use crate::transaction::{self, Transaction};

/// At most so many requests at a time to a service, across all instances, with no connection held
/// while a request runs.
///
/// PostgreSQL keeps each request as a row of `resource_control.service_request`. Those in flight
/// have a slot each, 0 to N − 1, which a partial unique index gives to one of them at a time. A
/// request whose holder crashed or hangs gives its slot back when it times out. Ended requests stay,
/// as a log.
///
/// A handle is a small value that holds no connection; make it a `static`, or on the fly.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Attempt, Error, PgPool, Semaphore};
///
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
///
/// fn geocode(pool: &PgPool, q: &str) -> Result<Option<String>, Error> {
///     let Attempt::Acquired(permit) = GEOCODER.try_acquire(pool)? else {
///         return Ok(None); // four are in flight
///     };
///     let answer = call_geocoder(q, permit.fencing_token()); // no connection is held meanwhile
///     permit.release()?; // an error if it had timed out
///     Ok(Some(answer))
/// }
/// # fn call_geocoder(q: &str, _: i64) -> String { q.to_owned() }
/// # let database = workbench::Database::new();
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// # let pool = database.pool(1);
/// # assert_eq!(geocode(&pool, "Main St")?.as_deref(), Some("Main St"));
/// # Ok::<(), Error>(())
/// ```
///
/// # The time-out
///
/// decides, by the database's clock: from its expiry on, a request no longer counts, whether its row
/// is marked or not, and its slot may be another's. Choose the time-out longer than the request can
/// take, give the request a time limit of its own that is shorter ([`Permit::remaining`]), or
/// [renew](Permit::renew) it.
///
/// # What it does not protect from
///
/// A holder that sleeps through its own expiry goes on as if it still had its slot. What protects
/// the data then is the [fencing token](Permit::fencing_token): the service refuses a token that is
/// smaller than one it has seen for that slot. Of a semaphore with one slot the tokens ascend from
/// each holder to the next, which makes it a lock with a lease, one that works behind a pooler in
/// transaction mode. An asynchronous failover of the server may lose claims and give their ids again.
///
/// # When instances disagree
///
/// about the number of slots, as they do during a deploy, the larger number holds. With a smaller
/// number new claims wait until fewer than that are in flight.
///
/// # The log
///
/// grows by a row per request. `SELECT resource_control.prune_service_requests('30 days', 10000)`
/// deletes the oldest ones that ended. A transaction that stays open for hours anywhere in the
/// database keeps PostgreSQL from cleaning up after each claim, and claims get slower meanwhile.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a semaphore does nothing until a slot is acquired"]
pub struct Semaphore {
    service: Cow<'static, str>,
    slots: u32,
    timeout: Duration,
    details: Cow<'static, str>,
}

impl Semaphore {
    /// Names a service, how many requests to it may be in flight, and after how long one that was
    /// not released no longer counts.
    ///
    /// The service has 1 to 1,000 bytes, the slots are 1 to 32,767, and the time-out is rounded up
    /// to microseconds; anything else is reported by the first operation.
    pub const fn named(service: &'static str, slots: u32, timeout: Duration) -> Self {
        Self {
            service: Cow::Borrowed(service),
            slots,
            timeout,
            details: Cow::Borrowed(""),
        }
    }

    /// As [`named`](Self::named), for a service whose name is put together at run time, such as one
    /// per tenant.
    pub fn new(service: impl Into<String>, slots: u32, timeout: Duration) -> Self {
        Self {
            service: Cow::Owned(service.into()),
            ..Self::named("", slots, timeout)
        }
    }

    /// What the log says about each request, for operators: who makes it, and what for. At most
    /// 8,192 bytes. Defaults to nothing.
    pub fn details(mut self, details: impl Into<String>) -> Self {
        self.details = Cow::Owned(details.into());
        self
    }

    /// The service.
    pub fn service(&self) -> &str {
        &self.service
    }

    /// How many requests may be in flight.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// After how long a request no longer counts.
    pub const fn timeout(&self) -> Duration {
        self.timeout
    }
}

/// # With a pool
///
/// A connection is taken out of the pool for one round trip and is back before the answer. The
/// [`Permit`] holds none.
///
/// # Errors of all of them
///
/// - [`Error::EmptyName`], [`Error::BadSlots`], [`Error::BadTimeout`], [`Error::TooLong`] and
///   [`Error::NulCharacter`], before anything is sent.
/// - [`Error::Pool`](crate::Error::Pool) if the pool gave no connection in time.
/// - [`Error::ClaimInTransaction`] if a transaction is open on the connection, whoever opened it; only
///   that of `begin_test_transaction` is none.
/// - [`Error::TransactionInPool`](crate::Error::TransactionInPool) if the pool gave a connection that
///   somebody had left in a transaction.
/// - [`Error::NotInstalled`] and [`Error::MissingRights`] if the schema, or the right to it, is
///   missing.
/// - [`Error::ReadOnly`] on a standby.
/// - [`Error::Database`] for anything else. Where the connection broke, a slot may have been claimed
///   all the same; it comes back after its time-out.
impl Semaphore {
    /// Claims a slot if one is free, over a connection out of the pool; never waits for a slot.
    ///
    /// One round trip beyond the pool's own check-out, and one more to prepare the statement, once
    /// per connection:
    /// ```sql
    /// SELECT id, slot, created_at, expires_at, answered_at, next_expiry
    /// FROM resource_control.admit_service_request($1, $2, $3, $4)
    /// ```
    /// If every slot is taken the answer is [`Attempt::Busy`], and the statement has only read. A claim
    /// marks the requests of its service that have timed out. Where none but their slots are left, it
    /// waits for another claim that is marking them, a quarter second at most.
    ///
    /// Where the session's default isolation level is stricter than READ COMMITTED, a serialization
    /// failure is repeated once, in a READ COMMITTED transaction of its own.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool is set to wait.
    ///
    /// # Errors
    ///
    /// Those of [all of them](#errors-of-all-of-them).
    #[cfg(feature = "r2d2")]
    pub fn try_acquire(&self, pool: &PgPool) -> Result<Attempt<Permit>> {
        self.admit(pool).map(Admission::into_attempt)
    }

    /// As [`try_acquire`](Self::try_acquire), and if every slot is taken, tells when to ask again: for
    /// HTTP's `503` with `Retry-After`.
    ///
    /// # Errors
    ///
    /// Those of [all of them](#errors-of-all-of-them).
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
    ///     let permit = match GEOCODER.admit(pool)? {
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
    pub fn admit(&self, pool: &PgPool) -> Result<Admission<Permit>> {
        events::acquire(
            What::Service(&self.service),
            || self.admit_within(pool, None),
            Admission::outcome,
        )
    }

    /// Claims a slot; waits for one at most `timeout`, holding no connection while it waits.
    ///
    /// Asks again and again, one round trip each, beyond the pool's own check-out. The pauses grow from
    /// 2 to 100 milliseconds, and with the number of threads that wait: together the waiters of one
    /// process ask about two hundred times a second at most, and once more as a slot is released in the
    /// same process. No order among them is promised.
    ///
    /// # Blocking
    ///
    /// For `timeout`, of which the check-outs are a part; the pool's own `connection_timeout` may end
    /// the first one sooner. Zero waits for neither.
    ///
    /// # Errors
    ///
    /// Those of [all of them](#errors-of-all-of-them). A wait that ended without a slot is
    /// [`Attempt::Busy`]; a pool that never had a connection in time is an error.
    #[cfg(feature = "r2d2")]
    pub fn acquire_timeout(&self, pool: &PgPool, timeout: Duration) -> Result<Attempt<Permit>> {
        self.admit_timeout(pool, timeout)
            .map(Admission::into_attempt)
    }

    /// As [`acquire_timeout`](Self::acquire_timeout), and if every slot is still taken, tells when to
    /// ask again.
    ///
    /// # Errors
    ///
    /// Those of [`acquire_timeout`](Self::acquire_timeout).
    #[cfg(feature = "r2d2")]
    pub fn admit_timeout(&self, pool: &PgPool, timeout: Duration) -> Result<Admission<Permit>> {
        events::acquire(
            What::Service(&self.service),
            || self.admit_until(pool, timeout),
            Admission::outcome,
        )
    }

    #[cfg(feature = "r2d2")]
    fn admit_until(&self, pool: &PgPool, timeout: Duration) -> Result<Admission<Permit>> {
        static WAITERS: Crowd = Crowd::new();
        let mut pauses = Pauses::until(Instant::now().checked_add(timeout), &WAITERS);
        let waiter = Waiter::of(&self.service);
        let mut full = match self.admit_within(pool, Some(timeout))? {
            Admission::Full(full) => full,
            admitted => return Ok(admitted),
        };
        while let Some(pause) = pauses.next(full.retry_after) {
            waiter.sleep(pause);
            match self.admit_within(pool, Some(pauses.remaining())) {
                Ok(Admission::Full(still)) => full = still,
                // The pool's connections were in use to the end of the wait.
                Err(Error::Pool(_)) if pauses.remaining().is_zero() => break,
                answer => return answer,
            }
        }
        Ok(Admission::Full(full))
    }

    /// Runs `work` with a permit if a slot is free, and releases it on every way out: a value, an error,
    /// a panic.
    ///
    /// Round trips as [`try_acquire`](Self::try_acquire) and [`Permit::release`]. What `work` did with
    /// a permit that had timed out is an error, even if `work` itself succeeded.
    ///
    /// # Errors
    ///
    /// What `work` answers; else those of [all of them](#errors-of-all-of-them) and of
    /// [`Permit::release`].
    #[cfg(feature = "r2d2")]
    pub fn try_with<T, E, F>(&self, pool: &PgPool, work: F) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut Permit) -> Result<T, E>,
        E: From<Error>,
    {
        let Attempt::Acquired(mut permit) = self.try_acquire(pool)? else {
            return Ok(Attempt::Busy);
        };
        let done = work(&mut permit)?;
        permit.release()?;
        Ok(Attempt::Acquired(done))
    }

    #[cfg(feature = "r2d2")]
    fn admit_within(&self, pool: &PgPool, limit: Option<Duration>) -> Result<Admission<Permit>> {
        let request = Request::of(self)?;
        let mut conn = pool::check_out(pool, limit)?;
        // Before the claim is sent, so that the permit never believes in a slot longer than the
        // database does.
        let sent = Instant::now();
        let admission = match request.send(&mut conn)? {
            Sent::Answered(admission) => admission,
            // Whoever had the connection last left it behind. It is marked, so the pool discards it,
            // and the claim with it.
            Sent::InTransaction(_) => return Err(Error::TransactionInPool),
        };
        drop(conn);
        Ok(admission.map(|claim| Permit::new(self, claim, pool.clone(), sent)))
    }
}

/// # On a connection of one's own
///
/// For other pools and wrappers, and for work that ends elsewhere than it began. Errors are those of
/// [all of them](#errors-of-all-of-them).
impl Semaphore {
    /// Claims a slot if one is free, on the given connection, and answers it as plain data; never
    /// waits for a slot. One round trip, as [`try_acquire`](Self::try_acquire).
    ///
    /// Whoever has the [`Claim`]'s `id` ends it, with [`complete_on`](Self::complete_on).
    ///
    /// # Errors
    ///
    /// Those of [all of them](#errors-of-all-of-them).
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
    /// let claim = RENDERER.claim_on(conn)?.acquired().expect("nobody else is here");
    /// let job = format!("render 7 {}", claim.id); // to a queue; later, in another process:
    /// let id = job.rsplit(' ').next().unwrap().parse()?;
    /// assert!(RENDERER.complete_on(conn, id)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn claim_on(&self, conn: &mut PgConnection) -> Result<Attempt<Claim>> {
        self.admit_on(conn).map(Admission::into_attempt)
    }

    /// As [`claim_on`](Self::claim_on), and if every slot is taken, tells when to ask again.
    ///
    /// # Errors
    ///
    /// Those of [all of them](#errors-of-all-of-them).
    pub fn admit_on(&self, conn: &mut PgConnection) -> Result<Admission<Claim>> {
        let call = || match Request::of(self)?.send(conn)? {
            Sent::Answered(admission) => Ok(admission),
            // The transaction is the caller's, so what was claimed is released in it.
            Sent::InTransaction(admission) => {
                transaction::clear_mark(conn);
                if let Admission::Admitted(claim) = admission {
                    query::complete(conn, claim.id)?;
                }
                Err(Error::ClaimInTransaction)
            }
        };
        events::acquire(What::Service(&self.service), call, Admission::outcome)
    }

    /// Ends a request and frees its slot; answers whether this ended it. False if it had been ended
    /// before, or had timed out: then more requests than allowed may have been in flight.
    ///
    /// One round trip: `SELECT resource_control.complete_service_request($1)`. Changes no other
    /// request. Inside a transaction the slot is free when that commits.
    ///
    /// # Errors
    ///
    /// - [`Error::NotInstalled`], [`Error::MissingRights`], [`Error::ReadOnly`], [`Error::Database`].
    /// - [`Error::StrictIsolation`] for a serialization failure inside the caller's own transaction.
    pub fn complete_on(&self, conn: &mut PgConnection, id: i64) -> Result<bool> {
        let completed = query::complete(conn, id)?;
        #[cfg(feature = "r2d2")]
        handover::wake_one(&self.service);
        Ok(completed)
    }

    /// Lets a request time out as late as if it had been claimed now, and answers when that is; `None`
    /// if it had ended or timed out before.
    ///
    /// One round trip: `SELECT resource_control.renew_service_request($1, $2)`.
    ///
    /// # Errors
    ///
    /// As [`complete_on`](Self::complete_on), and [`Error::BadTimeout`].
    pub fn renew_on(&self, conn: &mut PgConnection, id: i64) -> Result<Option<DateTime<Utc>>> {
        let renewed = query::renew(conn, id, self.interval()?)?;
        Ok(renewed.and_then(Timestamp::at))
    }

    fn interval(&self) -> Result<PgInterval> {
        match time::microseconds(self.timeout) {
            Some(microseconds) => Ok(PgInterval::from_microseconds(microseconds)),
            None => Err(Error::BadTimeout {
                service: self.service.to_string(),
            }),
        }
    }
}

/// A claim that passed every check that needs no database.
struct Request<'a> {
    service: Cow<'a, str>,
    slots: i32,
    timeout: Duration,
    interval: PgInterval,
    details: &'a str,
}

/// What came back, and in what kind of transaction.
enum Sent {
    Answered(Admission<Claim>),
    /// One that Diesel does not know of. The connection is marked as broken.
    InTransaction(Admission<Claim>),
}

impl<'a> Request<'a> {
    fn of(semaphore: &'a Semaphore) -> Result<Self> {
        let service = text::name(&semaphore.service);
        if service.is_empty() {
            return Err(Error::EmptyName);
        }
        text::check(&service, "the name of a service", text::LONGEST_NAME)?;
        text::check(&semaphore.details, "the details", text::LONGEST_DETAILS)?;
        let slots = match i16::try_from(semaphore.slots) {
            Ok(slots @ 1..) => slots,
            _ => {
                return Err(Error::BadSlots {
                    service: service.into_owned(),
                    slots: semaphore.slots,
                });
            }
        };
        Ok(Self {
            service,
            slots: slots.into(),
            timeout: semaphore.timeout,
            interval: semaphore.interval()?,
            details: &semaphore.details,
        })
    }

    fn send(&self, conn: &mut PgConnection) -> Result<Sent> {
        let before = transaction::of(conn);
        match before {
            Transaction::None => {}
            Transaction::Test => return self.ask(conn).map(Sent::Answered),
            Transaction::Open => return Err(Error::ClaimInTransaction),
            Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
        }
        // Unless the server reports that no transaction is open, this mark stays.
        transaction::mark_broken(conn);
        let admission = self.ask(conn)?;
        if transaction::is_marked(conn) {
            Ok(Sent::InTransaction(admission))
        } else {
            Ok(Sent::Answered(admission))
        }
    }

    fn ask(&self, conn: &mut PgConnection) -> Result<Admission<Claim>> {
        let answered = read_committed::repeat(conn, |conn| {
            let request = ClaimRequest {
                service: &self.service,
                slots: self.slots,
                timeout: self.interval,
                details: self.details,
            };
            request.get_result(conn)
        });
        match answered {
            Ok(answer) => Ok(admission::from_answer(&answer, self.timeout)),
            Err(error) => Err(query::explain(conn, error)),
        }
    }
}
