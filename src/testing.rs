//! Helpers for an application's own tests, on a real server.
//!
//! Each test has its own [`Database`], so tests that run in parallel, on threads or in processes,
//! do not share locks, slots or throttles. Tests need not wait for time to pass: the functions here
//! change rows as if time had passed. They take a pool; over deadpool and bb8 they return a future.
//!
//! ```
//! use std::time::Duration;
//!
//! use diesel::r2d2::{ConnectionManager, Pool};
//! use diesel_interlock::{PgPool, Throttle, migrations, testing};
//!
//! static IMPORT: Throttle = Throttle::named("import", Duration::from_secs(3600));
//!
//! # let server = workbench::Database::new();
//! # let (maintenance, url) = (server.pool(1), |name: &str| server.url_with("dbname", name));
//! // `maintenance` is a pool on the database `postgres`, and `url(name)` the URL of a database.
//! let database = testing::Database::<PgPool>::from_template(&maintenance, "app_template", |name| {
//!     let manager = ConnectionManager::new(url(name));
//!     let pool: PgPool = Pool::builder().max_size(2).build(manager)?;
//!     migrations::install(&pool)?; // and your own migrations
//!     Ok::<_, Box<dyn std::error::Error>>(pool)
//! })?;
//! let pool = database.pool();
//! assert!(IMPORT.attempt(pool)?.is_granted());
//! testing::make_due(&IMPORT, pool)?; // as if an hour had passed
//! assert!(IMPORT.attempt(pool)?.is_granted());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text};

use crate::advisory::AdvisoryLock;
use crate::call::ask;
use crate::error::{Error, Result};
use crate::input::interval;
use crate::leader::Leader;
use crate::mode::{self, Mode};
use crate::pool::{Checkout, Pool, Reply, impl_debug};
use crate::rate_limit::RateLimit;
use crate::schedule::Schedule;
use crate::semaphore::Semaphore;
use crate::session::Session;
#[cfg(feature = "r2d2")]
use crate::session::run_ready;
use crate::statement::{Bind, Statement};
use crate::throttle::Throttle;

/// The age in seconds at which a database is dropped that a killed test has left behind.
const LEFT_BEHIND: u64 = 3600;

/// How long the connections to a template may take to close.
const CLOSING: Duration = Duration::from_secs(60);

/// PostgreSQL cuts longer names of databases off, so a template would not be found.
const LONGEST_NAME: usize = 63;

/// A database for one test, with a pool: a copy of a template, which is dropped together with this
/// value.
///
/// `from_template(maintenance, template, open)` makes it. `open` is given the name of a database,
/// connects a pool to it, and runs the migrations that are pending there. It is called twice: for
/// the template, which is created first if it does not exist, and for the copy. All of this but the
/// second call is done under a session lock on `maintenance`, so tests may run on threads and in
/// processes, of one program or of several. Each test calls `open` for the template again, so the
/// template stays up to date, and a killed process leaves nothing that the next one does not
/// finish. PostgreSQL copies a database only while nobody is connected to it, so `open` must keep
/// no connection to the template but those of its pool, which is dropped.
///
/// Fencing tokens of the copy are its own: larger than those of the template.
///
/// `maintenance` is a pool on another database of the server, the same one for all tests, such as
/// `postgres`. Its role must be allowed to create databases, and must own the template.
///
/// The template stays for the next run of the tests. Drop it after you have changed a migration
/// that it has run already.
///
/// Over deadpool and bb8, a task removes the database after the drop. The runtime of
/// `#[tokio::test]` ends with the test, so await [`drain`](crate::drain) after the drop. A test
/// whose process was killed, or whose runtime ended too soon, leaves its database behind. Another
/// test drops that database after an hour.
#[must_use = "the database is removed when the value is dropped"]
pub struct Database<P: Pool> {
    pool: P,
    copy: Copy<P>,
}

impl<P: Pool> Database<P> {
    /// Returns the pool that `open` has connected to the database.
    pub const fn pool(&self) -> &P {
        &self.pool
    }

    /// Returns the name of the database.
    pub fn name(&self) -> &str {
        &self.copy.name
    }
}

