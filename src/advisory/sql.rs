//! The statements of a lock.
//!
//! **The pid in the release.** `SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock(…)
//! END` unlocks nothing on another session, and so detects a pooler in transaction mode. The crate
//! does not end that other session, because the pooler may at that moment give the session to
//! another client, and that client's statement would fail.
//!
//! **The server notices a client that has gone, so nothing is cancelled.** The statement that takes
//! a lock also sets `client_connection_check_interval`, without a further round trip. So if the
//! server has not replied within two seconds, a drop only has to close the connection. A
//! cancellation would need a second connection with the same TLS, and could hit the statement of
//! the connection's next user.
//!
//! **A `DO` block that catches `lock_not_available`.** A statement that times out would write an
//! error to the server's log for each slice, and Diesel does not say which kind of error it was.
//! The block also records a grant in a setting of the session, even a grant at the last moment, so
//! the crate never has to infer a grant from elapsed time. Each wait first clears this note,
//! outside the subtransaction, and the query that reads the note afterwards clears it again. That
//! query is volatile, so that a pooler that sends reads to a standby still asks the right session.
//!
//! **Slices of 200 ms.** If the holder runs `CREATE INDEX CONCURRENTLY`, that statement waits for
//! the snapshot of the waiter, and the waiter waits for the holder. Because a slice is shorter than
//! `deadlock_timeout`, it ends this cycle before PostgreSQL reports a deadlock.
//!
//! **A wait gets its lock and its time from two settings** that a SELECT in the same message sets.
//! A `DO` block has no parameters, and `pg_stat_statements` keeps an entry for each text of a `DO`
//! block, but replaces the constants of a SELECT.

use std::sync::LazyLock;
use std::time::Duration;

use diesel::prelude::*;
use diesel::sql_types::{Bool, Integer, Nullable, Text};

use crate::error::Result;
use crate::key::{LockId, LockKey};
use crate::statement::{Statement, database, is_elsewhere};

/// A lock, in the form that statements need.
#[derive(Debug, Clone)]
pub(crate) struct Lock {
    pub(super) key: LockKey,
    pub(super) id: LockId,
    pub(super) is_shared: bool,
}

/// The reply to a try.
#[derive(Debug, Queryable)]
pub(super) struct Tried {
    /// `taken`, `busy`, `standby`, or `repeatable read`. The last two took nothing.
    pub(super) outcome: String,
    /// The session that has the locks now, if they are session locks.
    pub(super) pid: i32,
    /// The place of the busy lock.
    pub(super) place: i32,
    /// Only in the reply to a try that waits.
    pub(super) database: Option<i32>,
    /// See [`notice_client!`].
    _noticed: Option<String>,
}

pub(super) type Try = Statement<(Text, Integer, Integer, Nullable<Integer>, Nullable<Text>)>;

/// The reply to a release.
#[derive(Debug, Queryable)]
pub(super) struct Released {
    /// Whether all locks were held. `None` on another session, which released nothing.
    pub(super) were_held: Option<bool>,
    /// The place of a lock that was not held.
    pub(super) place: i32,
}

pub(super) type Release = Statement<(Nullable<Bool>, Integer)>;

/// A statement that returns the pid of a session, or null.
pub(super) type Ask = Statement<(Nullable<Integer>,)>;

/// Ends the session with this pid, which frees what it holds. Ends no other session: a pooler may
/// run this on somebody else's. The `ROLLBACK` comes first, because an aborted transaction accepts
/// nothing else.
pub(super) fn end_session(pid: i32) -> String {
    format!(
        "ROLLBACK; SELECT CASE WHEN pg_catalog.pg_backend_pid() = {pid} \
         THEN pg_catalog.pg_terminate_backend({pid}) END"
    )
}

