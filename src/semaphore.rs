//! Semaphores: at most N permits for a service at a time, among all programs that use the database.

mod admission;
mod permit;
mod sql;

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::admission::WasInFlight;
pub use self::admission::{Admission, Full};
pub use self::permit::Permit;
use crate::call::{ask_surely, in_batches};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::input;
use crate::input::LONGEST;
use crate::lease::{Grant, Lease, Row, SHORTEST_KEPT, claim_number};
use crate::mode::Mode;
use crate::pool::{Pool, Reply, debug};
use crate::statement::Database;
use crate::waiting::{Turns, What, let_others_pass};

/// The service of a leader begins with it, and that of no semaphore does.
pub(crate) const OF_LEADERS: &str = "leader ";

/// At most N permits at a time for a service, among all programs that use the database.
///
/// `P` is the pool of the program, for each of which there is an alias:
/// [`Semaphore`](crate::Semaphore) for r2d2, `deadpool::Semaphore` and `bb8::Semaphore`. Operations
/// return a [`Reply`]: over r2d2 they block and return a `Result`, over deadpool and bb8 they are
/// futures of it.
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Admission, Error, PgPool, Semaphore};
///
/// // Four slots, and a timeout.
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
///
/// fn geocode(pool: &PgPool, q: &str) -> Result<Option<String>, Error> {
///     let Admission::Admitted(permit) = GEOCODER.try_acquire(pool)? else {
///         return Ok(None); // four are in flight
///     };
///     let street = call_geocoder(q, permit.fencing_token()); // no connection is held meanwhile
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
/// A permit is a row of `resource_control.service_request` with one of the slots 0 to N − 1, which
/// the claim takes, the release completes, and which stays as a log until it is
/// [pruned](Self::prune). A permit holds no connection. It ends when it is released, and otherwise
/// after its timeout, by the clock of the database, so after a crash its slot is free again. A
/// permit that must not end while its work goes on [renews itself](Self::keep_alive).
///
/// N may differ between programs and be lowered at any time. There are never more permits than the
/// largest N in use, and no claim is granted while as many as *its* N are in flight.
///
/// With one slot a semaphore is a lock that also works behind a pooler in transaction mode.
///
/// # Waiting
///
/// In a process only the oldest waiter of a service tries, every 5 to 100 ms and when the first
/// permit expires. A release in this process wakes it at once. Waiters hold no connection between
/// two tries. No order is promised.
///
/// # Errors
///
/// [`Error::Input`] for an invalid name, no slot or more than 1,000, and a timeout under a
/// microsecond or over 1,000 years; [`Error::Pool`] if the pool gives no connection;
/// [`Error::NotInstalled`]; and [`Error::Database`].
#[must_use = "a semaphore admits nobody until a permit is acquired"]
#[derive(Clone)]
pub struct Semaphore<P: Pool> {
    subject: Subject,
    /// With its key. `None` if it has the name of the subject.
    service: Option<String>,
    slots: u32,
    timeout: Duration,
    details: Cow<'static, str>,
    is_kept: bool,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> Semaphore<P> {
    /// Makes the semaphore of a service, which takes `slots` requests at a time. A permit that is
    /// neither released nor renewed ends after `timeout`.
    ///
    /// A name that begins with `leader ` is refused, because those belong to
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
            is_kept: false,
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
            is_kept: true,
            pool: PhantomData,
        }
    }

    pub(crate) const fn subject(&self) -> Subject {
        self.subject
    }

    /// Returns the semaphore of one thing under this name, such as a tenant. A second key replaces
    /// the first.
    ///
    /// Its service is the name and the key, joined by a space, with `\` and the spaces in each of
    /// them escaped by `\`. So the key `b` of `a` is the semaphore that is named `a b`.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            service: Some(input::join([self.subject.name, &input::show(key)])),
            ..self.clone()
        }
    }

    /// Returns the semaphore whose requests are logged with this: who makes them, and what for. At
    /// most 1,000 bytes; none by default.
    pub fn details(&self, details: impl Into<String>) -> Self {
        Self {
            details: Cow::Owned(details.into()),
            ..self.clone()
        }
    }

    /// Makes its permits renew themselves every third of their timeout for as long as they are
    /// held: each on a thread of its own over r2d2, and in a task over deadpool and bb8. The
    /// timeout, 3 seconds at least, is then how long a crash keeps the slot.
    ///
    /// A renewal takes a connection of the pool. bb8 does not serve waiters in their order, so
    /// leave it a connection to spare.
    ///
    /// A permit that cannot be renewed in time is [lost](Permit::is_lost) before the database lets
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
    ///         // However long it takes.
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
        self.is_kept = true;
        self
    }

    /// Takes a permit if a slot is free, and never waits for one.
    ///
    /// One round trip on a connection of the pool: `SELECT … FROM
    /// resource_control.claim_service_request($1, $2, $3, $4)`. If all slots are taken it only
    /// reads.
    pub fn try_acquire<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Admission<Permit<P>>> {
        P::Mode::drive(self.subject.observe("try_acquire", self.claim(pool, None)))
    }

    /// Takes a permit, and [waits](Self#waiting) for as long as all slots are taken.
    pub fn acquire<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Permit<P>> {
        P::Mode::drive(async move {
            let waited = self
                .subject
                .observe_wait("acquire", self.wait(pool, None))
                .await?;
            waited.admitted().ok_or(Error::TimedOut)
        })
    }

    /// Takes a permit, and [waits](Self#waiting) for at most `timeout`, the check-out of a
    /// connection included.
    ///
    /// Returns the last refusal after that, or [`Error::TimedOut`] if there was none.
    pub fn acquire_timeout<'a>(
        &'a self,
        pool: &'a P,
        timeout: Duration,
    ) -> Reply<'a, P, Admission<Permit<P>>> {
        P::Mode::drive(async move {
            let wait = self.wait(pool, Instant::now().checked_add(timeout));
            self.subject.observe_wait("acquire_timeout", wait).await
        })
    }

    /// Completes the request of another process by its [token](Permit::fencing_token), if it is of
    /// this service. Returns whether it was in flight. One round trip.
    ///
    /// That process leaves its permit to this one with [`Permit::detach`], because a drop would
    /// complete the request.
    pub fn complete<'a>(&'a self, pool: &'a P, id: i64) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let complete = async {
                let service = self.service()?;
                let complete = sql::complete_of_another(&service, id);
                let slot = What::Slot(service);
                ask_surely(pool, None, complete, move |was_in_flight, _| {
                    crate::waiting::wake_oldest(&slot);
                    WasInFlight(was_in_flight)
                })
                .await
            };
            Ok(self.subject.observe("complete", complete).await?.0)
        })
    }

    /// Extends the request of another process to its timeout from now, if it is of this service.
    /// Returns whether it was in flight. One round trip.
    pub fn renew<'a>(&'a self, pool: &'a P, id: i64) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let renew = async {
                let renew = sql::renew_of_another(&self.service()?, id, self.timeout);
                let was_in_flight = |was_in_flight, _| WasInFlight(was_in_flight);
                ask_surely(pool, None, renew, was_in_flight).await
            };
            Ok(self.subject.observe("renew", renew).await?.0)
        })
    }

    /// Deletes the requests of all services that ended longer ago than `older_than` from the log,
    /// the oldest first and 10,000 in a transaction. Returns how many.
    pub fn prune(pool: &P, older_than: Duration) -> Reply<'_, P, u64> {
        P::Mode::drive(async move {
            if older_than > LONGEST {
                return Err(Error::input("an age is 1,000 years at most"));
            }
            in_batches(pool, sql::prune(older_than)).await
        })
    }

    async fn wait(&self, pool: &P, deadline: Option<Instant>) -> Result<Admission<Permit<P>>> {
        let service = self.service()?;
        let (mut turns, mut last) = (Turns::new(deadline), None);
        let_others_pass::<P::Mode>(&What::Slot(service.clone()), deadline).await;
        while turns.next::<P::Mode>().await {
            let limit = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match P::Mode::within(deadline, self.try_claim(pool, limit)).await {
                Some(Ok((Admission::Full(full), database, sent))) => {
                    turns.note_refusal(What::Slot(service.clone()), database, sent);
                    turns.not_after(full.retry_after);
                    last = Some(full);
                }
                // The pool was waited for until the deadline.
                Some(Err(Error::Pool(_))) if last.is_some() && turns.is_over() => break,
                Some(outcome) => return outcome.map(|(admission, ..)| admission),
                None => break,
            }
        }
        last.map(Admission::Full).ok_or(Error::TimedOut)
    }

    /// Tries once.
    pub(crate) async fn claim(
        &self,
        pool: &P,
        limit: Option<Duration>,
    ) -> Result<Admission<Permit<P>>> {
        let (admission, ..) = self.try_claim(pool, limit).await?;
        Ok(admission)
    }

    /// Tries once. Also returns the database, and when the claim was sent.
    async fn try_claim(
        &self,
        pool: &P,
        limit: Option<Duration>,
    ) -> Result<(Admission<Permit<P>>, Database, Instant)> {
        let service = self.service()?;
        if !(1..=1000).contains(&self.slots) {
            return Err(Error::input("a semaphore has 1 to 1,000 slots"));
        }
        if self.is_kept && self.timeout < SHORTEST_KEPT {
            return Err(Error::input(
                "the timeout of what renews itself is 3 seconds at least",
            ));
        }
        input::text(&self.details)?;
        let (slots, number) = (self.slots as i32, claim_number());
        let claim = sql::claim(&service, slots, self.timeout, &self.details, number);
        let (pool_of_permit, runtime) = (pool.clone(), P::Mode::runtime()?);
        let (subject, timeout, is_kept) = (self.subject, self.timeout, self.is_kept);
        ask_surely(pool, limit, claim, move |claimed: sql::Claimed, sent| {
            let (id, retry_after, database) = claimed;
            let database = Database(database);
            let Some(id) = id else {
                return (Admission::Full(Full::new(retry_after)), database, sent);
            };
            let lease = Lease::new(Grant {
                pool: pool_of_permit,
                runtime,
                database,
                subject,
                row: Row {
                    name: service,
                    token: id,
                    claim: number,
                },
                timeout,
                renewal: sql::renew,
                sent,
            });
            if is_kept {
                lease.keep();
            }
            (Admission::Admitted(Permit::new(lease)), database, sent)
        })
        .await
    }

    fn service_or_name(&self) -> &str {
        self.service.as_deref().unwrap_or(self.subject.name)
    }

    /// The name of the service, unless it or the timeout is invalid.
    pub(crate) fn service(&self) -> Result<Arc<str>> {
        input::name(self.subject.name)?;
        let service = self.service_or_name();
        input::name(service)?;
        if service.starts_with(OF_LEADERS) && self.subject.primitive != "leader" {
            return Err(Error::input(
                "the names of services that begin with \"leader \" belong to leaders",
            ));
        }
        input::check_duration(
            self.timeout,
            LONGEST,
            "a timeout is a microsecond at least, and 1,000 years at most",
        )?;
        Ok(service.into())
    }
}

#[cfg(feature = "r2d2")]
impl Semaphore<crate::pool::PgPool> {
    /// [Acquires](Self::acquire) a permit, runs `work`, and releases it.
    ///
    /// After an error of `work` the permit is released as by a drop. A permit that expired while
    /// `work` succeeded is an error.
    pub fn with<T, E: From<Error>>(
        &self,
        pool: &crate::pool::PgPool,
        work: impl FnOnce(&Permit<crate::pool::PgPool>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.acquire(pool)?.run(work)
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Semaphore<P> {
    /// [Acquires](Self::acquire) a permit, runs `work`, and releases it.
    ///
    /// After an error of `work` the permit is released as by a drop. A permit that expired while
    /// `work` succeeded is an error.
    pub async fn with<T, E: From<Error>>(
        &self,
        pool: &P,
        work: impl AsyncFnOnce(&Permit<P>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.acquire(pool).await?.run(work).await
    }
}

debug!(
    Semaphore | this | service = this.service_or_name(),
    slots = this.slots,
    timeout = this.timeout
);
