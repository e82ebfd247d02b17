//! Failovers: a primary and its standby, which is promoted while processes are at work, round after round.

mod check;

use std::error::Error;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Bool;
use diesel_interlock::migrations;
use workbench::{Cluster, RoundTrips, StopMode};

use crate::processes::Processes;
use crate::record::{self, Done, now};
use crate::worker::{self, Campaign};

/// How the primary changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The standby is asynchronous, and was cut off a moment before the primary crashed.
    LostCommits,
    /// The primary of a synchronous standby crashes.
    Crash,
    /// The primary of a synchronous standby refuses to write while clients are connected to it, and is stopped later.
    ReadOnly,
    /// The primary of a synchronous standby lives on, with half of the clients.
    SplitBrain,
}

/// What happened, in microseconds since 1970.
#[derive(Debug, Clone, Copy)]
struct Round {
    kind: Kind,
    /// Before anything was done to the servers.
    began: i64,
    /// When each half of the clients was led to the new primary.
    switched: [i64; 2],
    /// When the old primary had stopped and all clients were led to the new one.
    ended: i64,
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
    // The two halves of the clients.
    let proxies = [(); 2].map(|()| RoundTrips::in_front_of(&primary.endpoint("postgres")));
    let directory = PathBuf::from(primary.directory()).join("records");
    std::fs::create_dir_all(&directory)?;
    // The owner of the cluster's directory removes it, also after a kill.
    let owner = std::fs::metadata(primary.directory())?;
    std::os::unix::fs::chown(&directory, Some(owner.uid()), None)?;
    let mut first = None;

    let urls = (0..campaign.processes()).map(|number| proxies[half_of(number)].url());
    let mut processes = Processes::new(campaign, urls.collect(), directory.clone());
    processes.start_all()?;
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
            wait_for_standby(&primary)?;
        }
        pause(2000..5000);
        let round = fail_over(kind, &primary, &standby, &proxies)?;
        let seconds = |from: i64, to: i64| (to - from) as f64 / 1e6;
        println!(
            "{kind:?}: all clients were led to the new primary after {:.1} s",
            seconds(round.began, round.switched[0].max(round.switched[1]))
        );
        rounds.push(round);
        let old = std::mem::replace(&mut primary, standby);
        // The records are in the directory of the first one.
        first.get_or_insert(old);
        pause(1000..3000);
        processes.check_alive()?;
    }
    // So that everybody has time to come back.
    thread::sleep(Duration::from_secs(3));
    processes.finish()?;
    let records = record::read_all(&directory, &Done::default())?;
    check::all(&rounds, &records, &primary.endpoint("postgres"))
}

/// The proxy of a process.
const fn half_of(number: usize) -> usize {
    number % 2
}

fn connect(cluster: &Cluster) -> PgConnection {
    cluster.endpoint("postgres").connect()
}

fn pause(milliseconds: std::ops::Range<u64>) {
    thread::sleep(Duration::from_millis(fastrand::u64(milliseconds)));
}

/// Changes a setting of a server that runs.
fn set(cluster: &Cluster, name: &str, value: &str) -> QueryResult<()> {
    let mut conn = connect(cluster);
    conn.batch_execute(&format!("ALTER SYSTEM SET {name} = '{value}'"))?;
    conn.batch_execute("SELECT pg_reload_conf()")
}

/// Makes the only standby of a primary a synchronous one.
fn wait_for_standby(primary: &Cluster) -> Result<(), Box<dyn Error>> {
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
    proxies: &[RoundTrips; 2],
) -> Result<Round, Box<dyn Error>> {
    let new = standby.endpoint("postgres");
    let began = now();
    let crash = || match fastrand::bool() {
        true => primary.kill(),
        false => primary.stop(StopMode::Immediate),
    };
    // Returns when clients may have got there.
    let switch = |half: usize| {
        proxies[half].switch_to(&new);
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
            proxies[0].sever();
            pause(1000..4000);
            crash();
            [first, switch(1)]
        }
    };
    // A proxy keeps no connection to a server that has ended.
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
