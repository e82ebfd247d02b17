//! `interlock ps`, `kill`, `pause`, `trigger`, `install`, `doctor` and `completions`.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use diesel::connection::SimpleConnection;
use diesel_interlock::{LockKey, migrations};
use workbench::{Cluster, Database, Endpoint};

use crate::support::*;

#[test]
fn ps_shows_locks_without_the_schema_and_all_else_with_it() {
    let database = Database::new();
    let url = &database.url();
    let mut holder = Session::of(&database);
    holder.take("nightly");
    holder.sql("SELECT pg_advisory_lock_shared(-7, 12)");
    let json = |line: &str| {
        let (status, text) = printed(&mut interlock(url, &format!("ps --json {line}")));
        assert_eq!(status, Some(0), "{text}");
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    let all = json("");
    assert_eq!(all["locks"].as_array().unwrap().len(), 2);
    assert!(all.get("slots").is_none());
    migrations::install(&database.pool(1)).unwrap();
    // The details contain an escape sequence, which must not reach a terminal.
    holder
        .sql("SELECT resource_control.claim_service_request('geocoder', 2, '1 day', E'\\x1b[2J')");
    holder.sql(
        "SELECT resource_control.claim_service_request('leader reports', 1, '1 day', 'web-3')",
    );
    holder.sql("INSERT INTO resource_control.schedule (name, tick, attempt, token, runner) VALUES ('hourly', now(), 0, 0, '')");
    let waiter = &mut Running::start(&mut run(url, "nightly --wait 10m", "true"));
    eventually("the command waits", || holder.locks(false) == 1);

    let all = json("");
    assert_eq!(all["slots"].as_array().unwrap().len(), 1);
    assert_eq!(all["leaders"][0]["holder"], "web-3");
    assert_eq!(all["schedules"][0]["state"], "new");
    let mut locks = all["locks"].as_array().unwrap().iter();
    assert!(locks.any(|lock| lock["lock"] == "-7, 12" && lock["mode"] == "shared"));
    let named = json("--name nightly");
    assert_eq!(named["locks"][0]["lock"].as_str(), Some(&*id("nightly")));
    assert_eq!(named["locks"][0]["pid"], holder.pid());
    assert!(named["slots"].as_array().unwrap().is_empty());

    let mut table = String::new();
    // `interlock run` waits in pieces, and may be between two of them.
    eventually("the waiter is shown", || {
        let (status, text) = printed(&mut interlock(url, "ps"));
        assert_eq!(status, Some(0));
        table = text;
        table.contains("interlock nightly")
    });
    for text in ["-7, 12", "geocoder", "reports", "hourly", "?[2J"] {
        assert!(table.contains(text), "{text} is not in {table}");
    }
    waiter.signal("TERM");
    assert_eq!(waiter.status(), Some(143));
}

#[test]
fn ps_shows_the_other_tables_if_one_cannot_be_read() {
    let database = installed();
    let mut holder = Session::of(&database);
    holder.take("x");
    holder.sql("DROP VIEW resource_control.leader");
    let (status, text) = printed(&mut interlock(&database.url(), "ps"));
    assert_eq!(status, Some(0), "{text}");
    for shown in [
        &*id("x"),
        "slots: none",
        "leaders could not be read: ",
        "schedules: none",
    ] {
        assert!(text.contains(shown), "{shown} is not in {text}");
    }
}

#[test]
fn output_that_cannot_be_written_is_a_status() {
    let database = installed();
    for line in ["ps", "ps --json", "doctor", "install"] {
        let mut command = interlock(&database.url(), line);
        command.stdout(File::options().write(true).open("/dev/full").unwrap());
        assert_eq!(status_of(&mut command), Some(74), "{line}");
        let (reader, writer) = UnixStream::pair().unwrap();
        drop(reader);
        let mut command = interlock(&database.url(), line);
        command.stdout(OwnedFd::from(writer));
        assert_eq!(status_of(&mut command), Some(74), "{line}");
    }
}

fn status_of(command: &mut std::process::Command) -> Option<i32> {
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
    output.status.code()
}

#[test]
fn kill_ends_the_holder() {
    let database = Database::new();
    let url = &database.url();
    let (mut admin, mut other) = (Session::of(&database), Session::of(&database));
    other.take("other");
    assert_eq!(status(&mut interlock(url, "kill x --yes")), Some(1));
    for line in [
        "kill x --yes".to_owned(),
        format!("kill --number --yes -- {}", id("x")),
    ] {
        Session::of(&database);
        let mut holder = Session::of(&database);
        holder.take("x");
        holder.sql("SELECT pg_advisory_lock_shared(0, 1)");
        assert_eq!(printed(&mut interlock(url, &line)).0, Some(0), "{line}");
        assert_eq!(admin.locks(true), 1);
    }
    assert_eq!(
        status(&mut interlock(url, "kill 1,2,3 --number --yes")),
        Some(2)
    );
    // Without standard input nobody confirms.
    assert_eq!(status(&mut interlock(url, "kill other")), Some(1));
    assert_eq!(admin.locks(true), 1);
}

/// Runs `kill`, calls `meanwhile` while it asks for confirmation, and confirms. Returns its status
/// and its messages.
#[track_caller]
fn confirm_after(
    url: &str,
    line: &str,
    shown: &str,
    meanwhile: impl FnOnce(),
) -> (Option<i32>, String) {
    let mut command = interlock(url, line);
    let mut kill = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
    // These lines are the heading, the names of the columns and the holder.
    let lines = [kill.line(), kill.line(), kill.line()];
    assert!(lines[2].contains(shown), "{lines:?}");
    meanwhile();
    let child = kill.child();
    child.stdin.take().unwrap().write_all(b"y\n").unwrap();
    let mut text = String::new();
    let mut messages = child.stderr.take().unwrap();
    messages.read_to_string(&mut text).unwrap();
    (kill.status(), text)
}

#[test]
fn kill_checks_again_before_it_ends_a_session() {
    let database = Database::new();
    let url = &database.url();
    let [mut first, mut second] = [(); 2].map(|()| Session::of(&database));
    let pid = first.pid().to_string();
    first.take("x");
    let (status, text) = confirm_after(url, "kill x", &pid, || {
        first.release("x");
        first.take("y");
    });
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("no longer held the lock x"), "{text}");
    first.take("x");
    let (status, text) = confirm_after(url, "kill x", &pid, || {
        first.release("x");
        second.take("x");
    });
    assert_eq!(status, Some(1), "{text}");
    for session in [&mut first, &mut second] {
        session.sql("SELECT 1");
    }
    // The session has ended by itself, and another one holds the lock.
    second.release("x");
    first.take("x");
    let (status, text) = confirm_after(url, "kill x", &pid, || {
        drop(first);
        second.take("x");
    });
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("no longer held the lock x"), "{text}");
    second.sql("SELECT 1");
}

