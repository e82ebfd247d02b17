//! What do many instances send that have nothing to do? Instances of one process, each with a pool of one connection, run schedules
//! whose ticks are a year apart, and stand for an election. Some of the schedules have a run that lasts. A measurement, and no check.

use std::error::Error;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod,
};
use diesel_interlock::deadpool::{Leader, PgPool, Schedule};
use diesel_interlock::schedule::every;
use diesel_interlock::{Error as LockError, migrations};
use tokio::time::sleep;
use workbench::{Cluster, RoundTrips};

const USAGE: &str =
    "usage: scripts/campaign idle [--instances N] [--schedules N] [--running N] [--seconds S]

  --instances N  how many instances there are (default: 100)
  --schedules N  how many schedules each of them has (default: 100)
  --running N    in how many of these a run lasts, which began an hour ago (default: 10)
  --seconds S    how long is counted, after two minutes in which all begin (default: 120)

It prints the statements per second, with an election and without.";

fn main() -> Result<(), Box<dyn Error>> {
    let (mut instances, mut schedules, mut running, mut seconds) = (100, 100, 10, 120);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or(USAGE)?;
        match argument.as_str() {
            "--instances" => instances = value.parse()?,
            "--schedules" => schedules = value.parse()?,
            "--running" => running = value.parse()?,
            "--seconds" => seconds = value.parse()?,
            _ => return Err(USAGE.into()),
        }
    }
    let most = (instances + 20).to_string();
    let cluster = Cluster::builder().setting("max_connections", &most).start();
    let database = cluster.database();
    migrations::install(&database.pool(1))?;
    let proxy = RoundTrips::in_front_of(&database);
    let url = proxy.url();
    let _entered = workbench::runtime().enter();
    let pools: Vec<PgPool> = (0..instances)
        .map(|_| {
            // The default sends a statement of its own at each check-out.
            let mut config = ManagerConfig::<AsyncPgConnection>::default();
            config.recycling_method = RecyclingMethod::Fast;
            let manager = AsyncDieselConnectionManager::new_with_config(&url, config);
            let pool = PgPool::builder(manager).max_size(1);
            pool.runtime(deadpool::Runtime::Tokio1).build()
        })
        .collect::<Result<_, _>>()?;
    for pool in &pools {
        for number in 0..schedules {
            let pool = pool.clone();
            tokio::spawn(async move {
                // As programs that were not started at the same moment.
                sleep(Duration::from_secs(60).mul_f64(fastrand::f64())).await;
                let schedule = Schedule::named("idle").key(number);
                if number < running {
                    drop(schedule.trigger(&pool).await);
                }
                let lasts = |_| std::future::pending::<Result<(), LockError>>();
                schedule
                    .run(&pool, every(Duration::from_secs(86_400 * 365)), lasts)
                    .await
            });
        }
    }
    let conn = &mut database.connect();
    workbench::block_on(sleep(Duration::from_secs(70)));
    conn.batch_execute(
        "UPDATE resource_control.schedule SET started_at = started_at - interval '1 hour', triggered_at = NULL",
    )?;
    workbench::block_on(sleep(Duration::from_secs(50)));
    let count = || {
        let before = proxy.round_trips();
        workbench::block_on(sleep(Duration::from_secs(seconds)));
        (proxy.round_trips() - before) as f64 / seconds as f64
    };
    println!("{instances} instances with {schedules} schedules, {running} of them running");
    println!("{:.0} statements a second", count());
    for pool in &pools {
        let pool = pool.clone();
        tokio::spawn(async move {
            let leader = Leader::named("idle", Duration::from_secs(15));
            leader
                .lead(&pool, |_| std::future::pending())
                .await
                .map(|never| match never {})
        });
    }
    workbench::block_on(sleep(Duration::from_secs(30)));
    println!("{:.0} statements a second with an election", count());
    Ok(())
}
