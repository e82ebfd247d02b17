//! Our migrations as files among an application's own, run by Diesel itself.

use std::fs;
use std::path::Path;
use std::sync::Barrier;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::error::Misplaced;
use diesel_interlock::{Error, migrations};
use diesel_migrations::{FileBasedMigrations, MigrationHarness};
use workbench::Database;

use crate::adoption::{BY_HAND, catalogue};
use crate::installation::{directories, number, versions};
use crate::migrations::{Directory, directory};
use crate::support::{Observer, assert_matches, eventually};

/// A migration directory with a migration of the application's own.
fn application(test: &str) -> Directory {
    let users = ("2026-01-01-000000_users", "CREATE TABLE users (id int)");
    let directory = directory(test, &[users]);
    let down = directory.path().join(users.0).join("down.sql");
    fs::write(down, "DROP TABLE users").unwrap();
    directory
}

fn contents(directory: &Path) -> Vec<(String, String)> {
    let mut contents = Vec::new();
    for migration in fs::read_dir(directory).unwrap() {
        let migration = migration.unwrap().path();
        for file in fs::read_dir(&migration).unwrap() {
            let file = file.unwrap().path();
            let name = file.strip_prefix(directory).unwrap();
            contents.push((
                name.display().to_string(),
                fs::read_to_string(&file).unwrap(),
            ));
        }
    }
    contents.sort();
    contents
}

fn recorded(conn: &mut PgConnection) -> i64 {
    number(conn, "SELECT count(*) FROM __diesel_schema_migrations")
}

#[test]
fn tests_of_one_process_write_them_at_the_same_time() {
    for _ in 0..20 {
        let application = application("write_to_at_once");
        let start = &Barrier::new(4);
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    start.wait();
                    migrations::write_to(application.path()).unwrap();
                });
            }
        });
        let left = migrations::write_to(application.path()).unwrap();
        assert!(left.is_empty(), "{left:?}");
        let files = contents(application.path()).len();
        assert_eq!(files, 2 * versions().len() + 2, "nothing else was left");
    }
}

#[test]
fn they_are_written_once_and_are_what_the_repository_has() {
    let application = application("write_to");
    let own = contents(application.path());
    let written = migrations::write_to(application.path()).unwrap();
    assert_eq!(written.len(), versions().len());

    let mut all = contents(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/migrations"
    )));
    all.extend(own);
    all.sort();
    assert_eq!(contents(application.path()), all);

    let empty: [&Path; 0] = [];
    assert_eq!(migrations::write_to(application.path()).unwrap(), empty);
    let up = written[1].join("up.sql");
    let text = fs::read_to_string(&up).unwrap();
    fs::write(&up, text.replace('\n', "\r\n")).unwrap();
    assert_eq!(
        migrations::write_to(application.path()).unwrap(),
        empty,
        "line endings"
    );
    let renamed = application.path().join("2000-01-01-000002_throttles");
    fs::rename(&written[1], &renamed).unwrap();
    assert_eq!(
        migrations::write_to(application.path()).unwrap(),
        empty,
        "renamed"
    );
    fs::remove_file(renamed.join("down.sql")).unwrap();
    fs::remove_dir_all(&written[2]).unwrap();
    assert_eq!(
        migrations::write_to(application.path()).unwrap(),
        [renamed, written[2].clone()]
    );
}

