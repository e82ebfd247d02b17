//! The pool that an operation without the suffix `_on` takes.

use std::time::Duration;

use diesel::pg::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool, PooledConnection};

use crate::error::Result;

/// Diesel's r2d2 pool of PostgreSQL connections.
pub type PgPool = Pool<ConnectionManager<PgConnection>>;

/// A connection checked out of a [`PgPool`].
pub type PooledPgConnection = PooledConnection<ConnectionManager<PgConnection>>;

/// Takes a connection from the pool. Waits as long as the pool's `connection_timeout` allows, but no longer than `limit`.
pub(crate) fn check_out(pool: &PgPool, limit: Option<Duration>) -> Result<PooledPgConnection> {
    let longest = pool.connection_timeout();
    // r2d2 adds the limit to the present time, which would overflow for a very long one.
    let limit = limit.map_or(longest, |limit| limit.min(longest));
    Ok(pool.get_timeout(limit)?)
}
