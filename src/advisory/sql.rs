//! The statements of a lock. Most return one number, or null.

use std::fmt::Display;
use std::time::Duration;

use diesel::sql_types::{BigInt, Bool, Integer, Nullable};

use crate::error::Result;
use crate::key::{LockId, LockKey};
use crate::statement::{Bind, Statement};

/// A lock as statements name it.
#[derive(Debug, Clone)]
pub(crate) struct Lock {
    pub(super) key: LockKey,
    pub(super) id: LockId,
    pub(super) is_shared: bool,
}

pub(super) type Ask = Statement<(Nullable<Integer>,)>;

/// Ends this session, which frees what it holds. In an aborted transaction nothing runs but the roll-back.
pub(super) const END_SESSION: &str =
    "ROLLBACK; SELECT pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())";

/// One text for each kind of lock: with `$call`, a call of the function.
macro_rules! by_kind {
    ($lock:expr, $first:literal, $second:literal, $before:literal $function:literal $after:literal) => {
        match ($lock.id, $lock.is_shared) {
            (LockId::BigInt(_), false) => {
                concat!($before, "pg_catalog.", $function, "(", $first, ")", $after)
            }
            (LockId::BigInt(_), true) => concat!(
                $before,
                "pg_catalog.",
                $function,
                "_shared(",
                $first,
                ")",
                $after
            ),
            (LockId::Pair(..), false) => {
                concat!(
                    $before,
                    "pg_catalog.",
                    $function,
                    "(",
                    $first,
                    ", ",
                    $second,
                    ")",
                    $after
                )
            }
            (LockId::Pair(..), true) => {
                concat!(
                    $before,
                    "pg_catalog.",
                    $function,
                    "_shared(",
                    $first,
                    ", ",
                    $second,
                    ")",
                    $after
                )
            }
        }
    };
}

/// The pid of the session, if the wait with this number was granted the lock.
pub(super) fn waited(number: i32) -> Ask {
    const WAITED: &str = "SELECT CASE WHEN pg_catalog.current_setting('diesel_interlock.waited', true) = $1::pg_catalog.text \
                          THEN pg_catalog.pg_backend_pid() END";
    Statement::new(WAITED, [number.into()])
}

/// A fencing token, and null on another session than that with this pid.
pub(super) fn token(pid: i32) -> Statement<(Nullable<BigInt>,)> {
    const TOKEN: &str = "SELECT CASE WHEN pg_catalog.pg_backend_pid() = $1 \
                         THEN pg_catalog.nextval('resource_control.fencing_token') END";
    Statement::new(TOKEN, [pid.into()])
}

/// The reply of a try in a transaction of this isolation level.
pub(super) const REPEATABLE_READ: i32 = i32::MIN;

impl Lock {
    pub(crate) fn new(key: LockKey, is_shared: bool) -> Result<Self> {
        Ok(Self {
            id: key.id()?,
            key,
            is_shared,
        })
    }

    fn binds(&self) -> Vec<Bind> {
        match self.id {
            LockId::BigInt(number) => vec![number.into()],
            LockId::Pair(first, second) => vec![first.into(), second.into()],
        }
    }

    /// Takes a session lock if it is free: the pid of the session, 0 on a standby, and null if it is taken.
    pub(super) fn take(&self) -> Ask {
        let sql = by_kind!(self, "$1", "$2", "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN 0 WHEN "
            "pg_try_advisory_lock" " THEN pg_catalog.pg_backend_pid() END");
        Statement::new(sql, self.binds())
    }

    /// Releases a session lock if this is the session that took it: whether it was held, and null on another session.
    pub(super) fn release(&self, pid: i32) -> Ask {
        let sql = by_kind!(self, "$2", "$3", "SELECT CASE WHEN pg_catalog.pg_backend_pid() = $1 THEN "
            "pg_advisory_unlock" "::int END");
        Statement::new(sql, [pid.into()].into_iter().chain(self.binds()))
    }

    /// The pid of the session if it holds the lock, and null if it does not.
    pub(super) fn is_held(&self) -> Ask {
        let (classid, objid, _) = self.row();
        let held = self.held("$1", "$2", "pg_catalog.pg_backend_pid()");
        Statement::new(
            format!("SELECT pg_catalog.max(pid) {held}"),
            [i64::from(classid).into(), i64::from(objid).into()],
        )
    }

    /// Releases a session lock if this session holds it.
    pub(super) fn undo(&self) -> Ask {
        let held = self.held_here();
        let call = self.call("pg_advisory_unlock");
        Statement::new(
            format!("SELECT CASE WHEN EXISTS (SELECT {held}) THEN {call}::int END"),
            [],
        )
    }

    /// Ends the session with this pid if it still holds the lock and is idle: a pooler has lent it to nobody.
    pub(super) fn end_other(&self, pid: i32) -> Statement<Bool> {
        let (classid, objid, _) = self.row();
        let held = self.held(format!("'{classid}'"), format!("'{objid}'"), "a.pid");
        Statement::new(
            format!(
                "SELECT COALESCE(pg_catalog.bool_or(pg_catalog.pg_terminate_backend(a.pid)), false) \
                 FROM pg_catalog.pg_stat_activity AS a \
                 WHERE a.pid = $1 AND a.state = 'idle' AND EXISTS (SELECT {held})"
            ),
            [pid.into()],
        )
    }

    /// A session that holds the lock.
    pub(super) fn holder(&self) -> Ask {
        let (classid, objid, objsubid) = self.row();
        Statement::new(
            format!(
                "SELECT pg_catalog.min(pid) FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND granted \
                 AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()) \
                 AND classid = '{classid}'::oid AND objid = '{objid}'::oid AND objsubid = {objsubid}"
            ),
            [],
        )
    }

