//! `interlock kill`: ends the session that holds a lock, or the row of a slot, leader or run, if it
//! still holds after the user has confirmed.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use diesel::pg::PgConnection;
use serde_json::Value;

use crate::database::{self, LOCKS, SILENCE, Schema, changed, in_time, rows, rows_with};
use crate::{Failure, ps, say};

#[derive(Debug, Args)]
pub(crate) struct Kill {
    /// The name of the lock; with --slot, --leader or --run, of the semaphore, leader or schedule
    #[arg(allow_negative_numbers = true)]
    name: String,
    /// NAME is the number of the lock, or the pair, as `ps` shows it
    #[arg(long, group = "of")]
    number: bool,
    /// Completes the request with this id, as `ps` shows it, and so frees its slot
    #[arg(long, value_name = "ID", group = "of")]
    slot: Option<i64>,
    /// Ends the term of the leader of this name, who notices that at the next renewal
    #[arg(long, group = "of")]
    leader: bool,
    /// Ends the run of the schedule of this name, as if it had crashed; its process notices that at
    /// the next renewal, and another instance runs the tick again unless this was the last attempt
    /// or the schedule is paused
    #[arg(long = "run", group = "of")]
    is_run: bool,
    /// Ends the holder without asking
    #[arg(long, short)]
    yes: bool,
}

struct Questions {
    /// The query of the holders, whose `$1` is `parameter`.
    shown: String,
    /// The statement that ends one holder: `$1` is a JSON array with that row of `shown`.
    act: String,
    parameter: String,
    columns: &'static [&'static str],
    /// What is held, for messages.
    what: String,
}

const COMPLETE: &str = "SELECT resource_control.complete_service_request(service, id) AS is_done
    FROM json_to_recordset($1::json) AS shown (service text, id bigint)";

/// Ends a run as if it had crashed. The token is compared, because another run may have the tick by
/// now.
const END_RUN: &str = "UPDATE resource_control.schedule AS s
    SET expires_at = clock_timestamp(), error = 'ended by interlock kill'
    FROM json_to_recordset($1::json) AS shown (name text, token bigint)
    WHERE s.name = shown.name AND s.token = shown.token AND s.expires_at > clock_timestamp() AND
        s.ended_at IS NULL
    RETURNING true AS is_done";

/// The columns of a request in flight; `$holder` is the name for its details.
macro_rules! request {
    ($holder:literal) => {
        concat!(
            "service, slot, id, created_at, expires_at, details AS ",
            $holder,
            ", date_part('epoch', clock_timestamp() - created_at)::bigint AS age,
                date_part('epoch', expires_at - clock_timestamp())::bigint AS expires
                FROM resource_control.slot_in_flight"
        )
    };
}

impl Kill {
    fn questions(&self) -> Result<Questions, Failure> {
        let name = self.name.clone();
        let plain = ps::plain(&name);
        Ok(if let Some(id) = self.slot {
            Questions {
                shown: format!(
                    concat!(
                        "SELECT ",
                        request!("details"),
                        " WHERE service = $1 AND id = {}"
                    ),
                    id
                ),
                act: COMPLETE.to_owned(),
                parameter: name,
                columns: &["service", "slot", "id", "details", "age", "expires"],
                what: format!("request {id} of the semaphore {plain}"),
            }
        } else if self.leader {
            Questions {
                // The condition of the view `leader`, which does not have the column `service`.
                shown: concat!(
                    "SELECT $1::text AS name, ",
                    request!("holder"),
                    r" WHERE slot = 0 AND starts_with(service, 'leader ')
                        AND regexp_replace(service, '^leader |\\(.)', '\1', 'g') = $1"
                )
                .to_owned(),
                act: COMPLETE.to_owned(),
                parameter: name,
                columns: &["name", "holder", "id", "age", "expires"],
                what: format!("the leadership of {plain}"),
            }
        } else if self.is_run {
            Questions {
                shown: "SELECT name, state, tick, attempt, runner, token,
                        date_part('epoch', clock_timestamp() - started_at)::bigint AS age,
                        date_part('epoch', expires_at - clock_timestamp())::bigint AS expires
                    FROM resource_control.schedule_state WHERE name = $1 AND state = 'running'"
                    .to_owned(),
                act: END_RUN.to_owned(),
                parameter: name,
                columns: &["name", "tick", "attempt", "runner", "age", "expires"],
                what: format!("a run of the schedule {plain}"),
            }
        } else {
            Questions {
                shown: format!("SELECT * FROM ({LOCKS}) AS l WHERE state = 'held' AND lock = $1"),
                // One statement checks that the same session still holds the lock and ends it,
                // because another session may have that pid by now.
                act: format!(
                    "SELECT pg_terminate_backend(pid) AS is_done
                        FROM json_to_recordset($1::json) AS shown (lock text, pid integer, session_since timestamptz)
                            JOIN ({LOCKS}) AS l USING (lock, pid, session_since)
                        WHERE l.state = 'held'"
                ),
                parameter: database::lock(&name, self.number)?,
                columns: ps::OF_LOCK,
                what: format!("the lock {plain}"),
            }
        })
    }

