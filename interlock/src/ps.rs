//! `interlock ps`: holders and waiters of locks, slots in use, leaders and schedules.

use std::env;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::ops::RangeInclusive;

use clap::Args;
use diesel::QueryResult;
use diesel::pg::PgConnection;
use serde_json::{Map, Value};

use crate::database::{self, Schema, in_time};
use crate::{Failure, say};

#[derive(Debug, Args)]
pub(crate) struct Ps {
    /// Writes one JSON object, with an array for each kind
    #[arg(long)]
    json: bool,
    /// Shows all columns in full width
    #[arg(long, short)]
    wide: bool,
    /// Shows only the lock, the semaphore, the leader and the schedule of this name
    #[arg(long)]
    name: Option<String>,
}

/// The tables that need the schema: the heading, the query, whose first column is the name, and the
/// columns that are shown without `--wide`.
pub(crate) const VIEWS: [(&str, &str, &[&str]); 3] = [
    (
        "slots",
        "SELECT service, slot, id, created_at AS since, expires_at AS until, details,
                date_part('epoch', clock_timestamp() - created_at)::bigint AS age,
                date_part('epoch', expires_at - clock_timestamp())::bigint AS expires
            FROM resource_control.slot_in_flight WHERE NOT starts_with(service, 'leader ')
            ORDER BY service, slot",
        &["service", "slot", "id", "details", "age", "expires"],
    ),
    (
        "leaders",
        "SELECT name, holder, since, until, fencing_token AS token, date_part('epoch', clock_timestamp() -
            since)::bigint AS age,
                date_part('epoch', until - clock_timestamp())::bigint AS expires
            FROM resource_control.leader ORDER BY name",
        &["name", "holder", "token", "age", "expires"],
    ),
    (
        "schedules",
        "SELECT name, state, tick, attempt, COALESCE(triggered_at, next_at) AS next,
                retry_at AS retry, runner, started_at AS started, expires_at AS until, ended_at AS ended, paused_at AS
                    paused, error,
                date_part('epoch', clock_timestamp() - started_at)::bigint AS age
            FROM resource_control.schedule_state ORDER BY name",
        &[
            "name", "state", "tick", "attempt", "next", "retry", "runner", "age", "paused", "error",
        ],
    ),
];

/// The columns of a lock that are shown without `--wide`.
pub(crate) const OF_LOCK: &[&str] = &[
    "lock",
    "state",
    "mode",
    "pid",
    "application",
    "client",
    "session",
    "age",
    "blocked_by",
];

/// The largest width of a table without `--wide`.
const WIDTH: usize = 100;

/// The width of the terminal, if `COLUMNS` has it. `watch` sets this variable, and cuts longer
/// lines.
fn limit() -> usize {
    let columns = env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    columns.map_or(WIDTH, |columns: usize| columns.min(WIDTH))
}

/// How much of a name is shown without `--wide`.
const LONGEST_NAME: usize = 40;

