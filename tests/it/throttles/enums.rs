//! Resources are values of Rust enums, and of the enumerated type.

use super::{REBUILD, Resource, database, granted};
use crate::half::prelude::*;
use crate::half::{ResourceLabel, Throttle, ThrottledResource};
use crate::support::{attempt, is_granted};

#[test]
fn a_declared_resource_maps_to_the_enumerated_type() {
    use crate::half::schema::resource_control::throttled_resource::dsl::*;
    let database = database();
    let conn = &mut database.connect();
    let declared: Vec<Resource> = throttled_resource
        .select(resource_id)
        .order(resource_id)
        .load(conn)
        .unwrap();
    assert_eq!(declared, [Resource::Rebuild, Resource::Import]);
    let one: Resource = throttled_resource
        .filter(resource_id.eq(Resource::Import))
        .select(resource_id)
        .first(conn)
        .unwrap();
    assert_eq!(one, Resource::Import);
}

/// As an application's own `diesel print-schema` writes it.
#[derive(Debug, diesel::sql_types::SqlType, diesel::query_builder::QueryId)]
#[diesel(postgres_type(name = "throttled_resource_enum", schema = "resource_control"))]
#[allow(unreachable_pub)]
pub struct OwnSqlType;

#[derive(Debug, Clone, Copy, PartialEq, diesel_derive_enum::DbEnum)]
#[ExistingTypePath = "OwnSqlType"]
enum Mapped {
    #[db_rename = "cache rebuild"]
    Rebuild,
    #[db_rename = "tenant's import"]
    Import,
}
impl ThrottledResource for Mapped {
    fn label(&self) -> &str {
        match self {
            Mapped::Rebuild => "cache rebuild",
            Mapped::Import => "tenant's import",
        }
    }
}

/// An application's own enum, mapped to the type by another crate.
#[test]
fn an_enum_of_diesel_derive_enum_is_a_resource() {
    let database = database();
    let conn = &mut database.connect();
    granted(attempt(conn, &Throttle::of(Mapped::Import), "me"));
    granted(attempt(conn, &REBUILD, "me"));
    assert!(!is_granted(conn, &Throttle::of(Mapped::Rebuild), "me"));

    diesel::table! {
        use diesel::sql_types::*;
        use super::OwnSqlType;
        resource_control.throttled_resource (resource_id) {
            resource_id -> OwnSqlType,
            last_locker_details -> Text,
        }
    }
    let taken: Vec<Mapped> = throttled_resource::table
        .filter(throttled_resource::resource_id.eq(Mapped::Import))
        .select(throttled_resource::resource_id)
        .load(conn)
        .unwrap();
    assert_eq!(taken, [Mapped::Import]);
}

#[test]
fn a_reference_to_a_resource_is_the_resource() {
    let database = database();
    let conn = &mut database.connect();
    granted(attempt(conn, &Throttle::of(&Resource::Rebuild), "me"));
    let denial = attempt(conn, &REBUILD, "me").denied();
    assert!(denial.is_some());
}

#[test]
fn a_label_known_at_run_time_displays_as_itself() {
    let label = ResourceLabel("cache rebuild".into());
    assert_eq!(label.to_string(), "cache rebuild");
    assert_eq!(format!("{label:>15}|"), "  cache rebuild|");
}