    /// Takes a transaction lock if it is free: 1, 0 on a standby, [`REPEATABLE_READ`], and null if it is taken.
    pub(super) fn try_xact(&self) -> Ask {
        let sql = by_kind!(self, "$1", "$2", "SELECT CASE \
            WHEN pg_catalog.current_setting('transaction_isolation') = 'repeatable read' THEN '-2147483648'::int \
            WHEN pg_catalog.pg_is_in_recovery() THEN 0 WHEN "
            "pg_try_advisory_xact_lock" " THEN 1 END");
        Statement::new(sql, self.binds())
    }

    /// Waits for a transaction lock, in a message of its own. If the client goes away meanwhile, the server notices within a second.
    pub(super) fn xact(&self) -> String {
        format!(
            "{NOTICE_CLIENT}; SELECT {}",
            self.call("pg_advisory_xact_lock")
        )
    }

    /// As [`xact`](Self::xact), for a time, after which the transaction is as usable as before. A shorter `lock_timeout` of the
    /// session's own is an error, as in any other statement.
    pub(super) fn xact_within(&self, limit: Duration) -> String {
        let call = self.call("pg_advisory_xact_lock");
        let milliseconds = milliseconds(limit);
        format!(
            "{NOTICE_CLIENT}; DO $$ DECLARE before pg_catalog.text := pg_catalog.current_setting('lock_timeout'); \
             own CONSTANT int := (SELECT setting FROM pg_catalog.pg_settings WHERE name = 'lock_timeout'); BEGIN \
             IF own BETWEEN 1 AND {milliseconds} THEN PERFORM {call}; RETURN; END IF; \
             BEGIN PERFORM pg_catalog.set_config('lock_timeout', '{milliseconds}', true); PERFORM {call}; \
             PERFORM pg_catalog.set_config('lock_timeout', before, true); \
             EXCEPTION WHEN lock_not_available THEN NULL; END; END $$"
        )
    }

    /// Waits for a session lock for a time, and notes this number in the session if it was granted, also at the last moment.
    ///
    /// `lock_timeout` is restored in any case: by hand, or with the subtransaction that PostgreSQL rolls back. A subtransaction
    /// does not give back a session lock.
    pub(super) fn wait(&self, limit: Duration, number: i32) -> String {
        let (call, held) = (self.call("pg_advisory_lock"), self.held_here());
        let milliseconds = milliseconds(limit);
        let note =
            format!("PERFORM pg_catalog.set_config('diesel_interlock.waited', '{number}', false);");
        format!(
            "DO $$ DECLARE before pg_catalog.text := pg_catalog.current_setting('lock_timeout'); BEGIN \
             PERFORM pg_catalog.set_config('lock_timeout', '{milliseconds}', true); PERFORM {call}; \
             PERFORM pg_catalog.set_config('lock_timeout', before, true); {note} \
             EXCEPTION WHEN lock_not_available THEN IF EXISTS (SELECT {held}) THEN {note} END IF; END $$"
        )
    }

    /// As [`release`](Self::release), in a message that returns nothing.
    pub(super) fn late_release(&self, pid: i32) -> String {
        let call = self.call("pg_advisory_unlock");
        format!("SELECT CASE WHEN pg_catalog.pg_backend_pid() = {pid} THEN {call} END")
    }

    /// A call of a function in a message without parameters. In quotes, because the least number is none without its sign.
    fn call(&self, function: &str) -> String {
        let shared = if self.is_shared { "_shared" } else { "" };
        match self.id {
            LockId::BigInt(number) => format!("pg_catalog.{function}{shared}('{number}'::bigint)"),
            LockId::Pair(first, second) => {
                format!("pg_catalog.{function}{shared}('{first}'::int, '{second}'::int)")
            }
        }
    }

    fn held_here(&self) -> String {
        let (classid, objid, _) = self.row();
        self.held(
            format!("'{classid}'"),
            format!("'{objid}'"),
            "pg_catalog.pg_backend_pid()",
        )
    }

    /// The rows of `pg_locks` where a session holds the lock.
    fn held(&self, classid: impl Display, objid: impl Display, pid: &str) -> String {
        let (.., objsubid) = self.row();
        let mode = if self.is_shared {
            "ShareLock"
        } else {
            "ExclusiveLock"
        };
        format!(
            "FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory' AND l.granted AND l.mode = '{mode}' AND l.pid = {pid} \
             AND l.classid = {classid}::oid AND l.objid = {objid}::oid AND l.objsubid = {objsubid}"
        )
    }

    /// `classid`, `objid` and `objsubid` in `pg_locks`.
    const fn row(&self) -> (u32, u32, u32) {
        match self.id {
            LockId::BigInt(number) => ((number >> 32) as u32, number as u32, 1),
            LockId::Pair(first, second) => (first as u32, second as u32, 2),
        }
    }
}

/// It is read when a statement begins, so it stands in one of its own. A shorter one of the session's own stays. Servers that cannot
/// notice it have the setting and refuse it: those on Windows, and of PostgreSQL 14 all but those on Linux.
const NOTICE_CLIENT: &str = "SELECT pg_catalog.set_config(name, '1000', true) FROM pg_catalog.pg_settings \
     WHERE name = 'client_connection_check_interval' AND setting::int NOT BETWEEN 1 AND 1000 \
     AND (pg_catalog.version() ~ 'linux' OR pg_catalog.version() !~* 'windows|mingw|visual c' \
     AND pg_catalog.current_setting('server_version_num')::int >= 150000)";

fn milliseconds(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).max(1)
}
