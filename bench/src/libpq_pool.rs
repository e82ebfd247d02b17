//! libpq's connections in an r2d2 pool: what a session lock would cost that knew nothing but its two statements.
//!
//! On several cores a pool is not free: it gives a thread a connection whose server process last ran beside another
//! thread, and waking a process on another core is most of what a round trip over the loopback interface takes.

use std::convert::Infallible;
use std::fmt;

use diesel::r2d2::{ManageConnection, Pool, PooledConnection};

use crate::libpq::{Prepared, Session};
use crate::server::BenchDatabase;
use crate::session_locks::{RELEASE, TAKE};

pub(crate) type LibpqPool = Pool<Manager>;
pub(crate) type PooledSession = PooledConnection<Manager>;

/// Makes connections that have prepared the two statements.
pub(crate) struct Manager {
    url: String,
}

pub(crate) struct Ready {
    session: Session,
    take: Prepared,
    release: Prepared,
}

/// There is none: what goes wrong with libpq here is a panic.
#[derive(Debug)]
pub(crate) struct Never(Infallible);

impl fmt::Display for Never {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {}
    }
}

impl std::error::Error for Never {}

impl ManageConnection for Manager {
    type Connection = Ready;
    type Error = Never;

    fn connect(&self) -> Result<Ready, Never> {
        let mut session = Session::connect(&self.url);
        Ok(Ready {
            take: session.prepare("take", TAKE),
            release: session.prepare("release", RELEASE),
            session,
        })
    }

    fn is_valid(&self, _: &mut Ready) -> Result<(), Never> {
        Ok(())
    }

    fn has_broken(&self, _: &mut Ready) -> bool {
        false
    }
}

impl Ready {
    pub(crate) fn take(&mut self, key: i64) -> bool {
        self.session.run(&self.take, &[key]).is_true(0)
    }

    pub(crate) fn release(&mut self, key: i64) -> bool {
        self.session.run(&self.release, &[key]).is_true(0)
    }
}

pub(crate) fn libpq_pool(database: &BenchDatabase, size: usize) -> LibpqPool {
    let manager = Manager {
        url: database.url().to_owned(),
    };
    Pool::builder()
        .max_size(size as u32)
        .test_on_check_out(false)
        .build(manager)
        .expect("the server accepts connections")
}
