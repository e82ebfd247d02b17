//! What a rate limit sends, on a blocking or an asynchronous session.

use std::time::Duration;

use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};

#[cfg(all(feature = "testing", any(feature = "postgres", feature = "async")))]
use super::LimitedReason;
use super::reply::{self, Reply};
use super::rules;
use super::sql::{self, AllSpentRow, PrunedRow, SpentRow, StateRow, Units};
use super::{Check, CheckAll, RateLimit, RateLimitState, Reservation, Reserve, Spent};
use crate::error::{Error, Misplaced, Result};
use crate::events;
use crate::installed::{self, Needs};
use crate::session::{
    Probe, Session, is_serialization_failure, one_at_read_committed, probe_at_read_committed,
};
use crate::text::SentName;
use crate::transaction;

/// How many rows a step of pruning looks at.
const BATCH: i32 = 1000;

/// Spends the units of a call in one round trip, if the limit allows it now.
pub(super) async fn check<S: Session>(session: &mut S, limit: &RateLimit) -> Result<Check> {
    let reply = spend(session, limit, Duration::ZERO, None).await?;
    Ok(reply.check(limit))
}

/// Spends the units of a call in one round trip, if the wait for them is at most `max_wait`.
pub(super) async fn reserve<S: Session>(
    session: &mut S,
    limit: &RateLimit,
    max_wait: Duration,
) -> Result<Reserve> {
    let reply = spend(session, limit, max_wait, None).await?;
    Ok(reply.reserve(limit))
}

/// Spends units in one round trip: all of the cost, or with `at_least` as many as are left.
///
/// Refuses an open transaction, whose rollback would give the units back, and which would stop every other call for the key
/// until its end. A test transaction counts as none.
pub(super) async fn spend<S: Session>(
    session: &mut S,
    limit: &RateLimit,
    max_wait: Duration,
    at_least: Option<u32>,
) -> Result<Reply> {
    let call = limit.checked(max_wait, |name| session.name(name))?;
    refuse_transaction(session)?;
    let (row, in_transaction): (SpentRow, bool) = match at_least {
        None => outside(session, limit, sql::spend(&call), sql::SPEND_NEEDS).await?,
        Some(units) => {
            let statement = sql::spend_at_least(&call, units);
            outside(session, limit, statement, sql::SPEND_AT_LEAST_NEEDS).await?
        }
    };
    let reply = Reply::of(row, limit.quota, SentName::of(&call.name));
    if in_transaction {
        return Err(undo(session, reply.spent(limit).as_slice(), limit.durable).await);
    }
    Ok(reply)
}

/// Checks several limits in one round trip.
pub(super) async fn check_all<S: Session>(
    session: &mut S,
    limits: &[&RateLimit],
) -> Result<CheckAll> {
    let mut calls = Vec::with_capacity(limits.len());
    for limit in limits {
        calls.push(limit.checked(Duration::ZERO, |name| session.name(name))?);
    }
    let arrays = rules::calls(limits, &calls)?;
    refuse_transaction(session)?;
    let (reply, in_transaction) = probe_at_read_committed(session, sql::spend_all(&arrays)).await;
    let row: AllSpentRow = match reply {
        Ok(row) => row,
        Err(error) => {
            let details = match &error {
                DieselError::DatabaseError(_, information) => information.details(),
                _ => None,
            };
            let refused = rules::above_burst(limits, &calls, details);
            let Some(limit) = refused.as_ref().or(limits.first().copied()) else {
                return Err(error.into());
            };
            return Err(explain(session, error, limit, sql::SPEND_ALL_NEEDS).await);
        }
    };
    let outcome = reply::check_all(row, limits, &calls)?;
    if in_transaction {
        let spent = outcome.allowed().unwrap_or_default();
        let is_durable = limits.iter().all(|limit| limit.durable);
        return Err(undo(session, &spent, is_durable).await);
    }
    Ok(outcome)
}

/// Runs and observes a check of several limits. An empty list is allowed: nothing is sent, and no event is logged.
pub(super) async fn observed_all(
    limits: &[&RateLimit],
    check: impl Future<Output = Result<CheckAll>>,
) -> Result<CheckAll> {
    let Some(first) = limits.first() else {
        return Ok(CheckAll::Allowed(Vec::new()));
    };
    let decisive = |checked: &_| rules::decisive(limits, first, checked).subject();
    events::observe_more("check", first.subject(), check, CheckAll::outcome, decisive).await
}

/// Gives units back in one round trip, and returns how many.
pub(super) async fn give_back<S: Session>(
    session: &mut S,
    spent: &Spent,
    units: u32,
) -> Result<u32> {
    refuse_transaction(session)?;
    send_back(session, spent, spent.take_back(units)?).await
}

/// Gives all units back that are left, in one round trip, and returns how many. Sends nothing if none are left.
///
/// They are counted once the session is there: a clone may give units back while the caller waits for a connection.
pub(super) async fn cancel<S: Session>(session: &mut S, reservation: &Reservation) -> Result<u32> {
    let spent = &reservation.spent;
    if spent.is_given_back() {
        return Ok(0);
    }
    refuse_transaction(session)?;
    match spent.take_all_back()? {
        Units { units: 0, .. } => Ok(0),
        back => send_back(session, spent, back).await,
    }
}

async fn send_back<S: Session>(session: &mut S, spent: &Spent, back: Units<'_>) -> Result<u32> {
    let statement = sql::give_back(&back);
    let given: i64 = accepted(session, &spent.limit, statement, sql::GIVE_BACK_NEEDS).await?;
    Ok(given.clamp(0, back.units) as u32)
}

