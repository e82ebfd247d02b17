//! Failovers by Patroni: three servers, and a proxy that follows the primary.
//!
//! | Event | What is lost |
//! |---|---|
//! | switchover | nothing: the old primary stops once a standby has received all commits |
//! | crash, synchronous | nothing |
//! | crash, asynchronous | the last commits |
//! | hung Patroni, synchronous | only exclusion by session locks, which both servers grant |
//! | hung Patroni, asynchronous | all commits on the old primary, until its Patroni resumes |
//!
//! Whatever is not lost must hold as on one primary: see `check.rs`. There is no watchdog, so a hung
//! Patroni does not stop its server: the leader key expires after the ttl, a standby is promoted,
//! and the old primary still serves its sessions. With synchronous replication their commits wait
//! and are never acknowledged.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_interlock::migrations;
use workbench::Patroni;

use super::{Kind, Round, check, directory_of_records, half_of, pause};
use crate::processes::Processes;
use crate::record::{self, Faults, now};
use crate::worker::{self, Campaign};

/// What happens to the primary's node.
#[derive(Clone, Copy)]
enum Event {
    Switchover,
    Crash,
    Hang,
}

pub(crate) fn run(length: Duration, seed: u64) -> Result<(), Box<dyn Error>> {
    let campaign = Campaign::Failover;
    fastrand::seed(seed);
    let mut patroni = Patroni::start();
    let database = patroni.endpoint();
    migrations::install(&database.pool(1))?;
    database.connect().batch_execute(worker::TABLES)?;
    let directory = directory_of_records(patroni.directory())?;
    println!("Patroni's ttl is {:?}", Patroni::TTL);

    // The second half connects through a proxy that keeps the sessions on an old primary whose
    // Patroni hangs.
    let ways = [patroni.endpoint(), patroni.lingering_endpoint()];
    let urls = (0..campaign.processes()).map(|number| ways[half_of(number)].url());
    let mut processes = Processes::new(campaign, urls.collect(), directory.clone());
    processes.start_all()?;
    let mut rounds = Vec::new();
    let start = Instant::now();
    while rounds.is_empty() || start.elapsed() < length {
        for is_synchronous in [true, false] {
            let mut events = [Event::Switchover, Event::Crash, Event::Hang];
            fastrand::shuffle(&mut events);
            for event in events {
                patroni.set_synchronous(is_synchronous);
                pause(3000..6000);
                let round = fail_over(event, is_synchronous, &mut patroni)?;
                println!("{:?} took {:.1} s", round.kind, round.seconds());
                rounds.push(round);
                pause(3000..6000);
                processes.check_alive()?;
            }
        }
    }
    patroni.wait_for_standbys(false);
    let length = start.elapsed();
    processes.finish()?;
    let records = record::read_all(&directory, &Faults::default())?;
    check::all(&rounds, &records, &Faults::default(), &database, length)
}

fn fail_over(
    event: Event,
    is_synchronous: bool,
    patroni: &mut Patroni,
) -> Result<Round, Box<dyn Error>> {
    let old = patroni.primary().ok_or("there is no primary")?;
    let began = now();
    let (kind, switched) = match event {
        Event::Switchover => {
            patroni.switch_over(old);
            patroni.wait_for_other_primary(old);
            (Kind::Switchover { is_synchronous }, [now(); 2])
        }
        Event::Crash => {
            patroni.crash(old);
            patroni.wait_for_other_primary(old);
            let switched = now();
            patroni.start_again(old);
            (Kind::NodeCrash { is_synchronous }, [switched; 2])
        }
        Event::Hang => {
            patroni.suspend(old);
            patroni.wait_for_other_primary(old);
            let first = now();
            pause(3000..6000);
            patroni.resume(old);
            while patroni.takes_writes(old) {
                thread::sleep(Duration::from_millis(20));
            }
            (Kind::Hang { is_synchronous }, [first, now()])
        }
    };
    Ok(Round {
        kind,
        began,
        switched,
        ended: now(),
    })
}
