//! Rate limits that a process checks for itself most of the time: it takes several units of a key in one round trip, and
//! remembers for a moment that a key is limited.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;
#[cfg(feature = "r2d2")]
pub(crate) mod blocking;
mod keys;
mod taking;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::keys::{Keys, Known, Unused};
use self::taking::{Taking, Takings};
use super::{Check, RateLimit, operations};
use crate::clock::{Deadline, Moment};
use crate::error::{Error, Input, Result};
use crate::panics::lock;
use crate::session::Session;
use crate::signal::Signal;
use crate::text::Name;

/// A limit, and what this process knows of its keys.
#[derive(Debug)]
struct Local {
    limit: RateLimit,
    chunk: u32,
    keys: Mutex<Keys>,
    /// Shared with the calls in it, which a dropped future leaves to its runtime.
    takings: Arc<Mutex<Takings>>,
}

impl Local {
    fn of(limit: &RateLimit, chunk: u32) -> Result<Self> {
        if chunk == 0 {
            return Err(limit.bad_units(0, u32::MAX).into());
        }
        let limit = RateLimit {
            key: None,
            cost: 1,
            ..limit.clone()
        };
        limit.checked(Duration::ZERO, Name::anywhere)?;
        Ok(Self {
            limit,
            chunk,
            keys: Mutex::default(),
            takings: Arc::default(),
        })
    }

    /// Returns what is known without a round trip.
    fn known(&self, key: &str, cost: u32) -> Result<Known> {
        if cost == 0 {
            return Err(self.limit.bad_units(0, u32::MAX).into());
        }
        Ok(lock(&self.keys).decide(key, cost))
    }

    /// Returns the limit of a key, after the checks that need no database. The empty key is the limit without a key.
    fn limit_of(&self, key: &str) -> Result<RateLimit> {
        let limit = if key.is_empty() {
            self.limit.clone()
        } else {
            self.limit.key(key)
        };
        limit.checked(Duration::ZERO, Name::anywhere)?;
        Ok(limit)
    }

    /// Announces that a call takes units. Returns, as the error, what to wait for if another call takes enough for both.
    fn announce(&self, key: &str, cost: u32) -> Result<Taking, Arc<Signal>> {
        Taking::announce(&self.takings, key, self.chunk, cost)
    }

    /// As [`announce`](Self::announce), for a call that has waited once.
    fn announce_alone(&self, key: &str, cost: u32) -> Taking {
        Taking::announce_alone(&self.takings, key, self.chunk, cost)
    }

    /// Takes units of a key, and spends those of the call.
    async fn take<S: Session>(
        &self,
        session: &mut S,
        limit: &RateLimit,
        cost: u32,
    ) -> Result<Check> {
        let key = limit.checked_key()?;
        let mut is_second = false;
        loop {
            // Another call may have taken units while this one waited for its connection.
            let missing = match self.known(key, cost)? {
                Known::Outcome(check) => return Ok(check),
                Known::Missing(_) if is_second => cost,
                Known::Missing(missing) => missing,
            };
            let asked = limit.cost(self.chunk.max(missing));
            // Before the call is sent, so that the units are void here before they are refilled in the database.
            let sent = Moment::now();
            let reply = operations::spend(session, &asked, Duration::ZERO, Some(missing)).await;
            let reply = reply.map_err(|error| of_call(error, cost))?;
            let mut keys = lock(&self.keys);
            let learnt = keys
                .entry(key, limit)
                .learn(&reply, &asked, missing, cost, sent);
            if let Some(check) = learnt {
                return Ok(check);
            }
            // Another call has used what was here before. A second reply is enough without that.
            is_second = true;
        }
    }

    /// Forgets all keys. Returns the units that were not used and may still be.
    fn forget(&self) -> Vec<Unused> {
        std::mem::take(&mut *lock(&self.keys)).into_unused(Moment::now())
    }
}

/// An error that names the cost of the call, and not the chunk.
fn of_call(error: Error, cost: u32) -> Error {
    match error {
        Error::Input(Input::CostAboveBurst { name, burst, .. }) => {
            Input::CostAboveBurst { name, cost, burst }.into()
        }
        other => other,
    }
}

/// Gives units back until that fails, or the time is over. Those that were not given back come back with time.
async fn give_back<S: Session>(session: &mut S, unused: &[Unused], deadline: Deadline) {
    for Unused { spent, units } in unused {
        if deadline.remaining().is_zero()
            || operations::give_back(session, spent, *units).await.is_err()
        {
            return;
        }
    }
}
