//! The outcome of a claim.

use std::borrow::Cow;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::headers::{self, Headers, LARGEST};
use crate::time;

/// The outcome of a claim: a slot that was acquired, or a full semaphore with a hint when to retry.
///
/// This is an enum and not an `Option`, because rustc does not warn about an `Option` that is dropped. The
/// slot would be released at once, and the code below would run without it:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// use std::time::Duration;
/// use diesel_interlock::{Error, PgPool, Semaphore};
///
/// fn geocode(pool: &PgPool) -> Result<(), Error> {
///     Semaphore::named("geocoder", 4, Duration::from_secs(30)).try_acquire(pool)?; // released on this line
///     Ok(())
/// }
/// ```
///
/// The following code looks at the outcome, and compiles:
/// ```
/// #![deny(unused_must_use)]
/// use std::time::Duration;
/// use diesel_interlock::{Error, PgPool, Semaphore};
///
/// fn geocode(pool: &PgPool) -> Result<(), Error> {
///     let geocoder = Semaphore::named("geocoder", 4, Duration::from_secs(30));
///     let Some(_permit) = geocoder.try_acquire(pool)?.admitted() else {
///         return Ok(());
///     };
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "an unused permit is released at once, and an unused claim keeps its slot until its timeout"]
pub enum Admission<P> {
    /// A slot was acquired. `P` is a [`Permit`](crate::Permit), a [`Claim`], or the value of the work that ran with it.
    Admitted(P),
    /// Every slot is taken. Nothing was changed, and nothing is held.
    Full(Full),
}

impl<P> Admission<P> {
    /// Returns what was acquired, and drops the hint of a full semaphore.
    ///
    /// ```compile_fail
    /// #![deny(unused_must_use)]
    /// # use std::time::Duration;
    /// # use diesel_interlock::{Error, PgPool, Semaphore};
    /// # fn geocode(pool: &PgPool) -> Result<(), Error> {
    /// # let geocoder = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    /// geocoder.try_acquire(pool)?.admitted(); // released on this line
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "an unused permit is released at once, and an unused claim keeps its slot until its timeout"]
    pub fn admitted(self) -> Option<P> {
        match self {
            Admission::Admitted(inner) => Some(inner),
            Admission::Full(_) => None,
        }
    }

    /// Returns the hint of a full semaphore, and drops what was acquired.
    #[must_use = "if a slot was acquired, this has released it, or left it to its timeout"]
    pub fn full(self) -> Option<Full> {
        match self {
            Admission::Admitted(_) => None,
            Admission::Full(full) => Some(full),
        }
    }

    /// Returns whether a slot was acquired. As with [`is_full`](Self::is_full), a permit in a temporary is dropped.
    #[must_use]
    pub const fn is_admitted(&self) -> bool {
        matches!(self, Admission::Admitted(_))
    }

    /// Returns whether every slot is taken.
    ///
    /// On a temporary value, as in `semaphore.try_acquire(pool)?.is_full()`, this drops the permit, which releases it.
    /// Bind the outcome to a name, `_permit` for example, to keep the slot.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        matches!(self, Admission::Full(_))
    }

    /// Applies `f` to what was acquired, and leaves a full semaphore as it is.
    pub fn map<T>(self, f: impl FnOnce(P) -> T) -> Admission<T> {
        match self {
            Admission::Admitted(inner) => Admission::Admitted(f(inner)),
            Admission::Full(full) => Admission::Full(full),
        }
    }
}

/// A semaphore without a free slot: when to retry.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Full {
    /// How long until a slot is expected to be free, by the database's clock. Never zero.
    ///
    /// This is the time until the first request in flight expires. If the number of slots was lowered, it is the time
    /// until enough requests expire to make room for one more. It is a hint, because most requests are released long
    /// before they expire, and some are renewed. If all slots are being claimed at this moment, it is the timeout of
    /// the semaphore.
    pub retry_after: Duration,
    pub(super) service: Cow<'static, str>,
    pub(super) slots: u32,
}

