//! The statements of a throttle.
//!
//! **`UPDATE … WHERE EXISTS (SELECT … FOR NO KEY UPDATE SKIP LOCKED)`.** With this, an attempt
//! never waits for another transaction: it updates the row only if it could lock it. `FOR UPDATE`
//! would conflict with the row lock that a foreign-key check takes.

use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Interval, Nullable, Text, Timestamptz};

use crate::call::{BATCH, Question};
use crate::statement::{Bind, Statement, keep_commit, own_lock};

/// The reply to an attempt.
#[derive(Debug, Queryable)]
pub(super) struct Row {
    /// When the throttle was granted, and `None` if it was denied.
    pub(super) granted_at: Option<PgTimestamp>,
    pub(super) now: PgTimestamp,
    /// The grant before this attempt.
    pub(super) last_granted: PgTimestamp,
    pub(super) details: String,
    /// The interval. `None` for a resource without a row.
    pub(super) every: Option<PgInterval>,
}

type RowSql = (
    Nullable<Timestamptz>,
    Timestamptz,
    Timestamptz,
    Text,
    Nullable<Interval>,
);

/// Attempts a resource without a key. The row is locked only if it is due, and skipped while
/// another transaction is taking it, so a denial only reads. Labels are compared as text: a label
/// that the type does not have would be an error, and would abort the caller's transaction.
const RESOURCE: &str = concat!(
    "WITH granted AS (
        UPDATE resource_control.throttled_resource
            SET last_locked = pg_catalog.clock_timestamp(), last_locker_details = $2
            WHERE resource_id::pg_catalog.text = $1 AND EXISTS (
                SELECT FROM resource_control.throttled_resource AS d
                    WHERE d.resource_id::pg_catalog.text = $1 AND d.last_locked
                        <= pg_catalog.clock_timestamp()
                            - resource_control.elapsed(d.throttle_interval)
                    FOR NO KEY UPDATE SKIP LOCKED)
            RETURNING last_locked, ",
    keep_commit!(),
    "
    )
    SELECT g.last_locked AS granted_at, pg_catalog.clock_timestamp() AS now,
            COALESCE(t.last_locked, '-infinity') AS last_granted,
            COALESCE(t.last_locker_details, '') AS details,
            resource_control.elapsed(t.throttle_interval) AS every
        FROM (SELECT) AS one LEFT JOIN granted AS g ON true
            LEFT JOIN resource_control.throttled_resource AS t
                ON t.resource_id::pg_catalog.text = $1"
);

/// Attempts a name and key that have a row. Returns no row if they were never granted; then the
/// statement of `first!` is sent.
macro_rules! again {
    ($every:expr, $is_resource:literal) => {
        concat!(
            "WITH granted AS (
                UPDATE resource_control.throttle SET last_granted = pg_catalog.clock_timestamp(),
                        throttle_interval = ", $every, ", details = $2
                    WHERE name = $1 AND key = $3 AND is_resource = ", $is_resource, " AND EXISTS (
                        SELECT FROM resource_control.throttle AS d
                            WHERE d.name = $1 AND d.key = $3 AND d.is_resource = ", $is_resource,
            " AND d.last_granted <= pg_catalog.clock_timestamp() - ", $every, "
                            FOR NO KEY UPDATE SKIP LOCKED)
                    RETURNING last_granted, ",
            keep_commit!(),
            "
            )
            SELECT g.last_granted AS granted_at, pg_catalog.clock_timestamp() AS now,
                    t.last_granted, t.details, ", $every, " AS every
                FROM resource_control.throttle AS t LEFT JOIN granted AS g ON true
                WHERE t.name = $1 AND t.key = $3 AND t.is_resource = ", $is_resource
        )
    };
}

/// Grants a name and key that have no row, unless another transaction is about to. The advisory
/// lock is only tried, so this transaction does not wait for the other one's insert. Returns no row
/// if the key has one by now.
macro_rules! first {
    ($every:expr, $is_resource:literal) => {
        concat!(
            "WITH taking AS MATERIALIZED (
                SELECT ", $every, "::interval AS every,
                    pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended($3,
                        pg_catalog.hashtextextended($1,
                            ", $is_resource, "::int + ", own_lock!(first_grant), ")))
                        AS is_ours
            ), granted AS (
                INSERT INTO resource_control.throttle
                        (name, key, is_resource, last_granted, throttle_interval, details)
                    SELECT $1, $3, ", $is_resource, ", pg_catalog.clock_timestamp(), every, $2
                    FROM taking WHERE is_ours AND every IS NOT NULL
                    ON CONFLICT DO NOTHING RETURNING last_granted, ",
            keep_commit!(),
            "
            )
            SELECT g.last_granted AS granted_at, pg_catalog.clock_timestamp() AS now,
                    '-infinity'::pg_catalog.timestamptz AS last_granted, ''::pg_catalog.text AS details, t.every
                FROM taking AS t LEFT JOIN granted AS g ON true
                WHERE t.every IS NULL OR NOT t.is_ours OR g.last_granted IS NOT NULL"
        )
    };
}

/// The interval of the resource with this label.
macro_rules! interval_of_resource {
    () => {
        "(SELECT resource_control.elapsed(r.throttle_interval) \
          FROM resource_control.throttled_resource AS r WHERE r.resource_id::pg_catalog.text = $1)"
    };
}

