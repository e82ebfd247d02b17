//! The statements of a rate limit.
//!
//! The generic cell rate algorithm with one row per key: `full_at` is when the key will be full. A
//! grant reads the clock three times, in this order: for the condition, for `spent_at`, for
//! `full_at`. Because of this order the promise holds in every interleaving.

use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::prelude::*;
use diesel::sql_types::{Array, BigInt, Bool, Double, Integer, Interval, Nullable, Timestamptz};

use super::quota::Exact;
use crate::call::{BATCH, Question};
use crate::input::difference;
use crate::statement::{Bind, Statement, database, keep_commit};

/// A call: who spends how many units under which quota.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) name: &'a str,
    pub(super) key: &'a str,
    pub(super) quota: Exact,
    pub(super) cost: u32,
}

/// How the transaction of a check commits. In a transaction of the check's own, the wait for
/// another transaction's row is limited, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Commit {
    Async,
    Durable,
    /// The transaction is the caller's, and its settings stay as they are.
    Callers,
}

/// The reply to a check.
#[derive(Debug, Queryable)]
pub(super) struct Row {
    /// When the units were spent, and `None` if they were not.
    pub(super) spent_at: Option<PgTimestamp>,
    /// In how long the key is full.
    full_in: PgInterval,
    /// The quota under which the key owes.
    unit_us: f64,
    /// Only in the reply to a check that waits.
    pub(super) database: Option<i32>,
}

type RowSql = (Nullable<Timestamptz>, Interval, Double, Nullable<Integer>);

/// Decides the common cases: the key has a row of this quota, or it is limited. A denial only
/// reads. The `CASE` keeps the planner from evaluating `set_config` first, which would make denials
/// slower. Returns no row for a key without one. Reads `r` as it was when the statement began, also
/// if the update has waited since for another transaction.
macro_rules! decide {
    ($limit:expr, $commit:expr, $database:expr) => {
        concat!(
            "WITH spent AS (
                UPDATE resource_control.rate_limit AS r SET spent_at = pg_catalog.clock_timestamp(),
                        full_at = GREATEST(r.full_at, pg_catalog.clock_timestamp()) + $6
                    WHERE r.name = $1 AND r.key = $2 AND r.unit_us = $3 AND r.burst = $4
                        AND CASE WHEN r.full_at <= pg_catalog.clock_timestamp() + $5 THEN ",
            $limit,
            " ELSE false END
                    RETURNING r.spent_at, r.full_at",
            $commit,
            ")
            SELECT s.spent_at, COALESCE(s.full_at, r.full_at) - pg_catalog.clock_timestamp()
                        AS full_in, r.unit_us, ",
            $database,
            " AS database
                FROM resource_control.rate_limit AS r LEFT JOIN spent AS s ON true
                WHERE r.name = $1 AND r.key = $2"
        )
    };
}

/// Prepares the other cases: a key without a row gets a full one, and what a key owes under another
/// quota is rescaled. Returns no row, and spends nothing, so `decide!` is sent once more and
/// decides. It cannot spend by itself: the times of a new row are read before the wait for other
/// transactions with this key, which may have spent units, and whose row may have been pruned
/// meanwhile.
macro_rules! prepare {
    ($limit:expr, $commit:expr) => {
        concat!(
            "WITH made AS (
                INSERT INTO resource_control.rate_limit AS r
                        (since, spent_at, full_at, name, key, unit_us, burst)
                    SELECT pg_catalog.clock_timestamp(), pg_catalog.clock_timestamp(),
                            pg_catalog.clock_timestamp(), $1, $2, $3, $4
                        WHERE NOT EXISTS (SELECT FROM resource_control.rate_limit AS o
                            WHERE o.name = $1 AND o.key = $2 AND o.unit_us = $3 AND o.burst = $4)
                            AND ",
            $limit,
            "
                    ON CONFLICT (name, key) DO UPDATE SET
                        since = CASE WHEN r.unit_us = $3 THEN r.since
                            ELSE pg_catalog.clock_timestamp() END,
                        full_at = resource_control.rate_limit_full_at(r.full_at, r.unit_us, $3),
                        unit_us = $3, burst = $4
                    WHERE resource_control.rate_limit_full_at(r.full_at, r.unit_us, $3)
                        <= pg_catalog.clock_timestamp() + $5
                    RETURNING r.spent_at",
            $commit,
            ")
            SELECT m.spent_at, interval '0' AS full_in, '0'::double precision AS unit_us,
                    NULL::int AS database
                FROM made AS m WHERE false"
        )
    };
}

