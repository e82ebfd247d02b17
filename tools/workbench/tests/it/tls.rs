//! A server that demands TLS. Blocking connections to it are tested by `tests/tls`,
//! with a libpq that can.

use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::sql_types::Bool;
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use workbench::{Cluster, RoundTrips, block_on};

async fn is_encrypted(conn: &mut AsyncPgConnection) -> bool {
    let ssl = sql::<Bool>("ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()");
    diesel::select(ssl).get_result(conn).await.unwrap()
}

#[test]
fn tls_passes_a_proxy_uncounted_and_delayed() {
    let cluster = Cluster::builder().tls().start();
    let proxy = RoundTrips::in_front_of_tls(&cluster.tls_endpoint("postgres"));
    let round_trip = Duration::from_millis(20);
    proxy.set_delay(round_trip, Duration::ZERO);
    block_on(async {
        let start = Instant::now();
        let mut conn = proxy.connect_async().await;
        // TCP's handshake, the request for TLS, its handshake, and the welcome.
        assert!(start.elapsed() >= round_trip * 4);
        assert!(is_encrypted(&mut conn).await);
    });
    assert_eq!((proxy.connections(), proxy.round_trips()), (1, 0));
    proxy.sever();
}
