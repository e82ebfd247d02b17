//! A tour of the locks, throttles, semaphores and rate limits, live on a PostgreSQL server: what goes wrong without
//! them, what goes wrong with PostgreSQL's bare functions and a connection pool, and what is done about
//! it.
//!
//! ```sh
//! scripts/tour    # or, where PostgreSQL is installed: cargo run -p tour
//! ```
//!
//! It starts a throwaway server, unless `DATABASE_URL` names one, and works in a database of its
//! own. Instances of an application are processes of their own: this program, started again. Whatever
//! it claims it has looked up before, most of it in PostgreSQL's views and from another connection; if
//! anything is not as claimed, it panics.

mod bad_endings;
mod booking;
mod cron_job;
mod fragile_service;
mod instance;
mod mail_provider;
mod observer;
mod screen;
mod state;
mod stuck_in_the_pool;

use std::error::Error;
use std::time::Instant;

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Text;
use diesel_interlock::{AdvisoryLock, Throttle, migrations};
use workbench::Database;

use crate::cron_job::Job;
use crate::instance::Instance;
use crate::screen::say;

static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");

fn main() -> Result<(), Box<dyn Error>> {
    match Instance::this() {
        None => tour(),
        Some(instance) => match instance.role.as_str() {
            cron_job::ROLE => cron_job::run(&instance),
            fragile_service::ROLE => fragile_service::work(&instance),
            mail_provider::ROLE => mail_provider::send(&instance),
            state::REPORTS => state::report(&instance),
            state::BOOKS => state::book(&instance),
            other => Err(format!("no instance is called {other}").into()),
        },
    }
}

fn tour() -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let database = Database::new();
    let conn = &mut database.connect();
    let server = sql::<Text>("SHOW server_version").get_result::<String>(conn)?;
    say(format!("PostgreSQL {server}"));

    booking::ten_requests_for_one_server(&database)?;
    stuck_in_the_pool::a_lock_that_got_stuck_in_the_pool(&database)?;
    bad_endings::three_guards_that_end_badly(&database)?;

    let pool = database.pool(1);
    migrations::install(&pool)?; // the schema resource_control, which locks do without
    let _ = Throttle::sync::<Job>(&pool)?;
    cron_job::three_instances_of_one_cron_job(&database)?;
    fragile_service::twelve_workers_share_four_slots(&database)?;
    mail_provider::twelve_mailers_share_a_hundred_per_second(&database)?;
    state::what_goes_on(&database)?;

    say(format!(
        "All as claimed, in {:.1} s",
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}
