//! The probe for sessions that a pooler shares.

use diesel_interlock::{Result, Sessions, asynchronous};

use super::{PgPool, block_on};

pub(crate) fn probe_sessions(pool: &PgPool) -> Result<Sessions> {
    block_on(asynchronous::probe_sessions(&pool.pool))
}
