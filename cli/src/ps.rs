//! `interlock ps`: who holds, who waits, who leads, what runs.

use std::fmt::Write as _;
use std::io::{self, Write};

use clap::Args;
use diesel::QueryResult;
use diesel::pg::PgConnection;
use serde_json::{Map, Value};

use crate::database::{self, in_time};
use crate::{Failure, say};

#[derive(Debug, Args)]
pub(crate) struct Ps {
    /// Writes one JSON object, with an array for each kind
    #[arg(long)]
    json: bool,
    /// Shows only the lock, the semaphore, the leader and the schedule of this name
    #[arg(long)]
    name: Option<String>,
}

/// What needs the schema. The first column is the name.
const VIEWS: [(&str, &str); 3] = [
    (
        "slots",
        "SELECT service, slot, id, created_at AS since, expires_at AS until, details
            FROM resource_control.slot_in_flight ORDER BY service, slot",
    ),
    (
        "leaders",
        "SELECT name, holder, since, until, token FROM resource_control.leader ORDER BY name",
    ),
    (
        "schedules",
        "SELECT name, state, tick, attempt, runner, started_at AS started, expires_at AS until, ended_at AS ended,
                paused_at AS paused, error
            FROM resource_control.schedule_state ORDER BY name",
    ),
];

impl Ps {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        let lock = match &self.name {
            Some(name) => Some(database::lock(name, false)?),
            None => None,
        };
        let url = database::url("ps")?;
        let all = in_time(|| {
            let conn = &mut database::connect(&url)?;
            let mut all = Map::new();
            all.insert("locks".into(), found(conn, database::LOCKS, &lock)?);
            if !database::has_schema(conn)? {
                return Ok(all);
            }
            for (kind, query) in VIEWS {
                match found(conn, query, &self.name).map_err(Failure::from) {
                    Ok(rows) => drop(all.insert(kind.into(), rows)),
                    Err(failure) if failure.status == Failure::SET_UP => {
                        say!("no {kind}: {failure}; see `interlock doctor`");
                        all.insert(kind.into(), Value::Null);
                    }
                    Err(failure) => return Err(failure),
                }
            }
            Ok::<_, Failure>(all)
        })?;
        let mut text = String::new();
        if self.json {
            text = Value::Object(all).to_string() + "\n";
        } else {
            for (kind, rows) in &all {
                text += &rows
                    .as_array()
                    .map_or_else(String::new, |rows| table(kind, rows));
            }
        }
        io::stdout().write_all(text.as_bytes())?;
        Ok(0)
    }
}

fn found(conn: &mut PgConnection, query: &str, name: &Option<String>) -> QueryResult<Value> {
    let mut rows = database::rows(conn, query)?;
    if let Some(name) = name {
        let first = |row: &Value| {
            row.as_object()?
                .values()
                .next()?
                .as_str()
                .map(str::to_owned)
        };
        rows.retain(|row| first(row).as_ref() == Some(name));
    }
    Ok(rows.into())
}

/// A heading, and the rows in columns.
pub(crate) fn table(kind: &str, rows: &[Value]) -> String {
    let Some(first) = rows.first().and_then(Value::as_object) else {
        return format!("{kind}: none\n");
    };
    let mut lines = vec![first.keys().cloned().collect::<Vec<_>>()];
    let rows = rows.iter().filter_map(Value::as_object);
    lines.extend(rows.map(|row| row.values().map(cell).collect()));
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..first.len()).map(width).collect();
    let mut text = format!("{kind}:\n");
    for line in &lines {
        let mut shown = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(shown, "  {cell:width$}");
        }
        text += shown.trim_end();
        text += "\n";
    }
    text
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => plain(text),
        Value::Array(all) => all.iter().map(cell).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// What other programs have written must not move the cursor.
pub(crate) fn plain(text: &str) -> String {
    text.replace(['\n', '\t'], " ")
        .replace(char::is_control, "?")
}
