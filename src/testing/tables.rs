//! What the tables of `resource_control` tell, where they are there.

use std::collections::HashSet;

use diesel::dsl::sql;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool};

use crate::key::LockId;

/// Which tables there are: a query of one that is missing would abort a test transaction.
pub(super) struct Tables {
    pub(super) service_request: bool,
    throttled_key: bool,
}

impl Tables {
    /// One round trip.
    pub(super) fn of(conn: &mut PgConnection) -> QueryResult<Self> {
        let (service_request, throttled_key) = diesel::select((
            sql::<Bool>("pg_catalog.to_regclass('resource_control.service_request') IS NOT NULL"),
            sql::<Bool>("pg_catalog.to_regclass('resource_control.throttled_key') IS NOT NULL"),
        ))
        .get_result(conn)?;
        Ok(Self {
            service_request,
            throttled_key,
        })
    }
}

/// The locks that claims and attempts hold until their transaction ends, which is at once, except inside
/// a test transaction. Up to three round trips.
pub(super) fn locks_of_transactions(conn: &mut PgConnection) -> QueryResult<HashSet<LockId>> {
    let tables = Tables::of(conn)?;
    let mut locks = Vec::<i64>::new();
    if tables.service_request {
        locks.extend(
            sql::<BigInt>(
                "SELECT resource_control.service_request_lock(r.service, r.slot) \
                 FROM (SELECT DISTINCT service, slot FROM resource_control.service_request) AS r",
            )
            .load::<i64>(conn)?,
        );
    }
    if tables.throttled_key {
        locks.extend(
            sql::<BigInt>(
                "SELECT resource_control.throttled_key_lock(k.resource_id, k.key) \
                 FROM resource_control.throttled_key AS k",
            )
            .load::<i64>(conn)?,
        );
    }
    Ok(locks.into_iter().map(LockId::BigInt).collect())
}
