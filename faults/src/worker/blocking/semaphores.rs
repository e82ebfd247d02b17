//! Semaphores: claimed, renewed, overstayed, dropped, abandoned.

use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{Admission, Claim, Error, Permit, Semaphore};

use super::WorkerThread;
use crate::chance::Chance;
use crate::clock;
use crate::fault::Fault;
use crate::record::Outcome;
use crate::subjects::SEMAPHORES;
use crate::worker::instructions::inflicts;
use crate::worker::panic_deliberately;
use crate::worker::requests::{Stay, claimed, released, renewed, require_patience};

pub(super) fn work(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    if worker.random.one_in(3) {
        return super::article::work(worker);
    }
    let Some(semaphore) = worker.random.choice(&SEMAPHORES) else {
        return Ok(Outcome::Busy);
    };
    let timeout = worker.random.millis(0, 400);
    let sent = clock::now();
    let attempt = match worker.random.u64(..4) {
        0 => return elsewhere(worker, semaphore),
        1 => semaphore.try_acquire(&worker.pool)?,
        _ => {
            let start = Instant::now();
            let attempt = semaphore.acquire_timeout(&worker.pool, timeout)?;
            require_patience(&attempt, start, timeout);
            attempt
        }
    };
    let Admission::Admitted(permit) = attempt else {
        return Ok(Outcome::Busy);
    };
    let stay = Stay::of(semaphore, permit.fencing_token());
    claimed(semaphore, permit.claim(), sent);
    spend(worker, semaphore, stay, permit)
}

/// Claims and completes without a permit.
fn elsewhere(worker: &mut WorkerThread<'_>, semaphore: &Semaphore) -> Result<Outcome, Error> {
    let sent = clock::now();
    let Admission::Admitted(claim) = semaphore.claim_on(&mut *worker.connection()?)? else {
        return Ok(Outcome::Busy);
    };
    claimed(semaphore, &claim, sent);
    thread::sleep(worker.random.millis(0, 30));
    if worker.random.one_in(20) {
        semaphore.renew_on(&mut *worker.connection()?, claim.id)?;
    }
    let mut conn = worker.connection()?;
    let sent = clock::now();
    let in_time = semaphore.complete_on(&mut conn, claim.id)?;
    released(&claim, in_time, sent);
    Ok(if in_time {
        Outcome::Done
    } else {
        Outcome::Lost
    })
}

fn spend(
    worker: &mut WorkerThread<'_>,
    semaphore: &Semaphore,
    mut stay: Stay,
    mut permit: Permit,
) -> Result<Outcome, Error> {
    let end = Instant::now()
        + if inflicts(Fault::OverstayedPermit) {
            semaphore.timeout() + Duration::from_millis(50)
        } else if worker.random.one_in(40) {
            semaphore.timeout() / 2
        } else {
            worker.random.millis(0, 30)
        };
    while stay.is_believed(|| permit.remaining()) && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
        if worker.random.one_in(100) {
            let sent = clock::now();
            permit.renew()?;
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
        worker.exhaust_pool();
    }
    if full || worker.random.one_in(10) {
        drop(permit);
        return Ok(Outcome::Done);
    }
    let claim = permit.claim().clone();
    let sent = clock::now();
    match permit.release() {
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
