//! The statements of a rate limit.
//!
//! The generic cell rate algorithm with one row per key: `full_at` is when the key will be full. A
//! grant reads the clock three times, in this order: for the condition, for `spent_at`, for
//! `full_at`. Because of this order the promise holds in every interleaving.

use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::sql_types::{Array, BigInt, Bool, Integer, Interval, Nullable, Timestamptz};

use super::quota::Exact;
use crate::call::BATCH;
use crate::statement::{Statement, database, keep_commit};

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

/// Whether the call was allowed; when; in how long the key is full; and the database, if the call
/// was denied.
pub(super) type Row = (bool, PgTimestamp, PgInterval, i32);
pub(super) type Ask = Statement<(Bool, Timestamptz, Interval, Integer)>;

/// Decides the common cases: the key has a row of this quota, or it is limited. A denial only
/// reads. The `CASE` keeps the planner from evaluating `set_config` first, which would make denials
/// slower.
macro_rules! decide {
    ($limit:expr, $commit:expr) => {
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
            SELECT true, s.spent_at, s.full_at - pg_catalog.clock_timestamp(), 0 FROM spent AS s
            UNION ALL SELECT false, pg_catalog.clock_timestamp(),
                    resource_control.rate_limit_full_at(r.full_at, r.unit_us, $3)
                        - pg_catalog.clock_timestamp(), ",
            database!(),
            "
                FROM resource_control.rate_limit AS r
                WHERE r.name = $1 AND r.key = $2 AND NOT EXISTS (SELECT FROM spent)
                    AND resource_control.rate_limit_full_at(r.full_at, r.unit_us, $3)
                        > pg_catalog.clock_timestamp() + $5"
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
            ") SELECT false, m.spent_at, interval '0', 0 FROM made AS m WHERE false"
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

/// Indexed by [`Commit`]: for each, the statements of `decide!` and of `prepare!`.
const CHECKS: [[&str; 2]; 3] = [
    [
        decide!(limit!(), commit_async!()),
        prepare!(limit!(), commit_async!()),
    ],
    [
        decide!(limit!(), concat!(", ", keep_commit!())),
        prepare!(limit!(), concat!(", ", keep_commit!())),
    ],
    [decide!("true", ""), prepare!("true", "")],
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

const PRUNE: &str = "WITH done AS (
        DELETE FROM resource_control.rate_limit WHERE ctid = ANY (ARRAY(
            SELECT r.ctid FROM resource_control.rate_limit AS r
                WHERE r.full_at <= pg_catalog.clock_timestamp() LIMIT $1 FOR UPDATE SKIP LOCKED))
            RETURNING 1
    ) SELECT pg_catalog.count(*) FROM done";

/// Whether another transaction holds the row of the key now. A row that is not committed yet is
/// invisible, so any other transaction that writes to the table is then taken for its holder.
const IS_LOCKED: &str = "WITH free AS MATERIALIZED (
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

impl Call<'_> {
    /// Returns the statements of a check: the one that decides, and the one that prepares the key
    /// for it. `lead` is the lead of the cost.
    pub(super) fn check(self, commit: Commit, lead: i64) -> [Ask; 2] {
        let Self {
            name,
            key,
            quota,
            cost,
        } = self;
        let (unit, burst) = (quota.unit(), quota.burst());
        let [lead, increase] = [lead, quota.refill(cost)].map(PgInterval::from_microseconds);
        let binds = [
            name.into(),
            key.into(),
            unit.into(),
            burst.into(),
            lead.into(),
        ];
        let [decide, prepare] = CHECKS[commit as usize];
        [
            Statement::new(decide, binds.clone().into_iter().chain([increase.into()])),
            Statement::new(prepare, binds),
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

    pub(super) fn is_locked(self) -> Statement<Bool> {
        Statement::new(IS_LOCKED, [self.name.into(), self.key.into()])
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
            ORDER BY k.place)";
    let units: Vec<_> = calls.iter().map(|call| call.quota.unit()).collect();
    let names: Vec<_> = calls.iter().map(|call| call.name.to_owned()).collect();
    let keys: Vec<_> = calls.iter().map(|call| call.key.to_owned()).collect();
    Statement::new(LOOK, [units.into(), names.into(), keys.into()])
}

/// Deletes keys that are full, and skips those in use.
pub(crate) fn prune() -> Statement<BigInt> {
    Statement::new(PRUNE, [BATCH.into()])
}
