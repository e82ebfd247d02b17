//! A model of what waits: the sources of `diesel_interlock` that queues, alarms and leases consist
//! of, unchanged, over a clock that stands still while somebody works (`clock.rs`) and over locks
//! whose order shuttle chooses (`sync.rs`). The rest of the crate and the server are stand-ins.
//!
//! `scripts/check model` runs thousands of random and PCT schedules of each scenario, from the same
//! seed each time; `SEED=7 SCHEDULES=100000 scripts/check model locks` runs others. `scripts/check
//! mutations` breaks the sources in known ways, and checks that a scenario fails for each.
//!
//! What each scenario states:
//!
//! - Nobody sleeps for ever, and nobody leaves a place in a queue behind.
//! - While somebody waits for a lock and a connection can be spared, one of this process is on the
//!   server; where all poll, one tries every eighth of a second. What was released here is tried
//!   for at once, and who moves up to be the oldest acts at once.
//! - Slots that a process lives on reach others in time, and who has no time to leave them to
//!   others asks at once. Units are tried for when they are refilled.
//! - A holder's trust in a lease ends before the database lets another in, and never comes back; a
//!   loss wakes who waits for it.
//! - What memory allows was taken from the row.
#![cfg(test)]
#![allow(dead_code, missing_docs, unreachable_pub)] // of the sources, not all is used here

extern crate self as diesel; // lease.rs uses one type of Diesel's

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
    pub(crate) mod waiting;
}

use sources::{alarm, lease, waiting};
use stand_ins::{call, error, event, key, metrics, mode, pool, sql_types, statement};
