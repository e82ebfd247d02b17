//! What is printed, and how.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::sync::LazyLock;

/// How many characters of text are in a line, at most, beyond what it is indented.
const WIDTH: usize = 74;

/// Whether to print in colours: on a terminal, and not if `NO_COLOR` is set.
static COLOURS: LazyLock<bool> = LazyLock::new(|| {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
});

pub(crate) fn title(text: impl Display) {
    println!("\n{}", in_colour("1", text));
}

pub(crate) fn say(text: impl Display) {
    println!("\n  {text}");
}

pub(crate) fn note(text: impl Display) {
    for (number, line) in wrapped(&text.to_string()).iter().enumerate() {
        let mark = if number == 0 { "·" } else { " " };
        println!("    {} {}", in_colour("2", mark), in_colour("2", line));
    }
}

pub(crate) fn good(text: impl Display) {
    println!("    {} {text}", in_colour("1;32", "✓"));
}

pub(crate) fn bad(text: impl Display) {
    println!("    {} {text}", in_colour("1;31", "✗"));
}

/// A row of a table, each cell as wide as its column; the last one may be longer.
pub(crate) fn row<const COLUMNS: usize>(widths: [usize; COLUMNS], cells: [&dyn Display; COLUMNS]) {
    let cells: Vec<_> = cells
        .iter()
        .zip(widths)
        .map(|(cell, width)| format!("{:width$}", cell.to_string()))
        .collect();
    println!("    {}", cells.join("  ").trim_end());
}

/// The same, as the heading of a table.
pub(crate) fn heading<const COLUMNS: usize>(widths: [usize; COLUMNS], cells: [&str; COLUMNS]) {
    let cells: Vec<_> = cells
        .iter()
        .zip(widths)
        .map(|(cell, width)| format!("{cell:width$}"))
        .collect();
    println!("    {}", in_colour("2", cells.join("  ").trim_end()));
}

/// A bar of a chart, with its number. A character stands for two.
pub(crate) fn bar(label: impl Display, number: usize) {
    let bar = "█".repeat(number.div_ceil(2).min(WIDTH - 12));
    println!("    {label}  {} {number}", in_colour("36", bar));
}

/// The lines of a text that may be too long for one.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.len() - 1;
        if lines[line].is_empty() {
            lines[line].push_str(word);
        } else if lines[line].chars().count() + 1 + word.chars().count() <= WIDTH {
            lines[line].push(' ');
            lines[line].push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

fn in_colour(code: &str, text: impl Display) -> String {
    if *COLOURS {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_string()
    }
}
