//! Telling the campaign.

use std::io::Write;

use crate::record::Record;

/// Writes the line at once: it must not be lost if this process is killed next.
pub(super) fn report(record: &Record) {
    let line = serde_json::to_string(record).expect("a record is JSON") + "\n";
    let mut out = std::io::stdout().lock();
    if out
        .write_all(line.as_bytes())
        .and_then(|()| out.flush())
        .is_err()
    {
        // The campaign is gone.
        std::process::exit(0);
    }
}