#[test]
fn kill_ends_no_session_of_another_database() {
    let cluster = Cluster::start();
    let [here, there] = [(); 2].map(|()| cluster.database());
    let mut other = Session::of(&there);
    other.take("x");
    let (status, text) = printed(&mut interlock(&here.url(), "kill x --yes"));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("nobody has the lock x"), "{text}");
    let mut holder = Session::of(&here);
    holder.take("x");
    let (status, text) = printed(&mut interlock(&here.url(), "kill x --yes"));
    assert_eq!(status, Some(0), "{text}");
    assert!(holder.0.batch_execute("SELECT 1").is_err());
    other.sql("SELECT 1");
}

#[test]
fn kill_says_which_rights_it_lacks() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut admin = Session::of(&database);
    admin.sql("CREATE ROLE app LOGIN; CREATE ROLE modest LOGIN");
    let mut holder = Session(Endpoint::new(&database.url_with("user", "app")).connect());
    holder.take("x");
    let url = &database.url_with("user", "modest");
    let (status, text) = printed(&mut interlock(url, "kill x --yes"));
    assert_eq!(status, Some(1), "{text}");
    let (_, grant) = text.split_once("as a superuser, ").unwrap();
    admin.sql(&grant.replace("the role of DATABASE_URL", "modest"));
    let (status, text) = printed(&mut interlock(url, "kill x --yes"));
    assert_eq!(status, Some(0), "{text}");
    assert!(holder.0.batch_execute("SELECT 1").is_err());
}

/// Another row has replaced the one that was shown.
#[test]
fn kill_ends_only_the_request_term_or_run_that_it_has_shown() {
    let database = installed();
    let url = &database.url();
    let claim = |service: &str| {
        format!("SELECT resource_control.claim_service_request('{service}', 1, '1 day', 'web-3')")
    };
    let complete = "SELECT resource_control.complete_service_request(service, id)
        FROM resource_control.slot_in_flight WHERE service = ";
    let begin = "UPDATE resource_control.schedule SET token = token + 1, runner = 'web-4'";
    let mut session = Session::of(&database);
    session.sql(&claim("x"));
    session.sql(&claim("leader x"));
    session.sql(
        "INSERT INTO resource_control.schedule (name, tick, token, runner, started_at, expires_at)
            VALUES ('x', now(), 7, 'web-3', now(), now() + interval '1 day')",
    );
    let id = session.number("SELECT id FROM resource_control.slot_in_flight WHERE service = 'x'");
    for (line, replace) in [
        (
            format!("kill x --slot {id}"),
            format!("{complete} 'x'; {}", claim("x")),
        ),
        (
            "kill x --leader".to_owned(),
            format!("{complete} 'leader x'; {}", claim("leader x")),
        ),
        ("kill x --run".to_owned(), begin.to_owned()),
    ] {
        let (status, text) = confirm_after(url, &line, "web-3", || session.sql(&replace));
        assert_eq!(status, Some(1), "{line}: {text}");
        assert!(text.contains("had already ended"), "{line}: {text}");
    }
    let in_flight = "SELECT count(*) FROM resource_control.slot_in_flight";
    let running = "SELECT count(*) FROM resource_control.schedule_state WHERE state = 'running'";
    assert_eq!((session.number(in_flight), session.number(running)), (2, 1));
}

