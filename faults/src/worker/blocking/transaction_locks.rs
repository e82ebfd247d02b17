//! Transaction locks: "lock, check, insert", and readers that read twice.

use std::thread;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel_interlock::{Attempt, Error};
use fastrand::Rng;

use super::WorkerThread;
use crate::chance::Chance;
use crate::clock;
use crate::fault::Fault;
use crate::record::Outcome;
use crate::subjects;
use crate::worker::bookings::{self, Highest, highest};
use crate::worker::instructions::inflicts;
use crate::worker::panic_deliberately;

pub(super) fn work(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let number = worker.random.u64(..subjects::BOOKINGS) as i32;
    let lock = subjects::booking_lock(number);
    let timeout = worker.random.millis(0, 500);
    let mut conn = worker.connection()?;
    let form = worker.random.u64(..7);
    if form == 0 {
        return read(worker, number, &mut conn);
    }
    let sent = clock::now();
    let mut faults = PlannedFaults::of(worker);
    let booked = match form {
        1 => Attempt::Acquired(lock.transaction(&mut conn, |conn| faults.book(conn, number))?),
        2 => lock.try_transaction(&mut conn, |conn| faults.book(conn, number))?,
        3 => lock.transaction_timeout(&mut conn, timeout, |conn| faults.book(conn, number))?,
        4 => conn.transaction(|conn| {
            lock.acquire_xact(conn)?;
            faults.book(conn, number).map(Attempt::Acquired)
        })?,
        5 => conn.transaction(|conn| match lock.try_acquire_xact(conn)? {
            Attempt::Acquired(()) => faults.book(conn, number).map(Attempt::Acquired),
            Attempt::Busy => Ok::<_, Error>(Attempt::Busy),
        })?,
        _ => conn.transaction(|conn| match lock.acquire_xact_timeout(conn, timeout)? {
            Attempt::Acquired(()) => faults.book(conn, number).map(Attempt::Acquired),
            // The transaction is usable after a timeout.
            Attempt::Busy => {
                let _: Highest = highest(number).get_result(conn)?;
                Ok::<_, Error>(Attempt::Busy)
            }
        })?,
    };
    let Attempt::Acquired(booked) = booked else {
        return Ok(Outcome::Busy);
    };
    bookings::booked(number, booked, sent);
    Ok(Outcome::Done)
}

/// Reads twice under the shared lock, under which no booking may be made in between.
fn read(
    worker: &mut WorkerThread<'_>,
    number: i32,
    conn: &mut PgConnection,
) -> Result<Outcome, Error> {
    let pause = worker.random.millis(0, 20);
    let lock = subjects::booking_lock(number).shared();
    let (before, after) = lock.transaction(conn, |conn| {
        let before: Highest = highest(number).get_result(conn)?;
        thread::sleep(pause);
        Ok::<_, Error>((before, highest(number).get_result(conn)?))
    })?;
    bookings::require_unchanged(number, &before, &after);
    Ok(Outcome::Done)
}

/// The faults of one booking.
struct PlannedFaults {
    random: Rng,
    panics: bool,
    idles: bool,
}

impl PlannedFaults {
    fn of(worker: &mut WorkerThread<'_>) -> Self {
        let panics = inflicts(Fault::Panic);
        let idles = worker.settings.impatient && inflicts(Fault::IdleInTransactionTimeout);
        Self {
            random: worker.random.fork(),
            panics,
            idles,
        }
    }

    fn book(&mut self, conn: &mut PgConnection, lock: i32) -> Result<i64, Error> {
        let highest: Highest = highest(lock).get_result(conn)?;
        let (from, to) = if self.idles { (400, 600) } else { (0, 15) };
        thread::sleep(self.random.millis(from, to));
        highest.book_next(lock).execute(conn)?;
        if self.panics {
            panic_deliberately();
        }
        Ok(highest.next())
    }
}
