//! Rate limits: N units per period on average, with a burst, for each key, across all instances.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;
#[cfg(feature = "postgres")]
mod blocking;
mod check;
#[cfg(feature = "postgres")]
mod give_back;
mod headers;
mod kept;
#[cfg(any(feature = "r2d2", feature = "async"))]
pub(crate) mod local;
mod operations;
mod quota;
mod reply;
mod rules;
mod sql;
#[cfg(any(feature = "postgres", feature = "async"))]
mod waiting;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

pub use self::check::{
    Check, CheckAll, Limited, LimitedReason, RateLimitState, Reservation, Reserve, Spent,
};
#[cfg(feature = "r2d2")]
pub use self::local::blocking::LocalRateLimit;
#[cfg(all(feature = "testing", any(feature = "postgres", feature = "async")))]
pub(crate) use self::operations::use_up;
pub use self::quota::Quota;
pub(crate) use self::reply::quota_of;
use crate::events::Subject;
use crate::text::{self, SentName};

/// A limit of N units per period, with a burst, for each key, across all instances.
///
/// For each key, a row of `resource_control.rate_limit` has the time at which the whole burst is available again. From then on the
/// key is "full". PostgreSQL decides by its own clock, with GCRA, the generic cell rate algorithm. The promise is exact: in any
/// span W of the database's clock, at most `burst + W × N / period` units are allowed for a key.
///
/// A `RateLimit` is a small value that holds no connection. Declare it as a `static`, or create it where it is used.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Check, Error, PgPool, Quota, RateLimit};
///
/// static API: RateLimit = RateLimit::named("api", Quota::per_minute(100).burst(20));
/// static LOGIN: RateLimit = RateLimit::named("login", Quota::per(5, Duration::from_secs(900))).durable();
///
/// fn api(pool: &PgPool, customer: i64) -> Result<String, Error> {
///     Ok(match API.key(customer).cost(3).check(pool)? {
///         Check::Allowed(spent) => format!("200, {} left", spent.remaining),
///         Check::Limited(limited) => match limited.retry_after_secs() {
///             Some(secs) => format!("429 Retry-After: {secs}"),
///             None => "403".to_owned(), // an operator has set a burst below the cost
///         },
///     })
/// }
///
/// fn login(pool: &PgPool, user: &str, password_is_right: bool) -> Result<bool, Error> {
///     if LOGIN.key(user).check(pool)?.is_limited() {
///         return Ok(false);
///     }
///     if password_is_right {
///         LOGIN.key(user).reset(pool)?;
///     }
///     Ok(password_is_right)
/// }
/// # let database = workbench::Database::new();
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// # let pool = database.pool(1);
/// # assert_eq!(api(&pool, 7)?, "200, 17 left");
/// # for _ in 0..5 { assert!(!login(&pool, "a", false)?); }
/// # assert!(!login(&pool, "a", true)?);
/// # assert!(login(&pool, "b", true)?);
/// # Ok::<(), Error>(())
/// ```
///
/// # Overrides
///
/// An operator can change a quota without a deploy, for one key or for all keys of a name:
/// ```sql
/// INSERT INTO resource_control.rate_limit_override (name, key, n, period, burst)
///     VALUES ('api', '7', 1000, '1 minute', 100) -- key NULL: all keys of the name
///     ON CONFLICT (name, scope) DO UPDATE SET n = EXCLUDED.n, period = EXCLUDED.period, burst = EXCLUDED.burst;
/// ```
/// The override of the key applies, otherwise that of the name, otherwise the program's quota. A new quota takes effect at once.
/// The units that a key has spent and that are not refilled yet are then refilled at the new speed. [Reservations](Self::reserve)
/// are an exception: under the new quota, checks are refused until the last reservation of the key may be used, even if that was
/// cancelled. From then on the key is refilled from empty. A [`reset`](Self::reset) makes the key full at once, and earlier
/// reservations may still be used in addition.
///
/// # Instances with different quotas
///
/// While instances disagree about a quota, as during a deploy, they allow at most the larger burst and the faster refill. A
/// reservation keeps its time. Until then a check under another quota is refused, and from then on the key is refilled from empty.
///
/// # Crashes
///
/// A check commits without waiting for the disk, unless the limit is [`durable`](Self::durable). A crash of the server may lose
/// what was spent in the last moments before it: less than three times `wal_writer_delay`, which is 200 ms by default. A failover
/// may also lose what the standby had not received. Lost units can be spent again.
///
/// In a transaction that plain SQL has opened, a call of a limit that is not durable also runs
/// `SET LOCAL synchronous_commit TO DEFAULT` (`peek_on` and `prune_on` do not). So the transaction commits with the default, and
/// not with a value that the session had set.
///
/// # Clocks
///
/// If the server's clock is set back, a key is not refilled until its next call. From that call on it is refilled as usual. Until
/// the clock shows the old time again, units of that key cannot be given back. If the clock is set forward, keys are refilled for
/// the time that it skips.
///
/// # Behind a pooler
///
/// Rate limits work behind a pooler in transaction mode.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a rate limit does nothing until it is checked"]
pub struct RateLimit {
    name: Cow<'static, str>,
    quota: Quota,
    /// `Some(None)` is a key that could not be formatted.
    key: Option<Option<String>>,
    cost: u32,
    durable: bool,
    partition_key: Option<Arc<[u8]>>,
    /// Of the limit in an outcome, so that units are given back to the name from which they were taken.
    sent_name: SentName,
}

