//! Databases on a server that somebody else runs.

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};
use workbench::{Cluster, Database, RoundTrips};

use crate::child::{Child, is_empty, say, wait};

pub(crate) fn make_a_database() {
    let database = Database::new();
    let name = diesel::select(sql::<Text>("current_database()::text"))
        .get_result::<String>(&mut database.connect());
    assert_eq!(name.as_deref(), Ok(database.name()));
    say(database.name());
    wait();
}

pub(crate) fn make_a_database_and_count() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut conn = PgConnection::establish(&proxy.url()).unwrap();
    let name =
        diesel::select(sql::<Text>("current_database()::text")).get_result::<String>(&mut conn);
    assert_eq!(name.as_deref(), Ok(database.name()));
    say(proxy.count(|| conn.batch_execute("SELECT 1").unwrap()));
}

fn connect(cluster: &Cluster) -> PgConnection {
    PgConnection::establish(&cluster.url("postgres")).unwrap()
}

fn databases(conn: &mut PgConnection) -> Vec<String> {
    let names = sql::<Text>(
        "datname::text FROM pg_database WHERE datname LIKE '%interlock%' ORDER BY datname",
    );
    diesel::select(names).load(conn).unwrap()
}

/// Connection strings of different forms for one server.
fn forms(cluster: &Cluster) -> [String; 3] {
    let directory = cluster.socket_directory().display();
    [
        cluster.url("postgres"),
        format!("postgres:///postgres?host={directory}&user=postgres&application_name=a%20b"),
        format!("postgresql:///?host={directory}&user=postgres&dbname=template1"),
    ]
}

#[test]
fn databases_are_made_on_the_server_of_database_url_and_dropped() {
    let cluster = Cluster::start();
    let mut conn = connect(&cluster);
    for url in forms(&cluster) {
        let mut child = Child::start("make a database", &[("DATABASE_URL", &url)]);
        let name = child.said();
        assert_eq!(databases(&mut conn), [name]);
        assert!(is_empty(child.temporary()), "another server was started");
        child.go_on();
        assert!(child.end().0.success());
        assert!(databases(&mut conn).is_empty());
    }
}

#[test]
fn round_trips_are_counted_in_front_of_the_server_of_database_url() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let cluster = Cluster::builder()
        .setting("listen_addresses", "127.0.0.1")
        .setting("port", port.to_string())
        .start();
    let over_tcp = [
        format!("postgresql://postgres@127.0.0.1:{port}/postgres"),
        format!("postgresql:///postgres?user=postgres&hostaddr=127.0.0.1&port={port}"),
    ];
    let port = port.to_string();
    for url in forms(&cluster).iter().chain(&over_tcp) {
        let mut child = Child::start(
            "make a database and count",
            &[("DATABASE_URL", url), ("PGPORT", &port)],
        );
        assert_eq!(child.said(), "1", "{url}");
        assert!(child.end().0.success());
    }
}

#[test]
fn only_old_databases_of_ours_without_connections_are_dropped() {
    let cluster = Cluster::start();
    let mut conn = connect(&cluster);
    let now = diesel::select(sql::<BigInt>("extract(epoch FROM now())::bigint"))
        .get_result::<i64>(&mut conn)
        .unwrap();
    let name =
        |age: i64, number: u32| format!("interlock_test_{}_0123456789abcdef_{number}", now - age);
    let old = name(3700, 0);
    let busy = name(3700, 1);
    let young = name(3500, 2);
    let foreign = [
        "interlock",
        "interlock_test_1000000000",
        "my_interlock_test_1000000000_0123456789abcdef_0",
    ];
    for name in [&old, &busy, &young]
        .into_iter()
        .map(String::as_str)
        .chain(foreign)
    {
        conn.batch_execute(&format!("CREATE DATABASE {name}"))
            .unwrap();
    }
    let _session = PgConnection::establish(&cluster.url(&busy)).unwrap();

    let mut child = Child::start(
        "make a database",
        &[("DATABASE_URL", &cluster.url("postgres"))],
    );
    child.said();
    child.go_on();
    child.end();
    let mut expected = vec![busy, young];
    expected.extend(foreign.map(str::to_owned));
    expected.sort();
    let mut left = databases(&mut conn);
    left.sort();
    assert_eq!(left, expected);
}

#[test]
fn a_role_that_may_not_create_databases_is_an_error_that_says_so() {
    let cluster = Cluster::start();
    connect(&cluster)
        .batch_execute("CREATE ROLE modest LOGIN")
        .unwrap();
    let url = cluster.url("postgres").replace("postgres@", "modest@");
    let (status, errors) = Child::start("make a database", &[("DATABASE_URL", &url)]).end();
    assert!(!status.success());
    assert!(
        errors.contains("the role \"modest\" of DATABASE_URL may not create databases"),
        "{errors}"
    );
}

#[test]
fn a_database_url_that_is_no_url_is_refused() {
    let keywords = "host=localhost dbname=postgres";
    let (status, errors) = Child::start("make a database", &[("DATABASE_URL", keywords)]).end();
    assert!(!status.success());
    assert!(
        errors.contains("DATABASE_URL: \"host=localhost dbname=postgres\" is not a URL such as"),
        "{errors}"
    );
}

#[test]
fn an_unreachable_server_is_an_error_that_says_so() {
    let url = "postgresql:///postgres?host=/nonexistent";
    let (status, errors) = Child::start("make a database", &[("DATABASE_URL", url)]).end();
    assert!(!status.success());
    assert!(
        errors.contains("cannot connect to the server of DATABASE_URL"),
        "{errors}"
    );
}

#[test]
fn a_machine_without_postgresql_is_an_error_that_says_what_to_install() {
    let nowhere = [("PGBINDIR", "/nonexistent")];
    let (status, errors) = Child::start("make a database", &nowhere).end();
    assert!(!status.success());
    assert!(errors.contains("PGBINDIR is /nonexistent"), "{errors}");
}
