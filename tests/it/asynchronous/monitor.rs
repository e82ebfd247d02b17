//! The functions of `monitor` that send a statement. Its queries are the same in both halves.

pub(crate) use diesel_interlock::monitor::*;
use diesel_interlock::{LockKey, Result, asynchronous};

use super::{PgConnection, block_on};

pub(crate) fn holders_of(conn: &mut PgConnection, wanted: &LockKey) -> Result<Vec<Holder>> {
    block_on(asynchronous::monitor::holders_of(&mut conn.0, wanted))
}

pub(crate) fn waiters_of(conn: &mut PgConnection, wanted: &LockKey) -> Result<Vec<Waiter>> {
    block_on(asynchronous::monitor::waiters_of(&mut conn.0, wanted))
}

pub(crate) fn slots(conn: &mut PgConnection, service: &str, slots: u32) -> Result<Slots> {
    block_on(asynchronous::monitor::slots(&mut conn.0, service, slots))
}
