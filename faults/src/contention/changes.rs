//! The changes of the requests, as triggers of the database record them.

use std::fmt;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, SmallInt, Text, Timestamptz};
use diesel_interlock::migrations;
use workbench::Database;

/// The name of the sessions that follow the article's steps, and the details of their requests.
pub(super) const BY_THE_ARTICLE: &str = "by the article";

/// A database with the schema, and with triggers that record changes.
pub(super) fn database() -> Database {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.batch_execute(include_str!("requests.sql")).unwrap();
    database
}

/// A row of the log.
#[derive(QueryableByName)]
pub(super) struct Request {
    #[diesel(sql_type = BigInt)]
    pub(super) id: i64,
    #[diesel(sql_type = Text)]
    pub(super) service: String,
    #[diesel(sql_type = SmallInt)]
    pub(super) slot: i16,
    #[diesel(sql_type = Timestamptz)]
    pub(super) created_at: DateTime<Utc>,
    #[diesel(sql_type = Timestamptz)]
    pub(super) expires_at: DateTime<Utc>,
    #[diesel(sql_type = Nullable<Timestamptz>)]
    pub(super) completed_at: Option<DateTime<Utc>>,
    #[diesel(sql_type = Nullable<Timestamptz>)]
    pub(super) timed_out_at: Option<DateTime<Utc>>,
    #[diesel(sql_type = Text)]
    pub(super) details: String,
    /// When its row was inserted, as the trigger recorded it.
    #[diesel(sql_type = Timestamptz)]
    inserted_at: DateTime<Utc>,
    #[diesel(sql_type = Text)]
    isolation: String,
}

impl Request {
    /// The time from which the request was in flight. At READ COMMITTED the stored functions record it exactly. At a
    /// stricter level their snapshot may be older than the previous request of the slot; only the index sees that
    /// request, some microseconds after the function has read the clock. The article's steps record the start of a
    /// transaction that then waits for the table, while the slot may still be taken.
    pub(super) fn start(&self) -> DateTime<Utc> {
        if self.details == BY_THE_ARTICLE || self.isolation != "read committed" {
            self.inserted_at
        } else {
            self.created_at
        }
    }

    /// The latest time until which the request was in flight. Other sessions may have seen it in flight a little longer,
    /// until its end was committed; that is on the safe side.
    pub(super) fn end(&self) -> DateTime<Utc> {
        let ends = [self.completed_at, self.timed_out_at];
        let ends = ends.into_iter().flatten();
        ends.fold(self.expires_at, DateTime::min)
    }

    /// Whether only its expiry freed its slot.
    pub(super) fn expired(&self) -> bool {
        self.end() == self.expires_at
    }

    pub(super) fn timeout(&self) -> TimeDelta {
        self.expires_at - self.created_at
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_day = |at: DateTime<Utc>| at.format("%T%.6f");
        write!(
            f,
            "{} in slot {} of {}, {}, {}: {} inserted {} expires {} completed {:?} timed out {:?}",
            self.id,
            self.slot,
            self.service,
            self.details,
            self.isolation,
            of_day(self.created_at),
            of_day(self.inserted_at),
            of_day(self.expires_at),
            self.completed_at.map(|at| of_day(at).to_string()),
            self.timed_out_at.map(|at| of_day(at).to_string()),
        )
    }
}

/// All requests, by start.
pub(super) fn requests(conn: &mut PgConnection) -> Vec<Request> {
    let mut requests: Vec<Request> = diesel::sql_query(
        "SELECT r.*, c.at AS inserted_at, c.isolation FROM resource_control.service_request AS r \
         JOIN contention.change AS c ON (c.became).id = r.id AND c.was IS NULL",
    )
    .load(conn)
    .unwrap();
    requests.sort_by_key(Request::start);
    requests
}

#[derive(QueryableByName)]
struct Violation {
    #[diesel(sql_type = Text)]
    violation: String,
}

/// The changes that the stored functions must not make: they may set the end of a request that had not ended, and extend
/// its expiry.
pub(super) fn wrong_changes(conn: &mut PgConnection) -> Vec<String> {
    let changes: Vec<Violation> = diesel::sql_query(
        "SELECT 'changed: ' || change::text AS violation FROM contention.change \
         WHERE (was).id IS NOT NULL AND client <> $1 AND ( \
             (was).completed_at IS NOT NULL OR (was).timed_out_at IS NOT NULL \
             OR ((was).id, (was).service, (was).slot, (was).created_at, (was).details) \
                 <> ((became).id, (became).service, (became).slot, (became).created_at, (became).details) \
             OR (became).expires_at < (was).expires_at \
             OR ((became).completed_at IS NOT NULL AND (became).timed_out_at IS NOT NULL))",
    )
    .bind::<Text, _>(BY_THE_ARTICLE)
    .load(conn)
    .unwrap();
    changes.into_iter().map(|it| it.violation).collect()
}

/// The time of the database clock.
pub(super) fn clock(conn: &mut PgConnection) -> DateTime<Utc> {
    diesel::select(diesel::dsl::sql::<Timestamptz>("clock_timestamp()"))
        .get_result(conn)
        .unwrap()
}
