//! Helpers for an application's own tests, on a real server.
//!
//! Each test has its own [`Database`], so tests that run in parallel do not share locks, slots or
//! throttles. Tests need not wait for time to pass: the functions here change rows as if time had
//! passed. All of them take a pool; over deadpool and bb8 they return a future.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use diesel::r2d2::{ConnectionManager, Pool};
//! use diesel_interlock::{PgPool, Throttle, testing};
//!
//! static IMPORT: Throttle = Throttle::named("import", Duration::from_secs(3600));
//!
//! # fn test(maintenance: PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! // A pool of another database of the server, such as `postgres`. The template is migrated once.
//! let database = testing::Database::from_template(&maintenance, "app_template")?;
//! let url = database.url("postgres://localhost/app_template");
//! let pool = Pool::new(ConnectionManager::new(url))?;
//! assert!(IMPORT.attempt(&pool)?.is_granted());
//! testing::make_due(&IMPORT, &pool)?; // as if an hour had passed
//! assert!(IMPORT.attempt(&pool)?.is_granted());
//! # Ok(())
//! # }
//! ```

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::sql_types::{Array, BigInt, Text};

use crate::call::ask;
use crate::error::Result;
use crate::input::interval;
use crate::leader::Leader;
use crate::mode::Mode;
use crate::pool::{Borrowed, Pool, Reply, debug};
use crate::rate_limit::RateLimit;
use crate::schedule::Schedule;
use crate::semaphore::Semaphore;
use crate::session::Session;
use crate::statement::{Bind, Statement};
use crate::throttle::Throttle;

/// The age in seconds at which a database is dropped that a killed test has left behind.
const LEFT_BEHIND: u64 = 3600;

/// A database for one test: a copy of a template, which is dropped together with this value.
///
/// Its fencing tokens are its own once [`install`](crate::migrations::install) was called in it.
///
/// Nobody may be connected to the template while it is copied. Over deadpool and bb8, a task
/// removes the database after the drop. The runtime of `#[tokio::test]` ends with the test, so
/// await [`drain`](crate::drain) after the drop.
///
/// A test whose process was killed, or whose runtime ended too soon, leaves its database behind.
/// Another test drops that database after an hour.
#[must_use = "the database is removed when the value is dropped"]
pub struct Database<P: Pool> {
    name: String,
    pool: P,
    runtime: <P::Mode as Mode>::Runtime,
}

impl<P: Pool> Database<P> {
    /// Copies a template database. The pool must be of another database on the same server, and its
    /// role must be allowed to create databases.
    pub fn from_template<'a>(pool: &'a P, template: &'a str) -> Reply<'a, P, Self> {
        const OLD: &str = "SELECT COALESCE(pg_catalog.array_agg(d.datname::pg_catalog.text), '{}')
            FROM pg_catalog.pg_database AS d
            WHERE substring(d.datname FROM '^interlock_copy_([0-9]{10})_[0-9a-f]{16}$')::bigint < $1
                AND NOT EXISTS (
                    SELECT FROM pg_catalog.pg_stat_activity AS a WHERE a.datid = d.oid)";
        P::Mode::drive(async move {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let now = now.unwrap_or_default().as_secs();
            let database = Self {
                name: format!("interlock_copy_{now:010}_{:016x}", fastrand::u64(..)),
                pool: pool.clone(),
                runtime: P::Mode::runtime()?,
            };
            let mut borrowed = Borrowed::new(pool, None).await?;
            let conn = borrowed.conn();
            let before = now.saturating_sub(LEFT_BEHIND) as i64;
            let old = Statement::<Array<Text>>::new(OLD, [before.into()]);
            let old: Vec<String> = conn.one(&old).await?;
            for name in old {
                // Another test may be dropping it, or be connected by now.
                let _ = conn.batch(&format!("DROP DATABASE IF EXISTS {name}")).await;
            }
            let template = template.replace('"', "\"\"");
            let create = format!("CREATE DATABASE {} TEMPLATE \"{template}\"", database.name);
            conn.batch(&create).await?;
            Ok(database)
        })
    }

    /// Returns the name of the database.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the URL of the database, given the URL of another one on the same server.
    pub fn url(&self, of_another: &str) -> String {
        let (base, parameters) = match of_another.split_once('?') {
            Some((base, parameters)) => (base, format!("?{parameters}")),
            None => (of_another, String::new()),
        };
        let host = base.find("://").map_or(0, |scheme| scheme + 3);
        let end = base[host..]
            .find('/')
            .map_or(base.len(), |path| host + path);
        format!("{}/{}{parameters}", &base[..end], self.name)
    }
}

impl<P: Pool> Drop for Database<P> {
    /// Drops the database, and ends sessions that are still connected to it.
    fn drop(&mut self) {
        let pool = self.pool.clone();
        let remove = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        P::Mode::finish_later(&self.runtime, async move {
            if let Ok(mut borrowed) = Borrowed::new(&pool, None).await {
                let _ = borrowed.conn().batch(&remove).await;
                borrowed.note_reply();
            }
        });
    }
}

debug!(Database | this | name = this.name);

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
