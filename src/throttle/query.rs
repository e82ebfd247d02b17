//! The statements behind the throttles, one round trip each, for any connection to PostgreSQL.

use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{Bool, Interval, Nullable, Text, Timestamptz};

use crate::error::Error;
use crate::installed;
use crate::read_committed::is_serialization_failure;

/// The row that both functions answer.
#[derive(Debug, Queryable)]
pub(crate) struct Attempted {
    pub(crate) granted: bool,
    pub(crate) being_taken: bool,
    pub(crate) decided_at: PgTimestamp,
    pub(crate) next_at: PgTimestamp,
    pub(crate) retry_after: Option<PgInterval>,
    pub(crate) holder: Option<String>,
    pub(crate) held_since: Option<PgTimestamp>,
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
    "SELECT granted, being_taken, decided_at, next_at, retry_after, holder, held_since FROM ";
const LABEL_CAST: &str = "::resource_control.throttled_resource_enum, ";

/// An attempt at a resource.
#[derive(Debug)]
pub(crate) struct AttemptResource<'a> {
    pub(crate) label: &'a str,
    pub(crate) details: &'a str,
}

impl Query for AttemptResource<'_> {
    type SqlType = Row;
}

impl QueryId for AttemptResource<'_> {
    type QueryId = AttemptResource<'static>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<Conn> RunQueryDsl<Conn> for AttemptResource<'_> {}

impl QueryFragment<Pg> for AttemptResource<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(COLUMNS);
        out.push_sql("resource_control.attempt_throttled_resource(");
        out.push_bind_param::<Text, _>(self.label)?;
        out.push_sql(LABEL_CAST);
        out.push_bind_param::<Text, _>(self.details)?;
        out.push_sql(")");
        Ok(())
    }
}

/// An attempt at a resource for one key.
#[derive(Debug)]
pub(crate) struct AttemptKey<'a> {
    pub(crate) label: &'a str,
    pub(crate) key: &'a str,
    pub(crate) details: &'a str,
}

impl Query for AttemptKey<'_> {
    type SqlType = Row;
}

impl QueryId for AttemptKey<'_> {
    type QueryId = AttemptKey<'static>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<Conn> RunQueryDsl<Conn> for AttemptKey<'_> {}

impl QueryFragment<Pg> for AttemptKey<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(COLUMNS);
        out.push_sql("resource_control.attempt_throttled_key(");
        out.push_bind_param::<Text, _>(self.label)?;
        out.push_sql(LABEL_CAST);
        out.push_bind_param::<Text, _>(self.key)?;
        out.push_sql(", ");
        out.push_bind_param::<Text, _>(self.details)?;
        out.push_sql(")");
        Ok(())
    }
}

/// What an attempt's error means. Asks the database where it can still be asked.
pub(super) fn explain(conn: &mut PgConnection, error: DieselError, label: &str) -> Error {
    if is_serialization_failure(&error) {
        return Error::StrictIsolation;
    }
    if let DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, information) = &error {
        // Empty details and keys were refused before.
        if information.constraint_name() == Some("diesel_interlock_unknown_resource") {
            let label = label.to_owned();
            return Error::UnknownResource { label };
        }
    }
    installed::explain(conn, error, Some(label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_one_call() {
        let query = AttemptResource {
            label: "cache rebuild",
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
    fn an_attempt_for_a_key_is_one_call() {
        let query = AttemptKey {
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
