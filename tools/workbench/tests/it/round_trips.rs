//! Round trips, counted on the wire.

use std::thread;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::Integer;
use diesel_async::SimpleAsyncConnection;
use workbench::{Database, RoundTrips, block_on};

use crate::{is, until};

fn proxy() -> (Database, RoundTrips) {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    (database, proxy)
}

fn batch(conn: &mut PgConnection) {
    conn.batch_execute("BEGIN; SELECT 2; COMMIT").unwrap();
}

#[test]
fn a_statement_is_prepared_once_if_it_is_cached_and_one_round_trip() {
    let (_database, proxy) = proxy();
    let mut conn = proxy.connect();
    let cached = |conn: &mut PgConnection| {
        let one = diesel::select(1.into_sql::<Integer>()).get_result::<i32>(conn);
        assert_eq!(one, Ok(1));
    };
    let parses = proxy.parses();
    cached(&mut conn);
    assert_eq!(proxy.parses() - parses, 1);
    assert_eq!(proxy.count(|| cached(&mut conn)), 1);
    assert_eq!(proxy.parses() - parses, 1);
    assert_eq!(proxy.count(|| batch(&mut conn)), 1);
}

#[test]
fn messages_longer_than_a_buffer_are_not_miscounted() {
    let (_database, proxy) = proxy();
    let mut conn = proxy.connect();
    // Messages end at all places in a buffer, and contain what looks like messages.
    for length in 3_330..3_350 {
        let select = format!("SELECT '{}'", "SQFFFPS".repeat(length));
        assert_eq!(proxy.count(|| conn.batch_execute(&select).unwrap()), 1);
    }
}

#[test]
fn the_connections_of_all_threads_are_counted() {
    let (_database, proxy) = proxy();
    let pool = proxy.pool(4);
    let conns: Vec<_> = (0..4).map(|_| pool.get().unwrap()).collect();
    let trips = proxy.count(|| {
        thread::scope(|scope| {
            for mut conn in conns {
                scope.spawn(move || (0..50).for_each(|_| batch(&mut conn)));
            }
        });
    });
    assert_eq!(trips, 200);

    let mut conn = block_on(proxy.connect_async());
    let mut batch = || block_on(conn.batch_execute("SELECT 1")).unwrap();
    // The end of the connection's set-up is sent no later than this.
    batch();
    assert_eq!(proxy.count(batch), 1);
}

#[test]
fn a_cut_network_hides_the_end_of_a_connection_and_lets_new_ones_hang() {
    let (database, proxy) = proxy();
    let mut observer = database.connect();
    let mut conn = proxy.connect();
    conn.batch_execute("SELECT pg_advisory_lock(7)").unwrap();
    let mut is_held = || {
        let held = "EXISTS (SELECT FROM pg_locks JOIN pg_database ON database = pg_database.oid \
                    WHERE locktype = 'advisory' AND datname = current_database())";
        is(&mut observer, held)
    };
    proxy.cut();
    drop(conn);
    let hasty = proxy.url_with("connect_timeout", "2");
    assert!(PgConnection::establish(&hasty).is_err());
    assert!(is_held());
    proxy.restore();
    until("the lock is free", || !is_held());
}

#[test]
fn a_proxy_that_severs_or_drops_closes_its_connections() {
    let (_database, proxy) = proxy();
    let mut conn = proxy.connect();
    proxy.sever();
    assert!(conn.batch_execute("SELECT 1").is_err());
    conn = proxy.connect();
    batch(&mut conn);

    let url = proxy.url();
    proxy.cut();
    drop(proxy);
    assert!(conn.batch_execute("SELECT 1").is_err());
    assert!(PgConnection::establish(&url).is_err());
}
