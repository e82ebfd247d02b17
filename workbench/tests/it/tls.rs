//! A server that demands TLS. Blocking connections to it are tested by `scripts/test_with tls`, with a libpq that can.

use std::net::{Ipv4Addr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Bool;
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use workbench::{Cluster, Endpoint, RoundTrips, StopMode, block_on};

use crate::until;

fn parameter(endpoint: &Endpoint, name: &str) -> String {
    let url = url::Url::parse(&endpoint.url()).unwrap();
    let mut pairs = url.query_pairs().into_owned();
    pairs.find(|(found, _)| found == name).unwrap().1
}

async fn is_encrypted(conn: &mut AsyncPgConnection) -> bool {
    let ssl = sql::<Bool>("ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()");
    diesel::select(ssl).get_result(conn).await.unwrap()
}

#[test]
fn a_server_with_tls_has_encrypted_connections_and_pools_only() {
    let cluster = Cluster::builder().tls().start();
    let database = cluster.database();
    database.connect().batch_execute("SELECT 1").unwrap();
    let tls = database.tls();
    let (deadpool, bb8) = (tls.deadpool(1), tls.bb8(1));
    cluster.stop(StopMode::Fast);
    // Another program has taken the port meanwhile, for a while.
    let port = parameter(tls, "port").parse().unwrap();
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| cluster.start_again());
        until("the server has tried to start", || {
            cluster.log().contains("could not bind")
        });
        drop(taken);
    });
    block_on(async {
        assert!(is_encrypted(&mut tls.connect_async().await).await);
        assert!(is_encrypted(&mut deadpool.get().await.unwrap()).await);
        assert!(is_encrypted(&mut bb8.get().await.unwrap()).await);
        let verified = Endpoint::new(&tls.url_with("sslmode", "verify-full"));
        assert!(is_encrypted(&mut verified.connect_async().await).await);

        let plain = Endpoint::new(&tls.url_with("sslmode", "disable"));
        assert!(PgConnection::establish(&plain.url()).is_err());
        let foreign = Cluster::builder().tls().start();
        let authority = parameter(&foreign.tls_endpoint("postgres"), "sslrootcert");
        let impostor = Endpoint::new(&tls.url_with("sslrootcert", &authority));
        assert!(impostor.try_connect_async().await.is_err());
    });
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
