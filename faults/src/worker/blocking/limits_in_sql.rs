//! A client of the rate limits that does not use this crate. It calls the stored functions in plain SQL, also in transactions
//! that take a while to commit, so that others wait for the row, or are rolled back.

use std::thread;

use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel::sql_types::{BigInt, Integer, Text};
use diesel_interlock::Error;

use super::WorkerThread;
use crate::chance::Chance;
use crate::clock::Micros;
use crate::record::Outcome;
use crate::worker::spends::{Wanted, any_wait};

#[derive(QueryableByName)]
struct Reply {
    #[diesel(sql_type = BigInt)]
    units: i64,
    #[diesel(sql_type = BigInt)]
    at: Micros,
    #[diesel(sql_type = BigInt)]
    wait: Micros,
}

#[derive(QueryableByName)]
struct Returned {
    #[diesel(sql_type = BigInt)]
    units: i64,
}

const RESERVE: &str = "SELECT units, faults.micros(decided_at) AS at,
        COALESCE((extract(epoch FROM wait) * 1000000)::bigint, 0) AS wait
    FROM resource_control.reserve_rate_limit(
        $1, $2, $3, make_interval(secs => $4 / 1000000.0), $5, $6, make_interval(secs => $7 / 1000.0))";

const GIVE_BACK: &str = "SELECT resource_control.give_back_rate_limit(
        $1, $2, $3, timestamptz 'epoch' + $4 * interval '1 us', $5 * interval '1 us') AS units";

pub(super) fn work(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let wanted = Wanted::queued(&mut worker.random);
    let quota = wanted.limit.quota();
    let period = quota.period.as_micros() as i64;
    // A plain check is a reservation that does not wait.
    let max_wait = if worker.random.one_in(2) {
        any_wait(&mut worker.random)
    } else {
        std::time::Duration::ZERO
    };
    let conn = &mut *worker.connection()?;
    let reserve = |conn: &mut PgConnection| -> QueryResult<Reply> {
        diesel::sql_query(RESERVE)
            .bind::<Text, _>(wanted.limit.name())
            .bind::<Text, _>(wanted.key)
            .bind::<BigInt, _>(i64::from(quota.n))
            .bind::<BigInt, _>(period)
            .bind::<BigInt, _>(i64::from(quota.burst))
            .bind::<BigInt, _>(i64::from(wanted.cost))
            .bind::<Integer, _>(max_wait.as_millis() as i32)
            .get_result(conn)
    };
    // A few are longer than a check waits.
    let pause = worker.random.millis(20, 270);
    let reply = match worker.random.u64(..6) {
        0..=2 => conn.build_transaction().read_committed().run(|conn| {
            let reply = reserve(conn)?;
            thread::sleep(pause);
            Ok::<_, DieselError>(reply)
        })?,
        3 => {
            let rolled_back = conn.build_transaction().read_committed().run(|conn| {
                reserve(conn)?;
                thread::sleep(pause);
                Err::<(), _>(DieselError::RollbackTransaction)
            });
            return match rolled_back {
                Err(DieselError::RollbackTransaction) => Ok(Outcome::Busy),
                other => Ok(other.map(|()| Outcome::Failed)?),
            };
        }
        _ => reserve(conn)?,
    };
    if reply.units == 0 {
        return Ok(Outcome::Busy);
    }
    let given = wanted.allowed_at(reply.at, reply.at + reply.wait);
    if worker.random.one_in(3) {
        thread::sleep(worker.random.millis(0, 100));
        let units = worker.random.u32(1..=wanted.cost);
        given.returning(units);
        let back: Returned = diesel::sql_query(GIVE_BACK)
            .bind::<Text, _>(wanted.limit.name())
            .bind::<Text, _>(wanted.key)
            .bind::<BigInt, _>(i64::from(units))
            .bind::<BigInt, _>(reply.at)
            .bind::<BigInt, _>(reply.wait)
            .get_result(conn)?;
        given.returned(back.units as u32);
    }
    Ok(Outcome::Done)
}
