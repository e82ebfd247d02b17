//! Acquiring a permit, over a pool.

use std::time::{Duration, Instant};

use super::handover::Waiter;
use super::request::{Request, Sent};
use super::{Admission, Permit, Semaphore};
use crate::attempt::Attempt;
use crate::background::Mark;
use crate::clock::Moment;
use crate::crowds::Crowds;
use crate::error::{Error, Result};
use crate::events;
use crate::pauses::Pauses;
use crate::pool::{self, PgPool};
use crate::session::now;

/// # With a pool
///
/// A connection is taken out of the pool for one round trip and is back before the answer. The
/// [`Permit`] holds none.
///
/// # Errors of all of them
///
/// - [`Input::EmptyName`](crate::error::Input::EmptyName), [`Input::BadSlots`](crate::error::Input::BadSlots), [`Input::BadTimeout`](crate::error::Input::BadTimeout), [`Input::TooLong`](crate::error::Input::TooLong) and
///   [`Input::NulCharacter`](crate::error::Input::NulCharacter), before anything is sent.
/// - [`Error::Pool`](crate::Error::Pool) if the pool gave no connection in time.
/// - [`Misplaced::ClaimInTransaction`](crate::error::Misplaced::ClaimInTransaction) if a transaction is open on the connection, whoever opened it; only
///   that of `begin_test_transaction` is none.
/// - [`Error::TransactionInPool`](crate::Error::TransactionInPool) if the pool gave a connection that
///   somebody had left in a transaction.
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled) and [`Schema::MissingRights`](crate::error::Schema::MissingRights) if the schema, or the right to it, is
///   missing.
/// - [`Error::ReadOnly`] on a standby.
/// - [`Schema::SequenceBehind`](crate::error::Schema::SequenceBehind) in a copy of a database whose sequence was not copied.
/// - [`Error::Database`] for anything else. Where the connection broke, a slot may have been claimed
///   all the same; it comes back after its time-out.
impl Semaphore {
    /// Claims a slot if one is free, over a connection out of the pool; never waits for a slot.
    ///
    /// One round trip beyond the pool's own check-out, and one more to prepare the statement, once
    /// per connection:
    /// ```sql
    /// SELECT resource_control.admit_service_request($1, $2, $3, $4)
    /// ```
    /// If every slot is taken the answer is [`Attempt::Busy`], and the statement has only read. A claim that
    /// finds no other slot free marks the requests of its service that have timed out: a thousand at most, or 16,000
    /// where there were more slots before. Where none but their slots are left and other transactions have locked
    /// their rows, it waits for one of them, a quarter second at most, even where `lock_timeout` is shorter. It tries a few dozen slots at most, so among very many claims at the same time one may be
    /// [refused although a slot is free](crate::guide::growing#very-many-slots).
    ///
    /// Where the session's default isolation level is stricter than READ COMMITTED, a serialization
    /// failure is repeated once, in a READ COMMITTED transaction of its own; so is each refusal, because the stricter
    /// snapshot may not show that a slot was freed. A claim that there waits for
    /// the commit of whoever had the slot keeps the time at which it was sent: its `created_at` may lie
    /// before that end.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool is set to wait.
    ///
    /// # Errors
    ///
    /// Those of [all of them](#errors-of-all-of-them).
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
    pub fn admit(&self, pool: &PgPool) -> Result<Admission<Permit>> {
        let call = async { self.admit_within(pool, None) };
        now(events::observe(
            "acquire",
            self.subject(),
            call,
            Admission::outcome,
        ))
    }

    /// Claims a slot; waits for one at most `timeout`, holding no connection while it waits.
    ///
    /// Asks again and again, one round trip each, beyond the pool's own check-out. The pauses grow from
    /// 2 to 100 milliseconds on average, and with the number of threads that wait for the same service: together the
    /// waiters of one process ask about two hundred times a second at most, of which each service has the
    /// same share, and once more as a slot is released in the same process. No order among them is promised.
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
    pub fn admit_timeout(&self, pool: &PgPool, timeout: Duration) -> Result<Admission<Permit>> {
        let call = async { self.admit_until(pool, timeout) };
        now(events::observe(
            "acquire",
            self.subject(),
            call,
            Admission::outcome,
        ))
    }

    fn admit_until(&self, pool: &PgPool, timeout: Duration) -> Result<Admission<Permit>> {
        static WAITERS: Crowds<String> = Crowds::new();
        let deadline = Instant::now().checked_add(timeout);
        // What the clock cannot express is never.
        let remaining = || {
            deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            })
        };
        let waiter = Waiter::of(&self.service);
        let mut full = match self.admit_within(pool, Some(timeout))? {
            Admission::Full(full) => full,
            admitted => return Ok(admitted),
        };
        let member = WAITERS.join(self.service.clone().into_owned());
        let mut pauses = Pauses::new();
        while let Some(pause) = pauses.next(member.apart(), full.retry_after, remaining()) {
            waiter.sleep(pause);
            match self.admit_within(pool, Some(remaining())) {
                Ok(Admission::Full(still)) => full = still,
                // The connections were in use for as long as the pool waits, but the wait for a slot is not over.
                Err(Error::Pool(_)) => {}
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

    fn admit_within(&self, pool: &PgPool, limit: Option<Duration>) -> Result<Admission<Permit>> {
        Request::of(self)?; // bad input is reported before the pool is asked
        let mut conn = pool::check_out(pool, limit)?;
        let request = Request::on(&mut conn, self)?;
        // Before the claim is sent, so that the permit never believes in a slot longer than the
        // database does.
        let sent = Moment::now();
        let admission = match request.send(&mut conn)? {
            Sent::Answered(admission) => admission,
            // Whoever had the connection last left it behind. It is marked, so the pool discards it,
            // and the claim with it.
            Sent::InTransaction(_) => return Err(Error::TransactionInPool),
        };
        let mark = Mark::of(&mut conn);
        drop(conn);
        Ok(admission.map(|claim| Permit::new(self, claim, pool.clone(), mark, sent)))
    }
}
