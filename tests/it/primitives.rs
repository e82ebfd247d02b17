//! The files that know each primitive, as CONTRIBUTING.md lists them. A primitive that one of them lacks fails here.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A primitive, and the names by which the files know it.
struct Primitive {
    /// Its module in `src/`.
    module: &'static str,
    /// Its handle, which `lib.rs` exports and the guide explains.
    handle: &'static str,
    /// Its migrations, without the date.
    migrations: &'static [&'static str],
    /// Its tables.
    tables: &'static [&'static str],
    /// Its stored functions that `functions` declares for the queries of an application.
    declared: &'static [&'static str],
    /// Its other stored functions, which only its own statements and functions call.
    internal: &'static [&'static str],
    /// A name of it in `monitor`, if there is something to see.
    monitored: Option<&'static str>,
    /// A name of it in `testing`, if tests need help with it.
    helped: Option<&'static str>,
    /// One of its modules in `tests/it`.
    tests: &'static str,
}

const PRIMITIVES: [Primitive; 5] = [
    Primitive {
        module: "advisory",
        handle: "AdvisoryLock",
        migrations: &["resource_control"],
        tables: &["installed_migration"],
        declared: &["lock_key"],
        internal: &[],
        monitored: Some("holders"),
        helped: Some("assert_not_held"),
        tests: "session_locks",
    },
    Primitive {
        module: "throttle",
        handle: "Throttle",
        migrations: &["throttled_resources", "throttled_keys"],
        tables: &["throttled_resource", "throttled_key"],
        declared: &["elapsed", "prune_throttled_keys"],
        internal: &[
            "elapsed_with_days",
            "require_read_committed",
            "attempt_throttled_resource",
            "lock_throttled_resource",
            "throttled_key_lock",
            "attempt_throttled_key",
        ],
        monitored: Some("ThrottledResourceRow"),
        helped: Some("make_due"),
        tests: "throttles",
    },
    Primitive {
        module: "semaphore",
        handle: "Semaphore",
        migrations: &["service_requests"],
        tables: &["service_request"],
        declared: &[
            "admit_service_request",
            "complete_service_request",
            "renew_service_request",
            "prune_service_requests",
        ],
        internal: &[
            "service_request_lock",
            "lock_free_slot",
            "claim_service_request",
        ],
        monitored: Some("ServiceRequest"),
        helped: Some("expire"),
        tests: "semaphores",
    },
    Primitive {
        module: "rate_limit",
        handle: "RateLimit",
        migrations: &["rate_limits"],
        tables: &["rate_limit", "rate_limit_override"],
        declared: &[
            "check_rate_limit",
            "check_rate_limits",
            "reserve_rate_limit",
            "give_back_rate_limit",
            "peek_rate_limit",
            "reset_rate_limit",
            "prune_rate_limits",
            "rate_limit_debt",
            "scaled_up",
        ],
        internal: &[
            "decide_rate_limit",
            "spend_rate_limit",
            "scaled_down",
            "rescaled",
            "microseconds",
            "refuse_rate_limit",
            "read_rate_limit",
            "retire_rate_limit",
            "forget_rate_limit",
            "settle_rate_limit",
            "reserve_rate_limit_within",
        ],
        monitored: Some("RateLimitRow"),
        helped: Some("use_up"),
        tests: "rate_limits",
    },
    Primitive {
        module: "fence",
        handle: "Fence",
        migrations: &["fences"],
        tables: &["fence"],
        declared: &["pass_fence"],
        internal: &[],
        monitored: None,
        helped: None,
        tests: "fences",
    },
];

/// Reads a file of the repository, or all files of a directory.
fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if !path.is_dir() {
        return fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    }
    let mut text = String::new();
    for entry in entries(&path) {
        if entry.is_file() {
            text += &fs::read_to_string(&entry).unwrap_or_default();
        }
    }
    text
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    entries
}

fn exists(path: &str) -> bool {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists()
}

/// The words of a text that are identifiers.
fn words(text: &str) -> BTreeSet<&str> {
    text.split(|character: char| !character.is_alphanumeric() && character != '_')
        .collect()
}

/// The names that follow `before` in a text.
fn names_after<'a>(text: &'a str, before: &str) -> BTreeSet<&'a str> {
    text.split(before)
        .skip(1)
        .map(|rest| {
            let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_');
            &rest[..end.unwrap_or(rest.len())]
        })
        .collect()
}

fn listed(names: impl Fn(&Primitive) -> &'static [&'static str]) -> BTreeSet<&'static str> {
    PRIMITIVES.iter().flat_map(names).copied().collect()
}

#[test]
fn every_module_with_statements_is_a_primitive_of_the_table() {
    let modules: BTreeSet<_> = PRIMITIVES
        .iter()
        .map(|primitive| primitive.module)
        .collect();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for directory in entries(&source) {
        if directory.join("sql.rs").exists() {
            let module = directory.file_name().unwrap().to_str().unwrap();
            assert!(modules.contains(module), "{module} is not in the table");
        }
    }
    for module in modules {
        assert!(exists(&format!("src/{module}.rs")), "{module} has no file");
    }
}

