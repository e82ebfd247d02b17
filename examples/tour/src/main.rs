//! A tour of the crate, live on a PostgreSQL server: what goes wrong without it, what goes wrong
//! with PostgreSQL's bare functions and a connection pool, and what the crate does instead.
//!
//! ```sh
//! scripts/tour    # or, where PostgreSQL is installed: cargo run -p tour
//! ```
//!
//! It creates a database on the server of `DATABASE_URL`, or else on a throwaway server. Instances of
//! an application are separate processes: this program, started again. The tour verifies what it
//! prints first, mostly from another session, and panics if something is not as claimed.

mod booking;
mod fragile_service;
mod instance;
mod instances;
mod look;
mod mail_provider;
mod nightly_report;

use std::error::Error;
use std::time::Instant;

use diesel_interlock::migrations;
use workbench::Database;

use crate::instance::Instance;

fn main() -> Result<(), Box<dyn Error>> {
    let Some(instance) = Instance::this() else {
        return tour();
    };
    match instance.role.as_str() {
        instances::ROLE => instances::run(&instance),
        fragile_service::WORKER => fragile_service::work(&instance),
        fragile_service::CRASHES => fragile_service::crash(&instance),
        mail_provider::ROLE => mail_provider::send(&instance),
        other => Err(format!("no instance has the role {other}").into()),
    }
}

fn tour() -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let database = Database::new();
    println!("{}", look::text(&mut database.connect(), "version()")?);

    booking::ten_requests_for_one_server(&database)?;
    nightly_report::a_lock_that_stays_in_the_pool(&database)?;
    nightly_report::three_guards_that_end_badly(&database)?;

    migrations::install(&database.pool(1))?; // the schema resource_control; locks need none
    instances::three_instances(&database)?;
    fragile_service::twelve_workers_share_four_slots(&database)?;
    mail_provider::twelve_mailers_share_a_hundred_per_second(&database)?;

    println!(
        "\nAll as claimed, in {:.1} s",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