#[test]
fn a_differing_one_is_named_before_anything_is_written() {
    let application = application("differing");
    migrations::write_to(application.path()).unwrap();
    let last = application
        .path()
        .join("2000-01-01-000003_throttled_keys/down.sql");
    fs::write(&last, "SELECT 1").unwrap();
    let first = application
        .path()
        .join("2000-01-01-000001_resource_control");
    fs::remove_dir_all(&first).unwrap();
    match migrations::write_to(application.path()) {
        Err(error @ Error::DifferentFile { .. }) => {
            let message = error.to_string();
            assert!(
                message.contains(last.to_str().unwrap()) && message.contains("delete it"),
                "{message}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert!(!first.exists());
}

/// Diesel would run one of the two, and never the other.
#[test]
fn another_migration_of_the_same_version_is_named() {
    let application = application("same_version");
    let theirs = application.path().join("20000101000001_theirs");
    fs::create_dir(&theirs).unwrap();
    fs::write(theirs.join("up.sql"), "SELECT 1").unwrap();
    let refused = migrations::write_to(application.path());
    assert_matches!(refused, Err(Error::DifferentFile { path }) if path.starts_with(&theirs));

    fs::remove_dir_all(&theirs).unwrap();
    migrations::write_to(application.path()).unwrap();
    fs::create_dir(&theirs).unwrap();
    let refused = migrations::write_to(application.path());
    assert_matches!(refused, Err(Error::DifferentFile { .. }));
}

#[test]
fn a_file_that_cannot_be_read_is_an_error_and_one_that_is_no_migration_is_nothing() {
    let application = application("unreadable");
    fs::write(
        application.path().join("2000-01-01-000001_notes.md"),
        "no directory",
    )
    .unwrap();
    let written = migrations::write_to(application.path()).unwrap();
    assert_eq!(written.len(), versions().len());

    let (missing, up) = (written[0].join("up.sql"), written[1].join("up.sql"));
    fs::remove_file(&missing).unwrap();
    fs::remove_file(&up).unwrap();
    fs::create_dir(&up).unwrap();
    let refused = migrations::write_to(application.path());
    assert_matches!(refused, Err(Error::File { path, .. }) if *path == up);
    assert!(!missing.exists(), "nothing was written");
}

#[test]
fn a_directory_that_is_not_there_is_an_error() {
    let application = application("nowhere");
    let nowhere = application.path().join("not there");
    let refused = migrations::write_to(&nowhere);
    let Err(Error::File { path, .. }) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(path, &nowhere);
}

fn installed(conn: &mut PgConnection) -> i64 {
    let installed = "SELECT count(*) FROM resource_control.installed_migration";
    number(conn, installed)
}

/// Deletes our files, as somebody does who goes over to `install`.
fn delete_ours(application: &Directory) {
    for migration in fs::read_dir(application.path()).unwrap() {
        let path = migration.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("2000") {
            fs::remove_dir_all(path).unwrap();
        }
    }
}

/// The README's `start_up`, with our files in the application's directory.
#[test]
fn install_goes_before_the_applications_own_with_our_files_among_them() {
    let all = versions().len() as i64;
    for used_before in ["nothing", "install", "the files", "diesel"] {
        let database = Database::new();
        let conn = &mut database.connect();
        let application = application(&format!("start_up_{}", used_before.replace(' ', "_")));
        migrations::write_to(application.path()).unwrap();
        match used_before {
            "install" => drop(migrations::install(conn).unwrap()),
            "the files" => drop(migrations::run_pending(conn, application.migrations()).unwrap()),
            "diesel" => drop(
                conn.run_pending_migrations(application.migrations())
                    .unwrap(),
            ),
            _ => {}
        }
        for _ in 0..2 {
            migrations::install(conn).unwrap();
            migrations::run_pending(conn, application.migrations()).unwrap();
            assert_eq!(installed(conn), all, "after {used_before}");
            assert_eq!(recorded(conn), all + 1, "after {used_before}");
        }
        conn.revert_all_migrations(application.migrations())
            .unwrap();
        assert_eq!(recorded(conn), 0);
        let schema = "SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control'";
        assert_eq!(number(conn, schema), 0, "after {used_before}");
    }
}

#[test]
fn install_runs_beside_diesels_own_runner() {
    let application = application("side_by_side");
    migrations::write_to(application.path()).unwrap();
    for _ in 0..10 {
        let database = Database::new();
        let start = Barrier::new(3);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let conn = &mut database.connect();
                start.wait();
                conn.run_pending_migrations(application.migrations())
                    .unwrap();
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    start.wait();
                    migrations::install(conn).unwrap();
                });
            }
        });
        let conn = &mut database.connect();
        assert_eq!(installed(conn), versions().len() as i64);
        assert_eq!(recorded(conn), versions().len() as i64 + 1);
        assert_eq!(migrations::install(conn).unwrap(), []);
    }
}

#[test]
fn install_leaves_alone_what_the_files_have_run() {
    let database = Database::new();
    let conn = &mut database.connect();
    let application = application("files_first");
    let all = versions().len() as i64;
    migrations::write_to(application.path()).unwrap();
    migrations::run_pending(conn, application.migrations()).unwrap();
    assert_eq!(installed(conn), all);

    let before = catalogue(conn);
    assert_eq!(migrations::install(conn).unwrap(), []);
    assert_eq!(catalogue(conn), before);

    // Reverted by their files, they are pending for `install`, too.
    conn.revert_last_migration(application.migrations())
        .unwrap();
    conn.revert_last_migration(application.migrations())
        .unwrap();
    assert_eq!(recorded(conn), all - 1);
    assert_eq!(migrations::install(conn).unwrap().len(), 1);
    // Diesel learns of it from the file, which does nothing else.
    let before = catalogue(conn);
    let newest = FileBasedMigrations::from_path(application.path()).unwrap();
    conn.run_next_migration(newest).unwrap();
    assert_eq!(recorded(conn), all);
    assert_eq!(catalogue(conn), before);
    let ran = migrations::run_pending(conn, application.migrations()).unwrap();
    assert_eq!(ran.len(), 1, "users");
}

#[test]
fn a_new_migration_may_be_run_by_either_side_first() {
    for files_first in [true, false] {
        let database = Database::new();
        let conn = &mut database.connect();
        let application = application(&format!("next_release_{files_first}"));
        let written = migrations::write_to(application.path()).unwrap();
        let newest = written.last().unwrap();
        let aside = application.path().join(".aside");
        fs::rename(newest, &aside).unwrap(); // the release before had one less
        migrations::run_pending(conn, application.migrations()).unwrap();
        fs::rename(&aside, newest).unwrap();

        let by_install = if files_first {
            migrations::run_pending(conn, application.migrations()).unwrap();
            migrations::install(conn).unwrap()
        } else {
            let ran = migrations::install(conn).unwrap();
            migrations::run_pending(conn, application.migrations()).unwrap();
            ran
        };
        assert_eq!(by_install.len(), usize::from(!files_first));
        assert_eq!(installed(conn), versions().len() as i64);
        assert_eq!(recorded(conn), versions().len() as i64 + 1);
        conn.revert_all_migrations(application.migrations())
            .unwrap();
        assert_eq!(recorded(conn), 0);
    }
}

