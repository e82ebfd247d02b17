//! What the workers of both halves do alike with transaction locks: "lock, look, insert".

use diesel::query_builder::SqlQuery;
use diesel::sql_types::BigInt;
use diesel::{QueryableByName, sql_query};

use super::report::{report, violation};
use crate::clock::Micros;
use crate::record::Record;

/// The highest number that was booked, and when the session read it.
#[derive(QueryableByName)]
pub(super) struct Highest {
    #[diesel(sql_type = BigInt)]
    pub(super) number: i64,
    #[diesel(sql_type = BigInt)]
    at: i64,
}

/// The query of the [`Highest`] number.
pub(super) fn highest(lock: i32) -> SqlQuery {
    sql_query(format!(
        "SELECT coalesce((SELECT max(number) FROM faults.booking WHERE lock = {lock}), 0) AS number, \
         faults.micros(clock_timestamp()) AS at"
    ))
}

impl Highest {
    pub(super) fn next(&self) -> i64 {
        self.number + 1
    }

    /// The statement that books the next number.
    pub(super) fn book_next(&self, lock: i32) -> SqlQuery {
        sql_query(format!(
            "INSERT INTO faults.booking SELECT {lock}, {}, {}, faults.micros(clock_timestamp())",
            self.next(),
            self.at
        ))
    }
}

pub(super) fn booked(lock: i32, number: i64, sent: Micros) {
    report(&Record::Booked { lock, number, sent });
}

/// Under a shared lock no booking may be made in between two reads.
pub(super) fn require_unchanged(lock: i32, before: &Highest, after: &Highest) {
    let (before, after) = (before.number, after.number);
    if before != after {
        violation(format!(
            "booking {lock} went from {before} to {after} under a shared transaction lock"
        ));
    }
}
