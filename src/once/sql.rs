//! The statements of work that is done once.

use std::time::Duration;

use diesel::data_types::PgTimestamp;
use diesel::deserialize::Queryable;
use diesel::sql_types::{BigInt, Binary, Bool, Nullable, Timestamptz};

use crate::advisory::sql::notice_client;
use crate::call::BATCH;
use crate::input::interval;
use crate::statement::{Statement, keep_commit};

/// The reply to [`look`].
#[derive(Queryable)]
pub(super) struct Look {
    /// Whether this transaction has the lock. `None` where nothing can be stored, as on a standby.
    pub(super) is_ours: Option<bool>,
    /// The stored outcome. `None` without the lock or without an outcome.
    pub(super) outcome: Option<Vec<u8>>,
    /// The fingerprint that was stored with it.
    pub(super) stored: Option<Vec<u8>>,
    /// The fingerprint of this request.
    pub(super) given: Option<Vec<u8>>,
    /// When the transaction began.
    pub(super) began: PgTimestamp,
}

type LookTypes = (
    Nullable<Bool>,
    Nullable<Binary>,
    Nullable<Binary>,
    Nullable<Binary>,
    Timestamptz,
);

/// Tries to take the lock, reads what is stored, and hashes the request. A volatile function reads
/// the outcome, because the statement's own snapshot would not show what was committed after the
/// statement began.
pub(super) fn look(
    (first, second): (i32, i32),
    name: &str,
    key: &str,
    request: Option<&[u8]>,
) -> Statement<LookTypes> {
    const LOOK: &str = concat!(
        "WITH taking AS MATERIALIZED (
            SELECT CASE WHEN pg_catalog.current_setting('transaction_read_only') = 'on' THEN NULL
                WHEN ",
        notice_client!("true"),
        " = '' THEN NULL ELSE pg_catalog.pg_try_advisory_xact_lock($1, $2) END AS is_ours
        ), looking AS MATERIALIZED (
            SELECT is_ours, CASE WHEN is_ours THEN resource_control.once_outcome($3, $4) END AS done
                FROM taking
        ) SELECT is_ours, (done).outcome, (done).fingerprint, pg_catalog.sha256($5),
                pg_catalog.transaction_timestamp()
            FROM looking"
    );
    let request = request.map(<[u8]>::to_vec);
    let binds = [
        first.into(),
        second.into(),
        name.into(),
        key.into(),
        request.into(),
    ];
    Statement::new(LOOK, binds)
}

/// Inserts the outcome, but only if the transaction is still the one that began at `began`. Needs
/// no `ON CONFLICT`, because the lock keeps other calls from inserting the same key.
pub(super) fn store(
    name: &str,
    key: &str,
    outcome: &[u8],
    fingerprint: Option<Vec<u8>>,
    began: PgTimestamp,
) -> Statement<Bool> {
    const STORE: &str = concat!(
        "INSERT INTO resource_control.once (name, key, outcome, fingerprint)
        SELECT $1, $2, $3, $4 WHERE pg_catalog.transaction_timestamp() = $5 AND ",
        keep_commit!(),
        " IS DISTINCT FROM '' RETURNING true AS is_stored"
    );
    let binds = [
        name.into(),
        key.into(),
        outcome.to_vec().into(),
        fingerprint.into(),
        began.into(),
    ];
    Statement::new(STORE, binds)
}

/// Deletes a batch of old outcomes, and returns how many.
pub(crate) fn prune(older_than: Duration) -> Statement<BigInt> {
    const PRUNE: &str = "WITH done AS (
            DELETE FROM resource_control.once WHERE ctid = ANY (ARRAY(
                SELECT o.ctid FROM resource_control.once AS o
                    WHERE o.done_at <= pg_catalog.clock_timestamp() - $1
                    LIMIT $2 FOR UPDATE SKIP LOCKED))
                RETURNING 1
        ) SELECT pg_catalog.count(*) FROM done";
    Statement::new(PRUNE, [interval(older_than).into(), BATCH.into()])
}
