//! Throttles, with and without a key, by themselves and inside transactions.

use std::cell::Cell;
use std::thread;

use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel_interlock::{Decision, Error, Grant};

use super::WorkerThread;
use crate::chance::Chance;
use crate::record::Outcome;
use crate::worker::grants::Wanted;

pub(super) fn work(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let wanted = Wanted::any(&mut worker.random);
    let throttle = wanted.throttle();
    // Other sessions find the resource while it is being taken, and are denied at once. A session that waited as long as
    // its user's `lock_timeout` would get an error.
    let pause = worker.random.millis(0, 120);
    let granted: Option<Grant> = match worker.random.u64(..8) {
        0 => {
            let granted = Cell::new(None);
            let _ = throttle.run(&worker.pool, |grant| {
                granted.set(Some(grant));
                Ok::<_, Error>(())
            })?;
            granted.into_inner()
        }
        1 => worker
            .connection()?
            .transaction(|conn| {
                let decision = throttle.attempt_on(conn)?;
                thread::sleep(pause);
                Ok::<_, Error>(decision)
            })?
            .granted(),
        2 => {
            // The attempt is rolled back.
            let rolled_back = worker.connection()?.transaction(|conn| {
                let _: Decision = throttle.attempt_on(conn)?;
                thread::sleep(pause);
                Err::<(), _>(Error::from(DieselError::RollbackTransaction))
            });
            match rolled_back {
                Err(Error::Database(DieselError::RollbackTransaction)) => None,
                other => return other.map(|()| Outcome::Failed),
            }
        }
        3 if worker.random.one_in(10) => {
            diesel::sql_query("SELECT resource_control.prune_throttled_keys(10)")
                .execute(&mut worker.connection()?)?;
            None
        }
        _ => throttle.attempt_on(&mut *worker.connection()?)?.granted(),
    };
    Ok(wanted.outcome(granted))
}
