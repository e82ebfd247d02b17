//! Rate limits: checks, reservations, units that are given back, resets, pruning and overrides.

use diesel_async::{AsyncConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::RateLimit;
use diesel_interlock::{Check, CheckAll, Error, Reserve, Spent};
use tokio::time::sleep;

use super::WorkerTask;
use crate::chance::Chance;
use crate::record::Outcome;
use crate::worker::spends::{Given, Wanted, any_wait, override_statement, require_refusal};

pub(super) async fn work(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    match worker.random.u64(..15) {
        0..=5 => checks(worker).await,
        6..=7 => reservation(worker).await,
        8 => wait(worker).await,
        9..=10 => several(worker).await,
        11 => reset(worker).await,
        12 => {
            RateLimit::prune(&worker.pool).await?;
            Ok(Outcome::Done)
        }
        13 => {
            let statement = override_statement(&mut worker.random);
            worker.connection().await?.batch_execute(&statement).await?;
            Ok(Outcome::Done)
        }
        _ => in_transaction(worker).await,
    }
}

/// Checks until a call is limited, and gives some of the units back.
async fn checks(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let mut wanted = Wanted::any(&mut worker.random);
    let limit = RateLimit::from(wanted.limit.clone());
    for _ in 0..worker.random.u32(1..=8) {
        wanted.again();
        let check = if worker.random.one_in(2) {
            limit.check(&worker.pool).await?
        } else {
            limit.check_on(&mut *worker.connection().await?).await?
        };
        let Check::Allowed(spent) = check else {
            return Ok(Outcome::Busy);
        };
        let given = wanted.allowed(&spent);
        if worker.random.one_in(4) {
            // In that time the key may be full once, and be used up again.
            let longest = if worker.random.one_in(2) { 1000 } else { 50 };
            sleep(worker.random.millis(0, longest)).await;
            give_back(worker, &given, &spent).await?;
        }
    }
    Ok(Outcome::Done)
}

async fn give_back(worker: &mut WorkerTask, given: &Given, spent: &Spent) -> Result<(), Error> {
    let units = worker.random.u32(1..=spent.units);
    let mut conn = worker.connection().await?;
    given.returning(units);
    given.returned(RateLimit::give_back_on(&mut conn, spent, units).await?);
    Ok(())
}

/// Reserves, and then cancels, uses only some of the units, or uses all of them.
async fn reservation(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let wanted = Wanted::queued(&mut worker.random);
    let limit = RateLimit::from(wanted.limit.clone());
    let max_wait = any_wait(&mut worker.random);
    let Reserve::Reserved(reservation) = limit.reserve(&worker.pool, max_wait).await? else {
        return Ok(Outcome::Busy);
    };
    let given = wanted.reserved(&reservation);
    match worker.random.u64(..4) {
        0..=1 => {
            sleep(worker.random.millis(0, 100).min(reservation.wait)).await;
            given.returning(wanted.cost);
            given.returned(RateLimit::cancel(&worker.pool, reservation).await?);
        }
        2 => {
            sleep(reservation.wait).await;
            given.require_patience();
            give_back(worker, &given, &reservation.spent).await?;
        }
        _ => {}
    }
    Ok(Outcome::Done)
}

/// A wait that is dropped is not reported. Its units are given back.
async fn wait(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let wanted = Wanted::queued(&mut worker.random);
    let timeout = any_wait(&mut worker.random);
    let limit = RateLimit::from(wanted.limit.clone());
    let Check::Allowed(spent) = limit.acquire_timeout(&worker.pool, timeout).await? else {
        return Ok(Outcome::Busy);
    };
    wanted.allowed(&spent).require_patience();
    Ok(Outcome::Done)
}

async fn several(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let mut wanted = Wanted::several(&mut worker.random);
    worker.random.shuffle(&mut wanted);
    let limits: Vec<_> = wanted.iter().map(|it| it.limit.clone().into()).collect();
    let limits: Vec<&RateLimit> = limits.iter().collect();
    let CheckAll::Allowed(spent) = RateLimit::check_all(&worker.pool, &limits).await? else {
        return Ok(Outcome::Busy);
    };
    let given: Vec<_> = (wanted.iter().zip(&spent))
        .map(|(wanted, spent)| wanted.allowed(spent))
        .collect();
    if worker.random.one_in(4) {
        give_back(worker, &given[0], &spent[0]).await?;
    }
    Ok(Outcome::Done)
}

/// Resets a key, or all of the limit.
async fn reset(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let limit = RateLimit::from(Wanted::login(&mut worker.random).limit);
    if worker.random.one_in(4) {
        limit.reset_all(&worker.pool).await?;
    } else {
        limit.reset(&worker.pool).await?;
    }
    Ok(Outcome::Done)
}

/// A check in a transaction is refused.
async fn in_transaction(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let limit = RateLimit::from(Wanted::any(&mut worker.random).limit);
    let mut conn = worker.connection().await?;
    conn.transaction(async |conn| {
        require_refusal(&limit.check_on(conn).await);
        Ok::<_, Error>(())
    })
    .await?;
    Ok(Outcome::Done)
}
