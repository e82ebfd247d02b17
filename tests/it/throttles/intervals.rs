//! Intervals longer than any that makes sense.

use std::time::Duration;

use diesel::connection::SimpleConnection;

use super::{REBUILD, Resource, database, granted};
use crate::half::prelude::*;
use crate::half::{monitor, sync};
use crate::support::{attempt, number, truth};

const YEARS: i64 = 360 * 24 * 60 * 60;

#[test]
fn an_interval_counts_as_a_thousand_years_at_most() {
    let database = database();
    let conn = &mut database.connect();
    let millennium = Duration::from_secs(1000 * YEARS as u64);
    let mut tried = 0;
    for interval in [
        "1000 years",
        "1000 years 1 us",
        "8640000:00:00.000001",
        "290000 years",
        "1000000 years",
        "2147483647 months",
        "2147483647 days",
        "2147483647 months 2147483647 days 2147483647 hours",
        "infinity",
    ] {
        let set = conn.batch_execute(&format!(
            "DELETE FROM resource_control.throttled_key; \
             UPDATE resource_control.throttled_resource SET throttle_interval = '{interval}', \
                 last_locked = '-infinity', last_locker_details = '' WHERE resource_id = 'cache rebuild'"
        ));
        if interval == "infinity" && set.is_err() {
            continue; // before PostgreSQL 17
        }
        set.unwrap();
        for throttle in [REBUILD, REBUILD.key(7)] {
            let grant = granted(attempt(conn, &throttle, "me"));
            assert_eq!(
                (grant.until - grant.granted_at).to_std(),
                Ok(millennium),
                "{interval}"
            );
            let denial = attempt(conn, &throttle, "me").denied().unwrap();
            assert_eq!(denial.next_at, Some(grant.until), "{interval}");
            assert!(denial.retry_after > millennium - Duration::from_secs(3600));
        }
        let other = super::Throttle::of(Resource::Import).key(7);
        granted(attempt(conn, &other, "me"));
        super::age(conn, "100 ms");
        assert_eq!(
            number(conn, "resource_control.prune_throttled_keys(10)"),
            1,
            "{interval}"
        );

        let rows: Vec<(monitor::ThrottledResourceRow, monitor::Timestamp)> =
            crate::half::schema::resource_control::throttled_resource::table
                .select((
                    monitor::ThrottledResourceRow::as_select(),
                    monitor::next_free_at(),
                ))
                .load(conn)
                .unwrap();
        assert_eq!(rows.len(), 2);
        let different = sync::<Resource>(conn).unwrap().different;
        assert_eq!(different[0].in_database, millennium, "{interval}");
        tried += 1;
    }
    assert!(tried >= 8);
}

/// The bound is that of the declared intervals.
#[test]
fn what_is_not_longer_than_a_thousand_years_is_not_changed() {
    let database = database();
    let conn = &mut database.connect();
    for (interval, elapsed) in [
        ("1000 years", "8640000:00:00"),
        ("8639999:59:59.999999", "8639999:59:59.999999"),
        ("999 years 12 months", "8640000:00:00"),
        ("1 month -29 days", "24:00:00"),
        ("-1000 years", "-8640000:00:00"),
    ] {
        let same = format!("resource_control.elapsed('{interval}')::text = '{elapsed}'");
        assert!(truth(conn, &same), "{interval}");
    }
}
