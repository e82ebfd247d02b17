//! What the crate promises, over deadpool with a manager of the application's own, which never
//! notices that a connection is marked as broken: every operation that takes the pool, and every
//! way out.
//!
//! The forms with a connection (`scopes`, `transaction_locks`, `once`) take whatever dereferences
//! to one. What they and Diesel mark as broken, a pool of the application's own must notice.

#[path = "half/asynchronous.rs"]
#[macro_use]
mod half;
#[path = "foreign/handles.rs"]
#[macro_use]
mod handles;
#[path = "half/deadpool.rs"]
mod over;
mod support;

mod asynchronous {
    mod drops;
    mod filling;
    mod leaders;
    mod rate_limits;
    mod runtimes;
    mod schedules;
    mod silence;
    mod throttles;
}

mod suite {
    #![allow(clippy::unit_arg)] // as in `suite/mod.rs`

    mod begun;
    mod draining;
    mod fences;
    mod installing;
    mod kept_permits;
    mod leaders;
    mod local_rate_limits;
    mod once;
    mod permits;
    mod rate_limits;
    mod returned;
    mod schedules;
    mod scopes;
    mod semaphores;
    mod session_locks;
    mod several_locks;
    mod testing_helpers;
    mod throttled_resources;
    mod throttles;
    mod transaction_locks;
    mod waiting;
    mod ways_out;
}

/// The pool under test.
mod pool {
    use deadpool::managed::{Manager as Manage, Metrics, Pool, RecycleError, RecycleResult};
    use diesel::ConnectionError;
    use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};

    pub(crate) use diesel_interlock::deadpool::drain;

    pub(crate) use crate::over::*;

    handles!(Pool<Manager>);

    /// Whether the manager notices that a connection is marked as broken.
    pub(crate) const NOTICES_BROKEN: bool = false;

    #[derive(Debug)]
    pub(crate) struct Manager(String);

    pub(crate) fn manager(url: &str) -> Manager {
        Manager(url.into())
    }

    /// A pool that checks its connections, because nothing else notices that they are broken.
    pub(crate) fn unchecked(database: &workbench::Endpoint, size: u32) -> PgPool {
        let pool = Pool::builder(manager(&database.url())).max_size(size as usize);
        pool.build().expect("the settings of the pool are complete")
    }

    impl Manage for Manager {
        type Type = AsyncPgConnection;
        type Error = ConnectionError;

        async fn create(&self) -> Result<AsyncPgConnection, ConnectionError> {
            // In a box, because some tests wait on threads with a small stack.
            Box::pin(AsyncPgConnection::establish(&self.0)).await
        }

        async fn recycle(
            &self,
            conn: &mut AsyncPgConnection,
            _: &Metrics,
        ) -> RecycleResult<ConnectionError> {
            let checked = conn.batch_execute("SELECT 1").await;
            checked.map_err(|error| RecycleError::message(error.to_string()))
        }
    }
}
