//! Runs an application's own migrations with Diesel, on one instance at a time.
//!
//! **`run_pending` takes a connection instead of a pool, and owns it in the asynchronous half.**
//! Migrations should run over a direct URL, and the pool's URL may lead to a pooler. Dropping an
//! owned connection frees the lock in any case.

use std::collections::HashMap;

use diesel::migration::MigrationSource;
use diesel::pg::Pg;
use diesel::sql_types::Bool;
use diesel_migrations::MigrationHarness;

use crate::advisory::Locks;
#[cfg(feature = "async")]
use crate::advisory::holder::Holder;
use crate::advisory::scope::{self, Waits};
use crate::advisory::sql::Lock;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::key::LockKey;
use crate::sealed::Sealed;
use crate::session::Session;
use crate::statement::Statement;
use crate::transaction::refusal;

/// The name of the lock under which migrations run. It never changes, so that releases exclude each
/// other.
const LOCK: &str = "diesel_interlock migrations";

/// Reads whether Diesel's table is where Diesel would create it: in the first schema of the search
/// path.
const HAS_TABLE: &str = "SELECT pg_catalog.to_regclass(pg_catalog.format(\
     '%I.__diesel_schema_migrations', pg_catalog.current_schema())) IS NOT NULL AS is_there";

/// Reads whether Diesel's table has all these versions.
const HAS_ALL: &str = "SELECT NOT EXISTS (SELECT FROM pg_catalog.unnest($1) AS v \
     WHERE NOT EXISTS (SELECT FROM __diesel_schema_migrations AS m \
     WHERE m.version OPERATOR(pg_catalog.=) v))";

/// The connection on which migrations run: a `&mut PgConnection`, or an `AsyncPgConnection` by
/// value.
#[diagnostic::on_unimplemented(
    message = "migrations do not run on `{Self}`",
    label = "neither a `&mut PgConnection` nor an `AsyncPgConnection`",
    note = "pass a pooled blocking connection as `&mut *conn`, or as `&mut **conn` if `conn` is a \
         reference to it, and an asynchronous connection by value: \
         `AsyncPgConnection::establish(url).await?`"
)]
pub trait Target<M>: Sealed {
    /// What [`run_pending`] returns: the versions that it ran, or a future of them.
    type Reply;

    #[doc(hidden)]
    fn run_pending(self, source: M) -> Self::Reply;
}

#[cfg(feature = "r2d2")]
impl Sealed for &mut diesel::PgConnection {}
#[cfg(feature = "async")]
impl Sealed for diesel_async::AsyncPgConnection {}

/// Runs the pending migrations of an application, only once although many instances start at the
/// same time. Returns the versions that it ran.
///
/// `conn` is a `&mut PgConnection`, or an `AsyncPgConnection` by value, for which a future is
/// returned. Connect directly, not through a pooler in transaction mode, because the lock is a
/// session lock. A transaction lock would not do: migrations without a transaction, such as `CREATE
/// INDEX CONCURRENTLY`, must run under the lock, too.
///
/// Diesel runs the migrations, and records them in its table `__diesel_schema_migrations` in the
/// first schema of the search path. So with a schema per tenant, each tenant has its own table.
///
/// If nothing is pending, there are two round trips and no lock, and the role needs only the right
/// to read that table. Otherwise one instance runs the migrations. The others wait without a
/// timeout, and then find nothing pending. A wait of more than five seconds is logged as a warning,
/// with the pid of the session that holds the lock.
///
/// If the future is dropped, migrations that have begun run to their end, on a thread of tokio's
/// `spawn_blocking`.
///
/// # Errors
///
/// [`Error::ApplicationMigration`] with the database's reason, if a migration failed: those before
/// it stay applied. [`Error::EqualVersions`] before anything is sent; [`Error::InsideTransaction`];
/// [`Error::SessionMoved`] if the connection goes through a pooler in transaction mode; and
/// [`Error::Database`].
///
/// ```
/// use diesel_interlock::migrations;
/// use diesel_migrations::FileBasedMigrations;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # let name = format!("interlock-run-pending-{}", std::process::id());
/// # let directory = std::env::temp_dir().join(name);
/// # std::fs::create_dir_all(directory.join("2026-01-01-000000_users"))?;
/// # let up = directory.join("2026-01-01-000000_users/up.sql");
/// # std::fs::write(up, "CREATE TABLE users (id int)")?;
/// let own = FileBasedMigrations::from_path(&directory)?; // or embed_migrations!()
/// let ran = migrations::run_pending(conn, own)?;
/// # assert_eq!(ran, ["20260101000000"]);
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub fn run_pending<M, T: Target<M>>(conn: T, source: M) -> T::Reply {
    conn.run_pending(source)
}

