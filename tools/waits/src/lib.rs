//! A model of queues, alarms, leases and local rate limits. It compiles their sources in `diesel_interlock` unchanged,
//! over a clock that stands still while a task works (`clock.rs`), and over locks whose order shuttle
//! chooses (`sync.rs`). The rest of the crate and the server are stand-ins.
//!
//! `scripts/check model` runs thousands of random and PCT schedules of each scenario, from the same
//! seed each time; `SEED=7 SCHEDULES=100000 scripts/check model locks` runs others. `scripts/check
//! mutations` inserts known bugs into the sources, and checks that a scenario fails for each.
//!
//! The scenarios check:
//!
//! - No task sleeps for ever, and none leaves its place in a queue behind.
//! - While tasks wait for a lock and a connection can be spared, one of them waits on the server; if
//!   all poll, one tries every eighth of a second. A release in this process is followed by a try at
//!   once, and the waiter that becomes the oldest acts at once.
//! - Other processes get a share of slots that this process keeps releasing and taking, and a waiter
//!   without time to yield tries at once. Units are tried for when they are refilled.
//! - A holder's trust in a lease ends before the database lets another in, and never returns; a loss
//!   wakes its waiters.
//! - Units that memory grants were taken from the row, by one caller of a key at a time. All of a
//!   chunk is granted, though futures are dropped at any poll, but for a unit for each of them.
#![cfg(test)]
#![allow(dead_code, missing_docs, unreachable_pub)] // of the sources, not all is used here

extern crate self as diesel; // lease.rs uses one type of Diesel's

mod chunks;
mod clock;
mod leases;

mod locks;
mod slots;

mod stand_ins;
mod sync;
mod units;

mod watch;

#[path = "../../../src"]
mod sources {
    pub(crate) mod alarm;
    pub(crate) mod lease;
    pub(crate) mod rate_limit {
        pub(crate) mod local;

        use crate::chunks::rate_limit as check;
        use crate::chunks::rate_limit::{Quota, RateLimit};
    }
    pub(crate) mod waiting;
}

use sources::{alarm, lease, waiting};
use stand_ins::{
    call, error, event, input, key, long_wait, metrics, mode, pool, sql_types, statement,
};
