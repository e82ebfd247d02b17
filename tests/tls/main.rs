//! Both halves, and every pool, over TLS.
//!
//! A part of `cargo test --workspace --all-features`, because the libpq of `interlock` has TLS.

mod crashes;
mod locking;

use std::sync::OnceLock;
use std::time::Duration;

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Bool;
use workbench::{Cluster, Database, Endpoint, RoundTrips};

/// A database of the server with TLS, which the tests share. The endpoint of the database itself,
/// for observers, is without TLS.
fn database() -> Database {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    let cluster = CLUSTER.get_or_init(|| Cluster::builder().tls().start());
    cluster.database()
}

/// A proxy over which a round trip takes 60 ms.
fn far_away(server: &Endpoint) -> RoundTrips {
    let proxy = RoundTrips::in_front_of_tls(server);
    proxy.set_delay(Duration::from_millis(60), Duration::ZERO);
    proxy
}

/// Whether a condition is true.
fn is(conn: &mut PgConnection, condition: &str) -> bool {
    let value = diesel::select(sql::<Bool>(condition)).get_result(conn);
    value.unwrap()
}
