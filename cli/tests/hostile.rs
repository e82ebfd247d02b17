//! `interlock` in a database where others may create functions, operators, types and relations in
//! `public`, which comes first in the search path.

mod support;

use diesel_interlock::migrations;
use workbench::Database;

use self::support::*;

/// A session that finds PostgreSQL's own functions.
fn session(database: &Database) -> Session {
    let mut session = Session::of(database);
    session.sql("SET search_path = pg_catalog, pg_temp");
    session
}

#[track_caller]
fn done(database: &Database, line: &str, expected: i32) -> String {
    let (status, text) = printed(&mut interlock(&database.url(), line));
    assert_eq!(status, Some(expected), "{line}: {text}");
    assert!(!text.contains("trap"), "{line}: {text}");
    assert!(!text.contains("has failed"), "{line}: {text}");
    assert_eq!(database.sprung_traps(), 0, "{line}: {text}");
    text
}

#[test]
fn the_traps_are_sprung_by_who_trusts_the_search_path() {
    let database = Database::new();
    database.set_traps(true);
    for trusting in [
        "SELECT format('%s', current_database())",
        "SELECT 1 + 1",
        "SELECT '1'::text",
        "SELECT relname FROM pg_class WHERE oid = 'pg_catalog.pg_class'::regclass",
    ] {
        use diesel::connection::SimpleConnection;
        assert!(
            database.connect().batch_execute(trusting).is_err(),
            "{trusting}"
        );
    }
    assert!(database.sprung_traps() > 0);
}

#[test]
fn nothing_of_others_is_called_without_the_schema() {
    let database = Database::new();
    let mut holder = session(&database);
    database.set_traps(true);
    holder.take("held");
    done(&database, "ps", 0);
    done(&database, "ps --json --name held", 0);
    let doctor = done(&database, "doctor --holder-age 0s --transaction-age 0s", 0);
    assert!(doctor.contains("holds the lock"), "{doctor}");
    assert!(done(&database, "run held -- true", 73).contains("holds it"));
    done(&database, "run free --wait 5s -- true", 0);
    done(&database, "kill nobody --yes", 1);
    done(&database, "kill held --yes", 0);
    done(&database, "install", 0);
    done(&database, "install", 0);
    done(&database, "run free -- true", 0);
}

#[test]
fn nothing_of_others_is_called_with_the_schema() {
    let database = Database::new();
    migrations::install(&database.pool(1)).unwrap();
    let mut looks = session(&database);
    looks.sql(
        "SELECT resource_control.claim_service_request('geocoder', 1, '1 day');
         SELECT resource_control.claim_service_request('leader reports', 1, '1 day', 'web-3');
         INSERT INTO resource_control.schedule (name, tick, token, started_at, expires_at)
            VALUES ('hourly', now(), 7, now(), now() + interval '1 day')",
    );
    let id =
        looks.number("SELECT id FROM resource_control.slot_in_flight WHERE service = 'geocoder'");
    database.set_traps(true);
    let shown = done(&database, "ps", 0);
    for name in ["geocoder", "reports", "hourly"] {
        assert!(shown.contains(name), "{shown}");
    }
    done(&database, "doctor --holder-age 0s --transaction-age 0s", 0);
    done(&database, "pause hourly", 0);
    done(&database, "resume hourly", 0);
    done(&database, "run x --lease 30s -- true", 0);
    done(&database, "run geocoder --lease 30s -- true", 73);
    done(&database, "kill geocoder --yes", 1);
    done(&database, &format!("kill geocoder --slot {id} --yes"), 0);
    done(&database, "kill reports --leader --yes", 0);
    done(&database, "kill hourly --run --yes", 0);
    done(&database, "run x -- true", 0);
    done(&database, "install", 0);
    done(&database, "install --repair", 0);
}

#[test]
fn the_command_sees_nothing_of_the_search_path() {
    let database = Database::new();
    let url = database.url();
    let mut command = interlock(&url, "run x -- psql -qAtc");
    let (status, path) = printed(command.arg("SHOW search_path").arg(&url));
    assert_eq!((status, path.trim()), (Some(0), "\"$user\", public"));
    let environment = |mut command: std::process::Command| {
        let (_, text) = printed(&mut command);
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.retain(|line| {
            !["_=", "PWD=", "SHLVL="]
                .iter()
                .any(|it| line.starts_with(it))
        });
        lines
    };
    let under = environment(run(&url, "x", "env"));
    assert!(
        under.iter().all(|line| ["PATH=", "DATABASE_URL="]
            .iter()
            .any(|it| line.starts_with(it))),
        "{under:?}"
    );
}
