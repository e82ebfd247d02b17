//! Three instances try to run the nightly report and to rebuild a cache: one of them does.

use std::error::Error;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::monitor::{Lock, ThrottleState};
use diesel_interlock::{Attempt, Decision, Throttle};
use workbench::Database;

use crate::instance::{Instance, Process};

use crate::nightly_report::NIGHTLY;

pub(crate) const ROLE: &str = "instance";

static CACHE: Throttle = Throttle::named("cache", Duration::from_secs(15));

/// The work of each instance.
pub(crate) fn run(instance: &Instance) -> Result<(), Box<dyn Error>> {
    let pool = instance.pool()?;
    let attempt = NIGHTLY.try_acquire(&pool)?;
    println!("{}", attempt.is_busy());
    instance.wait()?;
    if let Attempt::Acquired(guard) = attempt {
        guard.release()?;
    }
    instance.wait()?;
    match CACHE.details(&instance.name).attempt(&pool)? {
        Decision::Granted(_) => println!("granted"),
        Decision::Denied(denied) => println!("{}", denied.retry_after_secs()),
    }
    Ok(())
}

pub(crate) fn three_instances(database: &Database) -> Result<(), Box<dyn Error>> {
    println!("\n4. Three instances start the nightly report, and rebuild a cache");
    let conn = &mut database.connect();
    let names = (1..=3).map(|number| format!("web-{number}"));
    let mut instances = Process::start(ROLE, names, database, "")?;

    println!("\n  Each: NIGHTLY.try_acquire(&pool)?");
    for instance in &mut instances {
        instance.go_on()?;
    }
    let mut who_runs_it = Vec::new();
    for instance in &mut instances {
        let (name, pid) = (instance.name.clone(), instance.process.id());
        if instance.read_line()? == "false" {
            println!("    ✓ {name}, process {pid}: acquires it, and writes the report");
            who_runs_it.push(name);
        } else {
            println!("    · {name}, process {pid}: busy, goes on without");
        }
    }
    let [holder @ Lock { pid: Some(pid), .. }] = &Lock::all().load(conn)?[..] else {
        panic!("one session holds a lock")
    };
    assert_eq!(who_runs_it, [holder.application_name.as_str()]);
    println!(
        "    ✓ monitor::Lock::all(): held by {}, pid {}",
        holder.application_name, pid
    );

    println!("\n  Each: CACHE.details(name).attempt(&pool)?, at most once per 15 s");
    for instance in &mut instances {
        instance.go_on()?; // the report is written
        instance.go_on()?;
    }
    let mut who_rebuilds_it = Vec::new();
    for mut instance in instances {
        let (name, line) = (instance.name.clone(), instance.read_line()?);
        if line == "granted" {
            println!("    ✓ {name}: is granted, and rebuilds it");
            who_rebuilds_it.push(name);
        } else {
            // The hint is at most a second if the other instance had not committed yet.
            assert!((1..=15).contains(&line.parse::<u64>()?));
            println!("    · {name}: is denied; its next chance is in {line} s");
        }
        instance.end()?;
    }
    let [throttle] = &ThrottleState::all().load(conn)?[..] else {
        panic!("there is one throttle")
    };
    assert_eq!(who_rebuilds_it, [throttle.details.as_str()]);
    println!(
        "    ✓ monitor::ThrottleState::all(): {}, last granted to {}",
        throttle.name, throttle.details
    );
    assert_eq!(Lock::all().load(conn)?, [], "the report is written");
    Ok(())
}