/// Makes the server check every second whether its client is still there, so that a lock does not
/// outlive its process while a statement runs. The expression is null, or the new setting, which
/// holds for the transaction (`true`) or the session (`false`), from the next message on.
///
/// A value that an operator has set stays. A server that cannot notice the end of a client refuses
/// the setting, for example on Windows, and PostgreSQL 14 everywhere except on Linux. So it is set
/// only where it is known to be accepted: `2_` are versions from 20 on. Patterns instead of a
/// regular expression, which would cost more than the rest of a try in each transaction.
macro_rules! notice_client {
    ($is_local:literal) => {
        concat!(
            "CASE WHEN pg_catalog.current_setting('client_connection_check_interval', true) = '0' \
             AND pg_catalog.version() LIKE ANY ('{%linux%,PostgreSQL 15%bsd%,\
             PostgreSQL 16%bsd%,PostgreSQL 17%bsd%,PostgreSQL 18%bsd%,PostgreSQL 19%bsd%,\
             PostgreSQL 2_.%bsd%,PostgreSQL 15%darwin%,PostgreSQL 16%darwin%,\
             PostgreSQL 17%darwin%,PostgreSQL 18%darwin%,PostgreSQL 19%darwin%,\
             PostgreSQL 2_.%darwin%}') \
             THEN pg_catalog.set_config('client_connection_check_interval', '1000', ",
            $is_local,
            ") END"
        )
    };
}
pub(crate) use notice_client;

/// A call of a PostgreSQL function for a [kind](Lock::kind) of lock. `number` is an SQL expression.
fn call(kind: usize, function: &str, number: &str) -> String {
    let shared = if kind % 2 == 0 { "" } else { "_shared" };
    if kind < 2 {
        format!("pg_catalog.{function}{shared}({number})")
    } else {
        format!("pg_catalog.{function}{shared}(({number} >> 32)::int, ({number} << 32 >> 32)::int)")
    }
}

/// Whether this session holds the lock. `number` is an SQL expression.
fn held_here(kind: usize, number: &str) -> String {
    let (mode, objsubid) = (["ExclusiveLock", "ShareLock"][kind % 2], 1 + kind / 2);
    format!(
        "EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory' \
         AND l.granted AND l.mode = '{mode}' AND l.pid = pg_catalog.pg_backend_pid() \
         AND l.classid = (({number} >> 32) & 4294967295)::pg_catalog.oid \
         AND l.objid = ({number} & 4294967295)::pg_catalog.oid AND l.objsubid = {objsubid})"
    )
}

/// The text of a prepared statement for each [kind](Lock::kind) of lock. `text` gets a function
/// that writes a [`call`] for that kind. The number of the lock is `$1`.
fn texts(text: impl Fn(&dyn Fn(&str) -> String) -> String) -> [String; 4] {
    [0, 1, 2, 3].map(|kind| text(&|function| call(kind, function, "$1")))
}

/// The variables `number` and `milliseconds` of a block that waits. The block cannot have
/// parameters, and `pg_stat_statements` would keep an entry for each text. So the numbers come in
/// two settings, from a SELECT in the same message, and the settings are emptied again, because the
/// transaction may be the caller's.
macro_rules! wait_for {
    () => {
        "number CONSTANT bigint := pg_catalog.current_setting('diesel_interlock.lock'); \
         milliseconds CONSTANT int := pg_catalog.current_setting('diesel_interlock.limit'); \
         emptied CONSTANT boolean := \
         pg_catalog.set_config('diesel_interlock.lock', '', true) IS NULL \
         OR pg_catalog.set_config('diesel_interlock.limit', '', true) IS NULL; \
         before CONSTANT pg_catalog.text := pg_catalog.current_setting('lock_timeout'); "
    };
}

/// Waits for a transaction lock, for each [kind](Lock::kind) of lock.
static WAIT_XACT: LazyLock<[String; 4]> = LazyLock::new(|| {
    [0, 1, 2, 3].map(|kind| {
        let call = call(kind, "pg_advisory_xact_lock", "number");
        format!(
            "DO $$ DECLARE {} own CONSTANT int := \
             (SELECT setting FROM pg_catalog.pg_settings WHERE name = 'lock_timeout'); \
             BEGIN IF own BETWEEN 1 AND milliseconds THEN PERFORM {call}; RETURN; END IF; \
             BEGIN PERFORM pg_catalog.set_config('lock_timeout', milliseconds::pg_catalog.text, \
             true); \
             PERFORM {call}; PERFORM pg_catalog.set_config('lock_timeout', before, true); \
             EXCEPTION WHEN lock_not_available THEN NULL; END; END $$",
            wait_for!()
        )
    })
});

