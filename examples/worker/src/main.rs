//! A worker that runs as several instances on one database.
//!
//! ```sh
//! DATABASE_URL=postgres://… cargo run -p worker -- worker-1
//! ```
//!
//! One instance leads and dispatches. One imports, under a permit that renews itself. Whichever instance gets the tick writes a
//! report at 3:00 in Berlin, and a heartbeat each second. SIGTERM and Ctrl-C end the worker: the leader resigns, the import stops
//! between two steps and releases its permit, and a report that has begun is finished.

mod cron;

use std::error::Error;
use std::thread;
use std::time::Duration;

use diesel::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::schedule::{CatchUp, every};
use diesel_interlock::{Admission, Leader, PgPool, Schedule, Semaphore, Stop, migrations};

static DISPATCHER: Leader = Leader::named("dispatcher", Duration::from_secs(3));
static IMPORT: Semaphore = Semaphore::named("import", 1, Duration::from_secs(3)).keep_alive();
static REPORT: Schedule = Schedule::named("report");
static HEARTBEAT: Schedule = Schedule::named("heartbeat");

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL to the URL of a PostgreSQL database")?;
    let name = std::env::args()
        .nth(1)
        .unwrap_or_else(|| format!("worker {}", std::process::id()));
    let pool: PgPool = Pool::builder()
        .max_size(8)
        .build(ConnectionManager::<PgConnection>::new(url))?;
    migrations::install(&pool)?;
    let stop = Stop::new();
    let on_signal = stop.clone();
    ctrlc::set_handler(move || on_signal.stop())?;
    println!("ready");

    thread::scope(|scope| {
        let leading = scope.spawn(|| dispatch(&pool, &stop, &name));
        let importing = scope.spawn(|| import(&pool, &stop, &name));
        let reporting = scope.spawn(|| report(&pool, &stop, &name));
        let beating = scope.spawn(|| beat(&pool, &stop, &name));
        for job in [leading, importing, reporting, beating] {
            let ended = job.join().map_err(|_| "a job has panicked")?;
            // If one job ends, all end, so that the process is restarted.
            stop.stop();
            ended?;
        }
        Ok(())
    })
}

/// Dispatches on one instance at a time, for as long as it leads.
fn dispatch(pool: &PgPool, stop: &Stop, name: &str) -> Result<(), diesel_interlock::Error> {
    DISPATCHER.details(name).lead(pool, stop, |term| {
        println!("lead {}", term.fencing_token());
        while term.is_leader() {
            // A step of the work, and then:
            term.pause(Duration::from_millis(200));
        }
    })
}

/// A job that takes longer than the permit's timeout, on one instance at a time. It holds no connection.
fn import(pool: &PgPool, stop: &Stop, name: &str) -> Result<(), diesel_interlock::Error> {
    let semaphore = IMPORT.details(name);
    while !stop.is_stopped() {
        let permit = match semaphore.acquire_timeout(pool, Duration::from_secs(1)) {
            Ok(Admission::Admitted(permit)) => permit,
            Ok(Admission::Full(_)) => continue,
            Err(error) if error.is_unavailable() => {
                thread::sleep(Duration::from_secs(1));
                continue;
            }
            Err(error) => return Err(error),
        };
        println!("import {}", permit.fencing_token());
        // Each step, which takes a while, first checks whether the permit is still valid.
        let may_go_on = || !stop.is_stopped() && !permit.wait_for_loss(Duration::from_millis(100));
        if (0..50).all(|_step| may_go_on()) {
            println!("imported {}", permit.fencing_token());
        }
        // A permit that was lost has ended already.
        if let Err(error) = permit.release() {
            eprintln!("import: {error}");
        }
    }
    Ok(())
}

/// Writes a report each night, in a time zone with clock changes.
fn report(pool: &PgPool, stop: &Stop, name: &str) -> Result<(), diesel_interlock::Error> {
    let nightly = cron::next("0 3 * * *", chrono_tz::Europe::Berlin);
    REPORT.details(name).run(pool, stop, nightly, |tick| {
        println!("report {} attempt {}", tick.at(), tick.attempt());
        Ok::<_, diesel_interlock::Error>(())
    })
}

/// Beats each second. Ticks that were missed for up to a minute are caught up.
fn beat(pool: &PgPool, stop: &Stop, name: &str) -> Result<(), diesel_interlock::Error> {
    let schedule = HEARTBEAT
        .details(name)
        .catch_up(CatchUp::All(60))
        .after_crash(Duration::from_secs(3), 3);
    schedule.run(pool, stop, every(Duration::from_secs(1)), |tick| {
        println!("beat {} {}", tick.at().timestamp(), tick.attempt());
        thread::sleep(Duration::from_millis(50));
        Ok::<_, diesel_interlock::Error>(())
    })
}
