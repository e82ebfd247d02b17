//! What the crate offers to its users' tests.

use diesel_interlock::asynchronous;
use diesel_interlock::monitor::{Holder, ServiceRequest};
pub(crate) use diesel_interlock::testing::*;
use diesel_interlock::{Result, ThrottledResource};

use super::{AdvisoryLock, PgConnection, RateLimit, Semaphore, Throttle, block_on};

pub(crate) fn make_due<R: ThrottledResource + Sync>(
    conn: &mut PgConnection,
    throttle: &Throttle<R>,
) -> Result<()> {
    block_on(asynchronous::testing::make_due(&mut conn.0, &throttle.0))
}

pub(crate) fn expire(conn: &mut PgConnection, semaphore: &Semaphore) -> Result<usize> {
    block_on(asynchronous::testing::expire(&mut conn.0, &semaphore.0))
}

pub(crate) fn use_up(conn: &mut PgConnection, limit: &RateLimit) -> Result<()> {
    block_on(asynchronous::testing::use_up(&mut conn.0, &limit.0))
}

pub(crate) fn held_locks(conn: &mut PgConnection) -> Result<Vec<Holder>> {
    block_on(asynchronous::testing::held_locks(&mut conn.0))
}

pub(crate) fn requests_in_flight(conn: &mut PgConnection) -> Result<Vec<ServiceRequest>> {
    block_on(asynchronous::testing::requests_in_flight(&mut conn.0))
}

#[track_caller]
pub(crate) fn assert_nothing_held(conn: &mut PgConnection) {
    block_on(asynchronous::testing::assert_nothing_held(&mut conn.0));
}

#[track_caller]
pub(crate) fn assert_not_held(conn: &mut PgConnection, lock: &AdvisoryLock) {
    let lock = lock.handle();
    block_on(asynchronous::testing::assert_not_held(&mut conn.0, &lock));
}

#[track_caller]
pub(crate) fn assert_none_in_flight(conn: &mut PgConnection, semaphore: &Semaphore) {
    block_on(asynchronous::testing::assert_none_in_flight(
        &mut conn.0,
        &semaphore.0,
    ));
}
