//! Messages that release a session lock, and wait for no reply. A `Drop` queues them on an asynchronous connection.
//!
//! They have no parameters, because a message with parameters waits for the reply to its preparation.

use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::Bool;

use super::xact::literal;
use crate::advisory::lock::Lock;

statement! {
    /// Returns whether the `idle_session_timeout` was switched off in the session, as a try does that lifts it.
    pub(super) struct IsIdleTimeoutOff {} -> Bool,
    |self, out| {
        out.push_sql(
            "SELECT COALESCE(pg_catalog.current_setting('idle_session_timeout', true) \
             OPERATOR(pg_catalog.=) '0' AND (SELECT source OPERATOR(pg_catalog.=) 'session' \
             FROM pg_catalog.pg_settings WHERE name OPERATOR(pg_catalog.=) 'idle_session_timeout'), \
             false)",
        );
    }
}

/// What the release of a lock depends on.
#[derive(Debug, Clone, Copy)]
pub(in crate::advisory) enum Condition<'a> {
    /// The session is the one with this pid.
    Session(i32),
    /// The statement with this number ran.
    Ran(&'a str),
    /// The statement with this number did not run, and the session is the one with this pid.
    DidNotRun(&'a str, i32),
    /// None. PostgreSQL only warns if the lock is not held.
    None,
}

/// Releases a session lock, if the condition holds. Restores the `idle_session_timeout` that was lifted for it.
pub(in crate::advisory) fn release_if(
    condition: Condition<'_>,
    lock: Lock,
    idle_session_timeout: Option<&str>,
) -> String {
    let ran = "pg_catalog.current_setting('diesel_interlock.ran', true)";
    let is = |pid| format!("pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {pid}");
    let condition = match condition {
        Condition::Session(pid) => is(pid),
        Condition::Ran(number) => format!("{ran} OPERATOR(pg_catalog.=) '{number}'"),
        Condition::DidNotRun(number, pid) => {
            format!("{ran} IS DISTINCT FROM '{number}' AND {}", is(pid))
        }
        Condition::None => "true".to_owned(),
    };
    let unlock = lock.mode.unlock_function();
    let key = literal(lock.id);
    let mut message = format!("SELECT CASE WHEN {condition} THEN pg_catalog.{unlock}({key}) END");
    if let Some(value) = idle_session_timeout {
        let value = value.replace('\'', "''");
        message +=
            &format!("; SELECT pg_catalog.set_config('idle_session_timeout', '{value}', false)");
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advisory::lock::LockMode;
    use crate::key::LockId;

    #[test]
    fn the_number_of_a_lock_is_quoted_and_the_mode_has_its_function() {
        let lock = Lock {
            id: LockId::BigInt(-5),
            mode: LockMode::Shared,
        };
        assert_eq!(
            release_if(Condition::None, lock, None),
            "SELECT CASE WHEN true THEN pg_catalog.pg_advisory_unlock_shared('-5'::bigint) END"
        );
        let message = release_if(Condition::DidNotRun("1.2", 7), lock, Some("'5s'"));
        assert!(message.contains(
            " IS DISTINCT FROM '1.2' AND pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) 7 THEN"
        ));
        assert!(message.ends_with("set_config('idle_session_timeout', '''5s''', false)"));
    }
}
