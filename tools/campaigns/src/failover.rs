//! Failovers: in each round the standby of a primary is promoted while processes are at work.

mod check;
mod disturb;
mod outages;
pub(crate) mod patroni;

use std::error::Error;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Bool;
use diesel_interlock::migrations;
use workbench::{Cluster, RoundTrips, StopMode};

use self::disturb::Disturber;
use crate::processes::Processes;
use crate::record::{self, now};
use crate::worker::{self, Campaign};

/// How the primary changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The standby is asynchronous, and is cut off a moment before the primary crashes.
    LostCommits,
    /// The primary of a synchronous standby crashes.
    Crash,
    /// The primary of a synchronous standby refuses writes while clients are still connected to it,
    /// and is stopped later.
    ReadOnly,
    /// The primary of a synchronous standby lives on, with half of the clients.
    SplitBrain,
    /// Patroni stops the primary and promotes a standby that has received everything.
    Switchover { is_synchronous: bool },
    /// The primary and its Patroni are killed.
    NodeCrash { is_synchronous: bool },
    /// The Patroni of the primary is suspended. The primary lives on, with half of the clients,
    /// until its Patroni goes on.
    Hang { is_synchronous: bool },
}

impl Kind {
    /// Whether commits that were acknowledged may be missing on the new primary.
    fn loses_commits(self) -> bool {
        match self {
            Self::LostCommits => true,
            Self::Crash | Self::ReadOnly | Self::SplitBrain | Self::Switchover { .. } => false,
            Self::NodeCrash { is_synchronous } | Self::Hang { is_synchronous } => !is_synchronous,
        }
    }

    /// Whether the old primary serves clients beside the new one.
    fn has_two_primaries(self) -> bool {
        matches!(self, Self::ReadOnly | Self::SplitBrain | Self::Hang { .. })
    }
}

/// A failover. Times are in microseconds since 1970.
#[derive(Debug, Clone, Copy)]
struct Round {
    kind: Kind,
    /// Before anything was done to the servers.
    began: i64,
    /// When each half of the clients was redirected to the new primary.
    switched: [i64; 2],
    /// When the old primary had stopped and all clients had been redirected.
    ended: i64,
}

impl Round {
    /// How long it took until all clients were redirected to the new primary.
    fn seconds(&self) -> f64 {
        (self.switched[0].max(self.switched[1]) - self.began) as f64 / 1e6
    }
}

pub(crate) fn run(length: Duration, seed: u64) -> Result<(), Box<dyn Error>> {
    let campaign = Campaign::Failover;
    fastrand::seed(seed);
    let mut primary = Cluster::builder()
        .setting("max_connections", "200")
        .setting("client_connection_check_interval", "1s")
        .start();
    migrations::install(&primary.endpoint("postgres").pool(1))?;
    connect(&primary).batch_execute(worker::TABLES)?;
    let proxies: Vec<_> = (0..campaign.processes())
        .map(|_| RoundTrips::in_front_of(&primary.endpoint("postgres")))
        .collect();
    let directory = directory_of_records(primary.directory())?;
    let mut first = None;

    let urls = proxies.iter().map(|proxy| proxy.url());
    let mut processes = Processes::new(campaign, urls.collect(), directory.clone());
    processes.start_all()?;
    let mut disturber = Disturber::new(processes);
    let mut rounds = Vec::new();
    let mut kinds = Vec::new();
    let start = Instant::now();
    while rounds.is_empty() || start.elapsed() < length {
        if kinds.is_empty() {
            kinds = vec![
                Kind::LostCommits,
                Kind::Crash,
                Kind::ReadOnly,
                Kind::SplitBrain,
            ];
            fastrand::shuffle(&mut kinds);
        }
        let kind = kinds.pop().ok_or("there are kinds")?;
        let standby = primary.standby();
        if kind != Kind::LostCommits {
            make_synchronous(&primary)?;
        }
        pause(2000..5000);
        let (is_over, seed) = (AtomicBool::new(false), fastrand::u64(..));
        let round = thread::scope(|scope| {
            let disturbed = scope.spawn(|| {
                fastrand::seed(seed);
                disturber.run(&proxies, &is_over)
            });
            let round = fail_over(kind, &primary, &standby, &proxies);
            pause(1000..3000);
            is_over.store(true, Ordering::Relaxed);
            disturbed.join().map_err(|_| "the disturber panicked")??;
            round
        })?;
        println!(
            "{kind:?}: all clients were redirected to the new primary after {:.1} s",
            round.seconds()
        );
        rounds.push(round);
        let old = std::mem::replace(&mut primary, standby);
        // The records are in the first primary's directory, which its drop would remove.
        first.get_or_insert(old);
        disturber.check_alive()?;
    }
    // All clients have time to reconnect.
    thread::sleep(Duration::from_secs(3));
    let length = start.elapsed();
    let faults = disturber.finish()?;
    let records = record::read_all(&directory, &faults)?;
    check::all(
        &rounds,
        &records,
        &faults,
        &primary.endpoint("postgres"),
        length,
    )
}