#[cfg(feature = "r2d2")]
impl<M> Database<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Copies a template, which `open` brings up to date first.
    pub fn from_template<E: From<Error>>(
        maintenance: &diesel::r2d2::Pool<M>,
        template: &str,
        mut open: impl FnMut(&str) -> Result<diesel::r2d2::Pool<M>, E>,
    ) -> Result<Self, E> {
        let copy = Copy::new(maintenance)?;
        let lock: AdvisoryLock<diesel::r2d2::Pool<M>> = lock_of(template)?;
        lock.with(maintenance, |conn| {
            run_ready(create_template(conn, template))?;
            drop(open(template)?);
            Ok::<_, E>(run_ready(copy.create(conn, template))?)
        })?;
        let pool = open(&copy.name)?;
        run_ready(take_own_tokens(&pool))?;
        Ok(Self { pool, copy })
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = mode::Async>> Database<P> {
    /// Copies a template, which `open` brings up to date first.
    pub async fn from_template<E: From<Error>>(
        maintenance: &P,
        template: &str,
        mut open: impl AsyncFnMut(&str) -> Result<P, E>,
    ) -> Result<Self, E> {
        let copy = Copy::new(maintenance)?;
        let copying = async |conn: &mut diesel_async::AsyncPgConnection| {
            create_template(conn, template).await?;
            drop(open(template).await?);
            Ok::<_, E>(copy.create(conn, template).await?)
        };
        let lock: AdvisoryLock<P> = lock_of(template)?;
        lock.with(maintenance, copying).await?;
        let pool = open(&copy.name).await?;
        take_own_tokens(&pool).await?;
        Ok(Self { pool, copy })
    }
}

impl_debug!(Database | this | name = this.name());

/// The lock under which a template is changed and copied.
fn lock_of<P: Pool>(template: &str) -> Result<AdvisoryLock<P>> {
    crate::input::name(template)?;
    if template.len() > LONGEST_NAME {
        return Err(Error::input(
            "the name of a template must not be longer than 63 bytes",
        ));
    }
    Ok(AdvisoryLock::named("diesel_interlock testing").key(template))
}

async fn create_template<S: Session>(conn: &mut S, template: &str) -> Result<()> {
    const LOOK: &str = "SELECT pg_catalog.current_database() = $1, EXISTS (
        SELECT FROM pg_catalog.pg_database AS d WHERE d.datname = $1)";
    let look = Statement::<(Bool, Bool)>::new(LOOK, [template.into()]);
    let (is_here, exists): (bool, bool) = conn.one(&look).await?;
    if is_here {
        return Err(Error::input(
            "`maintenance` must be a pool on another database than the template, as `postgres` is",
        ));
    }
    if !exists {
        let create = format!("CREATE DATABASE {}", quoted(template));
        conn.batch(&create).await?;
    }
    Ok(())
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Lets the fencing tokens of a copy continue above those of its template.
async fn take_own_tokens<P: Pool>(pool: &P) -> Result<()> {
    const IS_INSTALLED: &str = "SELECT pg_catalog.to_regprocedure(
        'resource_control.set_token_base(pg_catalog.bool)') IS NOT NULL";
    /// Null unless the role may not do that.
    const SET_BASE: &str = "SELECT CASE WHEN resource_control.set_token_base() IS NULL THEN (
        SELECT pg_catalog.pg_get_userbyid(n.nspowner)::pg_catalog.text
        FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'resource_control') END";
    let is_installed = Statement::<Bool>::new(IS_INSTALLED, []);
    let (is_installed, _): (bool, _) = ask(pool, None, &is_installed).await?;
    if !is_installed {
        return Ok(());
    }
    let owner = Statement::<Nullable<Text>>::new(SET_BASE, []);
    let (owner, _): (Option<String>, _) = ask(pool, None, &owner).await?;
    owner.map_or(Ok(()), |owner| Err(Error::CopiedSchema { owner }))
}

/// A copy of a template, from before it is made until it is dropped.
struct Copy<P: Pool> {
    name: String,
    maintenance: P,
    runtime: <P::Mode as Mode>::Runtime,
}

impl<P: Pool> Copy<P> {
    fn new(maintenance: &P) -> Result<Self> {
        Ok(Self {
            name: format!(
                "interlock_copy_{:010}_{:016x}",
                unix_time(),
                fastrand::u64(..)
            ),
            maintenance: maintenance.clone(),
            runtime: P::Mode::runtime()?,
        })
    }

    /// Makes the copy, and drops what killed tests have left behind.
    async fn create<S: Session>(&self, conn: &mut S, template: &str) -> Result<()> {
        const OLD: &str = "SELECT COALESCE(pg_catalog.array_agg(d.datname::pg_catalog.text), '{}')
            FROM pg_catalog.pg_database AS d
            WHERE substring(d.datname FROM '^interlock_copy_([0-9]{10})_[0-9a-f]{16}$')::bigint < $1
                AND NOT EXISTS (
                    SELECT FROM pg_catalog.pg_stat_activity AS a WHERE a.datid = d.oid)";
        const IS_IN_USE: &str = "SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity AS a
            WHERE a.datname = $1 AND a.backend_type = 'client backend')";
        let before = unix_time().saturating_sub(LEFT_BEHIND) as i64;
        let old = Statement::<Array<Text>>::new(OLD, [before.into()]);
        let old: Vec<String> = conn.one(&old).await?;
        for name in old {
            // Another test may be dropping it, or be connected by now.
            let _ = conn.batch(&format!("DROP DATABASE IF EXISTS {name}")).await;
        }
        // The connections of the pool that `open` has made are being closed. PostgreSQL itself
        // waits for five seconds only, and then says who is connected.
        let is_in_use = Statement::<Bool>::new(IS_IN_USE, [template.into()]);
        let deadline = Instant::now() + CLOSING;
        while conn.one(&is_in_use).await? && Instant::now() < deadline {
            mode::pause::<P::Mode>(Duration::from_millis(10)).await;
        }
        let create = format!(
            "CREATE DATABASE {} TEMPLATE {}",
            self.name,
            quoted(template)
        );
        Ok(conn.batch(&create).await?)
    }
}

