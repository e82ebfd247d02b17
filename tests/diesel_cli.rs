//! `diesel_cli` with the crate's migrations, alone and beside an application's own.
//!
//! Run by `scripts/test with diesel_cli`, which installs the program and names it in `DIESEL_CLI`.

use std::fs;
use std::path::PathBuf;
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
    /// Creates the application with its own migrations: a table, and a resource with its label.
    fn new(name: &str) -> Self {
        let name = format!("interlock-{name}-{}", std::process::id());
        let application = Self {
            directory: std::env::temp_dir().join(name),
            database: Database::new(),
        };
        let add = |name: &str, up: &str, down: &str| {
            let directory = application.directory.join("migrations").join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("up.sql"), up).unwrap();
            fs::write(directory.join("down.sql"), down).unwrap();
            directory
        };
        add(
            "2026-01-01-000000_users",
            "CREATE TABLE users (id int)",
            "DROP TABLE users",
        );
        // A new label cannot be used in the transaction that adds it, and `redo --all` runs
        // everything in one, unless a migration says that it cannot.
        let label = add(
            "2026-01-02-000000_label",
            "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE IF NOT EXISTS 'mail'",
            "SELECT 'labels cannot be dropped'",
        );
        fs::write(label.join("metadata.toml"), "run_in_transaction = false").unwrap();
        add(
            "2026-01-03-000000_resource",
            "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) VALUES ('mail', '1 minute')",
            "DELETE FROM resource_control.throttled_resource WHERE resource_id = 'mail'",
        );
        fs::write(application.directory.join("diesel.toml"), "").unwrap();
        application
    }

    /// Writes the crate's migrations beside the application's own. Returns the number of all
    /// migrations.
    fn add_ours(&self) -> usize {
        let written = migrations::write_to(self.directory.join("migrations")).unwrap();
        assert_eq!(written.len(), ours());
        written.len() + 3
    }

    fn diesel(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn output(&self, arguments: &[&str]) -> Output {
        let program = std::env::var_os("DIESEL_CLI")
            .expect("DIESEL_CLI is not set: run scripts/test with diesel_cli");
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.directory);
        command
            .env("DATABASE_URL", self.database.url())
            .output()
            .unwrap()
    }

    fn install(&self) {
        migrations::install(&self.database.pool(1)).unwrap();
    }

    /// Runs every command that reverts or runs migrations. Afterwards all migrations are run, and
    /// exactly these are listed.
    fn try_every_command(&self, all: usize) {
        assert_eq!(self.list(), (all, 0));
        self.diesel(&["migration", "revert"]);
        assert_eq!(self.list(), (all - 1, 1));
        self.diesel(&["migration", "run"]);
        self.diesel(&["migration", "redo"]);
        self.diesel(&["migration", "redo", "--all"]);
        assert_eq!(self.list(), (all, 0));
        assert!(self.has("users") && self.has("resource_control.throttle"));
        self.diesel(&["migration", "revert", "--all"]);
        assert_eq!(self.list(), (0, all));
        assert!(!self.has("users"));
        self.diesel(&["migration", "run"]);
        assert_eq!(self.list(), (all, 0));
    }

    fn has(&self, table: &str) -> bool {
        let conn = &mut self.database.connect();
        diesel::sql_query(format!("SELECT FROM {table}"))
            .execute(conn)
            .is_ok()
    }

    /// The numbers of migrations that are listed as run and as pending.
    fn list(&self) -> (usize, usize) {
        let output = self.diesel(&["migration", "list"]);
        (output.matches("[X]").count(), output.matches("[ ]").count())
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// The number of the crate's own migrations.
fn ours() -> usize {
    let entries = fs::read_dir(format!("{ROOT}/migrations")).unwrap();
    entries
        .filter(|entry| entry.as_ref().unwrap().path().is_dir())
        .count()
}

#[test]
fn the_printed_schema_is_the_one_in_the_sources() {
    let application = Application::new("drift");
    application.install();
    let config = format!("{ROOT}/diesel.toml");
    let printed = application.diesel(&["print-schema", "--config-file", &config]);
    let ours = fs::read_to_string(format!("{ROOT}/src/schema.rs")).unwrap();
    assert_eq!(printed, ours, "src/schema.rs: run `diesel migration run`");
}

#[test]
fn among_an_applications_own_files_every_command_works() {
    let application = Application::new("files");
    let all = application.add_ours();
    application.diesel(&["migration", "run"]);
    application.try_every_command(all);
    application.diesel(&["migration", "revert", "--all"]);
    assert!(!application.has("resource_control.installed_migration"));
}

#[test]
fn beside_an_installation_every_command_works_and_leaves_it_alone() {
    let application = Application::new("embedded");
    application.install();
    application.diesel(&["migration", "run"]);
    application.try_every_command(3);
    application.diesel(&["migration", "revert", "--all"]);
    assert!(application.has("resource_control.throttle"));
    application.install();

    let printed = application.diesel(&["print-schema"]);
    assert!(!printed.contains("resource_control"), "{printed}");
}

#[test]
fn an_installation_goes_over_to_files_and_install_may_stay_where_it_was() {
    let application = Application::new("to_files");
    application.install();
    application.diesel(&["migration", "run"]);
    let all = application.add_ours();
    assert_eq!(application.list(), (3, ours()));
    application.diesel(&["migration", "run"]);
    application.try_every_command(all);
    application.install();
    application.try_every_command(all);
}

#[test]
fn install_and_the_files_may_run_at_the_same_time() {
    let application = Application::new("both");
    let all = application.add_ours();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| application.install());
        }
        application.diesel(&["migration", "run"]);
    });
    application.try_every_command(all);
}

/// The same as for `install` in `suite/installing.rs`.
#[test]
fn no_timeout_of_a_role_ends_a_run_that_waits_for_another_instance() {
    let application = Application::new("timeouts");
    let all = application.add_ours();
    let name = application.database.name();
    let admin = &mut application.database.connect();
    for timeout in ["statement_timeout", "lock_timeout"] {
        let alter = format!("ALTER DATABASE {name} SET {timeout} = '500ms'");
        diesel::sql_query(alter).execute(admin).unwrap();
    }
    let mut holder = PgConnection::establish(
        &application
            .database
            .url_with("options", "-c statement_timeout=0"),
    )
    .unwrap();
    let lock = "SELECT pg_advisory_lock(20000101000000)";
    diesel::sql_query(lock).execute(&mut holder).unwrap();
    std::thread::scope(|scope| {
        let runs = scope.spawn(|| application.diesel(&["migration", "run"]));
        let has_waited = diesel::dsl::sql::<diesel::sql_types::Bool>(
            "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' \
             AND query_start < clock_timestamp() - interval '1500 ms')",
        );
        while !diesel::select(has_waited.clone())
            .get_result::<bool>(admin)
            .unwrap()
        {
            assert!(!runs.is_finished());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        drop(holder);
        runs.join().unwrap();
    });
    assert_eq!(application.list(), (all, 0));
}

#[test]
fn after_the_schema_and_its_records_are_dropped_the_files_run_anew() {
    let application = Application::new("uninstall");
    let all = application.add_ours();
    application.diesel(&["migration", "run"]);
    let conn = &mut application.database.connect();
    for statement in [
        "DROP SCHEMA resource_control CASCADE",
        "DELETE FROM __diesel_schema_migrations WHERE version < '2001'",
    ] {
        diesel::sql_query(statement).execute(conn).unwrap();
    }
    assert_eq!(application.list(), (3, ours()));
    application.diesel(&["migration", "run"]);
    assert_eq!(application.list(), (all, 0));
    application.install();
}