impl Full {
    /// Returns [`retry_after`](Self::retry_after) in whole seconds, rounded up and at least 1, for the HTTP header `Retry-After`.
    pub fn retry_after_secs(&self) -> u64 {
        time::whole_seconds(self.retry_after)
    }

    /// Returns the header fields of the response.
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::{Admission, Error, PgPool, Semaphore};
    ///
    /// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    ///
    /// fn geocode(pool: &PgPool) -> Result<u16, Error> {
    ///     Ok(match GEOCODER.try_acquire(pool)? {
    ///         Admission::Admitted(_permit) => 200,
    ///         Admission::Full(full) => {
    ///             for (name, value) in full.headers().fields() {
    ///                 println!("{name}: {value}"); // to the response
    ///             }
    ///             503
    ///         }
    ///     })
    /// }
    /// # let database = workbench::Database::new();
    /// # let conn = &mut database.connect();
    /// # diesel_interlock::migrations::install(conn)?;
    /// # assert_eq!(geocode(&database.pool(1))?, 200);
    /// # while GEOCODER.claim_on(conn)?.admitted().is_some() {}
    /// # assert_eq!(geocode(&database.pool(1))?, 503);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn headers(&self) -> Headers {
        let name = headers::string(&self.service);
        let seconds = u128::from(self.retry_after_secs()).min(LARGEST);
        Headers {
            policy: format!(r#"{name};q={};qu="concurrent-requests""#, self.slots),
            limit: format!("{name};r=0;t={seconds}"),
            retry_after: Some(seconds.to_string()),
        }
    }
}

/// A claimed slot as plain data, for work that ends in another thread, process or program than it began in.
///
/// Dropping a `Claim` does nothing. Only [`Semaphore::complete_on`](crate::Semaphore::complete_on), the SQL function
/// `resource_control.complete_service_request`, or the timeout frees the slot.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "unless the claim is completed, its slot stays taken until its timeout"]
#[non_exhaustive]
pub struct Claim {
    /// The `id` of the request in `resource_control.service_request`, by which it is completed and renewed. It is also
    /// the fencing token.
    pub id: i64,
    /// The number of the slot, from 0 on.
    pub slot: i16,
    /// When the slot was claimed, by the database's clock.
    pub created_at: DateTime<Utc>,
    /// When the claim expires, by the database's clock.
    pub expires_at: DateTime<Utc>,
}

/// The result of a claim: a claim, a permit, or an admission with one of them.
pub(super) trait Claimed {
    fn claimed(&self) -> Result<&Claim, &Full>;
}

impl Claimed for Claim {
    fn claimed(&self) -> Result<&Claim, &Full> {
        Ok(self)
    }
}

impl<P: Claimed> Claimed for Admission<P> {
    fn claimed(&self) -> Result<&Claim, &Full> {
        match self {
            Admission::Admitted(acquired) => acquired.claimed(),
            Admission::Full(full) => Err(full),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_full_semaphore_tell_its_slots_and_when_to_retry() {
        let unit = r#";qu="concurrent-requests""#;
        for (service, slots, retry_after, name, seconds) in [
            (
                "geocoder",
                4,
                Duration::from_millis(8001),
                r#""geocoder""#,
                "9",
            ),
            (
                "geocoder",
                1,
                Duration::from_micros(1),
                r#""geocoder""#,
                "1",
            ),
            ("a\"b", 32_767, Duration::from_secs(30), r#""a\"b""#, "30"),
            ("é", 4, Duration::MAX, r#""%C3%A9""#, "999999999999999"),
        ] {
            let full = Full {
                retry_after,
                service: service.into(),
                slots,
            };
            let headers = full.headers();
            assert_eq!(headers.policy, format!("{name};q={slots}{unit}"));
            assert_eq!(headers.limit, format!("{name};r=0;t={seconds}"));
            assert_eq!(headers.retry_after.as_deref(), Some(seconds));
        }
    }
}
