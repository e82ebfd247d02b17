//! Runs campaigns of faults. Processes use locks, permits, leaders, schedules, throttles and rate
//! limits over all three pools. Meanwhile they are killed and suspended, their sessions terminated,
//! their statements and futures cancelled, their network cut, their pools exhausted, and the server
//! is slowed down and restarted.
//!
//! Every process records each grant and its time. At the end, `check.rs` checks the records and the
//! database.

mod check;
mod failover;
mod injector;
mod minimum;
mod processes;
mod record;
mod worker;

use std::error::Error;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_interlock::migrations;
use workbench::{Cluster, RoundTrips};

use crate::injector::Injector;
use crate::worker::Campaign;

const USAGE: &str = "usage: scripts/campaign faults [--only CAMPAIGN] [--seconds S] [--seed N]

  --only leaders    eight processes compete for a leadership with a lease of 3 s
  --only schedules  five processes run fifty schedules with a tick a second each; the only fault
                    is kill -9
  --only failover   four processes use a primary whose standby is promoted in each round: after a
                    crash, with and without the last commits; while the primary is read-only;
                    while both accept writes. Processes are killed, suspended and cut off meanwhile
  --only patroni    the same four processes, on three servers managed by Patroni: switchovers,
                    crashes and hung Patroni processes, with and without synchronous replication;
                    scripts/campaign patroni installs Patroni, etcd and HAProxy first
  --seconds S       how long faults are injected (default: 60); the last round is completed
  --seed N          seed of the random choices (default: random, and printed)

Prints a line for each fault and, at the end, what was granted. Exits with 1 if an invariant was
broken, or if too little work was done.";

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(worker) = worker::Settings::from_environment() {
        return worker::run(&worker);
    }
    let (mut seconds, mut seed) = (60, fastrand::u64(..1_000_000));
    let (mut campaign, mut is_patroni) = (Campaign::All, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--help" {
            println!("{USAGE}");
            return Ok(());
        }
        let value = arguments.next().ok_or(USAGE)?;
        match argument.as_str() {
            "--seconds" => seconds = value.parse()?,
            "--seed" => seed = value.parse()?,
            "--only" if value == "patroni" => is_patroni = true,
            "--only" => campaign = Campaign::parse(&value).ok_or(USAGE)?,
            _ => return Err(USAGE.into()),
        }
    }
    println!("{seconds} s with the seed {seed}");
    let length = Duration::from_secs(seconds);
    match campaign {
        _ if is_patroni => failover::patroni::run(length, seed),
        Campaign::Failover => failover::run(length, seed),
        _ => run(campaign, length, seed),
    }
}

fn run(campaign: Campaign, length: Duration, seed: u64) -> Result<(), Box<dyn Error>> {
    fastrand::seed(seed);
    let cluster = Cluster::builder().setting("max_connections", "200").start();
    let database = cluster.database();
    migrations::install(&database.pool(1))?;
    database.connect().batch_execute(worker::TABLES)?;
    let proxies: Vec<_> = (0..campaign.processes())
        .map(|_| RoundTrips::in_front_of(&database))
        .collect();
    let directory = PathBuf::from(cluster.directory()).join("records");
    std::fs::create_dir_all(&directory)?;
    // The watcher that removes the cluster's directory after a kill runs as the directory's owner.
    let owner = std::fs::metadata(cluster.directory())?;
    std::os::unix::fs::chown(&directory, Some(owner.uid()), None)?;

    let mut injector = Injector::new(campaign, &cluster, &database, &proxies, directory.clone());
    let start = Instant::now();
    injector.run(length)?;
    let length = start.elapsed();
    let faults = injector.finish()?;

    let records = record::read_all(&directory, &faults)?;
    check::all(campaign, &records, &database, length)
}
