//! Throttles: an action is granted at most once per interval, on all instances together.

mod decision;
mod resource;
pub(crate) mod sql;
mod sync;

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use diesel::data_types::PgInterval;

pub use self::decision::{Decision, Denied, Granted, LastGrant};
pub use self::resource::{DeclaredResources, ResourceLabel, ThrottledResource};
pub use self::sync::{Difference, Synced};
use crate::call::{ask, ask_on};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::input::LONGEST;
use crate::mode::Mode;
use crate::pool::{ConnectionOf, Pool, Reply, impl_debug};
use crate::{input, instance};

/// Grants an action at most once per interval, on all instances together, by the database's clock.
///
/// There are two kinds:
///
/// - [`Throttle::named`] needs no set-up. The interval is in the program, and the table
///   `resource_control.throttle` has a row for each name and key.
/// - [`Throttle::of`] attempts a resource that you declare with
///   [`throttled_resources!`](crate::throttled_resources). The interval is in the database, where
///   an operator can change it, and a resource that the database does not know is an error.
///
/// ```
/// use std::time::Duration;
///
/// use diesel_interlock::{Error, PgPool, Throttle};
///
/// static REBUILD: Throttle = Throttle::named("rebuild the cache", Duration::from_secs(15));
///
/// fn refresh(pool: &PgPool) -> Result<bool, Error> {
///     let decision = REBUILD.attempt(pool)?;
///     if decision.is_granted() {
///         // rebuild it
///     }
///     Ok(decision.is_granted())
/// }
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # diesel_interlock::migrations::install(&pool)?;
/// # assert!(refresh(&pool)? && !refresh(&pool)?);
/// # Ok::<(), Error>(())
/// ```
///
/// An attempt never waits: while another transaction is taking the throttle, the attempt is denied
/// at once. A denial only reads. The interval is elapsed time, between a microsecond and 1,000
/// years.
///
/// # Errors
///
/// [`Error::Input`], [`Error::Pool`], [`Error::NotDeclared`] for a resource without a row,
/// [`Error::NotInstalled`], [`Error::Standby`] if the server refuses to write,
/// [`Error::DirtyConnection`] and [`Error::Database`].
#[must_use = "a throttle decides nothing until it is attempted"]
#[derive(Clone)]
pub struct Throttle<P: Pool> {
    name: &'static str,
    key: Cow<'static, str>,
    details: Cow<'static, str>,
    /// `None` for a resource, because its interval is in the database.
    every: Option<Duration>,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> Throttle<P> {
    /// Makes a throttle with this name, which is granted at most once per `every`.
    pub const fn named(name: &'static str, every: Duration) -> Self {
        Self::new(name, Some(every))
    }

    /// Makes the throttle of a declared resource. Its interval is read from the database.
    pub fn of(resource: impl ThrottledResource) -> Self {
        Self::new(resource.label(), None)
    }

    const fn new(name: &'static str, every: Option<Duration>) -> Self {
        Self {
            name,
            key: Cow::Borrowed(""),
            details: Cow::Borrowed(""),
            every,
            pool: PhantomData,
        }
    }

    /// Returns the throttle of one tenant, user or address. Each key is granted independently of
    /// the others, and has a row until it is [pruned](crate::prune::throttles). An empty key is
    /// none. A second call replaces the first key.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            key: Cow::Owned(input::show(key)),
            ..self.clone()
        }
    }

    /// Returns the throttle with a note of who attempts it, which denied callers and operators see.
    /// The default is the host and the pid of the program.
    pub fn details(&self, details: impl Into<String>) -> Self {
        Self {
            details: Cow::Owned(details.into()),
            ..self.clone()
        }
    }

    /// Takes the throttle if it is due. The grant is committed when this method returns.
    ///
    /// One round trip: an `UPDATE` that skips the row if it is locked or not due. The first attempt
    /// of a key takes two.
    pub fn attempt<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Decision> {
        P::Mode::drive(self.subject().observe("attempt", async move {
            let (row, _) = ask(pool, None, &self.question()?).await?;
            self.decide(row)
        }))
    }

    /// Takes the throttle as [`attempt`](Self::attempt) does, in the transaction of `conn`.
    ///
    /// Until that transaction ends, all other attempts are denied. If it is rolled back, the
    /// throttle is due again.
    pub fn attempt_on<'a>(&'a self, conn: &'a mut ConnectionOf<P>) -> Reply<'a, P, Decision> {
        P::Mode::drive(self.subject().observe("attempt_on", async move {
            self.decide(ask_on(conn, &self.question()?).await?)
        }))
    }

    /// Returns the name, the key, and whether the throttle is of a resource.
    #[cfg(feature = "testing")]
    pub(crate) fn row(&self) -> (&str, &str, bool) {
        (self.name, &self.key, self.every.is_none())
    }

    fn question(&self) -> Result<sql::Attempt> {
        input::name(self.name)?;
        input::text(&self.key)?;
        input::text(&self.details)?;
        let details = match self.details.trim() {
            "" => instance::name(),
            _ => &*self.details,
        };
        let every = self.every.map(|every| {
            input::check_duration(
                every,
                LONGEST,
                "the interval of a throttle must be between a microsecond and 1,000 years",
            )
        });
        let every = every.transpose()?.map(PgInterval::from_microseconds);
        Ok(sql::Attempt::new(self.name, &self.key, every, details))
    }

    fn decide(&self, row: sql::Row) -> Result<Decision> {
        Decision::new(row).ok_or(Error::NotDeclared(self.name))
    }

    fn subject(&self) -> Subject {
        Subject {
            primitive: "throttle",
            name: self.name,
        }
    }
}

#[cfg(feature = "r2d2")]
impl<M> Throttle<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// [Attempts](Self::attempt) the throttle, and runs `work` if it is granted. The interval is
    /// spent even if `work` fails.
    pub fn run<T, E: From<Error>>(
        &self,
        pool: &diesel::r2d2::Pool<M>,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<Decision<T>, E> {
        Ok(match self.attempt(pool)? {
            Decision::Granted(_) => Decision::Granted(work()?),
            Decision::Denied(denied) => Decision::Denied(denied),
        })
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Throttle<P> {
    /// [Attempts](Self::attempt) the throttle, and runs `work` if it is granted. The interval is
    /// spent even if `work` fails.
    pub async fn run<T, E: From<Error>>(
        &self,
        pool: &P,
        work: impl AsyncFnOnce() -> Result<T, E>,
    ) -> Result<Decision<T>, E> {
        Ok(match self.attempt(pool).await? {
            Decision::Granted(_) => Decision::Granted(work().await?),
            Decision::Denied(denied) => Decision::Denied(denied),
        })
    }
}

impl_debug!(
    Throttle | this | name = this.name,
    key = this.key,
    every = this.every
);