#[test]
fn kill_says_why_a_lock_is_still_held() {
    let cluster = Cluster::builder()
        .setting("max_prepared_transactions", "2")
        .start();
    let database = cluster.database();
    let url = &database.url();
    let [mut ends, mut stays] = [(); 2].map(|()| Session::of(&database));
    let mut admin = Session::of(&database);
    for session in [&mut ends, &mut stays] {
        session.sql(&format!("SELECT pg_advisory_lock_shared({})", id("x")));
    }
    let pid = stays.pid();
    signal(u32::try_from(pid).unwrap(), "STOP");
    let (status, text) = printed(&mut interlock(url, "kill x --yes"));
    signal(u32::try_from(pid).unwrap(), "CONT");
    assert_eq!(status, Some(1), "{text}");
    let why = format!("session {pid} has not ended");
    assert!(text.contains(&why), "{text}");

    Session::of(&database).sql(&format!(
        "BEGIN; SELECT pg_advisory_xact_lock({}); PREPARE TRANSACTION 'forgotten'",
        id("y")
    ));
    let (status, text) = printed(&mut interlock(url, "kill y --yes"));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("ROLLBACK PREPARED"), "{text}");

    // `kill` ends the sessions that the role may end, and names the others.
    admin.sql("CREATE ROLE modest LOGIN IN ROLE pg_read_all_stats");
    let url_of_modest = &database.url_with("user", "modest");
    let mut own = Endpoint::new(url_of_modest).connect();
    let [mut first, mut last] = [(); 2].map(|()| Session::of(&database));
    let lock = format!("SELECT pg_advisory_lock_shared({})", id("z"));
    first.sql(&lock);
    own.batch_execute(&lock).unwrap();
    last.sql(&lock);
    let (status, text) = printed(&mut interlock(url_of_modest, "kill z --yes"));
    assert_eq!(status, Some(1), "{text}");
    for session in [&mut first, &mut last] {
        assert!(
            text.contains(&format!("session {}: ", session.pid())),
            "{text}"
        );
    }
    assert!(own.batch_execute("SELECT 1").is_err());

    let (status, text) = printed(&mut interlock(url, "kill y --slot 1 --yes"));
    assert_eq!(status, Some(78), "{text}");
    assert!(text.contains("interlock install"), "{text}");
}

/// Other programs write texts of any length.
#[test]
fn long_texts_are_shown_and_cut() {
    let database = installed();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.sql(
        "SELECT resource_control.claim_service_request('geocoder', 1, '1 day', repeat('d', 70000));
         INSERT INTO resource_control.schedule (name, tick, runner, started_at, expires_at, error)
            VALUES ('hourly', now(), repeat('r', 70000), now(), now(), repeat('e', 70000))",
    );
    let (status, text) = printed(&mut interlock(url, "ps --wide"));
    assert_eq!(status, Some(0));
    for letter in ["d", "r", "e"] {
        assert!(text.contains(&letter.repeat(70_000)), "{letter}");
    }
    for (line, expected) in [
        ("ps", 0),
        ("doctor --holder-age 0s", 0),
        ("run geocoder --lease 30s -- true", 73),
    ] {
        let (status, text) = printed(&mut interlock(url, line));
        assert_eq!(status, Some(expected), "{line}");
        assert!(text.lines().all(|line| line.len() < 1000), "{line}");
    }
}

/// The remedy of the command that the message names lets the role do it.
#[test]
fn a_missing_right_leads_to_the_grant() {
    let cluster = Cluster::start();
    let database = cluster.database();
    migrations::install(&database.pool(1)).unwrap();
    let mut admin = Session::of(&database);
    admin.sql(
        "CREATE ROLE modest LOGIN; INSERT INTO resource_control.schedule (name) VALUES ('hourly')",
    );
    let url = &database.url_with("user", "modest");
    let (status, text) = printed(&mut interlock(url, "pause hourly"));
    assert_eq!(status, Some(78), "{text}");
    let command = text.split('`').nth(1).unwrap();
    let line = command.strip_prefix("interlock doctor").unwrap();
    let word = "may not use all of the schema";
    doctor::remedied(url, &database.url(), line, "fail", word);
    assert_eq!(printed(&mut interlock(url, "pause hourly")).0, Some(0));
}

