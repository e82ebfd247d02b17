//! A network that is slow, and fails at a chosen message.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use workbench::{Database, RoundTrips, When};

use crate::is;

fn took<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    (work(), start.elapsed())
}

fn execute(conn: &mut PgConnection, sql: &str) -> QueryResult<usize> {
    diesel::sql_query(sql).execute(conn)
}

#[test]
fn a_slow_network_delays_connections_and_round_trips_until_it_is_fast_again() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let round_trip = Duration::from_millis(50);
    proxy.set_delay(round_trip, Duration::from_millis(5));
    let (mut conn, opening) = took(|| proxy.connect());
    // TCP's handshake, the server's welcome, and what Diesel sends.
    let round_trips = 2 + u32::try_from(proxy.round_trips()).unwrap();
    assert!(round_trips > 2 && opening >= round_trip * round_trips);
    assert_eq!(proxy.connections(), 1);

    let batch = |conn: &mut PgConnection| conn.batch_execute("SELECT 1").unwrap();
    let ((), trip) = took(|| batch(&mut conn));
    assert!(trip >= round_trip);
    proxy.set_delay(Duration::ZERO, Duration::ZERO);
    batch(&mut conn);
}

#[test]
fn a_statement_that_is_severed_runs_or_not_and_its_client_cannot_tell() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut observer = database.connect();
    observer.batch_execute("CREATE TABLE t (n int)").unwrap();
    let simple = |conn: &mut PgConnection| conn.batch_execute("INSERT INTO t VALUES (1)");
    let prepared = |conn: &mut PgConnection| execute(conn, "INSERT INTO t VALUES (1)").map(drop);
    // The server commits before it gets the last message of the statement, if it gets what comes
    // before that.
    let commit = |conn: &mut PgConnection| {
        conn.batch_execute("BEGIN; INSERT INTO t VALUES (1)")?;
        execute(conn, "COMMIT").map(drop)
    };
    type Work<'a> = &'a dyn Fn(&mut PgConnection) -> QueryResult<()>;
    let works: [(u64, Work<'_>); 3] = [(1, &simple), (1, &prepared), (2, &commit)];
    for (number, (n, work)) in works.into_iter().enumerate() {
        for when in [When::BeforeServer, When::BeforeReply] {
            let mut conn = proxy.connect();
            let fault = proxy.sever_at(n, when);
            assert!(!fault.has_happened());
            assert!(work(&mut conn).is_err());
            assert!(fault.has_happened());
            assert!(conn.batch_execute("").is_err());
            let is_found = is(&mut observer, "EXISTS (SELECT FROM t)");
            let has_run = when == When::BeforeReply;
            assert_eq!(is_found, has_run, "work {number}, {when:?}");
            observer.batch_execute("TRUNCATE t").unwrap();
        }
    }
    // It happens once, and not at all if it is called off.
    let fault = proxy.sever_at(3, When::BeforeReply);
    proxy.disarm();
    let mut conn = proxy.connect();
    simple(&mut conn).unwrap();
    prepared(&mut conn).unwrap();
    assert!(!fault.has_happened());
}
