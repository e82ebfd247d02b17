//! Writes behind a fence, by holders and by former holders that do not know about their loss.

use std::thread;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Integer};
use diesel_interlock::Error;

use super::report::report;
use super::{Hand, errors};
use crate::chance::Chance;
use crate::clock;
use crate::record::{Outcome, Primitive, Record};
use crate::subjects;

#[derive(QueryableByName)]
struct Id {
    #[diesel(sql_type = BigInt)]
    id: i64,
}

/// Writes with the token that was drawn under this lock. Returns whether the fence admitted the write, if that is known.
pub(super) fn write(
    hand: &Hand<'_>,
    lock: i32,
    token: i64,
    conn: &mut PgConnection,
) -> Option<bool> {
    let began = clock::now();
    let written = conn.transaction(|conn| {
        subjects::fence(lock).pass(conn, token)?;
        let Id { id } = diesel::sql_query(
            "INSERT INTO faults.fenced_write (lock, token) VALUES ($1, $2) RETURNING id",
        )
        .bind::<Integer, _>(lock)
        .bind::<BigInt, _>(token)
        .get_result(conn)?;
        Ok::<_, Error>(id)
    });
    let (outcome, passed) = match written {
        Ok(id) => {
            report(&Record::Wrote {
                id,
                token,
                sent: began,
            });
            (Outcome::Done, Some(true))
        }
        Err(Error::Fenced { .. }) => (Outcome::Busy, Some(false)),
        Err(error) => {
            if let Some(violation) = errors::must_not_be(Primitive::Fence, &error) {
                hand.violation(violation);
            }
            (Outcome::Failed, None)
        }
    };
    report(&Record::Did {
        what: Primitive::Fence,
        outcome,
        began,
    });
    passed
}

/// Writes with the token of a lock that was released or lost, if there is a connection for it.
pub(super) fn write_late(hand: &mut Hand<'_>, lock: i32, token: i64) {
    thread::sleep(hand.random.millis(0, 300));
    let Ok(mut conn) = hand.connection() else {
        return;
    };
    let sent = clock::now();
    let passed = write(hand, lock, token, &mut conn);
    if passed == Some(false) {
        report(&Record::Fenced {
            lock,
            token,
            holds: false,
            sent,
        });
    }
}
