//! Queries of this crate joined with tables of another: this one.

// Diesel's macro writes modules and structs that carry no documentation.
#![allow(missing_docs)]

use diesel::connection::SimpleConnection;

use self::schema::{plans, tenants};
use crate::half::prelude::*;
use crate::half::{
    Database, LockId, Throttle,
    monitor::{self, Blocked, Holder, ServiceRequest, blocking},
    schema::resource_control::{service_request, throttled_key, throttled_resource},
};
use crate::support::{attempt, foreign_session_holding};
use crate::throttles::{Resource, database};

mod schema {
    diesel::table! {
        tenants (id) {
            id -> BigInt,
            slug -> Text,
            plan -> Text,
        }
    }

    diesel::table! {
        billing.plans (name) {
            name -> Text,
        }
    }

    diesel::table! {
        billing.invoices (id) {
            id -> BigInt,
            request_id -> BigInt,
        }
    }

    diesel::allow_tables_to_appear_in_same_query!(tenants, plans, invoices);
}

// As one's own schema has it: several at once, with and without a path.
crate::half::allow_joins_with!(tenants, self::schema::plans, crate::joins::schema::invoices);

diesel::joinable!(schema::invoices -> service_request (request_id));

fn with_tenants() -> Database {
    let database = database();
    database
        .connect()
        .batch_execute(
            "CREATE TABLE tenants (id bigint PRIMARY KEY, slug text, plan text);
             CREATE SCHEMA billing;
             CREATE TABLE billing.plans (name text PRIMARY KEY);
             CREATE TABLE billing.invoices (id bigint PRIMARY KEY, request_id bigint);
             INSERT INTO tenants VALUES (7, 'acme', 'gold'), (8, 'globex', 'free');
             INSERT INTO billing.plans VALUES ('gold'), ('free')",
        )
        .unwrap();
    database
}

#[test]
fn tenants_join_throttled_keys_and_their_resources() {
    let database = with_tenants();
    let conn = &mut database.connect();
    let import = Throttle::of(Resource::Rebuild);
    for tenant in ["acme", "globex"] {
        let _ = attempt(conn, &import.key(tenant), "web-1");
    }

    let throttled: Vec<(String, String)> = throttled_key::table
        .inner_join(throttled_resource::table)
        .inner_join(tenants::table.on(tenants::slug.eq(throttled_key::key)))
        .filter(tenants::plan.eq("free"))
        .filter(diesel::dsl::not(monitor::key_available_now()))
        .select((tenants::slug, throttled_key::last_locker_details))
        .load(conn)
        .unwrap();
    assert_eq!(throttled, [("globex".to_owned(), "web-1".to_owned())]);

    // Beginning with one's own table, boxed, with a third one.
    let mut boxed = tenants::table
        .inner_join(plans::table.on(plans::name.eq(tenants::plan)))
        .left_join(throttled_key::table.on(throttled_key::key.eq(tenants::slug)))
        .order(tenants::id)
        .select((tenants::slug, throttled_key::last_locked.nullable()))
        .into_boxed();
    boxed = boxed.filter(plans::name.eq("gold"));
    let seen: Vec<(String, Option<monitor::Timestamp>)> = boxed.load(conn).unwrap();
    assert_eq!(seen.len(), 1);
    assert!(seen[0].1.is_some());

    let extended = monitor::last_key_lockers()
        .inner_join(tenants::table.on(tenants::slug.eq(throttled_key::key)))
        .filter(tenants::id.eq(7))
        .select((monitor::ThrottledKeyRow::as_select(), tenants::plan));
    let [(row, plan)]: [(monitor::ThrottledKeyRow, String); 1] =
        extended.load(conn).unwrap().try_into().unwrap();
    assert_eq!((&*row.key, &*plan), ("acme", "gold"));

    let by_label = monitor::last_lockers()
        .inner_join(tenants::table.on(tenants::slug.eq(throttled_resource::last_locker_details)))
        .filter(monitor::available_now())
        .select(tenants::id);
    assert_eq!(by_label.load::<i64>(conn), Ok(vec![]));
}

