//! The statements of a throttle, and how their rows are read.

use std::time::Duration;

use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{BigInt, Bool, Interval, Nullable, Text, Timestamptz};

use super::decision::{Decision, Denial, DenialReason, Grant};
use crate::installed::Needs;
use crate::session::Statement;
#[cfg(feature = "async")]
use crate::session::{ProbeColumns, Probed};
use crate::time::{Timestamp, elapsed};

/// The row of both functions.
#[derive(Debug, Queryable)]
pub(super) struct Attempted {
    granted: bool,
    being_taken: bool,
    decided_at: PgTimestamp,
    next_at: PgTimestamp,
    retry_after: Option<PgInterval>,
    holder: Option<String>,
    held_since: Option<PgTimestamp>,
}

impl From<Attempted> for Decision {
    fn from(row: Attempted) -> Self {
        let next_at = Timestamp::from(row.next_at).at();
        if row.granted {
            let granted_at = Timestamp::from(row.decided_at).at().unwrap_or_default();
            return Decision::Granted(Grant {
                granted_at,
                until: next_at.unwrap_or(granted_at),
            });
        }
        Decision::Denied(Denial {
            reason: if row.being_taken {
                DenialReason::BeingTaken
            } else {
                DenialReason::TooSoon
            },
            retry_after: row
                .retry_after
                .map_or(Duration::ZERO, elapsed)
                .max(Duration::from_micros(1)),
            next_at,
            holder: row.holder,
            held_since: row.held_since.and_then(|since| Timestamp::from(since).at()),
        })
    }
}

type Row = (
    Bool,
    Bool,
    Timestamptz,
    Timestamptz,
    Nullable<Interval>,
    Nullable<Text>,
    Nullable<Timestamptz>,
);

const COLUMNS: &str =
    "SELECT granted, being_taken, decided_at, next_at, retry_after, holder, held_since";
const LABEL_CAST: &str = "::resource_control.throttled_resource_enum, ";

pub(super) const ATTEMPT_NEEDS: &Needs = &[
    ("attempt_throttled_resource", "EXECUTE"),
    ("throttled_resource", "SELECT, UPDATE"),
];

pub(super) const ATTEMPT_KEY_NEEDS: &Needs = &[
    ("attempt_throttled_key", "EXECUTE"),
    ("throttled_resource", "SELECT"),
    ("throttled_key", "SELECT, INSERT, UPDATE"),
];

/// An attempt at a resource, or at one key of it. Which of them is part of the statement's id, because it changes the text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attempt<'a, const KEYED: bool> {
    pub(super) label: &'a str,
    /// Not sent without `KEYED`.
    pub(super) key: &'a str,
    pub(super) details: &'a str,
}

impl<const KEYED: bool> Query for Attempt<'_, KEYED> {
    type SqlType = Row;
}

impl<const KEYED: bool> QueryId for Attempt<'_, KEYED> {
    type QueryId = Attempt<'static, KEYED>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<Conn, const KEYED: bool> RunQueryDsl<Conn> for Attempt<'_, KEYED> {}

impl<const KEYED: bool> QueryFragment<Pg> for Attempt<'_, KEYED> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(COLUMNS);
        self.push_from(out)
    }
}

#[cfg(feature = "async")]
impl<const KEYED: bool> Probed for Attempt<'_, KEYED> {
    fn walk_probed<'b>(
        &'b self,
        mut out: AstPass<'_, 'b, Pg>,
        columns: &'b ProbeColumns,
    ) -> QueryResult<()> {
        out.push_sql(COLUMNS);
        columns.walk_ast(out.reborrow())?;
        self.push_from(out)
    }
}

impl<const KEYED: bool> Attempt<'_, KEYED> {
    fn push_from<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(if KEYED {
            " FROM resource_control.attempt_throttled_key("
        } else {
            " FROM resource_control.attempt_throttled_resource("
        });
        out.push_bind_param::<Text, _>(self.label)?;
        out.push_sql(LABEL_CAST);
        if KEYED {
            out.push_bind_param::<Text, _>(self.key)?;
            out.push_sql(", ");
        }
        out.push_bind_param::<Text, _>(self.details)?;
        out.push_sql(")");
        Ok(())
    }
}

/// What the database has of a declared resource.
#[derive(QueryableByName)]
pub(super) struct Found {
    /// The interval. `None` if the resource has no row.
    #[diesel(sql_type = Nullable<BigInt>)]
    pub(super) microseconds: Option<i64>,
    #[diesel(sql_type = Bool)]
    pub(super) has_label: bool,
}