    /// Whether the holder is a row, which is changed, and not a session, which is terminated.
    fn is_of_row(&self) -> bool {
        self.slot.is_some() || self.leader || self.is_run
    }

    /// Prints what else has this name, if nobody holds a lock of it.
    fn others(&self, conn: &mut PgConnection) -> Result<(), Failure> {
        const OTHERS: &str = r"
            SELECT format('request %s has slot %s of the semaphore (%s): interlock kill --slot '
                '%1$s', id, slot, details) AS found
                FROM resource_control.slot_in_flight WHERE service = $1
            UNION ALL SELECT format('%s leads an election of that name: interlock kill '
                '--leader', holder)
                FROM resource_control.leader WHERE name = $1
            UNION ALL SELECT format('%s runs a schedule of that name: interlock kill --run', runner)
                FROM resource_control.schedule_state WHERE name = $1 AND state = 'running'";
        if self.number {
            return Ok(());
        }
        match Schema::of(conn)? {
            Schema::Readable | Schema::Usable => {}
            schema => {
                if let (Schema::Foreign { .. }, Some(why)) = (&schema, schema.why_unread()) {
                    say!("{why}");
                }
                return Ok(());
            }
        }
        for other in rows_with(conn, OTHERS, &self.name)? {
            let found = other["found"].as_str().unwrap_or_default();
            say!("{} -- {}", ps::plain(found), shell_word(&self.name));
        }
        Ok(())
    }

    pub(crate) fn run(self) -> Result<i32, Failure> {
        let Questions {
            shown,
            act,
            parameter,
            columns,
            what,
        } = self.questions()?;
        let url = database::url("kill")?;
        let (mut conn, holders) = in_time(|| {
            let mut conn = database::connect(&url)?;
            if self.is_of_row() {
                Schema::of(&mut conn)?.require()?;
            }
            let holders = rows_with(&mut conn, &shown, &parameter)?;
            Ok::<_, Failure>((conn, holders))
        })?;
        let mut output = io::stdout();
        write!(output, "{}", ps::table("held by", &holders, Some(columns)))?;
        if holders.is_empty() {
            // It may be the wrong database.
            const HERE: &str = "SELECT current_database() AS name";
            let here = in_time(|| rows(&mut conn, HERE))?;
            let here = here.first().and_then(|row| row["name"].as_str());
            say!(
                "nobody has {what} in the database {}: nothing was done",
                here.unwrap_or_default()
            );
            if !self.is_of_row() {
                in_time(|| self.others(&mut conn))?;
            }
            return Ok(1);
        }
        if !self.yes {
            write!(output, "End this? [y/N] ")?;
            output.flush()?;
            let mut answer = String::new();
            let _ = io::stdin().read_line(&mut answer);
            if !answer.trim().eq_ignore_ascii_case("y") {
                say!("{what}: nothing was done");
                return Ok(1);
            }
        }
        let (mut ended, mut stays) = (Vec::new(), false);
        for holder in holders {
            let one = Value::from(vec![holder.clone()]).to_string();
            let done = in_time(|| changed(&mut conn, &act, &one)).map_err(Failure::from);
            let (pid, is_seen) = (&holder["pid"], !holder["session_since"].is_null());
            let (why, is_left) = match done {
                Ok(done) if done.iter().any(|row| row["is_done"] == true) => {
                    ended.push(holder);
                    continue;
                }
                Err(failure) if self.is_of_row() || failure.status != Failure::SET_UP => {
                    return Err(failure);
                }
                Err(failure) => (format!("session {pid}: {failure}"), true),
                Ok(_) if self.is_of_row() => (format!("{what} had already ended"), false),
                Ok(_) if pid.is_null() => {
                    let gid = literal(holder["prepared"].as_str().unwrap_or_default());
                    (
                        format!("a prepared transaction holds {what}: ROLLBACK PREPARED {gid};"),
                        true,
                    )
                }
                // The session was ending when it was shown, or has ended since.
                Ok(_) if is_seen || holder["role"].is_null() || !is_there(&mut conn, pid)? => (
                    format!("session {pid} no longer held {what}, so it was not ended"),
                    false,
                ),
                Ok(_) => (
                    format!(
                        "session {pid} holds {what} and belongs to another role: as a superuser, \
                         GRANT pg_read_all_stats, pg_signal_backend TO the role of DATABASE_URL"
                    ),
                    true,
                ),
            };
            say!("{why}");
            stays |= is_left;
        }
        let end = Instant::now() + SILENCE;
        let mut left = if self.is_of_row() {
            Vec::new()
        } else {
            ended.clone()
        };
        while !left.is_empty() && Instant::now() < end {
            thread::sleep(Duration::from_millis(20));
            let holders = in_time(|| rows_with(&mut conn, &shown, &parameter))?;
            let is_same = |a: &Value, b: &Value| {
                a["pid"] == b["pid"] && a["session_since"] == b["session_since"]
            };
            left.retain(|it| holders.iter().any(|holder| is_same(it, holder)));
        }
        for holder in &left {
            say!(
                "session {} has not ended within {} seconds, and still holds {what}",
                holder["pid"],
                SILENCE.as_secs()
            );
        }
        stays |= !left.is_empty();
        ended.retain(|holder| !left.contains(holder));
        write!(output, "{}", ps::table("ended", &ended, Some(columns)))?;
        Ok((stays || ended.is_empty()).into())
    }
}

