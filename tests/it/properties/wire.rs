//! Whatever the server sends loads as a value or as an error.

use std::cell::RefCell;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::deserialize::{FromSqlRow, Queryable};
use diesel::dsl::sql;
use diesel::expression::QueryMetadata;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::sql_types::{Interval, Nullable, SingleValue, Timestamptz};
use diesel_interlock::functions::Void;
use diesel_interlock::monitor::{Elapsed, Timestamp};
use diesel_interlock::schema::resource_control::sql_types::ThrottledResourceEnum;
use diesel_interlock::{ResourceLabel, migrations};
use proptest::collection::vec;
use proptest::prelude::*;
use workbench::Database;

use super::hold;
use crate::throttles::Resource;

/// What these bytes load as, if they come as the value of a column.
fn load<ST, T>(conn: &mut PgConnection, bytes: &[u8]) -> QueryResult<T>
where
    ST: SingleValue + diesel::query_builder::QueryId + 'static,
    T: FromSqlRow<ST, Pg> + 'static,
    Pg: QueryMetadata<ST>,
{
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    diesel::select(sql::<ST>(&format!("'\\x{hex}'::bytea"))).get_result(conn)
}

#[test]
fn any_bytes_are_a_value_or_an_error() {
    let database = Database::new();
    let conn = RefCell::new(database.connect());
    let bytes = prop_oneof![
        vec(any::<u8>(), 0..24),
        vec(any::<u8>(), 8),
        vec(any::<u8>(), 16),
        proptest::sample::select(vec!["cache rebuild", "tenant's import", "cache"])
            .prop_map(|label| label.as_bytes().to_vec()),
    ];
    hold(200, bytes, |bytes| {
        let conn = &mut *conn.borrow_mut();
        let time = load::<Timestamptz, Timestamp>(conn, &bytes);
        assert_eq!(time.is_ok(), bytes.len() == 8, "{time:?}");
        let span = load::<Interval, Elapsed>(conn, &bytes);
        assert_eq!(span.is_ok(), bytes.len() >= 16, "{span:?}");
        let span = load::<Nullable<Interval>, Elapsed<Option<Duration>>>(conn, &bytes);
        assert_eq!(span.is_ok(), bytes.len() >= 16, "{span:?}");
        let text = std::str::from_utf8(&bytes).ok();
        let label = load::<ThrottledResourceEnum, ResourceLabel>(conn, &bytes);
        assert_eq!(label.ok().map(|label| label.0).as_deref(), text);
        let resource = load::<ThrottledResourceEnum, Resource>(conn, &bytes);
        let known = matches!(text, Some("cache rebuild" | "tenant's import"));
        assert_eq!(resource.is_ok(), known, "{resource:?}");
        load::<Void, ()>(conn, &bytes).unwrap();
    });
}

#[test]
fn times_come_back_as_they_were_sent_and_sort_as_in_sql() {
    let database = Database::new();
    let conn = RefCell::new(database.connect());
    // PostgreSQL's own, from 4714 BC to 294276.
    let microseconds = prop_oneof![
        -211_813_488_000_000_000_i64..9_223_371_331_200_000_000,
        -10_i64..10,
        Just(i64::MIN),
        Just(i64::MAX),
    ];
    hold(100, (microseconds.clone(), microseconds), |(one, two)| {
        let conn = &mut *conn.borrow_mut();
        let (first, second) = (PgTimestamp(one), PgTimestamp(two));
        let sorted: bool = diesel::select(first.into_sql::<Timestamptz>().lt(second))
            .get_result(conn)
            .unwrap();
        let times = [first, second].map(Timestamp::from);
        // What is after all times of chrono's is not told apart.
        if times != [Timestamp::Infinity; 2] {
            assert_eq!(sorted, times[0] < times[1], "{times:?}");
        }
        for (sent, pg) in times.into_iter().zip([one, two]) {
            let back: Timestamp = diesel::select(sent.into_sql::<Timestamptz>())
                .get_result(conn)
                .unwrap();
            assert_eq!(back, sent);
            if let Some(time) = sent.at() {
                assert_eq!(time.timestamp_micros() - 946_684_800_000_000, pg);
                assert_eq!(Option::<DateTime<Utc>>::from(sent), Some(time));
            }
        }
    });
}

/// The stored function's bound: a thousand years, as PostgreSQL counts them.
const MILLENNIUM: Duration = Duration::from_secs(1000 * 360 * 24 * 60 * 60);

#[test]
fn elapsed_time_is_that_of_the_stored_function() {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let conn = RefCell::new(database.connect());
    let interval = (
        -300_i32..12_000,
        -9000_i32..300_000,
        prop_oneof![-100_000_i64..100_000, -10_i64.pow(15)..10_i64.pow(15)],
    );
    hold(100, interval, |(months, days, microseconds)| {
        let interval = PgInterval::new(microseconds, days, months);
        let in_sql: i64 = diesel::sql_query(
            // By the microsecond, since before PostgreSQL 14 an epoch is a floating-point number.
            "SELECT (extract(hour FROM e) * 3600 + extract(minute FROM e) * 60)::bigint * 1000000 \
             + extract(microseconds FROM e)::bigint AS number \
             FROM (SELECT resource_control.elapsed($1) AS e) AS elapsed",
        )
        .bind::<Interval, _>(interval)
        .get_result::<Number>(&mut *conn.borrow_mut())
        .unwrap()
        .number;
        let Elapsed(in_rust): Elapsed = Queryable::<Interval, Pg>::build(interval).unwrap();
        let in_sql = Duration::from_micros(in_sql.max(0) as u64);
        assert_eq!(in_rust.min(MILLENNIUM), in_sql);
    });
}

#[derive(QueryableByName)]
struct Number {
    #[diesel(sql_type = diesel::sql_types::BigInt)]
    number: i64,
}