/// Reads what is left of a key, in one round trip.
pub(super) async fn peek<S: Session>(session: &mut S, limit: &RateLimit) -> Result<RateLimitState> {
    let call = limit.checked(Duration::ZERO, |name| session.name(name))?;
    let row: QueryResult<StateRow> = one_at_read_committed(session, sql::peek(&call)).await;
    match row {
        Ok(row) => Ok(reply::state(row)),
        Err(error) => Err(explain(session, error, limit, sql::PEEK_NEEDS).await),
    }
}

/// Makes a key full, or all keys of the name, in one round trip. Returns how many were not.
pub(super) async fn reset<S: Session>(
    session: &mut S,
    limit: &RateLimit,
    all_keys: bool,
) -> Result<u64> {
    let call = limit.checked(Duration::ZERO, |name| session.name(name))?;
    refuse_transaction(session)?;
    let key = (!all_keys).then_some(call.key);
    let statement = sql::reset(call.name.as_str(), key, call.commit_async);
    let deleted: i64 = accepted(session, limit, statement, sql::RESET_NEEDS).await?;
    Ok(deleted.unsigned_abs())
}

/// Deletes the rows of all keys that are full, in steps of one round trip each. Returns how many it deleted.
pub(super) async fn prune<S: Session>(session: &mut S) -> Result<u64> {
    let mut position = (String::new(), String::new());
    let mut pruned = 0;
    loop {
        refuse_transaction(session)?;
        let step: QueryResult<PrunedRow> =
            one_at_read_committed(session, sql::prune(&position, BATCH)).await;
        let (deleted, name, key) = match step {
            Ok(step) => step,
            Err(error) if is_serialization_failure(&error) => return Err(Error::StrictIsolation),
            Err(error) => {
                return Err(installed::explain(session, error, sql::PRUNE_NEEDS, None).await);
            }
        };
        pruned += u64::from(deleted.unsigned_abs());
        match (name, key) {
            (Some(name), Some(key)) => position = (name, key),
            _ => return Ok(pruned),
        }
    }
}

/// Spends all units that are left, in one round trip.
#[cfg(all(feature = "testing", any(feature = "postgres", feature = "async")))]
pub(crate) async fn use_up<S: Session>(session: &mut S, limit: &RateLimit) -> Result<()> {
    let all = limit.cost(u32::MAX);
    let reply = spend(session, &all, Duration::ZERO, Some(1)).await?;
    match reply.check(&all) {
        Check::Limited(limited) if limited.reason == LimitedReason::Contended => {
            let name = limit.name.to_string();
            Err(Error::Contended { name })
        }
        _ => Ok(()),
    }
}

/// Refuses an open transaction that Diesel knows of, before anything is sent.
fn refuse_transaction<S: Session>(session: &mut S) -> Result<()> {
    transaction::refuse_open(session.transaction(), Misplaced::SpendInTransaction)
}

/// Sends a statement, and also returns whether a transaction is open that Diesel does not know of.
async fn outside<S, U, Q>(
    session: &mut S,
    limit: &RateLimit,
    statement: Q,
    needs: &Needs,
) -> Result<(U, bool)>
where
    S: Session,
    Q: Probe<U>,
    U: Send,
{
    let (reply, in_transaction) = probe_at_read_committed(session, statement).await;
    match reply {
        Ok(row) => Ok((row, in_transaction)),
        Err(error) => Err(explain(session, error, limit, needs).await),
    }
}

/// Sends a statement that allows nothing. In a transaction of the caller that Diesel does not know of, it takes effect when
/// that commits, by the session's default of `synchronous_commit`.
async fn accepted<S, U, Q>(
    session: &mut S,
    limit: &RateLimit,
    statement: Q,
    needs: &Needs,
) -> Result<U>
where
    S: Session,
    Q: Probe<U>,
    U: Send,
{
    let (row, in_transaction) = outside(session, limit, statement, needs).await?;
    if in_transaction {
        if session.is_pooled() {
            return Err(Error::TransactionInPool);
        }
        if !limit.durable {
            session.batch(sql::WAIT_FOR_DISK).await?;
        }
        session.clear_mark();
    }
    Ok(row)
}

/// Undoes what was spent in a transaction that Diesel does not know of, and returns why.
async fn undo<S: Session>(session: &mut S, spent: &[Spent], is_durable: bool) -> Error {
    if session.is_pooled() {
        // An earlier user left the transaction open. The connection is marked, so the pool discards it, and the server
        // rolls the check back.
        return Error::TransactionInPool;
    }
    // The caller's transaction goes on, so the units are given back in it, and it commits by the session's default of
    // `synchronous_commit`.
    for spent in spent {
        let back = match spent.take_back(spent.units) {
            Ok(back) => back,
            Err(error) => return error,
        };
        let given: QueryResult<i64> = session.one(sql::give_back(&back)).await;
        if let Err(error) = given {
            return error.into();
        }
    }
    if !is_durable {
        if let Err(error) = session.batch(sql::WAIT_FOR_DISK).await {
            return error.into();
        }
    }
    session.clear_mark();
    Misplaced::SpendInTransaction.into()
}

/// Returns what an error means. Queries the catalogue where that is still possible.
async fn explain<S: Session>(
    session: &mut S,
    error: DieselError,
    limit: &RateLimit,
    needs: &Needs,
) -> Error {
    if is_serialization_failure(&error) {
        return Error::StrictIsolation;
    }
    if let DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, information) = &error {
        if let Some(refusal) = rules::refusal(information.constraint_name(), limit) {
            return refusal;
        }
    }
    installed::explain(session, error, needs, None).await
}
