//! A campaign of faults: processes use locks, permits, leaders, schedules, throttles and rate limits, blocking and asynchronous, while
//! they are killed and stopped, their sessions terminated, their statements and futures cancelled, their network cut, their pools
//! exhausted, and the server slowed down and restarted.
//!
//! Every process writes down what it was granted, and when. In the end the records and the database are checked: see `check.rs`.

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

  --only leaders    eight processes stand for an election, with a lease of 3 s
  --only schedules  five processes run fifty schedules with a tick a second each, and are killed only
  --only failover   four processes over a primary and a standby, which is promoted in each round: after a crash, with and without
                    the last commits; while the primary only reads; while both run; processes are
                    killed, stopped and cut off meanwhile
  --only patroni    the same processes over three servers whose primary Patroni chooses:
                    switchovers, crashes and hung Patroni processes, synchronous and not; see
                    scripts/campaign patroni, which installs Patroni, etcd and HAProxy
  --seconds S       how long the faults go on (default: 60); a round that has begun is ended
  --seed N          what the random choices begin with (default: random, and printed)

It prints a line for each fault and, in the end, what was granted. Exits with 1 if an invariant was
broken, or if too little work was done.";

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(worker) = worker::Settings::of_environment() {
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
            "--only" => campaign = Campaign::named(&value).ok_or(USAGE)?,
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
    // The owner of the cluster's directory removes it, also after a kill.
    let owner = std::fs::metadata(cluster.directory())?;
    std::os::unix::fs::chown(&directory, Some(owner.uid()), None)?;

    let mut injector = Injector::new(campaign, &cluster, &database, &proxies, directory.clone());
    let start = Instant::now();
    injector.run(length)?;
    let length = start.elapsed();
    let done = injector.finish()?;

    let records = record::read_all(&directory, &done)?;
    check::all(campaign, &records, &database, length)
}
