//! The throttle: at most one grant per interval, for all callers together.

use std::error::Error;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::monitor::{ThrottleState, views::throttle_state};
use diesel_interlock::{Decision, Throttle, throttled_resources};
use workbench::Database;

use crate::instance::{Instance, Process, READY};
use crate::screen::{good, note, say, title};

pub(crate) const ROLE: &str = "cron job";

throttled_resources! {
    pub(crate) enum Job {
        Newsletter = "newsletter" every Duration::from_secs(3600),
        CacheRebuild = "cache rebuild" every Duration::from_secs(15),
    }
}

/// What each instance does when its clock says so.
pub(crate) fn run(instance: &Instance) -> Result<(), Box<dyn Error>> {
    let pool = instance.pool()?;
    instance.say(READY)?;
    instance.wait()?;
    match Throttle::of(Job::Newsletter)
        .details(format!("cron on {}", instance.name))
        .attempt(&pool)?
    {
        Decision::Granted(_) => instance.say("granted")?,
        Decision::Denied(denied) => instance.say(&denied.retry_after_secs().to_string())?,
    }
    Ok(())
}

pub(crate) fn three_instances_of_one_cron_job(database: &Database) -> Result<(), Box<dyn Error>> {
    title("4. Three instances run the same cron job, at most once per hour");

    say("Each: Throttle::of(Job::Newsletter).details(\"cron on web-…\").attempt(&pool)?");
    let mut instances = Vec::new();
    for number in 1..=3 {
        instances.push(Process::start(ROLE, &format!("web-{number}"), database)?);
    }
    for instance in &mut instances {
        instance.go_on()?;
    }
    let mut who_runs_it = Vec::new();
    for mut instance in instances {
        let (name, pid) = (instance.name.clone(), instance.pid());
        match instance.said()?.as_str() {
            "granted" => {
                good(format!("{name}, pid {pid}: is granted, and runs it"));
                who_runs_it.push(name);
            }
            seconds => {
                let seconds: u64 = seconds.parse()?;
                // At most a second, if the winner had not committed yet.
                assert!((1..=3600).contains(&seconds), "{seconds} s of an hour");
                note(format!(
                    "{name}, pid {pid}: is denied; its next chance is in {seconds} s"
                ));
            }
        }
        instance.end()?;
    }
    let [winner] = &who_runs_it[..] else {
        panic!("the job is run by {who_runs_it:?}");
    };

    let conn = &mut database.connect();
    let newsletter = ThrottleState::all()
        .filter(throttle_state::name.eq("newsletter"))
        .first(conn)?;
    assert_eq!(newsletter.details, format!("cron on {winner}"));
    good(format!(
        "resource_control.throttle_state: last granted to \"{}\"",
        newsletter.details
    ));
    Ok(())
}
