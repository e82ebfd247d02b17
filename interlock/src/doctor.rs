//! `interlock doctor`: what is wrong with a set-up, and what to do. It changes nothing.
//!
//! **`doctor` compares functions with the text of the migrations**, not with stored hashes, so
//! nothing has to be updated when a migration changes. PostgreSQL stores expressions in parsed
//! form, so these are compared without spaces, parentheses and casts.

pub(crate) mod objects;
mod origin;
mod questions;

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use clap::Args;
use diesel::pg::PgConnection;
use diesel_interlock::{Error, check_exclusion, migrations};
use serde_json::{Value, json};

use self::origin::Origin;
use self::questions::{AS_INSTALLED, GRANTS, HOLDERS, LOCKED, SERVER, TABLES, VIEWS};
use crate::database::{self, SILENCE, Schema, Sessions};
use crate::{Failure, duration, ps, refusal};

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Writes the findings as one JSON array
    #[arg(long)]
    json: bool,
    /// Exits with 1 also if there are only warnings
    #[arg(long)]
    strict: bool,
    /// Fails if the schema is not installed, or not for this role, which locks alone do not need
    #[arg(long)]
    needs_schema: bool,
    /// Warns of transactions that have been open for longer than this
    #[arg(long, value_parser = duration, value_name = "DURATION", default_value = "10m")]
    transaction_age: Duration,
    /// Warns of locks whose holder's session has done nothing for longer than this, and of slots
    /// and runs of schedules that have been in use for longer
    #[arg(long, value_parser = duration, value_name = "DURATION", default_value = "1h")]
    holder_age: Duration,
}

