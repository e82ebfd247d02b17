//! The queries of `monitor`: one each.

use std::time::Duration;

use super::{LOCK, takes};
use crate::half::prelude::*;
use crate::half::{
    Quota, RateLimit, RoundTrips, Semaphore, monitor,
    schema::resource_control::{service_request, throttled_key, throttled_resource},
};
use crate::semaphores::database;
use crate::support::{Expect, foreign_holder};

#[test]
fn one_for_each_question_about_locks() {
    let database = database();
    let _holder = foreign_holder(&database, &LOCK);
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let key = LOCK.key();
    takes(1, &proxy, || {
        assert_eq!(
            monitor::holders()
                .load::<monitor::Holder>(conn)
                .unwrap()
                .len(),
            1
        )
    });
    takes(1, &proxy, || {
        assert_eq!(
            monitor::waiters().load::<monitor::Waiter>(conn).unwrap(),
            []
        )
    });
    takes(1, &proxy, || {
        assert_eq!(monitor::holders_of(conn, key).unwrap().len(), 1)
    });
    takes(1, &proxy, || {
        assert_eq!(monitor::waiters_of(conn, key).unwrap(), [])
    });
    takes(1, &proxy, || {
        assert_eq!(
            monitor::blocked().load::<monitor::Blocked>(conn).unwrap(),
            []
        )
    });
    takes(1, &proxy, || {
        let on_key = monitor::blocked().filter(monitor::blocked_on(key).unwrap());
        assert_eq!(on_key.load::<monitor::Blocked>(conn).unwrap(), []);
    });
    takes(1, &proxy, || {
        let named = monitor::holders().filter(monitor::of_key(key).unwrap());
        assert_eq!(named.load::<monitor::Holder>(conn).unwrap().len(), 1);
    });
}

#[test]
fn one_for_each_question_about_tables() {
    let database = database();
    let semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    let _claim = semaphore
        .claim_on(&mut database.connect())
        .unwrap()
        .expect_acquired();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    takes(1, &proxy, || {
        assert_eq!(monitor::slots(conn, "geocoder", 4).unwrap().in_flight, 1)
    });
    takes(1, &proxy, || {
        let limit = RateLimit::named("api", Quota::per_day(24));
        assert_eq!(monitor::keys_near_limit(conn, &limit, 10).unwrap(), [])
    });
    takes(1, &proxy, || {
        let overrides = monitor::overrides().load::<monitor::RateLimitOverride>(conn);
        assert_eq!(overrides.unwrap(), [])
    });

    // As conditions of a query of the application's own.
    let requests = || service_request::table.filter(monitor::of_service("geocoder"));
    takes(1, &proxy, || {
        let in_flight = requests()
            .filter(monitor::in_flight())
            .select(monitor::ServiceRequest::as_select());
        assert_eq!(in_flight.load(conn).unwrap().len(), 1);
    });
    takes(1, &proxy, || {
        let ended = requests()
            .filter(monitor::overdue().or(monitor::timed_out()))
            .count();
        assert_eq!(ended.get_result::<i64>(conn).unwrap(), 0);
    });
    takes(1, &proxy, || {
        let next: Option<monitor::Timestamp> = requests()
            .select(monitor::next_expiry())
            .first(conn)
            .unwrap();
        assert!(next.is_some());
    });

    takes(1, &proxy, || {
        assert_eq!(
            monitor::last_lockers()
                .load::<monitor::ThrottledResourceRow>(conn)
                .unwrap(),
            []
        );
    });
    takes(1, &proxy, || {
        assert_eq!(
            monitor::last_key_lockers()
                .load::<monitor::ThrottledKeyRow>(conn)
                .unwrap(),
            []
        );
    });
    takes(1, &proxy, || {
        let due = throttled_resource::table
            .filter(monitor::available_now())
            .select(monitor::next_free_at());
        assert_eq!(due.load::<monitor::Timestamp>(conn).unwrap(), []);
    });
    takes(1, &proxy, || {
        let keys = throttled_key::table.inner_join(throttled_resource::table);
        let due = keys
            .filter(monitor::key_available_now())
            .select(monitor::key_next_free_at());
        assert_eq!(due.load::<monitor::Timestamp>(conn).unwrap(), []);
    });
}
