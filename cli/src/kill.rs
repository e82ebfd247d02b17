//! `interlock kill`: ends who holds a lock, if it still does.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use diesel_interlock::Error;
use serde_json::Value;

use crate::database::{self, LOCKS, in_time, rows_with};
use crate::{Failure, ps, say};

#[derive(Debug, Args)]
pub(crate) struct Kill {
    /// The name of the lock; with --slot, that of the semaphore
    #[arg(allow_negative_numbers = true)]
    name: String,
    /// NAME is the number of the lock, or the pair, as `ps` shows it
    #[arg(long)]
    number: bool,
    /// Completes the request with this id, as `ps` shows it, and so frees its slot
    #[arg(long, value_name = "ID", conflicts_with = "number")]
    slot: Option<i64>,
    /// Does not ask
    #[arg(long, short)]
    yes: bool,
}

impl Kill {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        let (shown, act, name) = match self.slot {
            None => (
                format!("SELECT * FROM ({LOCKS}) AS l WHERE state = 'held' AND lock = $1"),
                // In one statement: the same session, which still holds the lock. Another one may have its pid by now.
                format!(
                    "SELECT pg_terminate_backend(pid) AS is_done
                        FROM json_to_recordset($1::json) AS shown (lock text, pid integer, session_since timestamptz)
                            JOIN ({LOCKS}) AS l USING (lock, pid, session_since)
                        WHERE l.state = 'held'"
                ),
                database::lock(&self.name, self.number)?,
            ),
            Some(id) => (
                format!(
                    "SELECT * FROM resource_control.slot_in_flight WHERE service = $1 AND id = {id}"
                ),
                "SELECT resource_control.complete_service_request(service, id) AS is_done
                    FROM json_to_recordset($1::json) AS shown (service text, id bigint)"
                    .to_owned(),
                self.name.clone(),
            ),
        };
        let url = database::url("kill")?;
        let (mut conn, holders) = in_time(|| {
            let mut conn = database::connect(&url)?;
            if self.slot.is_some() && !database::has_schema(&mut conn)? {
                return Err(Error::NotInstalled.into());
            }
            let holders = rows_with(&mut conn, &shown, &name)?;
            Ok::<_, Failure>((conn, holders))
        })?;
        let mut output = io::stdout();
        write!(output, "{}", ps::table("held by", &holders))?;
        if holders.is_empty() {
            return Ok(1);
        }
        if !self.yes {
            write!(output, "End this? [y/N] ")?;
            output.flush()?;
            let mut answer = String::new();
            let _ = io::stdin().read_line(&mut answer);
            if !answer.trim().eq_ignore_ascii_case("y") {
                say!("nothing was done");
                return Ok(1);
            }
        }
        let (mut told, mut stays) = (Vec::new(), false);
        for holder in holders {
            let one = Value::from(vec![holder.clone()]).to_string();
            let done = in_time(|| rows_with(&mut conn, &act, &one)).map_err(Failure::from);
            let (pid, is_seen) = (&holder["pid"], !holder["session_since"].is_null());
            let (why, is_left) = match done {
                Ok(done) if done.iter().any(|row| row["is_done"] == true) => {
                    told.push(holder);
                    continue;
                }
                Err(failure) if self.slot.is_some() || failure.status != Failure::SET_UP => {
                    return Err(failure);
                }
                Err(failure) => (format!("session {pid}: {failure}"), true),
                Ok(_) if self.slot.is_some() => ("it had been completed by then".to_owned(), false),
                Ok(_) if pid.is_null() => (
                    "a prepared transaction holds it: send ROLLBACK PREPARED with its gid in pg_prepared_xacts".to_owned(),
                    true,
                ),
                Ok(_) if is_seen => (format!("session {pid} held it no longer"), false),
                Ok(_) => (
                    format!("session {pid} is of another role: GRANT pg_read_all_stats, pg_signal_backend to this one"),
                    true,
                ),
            };
            say!("{why}");
            stays |= is_left;
        }
        let end = Instant::now() + Duration::from_secs(5);
        let mut left = if self.slot.is_some() {
            Vec::new()
        } else {
            told.clone()
        };
        while !left.is_empty() && Instant::now() < end {
            thread::sleep(Duration::from_millis(20));
            let holders = in_time(|| rows_with(&mut conn, &shown, &name))?;
            let is_same = |a: &Value, b: &Value| {
                a["pid"] == b["pid"] && a["session_since"] == b["session_since"]
            };
            left.retain(|it| holders.iter().any(|holder| is_same(it, holder)));
        }
        for holder in &left {
            say!(
                "session {} has not ended within five seconds",
                holder["pid"]
            );
        }
        stays |= !left.is_empty();
        told.retain(|holder| !left.contains(holder));
        write!(output, "{}", ps::table("ended", &told))?;
        let has_ended = !told.is_empty();
        Ok((stays || !has_ended).into())
    }
}