/// Waits for a session lock, for each [kind](Lock::kind) of lock.
///
/// `lock_timeout` is restored in any case: by the block itself, or by PostgreSQL, which rolls the
/// subtransaction back after an error. Such a rollback does not give back a session lock, so the
/// handler checks whether the lock is held. The rollback would also bring back the note of an
/// earlier wait, so that note is cleared before the subtransaction begins.
static WAIT: LazyLock<[String; 4]> = LazyLock::new(|| {
    [0, 1, 2, 3].map(|kind| {
        let call = call(kind, "pg_advisory_lock", "number");
        let held = held_here(kind, "number");
        let note = "PERFORM pg_catalog.set_config('diesel_interlock.waited', 'granted', false);";
        format!(
            "DO $$ DECLARE {} cleared pg_catalog.text := \
             pg_catalog.set_config('diesel_interlock.waited', '', false); \
             BEGIN PERFORM pg_catalog.set_config('lock_timeout', milliseconds::pg_catalog.text, \
             true); \
             PERFORM {call}; PERFORM pg_catalog.set_config('lock_timeout', before, true); {note} \
             EXCEPTION WHEN lock_not_available THEN IF {held} THEN {note} END IF; END $$",
            wait_for!()
        )
    })
});

/// What a try returns beside its outcome. Only the text of a wait tells the database.
pub(super) fn columns_of_try(is_local: bool, is_wait: bool) -> String {
    let (noticed, database) = (
        [notice_client!("false"), notice_client!("true")][usize::from(is_local)],
        ["NULL::int", database!()][usize::from(is_wait)],
    );
    format!("{database} AS database, {noticed} AS noticed")
}

/// Outside of a transaction a session is read-only only where the primary is elsewhere. A try that
/// does not wait, and one that does.
static TAKE: LazyLock<[[String; 4]; 2]> = LazyLock::new(|| {
    [false, true].map(|is_wait| {
        texts(|call| {
            format!(
                "SELECT CASE \
                 WHEN pg_catalog.current_setting('transaction_read_only') = 'on' THEN 'standby' \
                 WHEN {} THEN 'taken' ELSE 'busy' END AS outcome, \
                 pg_catalog.pg_backend_pid() AS pid, 0 AS place, {}",
                call("pg_try_advisory_lock"),
                columns_of_try(false, is_wait)
            )
        })
    })
});

static RELEASE: LazyLock<[String; 4]> = LazyLock::new(|| {
    texts(|call| {
        format!(
            "SELECT CASE WHEN pg_catalog.pg_backend_pid() = $2 THEN {} END AS were_held, \
             0 AS place",
            call("pg_advisory_unlock")
        )
    })
});

static TRY_XACT: LazyLock<[String; 4]> = LazyLock::new(|| {
    texts(|call| {
        format!(
            "SELECT CASE \
             WHEN pg_catalog.current_setting('transaction_isolation') = 'repeatable read' \
             THEN 'repeatable read' WHEN {} THEN 'standby' \
             WHEN {} THEN 'taken' ELSE 'busy' END AS outcome, \
             0 AS pid, 0 AS place, {}",
            is_elsewhere!(),
            call("pg_try_advisory_xact_lock"),
            columns_of_try(true, false)
        )
    })
});

