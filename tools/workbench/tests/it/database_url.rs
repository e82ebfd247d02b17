//! Databases on a server that somebody else runs.

use std::time::{SystemTime, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use workbench::{Cluster, Database, RoundTrips};

use crate::child::{Child, say, wait};
use crate::text;

pub(crate) fn make_a_database() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut conn = proxy.connect();
    assert_eq!(text(&mut conn, "current_database()"), database.name());
    assert_eq!(proxy.count(|| conn.batch_execute("SELECT 1").unwrap()), 1);
    say(database.name());
    wait();
}

fn databases(conn: &mut PgConnection) -> String {
    let names = "SELECT coalesce(string_agg(datname, ' ' ORDER BY datname), '') FROM pg_database \
                 WHERE datname LIKE '%interlock%'";
    text(conn, names)
}

#[test]
fn databases_are_made_on_the_server_of_database_url_and_dropped() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let cluster = Cluster::builder()
        .setting("listen_addresses", "127.0.0.1")
        .port(port)
        .start();
    let mut conn = cluster.endpoint("postgres").connect();
    let directory = cluster.directory().display();
    for url in [
        cluster.url("postgres"),
        format!("postgres:///?host={directory}&port={port}&user=postgres&dbname=template1"),
        format!("postgresql://postgres@127.0.0.1:{port}/postgres?application_name=a%20b"),
        format!("postgresql:///postgres?user=postgres&hostaddr=127.0.0.1&port={port}"),
    ] {
        let mut child = Child::start("make a database", &url);
        let name = child.read();
        assert_eq!(databases(&mut conn), name);
        assert!(child.left_nothing(), "another server was started");
        child.go_on();
        assert!(child.succeeds());
        assert_eq!(databases(&mut conn), "");
    }
}

#[test]
fn only_old_databases_of_killed_runs_are_dropped() {
    let cluster = Cluster::start();
    let mut conn = cluster.endpoint("postgres").connect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let name = |age, number| {
        let then = now.as_secs() - age;
        format!("interlock_test_{then}_0123456789abcdef_{number}")
    };
    let (old, busy, young) = (name(3700, 0), name(3700, 1), name(3500, 2));
    let foreign = "my_interlock_test_1000000000_0123456789abcdef_0";
    let kept = ["interlock_test_1000000000", &busy, &young, foreign];
    for name in kept.iter().chain([&&*old]) {
        conn.batch_execute(&format!("CREATE DATABASE {name}"))
            .unwrap();
    }
    let _session = cluster.endpoint(&busy).connect();

    let mut child = Child::start("make a database", &cluster.url("postgres"));
    child.read();
    child.go_on();
    assert!(child.succeeds());
    let mut left: Vec<_> = kept.to_vec();
    left.sort_unstable();
    assert_eq!(databases(&mut conn), left.join(" "));
}
