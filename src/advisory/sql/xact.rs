//! The statements of a transaction lock.

use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{Integer, Nullable};

use super::statement::{NumberedText, push_call};
use crate::advisory::lock::{Lock, LockMode};
use crate::attempt::Attempt;
use crate::error::{Error, Misplaced, Result};
use crate::key::LockId;

impl LockMode {
    const fn xact_lock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_advisory_xact_lock",
            LockMode::Shared => "pg_advisory_xact_lock_shared",
        }
    }

    const fn try_xact_lock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_try_advisory_xact_lock",
            LockMode::Shared => "pg_try_advisory_xact_lock_shared",
        }
    }
}

statement! {
    /// Takes a transaction lock if it is free, unless the isolation level makes it useless.
    ///
    /// Returns 1 if it was granted, and 0 if another session holds it. Nothing is tried at REPEATABLE READ, where it returns
    /// -1, and on a hot standby, where it returns null.
    pub(super) struct TryXact { lock: Lock } -> (Nullable<Integer>,),
    |self, out| {
        out.push_sql(
            "SELECT CASE WHEN pg_catalog.current_setting('transaction_isolation') \
             OPERATOR(pg_catalog.=) 'repeatable read' THEN -1 \
             WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN ",
        );
        push_call(&mut out, self.lock.mode.try_xact_lock_function(), &self.lock.id)?;
        out.push_sql(" THEN 1 ELSE 0 END");
    }
}

/// The row of [`TryXact`].
#[derive(Debug, Queryable)]
pub(in crate::advisory) struct TriedXact {
    code: Option<i32>,
}

impl TriedXact {
    pub(in crate::advisory) fn read(self) -> Result<Attempt<()>> {
        match self.code {
            Some(1) => Ok(Attempt::Acquired(())),
            Some(0) => Ok(Attempt::Busy),
            Some(_) => Err(Misplaced::XactLockAtRepeatableRead.into()),
            None => Err(Error::Standby),
        }
    }
}

/// The message that waits for a transaction lock inside the caller's transaction: it lifts the settings that would end the
/// wait, waits, and restores them. A `lock_timeout` of 0 waits indefinitely.
///
/// Two settings of this crate keep the caller's values, because releasing a savepoint does not restore settings.
pub(in crate::advisory) fn wait_for_xact(lock: Lock, lock_timeout: i32) -> String {
    let function = lock.mode.xact_lock_function();
    let key = literal(lock.id);
    format!(
        "SELECT \
         pg_catalog.set_config('diesel_interlock.statement_timeout', \
         pg_catalog.current_setting('statement_timeout'), true), \
         pg_catalog.set_config('diesel_interlock.lock_timeout', \
         pg_catalog.current_setting('lock_timeout'), true), \
         pg_catalog.set_config('statement_timeout', '0', true), \
         pg_catalog.set_config('lock_timeout', '{lock_timeout}', true); \
         SELECT pg_catalog.{function}({key}); \
         SELECT \
         pg_catalog.set_config('statement_timeout', \
         pg_catalog.current_setting('diesel_interlock.statement_timeout'), true), \
         pg_catalog.set_config('lock_timeout', \
         pg_catalog.current_setting('diesel_interlock.lock_timeout'), true)"
    )
}

/// The numbers of a lock in a message without parameters. In quotes, because the smallest number is no `bigint` without its
/// sign.
pub(super) fn literal(id: LockId) -> String {
    match id {
        LockId::BigInt(number) => format!("'{number}'::bigint"),
        LockId::Pair(first, second) => format!("'{first}'::int, '{second}'::int"),
    }
}

numbered_texts!(TryXact);

#[cfg(test)]
mod tests {
    use super::LockMode::{Exclusive, Shared};
    use super::*;

    fn lock(id: LockId, mode: LockMode) -> Lock {
        Lock { id, mode }
    }

    #[test]
    fn a_transaction_lock_is_not_tried_where_it_would_not_protect() {
        let lock = lock(LockId::BigInt(-5), Exclusive);
        assert_eq!(
            diesel::debug_query::<Pg, _>(&TryXact { lock }).to_string(),
            "SELECT CASE WHEN pg_catalog.current_setting('transaction_isolation') \
             OPERATOR(pg_catalog.=) 'repeatable read' THEN -1 \
             WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN pg_catalog.pg_try_advisory_xact_lock($1) THEN 1 ELSE 0 END -- binds: [-5]"
        );
    }

    #[test]
    fn a_message_for_a_transaction_lock_has_the_key_and_the_timeout() {
        let message = wait_for_xact(lock(LockId::BigInt(i64::MIN), Shared), 7);
        assert!(message.contains("'lock_timeout', '7', true)"));
        assert!(message.contains(
            "; SELECT pg_catalog.pg_advisory_xact_lock_shared('-9223372036854775808'::bigint); "
        ));
        let message = wait_for_xact(lock(LockId::Pair(-1, 2), Exclusive), 0);
        assert!(message.contains("SELECT pg_catalog.pg_advisory_xact_lock('-1'::int, '2'::int); "));
    }
}