impl Ps {
    pub(crate) fn run(self) -> Result<i32, Failure> {
        let lock = match &self.name {
            Some(name) => Some(database::lock(name, false)?),
            None => None,
        };
        let url = database::url("ps")?;
        let mut text = String::new();
        let all = in_time(|| {
            let conn = &mut database::connect(&url)?;
            let mut all = Map::new();
            all.insert("locks".into(), found(conn, database::LOCKS, &lock)?);
            let schema = Schema::of(conn)?;
            if let Some(why) = schema.why_unread() {
                let what = format!("slots, leaders and schedules: not read, because {why}");
                if self.json && !matches!(schema, Schema::Absent) {
                    say!("{what}");
                }
                text = what + "\n";
                return Ok(all);
            }
            for (kind, query, _) in VIEWS {
                match found(conn, query, &self.name).map_err(Failure::from) {
                    Ok(rows) => drop(all.insert(kind.into(), rows)),
                    Err(failure) if failure.status == Failure::SET_UP => {
                        say!("{kind} could not be read: {failure}; see `interlock doctor`");
                        all.insert(kind.into(), Value::Null);
                    }
                    Err(failure) => return Err(failure),
                }
            }
            Ok::<_, Failure>(all)
        })?;
        if self.json {
            text = json(&Value::Object(all));
        } else {
            let mut tables = String::new();
            for (kind, rows) in &all {
                let view = VIEWS.iter().find(|(name, ..)| name == kind);
                let columns = view.map_or(OF_LOCK, |(_, _, columns)| columns);
                let columns = (!self.wide).then_some(columns);
                tables += &rows
                    .as_array()
                    .map_or_else(String::new, |rows| table(kind, rows, columns));
            }
            text = tables + &text;
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

/// A heading and the rows: the given columns in a limited width, or all columns in full width.
pub(crate) fn table(kind: &str, rows: &[Value], columns: Option<&[&str]>) -> String {
    let Some(first) = rows.first().and_then(Value::as_object) else {
        return format!("{kind}: none\n");
    };
    let all: Vec<_> = first.keys().map(String::as_str).collect();
    let shown = columns.unwrap_or(&all);
    let mut lines = vec![
        shown
            .iter()
            .map(|&name| name.to_owned())
            .collect::<Vec<_>>(),
    ];
    lines.extend(rows.iter().map(|row| {
        let cells = shown
            .iter()
            .map(|name| cell(name, &row[*name], columns.is_some()));
        cells.collect()
    }));
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let mut widths: Vec<_> = (0..shown.len()).map(width).collect();
    // Only free text is cut, the longest first: a shortened lock, id or pid would be of no use.
    let is_cut = |name: &&str| {
        [
            "application",
            "client",
            "details",
            "error",
            "holder",
            "runner",
            "session",
        ]
        .contains(name)
    };
    let limit = limit();
    for (width, name) in widths.iter_mut().zip(shown) {
        if columns.is_some() && is_cut(name) {
            *width = (*width).min(limit.max(8));
        }
    }
    while columns.is_some() && widths.iter().map(|width| width + 2).sum::<usize>() > limit {
        let mut texts: Vec<_> = (0..shown.len()).filter(|&i| is_cut(&shown[i])).collect();
        texts.sort_by_key(|&i| widths[i]);
        match texts.last() {
            Some(&longest) if widths[longest] > 8 => widths[longest] -= 1,
            _ => break,
        }
    }
    let mut text = format!("{kind}:\n");
    for line in &lines {
        let mut shown = String::new();
        for (cell, &width) in line.iter().zip(&widths) {
            let cell = match cell.char_indices().nth(width) {
                Some(_) => cell.chars().take(width - 1).chain(['…']).collect(),
                None => cell.clone(),
            };
            // Not by the width of a format, of which Rust accepts 65,535 at most.
            shown += "  ";
            shown += &cell;
            shown += &" ".repeat(width - cell.chars().count());
        }
        text += shown.trim_end();
        text += "\n";
    }
    text
}

fn cell(name: &str, value: &Value, is_short: bool) -> String {
    match value {
        Value::Null => "-".into(),
        // To the second, in UTC.
        Value::String(time) if is_short && ["tick", "next", "retry"].contains(&name) => {
            time.chars().take(19).collect()
        }
        Value::String(time) if is_short && name == "paused" => time.chars().take(10).collect(),
        Value::String(text) => {
            let text = plain(text);
            let is_long = is_short && ["name", "service"].contains(&name);
            match text.char_indices().nth(LONGEST_NAME) {
                Some((end, _)) if is_long => text[..end].to_owned() + "…",
                _ => text,
            }
        }
        Value::Array(all) => all
            .iter()
            .map(|value| cell(name, value, is_short))
            .collect::<Vec<_>>()
            .join(","),
        Value::Number(seconds) if ["age", "expires"].contains(&name) => {
            seconds.as_i64().map_or_else(String::new, age)
        }
        other => other.to_string(),
    }
}

/// A duration in its largest fitting unit, such as `35m`.
pub(crate) fn age(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// The text without control and invisible characters: text that other programs have written must
/// not move the cursor.
pub(crate) fn plain(text: &str) -> String {
    text.replace(['\n', '\t', '\u{2028}', '\u{2029}'], " ")
        .replace(
            |c: char| c.is_control() || INVISIBLE.iter().any(|it| it.contains(&c)),
            "?",
        )
}

/// A line of JSON, with control and invisible characters escaped.
pub(crate) fn json(value: &Value) -> String {
    let mut line = String::new();
    // Only strings contain such characters, so the escape is always valid.
    for c in value.to_string().chars() {
        if c.is_control() || INVISIBLE.iter().any(|it| it.contains(&c)) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(line, "\\u{unit:04x}");
            }
        } else {
            line.push(c);
        }
    }
    line + "\n"
}

/// Characters that are invisible, or change the direction of text.
const INVISIBLE: [RangeInclusive<char>; 14] = [
    '\u{ad}'..='\u{ad}',
    '\u{34f}'..='\u{34f}',
    '\u{61c}'..='\u{61c}',
    '\u{115f}'..='\u{1160}',
    '\u{17b4}'..='\u{17b5}',
    '\u{180b}'..='\u{180f}',
    '\u{200b}'..='\u{200f}',
    '\u{2028}'..='\u{202e}',
    '\u{2060}'..='\u{206f}',
    '\u{3164}'..='\u{3164}',
    '\u{feff}'..='\u{feff}',
    '\u{ffa0}'..='\u{ffa0}',
    '\u{fff9}'..='\u{fffb}',
    '\u{e0000}'..='\u{e0fff}',
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_replace_invisible_characters_and_json_escapes_them() {
        for c in [
            '\u{61c}',
            '\u{ad}',
            '\u{180e}',
            '\u{2060}',
            '\u{3164}',
            '\u{e0041}',
            '\u{9b}',
        ] {
            assert_eq!(plain(&format!("a{c}b")), "a?b", "{c:?}");
            let text = Value::from(format!("a{c}b"));
            let line = json(&text);
            assert!(line.trim_end().is_ascii(), "{line:?}");
            assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), text);
        }
        assert_eq!(plain("Zürich 東京 \u{1f600}"), "Zürich 東京 \u{1f600}");
    }
}