const NAMED: [&str; 2] = [again!("$4", "false"), first!("$4", "false")];

const KEYED: [&str; 2] = [
    again!(interval_of_resource!(), "true"),
    first!(interval_of_resource!(), "true"),
];

/// Reads the interval of a resource from the database, because it may have changed since the last
/// grant. By `ctid`, because PostgreSQL would join a batch of keys with a scan of the whole table.
const PRUNE: &str = "WITH done AS (
        DELETE FROM resource_control.throttle WHERE ctid = ANY (ARRAY(
            SELECT t.ctid FROM resource_control.throttle AS t
                LEFT JOIN resource_control.throttled_resource AS r
                    ON t.is_resource AND r.resource_id::pg_catalog.text = t.name
                WHERE t.last_granted + 2::double precision * COALESCE(
                        resource_control.elapsed(r.throttle_interval), t.throttle_interval)
                    <= pg_catalog.clock_timestamp()
                LIMIT $1 FOR UPDATE OF t SKIP LOCKED))
            RETURNING 1
    ) SELECT pg_catalog.count(*) FROM done";

/// The question whether a throttle is granted.
pub(super) struct Attempt {
    again: Statement<RowSql>,
    /// The text that answers the question for a key without a row. A resource without a key has
    /// none.
    first: Option<&'static str>,
}

impl Attempt {
    /// `every` is `None` for a resource.
    pub(super) fn new(name: &str, key: &str, every: Option<PgInterval>, details: &str) -> Self {
        let binds = [Bind::from(name), details.into()].into_iter();
        if every.is_none() && key.is_empty() {
            return Self {
                again: Statement::new(RESOURCE, binds),
                first: None,
            };
        }
        let [again, first] = if every.is_some() { NAMED } else { KEYED };
        let binds = binds.chain([key.into()]).chain(every.map(Bind::from));
        Self {
            again: Statement::new(again, binds),
            first: Some(first),
        }
    }
}

impl Question<RowSql, Row> for Attempt {
    fn statement(&self) -> &Statement<RowSql> {
        &self.again
    }

    fn otherwise(&self) -> Option<Statement<RowSql>> {
        self.first.map(|first| self.again.in_text(first))
    }
}

/// Deletes the keys that have been due for as long as their interval, and skips those in use.
pub(crate) fn prune() -> Statement<BigInt> {
    Statement::new(PRUNE, [BATCH.into()])
}

/// Whether the label is known, and the interval of its row in microseconds, null without a row.
pub(super) fn find(label: &str) -> Statement<(Bool, Nullable<BigInt>)> {
    const FIND: &str = "SELECT EXISTS (SELECT FROM pg_catalog.pg_enum AS e \
             WHERE e.enumtypid = 'resource_control.throttled_resource_enum'\
             ::pg_catalog.regtype::pg_catalog.oid \
                 AND e.enumlabel = $1) AS is_known, \
         (SELECT (extract(epoch FROM r.throttle_interval) * 1000000::numeric)::bigint \
             FROM resource_control.throttled_resource AS r \
             WHERE r.resource_id::pg_catalog.text = $1) AS interval_us";
    Statement::new(FIND, [label.into()])
}

/// Inserts a resource, and returns how many rows were new.
///
/// A missing label is added first, in a transaction of its own, because PostgreSQL lets a new label
/// be used only after a commit. `ADD VALUE` is left out for a label that exists: PostgreSQL refuses
/// the statement to a role that does not own the type, even if it would do nothing.
pub(super) fn insert(label: &str, every: PgInterval, is_label: bool) -> Insert {
    const INSERT: &str = "WITH done AS (
            INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval)
                VALUES ($1::resource_control.throttled_resource_enum, $2)
                ON CONFLICT DO NOTHING RETURNING 1
        ) SELECT pg_catalog.count(*) FROM done";
    let insert = Statement::new(INSERT, [label.into(), every.into()]);
    if is_label {
        return Insert { add: None, insert };
    }
    let label = label.replace('\\', r"\\").replace('\'', "''");
    let add = format!(
        "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE IF NOT EXISTS E'{label}'"
    );
    Insert {
        add: Some(Statement::new(add, [])),
        insert,
    }
}

/// The question how many rows were new. A new label is added first, which returns no row.
pub(super) struct Insert {
    add: Option<Statement<BigInt>>,
    insert: Statement<BigInt>,
}

impl Question<BigInt, i64> for Insert {
    fn statement(&self) -> &Statement<BigInt> {
        self.add.as_ref().unwrap_or(&self.insert)
    }

    fn otherwise(&self) -> Option<Statement<BigInt>> {
        self.add.is_some().then(|| self.insert.clone())
    }
}

/// Changes the interval of a resource, and returns how many rows were changed.
pub(super) fn change(label: &str, every: PgInterval) -> Statement<BigInt> {
    const CHANGE: &str = "WITH done AS (
            UPDATE resource_control.throttled_resource SET throttle_interval = $1
                WHERE resource_id::pg_catalog.text = $2 RETURNING 1
        ) SELECT pg_catalog.count(*) FROM done";
    Statement::new(CHANGE, [every.into(), label.into()])
}
