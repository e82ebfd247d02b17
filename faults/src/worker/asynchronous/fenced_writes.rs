//! Writes behind a fence, by holders and by former holders that do not know about their loss.

use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use diesel_interlock::Error;
use diesel_interlock::asynchronous::Fence;
use tokio::time::sleep;

use super::WorkerTask;
use crate::chance::Chance;
use crate::subjects;
use crate::worker::sections::Id;
use crate::worker::writes::Write;

/// Writes with the token that was drawn under this lock. Returns the write if the fence refused it.
pub(super) async fn write(lock: i32, token: i64, conn: &mut AsyncPgConnection) -> Option<Write> {
    let write = Write::new(lock, token);
    let fence = Fence::from(subjects::fence(lock));
    let statement = write.statement();
    let work = async |conn: &mut AsyncPgConnection| {
        fence.pass(conn, token).await?;
        let id: Id = statement.get_result(conn).await?;
        Ok::<_, Error>(id)
    };
    let written = conn.transaction(work).await;
    write.is_refused(written).then_some(write)
}

/// Writes with the token of a lock that was released or lost, if there is a connection for it.
pub(super) async fn write_late(worker: &mut WorkerTask, lock: i32, token: i64) {
    sleep(worker.random.millis(0, 300)).await;
    let Ok(mut conn) = worker.connection().await else {
        return;
    };
    if let Some(write) = write(lock, token, &mut conn).await {
        write.refused(false);
    }
}
