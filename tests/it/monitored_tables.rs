//! Who took what last, what is due, what is in flight: over the tables.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::error::Schema;
use diesel_interlock::monitor::{
    self, ServiceRequest, ThrottledKeyRow, ThrottledResourceRow, Timestamp,
};
use diesel_interlock::schema::resource_control::{
    service_request, throttled_key, throttled_resource,
};
use diesel_interlock::{Error, ResourceLabel, Throttle};
use workbench::Database;

use crate::support::{assert_matches, attempt};
use crate::throttles::{Resource, age, database};

/// Requests to two services: in flight, completed, timed out, overdue, and one for ever.
const REQUESTS: &str = "
    INSERT INTO resource_control.service_request
        (service, slot, created_at, expires_at, completed_at, timed_out_at, details)
    SELECT service, slot, now, now + expires, now + completed, now + timed_out, details
    FROM clock_timestamp() AS now, (VALUES
        ('geocoder', 0, interval '1 hour', NULL::interval, NULL::interval, 'in flight'),
        ('geocoder', 2, '2 hours', NULL, NULL, 'in flight too'),
        ('geocoder', 1, '1 hour', '1 second', NULL, 'completed'),
        ('geocoder', 1, '-1 hour', NULL, '-1 second', 'timed out'),
        ('geocoder', 1, '-1 hour', '1 second', '-1 second', 'completed too late'),
        ('geocoder', 1, '0', NULL, NULL, 'overdue'),
        ('mailer', 0, '1 hour', NULL, NULL, 'another service')
    ) AS request (service, slot, expires, completed, timed_out, details)";

fn with_requests() -> Database {
    let database = database();
    database.connect().batch_execute(REQUESTS).unwrap();
    database
}

fn row(conn: &mut PgConnection, resource: Resource) -> ThrottledResourceRow {
    throttled_resource::table
        .find(resource)
        .select(ThrottledResourceRow::as_select())
        .first(conn)
        .unwrap()
}

#[test]
fn a_resource_that_was_never_taken_and_one_that_is_closed_load() {
    let database = database();
    let conn = &mut database.connect();
    let never = row(conn, Resource::Rebuild);
    assert_eq!(never.resource_id, ResourceLabel("cache rebuild".into()));
    assert_eq!(never.throttle_interval, Duration::from_secs(15));
    assert_eq!(never.last_locked, Timestamp::NegInfinity);
    assert_eq!(
        (never.last_locked.at(), &*never.last_locker_details),
        (None, "")
    );

    let grant = attempt(conn, &Throttle::of(Resource::Rebuild), "web-1");
    let granted_at = grant.granted().unwrap().granted_at;
    let taken = row(conn, Resource::Rebuild);
    assert_eq!(taken.last_locked.at(), Some(granted_at));
    assert_eq!(taken.last_locker_details, "web-1");

    conn.batch_execute("UPDATE resource_control.throttled_resource SET last_locked = 'infinity', last_locker_details = 'closed'")
        .unwrap();
    assert_eq!(
        row(conn, Resource::Rebuild).last_locked,
        Timestamp::Infinity
    );
    assert_eq!(row(conn, Resource::Import).last_locked.at(), None);
    let closed = throttled_resource::table
        .filter(throttled_resource::last_locked.eq(Timestamp::Infinity))
        .filter(diesel::dsl::not(monitor::available_now()))
        .count();
    assert_eq!(closed.get_result(conn), Ok(2));
}

#[test]
fn intervals_and_next_times_are_elapsed_time_in_every_zone() {
    let database = database();
    let conn = &mut database.connect();
    // In the night after it, the clocks of Paris go forward.
    conn.batch_execute(
        "UPDATE resource_control.throttled_resource SET throttle_interval = '1 month 1 day 2 hours',
            last_locked = '2026-03-28 12:00:00+00', last_locker_details = 'web-1'",
    )
    .unwrap();
    for zone in ["Europe/Paris", "America/St_Johns", "UTC"] {
        conn.batch_execute(&format!("SET TimeZone = '{zone}'"))
            .unwrap();
        let (taken, next): (ThrottledResourceRow, Timestamp) = throttled_resource::table
            .filter(throttled_resource::resource_id.eq(ResourceLabel("cache rebuild".into())))
            .select((ThrottledResourceRow::as_select(), monitor::next_free_at()))
            .first(conn)
            .unwrap();
        let interval = Duration::from_secs((31 * 24 + 2) * 60 * 60);
        assert_eq!(taken.throttle_interval, interval);
        let last = taken.last_locked.at().unwrap();
        assert_eq!(next, Timestamp::At(last + interval));
    }
}

