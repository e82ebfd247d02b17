//! A scheduler that several instances run, without a framework: see README.md.

// An application, not an interface.
#![allow(missing_docs, unreachable_pub)]

mod jobs;
mod stop;

use std::env;
use std::io::{self, IsTerminal};
use std::process;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use diesel::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::{DeclaredResources, migrations, sync};
use diesel_migrations::{EmbeddedMigrations, embed_migrations};

use crate::jobs::{Instance, Job};
use crate::stop::Stop;

const MIGRATIONS: EmbeddedMigrations = embed_migrations!();

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    let url = env::var("DATABASE_URL").context(
        "DATABASE_URL is not set: say postgres://user@host/database, or start with examples/run",
    )?;
    let job_takes: f64 = env::var("JOB_TAKES_SECS").map_or(Ok(2.0), |value| value.parse())?;

    let stop = Stop::default();
    let on_signal = stop.clone();
    ctrlc::set_handler(move || on_signal.now())?;

    // A guard keeps a connection for as long as its job runs: one for each job.
    let jobs = u32::try_from(Job::ALL.len())?;
    let pool = Pool::builder()
        .max_size(jobs)
        .connection_timeout(Duration::from_secs(5))
        .build(ConnectionManager::new(url))?;
    prepare(&mut *pool.get()?)?;

    let instance = Instance {
        pool,
        name: env::var("INSTANCE").unwrap_or_else(|_| format!("scheduler pid {}", process::id())),
        job_takes: Duration::try_from_secs_f64(job_takes).context("JOB_TAKES_SECS")?,
        stop,
    };
    thread::scope(|scope| {
        for job in Job::ALL {
            scope.spawn(|| instance.schedule(*job));
        }
    });
    Ok(())
}

/// Brings the schema up to date, on one instance at a time.
fn prepare(conn: &mut PgConnection) -> Result<(), diesel_interlock::Error> {
    migrations::install(conn)?;
    migrations::run_pending(conn, MIGRATIONS)?;
    // Logs a warning for each interval that differs in the database. `sync_intervals` would set the intervals above.
    let _ = sync::<Job>(conn)?;
    Ok(())
}