#[test]
fn an_installation_goes_over_to_files_and_back() {
    let database = Database::new();
    let conn = &mut database.connect();
    let application = application("take_over");
    assert_eq!(migrations::take_over(conn).unwrap(), []);
    migrations::install(conn).unwrap();
    migrations::run_pending(conn, application.migrations()).unwrap();
    assert_eq!(recorded(conn), 1);

    migrations::write_to(application.path()).unwrap();
    let ran = migrations::run_pending(conn, application.migrations()).unwrap();
    assert_eq!(ran.len(), versions().len(), "none of which did anything");
    assert_eq!(migrations::install(conn).unwrap(), []);
    conn.revert_all_migrations(application.migrations())
        .unwrap();
    migrations::run_pending(conn, application.migrations()).unwrap();

    delete_ours(&application);
    assert!(
        conn.revert_all_migrations(application.migrations())
            .is_err()
    );
    migrations::run_pending(conn, application.migrations()).unwrap();
    let taken_over = migrations::take_over(conn).unwrap();
    let taken_over: Vec<_> = taken_over.iter().map(ToString::to_string).collect();
    assert_eq!(taken_over, versions());
    assert_eq!(migrations::take_over(conn).unwrap(), [], "twice");
    conn.revert_all_migrations(application.migrations())
        .unwrap();
    assert_eq!(migrations::install(conn).unwrap(), []);
}

#[test]
fn the_files_never_run_over_a_schema_made_by_hand_before_it_was_adopted() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    let application = application("by_hand");
    migrations::write_to(application.path()).unwrap();
    let refused = migrations::run_pending(conn, application.migrations());
    assert_matches!(refused, Err(Error::Migration(_)));
    assert_eq!(recorded(conn), 0);
    migrations::install(conn).unwrap();
    migrations::run_pending(conn, application.migrations()).unwrap();
    conn.revert_all_migrations(application.migrations())
        .unwrap();
}

#[test]
fn uninstalling_makes_diesel_forget_them() {
    let database = Database::new();
    let conn = &mut database.connect();
    let application = application("uninstall");
    migrations::write_to(application.path()).unwrap();
    migrations::run_pending(conn, application.migrations()).unwrap();
    assert_eq!(migrations::uninstall(conn).unwrap().len(), versions().len());
    assert_eq!(recorded(conn), 1);
    let ran = migrations::run_pending(conn, application.migrations()).unwrap();
    assert_eq!(ran.len(), versions().len());
}

#[test]
fn taking_over_is_refused_inside_a_transaction() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.begin_test_transaction().unwrap();
    let refused = migrations::take_over(conn);
    assert_matches!(
        refused,
        Err(Error::Misplaced(Misplaced::CommitsInTransaction))
    );
}

#[test]
fn diesels_own_functions_run_and_revert_the_files() {
    let database = Database::new();
    let conn = &mut database.connect();
    let application = application("harness");
    migrations::write_to(application.path()).unwrap();
    let source = || FileBasedMigrations::from_path(application.path()).unwrap();
    for _ in 0..2 {
        let ran = conn.run_pending_migrations(source()).unwrap().len();
        assert_eq!(ran, versions().len() + 1);
        conn.revert_all_migrations(source()).unwrap();
    }
}

/// Diesel's runner comes while `install` is in the middle of the second migration.
#[test]
fn a_file_waits_for_another_session_that_runs_it_and_then_does_nothing() {
    let application = application("meeting");
    migrations::write_to(application.path()).unwrap();
    let ours = directories();
    for level in ["read committed", "repeatable read"] {
        let database = Database::new();
        let (first, conn) = (&mut database.connect(), &mut database.connect());
        conn.run_next_migration(application.migrations()).unwrap();
        let second = fs::read_to_string(ours[1].join("up.sql")).unwrap();
        first.batch_execute(&format!("BEGIN; {second}")).unwrap();
        conn.batch_execute(&format!("SET default_transaction_isolation = '{level}'"))
            .unwrap();
        std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                let ran = conn.run_pending_migrations(application.migrations());
                ran.map(|ran| ran.len()).map_err(|error| error.to_string())
            });
            let mut observer = Observer::of(&database);
            eventually("the file waits", || observer.all_waiting() == 1);
            first.batch_execute("COMMIT").unwrap();
            let ran = running.join().unwrap();
            if level == "read committed" {
                assert_eq!(ran, Ok(versions().len()));
            } else {
                ran.unwrap_err(); // its snapshot is older than what it waited for
            }
        });
        conn.run_pending_migrations(application.migrations())
            .unwrap();
        assert_eq!(installed(conn), versions().len() as i64);
        assert_eq!(recorded(conn), versions().len() as i64 + 1);
    }
}