#[cfg(feature = "r2d2")]
impl<M: MigrationSource<Pg>> Target<M> for &mut diesel::PgConnection {
    type Reply = Result<Vec<String>>;

    fn run_pending(self, source: M) -> Self::Reply {
        use crate::mode::Blocking;
        use crate::session::run_ready;

        if run_ready(is_up_to_date(self, versions(&source)?))? {
            return Ok(Vec::new());
        }
        let (lock, subject) = lock()?;
        let held = run_ready(scope::enter::<Blocking, _>(
            self,
            lock,
            subject,
            Waits::Polling,
        ))?;
        let mut holder = held.of_endless_wait()?;
        let ran = run(holder.conn(), source);
        run_ready(scope::release_after(holder, ran))
    }
}

#[cfg(feature = "async")]
impl<M: MigrationSource<Pg> + Send + 'static> Target<M> for diesel_async::AsyncPgConnection {
    type Reply = crate::mode::Operation<'static, Result<Vec<String>>>;

    fn run_pending(self, source: M) -> Self::Reply {
        use crate::mode::{Async, Mode};
        Async::drive(in_a_task(self, source))
    }
}

/// Runs the migrations on a thread, because Diesel's harness needs a blocking connection without a
/// lifetime. The connection is moved to the thread and back. Wherever it is dropped, its session
/// ends, and that frees the lock.
#[cfg(feature = "async")]
async fn in_a_task<M: MigrationSource<Pg> + Send + 'static>(
    mut conn: diesel_async::AsyncPgConnection,
    source: M,
) -> Result<Vec<String>> {
    use crate::mode::{Async, Mode};
    use diesel_async::async_connection_wrapper::AsyncConnectionWrapper;

    let runtime = Async::runtime()?;
    if is_up_to_date(&mut conn, versions(&source)?).await? {
        return Ok(Vec::new());
    }
    let (lock, subject) = lock()?;
    let held = scope::enter::<Async, _>(&mut conn, lock, subject, Waits::Polling).await?;
    let (_, held) = held.of_endless_wait()?.open();
    let running = runtime.spawn_blocking(move || {
        let mut conn = AsyncConnectionWrapper::<_>::from(conn);
        let ran = run(&mut conn, source);
        (conn.into_inner(), held, ran)
    });
    match running.await {
        Ok((mut conn, held, ran)) => scope::release_after(Holder::of(&mut conn, held), ran).await,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and drops this future, too.
            Err(_) => std::future::pending().await,
        },
    }
}

fn lock() -> Result<(Locks, Subject)> {
    let lock = Lock::new(LockKey::named(LOCK), false)?;
    let subject = Subject {
        primitive: "lock",
        name: LOCK,
    };
    Ok((Locks::from(lock), subject))
}

fn run(
    conn: &mut impl MigrationHarness<Pg>,
    source: impl MigrationSource<Pg>,
) -> Result<Vec<String>> {
    let ran = conn.run_pending_migrations(source);
    let ran = ran.map_err(Error::ApplicationMigration)?;
    Ok(ran.iter().map(ToString::to_string).collect())
}

/// Whether nothing is pending. Diesel's own check first sends `CREATE TABLE IF NOT EXISTS`, which
/// PostgreSQL refuses to a role that may not create tables, even if the table exists.
async fn is_up_to_date<S: Session>(session: &mut S, versions: Vec<String>) -> Result<bool> {
    let before = session.transaction();
    if !before.is_none() {
        return Err(refusal(before));
    }
    let has_table = session.one(&Statement::<Bool>::new(HAS_TABLE, []));
    if !has_table.await? {
        return Ok(false);
    }
    let has_all = Statement::<Bool>::new(HAS_ALL, [versions.into()]);
    Ok(session.one(&has_all).await?)
}

/// Returns the versions of all migrations, or an error if two have the same one: Diesel would keep
/// one of them and never run the other.
fn versions(source: &impl MigrationSource<Pg>) -> Result<Vec<String>> {
    let mut names = HashMap::new();
    for migration in source.migrations().map_err(Error::ApplicationMigration)? {
        let (name, version) = (
            migration.name().to_string(),
            migration.name().version().to_string(),
        );
        if let Some(other) = names.insert(version, name.clone()) {
            let (first, second) = if other < name {
                (other, name)
            } else {
                (name, other)
            };
            return Err(Error::EqualVersions(first, second));
        }
    }
    Ok(names.into_keys().collect())
}
