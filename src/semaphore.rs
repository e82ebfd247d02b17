//! Semaphores: a service takes a limited number of concurrent requests, across all instances.

mod admission;
#[cfg(feature = "async")]
pub(crate) mod asynchronous;
#[cfg(feature = "postgres")]
mod blocking;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod held;
mod operations;
#[cfg(feature = "r2d2")]
mod permit;
mod rules;
mod sql;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod waiting;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod wakeups;

use std::borrow::Cow;
use std::time::Duration;

pub use self::admission::{Admission, Claim, Full};
#[cfg(feature = "r2d2")]
pub use self::permit::Permit;
pub(crate) use self::rules::checked_service;

/// A limit on the number of concurrent requests to a service, across all instances. No connection is held while a
/// request runs.
///
/// PostgreSQL stores each request as a row of `resource_control.service_request`. A request in flight has a slot,
/// numbered from 0 to N − 1, and a partial unique index ensures that a slot has one holder at a time. If a holder
/// crashes or hangs, its slot is free after the timeout. Rows of ended requests remain as a log.
///
/// A `Semaphore` is a small value that holds no connection. Declare it as a `static`, or create it where it is used.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Admission, Error, PgPool, Semaphore};
///
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
///
/// fn geocode(pool: &PgPool, q: &str) -> Result<Option<String>, Error> {
///     let Admission::Admitted(permit) = GEOCODER.try_acquire(pool)? else {
///         return Ok(None); // four are in flight
///     };
///     let street = call_geocoder(q, permit.fencing_token()); // no connection is held meanwhile
///     permit.release()?; // an error if the permit had timed out
///     Ok(Some(street))
/// }
/// # fn call_geocoder(q: &str, _: i64) -> String { q.to_owned() }
/// # let database = workbench::Database::new();
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// # let pool = database.pool(1);
/// # assert_eq!(geocode(&pool, "Main St")?.as_deref(), Some("Main St"));
/// # Ok::<(), Error>(())
/// ```
///
/// # Expiry
///
/// Expiry is decided by the database clock. Once `expires_at` has passed, the request no longer counts, even if its row
/// has not been marked yet, and another holder may take the slot. Choose a timeout that is longer than the request can
/// take. Give the request itself a shorter timeout ([`Permit::remaining`]), or [renew](Permit::renew) the permit.
///
/// # Holders that outlive their permit
///
/// A semaphore cannot stop a holder that does not notice that its permit has timed out, such as a process that was suspended. The
/// [fencing token](Permit::fencing_token) protects the data in that case: the service has to refuse each token that is smaller than
/// one it has seen for that slot.
///
/// With one slot, each new holder gets a larger token, so the semaphore is a lock with a lease, which also works behind
/// a pooler in transaction mode. An asynchronous failover of the server may lose claims, and assign their ids again.
///
/// # Instances with different numbers of slots
///
/// While instances disagree about the number of slots, as during a deploy, the larger number applies. An instance with a smaller
/// number claims no slot until fewer requests than its own number are in flight.
///
/// # Growth of the log
///
/// Each request adds a row. `SELECT resource_control.prune_service_requests('30 days', 10000)` deletes the oldest
/// requests that have ended, and marks requests that are overdue. While a transaction stays open for hours anywhere in
/// the database, PostgreSQL cannot clean up after each claim, and claims get slower: [measured in the
/// guide](crate::guide::growing#long-open-transactions).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a semaphore does nothing until a slot is acquired"]
pub struct Semaphore {
    service: Cow<'static, str>,
    slots: u32,
    timeout: Duration,
    details: Cow<'static, str>,
}

impl AsRef<Semaphore> for Semaphore {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Semaphore {
    /// Makes the semaphore of a service. At most `slots` requests are in flight, and a request that is not released
    /// ends after `timeout`.
    ///
    /// The name of the service has 1 to 1,000 bytes. The number of slots is 1 to 32,767. The timeout is longer than zero, at most a
    /// thousand years of 360 days, and rounded up to microseconds. The first operation returns an error for any other value.
    pub const fn named(service: &'static str, slots: u32, timeout: Duration) -> Self {
        Self {
            service: Cow::Borrowed(service),
            slots,
            timeout,
            details: Cow::Borrowed(""),
        }
    }

    /// As [`named`](Self::named), for a service whose name is known only at run time, such as one per tenant.
    pub fn new(service: impl Into<String>, slots: u32, timeout: Duration) -> Self {
        Self {
            service: Cow::Owned(service.into()),
            ..Self::named("", slots, timeout)
        }
    }

    /// Returns the semaphore with the details of its requests in the log, for operators: who makes the requests, and what for. At
    /// most 8,192 bytes. Defaults to none.
    pub fn details(&self, details: impl Into<Cow<'static, str>>) -> Self {
        Self {
            details: details.into(),
            ..self.clone()
        }
    }

    /// Returns the name of the service.
    pub fn service(&self) -> &str {
        &self.service
    }

    /// Returns how many requests may be in flight.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns how long a request lasts if it is neither released nor renewed.
    pub const fn timeout(&self) -> Duration {
        self.timeout
    }
}