/// Reads and clears the note of the last wait: the pid of the session if the lock was granted, and
/// otherwise null. The statement is volatile, so that no pooler sends it to a standby.
pub(super) fn read_wait() -> Statement<(Nullable<Integer>, Text)> {
    const WAITED: &str = "SELECT \
         CASE WHEN pg_catalog.current_setting('diesel_interlock.waited', true) = 'granted' \
         THEN pg_catalog.pg_backend_pid() END AS pid, \
         pg_catalog.set_config('diesel_interlock.waited', '', false) AS cleared";
    Statement::new(WAITED, [])
}

impl Lock {
    pub(crate) fn new(key: LockKey, is_shared: bool) -> Result<Self> {
        Ok(Self {
            id: key.id()?,
            key,
            is_shared,
        })
    }

    /// A `bigint`, a shared `bigint`, a pair, or a shared pair: 0 to 3.
    pub(super) fn kind(&self) -> usize {
        let of_shared = usize::from(self.is_shared);
        match self.id {
            LockId::BigInt(_) => of_shared,
            LockId::Pair(..) => 2 + of_shared,
        }
    }

    /// The number, or both numbers of a pair in one, the first in the high bits.
    pub(super) fn number(&self) -> i64 {
        match self.id {
            LockId::BigInt(number) => number,
            LockId::Pair(first, second) => i64::from(first) << 32 | i64::from(second as u32),
        }
    }

    /// Takes a session lock if it is free.
    pub(super) fn take(&self, is_wait: bool) -> Try {
        let sql = TAKE[usize::from(is_wait)][self.kind()].as_str();
        Statement::new(sql, [self.number().into()])
    }

    /// Releases a session lock if this is the session that took it.
    pub(super) fn release(&self, pid: i32) -> Release {
        let binds = [self.number().into(), pid.into()];
        Statement::new(RELEASE[self.kind()].as_str(), binds)
    }

    /// Takes a transaction lock if it is free.
    pub(super) fn try_xact(&self) -> Try {
        Statement::new(TRY_XACT[self.kind()].as_str(), [self.number().into()])
    }

    /// Waits for a transaction lock, in a message of its own.
    pub(super) fn xact(&self) -> String {
        format!("SELECT {}", self.call("pg_advisory_xact_lock"))
    }

    /// As [`xact`](Self::xact), for at most `limit`, after which the transaction is as usable as
    /// before. A `lock_timeout` of the session's own that is shorter applies instead, and is an
    /// error, as in any other statement.
    pub(super) fn xact_within(&self, limit: Duration) -> String {
        self.wait_in(&WAIT_XACT, limit)
    }

    /// Waits for a session lock for at most `limit`, and notes in the session whether the lock was
    /// granted, even at the last moment.
    pub(super) fn wait(&self, limit: Duration) -> String {
        self.wait_in(&WAIT, limit)
    }

    fn wait_in(&self, blocks: &[String; 4], limit: Duration) -> String {
        let (number, block) = (self.number(), &blocks[self.kind()]);
        let milliseconds = milliseconds(limit);
        format!(
            "SELECT pg_catalog.set_config('diesel_interlock.lock', '{number}', true), \
             pg_catalog.set_config('diesel_interlock.limit', '{milliseconds}', true); {block}"
        )
    }

    /// Releases a session lock if this session holds it, in a message that returns nothing.
    pub(super) fn late_undo(&self) -> String {
        let held = held_here(self.kind(), &self.literal());
        let call = self.call("pg_advisory_unlock");
        format!("SELECT CASE WHEN {held} THEN {call} END AS was_held")
    }

    /// As [`release`](Self::release), in a message that returns nothing.
    pub(super) fn late_release(&self, pid: i32) -> String {
        let call = self.call("pg_advisory_unlock");
        format!("SELECT CASE WHEN pg_catalog.pg_backend_pid() = {pid} THEN {call} END AS was_held")
    }

    /// A call of a function in a message without parameters.
    fn call(&self, function: &str) -> String {
        call(self.kind(), function, &self.literal())
    }

    /// Quoted: a bare `-9223372036854775808` parses as minus an out-of-range literal.
    fn literal(&self) -> String {
        format!("'{}'::bigint", self.number())
    }
}

fn milliseconds(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).max(1)
}