/// Creates the directory of the records inside a cluster's directory, which is removed at the end.
fn directory_of_records(directory: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let records = directory.join("records");
    std::fs::create_dir_all(&records)?;
    // The watcher that removes the directory after a kill runs as the directory's owner.
    let owner = std::fs::metadata(directory)?;
    std::os::unix::fs::chown(&records, Some(owner.uid()), None)?;
    Ok(records)
}

/// The half of the clients that a process belongs to.
const fn half_of(number: usize) -> usize {
    number % 2
}

fn connect(cluster: &Cluster) -> PgConnection {
    cluster.endpoint("postgres").connect()
}

fn pause(milliseconds: std::ops::Range<u64>) {
    thread::sleep(Duration::from_millis(fastrand::u64(milliseconds)));
}

/// Changes a setting of a running server.
fn set(cluster: &Cluster, name: &str, value: &str) -> QueryResult<()> {
    let mut conn = connect(cluster);
    conn.batch_execute(&format!("ALTER SYSTEM SET {name} = '{value}'"))?;
    conn.batch_execute("SELECT pg_reload_conf()")
}

/// Makes the standby synchronous, and waits until it is.
fn make_synchronous(primary: &Cluster) -> Result<(), Box<dyn Error>> {
    set(primary, "synchronous_standby_names", "*")?;
    let is_synchronous = "EXISTS (SELECT FROM pg_stat_replication
        WHERE sync_state = 'sync' AND state = 'streaming')";
    let mut conn = connect(primary);
    let end = Instant::now() + Duration::from_secs(30);
    while !diesel::select(sql::<Bool>(is_synchronous)).get_result::<bool>(&mut conn)? {
        if Instant::now() > end {
            return Err("the standby does not become synchronous".into());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn fail_over(
    kind: Kind,
    primary: &Cluster,
    standby: &Cluster,
    proxies: &[RoundTrips],
) -> Result<Round, Box<dyn Error>> {
    let new = standby.endpoint("postgres");
    let began = now();
    let crash = || match fastrand::bool() {
        true => primary.kill(),
        false => primary.stop(StopMode::Immediate),
    };
    // Returns the time from which on clients use the new primary.
    let switch = |half: usize| {
        for proxy in proxies.iter().skip(half).step_by(2) {
            proxy.switch_to(&new);
        }
        now()
    };
    let switched = match kind {
        Kind::LostCommits => {
            standby.detach();
            pause(100..1000);
            crash();
            standby.promote();
            [switch(0), switch(1)]
        }
        Kind::Crash => {
            crash();
            standby.promote();
            [switch(0), switch(1)]
        }
        Kind::ReadOnly => {
            set(primary, "default_transaction_read_only", "on")?;
            pause(0..500);
            standby.promote();
            let switched = [switch(0), switch(1)];
            pause(1000..2500);
            primary.stop(StopMode::Immediate);
            switched
        }
        Kind::SplitBrain => {
            standby.detach();
            standby.promote();
            let first = switch(0);
            proxies.iter().step_by(2).for_each(RoundTrips::sever);
            pause(1000..4000);
            crash();
            [first, switch(1)]
        }
        Kind::Switchover { .. } | Kind::NodeCrash { .. } | Kind::Hang { .. } => {
            return Err("only Patroni does that".into());
        }
    };
    // Connections to a server that has stopped are closed.
    if kind != Kind::ReadOnly {
        proxies.iter().for_each(RoundTrips::sever);
    }
    Ok(Round {
        kind,
        began,
        switched,
        ended: now(),
    })
}
