//! Tests for defects of the workbench that the tests of the crate would not notice.
//!
//! If a server did not stop, a network did not fail or a round trip was not counted, a test of the
//! crate could pass wrongly. No test of the crate sees a process that is left behind, or a foreign
//! database that is dropped. Any other defect of the workbench fails the tests of the crate.

mod child;
mod cluster;
mod database_url;
mod left_behind;
mod network;
mod round_trips;
mod tls;

use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};

/// Waits until `happened`, and panics if that takes half a minute.
#[track_caller]
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !happened() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn text(conn: &mut PgConnection, expression: &str) -> String {
    let value = diesel::select(sql::<Text>(&format!("({expression})::text"))).get_result(conn);
    value.unwrap()
}

fn is(conn: &mut PgConnection, condition: &str) -> bool {
    let value = diesel::select(sql::<Bool>(condition)).get_result(conn);
    value.unwrap()
}
