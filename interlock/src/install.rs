//! `interlock install`: creates the schema, or the parts that are missing in it.

use std::io::{self, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use diesel::pg::PgConnection;
use diesel_interlock::{Error, PgPool, migrations};
use serde_json::Value;

use crate::database::{self, LOCKS, Schema, in_time, rows};
use crate::doctor::objects;
use crate::{Failure, duration, holders, say};

/// The lock that every migration of the schema takes. A role that may only connect can hold it,
/// too.
const LOCK: &str = migrations::LOCK;

/// How often the lock is tried.
const PAUSE: Duration = Duration::from_millis(100);

/// After a wait of this length, a message names the holder.
const WORTH_SAYING: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(crate) struct Install {
    /// Waits for locks that other sessions hold for at most this time
    #[arg(long, value_parser = duration, value_name = "DURATION", default_value = "1m")]
    wait: Duration,
    /// Runs the migrations again whose functions were replaced, or whose objects were dropped
    #[arg(long)]
    repair: bool,
    /// Lets fencing tokens continue above all that are known: run it after any restore, copy or
    /// upgrade
    #[arg(long)]
    restored: bool,
}

impl Install {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        let url = database::url("install")?;
        let (pool, mut conn, checked) = in_time(|| {
            let mut conn = database::connect(&url)?;
            claim(&mut conn)?;
            let pool = database::pool(&url)?;
            let checked = match migrations::check(&pool) {
                Err(Error::Encoding(encoding)) => return Err(Error::Encoding(encoding).into()),
                checked => checked,
            };
            Ok::<_, Failure>((pool, conn, checked))
        })?;
        let is_copy = matches!(checked, Err(Error::CopiedSchema { .. }));
        let is_whole = checked.is_ok() || is_copy;
        let repaired = if self.repair {
            in_time(|| objects::forget_differing(&mut conn))?
        } else {
            Vec::new()
        };
        let is_new = !is_whole || !repaired.is_empty();
        let base_before = base(&mut conn);
        if is_new {
            free(&mut conn, self.wait)?;
        }
        install(pool, &mut conn, self.wait, self.restored).inspect_err(|_| {
            // Programs that are running would not find the schema otherwise.
            let _ = objects::remember(&mut conn, &repaired);
        })?;
        let mut changes = Vec::new();
        if is_new && repaired.is_empty() {
            changes.push("installed".to_owned());
        } else if is_new {
            changes.push(format!(
                "repaired by the migrations {}",
                repaired.join(", ")
            ));
        }
        // Where the server does not say that this is a copy, only a new base shows it.
        let is_base_new = base_before.is_some_and(|it| base(&mut conn) != Some(it));
        if self.restored || is_copy || is_base_new {
            changes.push("fencing tokens continue above all that are known".to_owned());
        }
        if changes.is_empty() {
            changes.push("nothing to do".to_owned());
        }
        let what = changes.join("; ");
        writeln!(io::stdout(), "resource_control: {what}")?;
        Ok(0)
    }
}

/// Refuses a schema that belongs to a role with fewer rights. Creates an absent schema here, before
/// another role can create it while the installation waits for a lock.
fn claim(conn: &mut PgConnection) -> Result<(), Failure> {
    let mut schema = Schema::of(conn)?;
    if matches!(schema, Schema::Absent) {
        // If this fails, the migrations return the reason. If another role was faster, the next
        // query finds its schema.
        let _ = Schema::claim(conn);
        schema = Schema::of(conn)?;
    }
    match schema {
        Schema::Foreign { .. } => schema.require(),
        _ => Ok(()),
    }
}

/// The base from which fencing tokens are counted, if it can be read.
fn base(conn: &mut PgConnection) -> Option<Value> {
    const BASE: &str = "SELECT identity, base FROM resource_control.token_base";
    rows(conn, BASE).ok()?.pop()
}

/// Waits until the lock of the migrations is free, because the migrations themselves would wait for
/// it without a limit.
fn free(conn: &mut PgConnection, wait: Duration) -> Result<(), Failure> {
    let (began, mut is_reported) = (Instant::now(), false);
    let attempt = format!("SELECT pg_try_advisory_xact_lock({LOCK}) AS is_free");
    while rows(conn, &attempt)?
        .iter()
        .any(|row| row["is_free"] == false)
    {
        let is_over = began.elapsed() >= wait;
        if is_over || !is_reported && began.elapsed() >= WORTH_SAYING.min(wait / 2) {
            let holders = holders::of_lock(conn, LOCK)?.join("; ");
            is_reported = true;
            say(&holders, is_over)?;
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn say(holders: &str, is_over: bool) -> Result<(), Failure> {
    let what = format!(
        "the lock of the migrations is busy: {holders}; if that is no migration: interlock kill \
            --number {LOCK}"
    );
    if is_over {
        return Err(Failure::new(Failure::BUSY, what));
    }
    say!("{what}");
    Ok(())
}

/// Installs on a separate thread, and reports meanwhile which session the installation waits for.
fn install(
    pool: PgPool,
    conn: &mut PgConnection,
    wait: Duration,
    is_restored: bool,
) -> Result<(), Failure> {
    // The sessions of the pool have the same application name as this session.
    let waits = format!(
        "SELECT DISTINCT blocker AS pid, usename AS role, application_name AS application
            FROM (SELECT unnest(pg_blocking_pids(pid)) AS blocker FROM pg_stat_activity
                WHERE application_name = current_setting('application_name') AND datname =
                    current_database()
                    AND usename = current_user AND wait_event_type = 'Lock') AS b
                LEFT JOIN pg_stat_activity AS a ON a.pid = b.blocker
        UNION SELECT pid, role, application FROM ({LOCKS}) AS l WHERE state = 'held' AND lock =
            '{LOCK}'
            AND EXISTS (SELECT FROM ({LOCKS}) AS w WHERE w.state = 'waits' AND w.lock = '{LOCK}')"
    );
    let (sender, result) = mpsc::channel();
    thread::Builder::new()
        .spawn(move || {
            let _ = sender.send(if is_restored {
                migrations::restart_tokens(&pool)
            } else {
                migrations::install(&pool)
            });
        })
        .map_err(|error| Failure::new(Failure::SYSTEM, error))?;
    let mut waiting: Option<(Instant, bool)> = None;
    loop {
        match result.recv_timeout(Duration::from_secs(1)) {
            Ok(installed) => return Ok(installed?),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new(
                    Failure::SYSTEM,
                    "the installation has panicked",
                ));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let blockers = rows(conn, &waits)?;
        let Some(first) = blockers.first() else {
            waiting = None;
            continue;
        };
        let (since, is_reported) = waiting.get_or_insert((Instant::now(), false));
        let text = |member: &str| first[member].as_str().unwrap_or("unknown").to_owned();
        let what = format!(
            "waits for session {} of {} ({}), which holds a lock that the installation needs",
            first["pid"],
            text("role"),
            text("application")
        );
        if since.elapsed() >= wait {
            return Err(Failure::new(Failure::BUSY, what));
        }
        if !*is_reported {
            say!("{what}");
            *is_reported = true;
        }
    }
}
