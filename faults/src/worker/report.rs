//! The records for the campaign.

use std::io::Write;

use crate::record::Record;

/// Writes the line at once, so that it is not lost if this process is killed next.
pub(super) fn report(record: &Record) {
    let line = serde_json::to_string(record).expect("a record is JSON") + "\n";
    let mut out = std::io::stdout().lock();
    if out
        .write_all(line.as_bytes())
        .and_then(|()| out.flush())
        .is_err()
    {
        // The campaign has ended.
        std::process::exit(0);
    }
}

pub(super) fn violation(text: impl Into<String>) {
    report(&Record::Violation { text: text.into() });
}
