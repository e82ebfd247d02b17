//! Throttled resources: handed out at most once per interval, across all instances.

mod decision;
mod query;
mod resource;
mod sync;

use std::borrow::Cow;
use std::fmt;

use diesel::pg::PgConnection;
use diesel::prelude::*;

pub use self::decision::{Decision, Denial, DenialReason, Grant, Outcome};
use self::query::{AttemptKey, AttemptResource};
pub use self::resource::{DeclaredResources, ResourceLabel, ThrottledResource};
pub use self::sync::{Difference, Synced, sync, sync_intervals};
use crate::error::{Error, Result};
use crate::events;
#[cfg(feature = "r2d2")]
use crate::pool::{self, PgPool};
use crate::read_committed;
use crate::text;
use crate::transaction::{self, Transaction};

/// A resource that is handed out at most once per interval, whoever asks, on whichever instance.
///
/// PostgreSQL keeps for each resource when it was handed out last, and by its own clock alone
/// decides whether the interval has passed. Unlike a lock, what is handed out is never given back:
/// it is due again when the interval is over, also if whoever took it has crashed.
///
/// The interval is a column of the table `resource_control.throttled_resource`, which the database
/// owns: [`sync`](crate::sync) adds what a program declares and never changes what is there. It counts as
/// 1,000 years where it is longer, or infinite.
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
/// assert!(synced.different.is_empty(), "changed since, see `sync_intervals`");
///
/// let import = Throttle::of(Resource::TenantImport).key(7); // tenant 7 alone
/// let answer = match import.attempt(conn, "web-3 pid 811")? {
///     Decision::Granted(grant) => format!("202 since {}", grant.granted_at),
///     Decision::Denied(denied) => format!("429 Retry-After: {}", denied.retry_after_secs()),
/// };
/// # assert!(answer.starts_with("202"));
/// # assert_eq!(import.attempt(conn, "web-3")?.denied().unwrap().retry_after_secs(), 60);
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
///
/// # Commit first, work afterwards
///
/// Inside a transaction, a grant counts only when that transaction commits. Until then every other
/// attempt is denied at once, as [being taken](DenialReason::BeingTaken), however long it takes;
/// and if it rolls back, the resource is as if never handed out. So commit at once, and do the work
/// after it: [`run`](Self::run) does it that way round.
///
/// # An interval as long as the cron period
///
/// loses runs: a tick that comes a little early is too soon, and the next one is a period later.
/// Choose the interval shorter than the period, by more than its ticks wander.
///
/// # What it does not protect from
///
/// Work that takes longer than the interval overlaps with the next. Take a session lock as well:
/// [`AdvisoryLock`](crate::AdvisoryLock).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a throttle does nothing until it is attempted"]
pub struct Throttle<R> {
    resource: R,
    /// `Some(None)` is one that could not be formatted.
    key: Option<Option<String>>,
}

impl<R> Throttle<R> {
    /// The throttle of a resource: one of an enum that
    /// [`throttled_resources!`](crate::throttled_resources) declared, or a [`ResourceLabel`] that is
    /// known at run time only.
    pub const fn of(resource: R) -> Self {
        Self {
            resource,
            key: None,
        }
    }

    /// Throttles the resource for each key on its own: a tenant, a user, an address.
    ///
    /// The interval is the resource's. The first attempt makes the key's row in
    /// `resource_control.throttled_key`; `SELECT resource_control.prune_throttled_keys(500)` deletes
    /// rows whose interval has passed. Attempts at those keys are denied, as [being
    /// taken](DenialReason::BeingTaken), for the milliseconds between their deletion and its commit. A key
    /// whose `Display` returns an error is reported by the attempt, as [`Error::Unformatted`]. Defaults to no
    /// key, which is a state of its own.
    pub fn key(mut self, key: impl fmt::Display) -> Self {
        self.key = Some(text::formatted(key));
        self
    }
}

