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
        .setting("search_path", r"it's, a\b")
        .start();
    let mut conn = connect(&cluster);
    let shown = text(&mut conn, "current_setting('search_path')");
    assert_eq!(shown, r"it's, a\b");
    assert!(conn.batch_execute("SELECT 1/0").is_err());
    assert!(cluster.log().contains("SELECT 1/0"));

    let directory = cluster.directory().to_owned();
    assert!(directory.join(".s.PGSQL.5432").exists());
    drop(cluster);
    assert!(!directory.exists());
}

#[test]
fn a_cluster_that_ended_takes_no_connections_until_it_is_started_again_with_its_data() {
    let cluster = Cluster::start();
    let mut conn = connect(&cluster);
    conn.batch_execute("CREATE TABLE kept ()").unwrap();
    let ends: [&dyn Fn(); 3] = [
        &|| cluster.stop(StopMode::Fast),
        &|| cluster.stop(StopMode::Immediate),
        &|| cluster.kill(),
    ];
    for end in ends {
        end();
        until("the session has ended", || conn.batch_execute("").is_err());
        assert!(PgConnection::establish(&cluster.url("postgres")).is_err());
        cluster.start_again();
        conn = connect(&cluster);
        conn.batch_execute("SELECT FROM kept").unwrap();
    }
    let twice = catch_unwind(AssertUnwindSafe(|| cluster.start_again()));
    assert!(twice.is_err(), "it runs already");
}

#[test]
fn a_standby_follows_after_restarts() {
    let primary = Cluster::start();
    let standby = primary.standby();
    assert!(!is(&mut connect(&primary), "pg_is_in_recovery()"));
    assert!(is(&mut connect(&standby), "pg_is_in_recovery()"));
    primary.restart(StopMode::Fast);
    standby.restart(StopMode::Fast);

    let create = |cluster| connect(cluster).batch_execute("CREATE TABLE followed ()");
    create(&primary).unwrap();
    let mut reader = connect(&standby);
    let is_there = "to_regclass('followed') IS NOT NULL";
    until("the standby has it", || is(&mut reader, is_there));
    assert!(create(&standby).is_err());
}