impl Doctor {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        let (is_json, is_strict) = (self.json, self.strict);
        let report = Report::default();
        let (sender, result) = mpsc::channel();
        let shared = report.clone();
        thread::Builder::new()
            .spawn(move || {
                let _ = sender.send(self.examine(&shared));
            })
            .map_err(|error| Failure::new(Failure::SYSTEM, error))?;
        // After a timeout, the findings until then are printed, too.
        let status = result.recv_timeout(SILENCE).unwrap_or_else(|_| {
            let silent = database::silent();
            let (found, why) = split(&silent);
            report.add("fail", &found, &why, "", "");
            Some(silent.status)
        });
        let text = if is_json {
            report.json()
        } else {
            report.text()
        };
        io::stdout().write_all(text.as_bytes())?;
        let is_bad = report.has("fail") || is_strict && report.has("warn");
        Ok(status.unwrap_or(is_bad.into()))
    }

    /// Returns an exit status if a question could not be asked.
    fn examine(&self, report: &Report) -> Option<i32> {
        let mut url = String::new();
        let mut is_connected = false;
        let asked = database::url("doctor").and_then(|it| {
            url = it;
            // r2d2 retries until its timeout, while a single connection returns the server's error
            // at once.
            drop(database::connect(&url)?);
            is_connected = true;
            self.ask(&database::sessions(&url)?, report)
        });
        asked.err().map(|failure| {
            let otherwise = if is_connected {
                "see the message"
            } else {
                "correct DATABASE_URL, such as postgres://app@db/app, or the variables of libpq, \
                    such as PGSERVICE and PGSSLMODE"
            };
            let remedy = refusal::remedy(&failure.message, &url);
            report.fail(&failure, remedy.as_deref().unwrap_or(otherwise))
        })
    }

    /// Runs all questions, over as few sessions as possible, because a pooler may allow only one.
    fn ask(&self, sessions: &Sessions, report: &Report) -> Result<(), Failure> {
        let mut conn = sessions.get(SILENCE)?;
        report.note_settings(&mut conn)?;
        for query in SERVER {
            report.of(&mut conn, &self.filled(query))?;
        }
        drop(conn);
        self.ask_about_locks(sessions, report)?;
        self.ask_about_schema(sessions, report)
    }

    fn ask_about_locks(&self, sessions: &Sessions, report: &Report) -> Result<(), Failure> {
        match check_exclusion(&sessions.pool) {
            Ok(()) => report.ok("session locks exclude on this connection: no pooler in \
                transaction mode is in between"),
            // A question of `SERVER` has reported this.
            Err(Error::Standby) => {}
            Err(error @ Error::NotExclusive(_)) => {
                let (found, why) = split(&error.into());
                report.add("fail", &found, &why, "", "");
            }
            Err(error) => {
                let found = format!(
                    "it could not be checked whether session locks exclude: \
                    {}",
                    Failure::from(error)
                );
                report.add(
                    "warn",
                    &found,
                    "the check needs a second connection: end idle sessions, or \
                    raise the limit",
                    "",
                    "",
                );
            }
        }
        report.of(
            &mut *sessions.get(SILENCE)?,
            &self.filled(&HOLDERS.replace(":locks", database::LOCKS)),
        )
    }

    fn ask_about_schema(&self, sessions: &Sessions, report: &Report) -> Result<(), Failure> {
        const NOT_INSTALLED: &str = "the schema resource_control is not installed";
        let mut conn = sessions.get(SILENCE)?;
        let schema = Schema::of(&mut conn)?;
        match &schema {
            Schema::Absent if self.needs_schema => {
                let why = "run this as the owner of the database, or as a role that may create \
                    schemas in it";
                report.add("fail", NOT_INSTALLED, why, "", "interlock install");
                return report.of(&mut conn, questions::MAY_CREATE);
            }
            Schema::Absent => {
                let found = format!(
                    "{NOT_INSTALLED}; locks work without it (all else needs interlock install)"
                );
                report.ok(&found);
                return Ok(());
            }
            Schema::Foreign { .. } => {
                let failed = schema.require().err();
                let (found, why) = failed.as_ref().map(split).unwrap_or_default();
                // The schema may be in order for its owner.
                let level = if self.needs_schema { "fail" } else { "warn" };
                report.add(level, &found, &why, "", "");
                return Ok(());
            }
            Schema::Closed if !self.needs_schema => {
                report.ok("this role may not use the schema resource_control; locks need no right");
                return Ok(());
            }
            Schema::Closed | Schema::Readable | Schema::Usable => {}
        }
        let is_reader = matches!(schema, Schema::Readable);
        let before = report.lines().len();
        report.of(&mut conn, &self.filled(LOCKED))?;
        if report.lines().len() > before {
            return Ok(());
        }
        report.of(&mut conn, &self.filled(AS_INSTALLED))?;
        let is_as_installed = report.lines().len() == before;
        let before = report.lines().len();
        if is_reader {
            report.ok(
                "this role may read the views of the schema resource_control, and write nothing",
            );
        } else {
            report.of(&mut conn, &self.filled(GRANTS))?;
        }
        let are_granted = report.lines().len() == before;
        drop(conn);
        let checked = if is_reader {
            Ok(())
        } else {
            migrations::check(&sessions.pool)
        };
        let conn = &mut *sessions.get(SILENCE)?;
        let mut of_tables = if is_reader { &[] } else { TABLES };
        let checked = match checked {
            Err(error @ Error::CopiedSchema { .. }) => {
                let (found, why) = split(&error.into());
                report.add("fail", &found, &why, "", "interlock install");
                // The same command repairs sequences that are behind their rows.
                of_tables = &[];
                Ok(())
            }
            checked => checked,
        };
        match checked {
            Ok(()) => {
                let differences = objects::differences(conn)?;
                if differences.is_empty() && are_granted && is_as_installed {
                    report
                        .ok("the schema resource_control is complete, and is that of this release");
                }
                for it in differences {
                    report.add("fail", &it.found, &it.why, &it.sql, &it.shell);
                }
                for query in VIEWS.iter().chain(of_tables) {
                    report.of(conn, &self.filled(query))?;
                }
            }
            // `SERVER` and `GRANTS` have reported these.
            Err(Error::Encoding(_)) => {}
            Err(_) if !are_granted => {}
            // A finding of `AS_INSTALLED`, such as row security, may hide the rows of
            // `installed_migration`.
            Err(Error::NotInstalled) if !is_as_installed => {}
            Err(Error::NotInstalled) => {
                let found = "the schema resource_control is there, but not installed completely: \
                    migrations of this release are pending";
                report.add(
                    "fail",
                    found,
                    "run this as its owner",
                    "",
                    "interlock install",
                );
            }
            Err(Error::Incomplete { missing, .. }) => {
                // The missing columns first, because the missing objects may need them.
                for it in objects::differences(conn)? {
                    report.add("fail", &it.found, &it.why, &it.sql, &it.shell);
                }
                let found = format!("the schema resource_control lacks {}", missing.join(", "));
                // Where nothing else shows them, the tokens that were drawn must not be forgotten.
                let tokens = ["fencing_token", "service_request", "token_base"];
                let repair = if missing.iter().any(|it| tokens.contains(&&**it)) {
                    "interlock install --repair --restored"
                } else {
                    "interlock install --repair"
                };
                report.add("fail", &found, "run this as its owner", "", repair);
            }
            Err(error) => {
                let found = format!(
                    "the schema resource_control could not be examined: {}",
                    Failure::from(error)
                );
                report.add("fail", &found, "see the message", "", "");
            }
        }
        Ok(())
    }

    fn filled(&self, query: &str) -> String {
        let age = |age: Duration| format!("interval '{} milliseconds'", age.as_millis());
        let query = query.replace(":transaction_age", &age(self.transaction_age));
        let own = migrations::texts().flat_map(migrations::objects);
        // The migration leaves the name of this sequence to PostgreSQL.
        let own: Vec<_> = own.chain(["service_request_id_seq"]).collect();
        let query = query.replace(":own", &format!("'{{{}}}'::name[]", own.join(",")));
        query.replace(":holder_age", &age(self.holder_age))
    }
}

