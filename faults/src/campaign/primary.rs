//! The server of the campaign. After each failover it is another one.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};
use fastrand::Rng;
use workbench::{Cluster, StopMode};

use crate::chance::Chance;
use crate::check::{Failover, Outage, Reload};
use crate::clock;

/// How long a standby may take until it follows.
const FOLLOWING: Duration = Duration::from_secs(60);

/// The primary server behind a constant address. The address is a link to the directory of its socket, as a virtual
/// address or a name is for servers in a network.
#[derive(Debug)]
pub(super) struct Primary {
    cluster: Mutex<Arc<Cluster>>,
    link: PathBuf,
}

impl Primary {
    pub(super) fn start(directory: &Path) -> Self {
        let primary = Self {
            cluster: Mutex::new(Arc::new(start())),
            link: directory.join("server"),
        };
        primary.point_link();
        primary
    }

    /// The directory of the socket of the current primary.
    pub(super) fn socket_directory(&self) -> &Path {
        &self.link
    }

    /// The URL of the current primary.
    pub(super) fn url(&self) -> String {
        format!(
            "postgresql:///postgres?host={}&port=5432&user=postgres&options=-c%20client_min_messages%3Derror",
            self.link.display()
        )
    }

    fn cluster(&self) -> Arc<Cluster> {
        Arc::clone(&self.cluster.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the link atomically.
    fn point_link(&self) {
        let new = self.link.with_extension("new");
        symlink(self.cluster().socket_directory(), &new)
            .and_then(|()| fs::rename(&new, &self.link))
            .expect("links can be made in the campaign's directory");
    }

    pub(super) fn restart(&self, mode: StopMode) -> Outage {
        let cluster = self.cluster();
        let began = clock::now();
        cluster.stop(mode);
        let stopped = clock::now();
        cluster.start_again();
        Outage { began, stopped }
    }

    /// Changes a setting for all sessions by a reload, and takes it back after a while. `None` where PostgreSQL has no such
    /// setting yet.
    ///
    /// The server must not be copied meanwhile, because the copy would keep the setting.
    pub(super) fn reload(
        &self,
        setting: &'static str,
        value: &str,
        period: Duration,
    ) -> Option<Reload> {
        let cluster = self.cluster();
        let is_known = format!("EXISTS (SELECT FROM pg_settings WHERE name = '{setting}')");
        if !is_so(&mut connect(&cluster), &is_known) {
            return None;
        }
        let began = clock::now();
        run(
            &cluster,
            &format!("ALTER SYSTEM SET {setting} = '{value}'; SELECT pg_reload_conf()"),
        );
        thread::sleep(period);
        run(
            &cluster,
            &format!("ALTER SYSTEM RESET {setting}; SELECT pg_reload_conf()"),
        );
        // A session that was idle then may still be ended by it.
        Some(Reload {
            setting,
            began,
            ended: clock::now(),
        })
    }

    /// The definition of the whole database, as `pg_dump` writes it. `None` if the server went away meanwhile.
    pub(super) fn definition(&self) -> Option<String> {
        let cluster = self.cluster();
        let dumped = Command::new(cluster.binaries().join("pg_dump"))
            .args(["--schema-only", "--no-owner", "--dbname", &self.url()])
            .output()
            .expect("pg_dump is beside the server's programs");
        let text = String::from_utf8(dumped.stdout).ok();
        text.filter(|_| dumped.status.success())
    }

    /// Makes a standby, lets it follow for a while, crashes the primary and promotes the standby.
    ///
    /// In half of the cases the standby loses its connection to the primary a moment before. Transactions that are committed
    /// in between are lost if replication is asynchronous. If it is synchronous, none is committed in between.
    pub(super) fn fail_over(&self, synchronous: bool, random: &mut Rng) -> (Outage, Failover) {
        let old = self.cluster();
        let standby = old.standby();
        let is_following = if synchronous {
            // The standby was copied before, so it does not wait for a standby itself.
            run(
                &old,
                "ALTER SYSTEM SET synchronous_standby_names = '*'; SELECT pg_reload_conf()",
            );
            "EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = 'sync')"
        } else {
            "EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming')"
        };
        wait_until(&old, is_following);
        if synchronous {
            // The checkpointer runs this after it has published the setting to the other processes.
            run(&old, "CHECKPOINT");
        }
        thread::sleep(random.millis(20, 150));
        let followed = clock::now();
        wait_until(
            &standby,
            &format!("pg_last_wal_receive_lsn() >= '{}'", written(&old)),
        );
        if random.one_in(2) {
            run(
                &standby,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_wal_receiver",
            );
            thread::sleep(random.millis(20, 150));
        }

        let began = clock::now();
        old.stop(StopMode::Immediate);
        let stopped = clock::now();
        standby.promote();
        *self.cluster.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(standby);
        self.point_link();
        // Removing the old server takes a while.
        thread::spawn(move || drop(old));
        (
            Outage { began, stopped },
            Failover {
                followed,
                began,
                stopped,
                synchronous,
            },
        )
    }
}

/// Starts a server that is as small as possible, because each failover copies it.
fn start() -> Cluster {
    let cluster = Cluster::builder().wal_segment_megabytes(1).start();
    for template in ["template0", "template1"] {
        run(
            &cluster,
            &format!("ALTER DATABASE {template} IS_TEMPLATE false; DROP DATABASE {template}"),
        );
    }
    cluster
}

fn run(cluster: &Cluster, statements: &str) {
    let mut conn = connect(cluster);
    for statement in statements.split("; ") {
        conn.batch_execute(statement)
            .unwrap_or_else(|error| panic!("{statement}: {error}"));
    }
}

/// The position up to which the write-ahead log is flushed.
fn written(cluster: &Cluster) -> String {
    diesel::select(diesel::dsl::sql::<Text>("pg_current_wal_flush_lsn()::text"))
        .get_result(&mut connect(cluster))
        .unwrap_or_else(|error| panic!("the end of the log: {error}"))
}

fn wait_until(cluster: &Cluster, condition: &str) {
    let mut conn = connect(cluster);
    let end = Instant::now() + FOLLOWING;
    loop {
        if is_so(&mut conn, condition) {
            return;
        }
        assert!(
            Instant::now() < end,
            "not after {FOLLOWING:?}: {condition}\n{}",
            cluster.log()
        );
        thread::sleep(Duration::from_millis(10));
    }
}

fn is_so(conn: &mut PgConnection, condition: &str) -> bool {
    diesel::select(diesel::dsl::sql::<Bool>(condition)).get_result(conn) == Ok(true)
}

fn connect(cluster: &Cluster) -> PgConnection {
    PgConnection::establish(&cluster.url("postgres"))
        .unwrap_or_else(|error| panic!("cannot connect: {error}\n{}", cluster.log()))
}
