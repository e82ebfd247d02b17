//! Semaphores: at most N permits for a service at a time, in all programs that use the database.

mod admission;
mod permit;
pub(crate) mod sql;

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::admission::{Admission, Full};
pub use self::permit::Permit;
use crate::call::ask_detached;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::input;
use crate::input::LONGEST;
use crate::lease::{Grant, Lease, Row, SHORTEST_KEPT, claim_number};
use crate::long_wait::{self, Awaited};
use crate::mode::Mode;
use crate::pool::{Pool, Reply, impl_debug};
use crate::statement::Database;
use crate::waiting::{Turns, What, let_others_pass};

/// The prefix of service names that is reserved for leaders.
pub(crate) const OF_LEADERS: &str = "leader ";

/// At most N permits at a time for a service, in all programs that use the database.
///
/// `P` is the pool of the program. Use the alias for your pool: [`Semaphore`](crate::Semaphore) for
/// r2d2, `deadpool::Semaphore` or `bb8::Semaphore`. Operations return a [`Reply`]: over r2d2 they
/// block and return a `Result`; over deadpool and bb8 they return a future of a `Result`, which you
/// await.
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Admission, Error, PgPool, Semaphore};
///
/// // At most four at a time; a slot is free again after 30 seconds at the latest.
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
///
/// fn geocode(pool: &PgPool, q: &str) -> Result<Option<String>, Error> {
///     let Admission::Admitted(permit) = GEOCODER.try_acquire(pool)? else {
///         return Ok(None); // four permits are in flight
///     };
///     let street = call_geocoder(q, permit.fencing_token()); // holds no connection
///     permit.release()?; // an error if the permit had expired
///     Ok(Some(street))
/// }
/// # fn call_geocoder(q: &str, _: i64) -> String { q.to_owned() }
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # diesel_interlock::migrations::install(&pool)?;
/// # assert_eq!(geocode(&pool, "Main St")?.as_deref(), Some("Main St"));
/// # Ok::<(), Error>(())
/// ```
///
/// # Permits
///
/// A permit is a row of `resource_control.service_request` with one of the slots 0 to N − 1. The
/// claim inserts the row, and the release marks it as completed. The row then stays as a log entry
/// until it is [pruned](crate::prune::requests). A permit holds no connection.
///
/// A permit ends when it is released, or else when its timeout has passed by the clock of the
/// database. So the slot of a crashed process becomes free again. If work may take longer than the
/// timeout, let the permit [renew itself](Self::keep_alive).
///
/// N may differ between programs, and you can lower it at any time. There are never more permits
/// than the largest N in use, and a claim is not granted while as many permits as *its* N are in
/// flight.
///
/// With one slot, a semaphore is a lock that also works behind a pooler in transaction mode.
///
/// # Waiting
///
/// In each process, only the oldest waiter of a service tries: every 5 to 100 ms, and when the
/// first permit expires. A release in the same process wakes this waiter at once. Waiters hold no
/// connection between two tries. No order is promised.
///
/// # Errors
///
/// [`Error::Input`] for an invalid name or key, for no slot or more than 1,000 slots, and for a
/// timeout under a microsecond or over 1,000 years; [`Error::Pool`] if the pool gives no
/// connection; [`Error::NotInstalled`]; [`Error::Standby`] if the server refuses to write; and
/// [`Error::Database`].
#[must_use = "a semaphore admits nobody until a permit is acquired"]
#[derive(Clone)]
pub struct Semaphore<P: Pool> {
    subject: Subject,
    /// The service with its key. `None` if the service is just the name of the subject.
    service: Option<String>,
    slots: u32,
    timeout: Duration,
    details: Cow<'static, str>,
    renews_itself: bool,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> Semaphore<P> {
    /// Makes the semaphore of a service, which admits `slots` requests at a time. A permit that is
    /// neither released nor renewed ends after `timeout`.
    ///
    /// A name that begins with `leader ` is refused, because that prefix is reserved for
    /// [leaders](crate::leader::Leader).
    pub const fn named(service: &'static str, slots: u32, timeout: Duration) -> Self {
        Self {
            subject: Subject {
                primitive: "semaphore",
                name: service,
            },
            service: None,
            slots,
            timeout,
            details: Cow::Borrowed(""),
            renews_itself: false,
            pool: PhantomData,
        }
    }

    /// Makes the semaphore of an election, which has one slot.
    pub(crate) const fn of_election(
        election: &'static str,
        service: String,
        lease: Duration,
        details: Cow<'static, str>,
    ) -> Self {
        Self {
            subject: Subject {
                primitive: "leader",
                name: election,
            },
            service: Some(service),
            slots: 1,
            timeout: lease,
            details,
            renews_itself: true,
            pool: PhantomData,
        }
    }

    pub(crate) const fn subject(&self) -> Subject {
        self.subject
    }

    /// Returns the semaphore of one thing under this name, such as a tenant. A second call replaces
    /// the first key.
    ///
    /// Its service is the name and the key, joined by a space. Inside both, `\` and spaces are
    /// escaped by `\`. So `a` with the key `b` is the same semaphore as one named `a b`.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            service: Some(input::with_key(&[self.subject.name], &input::show(key))),
            ..self.clone()
        }
    }

    /// Returns the semaphore with a text that is logged with each request: who makes it, and what
    /// for. At most 1,000 bytes; empty by default.
    pub fn details(&self, details: impl Into<String>) -> Self {
        Self {
            details: Cow::Owned(details.into()),
            ..self.clone()
        }
    }

    /// Makes permits renew themselves every third of the timeout until they are released, however
    /// long the work takes.
    ///
    /// Each permit renews itself on a thread of its own over r2d2, and in a task over deadpool and
    /// bb8. The timeout must be at least 3 seconds, and is then how long the slot stays taken after
    /// a crash.
    ///
    /// A renewal takes a connection from the pool. bb8 does not serve its waiters in order, so size
    /// a bb8 pool with a connection to spare.
    ///
    /// A permit that cannot be renewed in time [is lost](Permit::is_lost) before the database lets
    /// another holder in.
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::{Error, PgPool, Semaphore};
    ///
    /// const LEASE: Duration = Duration::from_secs(30);
    /// static IMPORT: Semaphore = Semaphore::named("import", 1, LEASE).keep_alive();
    ///
    /// fn import(pool: &PgPool, rows: &[&str]) -> Result<usize, Error> {
    ///     IMPORT.with(pool, |permit| {
    ///         // This may take longer than the lease.
    ///         Ok::<_, Error>(rows.iter().take_while(|_| !permit.is_lost()).count())
    ///     })
    /// }
    /// # let database = workbench::Database::new();
    /// # let pool = database.pool(2);
    /// # diesel_interlock::migrations::install(&pool)?;
    /// # assert_eq!(import(&pool, &["a", "b"])?, 2);
    /// # Ok::<(), Error>(())
    /// ```
    pub const fn keep_alive(mut self) -> Self {
        self.renews_itself = true;
        self
    }

    /// Takes a permit if a slot is free, and never waits for a slot.
    ///
    /// One round trip on a connection from the pool: `SELECT … FROM
    /// resource_control.claim_service_request($1, $2, $3, $4, $5)`. If all slots are taken, the
    /// function only reads.
    pub fn try_acquire<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Admission<Permit<P>>> {
        P::Mode::drive(self.subject.observe("try_acquire", self.claim(pool, None)))
    }

    /// Takes a permit, and [waits](Self#waiting) while all slots are taken.
    pub fn acquire<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Permit<P>> {
        P::Mode::drive(async move {
            let wait = self.wait(pool, None);
            let waited = self.subject.observe_wait("acquire", wait).await?;
            // A wait without a deadline has no other outcome.
            waited.admitted().ok_or(Error::TimedOut)
        })
    }

    /// Takes a permit, and [waits](Self#waiting) for at most `timeout`, which includes the wait for
    /// a connection. A timeout of zero is the same as [`try_acquire`](Self::try_acquire).
    ///
    /// After `timeout` it returns the last refusal, or [`Error::TimedOut`] if no try was refused.
    pub fn acquire_timeout<'a>(
        &'a self,
        pool: &'a P,
        timeout: Duration,
    ) -> Reply<'a, P, Admission<Permit<P>>> {
        P::Mode::drive(async move {
            if timeout.is_zero() {
                let once = self.claim(pool, None);
                return self.subject.observe_wait("acquire_timeout", once).await;
            }
            let wait = self.wait(pool, Instant::now().checked_add(timeout));
            self.subject.observe_wait("acquire_timeout", wait).await
        })
    }

    /// Completes a request that another process has claimed, by its [token](Permit::fencing_token).
    /// Returns whether the request was in flight. One round trip.
    ///
    /// A request of another service is left alone, and counts as not in flight.
    ///
    /// The other process hands its permit over with [`Permit::detach`], because a drop would
    /// complete the request.
    pub fn complete<'a>(&'a self, pool: &'a P, id: i64) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let complete = async {
                let service = self.service()?;
                let complete = sql::complete_of_another(&service, id);
                let slot = What::Slot(service);
                ask_detached(pool, None, complete, move |was_in_flight, _| {
                    crate::waiting::wake_oldest(&slot);
                    was_in_flight
                })
                .await
            };
            self.subject
                .observe_as("complete", was_in_flight, complete)
                .await
        })
    }

    /// Extends a request that another process has claimed to this semaphore's timeout from now.
    /// Returns whether the request was in flight. One round trip.
    ///
    /// A request of another service is left alone, and counts as not in flight.
    pub fn renew<'a>(&'a self, pool: &'a P, id: i64) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let renew = async {
                let renew = sql::renew_of_another(&self.service()?, id, self.timeout);
                ask_detached(pool, None, renew, |was_in_flight, _| was_in_flight).await
            };
            self.subject.observe_as("renew", was_in_flight, renew).await
        })
    }

    async fn wait(&self, pool: &P, deadline: Option<Instant>) -> Result<Admission<Permit<P>>> {
        let service = self.service()?;
        let (mut turns, mut last) = (Turns::new(deadline), None);
        // Pauses need its timer.
        P::Mode::runtime()?;
        let_others_pass::<P::Mode>(&What::Slot(service.clone()), deadline).await;
        while turns.next::<P::Mode>().await {
            match P::Mode::within(deadline, self.try_claim(pool, deadline)).await {
                Some(Ok((Admission::Full(full), database, sent))) => {
                    turns.note_refusal(What::Slot(service.clone()), database, sent);
                    turns.not_after(full.retry_after);
                    if let Some(waited) = turns.note_long_wait() {
                        long_wait::warn(self.subject, &Awaited::Slot(full.retry_after), waited);
                    }
                    last = Some(full);
                }
                // The wait for a connection lasted until the deadline: return the refusal, which
                // says more.
                Some(Err(Error::Pool(_))) if last.is_some() && turns.is_over() => break,
                Some(outcome) => return outcome.map(|(admission, ..)| admission),
                None => break,
            }
        }
        last.map(Admission::Full).ok_or(Error::TimedOut)
    }

    /// Tries once, without a report.
    pub(crate) async fn claim(
        &self,
        pool: &P,
        deadline: Option<Instant>,
    ) -> Result<Admission<Permit<P>>> {
        let (admission, ..) = self.try_claim(pool, deadline).await?;
        Ok(admission)
    }

    /// Tries once. Also returns the database, and when the claim was sent.
    async fn try_claim(
        &self,
        pool: &P,
        deadline: Option<Instant>,
    ) -> Result<(Admission<Permit<P>>, Database, Instant)> {
        let service = self.service()?;
        if !(1..=1000).contains(&self.slots) {
            return Err(Error::input("a semaphore must have 1 to 1,000 slots"));
        }
        if self.renews_itself && self.timeout < SHORTEST_KEPT {
            return Err(Error::input(
                "a permit or lease that renews itself needs a timeout of at least 3 seconds",
            ));
        }
        input::text(&self.details)?;
        let (slots, number) = (self.slots as i32, claim_number());
        let claim = sql::claim(&service, slots, self.timeout, &self.details, number);
        let (pool_of_permit, runtime) = (pool.clone(), P::Mode::runtime()?);
        let (subject, timeout, renews_itself) = (self.subject, self.timeout, self.renews_itself);
        ask_detached(pool, deadline, claim, move |claimed: sql::Claimed, sent| {
            let (id, retry_after, database) = claimed;
            let database = Database(database);
            let Some(id) = id else {
                return (Admission::Full(Full::new(retry_after)), database, sent);
            };
            let lease = Lease::new(Grant {
                pool: pool_of_permit,
                runtime,
                subject,
                row: Row {
                    name: service,
                    token: id,
                    claim: number,
                },
                timeout,
                renewal: sql::renew,
                longest: None,
                sent,
            });
            if renews_itself {
                lease.renew_in_background();
            }
            (Admission::Admitted(Permit::new(lease)), database, sent)
        })
        .await
    }

    fn service_or_name(&self) -> &str {
        self.service.as_deref().unwrap_or(self.subject.name)
    }

    /// Returns the name of the service, or an error if the name or the timeout is invalid.
    pub(crate) fn service(&self) -> Result<Arc<str>> {
        input::name(self.subject.name)?;
        let service = self.service_or_name();
        input::name(service)?;
        if service.starts_with(OF_LEADERS) && self.subject.primitive != "leader" {
            return Err(Error::input(
                "a service must not begin with \"leader \", which is reserved for leaders",
            ));
        }
        input::check_duration(
            self.timeout,
            LONGEST,
            "a timeout must be between a microsecond and 1,000 years, and of a leader or with \
             `keep_alive` at least 3 seconds",
        )?;
        Ok(service.into())
    }
}

/// The word for whether a request of another process was in flight.
const fn was_in_flight(was_in_flight: &bool) -> &'static str {
    if *was_in_flight { "in flight" } else { "ended" }
}

#[cfg(feature = "r2d2")]
impl<M> Semaphore<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// [Acquires](Self::acquire) a permit, runs `work`, and releases the permit.
    ///
    /// If `work` returns an error, the permit is released as by a drop. If the permit expired and
    /// `work` succeeded, the result is an error.
    pub fn with<T, E: From<Error>>(
        &self,
        pool: &diesel::r2d2::Pool<M>,
        work: impl FnOnce(&Permit<diesel::r2d2::Pool<M>>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.acquire(pool)?.run(work)
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Semaphore<P> {
    /// [Acquires](Self::acquire) a permit, runs `work`, and releases the permit, as the blocking
    /// `with` does.
    pub async fn with<T, E: From<Error>>(
        &self,
        pool: &P,
        work: impl AsyncFnOnce(&Permit<P>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.acquire(pool).await?.run(work).await
    }
}

impl_debug!(
    Semaphore | this | service = this.service_or_name(),
    slots = this.slots,
    timeout = this.timeout
);