impl AsRef<RateLimit> for RateLimit {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl RateLimit {
    /// Makes a rate limit. All programs that use the name share what it allows.
    ///
    /// The name has 1 to 1,000 bytes. The first operation returns an error for any other name, and for a [quota](Quota) that is out
    /// of range.
    pub const fn named(name: &'static str, quota: Quota) -> Self {
        Self {
            name: Cow::Borrowed(name),
            quota,
            key: None,
            cost: 1,
            durable: false,
            partition_key: None,
            sent_name: SentName::NONE,
        }
    }

    /// As [`named`](Self::named), for a name that is known only at run time.
    pub fn new(name: impl Into<String>, quota: Quota) -> Self {
        Self {
            name: Cow::Owned(name.into()),
            ..Self::named("", quota)
        }
    }

    /// Waits for the disk with each check, for a quota whose units cost money. Defaults to not waiting: see
    /// [crashes](#crashes). A session whose own `synchronous_commit` is off does not wait.
    pub const fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Returns the limit of one key, such as a customer, a user or an address. Each key has the whole quota.
    ///
    /// The key has 1 to 1,000 bytes. A key whose `Display` returns an error is reported by the operation, as
    /// [`Input::Unformatted`](crate::error::Input::Unformatted). Defaults to no key, which is limited separately from all keys.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            key: Some(text::formatted(key)),
            name: self.name.clone(),
            partition_key: self.partition_key.clone(),
            sent_name: self.sent_name.clone(),
            ..*self
        }
    }

    /// Returns the limit with another cost of a call, in units. Defaults to 1.
    ///
    /// The operation returns an error for a cost of zero. It also returns one for a cost above the burst of the program's quota,
    /// unless an override is in force. Then a call above the burst of the override is limited.
    pub fn cost(&self, units: u32) -> Self {
        Self {
            cost: units,
            ..self.clone()
        }
    }

    /// Returns the limit with the bytes that the parameter `pk` of its [header fields](crate::Headers) shows. Defaults to no such
    /// parameter, because keys are often secrets.
    pub fn partition_key(&self, bytes: impl AsRef<[u8]>) -> Self {
        Self {
            partition_key: Some(bytes.as_ref().into()),
            ..self.clone()
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the quota of the program. An override is not considered: see [`peek`](Self::peek).
    pub const fn quota(&self) -> Quota {
        self.quota
    }

    /// Returns the limit for an outcome, with the name as it was sent.
    fn sent_as(&self, sent_name: SentName) -> Self {
        Self {
            sent_name,
            ..self.clone()
        }
    }

    /// The key does not appear in events, because keys are often secrets.
    fn subject(&self) -> Subject<'_> {
        Subject::RateLimit { name: &self.name }
    }
}