pub(super) const FIND_NEEDS: &Needs = &[("elapsed", "EXECUTE"), ("throttled_resource", "SELECT")];

/// Compares the label as text, because a label that the type does not have would be an error.
pub(super) fn find(label: &str) -> impl Statement<Found> {
    diesel::sql_query(
        "SELECT ( \
         SELECT (pg_catalog.date_part('epoch', resource_control.elapsed(throttle_interval)) OPERATOR(pg_catalog.*) 1000000)::bigint \
         FROM resource_control.throttled_resource WHERE resource_id::text OPERATOR(pg_catalog.=) $1) AS microseconds, \
         EXISTS (SELECT FROM pg_catalog.pg_enum WHERE enumlabel OPERATOR(pg_catalog.=) $1 AND enumtypid OPERATOR(pg_catalog.=) \
         'resource_control.throttled_resource_enum'::pg_catalog.regtype) AS has_label",
    )
    .bind::<Text, _>(label)
}

/// Adds a label to the type. DDL takes no bind parameters, and an `E''` literal means the same under every setting.
pub(super) fn add_label(label: &str) -> String {
    let literal = label.replace('\\', r"\\").replace('\'', "''");
    format!(
        "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE IF NOT EXISTS E'{literal}'"
    )
}

pub(super) const INSERT_NEEDS: &Needs = &[("throttled_resource", "INSERT")];

/// Inserts the row of a resource. It is a separate statement, because the transaction that adds a label cannot use it.
pub(super) fn insert_resource(label: &str, microseconds: i64) -> impl QueryFragment<Pg> + QueryId {
    diesel::sql_query(
        "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) \
         VALUES ($1::resource_control.throttled_resource_enum, $2) ON CONFLICT DO NOTHING",
    )
    .bind::<Text, _>(label)
    .bind::<Interval, _>(PgInterval::from_microseconds(microseconds))
}

pub(super) const SET_NEEDS: &Needs = &[("throttled_resource", "SELECT, UPDATE")];

/// Overwrites the interval of a resource.
pub(super) fn set_interval(label: &str, microseconds: i64) -> impl QueryFragment<Pg> + QueryId {
    diesel::sql_query(
        "UPDATE resource_control.throttled_resource SET throttle_interval = $1 \
         WHERE resource_id::text OPERATOR(pg_catalog.=) $2",
    )
    .bind::<Interval, _>(PgInterval::from_microseconds(microseconds))
    .bind::<Text, _>(label)
}

/// Whether the role owns the type of the labels, which adding one requires.
#[derive(QueryableByName)]
pub(super) struct Owner {
    #[diesel(sql_type = Text)]
    pub(super) role: String,
    #[diesel(sql_type = Bool)]
    pub(super) owns: bool,
}

pub(super) fn find_owner() -> impl Statement<Owner> {
    diesel::sql_query(
        "SELECT current_user::text AS role, \
         pg_catalog.pg_has_role(typowner, 'USAGE') AS owns FROM pg_catalog.pg_type \
         WHERE oid OPERATOR(pg_catalog.=) 'resource_control.throttled_resource_enum'::pg_catalog.regtype",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_one_call() {
        let query = Attempt::<false> {
            label: "cache rebuild",
            key: "",
            details: "web-3",
        };
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            "SELECT granted, being_taken, decided_at, next_at, retry_after, holder, held_since \
             FROM resource_control.attempt_throttled_resource(\
             $1::resource_control.throttled_resource_enum, $2) \
             -- binds: [\"cache rebuild\", \"web-3\"]"
        );
    }

    #[test]
    fn a_label_is_quoted_under_every_setting() {
        assert_eq!(
            add_label(r"it's \ two"),
            r"ALTER TYPE resource_control.throttled_resource_enum ADD VALUE IF NOT EXISTS E'it''s \\ two'"
        );
    }

    #[test]
    fn an_attempt_for_a_key_is_one_call() {
        let query = Attempt::<true> {
            label: "tenant import",
            key: "7",
            details: "web-3",
        };
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            "SELECT granted, being_taken, decided_at, next_at, retry_after, holder, held_since \
             FROM resource_control.attempt_throttled_key(\
             $1::resource_control.throttled_resource_enum, $2, $3) \
             -- binds: [\"tenant import\", \"7\", \"web-3\"]"
        );
    }
}
