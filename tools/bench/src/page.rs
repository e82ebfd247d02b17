//! The page of the figures, `docs/performance.md`, which has a mark before and after each table.

use std::path::Path;
use std::{fs, io};

/// Replaces what is between `<!-- NAME -->` and `<!-- end of NAME -->`.
pub(crate) fn write(root: &Path, name: &str, text: &str) -> io::Result<()> {
    let path = root.join("docs/performance.md");
    let page = fs::read_to_string(&path)?;
    let (begin, end) = (
        format!("<!-- {name} -->\n"),
        format!("<!-- end of {name} -->"),
    );
    let parts = page.split_once(&begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(&end)?;
        Some((before, after))
    });
    let (before, after) =
        parts.ok_or_else(|| io::Error::other(format!("{} has no {begin}", path.display())))?;
    fs::write(&path, format!("{before}{begin}{text}\n{end}{after}"))
}
