//! Writes behind a fence, by holders and by former holders that do not know about their loss.

use std::thread;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel_interlock::Error;

use super::WorkerThread;
use crate::chance::Chance;
use crate::subjects;
use crate::worker::sections::Id;
use crate::worker::writes::Write;

/// Writes with the token that was drawn under this lock. Returns the write if the fence refused it.
pub(super) fn write(lock: i32, token: i64, conn: &mut PgConnection) -> Option<Write> {
    let write = Write::new(lock, token);
    let written = conn.transaction(|conn| {
        subjects::fence(lock).pass(conn, token)?;
        let id: Id = write.statement().get_result(conn)?;
        Ok::<_, Error>(id)
    });
    write.is_refused(written).then_some(write)
}

/// Writes with the token of a lock that was released or lost, if there is a connection for it.
pub(super) fn write_late(worker: &mut WorkerThread<'_>, lock: i32, token: i64) {
    thread::sleep(worker.random.millis(0, 300));
    let Ok(mut conn) = worker.connection() else {
        return;
    };
    if let Some(write) = write(lock, token, &mut conn) {
        write.refused(false);
    }
}