#[test]
fn of_a_holder_that_a_role_may_not_see_nothing_is_made_up() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut admin = Session::of(&database);
    admin.sql("CREATE ROLE modest LOGIN");
    admin.take("x");
    let (status, text) = printed(&mut run(&database.url_with("user", "modest"), "x", "true"));
    assert_eq!(status, Some(73), "{text}");
    assert!(
        text.contains(&format!("session {} of ", admin.pid())),
        "{text}"
    );
    assert!(!text.contains("since") && !text.contains("from"), "{text}");
}

#[test]
fn of_concurrent_kills_each_says_what_has_happened() {
    let database = Database::new();
    for _ in 0..5 {
        let mut holder = Session::of(&database);
        holder.take("x");
        let all = [(); 3].map(|()| Speaking::start(&mut interlock(&database.url(), "kill x -y")));
        let replies = all.map(|mut kill| (kill.status(), kill.message()));
        assert!(
            replies.iter().any(|(status, _)| *status == Some(0)),
            "{replies:?}"
        );
        let is_wrong = |(_, text): &(_, String)| text.contains("another role");
        assert!(!replies.iter().any(is_wrong), "{replies:?}");
        assert_eq!(Session::of(&database).locks(true), 0);
    }
}

#[test]
fn the_schema_works_where_plain_strings_have_escapes() {
    let database = Database::new();
    let mut session = Session::of(&database);
    session.sql(&format!(
        "ALTER DATABASE {} SET standard_conforming_strings = off",
        database.name()
    ));
    let url = &database.url();
    assert_eq!(printed(&mut interlock(url, "install")).0, Some(0));
    session
        .sql(r"SELECT resource_control.claim_service_request('leader a\ b', 1, '1 day', 'web-3')");
    let (_, text) = printed(&mut interlock(url, "ps --json"));
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(all["leaders"][0]["name"], "a b", "{all}");
    let mut command = interlock(url, "kill --leader --yes");
    let (status, text) = printed(command.arg("a b"));
    assert_eq!(status, Some(0), "{text}");
}

#[test]
fn kill_frees_a_slot_of_its_own_service_only() {
    let database = installed();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.sql("SELECT resource_control.claim_service_request('x', 1, '1 day')");
    let id = session.number("SELECT id FROM resource_control.slot_in_flight");
    assert_eq!(
        status(&mut interlock(url, &format!("kill y --slot {id} --yes"))),
        Some(1)
    );
    assert_eq!(
        session.number("SELECT count(*) FROM resource_control.slot_in_flight"),
        1
    );
    assert_eq!(
        status(&mut interlock(url, &format!("kill x --slot {id} --yes"))),
        Some(0)
    );
    assert_eq!(
        session.number("SELECT count(*) FROM resource_control.slot_in_flight"),
        0
    );
}

#[test]
fn pause_and_resume_change_only_a_known_schedule() {
    let database = Database::new();
    let url = &database.url();
    let status = |line: &str| printed(&mut interlock(url, line)).0;
    // The schema is not installed yet.
    assert_eq!(status("pause hourly"), Some(78));
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql("INSERT INTO resource_control.schedule (name, tick) VALUES ('hourly', now()), ('daily', now()), ('-7', now())");
    let mut paused = |of: &str| {
        session.number(&format!(
            "SELECT count(paused_at) FROM resource_control.schedule_state WHERE name {of}"
        ))
    };
    for name in ["hourly", "-7"] {
        for _ in 0..2 {
            assert_eq!(status(&format!("pause {name}")), Some(0));
            assert_eq!(paused(&format!("= '{name}'")), 1);
        }
        assert_eq!(paused(&format!("<> '{name}'")), 0);
        let (_, shown) = printed(&mut interlock(url, "ps --json"));
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        let schedules = shown["schedules"].as_array().unwrap();
        for schedule in schedules {
            assert_eq!(schedule["paused"].is_null(), schedule["name"] != name);
        }
        for _ in 0..2 {
            assert_eq!(status(&format!("resume {name}")), Some(0));
            assert_eq!(paused("= name"), 0);
        }
    }
    for unknown in ["Hourly", "hourl", "%"] {
        for operation in ["pause", "resume", "trigger"] {
            assert_eq!(status(&format!("{operation} {unknown}")), Some(2));
        }
    }
    assert_eq!(status("pause"), Some(2));
    assert_eq!(paused("= name"), 0);
    assert_eq!(
        session.number("SELECT count(*) FROM resource_control.schedule"),
        3,
        "a misspelt name creates no schedule"
    );
}

