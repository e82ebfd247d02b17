//! Throttles, with and without a key, by themselves and inside transactions.

use diesel::result::Error as DieselError;
use diesel_async::{AsyncConnection, RunQueryDsl};
use diesel_interlock::asynchronous::Throttle;
use diesel_interlock::{Decision, Error, Grant};
use tokio::time::sleep;

use super::WorkerTask;
use crate::chance::Chance;
use crate::record::Outcome;
use crate::worker::grants::Wanted;

pub(super) async fn work(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let wanted = Wanted::any(&mut worker.random);
    let throttle = Throttle::from(wanted.throttle());
    let pause = worker.random.millis(0, 120);
    let granted: Option<Grant> = match worker.random.u64(..8) {
        0 => throttle
            .run(&worker.pool, async |grant| Ok::<_, Error>(grant))
            .await?
            .granted(),
        1 => {
            let mut conn = worker.connection().await?;
            let decision = conn
                .transaction(async |conn| {
                    let decision = throttle.attempt_on(conn).await?;
                    sleep(pause).await;
                    Ok::<_, Error>(decision)
                })
                .await?;
            decision.granted()
        }
        2 => {
            // The attempt is rolled back.
            let mut conn = worker.connection().await?;
            let rolled_back = conn
                .transaction(async |conn| {
                    let _: Decision = throttle.attempt_on(conn).await?;
                    sleep(pause).await;
                    Err::<(), _>(Error::from(DieselError::RollbackTransaction))
                })
                .await;
            match rolled_back {
                Err(Error::Database(DieselError::RollbackTransaction)) => None,
                other => return other.map(|()| Outcome::Failed),
            }
        }
        3 if worker.random.one_in(10) => {
            diesel::sql_query("SELECT resource_control.prune_throttled_keys(10)")
                .execute(&mut *worker.connection().await?)
                .await?;
            None
        }
        4 => throttle.attempt(&worker.pool).await?.granted(),
        _ => {
            let mut conn = worker.connection().await?;
            throttle.attempt_on(&mut conn).await?.granted()
        }
    };
    Ok(wanted.outcome(granted))
}