/// Splits an error of the library, whose text is the finding, a colon and the remedy.
fn split(failure: &Failure) -> (String, String) {
    let message = &failure.message;
    let (found, remedy) = message.split_once(": ").unwrap_or((message, ""));
    (found.to_owned(), remedy.to_owned())
}

/// A finding.
#[derive(Debug)]
struct Line {
    /// `ok`, `warn` or `fail`.
    level: String,
    found: String,
    /// What to do, in words.
    why: String,
    /// The same for psql, as whole statements.
    sql: String,
    /// The same for a shell.
    shell: String,
    /// The session that the finding is about.
    pid: Option<i64>,
}

/// Shared, because the main thread prints the report also if the thread that writes it gets no
/// reply.
#[derive(Debug, Clone, Default)]
struct Report {
    lines: Arc<Mutex<Vec<Line>>>,
    /// Where the settings of the session come from.
    origin: Arc<OnceLock<Origin>>,
}

impl Report {
    fn lines(&self) -> MutexGuard<'_, Vec<Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_settings(&self, conn: &mut PgConnection) -> Result<(), Failure> {
        let origin = Origin::of(conn)?;
        let _ = self.origin.set(origin);
        Ok(())
    }

    fn ok(&self, found: &str) {
        self.add("ok", found, "", "", "");
    }

    fn add(&self, level: &str, found: &str, why: &str, sql: &str, shell: &str) {
        self.push(Line {
            level: level.to_owned(),
            found: found.to_owned(),
            why: why.to_owned(),
            sql: sql.to_owned(),
            shell: shell.to_owned(),
            pid: None,
        });
    }

    /// Adds a finding, unless the report has the same finding, or another one about the session.
    fn push(&self, line: Line) {
        let mut lines = self.lines();
        let is_known =
            |it: &Line| it.found == line.found || line.pid.is_some() && it.pid == line.pid;
        if !lines.iter().any(is_known) {
            lines.push(line);
        }
    }

    /// Adds the rows of a question. A question that fails is a finding, too.
    fn of(&self, conn: &mut PgConnection, query: &str) -> Result<(), Failure> {
        let rows = match database::rows(conn, query) {
            Ok(rows) => rows,
            Err(error) => {
                let error = Error::from(error);
                if error.is_unavailable() {
                    return Err(error.into());
                }
                let found = format!("a query of doctor has failed: {}", Failure::from(error));
                self.add("warn", &found, "so this check has no result", "", "");
                return Ok(());
            }
        };
        for row in rows {
            let text = |member: &str| row[member].as_str().unwrap_or_default().to_owned();
            let mut line = Line {
                level: text("level"),
                found: text("found"),
                why: text("why"),
                sql: text("sql"),
                shell: text("shell"),
                pid: row["pid"].as_i64(),
            };
            if let (Some(settings), Some(origin)) = (row["settings"].as_object(), self.origin.get())
            {
                match origin.remedy(settings) {
                    Ok(sql) => line.sql = sql,
                    Err(why) => line.why = format!("{}; {why}", line.why),
                }
            }
            if line.level == "ok" {
                line.why.clear();
                line.sql.clear();
                line.shell.clear();
            }
            self.push(line);
        }
        Ok(())
    }

    /// Adds the failure that has ended the examination, and returns the exit status.
    fn fail(&self, failure: &Failure, remedy: &str) -> i32 {
        let found = failure.message.trim().replace('\n', " ");
        self.add("fail", &found, remedy, "", "");
        failure.status
    }

    fn has(&self, level: &str) -> bool {
        self.lines().iter().any(|line| line.level == level)
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for line in self.lines().iter() {
            text += &format!("{:4}  {}\n", line.level, ps::plain(&line.found));
            let is_followed = !(line.sql.is_empty() && line.shell.is_empty());
            if !line.why.is_empty() {
                let colon = if is_followed { ":" } else { "" };
                text += &format!("      {}{colon}\n", ps::plain(&line.why));
            }
            // On its own line, so that it can be copied.
            for what in [&line.sql, &line.shell]
                .into_iter()
                .filter(|it| !it.is_empty())
            {
                // With a character replaced, it might be about something else.
                if ps::plain(what) == *what {
                    text += &format!("      {what}\n");
                } else {
                    text += "      (it contains characters that are not shown here: `interlock \
                        doctor --json` has it)\n";
                }
            }
        }
        text
    }

    fn json(&self) -> String {
        let of = |line: &Line| {
            let Line {
                level,
                found,
                why,
                sql,
                shell,
                ..
            } = line;
            json!({"level": level, "found": found, "why": why, "sql": sql, "shell": shell})
        };
        ps::json(&Value::from_iter(self.lines().iter().map(of)))
    }
}