#[test]
fn trigger_asks_for_one_run_and_ps_shows_the_next_tick() {
    let database = Database::new();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql(
        "INSERT INTO resource_control.schedule
            (name, tick, next_at, attempt, started_at, ended_at, expires_at, error) VALUES
            ('daily', '2026-03-01 03:00Z', '2026-03-02 03:00Z', 1, now(), now(), '2026-03-01 04:00Z', 'no luck'),
            ('never', '2026-03-01 03:00Z', 'infinity', 1, now(), now(), NULL, NULL)",
    );
    let shown = |name: &str, column: &str| {
        let (_, shown) = printed(&mut interlock(url, "ps --json"));
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        let schedules = shown["schedules"].as_array().unwrap();
        let of = schedules.iter().find(|it| it["name"] == name).unwrap();
        of[column]
            .as_str()
            .map(|text| text.chars().take(16).collect::<String>())
    };
    assert_eq!(shown("daily", "next").unwrap(), "2026-03-02T03:00");
    assert_eq!(shown("daily", "retry").unwrap(), "2026-03-01T04:00");
    assert_eq!(shown("daily", "error").unwrap(), "no luck");
    assert_eq!(shown("never", "next"), None);
    assert_eq!(shown("never", "retry"), None);
    for _ in 0..2 {
        assert_eq!(printed(&mut interlock(url, "trigger daily")).0, Some(0));
        assert_eq!(
            session.text(
                "SELECT string_agg(name, ',') FROM resource_control.schedule WHERE triggered_at <= clock_timestamp()"
            ),
            "daily"
        );
    }
    assert_ne!(shown("daily", "next").unwrap(), "2026-03-02T03:00");
}

#[test]
fn install_says_what_it_did() {
    let database = Database::new();
    let mut install = interlock(&database.url(), "install");
    assert_eq!(
        printed(&mut install),
        (Some(0), "resource_control: installed\n".into())
    );
    assert_eq!(
        printed(&mut install),
        (Some(0), "resource_control: nothing to do\n".into())
    );
    migrations::check(&database.pool(1)).unwrap();
}

#[test]
fn install_lets_tokens_of_a_copy_and_of_a_restored_database_continue() {
    let database = installed();
    let (url, mut session) = (&database.url(), Session::of(&database));
    let base = "SELECT base FROM resource_control.token_base";
    let continued = "fencing tokens continue above all that are known";
    assert_eq!(session.number(base), 0);
    session.sql("UPDATE resource_control.token_base SET identity = ''");
    for line in ["install", "install --restored"] {
        let before = session.number(base);
        assert_eq!(
            printed(&mut interlock(url, line)),
            (Some(0), format!("resource_control: {continued}\n"))
        );
        assert!(session.number(base) > before);
    }
    assert_eq!(
        printed(&mut interlock(url, "install")),
        (Some(0), "resource_control: nothing to do\n".into())
    );
    let new = Database::new();
    assert_eq!(
        printed(&mut interlock(&new.url(), "install --restored")),
        (
            Some(0),
            format!("resource_control: installed; {continued}\n")
        )
    );
}

#[test]
fn tables_fit_a_terminal_unless_wide_is_given() {
    let database = installed();
    let long = "a long name of an application that says more than it must";
    let url = database.url_with("application_name", long);
    let mut holder = Session(Endpoint::new(&url).connect());
    holder.sql("SELECT pg_advisory_lock(-9223372036854775808)");
    holder.sql(
        "SELECT resource_control.claim_service_request('geocoder', 1, '1 day',
        repeat('detail ', 40));
        SELECT resource_control.claim_service_request(U&'\\202E\\200B\\2028\\009B' || repeat('n', 500),
            1, '1 day')",
    );
    holder.sql(
        "INSERT INTO resource_control.schedule (name, tick, attempt, token, runner,
        started_at, error)
        VALUES ('hourly', now(), 1, 1, 'web-3 pid 1', now(), repeat('error ', 40))",
    );
    let (status, text) = printed(&mut interlock(&database.url(), "ps"));
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
    assert!(text.contains("-9223372036854775808"), "{text}");
    assert!(text.contains("  ?? ?nnn"), "{text}");
    // `watch` sets `COLUMNS` to the width of its terminal.
    let (_, narrow) = printed(interlock(&database.url(), "ps").env("COLUMNS", "96"));
    assert!(
        narrow.lines().all(|line| line.chars().count() <= 96),
        "{narrow}"
    );
    assert!(narrow.contains("-9223372036854775808"), "{narrow}");
    let (_, wide) = printed(&mut interlock(&database.url(), "ps --wide"));
    for shown in [
        long,
        "session_since",
        &"n".repeat(500),
        "detail detail detail detail detail detail detail",
    ] {
        assert!(wide.contains(shown), "{shown} is not in {wide}");
    }
}

