//! Semaphores over requests to a service: so many at a time, across all instances.

#[cfg(feature = "r2d2")]
mod acquire;
mod admission;
mod borrowed;
#[cfg(feature = "r2d2")]
mod handover;
#[cfg(feature = "r2d2")]
mod late;
#[cfg(feature = "r2d2")]
mod permit;
mod query;
mod request;

use std::borrow::Cow;
use std::time::Duration;

use diesel::data_types::PgInterval;

pub use self::admission::{Admission, Claim, Full};
#[cfg(feature = "r2d2")]
pub use self::permit::Permit;
use crate::error::{Error, Input, Result};
use crate::events::Subject;
use crate::time;

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
/// number new claims are refused until fewer than that are in flight.
///
/// # The log
///
/// grows by a row per request. `SELECT resource_control.prune_service_requests('30 days', 10000)`
/// deletes the oldest ones that ended, and marks those that are overdue. A transaction that stays open
/// for hours anywhere in the database keeps PostgreSQL from cleaning up after each claim, and claims get
/// slower meanwhile: [by how much](crate::guide::growing#long-open-transactions).
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

    fn subject(&self) -> Subject<'_> {
        Subject::Semaphore {
            service: &self.service,
            id: None,
        }
    }

    fn interval(&self) -> Result<PgInterval> {
        match time::microseconds(self.timeout) {
            Some(microseconds) => Ok(PgInterval::from_microseconds(microseconds)),
            None => Err(Error::Input(Input::BadTimeout {
                service: self.service.to_string(),
            })),
        }
    }
}