impl<R: ThrottledResource> Throttle<R> {
    /// Takes the resource if it is due, and answers the decision; never waits.
    ///
    /// One round trip, and one more to prepare the statement, once per connection:
    /// ```sql
    /// SELECT … FROM resource_control.attempt_throttled_resource($1, $2)
    /// SELECT … FROM resource_control.attempt_throttled_key($1, $2, $3) -- with a key
    /// ```
    /// After an error of a kind that Diesel does not tell, one more asks the catalogue what is missing.
    /// `details` are for the operators: who takes it, such as a host and a process id.
    ///
    /// A denial only reads: it locks nothing and draws no transaction id. Where the session's
    /// default isolation level is stricter than READ COMMITTED, a serialization failure is repeated
    /// once, in a READ COMMITTED transaction of its own.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDetails`] and [`Error::EmptyKey`], [`Error::NulCharacter`] and
    ///   [`Error::TooLong`] (a key of 1,000 bytes, details of 8,192), before anything is sent.
    /// - [`Error::UnknownResource`] if the resource has no row: run [`sync`](crate::sync).
    /// - [`Error::NotInstalled`] and [`Error::MissingRights`] if the schema, or the right to it, is
    ///   missing.
    /// - [`Error::ReadOnly`] on a standby and in a read-only transaction.
    /// - [`Error::StrictIsolation`] for a serialization failure inside the caller's own transaction.
    /// - [`Error::Database`] for anything else.
    pub fn attempt(&self, conn: &mut PgConnection, details: &str) -> Result<Decision> {
        let call = || self.decide(conn, details);
        let key = self.key.as_ref().and_then(Option::as_deref);
        events::attempt(self.resource.label(), key, call)
    }

    fn decide(&self, conn: &mut PgConnection, details: &str) -> Result<Decision> {
        let _names = text::names_on(conn);
        let (label, key) = self.checked()?;
        text::check(details, "the details", text::LONGEST_DETAILS)?;
        if details.trim_matches(' ').is_empty() {
            return Err(Error::EmptyDetails);
        }
        let answered = read_committed::repeat(conn, |conn| match key.as_deref() {
            None => AttemptResource { label, details }.get_result(conn),
            Some(key) => AttemptKey {
                label,
                key,
                details,
            }
            .get_result(conn),
        });
        match answered {
            Ok(attempted) => Ok(decision::from_row(attempted)),
            Err(error) => Err(query::explain(conn, error, label)),
        }
    }

    /// Takes the resource if it is due, on a connection out of the pool, which is back in the pool
    /// before `work` runs; else answers the denial.
    ///
    /// Round trips as [`attempt`](Self::attempt), beyond the pool's own check-out, for which it waits as
    /// long as the pool is set to wait. The grant is committed first. Should `work` fail, the resource is due again when its interval
    /// has passed, not before.
    ///
    /// # Errors
    ///
    /// What `work` answers, else as [`attempt`](Self::attempt), and
    /// [`Error::Pool`](crate::Error::Pool).
    #[cfg(feature = "r2d2")]
    pub fn run<T, E, F>(&self, pool: &PgPool, details: &str, work: F) -> Result<Outcome<T>, E>
    where
        F: FnOnce(Grant) -> Result<T, E>,
        E: From<Error>,
    {
        let mut conn = pool::check_out(pool, None)?;
        let decision = self.attempt_committed(&mut conn, details)?;
        drop(conn);
        match decision {
            Decision::Granted(grant) => work(grant).map(Outcome::Done),
            Decision::Denied(denial) => Ok(Outcome::Denied(denial)),
        }
    }

    /// As [`run`](Self::run), on the given connection, which `work` gets.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run), and [`Error::GrantInTransaction`] inside an open transaction, where
    /// the grant could not be committed before `work` runs.
    pub fn run_on<T, E, F>(
        &self,
        conn: &mut PgConnection,
        details: &str,
        work: F,
    ) -> Result<Outcome<T>, E>
    where
        F: FnOnce(&mut PgConnection, Grant) -> Result<T, E>,
        E: From<Error>,
    {
        match self.attempt_committed(conn, details)? {
            Decision::Granted(grant) => work(conn, grant).map(Outcome::Done),
            Decision::Denied(denial) => Ok(Outcome::Denied(denial)),
        }
    }

    /// The label and the key as they are sent, once they passed every check that needs no database.
    pub(crate) fn checked(&self) -> Result<(&str, Option<Cow<'_, str>>)> {
        let label = self.resource.label();
        text::check(label, "the label", text::LONGEST_LABEL)?;
        let key = match &self.key {
            Some(key) => Some(text::name(key.as_deref().ok_or(Error::Unformatted)?)),
            None => None,
        };
        if let Some(key) = &key {
            text::check(key, "the key", text::LONGEST_NAME)?;
            if key.is_empty() {
                return Err(Error::EmptyKey);
            }
        }
        Ok((label, key))
    }

    /// Outside a transaction, so that the grant is committed when it is answered.
    fn attempt_committed(&self, conn: &mut PgConnection, details: &str) -> Result<Decision> {
        if transaction::of(conn) == Transaction::Open {
            return Err(Error::GrantInTransaction);
        }
        self.attempt(conn, details)
    }
}
