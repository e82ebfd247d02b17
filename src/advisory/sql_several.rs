//! The statements of several locks. For a single lock, `take`, `release` and `try_xact` use the
//! statements of that lock, with replies of the same columns.
//!
//! A place counts from 0, in the order of [`Locks`].
//!
//! **A recursive query stops at the first busy key, and then releases what it took.** Each step
//! uses the single row of the step before, so the planner can neither move, merge nor repeat a
//! step, as it may with `WHERE pg_try_advisory_lock(…)` over many rows. Locks of a transaction
//! cannot be released one by one, so in a transaction a savepoint takes the place of the release.
//!
//! **A waiter holds none of the locks**, and waits in the queue of the one that was busy. So there
//! is no deadlock. But if other processes keep many of the locks busy in turns, it may take long
//! until all are free at once.

use std::sync::LazyLock;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text};

use super::all::{Busy, Locks};
use super::sql::{Ask, Lock, Release, Try, columns_of_try};
use crate::statement::{Bind, Statement, is_elsewhere, keep_commit};

/// A call of a function for each kind of lock, over the columns `kind` and `number`.
macro_rules! by_column {
    ($function:literal) => {
        concat!(
            "CASE kind WHEN 0 THEN pg_catalog.",
            $function,
            "(number) WHEN 1 THEN pg_catalog.",
            $function,
            "_shared(number) WHEN 2 THEN pg_catalog.",
            $function,
            "((number >> 32)::int, (number << 32 >> 32)::int) ELSE pg_catalog.",
            $function,
            "_shared((number >> 32)::int, (number << 32 >> 32)::int) END"
        )
    };
}

/// The rows of `pg_locks` of the sessions that hold the lock in the columns `kind` and `number`.
macro_rules! join_locks {
    () => {
        "JOIN pg_catalog.pg_locks AS l ON l.locktype = 'advisory' AND l.granted \
         AND l.objsubid = 1 + kind / 2 \
         AND l.classid = ((number >> 32) & 4294967295)::pg_catalog.oid \
         AND l.objid = (number & 4294967295)::pg_catalog.oid"
    };
}

/// The rows of `pg_locks` for those of the locks that this session holds.
const HELD_HERE: &str = concat!(
    "FROM unnest($1::bigint[], $2::bigint[]) AS key (kind, number) ",
    join_locks!(),
    " AND l.pid = pg_catalog.pg_backend_pid() \
     AND l.mode = CASE kind % 2::bigint WHEN 0 THEN 'ExclusiveLock' ELSE 'ShareLock' END"
);

/// Takes one lock after the other, up to the first that is busy. Then walks back, and gives up the
/// locks before it.
///
/// The order is certain, so no lock is taken that is not wanted: each step of the recursion is made
/// of the one row of the step before, and the planner does not move, merge or repeat parts of a
/// recursion.
fn steps(refusal: &str, take: &str, give_up: &str, columns: &str) -> String {
    format!(
        "WITH RECURSIVE step (place, is_forward, is_done) AS ( \
         SELECT $1::int, {refusal} IS NULL, true \
         UNION ALL \
         SELECT place, is_forward, CASE WHEN is_forward THEN {take} ELSE {give_up} END FROM ( \
         SELECT place, is_forward, \
         ($2::bigint[])[place] AS kind, ($3::bigint[])[place] AS number FROM ( \
         SELECT CASE WHEN is_forward AND is_done THEN place + 1 ELSE place - 1 END AS place, \
         is_forward AND is_done AS is_forward FROM step) AS next \
         WHERE place BETWEEN 1 AND pg_catalog.cardinality($2)) AS key) \
         SELECT COALESCE({refusal}, CASE WHEN pg_catalog.bool_and(is_forward AND is_done) \
         THEN 'taken' ELSE 'busy' END) AS outcome, pg_catalog.pg_backend_pid() AS pid, \
         pg_catalog.max(place) - 1 AS place, {columns} FROM step"
    )
}

static TAKE: LazyLock<String> = LazyLock::new(|| {
    steps(
        "CASE WHEN pg_catalog.current_setting('transaction_read_only') = 'on' THEN 'standby' END",
        by_column!("pg_try_advisory_lock"),
        by_column!("pg_advisory_unlock"),
        &columns_of_try(false, true),
    )
});

/// To give up is `true` here, which does nothing: a transaction gives a lock up only by rolling
/// back to a savepoint.
static TRY_XACT: LazyLock<String> = LazyLock::new(|| {
    steps(
        concat!(
            "CASE WHEN pg_catalog.current_setting('transaction_isolation') = 'repeatable read' \
             THEN 'repeatable read' WHEN ",
            is_elsewhere!(),
            " THEN 'standby' END"
        ),
        by_column!("pg_try_advisory_xact_lock"),
        "true",
        &columns_of_try(true, false),
    )
});

static IS_HELD: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT CASE WHEN pg_catalog.count(*) = pg_catalog.cardinality($1) \
         THEN pg_catalog.max(l.pid) END AS pid {HELD_HERE}"
    )
});

static UNDO: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT pg_catalog.max(({})::int) AS was_held {HELD_HERE}",
        by_column!("pg_advisory_unlock")
    )
});