#[test]
fn every_migration_belongs_to_a_primitive_and_has_both_files() {
    let mut found = BTreeSet::new();
    let list = read("src/migrations/ours.rs");
    for directory in super::installation::directories() {
        let name = directory.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(
            list.contains(&format!("\"{name}\"")),
            "{name} is not in ours.rs"
        );
        for file in ["up.sql", "down.sql"] {
            assert!(directory.join(file).is_file(), "{name} has no {file}");
        }
        let (_, name) = name.split_once('_').unwrap();
        found.insert(name.to_owned());
    }
    let listed: BTreeSet<_> = listed(|primitive| primitive.migrations)
        .into_iter()
        .map(str::to_owned)
        .collect();
    assert_eq!(found, listed);
}

#[test]
fn every_table_belongs_to_a_primitive_and_is_declared() {
    let migrations: String = super::installation::directories()
        .iter()
        .map(|directory| fs::read_to_string(directory.join("up.sql")).unwrap())
        .collect();
    let tables = names_after(&migrations, "CREATE TABLE resource_control.");
    assert_eq!(tables, listed(|primitive| primitive.tables));
    let (schema, joins) = (read("src/schema.rs"), read("src/monitor/joins.rs"));
    for table in tables {
        let declaration = format!("resource_control.{table} (");
        // Which migrations were run is no business of an application's queries.
        let is_declared = schema.contains(&declaration);
        assert_eq!(is_declared, table != "installed_migration", "{table}");
        // Once for each source of the monitor, and once for applications.
        let joined = joins.matches(&format!("{table}::table")).count();
        assert_eq!(joined, if is_declared { 5 } else { 0 }, "{table}");
    }
}

#[test]
fn every_stored_function_belongs_to_a_primitive_and_the_public_ones_are_declared() {
    let migrations: String = super::installation::directories()
        .iter()
        .map(|directory| fs::read_to_string(directory.join("up.sql")).unwrap())
        .collect();
    let mut created = names_after(&migrations, "CREATE FUNCTION resource_control.");
    created.extend(names_after(
        &migrations,
        "CREATE OR REPLACE FUNCTION resource_control.",
    ));
    let declared = listed(|primitive| primitive.declared);
    let mut known = declared.clone();
    known.extend(listed(|primitive| primitive.internal));
    assert_eq!(created, known);
    let stored = read("src/functions/stored.rs");
    assert_eq!(
        names_after(&stored, "#[sql_name = \"resource_control."),
        declared
    );
}

#[test]
fn every_primitive_is_exported_granted_tested_and_documented() {
    let exports = read("src/lib.rs");
    let exports = words(exports.split_once("\npub use ").unwrap().1);
    let (monitor, testing) = (read("src/monitor.rs"), read("src/testing.rs"));
    let (modules, changelog) = (read("tests/it/main.rs"), read("CHANGELOG.md"));
    let (guide, readme) = (read("docs"), read("README.md"));
    for primitive in &PRIMITIVES {
        let handle = primitive.handle;
        assert!(exports.contains(handle), "lib.rs does not export {handle}");
        if let Some(name) = primitive.monitored {
            assert!(words(&monitor).contains(name), "monitor.rs lacks {name}");
        }
        if let Some(name) = primitive.helped {
            assert!(words(&testing).contains(name), "testing.rs lacks {name}");
        }
        let tests = format!("mod {};", primitive.tests);
        assert!(modules.contains(&tests), "tests/it lacks {tests}");
        assert!(words(&guide).contains(handle), "docs/ lacks {handle}");
        assert!(words(&readme).contains(handle), "README.md lacks {handle}");
        let announced = changelog.contains(&format!("`{handle}`"));
        assert!(announced, "CHANGELOG.md lacks {handle}");
    }
    // It grants by kind, so a new table or function needs no line of its own.
    let grants = read("grants.sql");
    for all in ["ALL TABLES", "ALL FUNCTIONS", "ALL SEQUENCES"] {
        assert!(grants.contains(all), "grants.sql does not grant on {all}");
    }
}

#[test]
fn contributing_names_every_file_that_is_checked_here() {
    let contributing = read("CONTRIBUTING.md");
    for file in [
        "`migrations/",
        "`src/migrations/ours.rs`",
        "`sql.rs`",
        "`rules.rs`",
        "`operations.rs`",
        "`blocking.rs`",
        "`src/lib.rs`",
        "`src/functions/stored.rs`",
        "`src/schema.rs`",
        "`grants.sql`",
        "`src/monitor",
        "`src/testing",
        "`tests/it/",
        "`tests/it/primitives.rs`",
        "`docs/",
        "`CHANGELOG.md`",
    ] {
        assert!(contributing.contains(file), "{file}");
    }
}
