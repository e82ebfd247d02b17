//! A client of the semaphores' table that does not use this crate. It follows an article's steps in plain SQL, without the
//! lock on the table that the article takes, so only the unique index keeps two such clients out of one slot.

use std::thread;
use std::time::Instant;

use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel::sql_types::{BigInt, Integer, SmallInt, Text};
use diesel_interlock::Error;

use super::WorkerThread;
use crate::chance::Chance;
use crate::clock;
use crate::record::{Outcome, Record};
use crate::subjects::BY_THE_ARTICLE;
use crate::worker::report::report;

#[derive(QueryableByName)]
struct Request {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = SmallInt)]
    slot: i16,
    #[diesel(sql_type = BigInt)]
    created: i64,
}

const TIME_OUT: &str = "UPDATE resource_control.service_request SET timed_out_at = clock_timestamp() WHERE id = ANY (ARRAY(
    SELECT id FROM resource_control.service_request
    WHERE service = $1 AND completed_at IS NULL AND timed_out_at IS NULL AND expires_at <= clock_timestamp()
    ORDER BY id FOR UPDATE))";

const INSERT: &str = "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at)
    SELECT $1, min(slot), now(), now() + make_interval(secs => $2 / 1000.0)
    FROM generate_series(0, $3 - 1) AS slot
    WHERE NOT EXISTS (
        SELECT FROM resource_control.service_request AS r
        WHERE r.service = $1 AND r.slot = slot.slot AND completed_at IS NULL AND timed_out_at IS NULL
    )
    HAVING min(slot) IS NOT NULL
    ON CONFLICT DO NOTHING
    RETURNING id, slot, faults.micros(created_at) AS created";

const COMPLETE: &str = "UPDATE resource_control.service_request SET completed_at = clock_timestamp()
    WHERE id = $1 AND completed_at IS NULL AND timed_out_at IS NULL AND expires_at > clock_timestamp()";

pub(super) fn work(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let service = BY_THE_ARTICLE.service();
    let conn = &mut *worker.connection()?;
    let sent = clock::now();
    // Read before the server's now().
    let end = Instant::now() + BY_THE_ARTICLE.timeout();
    diesel::sql_query(TIME_OUT)
        .bind::<Text, _>(service)
        .execute(conn)?;
    let pause = worker.random.millis(0, 25);
    let claimed = conn.build_transaction().read_committed().run(|conn| {
        let request: Option<Request> = diesel::sql_query(INSERT)
            .bind::<Text, _>(service)
            .bind::<Integer, _>(BY_THE_ARTICLE.timeout().as_millis() as i32)
            .bind::<Integer, _>(BY_THE_ARTICLE.slots() as i32)
            .get_result(conn)
            .optional()?;
        if request.is_some() {
            thread::sleep(pause);
        }
        Ok::<_, DieselError>(request)
    })?;
    let Some(Request { id, slot, created }) = claimed else {
        return Ok(Outcome::Busy);
    };
    report(&Record::Claimed {
        service: service.to_owned(),
        id,
        slot,
        created,
        sent,
    });
    let from = clock::now();
    thread::sleep(worker.random.millis(0, 30));
    let until = clock::now();
    if Instant::now() < end {
        report(&Record::Believed {
            service: service.to_owned(),
            id,
            from,
            until,
        });
    }
    diesel::sql_query(COMPLETE)
        .bind::<BigInt, _>(id)
        .execute(conn)?;
    Ok(Outcome::Done)
}
