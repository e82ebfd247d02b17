//! The pool that the plain form of every operation takes.

use std::time::Duration;

use diesel::pg::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool, PooledConnection};

use crate::error::Result;

/// Diesel's r2d2 pool of PostgreSQL connections.
pub type PgPool = Pool<ConnectionManager<PgConnection>>;

/// A connection checked out of a [`PgPool`].
pub type PooledPgConnection = PooledConnection<ConnectionManager<PgConnection>>;

/// Takes a connection out of the pool, waiting for it as long as the pool is set to wait, but no
/// longer than `limit`.
pub(crate) fn check_out(pool: &PgPool, limit: Option<Duration>) -> Result<PooledPgConnection> {
    let patience = pool.connection_timeout();
    // r2d2 adds the limit to the present time, which overflows on an absurd one.
    let limit = limit.map_or(patience, |limit| limit.min(patience));
    Ok(pool.get_timeout(limit)?)
}
