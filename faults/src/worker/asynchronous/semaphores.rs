//! Semaphores: claimed, renewed, overstayed, dropped, abandoned.

use std::time::{Duration, Instant};

use diesel_interlock::asynchronous::{Permit, Semaphore};
use diesel_interlock::{Admission, Claim, Error};
use tokio::time::sleep;

use super::WorkerTask;
use super::pools::AnyPool;
use crate::chance::Chance;
use crate::clock;
use crate::fault::Fault;
use crate::record::Outcome;
use crate::subjects::SEMAPHORES;
use crate::worker::instructions::inflicts;
use crate::worker::panic_deliberately;
use crate::worker::requests::{Stay, claimed, released, renewed, require_patience};

pub(super) async fn work(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let Some(shared) = worker.random.choice(&SEMAPHORES) else {
        return Ok(Outcome::Busy);
    };
    let semaphore = Semaphore::from(shared.clone());
    let timeout = worker.random.millis(0, 400);
    let sent = clock::now();
    let attempt = match worker.random.u64(..5) {
        0 => return elsewhere(worker, shared, &semaphore).await,
        1 => {
            let pause = worker.random.millis(0, 20);
            let work = async |permit: &mut Permit<AnyPool>| {
                let mut stay = Stay::of(shared, permit.fencing_token());
                claimed(shared, permit.claim(), sent);
                sleep(pause).await;
                stay.is_believed(|| permit.remaining());
                Ok::<_, Error>(())
            };
            let admitted = semaphore.try_acquire(&worker.pool).await?.run(work).await?;
            return Ok(match admitted {
                Admission::Admitted(()) => Outcome::Done,
                Admission::Full(_) => Outcome::Busy,
            });
        }
        2 => semaphore.try_acquire(&worker.pool).await?,
        _ => {
            let start = Instant::now();
            let attempt = semaphore.acquire_timeout(&worker.pool, timeout).await?;
            require_patience(&attempt, start, timeout);
            attempt
        }
    };
    let Admission::Admitted(permit) = attempt else {
        return Ok(Outcome::Busy);
    };
    let stay = Stay::of(shared, permit.fencing_token());
    claimed(shared, permit.claim(), sent);
    spend(worker, stay, permit, semaphore.timeout()).await
}

/// Claims and completes without a permit.
async fn elsewhere(
    worker: &mut WorkerTask,
    shared: &diesel_interlock::Semaphore,
    semaphore: &Semaphore,
) -> Result<Outcome, Error> {
    let sent = clock::now();
    let mut conn = worker.connection().await?;
    let Admission::Admitted(claim) = semaphore.claim_on(&mut conn).await? else {
        return Ok(Outcome::Busy);
    };
    drop(conn);
    claimed(shared, &claim, sent);
    sleep(worker.random.millis(0, 30)).await;
    let mut conn = worker.connection().await?;
    if worker.random.one_in(20) {
        semaphore.renew_on(&mut conn, claim.id).await?;
    }
    let sent = clock::now();
    let in_time = semaphore.complete_on(&mut conn, claim.id).await?;
    released(&claim, in_time, sent);
    Ok(if in_time {
        Outcome::Done
    } else {
        Outcome::Lost
    })
}

async fn spend(
    worker: &mut WorkerTask,
    mut stay: Stay,
    mut permit: Permit<AnyPool>,
    timeout: Duration,
) -> Result<Outcome, Error> {
    let end = Instant::now()
        + if inflicts(Fault::OverstayedPermit) {
            timeout + Duration::from_millis(50)
        } else if worker.random.one_in(40) {
            timeout / 2
        } else {
            worker.random.millis(0, 30)
        };
    while stay.is_believed(|| permit.remaining()) && Instant::now() < end {
        sleep(Duration::from_millis(5)).await;
        if worker.random.one_in(50) {
            let sent = clock::now();
            permit.renew().await?;
            renewed(permit.claim(), sent);
        }
    }
    if inflicts(Fault::Panic) {
        panic_deliberately();
    }
    if inflicts(Fault::AbandonedPermit) {
        let _: Claim = permit.into_claim();
        return Ok(Outcome::Done);
    }
    let full = inflicts(Fault::FullPool);
    if full {
        worker.exhaust_pool().await;
    }
    if full || worker.random.one_in(6) {
        drop(permit);
        return Ok(Outcome::Done);
    }
    let claim = permit.claim().clone();
    let sent = clock::now();
    match permit.release().await {
        Ok(()) => {
            released(&claim, true, sent);
            Ok(Outcome::Done)
        }
        Err(Error::TimedOut { .. }) => {
            released(&claim, false, sent);
            Ok(Outcome::Lost)
        }
        Err(error) => Err(error),
    }
}
