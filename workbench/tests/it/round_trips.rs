//! Round trips, counted on the wire.

use std::io::Read;
use std::net::TcpStream;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use workbench::{Database, RoundTrips};

use crate::poll;

fn one(conn: &mut PgConnection) {
    use diesel::sql_types::Integer;
    let one = diesel::select(diesel::dsl::sql::<Integer>("1")).get_result::<i32>(conn);
    assert_eq!(one, Ok(1));
}

fn cached_one(conn: &mut PgConnection) {
    use diesel::sql_types::Integer;
    let one = diesel::select(1_i32.into_sql::<Integer>()).get_result::<i32>(conn);
    assert_eq!(one, Ok(1));
}

#[test]
fn a_batch_is_one_round_trip() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut conn = PgConnection::establish(&proxy.url()).unwrap();
    assert_eq!(proxy.count(|| conn.batch_execute("SELECT 1").unwrap()), 1);
    assert_eq!(
        proxy.count(|| conn.batch_execute("SELECT 1; SELECT 2; SELECT 3").unwrap()),
        1
    );
    assert_eq!(
        proxy.count(|| conn
            .transaction(|conn| conn.batch_execute("SELECT 1"))
            .unwrap()),
        3
    );
    assert_eq!(proxy.count(|| {}), 0);
}

#[test]
fn a_cached_statement_is_prepared_once_and_then_one_round_trip() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut conn = PgConnection::establish(&proxy.url()).unwrap();

    let parses = proxy.parses();
    cached_one(&mut conn);
    assert_eq!(proxy.parses() - parses, 1);

    let parses = proxy.parses();
    assert_eq!(proxy.count(|| cached_one(&mut conn)), 1);
    assert_eq!(proxy.parses() - parses, 0);

    assert_eq!(proxy.count(|| one(&mut conn)), 1);
    assert_eq!(proxy.parses() - parses, 1);
}

#[test]
fn messages_longer_than_a_buffer_are_not_miscounted() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut conn = PgConnection::establish(&proxy.url()).unwrap();
    let text = "SQ\0\0\0PSQ".replace('\0', "F").repeat(100_000);
    let length = |conn: &mut PgConnection| {
        use diesel::sql_types::{Integer, Text};
        diesel::select(
            diesel::dsl::sql::<Integer>("length(")
                .bind::<Text, _>(&text)
                .sql(")"),
        )
        .get_result::<i32>(conn)
    };
    assert_eq!(
        proxy.count(|| assert_eq!(length(&mut conn), Ok(800_000))),
        1
    );
}

#[test]
fn all_connections_of_a_pool_are_counted() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = diesel::r2d2::Pool::builder()
        .max_size(4)
        .test_on_check_out(false)
        .build(diesel::r2d2::ConnectionManager::<PgConnection>::new(
            proxy.url(),
        ))
        .unwrap();
    let trips = proxy.count(|| {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut conn = pool.get().unwrap();
                    (0..50).for_each(|_| one(&mut conn));
                });
            }
        });
    });
    assert_eq!(trips, 200);
}

#[test]
fn a_cut_network_swallows_the_reply_until_it_is_restored() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut conn = PgConnection::establish(&proxy.url()).unwrap();
    one(&mut conn);

    proxy.cut();
    let before = proxy.round_trips();
    let (sender, replies) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            one(&mut conn);
            sender.send(()).unwrap();
        });
        // Nothing to poll for: the point is that nothing happens.
        assert!(replies.recv_timeout(Duration::from_millis(200)).is_err());
        assert_eq!(proxy.round_trips(), before);
        proxy.restore();
        replies.recv_timeout(Duration::from_secs(30)).unwrap();
    });
    assert_eq!(proxy.round_trips(), before + 1);
}

#[test]
fn the_end_of_a_connection_is_not_noticed_while_the_network_is_cut() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut observer = database.connect();
    let mut conn = PgConnection::establish(&proxy.url()).unwrap();
    conn.batch_execute("SELECT pg_advisory_lock(7)").unwrap();

    let mut is_held = || {
        use diesel::sql_types::Bool;
        let held = "EXISTS (SELECT FROM pg_locks JOIN pg_database ON database = pg_database.oid \
                    WHERE locktype = 'advisory' AND datname = current_database())";
        diesel::select(diesel::dsl::sql::<Bool>(held))
            .get_result::<bool>(&mut observer)
            .unwrap()
    };
    proxy.cut();
    drop(conn);
    for _ in 0..20 {
        assert!(is_held());
    }
    proxy.restore();
    poll::until("the lock is free", || !is_held());
}

#[test]
fn a_new_connection_hangs_while_the_network_is_cut() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    proxy.cut();
    let hasty = format!("{}&connect_timeout=2", proxy.url());
    let hasty = if hasty.contains("://") {
        hasty
    } else {
        format!("{} connect_timeout=2", proxy.url())
    };
    assert!(PgConnection::establish(&hasty).is_err());
    proxy.restore();
    PgConnection::establish(&proxy.url()).unwrap();
}

#[test]
fn severed_connections_are_closed_and_new_ones_may_be_made() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut conn = PgConnection::establish(&proxy.url()).unwrap();
    proxy.sever();
    assert!(conn.batch_execute("SELECT 1").is_err());
    one(&mut PgConnection::establish(&proxy.url()).unwrap());
}

#[test]
fn dropping_the_proxy_closes_its_connections_even_if_the_network_is_cut() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut conn = PgConnection::establish(&proxy.url()).unwrap();
    let url = proxy.url();
    proxy.cut();
    drop(proxy);
    assert!(conn.batch_execute("SELECT 1").is_err());
    assert!(PgConnection::establish(&url).is_err());
}

#[test]
fn a_client_with_another_protocol_is_sent_away() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let port = proxy
        .url()
        .split_once("127.0.0.1:")
        .map(|(_, rest)| rest.split('/').next().unwrap().to_owned())
        .expect("the proxy listens on the loopback interface");
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    std::io::Write::write_all(&mut stream, b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply);
    assert!(reply.is_empty());
}