#[test]
fn ps_says_what_it_has_not_read() {
    let (status, text) = printed(&mut interlock(&Database::new().url(), "ps"));
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.contains("slots, leaders and schedules: not read"),
        "{text}"
    );
}

#[test]
fn kill_lists_what_else_has_the_name() {
    let database = installed();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.sql(
        "SELECT resource_control.claim_service_request('it''s', 2, '1 day', 'web-3');
         SELECT resource_control.claim_service_request($$leader it's$$, 1, '1 day', 'web-4');
         INSERT INTO resource_control.schedule (name, tick, token, runner, started_at, expires_at)
            VALUES ('it''s', now(), 7, 'web-5', now(), now() + interval '1 day')",
    );
    let (status, text) = printed(&mut interlock(url, "kill it's --yes"));
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains(&format!(
            "nobody has the lock it's in the database {}: nothing was done",
            database.name()
        )),
        "{text}"
    );
    let in_flight = "SELECT count(*) FROM resource_control.slot_in_flight";
    let running = "SELECT count(*) FROM resource_control.schedule_state WHERE state = 'running'";
    assert_eq!((session.number(in_flight), session.number(running)), (2, 1));
    // The commands that `kill` lists are executed.
    let mut ended = 0;
    for line in text.lines() {
        let Some((_, command)) = line.split_once("interlock kill") else {
            continue;
        };
        let mut shell = std::process::Command::new("sh");
        shell.env("DATABASE_URL", url);
        shell.args([
            "-c",
            &format!("\"$0\" kill --yes {command}"),
            env!("CARGO_BIN_EXE_interlock"),
        ]);
        let (status, text) = printed(&mut shell);
        assert_eq!(status, Some(0), "{command}: {text}");
        ended += 1;
    }
    assert_eq!(ended, 3, "{text}");
    assert_eq!((session.number(in_flight), session.number(running)), (0, 0));
    assert_eq!(
        session.text("SELECT state FROM resource_control.schedule_state"),
        "crashed"
    );
    for line in ["kill it's --leader --yes", "kill it's --run --yes"] {
        let (status, text) = printed(&mut interlock(url, line));
        assert_eq!(status, Some(1), "{text}");
        assert!(text.contains("nobody has "), "{text}");
    }
    let (status, text) = printed(&mut interlock(url, "kill x --leader --run"));
    assert_eq!(status, Some(2), "{text}");
}

#[test]
fn an_installation_names_the_session_that_it_waits_for_and_gives_up() {
    let database = Database::new();
    let url = &database.url();
    let mut holder = Session::of(&database);
    holder.sql("SELECT pg_advisory_lock(20000101000000)");
    let pid = holder.pid();
    let (status, text) = printed(&mut interlock(url, "install --wait 1s"));
    assert_eq!(status, Some(73), "{text}");
    for named in [
        &*format!("session {pid} "),
        "interlock kill --number 20000101000000",
    ] {
        assert!(text.contains(named), "{text}");
    }
    let mut command = interlock(url, "install --wait 10m");
    let mut child = command
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut error = std::io::BufReader::new(child.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut error, &mut line).unwrap();
    assert!(
        line.contains("the lock of the migrations is busy"),
        "{line}"
    );
    let kill = "kill --number 20000101000000 --yes";
    assert_eq!(printed(&mut interlock(url, kill)).0, Some(0));
    assert!(child.wait().unwrap().success());
    migrations::check(&database.pool(1)).unwrap();
}

#[test]
fn completions_and_the_manual_are_written() {
    for shell in ["bash", "zsh", "fish"] {
        let (status, text) = printed(&mut interlock("", &format!("completions {shell}")));
        assert_eq!(status, Some(0), "{text}");
        assert!(text.contains("needs-schema"), "{text}");
    }
    let (status, text) = printed(&mut interlock("", "man"));
    assert_eq!(status, Some(0), "{text}");
    for named in [".TH interlock", "INTERLOCK DOCTOR", "Exit status"] {
        assert!(text.contains(named), "{named} is not in {text}");
    }
    let (status, text) = printed(&mut interlock("", "--version"));
    assert_eq!(
        (status, text.trim()),
        (
            Some(0),
            concat!("interlock ", env!("CARGO_PKG_VERSION"), ", with TLS")
        )
    );
}

