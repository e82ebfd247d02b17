//! `interlock pause`, `resume` and `trigger`, for schedules.

use std::io::{self, Write};

use clap::Args;
use diesel_interlock::Schedule;

use crate::database::{self, Schema, in_time, rows_with};
use crate::{Failure, ps};

/// The operation on a schedule.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change {
    Pause,
    Resume,
    Trigger,
}

#[derive(Debug, Args)]
pub(crate) struct Pause {
    /// The name of the schedule, as `ps` shows it
    #[arg(allow_negative_numbers = true)]
    name: String,
}

impl Pause {
    pub(crate) fn run(self, change: Change) -> Result<i32, Failure> {
        let operation = match change {
            Change::Pause => "pause",
            Change::Resume => "resume",
            Change::Trigger => "trigger",
        };
        let url = database::url(operation)?;
        let name = self.name;
        let is_changed = in_time(|| {
            const KNOWN: &str = "SELECT name FROM resource_control.schedule WHERE name = $1";
            let mut conn = database::connect(&url)?;
            Schema::of(&mut conn)?.require()?;
            // A misspelt name would change nothing.
            if rows_with(&mut conn, KNOWN, &name)?.is_empty() {
                let message =
                    format!("no schedule is named {name:?}: `interlock ps` shows the names");
                return Err(Failure::new(Failure::INPUT, message));
            }
            drop(conn);
            let pool = database::pool(&url)?;
            let schedule: Schedule = Schedule::named(name.clone().leak());
            let is_changed = match change {
                Change::Pause => schedule.pause(&pool)?,
                Change::Resume => schedule.resume(&pool)?,
                Change::Trigger => schedule.trigger(&pool)?,
            };
            Ok::<_, Failure>(is_changed)
        })?;
        let what = match (change, is_changed) {
            (Change::Pause, true) => {
                "paused: it takes no tick until `interlock resume`; a run in progress continues"
            }
            (Change::Pause, false) => "was already paused",
            (Change::Resume, true) => "resumed: its instances notice that within five seconds",
            (Change::Resume, false) => "was not paused",
            (Change::Trigger, true) => {
                "triggered: an instance runs it within a minute, or after the run in progress"
            }
            (Change::Trigger, false) => "was already triggered, and no instance has run it yet",
        };
        writeln!(io::stdout(), "{}: {what}", ps::plain(&name))?;
        Ok(0)
    }
}
