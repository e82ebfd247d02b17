//! Rate limits: checks, reservations, units that are given back, resets, pruning and overrides.

use std::thread;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::{Check, CheckAll, Error, RateLimit, Reserve, Spent};

use super::WorkerThread;
use crate::chance::Chance;
use crate::record::Outcome;
use crate::worker::spends::{Given, Wanted, any_wait, override_statement, require_refusal};

pub(super) fn work(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    match worker.random.u64(..18) {
        0..=5 => checks(worker),
        6..=7 => reservation(worker),
        8 => wait(worker),
        9..=10 => several(worker),
        11 => reset(worker),
        12 => {
            RateLimit::prune(&worker.pool)?;
            Ok(Outcome::Done)
        }
        13 => {
            let statement = override_statement(&mut worker.random);
            worker.connection()?.batch_execute(&statement)?;
            Ok(Outcome::Done)
        }
        14 => in_transaction(worker),
        _ => super::limits_in_sql::work(worker),
    }
}

/// Checks until a call is limited, and gives some of the units back.
fn checks(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let mut wanted = Wanted::any(&mut worker.random);
    for _ in 0..worker.random.u32(1..=8) {
        wanted.again();
        let check = if worker.random.one_in(2) {
            wanted.limit.check(&worker.pool)?
        } else {
            wanted.limit.check_on(&mut *worker.connection()?)?
        };
        let Check::Allowed(spent) = check else {
            return Ok(Outcome::Busy);
        };
        let given = wanted.allowed(&spent);
        if worker.random.one_in(4) {
            // In that time the key may be full once, and be used up again.
            let longest = if worker.random.one_in(2) { 1000 } else { 50 };
            thread::sleep(worker.random.millis(0, longest));
            give_back(worker, &given, &spent)?;
        }
    }
    Ok(Outcome::Done)
}

fn give_back(worker: &mut WorkerThread<'_>, given: &Given, spent: &Spent) -> Result<(), Error> {
    let units = worker.random.u32(1..=spent.units);
    let mut conn = worker.connection()?;
    given.returning(units);
    given.returned(spent.give_back_on(&mut conn, units)?);
    Ok(())
}

/// Reserves, and then cancels, uses only some of the units, or uses all of them.
fn reservation(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let wanted = Wanted::queued(&mut worker.random);
    let max_wait = any_wait(&mut worker.random);
    let Reserve::Reserved(reservation) = wanted.limit.reserve(&worker.pool, max_wait)? else {
        return Ok(Outcome::Busy);
    };
    let given = wanted.reserved(&reservation);
    match worker.random.u64(..4) {
        0..=1 => {
            thread::sleep(worker.random.millis(0, 100).min(reservation.wait));
            given.returning(wanted.cost);
            given.returned(reservation.cancel(&worker.pool)?);
        }
        2 => {
            thread::sleep(reservation.wait);
            given.require_patience();
            give_back(worker, &given, &reservation.spent)?;
        }
        _ => {}
    }
    Ok(Outcome::Done)
}

fn wait(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let wanted = Wanted::queued(&mut worker.random);
    let timeout = any_wait(&mut worker.random);
    let Check::Allowed(spent) = wanted.limit.acquire_timeout(&worker.pool, timeout)? else {
        return Ok(Outcome::Busy);
    };
    wanted.allowed(&spent).require_patience();
    Ok(Outcome::Done)
}

fn several(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let mut wanted = Wanted::several(&mut worker.random);
    worker.random.shuffle(&mut wanted);
    let limits: Vec<&RateLimit> = wanted.iter().map(|it| &it.limit).collect();
    let CheckAll::Allowed(spent) = RateLimit::check_all(&worker.pool, &limits)? else {
        return Ok(Outcome::Busy);
    };
    let given: Vec<_> = (wanted.iter().zip(&spent))
        .map(|(wanted, spent)| wanted.allowed(spent))
        .collect();
    if worker.random.one_in(4) {
        give_back(worker, &given[0], &spent[0])?;
    }
    Ok(Outcome::Done)
}

/// Resets a key, or all of the limit.
fn reset(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let wanted = Wanted::login(&mut worker.random);
    if worker.random.one_in(4) {
        wanted.limit.reset_all(&worker.pool)?;
    } else {
        wanted.limit.reset(&worker.pool)?;
    }
    Ok(Outcome::Done)
}

/// A check in a transaction is refused.
fn in_transaction(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let wanted = Wanted::any(&mut worker.random);
    worker.connection()?.transaction(|conn| {
        require_refusal(&wanted.limit.check_on(conn));
        Ok::<_, Error>(())
    })?;
    Ok(Outcome::Done)
}
