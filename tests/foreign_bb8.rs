//! What the crate promises, over bb8 with a manager of the application's own, which never notices
//! that a connection is marked as broken: every operation that takes the pool, and every way out.
//!
//! The forms with a connection (`scopes`, `transaction_locks`, `once`) take whatever dereferences
//! to one. What they and Diesel mark as broken, a pool of the application's own must notice.
//! `silence` and `cancelled` are about servers that do not reply, where nothing but the manager can
//! close the connection.

#[path = "half/asynchronous.rs"]
#[macro_use]
mod half;
#[path = "foreign/handles.rs"]
#[macro_use]
mod handles;
#[path = "half/bb8.rs"]
mod over;
mod support;

mod asynchronous {
    mod drops;
    mod filling;
    mod leaders;
    mod rate_limits;
    mod schedules;
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
    use bb8::{ManageConnection, Pool};
    use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};

    pub(crate) use diesel_interlock::bb8::drain;

    pub(crate) use crate::over::*;

    type Cause = Box<dyn std::error::Error + Send + Sync>;

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
        let pool = Pool::builder().max_size(size);
        pool.build_unchecked(manager(&database.url()))
    }

    impl ManageConnection for Manager {
        type Connection = AsyncPgConnection;
        type Error = Cause;

        async fn connect(&self) -> Result<AsyncPgConnection, Cause> {
            Ok(AsyncPgConnection::establish(&self.0).await?)
        }

        async fn is_valid(&self, conn: &mut AsyncPgConnection) -> Result<(), Cause> {
            Ok(conn.batch_execute("SELECT 1").await?)
        }

        fn has_broken(&self, _: &mut AsyncPgConnection) -> bool {
            NOTICES_BROKEN
        }
    }
}
