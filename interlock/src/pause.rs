//! `interlock pause` and `interlock resume`: a schedule takes no tick until it is resumed.

use std::io::{self, Write};

use clap::Args;
use diesel_interlock::Schedule;

use crate::database::{self, Schema, in_time, rows_with};
use crate::{Failure, ps};

#[derive(Debug, Args)]
pub(crate) struct Pause {
    /// The name of the schedule, as `ps` shows it
    #[arg(allow_negative_numbers = true)]
    name: String,
}

impl Pause {
    /// Pauses the schedule, or resumes it.
    pub(crate) fn run(self, is_to_be_paused: bool) -> Result<i32, Failure> {
        let operation = if is_to_be_paused { "pause" } else { "resume" };
        let url = database::url(operation)?;
        let name = self.name;
        let is_changed = in_time(|| {
            const KNOWN: &str = "SELECT name FROM resource_control.schedule WHERE name = $1";
            let mut conn = database::connect(&url)?;
            Schema::of(&mut conn)?.require()?;
            // A misspelt name would pause nothing.
            if rows_with(&mut conn, KNOWN, &name)?.is_empty() {
                let message =
                    format!("no schedule is named {name:?}: `interlock ps` shows the names");
                return Err(Failure::new(Failure::INPUT, message));
            }
            drop(conn);
            let pool = database::pool(&url)?;
            let schedule: Schedule = Schedule::named(name.clone().leak());
            let is_changed = if is_to_be_paused {
                schedule.pause(&pool)?
            } else {
                schedule.resume(&pool)?
            };
            Ok::<_, Failure>(is_changed)
        })?;
        let what = match (is_to_be_paused, is_changed) {
            (true, true) => {
                "paused: it takes no tick until `interlock resume`; a run in progress continues"
            }
            (true, false) => "was already paused",
            (false, true) => "resumed: its instances notice that within five seconds",
            (false, false) => "was not paused",
        };
        writeln!(io::stdout(), "{}: {what}", ps::plain(&name))?;
        Ok(0)
    }
}
