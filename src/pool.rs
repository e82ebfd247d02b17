//! The pool that an operation without the suffix `_on` takes.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;

#[cfg(feature = "r2d2")]
use std::time::Duration;

#[cfg(feature = "r2d2")]
use diesel::pg::PgConnection;
#[cfg(feature = "r2d2")]
use diesel::r2d2::{ConnectionManager, Pool, PooledConnection};

#[cfg(feature = "r2d2")]
use crate::error::Result;

/// Diesel's r2d2 pool of PostgreSQL connections.
#[cfg(feature = "r2d2")]
pub type PgPool = Pool<ConnectionManager<PgConnection>>;

/// A connection checked out of a [`PgPool`].
#[cfg(feature = "r2d2")]
pub type PooledPgConnection = PooledConnection<ConnectionManager<PgConnection>>;

#[cfg(feature = "r2d2")]
const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// Takes a connection from the pool. Waits as long as the pool's `connection_timeout` allows, but no longer than `limit`.
#[cfg(feature = "r2d2")]
pub(crate) fn check_out(pool: &PgPool, limit: Option<Duration>) -> Result<PooledPgConnection> {
    let longest = pool.connection_timeout();
    // r2d2 adds the limit to the present time, which would overflow for a very long one.
    let limit = limit.map_or(longest, |limit| limit.min(longest)).min(YEAR);
    Ok(pool.get_timeout(limit)?)
}
