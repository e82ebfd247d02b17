//! The real `diesel_cli` on our migrations, and on an application's beside them.
//!
//! Run by `scripts/test_with diesel_cli`, which installs the program and names it in `DIESEL_CLI`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use diesel::connection::SimpleConnection;
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

    /// Writes our migrations among the application's own, and returns how many.
    fn add_ours(&self) -> usize {
        let written = migrations::write_to(self.directory.join("migrations")).unwrap();
        assert_eq!(written.len(), ours());
        written.len()
    }

    fn remove_ours(&self) {
        for entry in fs::read_dir(self.directory.join("migrations")).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name().to_str().unwrap().starts_with("2000-") {
                fs::remove_dir_all(entry.path()).unwrap();
            }
        }
    }

    fn diesel(&self, arguments: &[&str]) -> Output {
        let output = diesel(&self.directory, &self.database.url(), arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        output
    }

    fn fails(&self, arguments: &[&str]) -> bool {
        !diesel(&self.directory, &self.database.url(), arguments)
            .status
            .success()
    }

    fn install(&self) -> usize {
        let ran = migrations::install(&mut self.database.connect()).unwrap();
        ran.len()
    }

    /// Reverts and runs in every way, and ends with everything run. All are listed, nothing else.
    fn try_every_command(&self, all: usize) {
        assert_eq!(self.list(), (all, 0));
        self.diesel(&["migration", "revert"]);
        assert_eq!(self.list(), (all - 1, 1));
        self.diesel(&["migration", "run"]);
        self.diesel(&["migration", "redo"]);
        self.diesel(&["migration", "redo", "--all"]);
        assert_eq!(self.list(), (all, 0));
        assert!(self.has("users") && self.has("resource_control.throttled_key"));
        self.diesel(&["migration", "revert", "--all"]);
        assert_eq!(self.list(), (0, all));
        assert!(!self.has("users"));
        self.diesel(&["migration", "run"]);
        assert_eq!(self.list(), (all, 0));
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
    let program = std::env::var_os("DIESEL_CLI")
        .expect("DIESEL_CLI is not set: run scripts/test_with diesel_cli");
    Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .env("DATABASE_URL", url)
        .output()
        .unwrap()
}

/// How many migrations are ours.
fn ours() -> usize {
    fs::read_dir(Path::new(ROOT).join("migrations"))
        .unwrap()
        .count()
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
    let all = application.add_ours() + 3;
    application.add_its_own();
    application.diesel(&["migration", "run"]);
    application.try_every_command(all);
    application.diesel(&["migration", "revert", "--all"]);
    assert!(!application.has("resource_control.installed_migration"));
}

#[test]
fn beside_an_embedded_installation_every_command_works_and_leaves_it_alone() {
    let application = Application::new("embedded");
    application.add_its_own();
    application.install();
    application.diesel(&["migration", "run"]);
    application.try_every_command(3);
    application.diesel(&["migration", "revert", "--all"]);
    assert!(application.has("resource_control.throttled_key"));
    assert_eq!(application.install(), 0);

    let printed = application.diesel(&["print-schema"]).stdout;
    assert!(
        !String::from_utf8(printed)
            .unwrap()
            .contains("resource_control")
    );
}

#[test]
fn an_embedded_installation_goes_over_to_files() {
    let application = Application::new("to_files");
    application.add_its_own();
    application.install();
    application.diesel(&["migration", "run"]);

    let all = application.add_ours() + 3;
    assert_eq!(application.list(), (3, ours()));
    application.diesel(&["migration", "run"]);
    application.try_every_command(all);
    assert_eq!(application.install(), 0, "install may stay where it was");
    application.try_every_command(all);
    application.diesel(&["migration", "revert", "--all"]);
    assert!(!application.has("resource_control.installed_migration"));
}

#[test]
fn install_comes_before_the_files_on_a_fresh_database_and_beside_them() {
    let application = Application::new("both");
    let all = application.add_ours() + 3;
    application.add_its_own();
    application.install();
    application.diesel(&["migration", "run"]);
    application.try_every_command(all);

    application.diesel(&["migration", "revert", "--all"]);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| application.install());
        }
        application.diesel(&["migration", "run"]);
    });
    application.try_every_command(all);
}

#[test]
fn what_files_have_run_is_taken_over_by_install() {
    let application = Application::new("take_over");
    application.add_ours();
    application.add_its_own();
    application.diesel(&["migration", "run"]);
    assert_eq!(application.install(), 0);
    application.try_every_command(ours() + 3);

    application.remove_ours();
    assert!(
        application.fails(&["migration", "revert", "--all"]),
        "their files are gone"
    );
    application.diesel(&["migration", "run"]);
    let taken_over = migrations::take_over(&mut application.database.connect()).unwrap();
    assert_eq!(taken_over.len(), ours());
    application.try_every_command(3);
    assert_eq!(application.install(), 0);
}

#[test]
fn a_migration_that_install_ran_first_is_only_recorded() {
    let application = Application::new("next_release");
    let directory = application.directory.join("migrations");
    let newest = migrations::write_to(&directory).unwrap().pop().unwrap();
    application.add_its_own();
    fs::remove_dir_all(&newest).unwrap(); // the release before
    application.diesel(&["migration", "run"]);
    assert_eq!(application.install(), 1);

    // The application's own are still to be reverted and run again.
    application.diesel(&["migration", "redo"]);
    assert_eq!(migrations::write_to(&directory).unwrap(), [newest]);
    application.diesel(&["migration", "run"]);
    application.try_every_command(ours() + 3);
}

#[test]
fn a_schema_made_by_hand_goes_to_files_by_way_of_install() {
    let application = Application::new("by_hand");
    application
        .database
        .connect()
        .batch_execute(include_str!("it/by_hand.sql"))
        .unwrap();
    application.add_ours();
    application.add_its_own();
    assert!(application.fails(&["migration", "run"]), "it is there");
    application.install();
    application.diesel(&["migration", "run"]);
    application.try_every_command(ours() + 3);
}

#[test]
fn after_uninstalling_the_files_run_anew() {
    let application = Application::new("uninstall");
    let all = application.add_ours() + 3;
    application.add_its_own();
    application.diesel(&["migration", "run"]);
    let reverted = migrations::uninstall(&mut application.database.connect()).unwrap();
    assert_eq!(reverted.len(), ours());
    assert_eq!(application.list(), (3, ours()));
    application.diesel(&["migration", "run"]);
    assert_eq!(application.list(), (all, 0));
}