impl<P: Pool> Drop for Copy<P> {
    /// Drops the database, and ends sessions that are still connected to it.
    fn drop(&mut self) {
        let pool = self.maintenance.clone();
        let remove = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        P::Mode::finish_later(&self.runtime, async move {
            if let Ok(mut checkout) = Checkout::new(&pool, None).await {
                let _ = checkout.conn().batch(&remove).await;
                checkout.give_back();
            }
        });
    }
}

/// The time in seconds since 1970, by the clock of the process.
fn unix_time() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// Changes rows, and returns how many.
async fn change<P: Pool>(
    pool: &P,
    sql: &'static str,
    binds: impl IntoIterator<Item = Bind>,
) -> Result<u64> {
    let (count, _): (i64, _) = ask(pool, None, &Statement::<BigInt>::new(sql, binds)).await?;
    Ok(count.unsigned_abs())
}

/// Makes a throttle due, as if it had never been granted.
pub fn make_due<'a, P: Pool>(throttle: &'a Throttle<P>, pool: &'a P) -> Reply<'a, P, ()> {
    const KEY: &str = "WITH done AS (
            UPDATE resource_control.throttle SET last_granted = '-infinity', details = ''
            WHERE name = $1 AND key = $2 AND is_resource = ($3 = 1) RETURNING 1
        ) SELECT pg_catalog.count(*) FROM done";
    const RESOURCE: &str = "WITH done AS (
            UPDATE resource_control.throttled_resource
            SET last_locked = '-infinity', last_locker_details = ''
            WHERE resource_id::pg_catalog.text = $1 RETURNING 1
        ) SELECT pg_catalog.count(*) FROM done";
    P::Mode::drive(async move {
        let (name, key, is_resource) = throttle.row();
        if is_resource && key.is_empty() {
            change(pool, RESOURCE, [name.into()]).await?;
        } else {
            let binds = [name.into(), key.into(), i32::from(is_resource).into()];
            change(pool, KEY, binds).await?;
        }
        Ok(())
    })
}

/// Lets all requests in flight of a semaphore expire, as if their holders had crashed. Returns how
/// many. A permit that renews itself is then lost.
pub fn expire<'a, P: Pool>(semaphore: &'a Semaphore<P>, pool: &'a P) -> Reply<'a, P, u64> {
    P::Mode::drive(expire_all(pool, semaphore))
}

async fn expire_all<P: Pool>(pool: &P, semaphore: &Semaphore<P>) -> Result<u64> {
    const EXPIRE: &str = "WITH done AS (
            UPDATE resource_control.service_request SET expires_at = pg_catalog.clock_timestamp()
            WHERE service::pg_catalog.text = $1
                AND completed_at IS NULL AND timed_out_at IS NULL
                AND expires_at::pg_catalog.timestamptz > pg_catalog.clock_timestamp() RETURNING 1
        ) SELECT pg_catalog.count(*) FROM done";
    change(pool, EXPIRE, [Bind::from(&*semaphore.service()?)]).await
}

/// Spends all units that a key of a rate limit has left.
pub fn use_up<'a, P: Pool>(limit: &'a RateLimit<P>, pool: &'a P) -> Reply<'a, P, ()> {
    P::Mode::drive(limit.use_up(pool))
}

/// Ends the term of the present leader, as if it had crashed long ago. Returns whether there was
/// one.
pub fn depose<'a, P: Pool>(leader: &'a Leader<P>, pool: &'a P) -> Reply<'a, P, bool> {
    P::Mode::drive(async move { Ok(expire_all(pool, &leader.semaphore()).await? > 0) })
}

/// Makes the next tick of a schedule due, as if the time `by` had passed: moves the next tick, and
/// the last one, into the past by `by`. Choose whole periods of the schedule, so that
/// the moved time is a tick, too. Returns whether the schedule is known, because it was looked at
/// before.
pub fn make_tick_due<'a, P: Pool>(
    schedule: &'a Schedule<P>,
    pool: &'a P,
    by: Duration,
) -> Reply<'a, P, bool> {
    const DUE: &str = "WITH done AS (
            UPDATE resource_control.schedule
            SET counted_from = counted_from - $1, next_at = next_at - $1, tick = tick - $1
            WHERE name = $2 RETURNING 1
        ) SELECT pg_catalog.count(*) FROM done";
    P::Mode::drive(async move {
        let name = schedule.checked_name()?;
        Ok(change(pool, DUE, [interval(by).into(), name.into()]).await? > 0)
    })
}