/// The commit of a transaction that only draws from a sequence does not wait for the log, so after
/// a crash of the server the same number could be drawn again. A message in the log makes it wait.
static TOKEN: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT CASE WHEN is_held \
         THEN resource_control.next_token('resource_control.fencing_token') END AS token, \
         pg_catalog.pg_backend_pid() AS pid, CASE WHEN is_held THEN {} END AS synchronous_commit, \
         CASE WHEN is_held THEN pg_catalog.pg_logical_emit_message(true, 'diesel_interlock', \
         ''::pg_catalog.text) IS NOT NULL END AS is_logged \
         FROM (SELECT pg_catalog.count(*) = pg_catalog.cardinality($1) \
         AND pg_catalog.pg_backend_pid() = $3 AS is_held {HELD_HERE}) AS held",
        keep_commit!()
    )
});

/// The reply to [`Locks::token`].
#[derive(Debug, Queryable)]
pub(super) struct Drawn {
    /// `None` if not all locks are held.
    pub(super) token: Option<i64>,
    /// The session that replied.
    pub(super) pid: i32,
    _synchronous_commit: Option<String>,
    _is_logged: Option<bool>,
}

type Token = Statement<(Nullable<BigInt>, Integer, Nullable<Text>, Nullable<Bool>)>;

impl Locks {
    /// Takes all session locks if all are free.
    pub(super) fn take(&self, is_wait: bool) -> Try {
        match &*self.0 {
            [lock] => lock.take(is_wait),
            all => Statement::new(TAKE.as_str(), binds(0, all)),
        }
    }

    /// As [`take`](Self::take), where the lock `held` is held already. That lock is given up, too,
    /// if another one is busy.
    pub(super) fn take_others(&self, held: Busy) -> Try {
        let mut order = vec![self.get(held).clone()];
        let others = self.0.iter().filter(|lock| lock.id != order[0].id).cloned();
        order.extend(others.collect::<Vec<_>>());
        Statement::new(TAKE.as_str(), binds(1, &order))
    }

    /// Releases all session locks if this is the session that took them.
    pub(super) fn release(&self, pid: i32) -> Release {
        const RELEASE: &str = concat!(
            "SELECT pg_catalog.bool_and(was_held) AS were_held, \
             COALESCE(pg_catalog.min(place) FILTER (WHERE NOT was_held), 1)::int - 1 AS place \
             FROM (SELECT place, ",
            by_column!("pg_advisory_unlock"),
            " AS was_held FROM \
             unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS key (kind, number, place) \
             WHERE pg_catalog.pg_backend_pid() = $3) AS released"
        );
        match &*self.0 {
            [lock] => lock.release(pid),
            all => Statement::new(RELEASE, columns(all).into_iter().chain([pid.into()])),
        }
    }

    /// The pid of the session if it holds all locks, and otherwise null.
    pub(super) fn is_held(&self) -> Ask {
        Statement::new(IS_HELD.as_str(), columns(&self.0))
    }

    /// Releases the locks that this session holds.
    pub(super) fn undo(&self) -> Ask {
        Statement::new(UNDO.as_str(), columns(&self.0))
    }

    /// The pid of a session that holds one of the locks.
    pub(super) fn holder(&self) -> Ask {
        const HOLDER: &str = concat!(
            "SELECT pg_catalog.min(l.pid) AS pid \
             FROM unnest($1::bigint[], $2::bigint[]) AS key (kind, number) ",
            join_locks!(),
            " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d \
             WHERE d.datname = pg_catalog.current_database())"
        );
        Statement::new(HOLDER, columns(&self.0))
    }

    /// Draws a fencing token if this is the session with this pid and it holds all locks. Also
    /// returns the pid of the session.
    pub(super) fn token(&self, pid: i32) -> Token {
        Statement::new(
            TOKEN.as_str(),
            columns(&self.0).into_iter().chain([pid.into()]),
        )
    }

    /// Takes transaction locks up to the first that is busy.
    pub(super) fn try_xact(&self) -> Try {
        match &*self.0 {
            [lock] => lock.try_xact(),
            all => Statement::new(TRY_XACT.as_str(), binds(0, all)),
        }
    }

    /// As [`release`](Self::release), in a message that returns nothing.
    pub(super) fn late_release(&self, pid: i32) -> String {
        let all: Vec<_> = self.0.iter().map(|lock| lock.late_release(pid)).collect();
        all.join("; ")
    }

    /// As [`undo`](Self::undo), in a message that returns nothing.
    pub(super) fn late_undo(&self) -> String {
        let all: Vec<_> = self.0.iter().map(Lock::late_undo).collect();
        all.join("; ")
    }
}

fn binds(first: i32, locks: &[Lock]) -> Vec<Bind> {
    let [kinds, numbers] = columns(locks);
    vec![first.into(), kinds, numbers]
}

/// The columns `kind` and `number`.
fn columns(locks: &[Lock]) -> [Bind; 2] {
    let kinds = locks.iter().map(|lock| lock.kind() as i64);
    let numbers = locks.iter().map(Lock::number);
    [
        kinds.collect::<Vec<_>>().into(),
        numbers.collect::<Vec<_>>().into(),
    ]
}
