//! Twenty processes that start at the same time, as after a deployment.

use std::env;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::{
    DeclaredResources, ResourceLabel, Throttle, migrations, sync, throttled_resources,
};
use diesel_migrations::FileBasedMigrations;

use crate::adoption::catalogue;
use crate::installation::{number, versions};
use crate::migrations::directory;
use crate::roles::{NOTHING_FOR_ALL, Role, server};
use crate::support::{Observer, attempt};

const PROCESSES: usize = 20;
const URL: &str = "INTERLOCK_TEST_URL";
const MIGRATIONS: &str = "INTERLOCK_TEST_MIGRATIONS";

throttled_resources! {
    enum Resource {
        Mail = "mail" every Duration::from_secs(60),
        Import = "import" every Duration::from_secs(1),
    }
}

/// What one process does, once its standard input ends. Says how much of it there was to do.
#[test]
#[ignore = "run by other tests, in processes of its own"]
fn start_up() {
    let (Ok(url), Ok(migrations)) = (env::var(URL), env::var(MIGRATIONS)) else {
        return;
    };
    let conn = &mut PgConnection::establish(&url).unwrap();
    println!("ready");
    io::stdout().flush().unwrap();
    io::copy(&mut io::stdin(), &mut io::sink()).unwrap();

    let installed = migrations::install(conn).unwrap().len();
    let added = sync::<Resource>(conn).unwrap().added.len();
    let source = FileBasedMigrations::from_path(migrations).unwrap();
    let ran = migrations::run_pending(conn, source).unwrap().len();
    for label in ["mail", "nightly report"] {
        let throttle = Throttle::of(ResourceLabel(label.into()));
        let _ = attempt(conn, &throttle, "a process");
    }
    println!("done: {installed} {added} {ran}");
}

fn start(url: &str, migrations: &Path) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "processes::start_up", "--ignored", "--nocapture"])
        .env(URL, url)
        .env(MIGRATIONS, migrations)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Starts twenty, lets them go at once, and returns the sums of what they print.
fn start_twenty(url: &str, migrations: &Path) -> [usize; 3] {
    let mut processes: Vec<_> = (0..PROCESSES).map(|_| start(url, migrations)).collect();
    let mut outputs = Vec::new();
    for process in &mut processes {
        let mut output = io::BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            let read = io::BufRead::read_line(&mut output, &mut line).unwrap();
            assert!(read > 0, "a process has ended before it was ready");
        }
        outputs.push(output);
    }
    for process in &mut processes {
        drop(process.stdin.take());
    }
    let mut sums = [0; 3];
    for (process, mut output) in processes.into_iter().zip(outputs) {
        let mut said = String::new();
        io::Read::read_to_string(&mut output, &mut said).unwrap();
        let ended = process.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{said}\n{errors}");
        let done = said.lines().find_map(|line| line.split_once("done: "));
        let numbers = done.unwrap().1.split_whitespace();
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum += number.parse::<usize>().unwrap();
        }
    }
    sums
}

#[test]
fn twenty_processes_make_everything_once_and_then_need_no_rights() {
    let database = server().database();
    let role = Role::new(&database);
    let source = directory(
        "processes",
        &[
            (
                "2026-01-01-000000_users",
                "CREATE TABLE users AS SELECT generate_series(1, 1000) AS id",
            ),
            (
                "2026-01-02-000000_index",
                "CREATE INDEX CONCURRENTLY users_id ON users (id)",
            ),
            (
                "2026-01-03-000000_label",
                "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE IF NOT EXISTS 'nightly report'",
            ),
            (
                "2026-01-04-000000_resource",
                "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) \
                 VALUES ('nightly report', '1 day')",
            ),
        ],
    );
    let conn = &mut database.connect();
    conn.batch_execute(NOTHING_FOR_ALL).unwrap();

    let sums = start_twenty(&database.url(), source.path());
    assert_eq!(sums, [versions().len(), Resource::ALL.len(), 4]);
    for (sql, expected) in [
        (
            "SELECT count(*) FROM resource_control.installed_migration",
            versions().len(),
        ),
        ("SELECT count(*) FROM __diesel_schema_migrations", 4),
        ("SELECT count(*) FROM pg_enum", 3),
        (
            "SELECT count(*) FROM resource_control.throttled_resource",
            3,
        ),
        (
            "SELECT count(*) FROM resource_control.throttled_resource WHERE last_locked > '-infinity'",
            2,
        ),
        ("SELECT count(*) FROM users", 1000),
        (
            "SELECT count(*) FROM pg_index WHERE indexrelid = 'users_id'::regclass AND indisvalid",
            1,
        ),
        (
            "SELECT count(*) FROM pg_class WHERE relname LIKE 'users_id%'",
            1,
        ),
    ] {
        assert_eq!(number(conn, sql), expected as i64, "{sql}");
    }
    assert_eq!(Observer::of(&database).all_held(), 0);

    role.grant(conn);
    let before = catalogue(conn);
    assert_eq!(start_twenty(&role.url(), source.path()), [0; 3]);
    assert_eq!(role.ddl(), Vec::<String>::new());
    assert_eq!(catalogue(conn), before);
}
