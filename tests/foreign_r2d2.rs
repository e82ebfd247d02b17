//! What the crate promises, over r2d2 with a manager of the application's own, which never notices
//! that a connection is marked as broken: every operation that takes the pool, and every way out.
//!
//! What the forms with a connection (`scopes`, `transaction_locks`, `once`) and Diesel mark as
//! broken, a pool of the application's own must notice; where it does not, they are tried on a new
//! connection.

#[path = "half/blocking.rs"]
#[macro_use]
mod half;
#[path = "foreign/handles.rs"]
#[macro_use]
mod handles;
mod support;

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
    use diesel::PgConnection;
    use diesel::connection::{Connection, SimpleConnection};
    use diesel::r2d2::{Error, ManageConnection, Pool};

    handles!(Pool<Manager>);

    /// Whether the manager notices that a connection is marked as broken.
    pub(crate) const NOTICES_BROKEN: bool = false;

    #[derive(Debug)]
    pub(crate) struct Manager(String);

    pub(crate) fn manager(url: &str) -> Manager {
        Manager(url.into())
    }

    impl ManageConnection for Manager {
        type Connection = PgConnection;
        type Error = Error;

        fn connect(&self) -> Result<PgConnection, Error> {
            PgConnection::establish(&self.0).map_err(Error::ConnectionError)
        }

        fn is_valid(&self, conn: &mut PgConnection) -> Result<(), Error> {
            conn.batch_execute("SELECT 1").map_err(Error::QueryError)
        }

        fn has_broken(&self, _: &mut PgConnection) -> bool {
            NOTICES_BROKEN
        }
    }
}