/// Limits the wait for another transaction's row lock.
macro_rules! limit {
    () => {
        "pg_catalog.set_config('lock_timeout', '250ms', true) IS NOT NULL"
    };
}

/// Commits without waiting for the disk.
macro_rules! commit_async {
    () => {
        ", pg_catalog.set_config('synchronous_commit', 'off', true)"
    };
}

/// Indexed by [`Commit`]: for each, `decide!` without and with the database, and `prepare!`.
const CHECKS: [[&str; 3]; 3] = [
    [
        decide!(limit!(), commit_async!(), "NULL::int"),
        decide!(limit!(), commit_async!(), database!()),
        prepare!(limit!(), commit_async!()),
    ],
    [
        decide!(limit!(), concat!(", ", keep_commit!()), "NULL::int"),
        decide!(limit!(), concat!(", ", keep_commit!()), database!()),
        prepare!(limit!(), concat!(", ", keep_commit!())),
    ],
    [
        decide!("true", "", "NULL::int"),
        decide!("true", "", database!()),
        prepare!("true", ""),
    ],
];

/// Refunds only while the quota is the one under which the units were spent, and only if the
/// spending has not been forgotten in a crash. `$5` is how many microseconds of refill earlier
/// parts have deducted. Returns how many microseconds this part deducts, or null if nothing was
/// refunded.
const REFUND: &str = concat!(
    "WITH part AS MATERIALIZED (
        SELECT pg_catalog.make_interval(secs => pg_catalog.floor($3::double precision * r.unit_us)
                    / 1000000::double precision) AS owed,
                pg_catalog.make_interval(secs => GREATEST(0,
                    pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - $4)
                        - $5::double precision / 1000000::double precision)) AS refilled
            FROM resource_control.rate_limit AS r WHERE r.name = $1 AND r.key = $2 AND ",
    limit!(),
    "
    ), done AS (
        UPDATE resource_control.rate_limit AS r SET full_at = r.full_at - (p.owed - p.refilled)
            FROM part AS p
            WHERE r.name = $1 AND r.key = $2 AND r.since <= $4 AND r.spent_at >= $4
                AND p.refilled < p.owed
            RETURNING (pg_catalog.date_part('epoch', p.refilled)
                * 1000000::double precision)::bigint AS refilled",
    commit_async!(),
    "
    ) SELECT pg_catalog.max(refilled) FROM done"
);

const RESET: &str = concat!(
    "WITH done AS (
        DELETE FROM resource_control.rate_limit AS r WHERE r.name = $1 AND r.key = $2 AND ",
    limit!(),
    "
            RETURNING r.full_at > pg_catalog.clock_timestamp() AS owed
    ) SELECT pg_catalog.count(*) FROM done WHERE owed"
);

/// By `ctid`, because PostgreSQL would join a batch of keys with a scan of the whole table.
const PRUNE: &str = "WITH done AS (
        DELETE FROM resource_control.rate_limit WHERE ctid = ANY (ARRAY(
            SELECT r.ctid FROM resource_control.rate_limit AS r
                WHERE r.full_at <= pg_catalog.clock_timestamp() LIMIT $1 FOR UPDATE SKIP LOCKED))
            RETURNING 1
    ) SELECT pg_catalog.count(*) FROM done";

/// Locks the row of the key, or returns that another transaction has locked it. A row that is not
/// committed yet is invisible, so any other transaction that writes to the table is then taken for
/// its holder.
const LOCK: &str = "WITH free AS MATERIALIZED (
        SELECT FROM resource_control.rate_limit AS r
            WHERE r.name = $1 AND r.key = $2 FOR NO KEY UPDATE SKIP LOCKED
    ) SELECT CASE
        WHEN EXISTS (SELECT FROM resource_control.rate_limit AS r WHERE r.name = $1 AND r.key = $2)
        THEN NOT EXISTS (SELECT FROM free)
        ELSE EXISTS (SELECT FROM pg_catalog.pg_locks AS l
            WHERE l.granted AND l.mode = 'RowExclusiveLock'
                AND l.relation = 'resource_control.rate_limit'::pg_catalog.regclass::pg_catalog.oid
                AND l.pid <> pg_catalog.pg_backend_pid())
    END";

