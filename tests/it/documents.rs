//! The documents: each error has its section, and each link its target.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files below a directory that have this extension, except build output and hidden directories.
fn files(directory: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with('.') && name != "target" && name != "node_modules" {
                files(&path, extension, found);
            }
        } else if path.extension().is_some_and(|it| it == extension) {
            found.push(path);
        }
    }
}

/// The variants of the four enums of errors, as `Error::LockLost`, each with the beginning of its message up to the
/// first colon. An `…` stands for each value in it. The message is empty where another error's is passed on.
fn errors() -> BTreeMap<String, String> {
    let mut sources = Vec::new();
    files(&root().join("src"), "rs", &mut sources);
    let sources: Vec<String> = sources.iter().map(read).collect();
    let mut errors = BTreeMap::new();
    for name in ["Error", "Input", "Misplaced", "Schema"] {
        let declaration = format!("\npub enum {name} {{\n");
        let mut found = sources
            .iter()
            .filter_map(|source| source.split_once(&declaration));
        let (_, rest) = found.next().unwrap();
        assert!(found.next().is_none(), "two enums {name}");
        let (body, _) = rest.split_once("\n}\n").unwrap();
        let mut attribute = String::new();
        for line in body.lines() {
            let Some(line) = line.strip_prefix("    ") else {
                continue;
            };
            if line.starts_with("#[error(") {
                attribute.clear();
            }
            if line.starts_with(|first: char| first.is_ascii_uppercase()) {
                let end = line.find(|letter: char| !letter.is_ascii_alphanumeric());
                let variant = format!("{name}::{}", &line[..end.unwrap()]);
                errors.insert(variant, beginning(&attribute));
            } else if !line.starts_with("//") {
                attribute.push_str(line.trim());
            }
        }
    }
    errors
}

/// The beginning of the message in an attribute `#[error(…)]` without line breaks.
fn beginning(attribute: &str) -> String {
    let literal = attribute.split('"').nth(1).unwrap_or_default();
    let mut pieces = literal.split('{');
    let mut message = pieces.next().unwrap_or_default().replace('\\', " ");
    for piece in pieces {
        message.push('…');
        let (_, text) = piece.split_once('}').unwrap();
        message.push_str(&text.replace('\\', " "));
    }
    let message = message.split(':').next().unwrap_or_default();
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The lines of a markdown text that are not in a code block.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    })
}

fn headings(text: &str) -> impl Iterator<Item = &str> {
    prose(text).filter_map(|line| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len()).then(|| title.trim())
    })
}

/// The anchor of a heading, as rustdoc and the common hosts make it.
fn anchor(heading: &str) -> String {
    heading
        .to_lowercase()
        .chars()
        .filter_map(|letter| match letter {
            ' ' | '-' => Some('-'),
            '_' => Some('_'),
            letter => letter.is_alphanumeric().then_some(letter),
        })
        .collect()
}

fn has_anchor(text: &str, wanted: &str) -> bool {
    headings(text).any(|heading| anchor(heading) == wanted)
}

/// The targets of the links in a markdown text: `[…](target)` and `[…]: target`.
fn link_targets(text: &str) -> Vec<String> {
    let mut targets = Vec::new();
    for line in prose(text) {
        // Not in inline code, where `]` and `(` may stand together.
        let without_code: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        for rest in without_code.split("](").skip(1) {
            targets.extend(rest.split(')').next().map(str::to_owned));
        }
        if line.starts_with('[')
            && let Some((_, target)) = line.split_once("]: ")
        {
            targets.push(target.trim().to_owned());
        }
    }
    targets
}

/// The page of the guide that a link of the documentation leads to, such as `crate::guide::recipes`.
fn page_of_the_guide(path: &str) -> Option<PathBuf> {
    let page = match path.strip_prefix("crate::guide")? {
        "" => "guide",
        page => page.strip_prefix("::")?,
    };
    Some(root().join(format!("docs/{page}.md")))
}

#[test]
fn each_error_has_a_section_in_the_troubleshooting_page_and_each_section_an_error() {
    let page = read("docs/troubleshooting.md");
    let sections: BTreeSet<String> = headings(&page)
        .filter_map(|heading| heading.strip_prefix('`')?.strip_suffix('`'))
        .filter(|heading| heading.contains("::"))
        .map(str::to_owned)
        .collect();

    let errors = errors();
    let variants: BTreeSet<String> = errors.keys().cloned().collect();
    assert!(variants.len() > 40, "{variants:?}");
    let without_section: Vec<_> = variants.difference(&sections).collect();
    let without_error: Vec<_> = sections.difference(&variants).collect();
    assert!(
        without_section.is_empty() && without_error.is_empty(),
        "no section for {without_section:?}, no error for {without_error:?}"
    );
}

#[test]
fn each_section_of_an_error_begins_with_the_beginning_of_its_message() {
    let page = read("docs/troubleshooting.md");
    let mut different = Vec::new();
    for (variant, message) in errors() {
        let begins = format!("\n## `{variant}`\n\n> {message}\n");
        if !message.is_empty() && !page.contains(&begins) {
            different.push((variant, message));
        }
    }
    assert!(different.is_empty(), "{different:#?}");
}

#[test]
fn each_relative_link_of_a_document_leads_to_a_file_and_its_anchor_to_a_heading() {
    let mut documents = Vec::new();
    files(root(), "md", &mut documents);
    // Its text becomes that of docs/performance.md, where its links are looked at.
    documents.retain(|path| !path.ends_with("bench/performance.md"));

    let (mut broken, mut seen) = (Vec::new(), 0);
    for document in &documents {
        let text = read(document);
        for target in link_targets(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            seen += 1;
            let (path, wanted) = target.split_once('#').unwrap_or((&target, ""));
            let file = match path {
                "" => document.clone(),
                path if path.contains("::") => match page_of_the_guide(path) {
                    Some(page) => page,
                    None => continue, // an item, which rustdoc checks
                },
                path => document.parent().unwrap().join(path),
            };
            if !file.exists() {
                broken.push(format!("{}: {target}", document.display()));
            } else if !wanted.is_empty() && !has_anchor(&read(&file), wanted) {
                broken.push(format!("{}: no heading for {target}", document.display()));
            }
        }
    }
    assert!(seen > 100, "{seen}");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn each_link_of_the_sources_to_the_guide_leads_to_a_heading() {
    let mut sources = Vec::new();
    files(&root().join("src"), "rs", &mut sources);
    let mut broken = Vec::new();
    for source in sources {
        for rest in read(&source).split("crate::guide").skip(1) {
            let end =
                rest.find(|letter: char| !letter.is_alphanumeric() && !"_:#-".contains(letter));
            let link = format!("crate::guide{}", &rest[..end.unwrap_or(rest.len())]);
            let (path, wanted) = link.split_once('#').unwrap_or((&link, ""));
            let Some(page) = page_of_the_guide(path) else {
                continue;
            };
            if !page.exists() || !(wanted.is_empty() || has_anchor(&read(&page), wanted)) {
                broken.push(format!("{}: {link}", source.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn each_page_of_the_guide_is_shown_in_the_documentation_and_linked_from_its_first_page() {
    let guide = read("src/guide.rs");
    let first = read("docs/guide.md");
    let mut pages = Vec::new();
    files(&root().join("docs"), "md", &mut pages);
    for page in pages {
        let name = page.file_stem().unwrap().to_str().unwrap();
        assert!(guide.contains(&format!("\"../docs/{name}.md\"")), "{name}");
        assert!(
            name == "guide" || first.contains(&format!("crate::guide::{name}")),
            "{name}"
        );
    }
}