#[test]
fn tenants_join_service_requests() {
    let database = with_tenants();
    let conn = &mut database.connect();
    conn.batch_execute(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, details)
         SELECT 'geocoder', id - 7, clock_timestamp(), clock_timestamp() + (id - 7.5) * interval '1 hour', slug
         FROM tenants;
         INSERT INTO billing.invoices SELECT 1, max(id) FROM resource_control.service_request",
    )
    .unwrap();
    let of_tenants = service_request::table
        .inner_join(tenants::table.on(tenants::slug.eq(service_request::details)))
        .filter(monitor::of_service("geocoder"));
    let in_flight = of_tenants.filter(monitor::in_flight()).select(tenants::id);
    assert_eq!(in_flight.load(conn), Ok(vec![8_i64]));
    let mut boxed = of_tenants
        .select((ServiceRequest::as_select(), tenants::plan))
        .into_boxed();
    boxed = boxed.filter(monitor::timed_out());
    let [(request, plan)]: [(ServiceRequest, String); 1] =
        boxed.load(conn).unwrap().try_into().unwrap();
    assert_eq!((request.slot, &*plan), (0, "gold"));

    // `joinable!`, both ways.
    let invoiced = service_request::table.inner_join(schema::invoices::table);
    assert_eq!(
        invoiced.select(schema::invoices::id).load(conn),
        Ok(vec![1_i64])
    );
    let requests = schema::invoices::table
        .inner_join(service_request::table)
        .filter(monitor::in_flight());
    assert_eq!(
        requests.select(service_request::details).load(conn),
        Ok(vec!["globex".to_owned()])
    );

    let exists = tenants::table.filter(diesel::dsl::exists(
        service_request::table
            .filter(service_request::details.eq(tenants::slug))
            .filter(monitor::overdue()),
    ));
    assert_eq!(
        exists.select(tenants::slug).load(conn),
        Ok(vec!["acme".to_owned()])
    );
}

#[test]
fn tenants_join_the_locks_that_carry_their_numbers() {
    let database = with_tenants();
    let conn = &mut database.connect();
    let _seven = foreign_session_holding(&database, LockId::BigInt(7));
    let _nine = foreign_session_holding(&database, LockId::BigInt(9));

    let held = monitor::holders()
        .inner_join(tenants::table.on(monitor::key.eq(tenants::id.nullable())))
        .select((Holder::as_select(), tenants::slug));
    let [(holder, slug)]: [(Holder, String); 1] = held.load(conn).unwrap().try_into().unwrap();
    assert_eq!((holder.key, &*slug), (LockId::BigInt(7), "acme"));

    let idle: Vec<(String, Option<i32>)> = tenants::table
        .left_join(monitor::AdvisoryLocks.on(monitor::key.eq(tenants::id.nullable())))
        .order(tenants::id)
        .select((tenants::slug, monitor::pid.nullable()))
        .load(conn)
        .unwrap();
    assert!(idle[0].1.is_some() && idle[1].1.is_none());

    let locked = monitor::holders().select(monitor::key);
    let busy = tenants::table
        .filter(tenants::id.nullable().eq_any(locked))
        .select(tenants::id);
    assert_eq!(busy.load(conn), Ok(vec![7_i64]));

    let stuck: Vec<(Blocked, String)> = monitor::blocked()
        .inner_join(tenants::table.on(blocking::key.eq(tenants::id.nullable())))
        .select((Blocked::as_select(), tenants::slug))
        .load(conn)
        .unwrap();
    assert!(stuck.is_empty());
    let requests: i64 = monitor::holders()
        .inner_join(service_request::table.on(monitor::key.eq(service_request::id.nullable())))
        .filter(monitor::in_flight())
        .count()
        .get_result(conn)
        .unwrap();
    assert_eq!(requests, 0);
}
