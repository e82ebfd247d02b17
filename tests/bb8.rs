//! What the crate promises, over bb8, where bb8 differs from deadpool.
//!
//! Both pools contain the same connection, so `src/` reaches a difference only through
//! `src/pool/bb8.rs`: the check-out and what its dropped future leaves, `idle` and `can_spare` (bb8
//! tells how many connections are idle, not how many it may open), and `discard`. bb8 also closes a
//! broken connection as soon as it comes back, where deadpool does that at the next check-out, and
//! it serves a caller that returns at once before those that wait
//! (<https://github.com/djc/bb8/issues/243>).
//!
//! The differences, and the modules that can notice them:
//! - who waits on the server, and who polls: `waiting`, `queues`, `semaphore_waiting`
//! - which connections come back, and which are discarded: `session_locks`, `ways_out`, `scopes`,
//!   `transaction_locks`, `begun`
//! - releases and renewals over a pool that is empty or never idle: `permits`, `kept_permits`,
//!   `draining`
//! - connections that are cut or silent under an operation: `lost_replies`, `silence`
//! - check-outs and operations whose futures are dropped: `cancelled`, `drops`, `filling`,
//!   `asynchronous::waiting`, `rate_limits`, `throttles`
//! - types of the pool in handles and futures: `auto_traits`
//!
//! The other modules of `suite` and `asynchronous` do not depend on the pool, and run over deadpool
//! only.

#[path = "half/asynchronous.rs"]
#[macro_use]
mod half;
#[path = "half/bb8.rs"]
mod over;
mod support;

mod asynchronous {
    mod auto_traits;
    mod cancelled;
    mod drops;
    mod filling;
    mod rate_limits;
    mod silence;
    mod throttles;
    mod waiting;
}

mod suite {
    #![allow(clippy::unit_arg)] // as in `suite/mod.rs`

    mod auto_traits;
    mod begun;
    mod draining;
    mod kept_permits;
    mod lost_replies;
    mod permits;
    mod queues;
    mod returned;
    mod scopes;
    mod semaphore_waiting;
    mod session_locks;
    mod transaction_locks;
    mod waiting;
    mod ways_out;
}

/// The pool under test.
mod pool {
    use diesel_async::AsyncPgConnection;
    use diesel_async::pooled_connection::AsyncDieselConnectionManager;
    pub(crate) use diesel_interlock::bb8::*;

    pub(crate) use crate::over::*;

    /// Whether the manager notices that a connection is marked as broken.
    pub(crate) const NOTICES_BROKEN: bool = true;

    pub(crate) fn manager(url: &str) -> AsyncDieselConnectionManager<AsyncPgConnection> {
        AsyncDieselConnectionManager::new(url)
    }

    /// A pool that does not check its connections.
    pub(crate) fn unchecked(database: &workbench::Endpoint, size: u32) -> PgPool {
        database.bb8(size)
    }
}