#[test]
fn what_is_due_and_what_is_not_is_as_an_attempt_finds() {
    let database = database();
    let conn = &mut database.connect();
    let due = |conn: &mut PgConnection| -> Vec<String> {
        throttled_resource::table
            .filter(monitor::available_now())
            .order(throttled_resource::resource_id)
            .select(throttled_resource::resource_id)
            .load::<ResourceLabel>(conn)
            .unwrap()
            .into_iter()
            .map(|label| label.0)
            .collect()
    };
    let both = ["cache rebuild", "tenant's import"];
    assert_eq!(due(conn), both);
    assert_eq!(
        monitor::last_lockers().load::<ThrottledResourceRow>(conn),
        Ok(vec![])
    );

    let rebuild = Throttle::of(Resource::Rebuild);
    let until = attempt(conn, &rebuild, "web-1").granted().unwrap().until;
    assert!(!due(conn).contains(&both[0].to_owned()));
    let busy: Vec<Timestamp> = throttled_resource::table
        .filter(diesel::dsl::not(monitor::available_now()))
        .select(monitor::next_free_at())
        .load(conn)
        .unwrap();
    assert_eq!(busy, [Timestamp::At(until)]);
    age(conn, "15 seconds");
    assert_eq!(due(conn), both);

    let _ = attempt(conn, &rebuild, "web-2");
    age(conn, "1 second");
    let _ = attempt(conn, &Throttle::of(Resource::Import), "web-3");
    let lockers: Vec<_> = monitor::last_lockers()
        .load::<ThrottledResourceRow>(conn)
        .unwrap()
        .into_iter()
        .map(|row| row.last_locker_details)
        .collect();
    assert_eq!(lockers, ["web-3", "web-2"]);
}

#[test]
fn keys_are_due_by_the_interval_of_their_resource() {
    let database = database();
    let conn = &mut database.connect();
    let rebuild = Throttle::of(Resource::Rebuild);
    let _ = attempt(conn, &rebuild.key(7), "web-1");
    age(conn, "15 seconds");
    let grant = attempt(conn, &rebuild.key(8), "web-2").granted().unwrap();

    let joined = throttled_key::table.inner_join(throttled_resource::table);
    let due = joined
        .filter(monitor::key_available_now())
        .select(throttled_key::key);
    assert_eq!(due.load(conn), Ok(vec!["7".to_owned()]));
    let next = joined
        .filter(throttled_key::key.eq("8"))
        .select(monitor::key_next_free_at())
        .into_boxed();
    assert_eq!(next.load(conn), Ok(vec![Timestamp::At(grant.until)]));
    // Also where the resource may be missing.
    let nullable: Vec<Option<Timestamp>> = throttled_key::table
        .left_join(throttled_resource::table)
        .order(throttled_key::key)
        .select(monitor::key_next_free_at().nullable())
        .load(conn)
        .unwrap();
    assert_eq!(nullable[1], Some(Timestamp::At(grant.until)));

    let lockers: Vec<ThrottledKeyRow> = monitor::last_key_lockers()
        .filter(throttled_key::resource_id.eq(Resource::Rebuild))
        .limit(10)
        .load(conn)
        .unwrap();
    let seen: Vec<_> = lockers
        .iter()
        .map(|row| (&*row.key, &*row.last_locker_details))
        .collect();
    assert_eq!(seen, [("8", "web-2"), ("7", "web-1")]);
    assert_eq!(lockers[0].id(), (&lockers[0].resource_id, &lockers[0].key));
    assert_eq!(lockers[0].last_locked, Timestamp::At(grant.granted_at));
}

#[test]
fn requests_are_told_apart_by_time_and_not_by_their_mark() {
    let database = with_requests();
    let conn = &mut database.connect();
    let geocoder = || {
        service_request::table
            .filter(monitor::of_service("geocoder"))
            .order(service_request::id)
            .select(service_request::details)
            .into_boxed()
    };
    let in_flight = geocoder().filter(monitor::in_flight());
    assert_eq!(
        in_flight.load::<String>(conn).unwrap(),
        ["in flight", "in flight too"]
    );
    let overdue = geocoder().filter(monitor::overdue());
    assert_eq!(overdue.load::<String>(conn).unwrap(), ["overdue"]);
    let timed_out = geocoder().filter(monitor::timed_out());
    assert_eq!(
        timed_out.load::<String>(conn).unwrap(),
        ["timed out", "completed too late", "overdue"]
    );

    let request: ServiceRequest = service_request::table
        .filter(monitor::of_service("mailer").and(monitor::in_flight()))
        .select(ServiceRequest::as_select())
        .first(conn)
        .unwrap();
    assert_eq!((&*request.service, request.slot), ("mailer", 0));
    assert_eq!(
        request.expires_at,
        Timestamp::At(request.created_at + Duration::from_secs(3600))
    );
    assert_eq!((request.completed_at, request.timed_out_at), (None, None));
}

