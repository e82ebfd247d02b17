//! What the workbench must do so that the tests of the crate can be believed, and nothing more.
//!
//! A server that does not stop, a network that does not fail or a round trip that is not counted
//! would let a test pass; a process that is left behind, or a database of others that is dropped,
//! would be seen by no test. Whatever else is broken here fails the tests of the crate.

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
