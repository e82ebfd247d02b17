//! The real `diesel_cli` on our migrations, and on an application's beside them.
//!
//! Run by `scripts/diesel_cli`, which installs the program and names it in `DIESEL_CLI`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use diesel::prelude::*;
use diesel_interlock::migrations;
use workbench::Database;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// An application's directory, with a `diesel.toml` of its own and a `migrations/`.
struct Application {
    directory: PathBuf,
    database: Database,
}

impl Application {
    fn new(name: &str) -> Self {
        let name = format!("interlock-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(directory.join("migrations")).unwrap();
        fs::write(directory.join("diesel.toml"), "").unwrap();
        Self {
            directory,
            database: Database::new(),
        }
    }

    fn add(&self, name: &str, up: &str, down: &str) {
        let one = self.directory.join("migrations").join(name);
        fs::create_dir_all(&one).unwrap();
        fs::write(one.join("up.sql"), up).unwrap();
        fs::write(one.join("down.sql"), down).unwrap();
    }

    /// Migrations of an application's own: a table, and a resource with its label.
    fn add_its_own(&self) {
        self.add(
            "2026-01-01-000000_users",
            "CREATE TABLE users (id int)",
            "DROP TABLE users",
        );
        // A new label cannot be used in the transaction that adds it, and labels cannot be dropped.
        // `redo --all` runs everything in one transaction, unless a migration says that it cannot.
        self.add(
            "2026-01-02-000000_label",
            "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE IF NOT EXISTS 'mail'",
            "SELECT 'labels cannot be dropped'",
        );
        let label = self.directory.join("migrations/2026-01-02-000000_label");
        fs::write(label.join("metadata.toml"), "run_in_transaction = false").unwrap();
        self.add(
            "2026-01-03-000000_resource",
            "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) VALUES ('mail', '1 minute')",
            "DELETE FROM resource_control.throttled_resource WHERE resource_id = 'mail'",
        );
    }

    fn add_ours(&self) {
        for entry in fs::read_dir(Path::new(ROOT).join("migrations")).unwrap() {
            let entry = entry.unwrap();
            let read = |file| fs::read_to_string(entry.path().join(file)).unwrap();
            let name = entry.file_name().into_string().unwrap();
            self.add(&name, &read("up.sql"), &read("down.sql"));
        }
    }

    fn diesel(&self, arguments: &[&str]) -> Output {
        diesel(&self.directory, &self.database.url(), arguments)
    }

    fn has(&self, table: &str) -> bool {
        diesel::sql_query(format!("SELECT FROM {table}"))
            .execute(&mut self.database.connect())
            .is_ok()
    }

    /// How many migrations are listed as run, and how many as not.
    fn list(&self) -> (usize, usize) {
        let output = String::from_utf8(self.diesel(&["migration", "list"]).stdout).unwrap();
        (output.matches("[X]").count(), output.matches("[ ]").count())
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn diesel(directory: &Path, url: &str, arguments: &[&str]) -> Output {
    let program =
        std::env::var_os("DIESEL_CLI").expect("DIESEL_CLI is not set: run scripts/diesel_cli");
    let output = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .env("DATABASE_URL", url)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    output
}

#[test]
fn the_printed_schema_is_the_one_in_the_sources() {
    let application = Application::new("drift");
    application.add_ours();
    application.diesel(&["migration", "run"]);
    let config = format!("{ROOT}/diesel.toml");
    let printed = application.diesel(&["print-schema", "--config-file", &config]);
    let printed = String::from_utf8(printed.stdout).unwrap();
    let ours = fs::read_to_string(format!("{ROOT}/src/schema.rs")).unwrap();
    assert_eq!(
        printed, ours,
        "src/schema.rs: run `diesel migration run` in a fresh database"
    );
}

#[test]
fn among_an_applications_own_files_every_command_works() {
    let application = Application::new("files");
    application.add_ours();
    application.add_its_own();
    let ours = fs::read_dir(format!("{ROOT}/migrations")).unwrap().count();
    let all = ours + 3;

    application.diesel(&["migration", "run"]);
    assert_eq!(application.list(), (all, 0));
    application.diesel(&["migration", "revert"]);
    assert_eq!(application.list(), (all - 1, 1));
    application.diesel(&["migration", "run"]);
    application.diesel(&["migration", "redo"]);
    application.diesel(&["migration", "redo", "--all"]);
    assert_eq!(application.list(), (all, 0));
    assert!(application.has("users") && application.has("resource_control.throttled_key"));
    application.diesel(&["migration", "revert", "--all"]);
    assert_eq!(application.list(), (0, all));
    assert!(!application.has("users") && !application.has("resource_control.throttled_key"));
}

#[test]
fn beside_an_embedded_installation_every_command_works_and_leaves_it_alone() {
    let application = Application::new("embedded");
    application.add_its_own();
    migrations::install(&mut application.database.connect()).unwrap();

    application.diesel(&["migration", "run"]);
    assert_eq!(application.list(), (3, 0));
    application.diesel(&["migration", "revert"]);
    assert_eq!(application.list(), (2, 1));
    application.diesel(&["migration", "run"]);
    application.diesel(&["migration", "redo"]);
    application.diesel(&["migration", "redo", "--all"]);
    assert_eq!(application.list(), (3, 0));
    application.diesel(&["migration", "revert", "--all"]);
    assert_eq!(application.list(), (0, 3));
    assert!(!application.has("users") && application.has("resource_control.throttled_key"));
    assert_eq!(
        migrations::install(&mut application.database.connect()).unwrap(),
        []
    );

    let printed = application.diesel(&["print-schema"]).stdout;
    assert!(
        !String::from_utf8(printed)
            .unwrap()
            .contains("resource_control")
    );
}