#[test]
fn time_passes_inside_a_transaction() {
    let database = database();
    let conn = &mut database.connect();
    conn.begin_test_transaction().unwrap();
    // Younger than the transaction, and by its now() still in the future.
    conn.batch_execute(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at)
            VALUES ('geocoder', 0, clock_timestamp(), clock_timestamp());
         UPDATE resource_control.throttled_resource SET last_locker_details = 'web-1',
            last_locked = clock_timestamp() - resource_control.elapsed(throttle_interval)",
    )
    .unwrap();
    let overdue = service_request::table.filter(monitor::overdue()).count();
    assert_eq!(overdue.get_result(conn), Ok(1));
    let in_flight = service_request::table.filter(monitor::in_flight()).count();
    assert_eq!(in_flight.get_result(conn), Ok(0));
    let due = throttled_resource::table
        .filter(monitor::available_now())
        .count();
    assert_eq!(due.get_result(conn), Ok(2));
}

#[test]
fn free_slots_are_those_that_no_request_in_flight_has() {
    let database = with_requests();
    let conn = &mut database.connect();
    let geocoder = monitor::slots(conn, "geocoder", 4).unwrap();
    assert_eq!((&*geocoder.free, geocoder.in_flight), (&[1, 3][..], 2));
    assert_eq!(geocoder.claimable(), 2);
    let first: Option<Timestamp> = service_request::table
        .filter(monitor::of_service("geocoder"))
        .filter(monitor::in_flight())
        .select(monitor::next_expiry())
        .get_result(conn)
        .unwrap();
    assert_eq!(geocoder.next_expiry, first);

    // Lowered to two slots, of which one is free; but two requests are in flight.
    let lowered = monitor::slots(conn, "geocoder", 2).unwrap();
    assert_eq!((&*lowered.free, lowered.claimable()), (&[1][..], 0));
    let unknown = monitor::slots(conn, "it's unknown", 1).unwrap();
    assert_eq!((&*unknown.free, unknown.in_flight), (&[0][..], 0));
    assert_eq!((unknown.next_expiry, unknown.claimable()), (None, 1));
    assert_eq!(monitor::slots(conn, "geocoder", 0).unwrap().free, []);

    conn.batch_execute("UPDATE resource_control.service_request SET expires_at = 'infinity' WHERE service = 'mailer'")
        .unwrap();
    let for_ever = monitor::slots(conn, "mailer", 1).unwrap();
    assert_eq!(for_ever.next_expiry, Some(Timestamp::Infinity));
}

#[test]
fn without_the_schema_the_error_says_so() {
    let database = Database::new();
    let conn = &mut database.connect();
    assert_matches!(
        monitor::slots(conn, "geocoder", 4),
        Err(Error::Schema(Schema::NotInstalled))
    );
    let empty = monitor::holders().load::<monitor::Holder>(conn);
    assert_eq!(empty, Ok(vec![]), "locks need no schema");
}

#[test]
fn the_users_own_objects_of_the_same_names_change_nothing() {
    let database = with_requests();
    let conn = &mut database.connect();
    conn.batch_execute(
        "CREATE SCHEMA shadow;
         CREATE TABLE shadow.service_request (); CREATE TABLE shadow.throttled_resource ();
         CREATE FUNCTION shadow.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT 'infinity'::timestamptz$$;
         CREATE FUNCTION shadow.elapsed(interval) RETURNS interval LANGUAGE sql AS $$SELECT interval '1000 years'$$;
         SET search_path = shadow, public, pg_catalog;
         SET default_transaction_isolation = 'repeatable read'; SET TimeZone = 'Asia/Kathmandu'",
    )
    .unwrap();
    assert_eq!(monitor::slots(conn, "geocoder", 4).unwrap().in_flight, 2);
    let due = throttled_resource::table
        .filter(monitor::available_now())
        .count();
    assert_eq!(due.get_result(conn), Ok(2));
}
