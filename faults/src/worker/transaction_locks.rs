//! Transaction locks: "lock, check, insert", and readers that read twice.

use std::thread;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Integer};
use diesel_interlock::{Attempt, Error};
use fastrand::Rng;

use super::report::report;
use super::{Hand, panic_deliberately};
use crate::chance::Chance;
use crate::clock;
use crate::fault::Fault;
use crate::record::{Outcome, Record};
use crate::subjects;

#[derive(QueryableByName)]
struct Highest {
    #[diesel(sql_type = BigInt)]
    number: i64,
    #[diesel(sql_type = BigInt)]
    at: i64,
}

pub(super) fn work(hand: &mut Hand<'_>) -> Result<Outcome, Error> {
    let number = hand.random.u64(..subjects::BOOKINGS) as i32;
    let lock = subjects::booking_lock(number);
    let timeout = hand.random.millis(0, 500);
    let mut conn = hand.connection()?;
    let form = hand.random.u64(..7);
    if form == 0 {
        return read(hand, number, &mut conn);
    }
    let sent = clock::now();
    let mut misfortune = Misfortune::of(hand);
    let booked = match form {
        1 => Attempt::Acquired(lock.transaction(&mut conn, |conn| misfortune.book(conn, number))?),
        2 => lock.try_transaction(&mut conn, |conn| misfortune.book(conn, number))?,
        3 => lock.transaction_timeout(&mut conn, timeout, |conn| misfortune.book(conn, number))?,
        4 => conn.transaction(|conn| {
            lock.acquire_xact(conn)?;
            misfortune.book(conn, number).map(Attempt::Acquired)
        })?,
        5 => conn.transaction(|conn| match lock.try_acquire_xact(conn)? {
            Attempt::Acquired(()) => misfortune.book(conn, number).map(Attempt::Acquired),
            Attempt::Busy => Ok::<_, Error>(Attempt::Busy),
        })?,
        _ => conn.transaction(|conn| match lock.acquire_xact_timeout(conn, timeout)? {
            Attempt::Acquired(()) => misfortune.book(conn, number).map(Attempt::Acquired),
            // The transaction is usable after a timeout.
            Attempt::Busy => {
                highest(conn, number)?;
                Ok::<_, Error>(Attempt::Busy)
            }
        })?,
    };
    let Attempt::Acquired(booked) = booked else {
        return Ok(Outcome::Busy);
    };
    report(&Record::Booked {
        lock: number,
        number: booked,
        sent,
    });
    Ok(Outcome::Done)
}

/// Reads twice under the shared lock, under which no booking may be made in between.
fn read(hand: &mut Hand<'_>, number: i32, conn: &mut PgConnection) -> Result<Outcome, Error> {
    let pause = hand.random.millis(0, 20);
    let lock = subjects::booking_lock(number).shared();
    let (before, after) = lock.transaction(conn, |conn| {
        let before = highest(conn, number)?.number;
        thread::sleep(pause);
        Ok::<_, Error>((before, highest(conn, number)?.number))
    })?;
    if before != after {
        hand.violation(format!(
            "booking {number} went from {before} to {after} under a shared transaction lock"
        ));
    }
    Ok(Outcome::Done)
}

/// The faults of one booking.
struct Misfortune {
    random: Rng,
    panics: bool,
    idles: bool,
}

impl Misfortune {
    fn of(hand: &mut Hand<'_>) -> Self {
        let panics = hand.befalls(Fault::Panic);
        let idles = hand.settings.impatient && hand.befalls(Fault::IdleInTransactionTimeout);
        Self {
            random: hand.random.fork(),
            panics,
            idles,
        }
    }

    fn book(&mut self, conn: &mut PgConnection, lock: i32) -> Result<i64, Error> {
        let Highest { number, at } = highest(conn, lock)?;
        let booked = number + 1;
        let (from, to) = if self.idles { (400, 600) } else { (0, 15) };
        thread::sleep(self.random.millis(from, to));
        diesel::sql_query(
            "INSERT INTO faults.booking SELECT $1, $2, $3, faults.micros(clock_timestamp())",
        )
        .bind::<Integer, _>(lock)
        .bind::<BigInt, _>(booked)
        .bind::<BigInt, _>(at)
        .execute(conn)?;
        if self.panics {
            panic_deliberately();
        }
        Ok(booked)
    }
}

fn highest(conn: &mut PgConnection, lock: i32) -> QueryResult<Highest> {
    diesel::sql_query(
        "SELECT coalesce((SELECT max(number) FROM faults.booking WHERE lock = $1), 0) AS number, \
         faults.micros(clock_timestamp()) AS at",
    )
    .bind::<Integer, _>(lock)
    .get_result(conn)
}