fn is_there(conn: &mut PgConnection, pid: &Value) -> Result<bool, Failure> {
    const THERE: &str = "SELECT pid FROM pg_stat_activity WHERE pid = $1::text::integer";
    let there = in_time(|| rows_with(conn, THERE, &pid.to_string()))?;
    Ok(!there.is_empty())
}

/// The text as a literal of SQL, in which the characters that a terminal does not show are escaped,
/// because without them it might be the name of something else.
fn literal(text: &str) -> String {
    if ps::plain(text) == text {
        return format!("'{}'", text.replace('\'', "''"));
    }
    let escaped = |c: char| match c {
        '\'' => "''".to_owned(),
        '\\' => r"\\".to_owned(),
        c if ps::plain(c.encode_utf8(&mut [0; 4])).starts_with(c) => c.to_string(),
        c => format!(r"\U{:08x}", u32::from(c)),
    };
    format!("E'{}'", text.chars().map(escaped).collect::<String>())
}

/// The word in single quotes, so that a shell reads it as one argument.
pub(crate) fn shell_word(word: &str) -> String {
    format!("'{}'", ps::plain(word).replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;
    use serde_json::json;
    use workbench::Database;

    use super::*;

    /// PostgreSQL gives a pid to another session when the first has ended.
    #[test]
    fn a_session_that_has_the_pid_of_the_holder_by_now_is_spared() {
        let database = Database::new();
        let [conn, holder] = &mut [(); 2].map(|()| database.connect());
        holder
            .batch_execute("SELECT pg_advisory_lock(7, 12)")
            .unwrap();
        let kill = Kill {
            name: "7,12".to_owned(),
            number: true,
            slot: None,
            leader: false,
            is_run: false,
            yes: true,
        };
        let it = kill.questions().unwrap();
        let shown = rows_with(conn, &it.shown, &it.parameter).unwrap().remove(0);
        let mut former = shown.clone();
        former["session_since"] = json!("2026-01-01T00:00:00Z");
        let mut ended = |row: &Value| changed(conn, &it.act, &json!([row]).to_string()).unwrap();
        assert!(ended(&former).is_empty());
        holder.batch_execute("SELECT 1").unwrap();
        assert_eq!(ended(&shown)[0]["is_done"], true);
        assert!(holder.batch_execute("SELECT 1").is_err());
    }
}
