//! An application's own migrations, once although many instances start.

use std::collections::HashMap;

use diesel::migration::{Migration, MigrationSource, MigrationVersion};
use diesel::pg::Pg;
use diesel_migrations::MigrationHarness;

use crate::advisory::sql::Lock;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::key::LockKey;

/// The name of the lock under which they run. It never changes.
const LOCK: &str = "diesel_interlock migrations";

/// Runs the pending migrations of an application, once although many instances start at the same time. Returns the versions that it
/// ran.
///
/// It takes a session lock, waits for it as long as another instance migrates, and lets Diesel run what is pending then. Diesel's table
/// is where Diesel looks for it, in the first schema of the search path, so a schema per tenant works. A wait of more than 5 seconds is
/// told as an event, with the session that it waits for.
///
/// **Migrate over a direct URL**, because behind a pooler in transaction mode the statements of one connection run on many sessions. The
/// release finds that out ([`Error::SessionMoved`]), after the migrations ran.
///
/// The connection is a `&mut PgConnection` in the blocking half, where this blocks. In the asynchronous half it is an
/// `AsyncPgConnection` by value, whose end frees the lock whatever happens, and this returns a future; Diesel runs the migrations on a
/// blocking thread of tokio's, where they go on if the future is dropped.
///
/// ```no_run
/// use diesel::prelude::*;
/// use diesel_interlock::{Error, migrations};
/// use diesel_migrations::EmbeddedMigrations;
///
/// fn migrate(conn: &mut PgConnection, own: EmbeddedMigrations) -> Result<(), Error> {
///     for version in migrations::run_pending(conn, own)? {
///         println!("{version}");
///     }
///     Ok(())
/// }
/// ```
///
/// # Errors
///
/// [`Error::ApplicationMigration`] with the database's reason, [`Error::EqualVersions`] before anything runs, and those of a [session
/// lock](crate::advisory::AdvisoryLock#errors).
pub fn run_pending<T: Target>(
    conn: T,
    source: impl MigrationSource<Pg> + Send + 'static,
) -> T::Reply {
    conn.run_pending(source)
}

/// A connection that [`run_pending`] runs migrations on. Nobody else implements it.
#[diagnostic::on_unimplemented(
    message = "migrations do not run on `{Self}`",
    label = "not a `&mut PgConnection`, and not an owned `AsyncPgConnection`",
    note = "lend a pooled connection of r2d2 as `&mut *conn`; in the asynchronous half establish a connection for the migrations, \
            `AsyncPgConnection::establish(url).await?`, and give it away"
)]
pub trait Target: sealed::Sealed {
    /// What it returns: a result, or a future of it.
    type Reply;

    #[doc(hidden)]
    fn run_pending(self, source: impl MigrationSource<Pg> + Send + 'static) -> Self::Reply;
}

mod sealed {
    #[allow(unreachable_pub)]
    pub trait Sealed {}
}

#[cfg(feature = "r2d2")]
impl sealed::Sealed for &mut diesel::PgConnection {}

#[cfg(feature = "r2d2")]
impl Target for &mut diesel::PgConnection {
    type Reply = Result<Vec<String>>;

    fn run_pending(self, source: impl MigrationSource<Pg> + Send + 'static) -> Self::Reply {
        use crate::advisory::Scope;
        use crate::mode::Blocking;
        use crate::session::now;

        let source = Checked::new(source)?;
        let (key, lock, subject) = lock()?;
        let mut scope = now(Scope::enter::<Blocking>(self, lock, subject, true))?;
        let ran = migrate(scope.conn, source);
        now(scope.leave(&key, ran))
    }
}

#[cfg(feature = "async")]
impl sealed::Sealed for diesel_async::AsyncPgConnection {}

#[cfg(feature = "async")]
impl Target for diesel_async::AsyncPgConnection {
    type Reply = crate::mode::Running<'static, Result<Vec<String>>>;

    fn run_pending(mut self, source: impl MigrationSource<Pg> + Send + 'static) -> Self::Reply {
        use crate::advisory::Scope;
        use crate::mode::{Async, Mode};
        use diesel_async::async_connection_wrapper::AsyncConnectionWrapper;

        Async::drive(async move {
            let source = Checked::new(source)?;
            let (key, lock, subject) = lock()?;
            let scope = Scope::enter::<Async>(&mut self, lock, subject, true).await?;
            // Diesel's migrations want a connection that they own. If anything fails from here on, its end frees the lock.
            let held = scope.disarm();
            let running = tokio::task::spawn_blocking(move || {
                let mut conn = AsyncConnectionWrapper::<_>::from(self);
                let ran = migrate(&mut conn, source);
                (conn.into_inner(), ran)
            });
            let (mut conn, ran) = running
                .await
                .map_err(|error| Error::ApplicationMigration(error.into()))?;
            let mut scope = Scope::resume(&mut conn, lock, subject, held);
            scope.leave(&key, ran).await
        })
    }
}

fn lock() -> Result<(LockKey, Lock, Subject)> {
    let key = LockKey::named(LOCK);
    let lock = Lock {
        id: key.id()?,
        is_shared: false,
    };
    let subject = Subject {
        primitive: "lock",
        name: LOCK,
    };
    Ok((key, lock, subject))
}

fn migrate(
    conn: &mut impl MigrationHarness<Pg>,
    source: impl MigrationSource<Pg>,
) -> Result<Vec<String>> {
    let ran = conn.run_pending_migrations(source);
    let ran = ran.map_err(Error::ApplicationMigration)?;
    Ok(ran.iter().map(ToString::to_string).collect())
}

/// A source whose migrations have versions of their own: of two that are equal, Diesel would run one and say nothing.
struct Checked<S>(S);

impl<S: MigrationSource<Pg>> Checked<S> {
    fn new(source: S) -> Result<Self> {
        let migrations = source.migrations().map_err(Error::ApplicationMigration)?;
        let mut names: HashMap<MigrationVersion<'_>, String> = HashMap::new();
        for migration in &migrations {
            let name = migration.name();
            if let Some(other) = names.insert(name.version(), name.to_string()) {
                return Err(Error::EqualVersions(other, name.to_string()));
            }
        }
        Ok(Self(source))
    }
}

impl<S: MigrationSource<Pg>> MigrationSource<Pg> for Checked<S> {
    fn migrations(&self) -> diesel::migration::Result<Vec<Box<dyn Migration<Pg>>>> {
        self.0.migrations()
    }
}