#[test]
fn a_file_of_the_schema_refuses_another_encoding_by_itself() {
    let latin = Database::with_encoding("LATIN1");
    let first = migrations::texts().next().unwrap();
    let refused = latin.connect().batch_execute(first).unwrap_err();
    assert!(refused.to_string().contains("UTF8"), "{refused}");
    let mut session = Session::of(&latin);
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control'";
    assert_eq!(session.number(schemas), 0);
}

#[test]
fn each_function_table_view_and_type_has_a_comment() {
    let database = installed();
    let without = "
        SELECT COALESCE(string_agg(what, ', '), '') FROM (
            SELECT oid::regprocedure::text AS what FROM pg_proc
                WHERE pronamespace = 'resource_control'::regnamespace
                    AND obj_description(oid, 'pg_proc') IS NULL
            UNION ALL SELECT oid::regclass::text FROM pg_class
                WHERE relnamespace = 'resource_control'::regnamespace AND relkind IN ('r', 'v')
                    AND obj_description(oid, 'pg_class') IS NULL
            UNION ALL SELECT oid::regtype::text FROM pg_type
                WHERE typnamespace = 'resource_control'::regnamespace AND typtype = 'e'
                    AND obj_description(oid, 'pg_type') IS NULL) AS w";
    assert_eq!(Session::of(&database).text(without), "");
}

#[test]
fn a_role_may_read_or_use_the_schema_and_write_to_no_view() {
    let cluster = Cluster::start();
    let database = cluster.database();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql("CREATE ROLE reads LOGIN; CREATE ROLE uses LOGIN");
    grant(&database, "--set=role=reads --set=reads=1");
    grant(&database, "--set=role=uses");
    let writes = |role: &str, kinds: &str| {
        format!(
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'resource_control'::regnamespace
                AND relkind IN ({kinds})
                AND has_table_privilege('{role}', oid, 'INSERT, UPDATE, DELETE')"
        )
    };
    assert_eq!(session.number(&writes("reads", "'r', 'v'")), 0);
    assert_eq!(session.number(&writes("uses", "'v'")), 0);
    assert!(session.number(&writes("uses", "'r'")) > 5);
    let outcomes = "SELECT has_table_privilege('reads', 'resource_control.once', 'SELECT')::int";
    assert_eq!(session.number(outcomes), 0);
    let mut holder = Session::of(&database);
    holder.take("x");
    let (status, text) = printed(&mut interlock(&database.url_with("user", "reads"), "ps"));
    assert_eq!(status, Some(0), "{text}");
    for shown in [&*id("x"), "slots: none", "schedules: none"] {
        assert!(text.contains(shown), "{text}");
    }
    let (status, text) = printed(&mut interlock(&database.url_with("user", "uses"), "doctor"));
    assert_eq!(status, Some(0), "{text}");
}

/// Asserts that `doctor` prints a line with this level and this word.
#[track_caller]
fn doctor_says(url: &str, arguments: &str, level: &str, word: &str) {
    let (status, text) = printed(&mut interlock(url, &format!("doctor {arguments}")));
    let mut found = text.lines().filter(|line| line.starts_with(level));
    assert!(
        found.any(|line| line.contains(word)),
        "no {level} of {word} in\n{text}"
    );
    assert_eq!(
        status,
        Some(i32::from(text.lines().any(|line| line.starts_with("fail"))))
    );
}

#[test]
fn doctor_finds_nothing_to_fail_in_a_good_set_up() {
    let database = installed();
    let (status, text) = printed(&mut interlock(&database.url(), "doctor"));
    assert_eq!(status, Some(0), "{text}");
    doctor_says(&database.url(), "", "ok", "the schema resource_control");
    doctor_says(&database.url(), "", "ok", "session locks exclude");
}

#[test]
fn doctor_names_what_is_wrong_with_the_schema() {
    let database = Database::new();
    let url = &database.url();
    let not_installed = "the schema resource_control is not installed";
    doctor_says(url, "", "ok", not_installed);
    doctor_says(url, "--needs-schema", "fail", not_installed);
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql("SELECT resource_control.claim_service_request('x', 1, '1 day')");
    session.sql("ALTER SEQUENCE resource_control.service_request_id_seq RESTART");
    doctor_says(url, "", "fail", "ids of requests");
    doctor_says(url, "--holder-age 0s", "warn", "has slot 0 of x");
    session.sql("INSERT INTO resource_control.fence (name, token) VALUES ('rows', 1000000)");
    doctor_says(url, "", "fail", "a fence refuses all new tokens");
    session.sql("ALTER TABLE resource_control.once DROP CONSTRAINT once_pkey");
    doctor_says(url, "", "fail", "resource_control.once has no primary key");
    session.sql("ALTER TABLE resource_control.service_request ALTER id DROP IDENTITY");
    doctor_says(url, "", "fail", "is no identity");
    session.sql("DROP TABLE resource_control.fence");
    doctor_says(url, "", "fail", "lacks fence");
    session
        .sql("DELETE FROM resource_control.installed_migration WHERE version = '20000101000001'");
    doctor_says(url, "", "fail", "not installed");
    let latin = Database::with_encoding("LATIN1");
    doctor_says(
        &latin.url(),
        "",
        "fail",
        "encoding of the database is LATIN1",
    );
}

