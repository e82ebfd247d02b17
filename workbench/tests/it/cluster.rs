//! A server of its own.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Text};
use workbench::{Cluster, StopMode};

use crate::poll;

fn connect(cluster: &Cluster) -> PgConnection {
    PgConnection::establish(&cluster.url("postgres")).unwrap()
}

fn shown(conn: &mut PgConnection, parameter: &str) -> String {
    diesel::select(sql::<Text>(&format!("current_setting('{parameter}')")))
        .get_result(conn)
        .unwrap()
}

fn is_in_recovery(cluster: &Cluster) -> bool {
    diesel::select(sql::<Bool>("pg_is_in_recovery()"))
        .get_result(&mut connect(cluster))
        .unwrap()
}

#[test]
fn a_cluster_has_the_settings_of_its_builder() {
    let cluster = Cluster::builder()
        .setting("max_connections", "7")
        .setting("search_path", r"it's, a\b")
        .start();
    let mut conn = connect(&cluster);
    assert_eq!(shown(&mut conn, "max_connections"), "7");
    assert_eq!(shown(&mut conn, "search_path"), r"it's, a\b");
    assert_eq!(shown(&mut conn, "fsync"), "off");
    assert_eq!(shown(&mut conn, "listen_addresses"), "");
    assert_eq!(
        shown(&mut conn, "data_directory"),
        cluster.data_directory().to_str().unwrap()
    );
}

#[test]
fn a_dropped_cluster_is_gone() {
    let cluster = Cluster::start();
    let directory = cluster.socket_directory().to_owned();
    assert!(directory.join(".s.PGSQL.5432").exists());
    drop(cluster);
    assert!(!directory.exists());
}

#[test]
fn a_german_cluster_speaks_german() {
    let cluster = Cluster::builder().german().start();
    let error = connect(&cluster).batch_execute("SELECT 1/0").unwrap_err();
    assert_eq!(error.to_string(), "Division durch Null");
    assert!(cluster.log().contains("Division durch Null"));
}

#[test]
fn a_restarted_cluster_has_its_data_and_its_url() {
    let cluster = Cluster::start();
    let mut before = connect(&cluster);
    before
        .batch_execute("CREATE TABLE kept (id bigint); INSERT INTO kept VALUES (1)")
        .unwrap();
    for mode in [StopMode::Fast, StopMode::Immediate] {
        cluster.restart(mode);
        assert!(before.batch_execute("SELECT 1").is_err());
        before = connect(&cluster);
        let rows = diesel::select(sql::<BigInt>("(SELECT count(*) FROM kept)"))
            .get_result::<i64>(&mut before);
        assert_eq!(rows, Ok(1));
    }
}

#[test]
fn a_stopped_cluster_takes_no_connections_until_it_is_started_again() {
    let cluster = Cluster::start();
    cluster.stop(StopMode::Fast);
    cluster.stop(StopMode::Fast);
    assert!(PgConnection::establish(&cluster.url("postgres")).is_err());
    cluster.start_again();
    connect(&cluster);
    assert!(
        catch_unwind(AssertUnwindSafe(|| cluster.start_again())).is_err(),
        "it runs already"
    );
    connect(&cluster);
}

#[test]
fn a_server_that_was_killed_may_be_started_again() {
    let cluster = Cluster::start();
    let pid = fs::read_to_string(cluster.socket_directory().join("pid")).unwrap();
    assert!(crate::child::signal("KILL", pid.trim()));
    poll::until("the server has ended", || {
        !cluster.socket_directory().join("pid").exists()
    });
    cluster.start_again();
    connect(&cluster);
}

#[test]
fn a_cluster_that_cannot_start_says_why() {
    let panic =
        catch_unwind(|| Cluster::builder().setting("shared_buffers", "much").start()).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("shared_buffers"), "{message}");
}

#[test]
fn a_standby_follows_and_can_be_promoted() {
    let primary = Cluster::start();
    let standby = primary.standby();
    assert!(!is_in_recovery(&primary));
    assert!(is_in_recovery(&standby));

    connect(&primary)
        .batch_execute("CREATE TABLE followed ()")
        .unwrap();
    poll::until("the standby has the table", || {
        connect(&standby)
            .batch_execute("SELECT FROM followed")
            .is_ok()
    });
    assert!(
        connect(&standby)
            .batch_execute("CREATE TABLE forbidden ()")
            .is_err()
    );

    primary.stop(StopMode::Immediate);
    standby.promote();
    assert!(!is_in_recovery(&standby));
    connect(&standby)
        .batch_execute("CREATE TABLE allowed ()")
        .unwrap();
}

#[test]
fn a_restarted_primary_is_followed_again() {
    let primary = Cluster::start();
    let standby = primary.standby();
    primary.restart(StopMode::Fast);
    standby.restart(StopMode::Fast);
    connect(&primary)
        .batch_execute("CREATE TABLE followed ()")
        .unwrap();
    poll::until("the standby has the table", || {
        connect(&standby)
            .batch_execute("SELECT FROM followed")
            .is_ok()
    });
}
