//! Transaction locks: "lock, check, insert", and readers that read twice.

use std::time::Duration;

use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use diesel_interlock::asynchronous::AdvisoryLock;
use diesel_interlock::{Attempt, Error};
use tokio::time::sleep;

use super::WorkerTask;
use crate::chance::Chance;
use crate::clock;
use crate::fault::Fault;
use crate::record::Outcome;
use crate::subjects;
use crate::worker::bookings::{self, Highest, highest};
use crate::worker::instructions::inflicts;
use crate::worker::panic_deliberately;

pub(super) async fn work(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let number = worker.random.u64(..subjects::BOOKINGS) as i32;
    let lock = AdvisoryLock::from(subjects::booking_lock(number));
    let timeout = worker.random.millis(0, 500);
    let mut pooled = worker.connection().await?;
    let conn: &mut AsyncPgConnection = &mut pooled;
    let form = worker.random.u64(..7);
    if form == 0 {
        return read(worker, number, conn).await;
    }
    let sent = clock::now();
    let faults = PlannedFaults::of(worker);
    let book = async |conn: &mut AsyncPgConnection| faults.book(conn, number).await;
    let booked = match form {
        1 => Attempt::Acquired(lock.transaction(conn, book).await?),
        2 => lock.try_transaction(conn, book).await?,
        3 => lock.transaction_timeout(conn, timeout, book).await?,
        4 => {
            let work = async |conn: &mut AsyncPgConnection| {
                lock.acquire_xact(conn).await?;
                faults.book(conn, number).await.map(Attempt::Acquired)
            };
            conn.transaction(work).await?
        }
        5 => {
            let work =
                async |conn: &mut AsyncPgConnection| match lock.try_acquire_xact(conn).await? {
                    Attempt::Acquired(()) => faults.book(conn, number).await.map(Attempt::Acquired),
                    Attempt::Busy => Ok::<_, Error>(Attempt::Busy),
                };
            conn.transaction(work).await?
        }
        _ => {
            let work = async |conn: &mut AsyncPgConnection| {
                match lock.acquire_xact_timeout(conn, timeout).await? {
                    Attempt::Acquired(()) => faults.book(conn, number).await.map(Attempt::Acquired),
                    // The transaction is usable after a timeout.
                    Attempt::Busy => {
                        let _: Highest = highest(number).get_result(conn).await?;
                        Ok::<_, Error>(Attempt::Busy)
                    }
                }
            };
            conn.transaction(work).await?
        }
    };
    let Attempt::Acquired(booked) = booked else {
        return Ok(Outcome::Busy);
    };
    bookings::booked(number, booked, sent);
    Ok(Outcome::Done)
}

/// Reads twice under the shared lock, under which no booking may be made in between.
async fn read(
    worker: &mut WorkerTask,
    number: i32,
    conn: &mut AsyncPgConnection,
) -> Result<Outcome, Error> {
    let pause = worker.random.millis(0, 20);
    let lock = AdvisoryLock::from(subjects::booking_lock(number).shared());
    let work = async |conn: &mut AsyncPgConnection| {
        let before: Highest = highest(number).get_result(conn).await?;
        sleep(pause).await;
        let after: Highest = highest(number).get_result(conn).await?;
        Ok::<_, Error>((before, after))
    };
    let (before, after) = lock.transaction(conn, work).await?;
    bookings::require_unchanged(number, &before, &after);
    Ok(Outcome::Done)
}

/// The faults of one booking.
struct PlannedFaults {
    panics: bool,
    pause: Duration,
}

impl PlannedFaults {
    fn of(worker: &mut WorkerTask) -> Self {
        let idles = worker.settings.impatient && inflicts(Fault::IdleInTransactionTimeout);
        let (from, to) = if idles { (400, 600) } else { (0, 15) };
        Self {
            panics: inflicts(Fault::Panic),
            pause: worker.random.millis(from, to),
        }
    }

    async fn book(&self, conn: &mut AsyncPgConnection, lock: i32) -> Result<i64, Error> {
        let highest: Highest = highest(lock).get_result(conn).await?;
        sleep(self.pause).await;
        highest.book_next(lock).execute(conn).await?;
        if self.panics {
            panic_deliberately();
        }
        Ok(highest.next())
    }
}