#[test]
fn doctor_names_missing_rights() {
    let database = installed();
    let role = format!("interlock_cli_{}", std::process::id());
    let mut session = Session::of(&database);
    session.sql(&format!("CREATE ROLE {role}"));
    let url = &database.url_with("options", &format!("-c role={role}"));
    let found = std::panic::catch_unwind(|| {
        let needs = "--needs-schema";
        doctor_says(url, needs, "fail", "may not use all of the schema");
        let (_, text) = printed(&mut interlock(url, "doctor --needs-schema"));
        let grants = text
            .lines()
            .find(|line| line.trim().starts_with("GRANT USAGE"));
        Session::of(&database).sql(grants.unwrap());
        doctor_says(url, "", "ok", "the schema resource_control");
        doctor_says(
            url,
            "",
            "ok",
            "does not see what the sessions of other roles do",
        );
        assert_eq!(status(&mut interlock(url, "doctor")), Some(0));
    });
    session.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    found.unwrap();
}

#[test]
fn doctor_names_settings_and_what_stays_open() {
    let database = installed();
    let url = &database.url();
    let mut session = Session::of(&database);
    let name = database.name();
    session.sql(&format!(
        "ALTER DATABASE {name} SET idle_session_timeout = '1h'"
    ));
    doctor_says(url, "", "warn", "idle_session_timeout = 3600000ms");
    doctor_says(url, "", "ok", "client_connection_check_interval");
    doctor_says(url, "", "ok", "idle_in_transaction_session_timeout");
    session.sql(&format!(
        "ALTER DATABASE {name} SET default_transaction_read_only = on"
    ));
    doctor_says(url, "", "fail", "default_transaction_read_only = on");
    session.sql(&format!("ALTER DATABASE {name} RESET ALL"));
    session.sql("BEGIN; SELECT 1");
    let pid = session.pid();
    doctor_says(
        url,
        "--transaction-age 0s",
        "warn",
        &format!("in session {pid}"),
    );
    session.sql("COMMIT");
    session.take("x");
    doctor_says(url, "--holder-age 0s", "warn", &format!("session {pid}"));
    let number = LockKey::named("x").id().unwrap().to_string();
    doctor_says(
        url,
        "--holder-age 0s",
        "warn",
        &format!("holds the lock {number}"),
    );
    let mut running = Running::start(&mut run(url, "y", "echo ready; exec sleep 1000"));
    assert_eq!(running.line(), "ready");
    doctor_says(
        url,
        "--holder-age 0s",
        "warn",
        "interlock y) holds the lock",
    );
    assert_eq!(
        status(&mut interlock(url, "doctor --holder-age 9999999999d")),
        Some(2)
    );
}

#[test]
fn doctor_names_what_a_failover_loses() {
    let primary = Cluster::start();
    let endpoint = primary.endpoint("postgres");
    let url = &endpoint.url();
    migrations::install(&endpoint.pool(1)).unwrap();
    let conn = &mut endpoint.connect();
    let standby = primary.standby();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let streams = "DO $$ BEGIN ASSERT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming'); END $$";
    while conn.batch_execute(streams).is_err() {
        assert!(
            std::time::Instant::now() < end,
            "the standby does not follow"
        );
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    doctor_says(url, "", "warn", "none is synchronous");
    conn.batch_execute("ALTER DATABASE postgres SET synchronous_commit = off")
        .unwrap();
    doctor_says(url, "", "warn", "synchronous_commit = off");
    conn.batch_execute(
        "SELECT resource_control.claim_service_request('x', 1, '1 day');
         UPDATE resource_control.service_request SET created_at = created_at + interval '1 hour';
         INSERT INTO resource_control.schedule (name, counted_from) VALUES ('hourly', now() + interval '1 hour')",
    )
    .unwrap();
    doctor_says(
        url,
        "",
        "warn",
        "the schedule hourly has a tick of the future",
    );
    doctor_says(url, "", "warn", "was made in the future");
    conn.batch_execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
        .unwrap();
    doctor_says(url, "", "fail", "locks are refused");
    drop(standby);
}
