//! Throttles: a resource is granted at most once per interval, across all instances.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;
#[cfg(feature = "postgres")]
mod blocking;
mod decision;
mod operations;
mod resource;
mod rules;
mod sql;
pub(crate) mod sync;

use std::borrow::Cow;
use std::fmt;

#[cfg(feature = "postgres")]
pub use self::blocking::{sync, sync_intervals};
pub use self::decision::{Decision, Denial, DenialReason, Grant};
pub use self::resource::{DeclaredResources, ResourceLabel, ThrottledResource};
pub use self::sync::{Difference, Synced};
use crate::text;

/// A resource that is granted at most once per interval, across all instances.
///
/// PostgreSQL records when each resource was granted last, and decides by its own clock whether the interval has passed.
/// Unlike a lock, a grant is never given back. The resource is due again when the interval has passed, even if the caller
/// has crashed.
///
/// The interval is a column of the table `resource_control.throttled_resource`, and the database owns it: [`sync`](crate::sync)
/// inserts what a program declares and never changes an existing row. An interval in the table of more than 1,000 years counts as
/// 1,000 years. A declared one is refused, as [`Input::BadInterval`](crate::error::Input::BadInterval).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Decision, Throttle, throttled_resources};
///
/// throttled_resources! {
///     /// What this application does at most once per interval.
///     pub enum Resource {
///         CacheRebuild = "cache rebuild" every Duration::from_secs(15),
///         TenantImport = "tenant import" every Duration::from_secs(60),
///     }
/// }
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// let synced = diesel_interlock::sync::<Resource>(conn)?; // at start-up
/// for difference in synced.different {
///     eprintln!("the interval of the database applies: {difference:?}");
/// }
///
/// let import = Throttle::of(Resource::TenantImport).key(7).details("web-3 pid 811"); // tenant 7 only
/// let response = match import.attempt_on(conn)? {
///     Decision::Granted(grant) => format!("202 since {}", grant.granted_at),
///     Decision::Denied(denied) => format!("429 Retry-After: {}", denied.retry_after_secs()),
/// };
/// # assert!(response.starts_with("202"));
/// # assert_eq!(import.attempt_on(conn)?.denied().unwrap().retry_after_secs(), 60);
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
///
/// # Order of grant and work
///
/// Inside a transaction, a grant counts only when that transaction commits. Until then every other attempt is denied at once,
/// as [being taken](DenialReason::BeingTaken). If the transaction rolls back, the resource is as if it had never been
/// granted. So commit at once, and do the work afterwards. [`run`](Self::run) does it in that order.
///
/// # Intervals and cron periods
///
/// If the interval equals the cron period, runs are skipped: a tick that comes slightly early is denied, and the next one comes a
/// period later. Make the interval shorter than the period by more than the ticks vary.
///
/// # Caveats
///
/// Work that takes longer than the interval overlaps with the next run. Take a session lock as well:
/// [`AdvisoryLock`](crate::AdvisoryLock).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a throttle does nothing until it is attempted"]
pub struct Throttle<R> {
    resource: R,
    /// `Some(None)` is a key that could not be formatted.
    key: Option<Option<String>>,
    details: Cow<'static, str>,
}

impl<R> AsRef<Throttle<R>> for Throttle<R> {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl<R> Throttle<R> {
    /// Makes the throttle of a resource: a variant of an enum that
    /// [`throttled_resources!`](crate::throttled_resources) declares, or a [`ResourceLabel`] that is known only at run time.
    pub const fn of(resource: R) -> Self {
        Self {
            resource,
            key: None,
            details: Cow::Borrowed(""),
        }
    }

    /// Returns the throttle of one key, such as a tenant, a user or an address.
    ///
    /// The interval is the resource's. The first attempt inserts the key's row into `resource_control.throttled_key`.
    /// `SELECT resource_control.prune_throttled_keys(500)` deletes rows whose interval has passed. Attempts at those keys
    /// are denied, as [being taken](DenialReason::BeingTaken), for the milliseconds between their deletion and its commit.
    /// A key whose `Display` returns an error is reported by the attempt, as
    /// [`Input::Unformatted`](crate::error::Input::Unformatted). Defaults to no key, which is throttled separately from all keys.
    pub fn key(&self, key: impl fmt::Display) -> Self
    where
        R: Clone,
    {
        Self {
            key: Some(text::formatted(key)),
            ..self.clone()
        }
    }

    /// Returns the throttle with the details of who takes the resource, such as a host and a process id, for operators and
    /// denied callers. 1 to 8,192 bytes, not only spaces. An attempt without details is an error,
    /// [`Input::EmptyDetails`](crate::error::Input::EmptyDetails).
    pub fn details(&self, details: impl Into<Cow<'static, str>>) -> Self
    where
        R: Clone,
    {
        Self {
            details: details.into(),
            ..self.clone()
        }
    }
}
