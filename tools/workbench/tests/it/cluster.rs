//! A server of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use workbench::{Cluster, StopMode};

use crate::until;

fn connect(cluster: &Cluster) -> PgConnection {
    cluster.endpoint("postgres").connect()
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