impl<'a> Call<'a> {
    /// Asks whether the call is allowed. `lead` is the lead of the cost.
    pub(super) fn check(self, commit: Commit, lead: i64, is_wait: bool) -> Check<'a> {
        let increase = PgInterval::from_microseconds(self.quota.refill(self.cost));
        let binds = self.binds(lead).into_iter().chain([increase.into()]);
        Check {
            call: self,
            commit,
            lead,
            decide: Statement::new(CHECKS[commit as usize][usize::from(is_wait)], binds),
        }
    }

    fn binds(self, lead: i64) -> [Bind; 5] {
        [
            self.name.into(),
            self.key.into(),
            self.quota.unit().into(),
            self.quota.burst().into(),
            PgInterval::from_microseconds(lead).into(),
        ]
    }

    /// Gives back units that were spent at that moment, less the refill since then that earlier
    /// parts have not deducted.
    pub(super) fn refund(
        self,
        units: u32,
        at: PgTimestamp,
        refilled: i64,
    ) -> Statement<(Nullable<BigInt>,)> {
        let binds = [
            self.name.into(),
            self.key.into(),
            i64::from(units).into(),
            at.into(),
            refilled.into(),
        ];
        Statement::new(REFUND, binds)
    }

    pub(super) fn reset(self) -> Statement<BigInt> {
        Statement::new(RESET, [self.name.into(), self.key.into()])
    }

    pub(super) fn lock(self) -> Statement<Bool> {
        Statement::new(LOCK, [self.name.into(), self.key.into()])
    }
}

/// The question whether a call is allowed.
pub(super) struct Check<'a> {
    call: Call<'a>,
    commit: Commit,
    lead: i64,
    decide: Statement<RowSql>,
}

impl Question<RowSql, Row> for Check<'_> {
    fn statement(&self) -> &Statement<RowSql> {
        &self.decide
    }

    /// Not if the key has another quota under which it is not limited, or was no longer limited
    /// when the statement ended.
    fn is_answered(&self, row: &Row) -> bool {
        row.spent_at.is_some() || row.full_in(&self.call) > self.lead
    }

    fn otherwise(&self) -> Option<Statement<RowSql>> {
        let [.., prepare] = CHECKS[self.commit as usize];
        Some(Statement::new(prepare, self.call.binds(self.lead)))
    }
}

impl Row {
    /// In how many microseconds the key is full under the quota of the call: it owes as many units
    /// as under its own, as in `rate_limit_full_at`.
    pub(super) fn full_in(&self, call: &Call<'_>) -> i64 {
        let (full_in, unit) = (difference(self.full_in), call.quota.unit());
        if self.spent_at.is_some() || full_in <= 0 || self.unit_us == unit {
            full_in
        } else {
            (full_in as f64 * (unit / self.unit_us)) as i64
        }
    }
}

/// Reads for each key in how long it is full.
pub(super) fn look(calls: &[Call<'_>]) -> Statement<Array<Interval>> {
    const LOOK: &str = "SELECT ARRAY(
        SELECT COALESCE((
                SELECT resource_control.rate_limit_full_at(r.full_at, r.unit_us, k.unit_us)
                        - pg_catalog.clock_timestamp()
                    FROM resource_control.rate_limit AS r WHERE r.name = k.name AND r.key = k.key),
                '0')
            FROM unnest($1::double precision[], $2, $3)
                WITH ORDINALITY AS k (unit_us, name, key, place)
            ORDER BY k.place) AS full_in";
    let units: Vec<_> = calls.iter().map(|call| call.quota.unit()).collect();
    let names: Vec<_> = calls.iter().map(|call| call.name.to_owned()).collect();
    let keys: Vec<_> = calls.iter().map(|call| call.key.to_owned()).collect();
    Statement::new(LOOK, [units.into(), names.into(), keys.into()])
}

/// Deletes keys that are full, and skips those in use.
pub(crate) fn prune() -> Statement<BigInt> {
    Statement::new(PRUNE, [BATCH.into()])
}
