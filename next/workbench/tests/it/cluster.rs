//! A server of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use workbench::{Cluster, StopMode};

use crate::{is, text, until};

fn connect(cluster: &Cluster) -> PgConnection {
    cluster.endpoint("postgres").connect()
}

#[test]
fn a_cluster_has_the_settings_of_its_builder_and_is_gone_when_it_drops() {
    let cluster = Cluster::builder()
        .setting("max_connections", "7")
        .setting("search_path", r"it's, a\b")
        .german()
        .start();
    let mut conn = connect(&cluster);
    assert_eq!(text(&mut conn, "current_setting('max_connections')"), "7");
    assert_eq!(
        text(&mut conn, "current_setting('search_path')"),
        r"it's, a\b"
    );
    assert!(conn.batch_execute("SELECT 1/0").is_err());
    assert!(cluster.log().contains("Division durch Null"));

    let directory = cluster.directory().to_owned();
    assert!(directory.join(".s.PGSQL.5432").exists());
    drop(cluster);
    assert!(!directory.exists());
}

#[test]
fn a_restarted_cluster_has_its_data_and_its_url() {
    let cluster = Cluster::start();
    let mut before = connect(&cluster);
    before
        .batch_execute("CREATE TABLE kept AS SELECT 1 AS id")
        .unwrap();
    let restarts: [&dyn Fn(); 3] = [
        &|| cluster.restart(StopMode::Fast),
        &|| cluster.restart(StopMode::Immediate),
        &|| {
            cluster.kill();
            cluster.start_again();
        },
    ];
    for restart in restarts {
        restart();
        assert!(before.batch_execute("SELECT 1").is_err());
        before = connect(&cluster);
        assert_eq!(text(&mut before, "SELECT count(*) FROM kept"), "1");
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
    let twice = catch_unwind(AssertUnwindSafe(|| cluster.start_again()));
    assert!(twice.is_err(), "it runs already");
    connect(&cluster);
}

#[test]
fn a_cluster_that_cannot_start_says_why() {
    let builder = Cluster::builder().setting("shared_buffers", "much");
    let panic = catch_unwind(|| builder.start()).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("shared_buffers"), "{message}");
}

#[test]
fn a_standby_follows_after_restarts_and_can_be_promoted() {
    let primary = Cluster::start();
    let standby = primary.standby();
    assert!(!is(&mut connect(&primary), "pg_is_in_recovery()"));
    assert!(is(&mut connect(&standby), "pg_is_in_recovery()"));
    primary.restart(StopMode::Fast);
    standby.restart(StopMode::Fast);

    let create =
        |cluster, table| connect(cluster).batch_execute(&format!("CREATE TABLE {table} ()"));
    create(&primary, "followed").unwrap();
    until("the standby has the table", || {
        is(
            &mut connect(&standby),
            "to_regclass('followed') IS NOT NULL",
        )
    });
    assert!(create(&standby, "forbidden").is_err());

    primary.stop(StopMode::Immediate);
    standby.promote();
    create(&standby, "allowed").unwrap();
}
