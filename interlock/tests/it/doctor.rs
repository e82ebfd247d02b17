//! `interlock doctor` in spoiled set-ups: each is named, and its remedy is pasted, after which it
//! is named no more.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;

use diesel_interlock::migrations;
use serde_json::Value;
use workbench::{Cluster, Database};

use crate::support::*;

/// What doctor finds.
#[track_caller]
fn found(url: &str, arguments: &str) -> (Option<i32>, Vec<Value>) {
    let mut command = interlock(url, &format!("doctor --json {arguments}"));
    let output = output(&mut command);
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{output:?}"));
    (output.status.code(), lines.as_array().unwrap().clone())
}

#[track_caller]
fn line(url: &str, arguments: &str, level: &str, word: &str) -> Value {
    let (_, lines) = found(url, arguments);
    let is_it =
        |line: &&Value| line["level"] == level && line["found"].as_str().unwrap().contains(word);
    let line = lines.iter().find(is_it);
    line.unwrap_or_else(|| panic!("no {level} of {word} in {lines:#?}"))
        .clone()
}

/// Pastes the remedy, as a superuser and with the program on the path, and looks again. Returns the
/// status of the last look.
#[track_caller]
fn remedied(
    url: &str,
    of_superuser: &str,
    arguments: &str,
    level: &str,
    word: &str,
) -> Option<i32> {
    let line = line(url, arguments, level, word);
    let mut all = String::new();
    if let Some(sql) = line["sql"].as_str().filter(|sql| !sql.is_empty()) {
        assert!(sql.ends_with(';') || sql.contains("; --"), "{sql}");
        let mut psql = Command::new("psql");
        psql.args(["-qX", "-v", "ON_ERROR_STOP=1", of_superuser]);
        psql.env("PGOPTIONS", "-c statement_timeout=0 -c lock_timeout=0");
        all += &pasted(psql, sql);
    }
    if let Some(shell) = line["shell"].as_str().filter(|shell| !shell.is_empty()) {
        let directory = std::path::Path::new(env!("CARGO_BIN_EXE_interlock"))
            .parent()
            .unwrap();
        let mut sh = Command::new("sh");
        sh.env("DATABASE_URL", of_superuser);
        sh.env("PATH", format!("{}:/usr/bin:/bin", directory.display()));
        // Where it asks, the operator says yes.
        sh.args(["-c", &format!("{shell} <<END\ny\nEND")]);
        all += &pasted(sh, "");
    }
    assert!(!all.is_empty(), "no remedy: {line}");
    let (status, lines) = found(url, arguments);
    let is_still = lines
        .iter()
        .any(|it| it["level"] == level && it["found"].as_str().unwrap().contains(word));
    assert!(!is_still, "{word}, after {all}: {lines:#?}");
    status
}

#[track_caller]
fn pasted(mut program: Command, text: &str) -> String {
    let mut child = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{text}: {output:?}");
    format!("{program:?} {text}")
}

/// A server without the roles of other tests, with what the checklist wants.
fn healthy() -> Cluster {
    Cluster::builder()
        .setting("client_connection_check_interval", "10s")
        .setting("idle_in_transaction_session_timeout", "5min")
        .setting("max_prepared_transactions", "2")
        .start()
}

/// A server, or a pooler, that lets clients in and then says nothing.
fn silent_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!(
        "postgres://{}/x?user=x&sslmode=disable",
        listener.local_addr().unwrap()
    );
    thread::spawn(move || {
        let mut clients = Vec::new();
        while let Ok((mut client, _)) = listener.accept() {
            let _ = client.read(&mut [0; 1024]);
            // That the client is who it says, and may send its statements.
            let _ = client.write_all(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I");
            clients.push(client);
        }
    });
    url
}

/// It takes the half minute that a reply may take, here beside the tests that take longest.
#[test]
fn a_database_that_is_silent_is_not_waited_for_forever() {
    let url = &silent_server();
    let lines = ["ps", "doctor", "kill x --yes", "run x --wait 1s -- true"];
    let all = lines.map(|line| Running::start(&mut interlock(url, line)));
    let [_, mut doctor, ..] = all.map(|mut running| {
        assert_eq!(running.status(), Some(69));
        running
    });
    assert!(doctor.line().contains("does not reply"));
}

#[test]
fn nothing_is_wrong_with_locks_alone_or_with_the_whole_schema() {
    let cluster = healthy();
    let database = cluster.database();
    for _ in 0..2 {
        let (status, lines) = found(&database.url(), "--strict");
        assert_eq!(status, Some(0), "{lines:#?}");
        assert!(lines.iter().all(|line| line["level"] == "ok"), "{lines:#?}");
        migrations::install(&database.pool(1)).unwrap();
    }
    let not_installed = cluster.database();
    let url = &not_installed.url();
    let (status, _) = found(url, "--needs-schema");
    assert_eq!(status, Some(1));
    remedied(
        url,
        url,
        "--needs-schema",
        "fail",
        "resource_control is not installed",
    );
}

#[test]
fn strict_is_a_status_for_warnings() {
    let cluster = healthy();
    let database = cluster.database();
    Session::of(&database).sql(&format!(
        "ALTER DATABASE {} SET idle_session_timeout = '1h'",
        database.name()
    ));
    assert_eq!(found(&database.url(), "").0, Some(0));
    assert_eq!(found(&database.url(), "--strict").0, Some(1));
}

#[test]
fn nothing_is_said_twice_also_of_a_standby() {
    let cluster = healthy();
    let latin = Database::with_encoding("LATIN1");
    let standby = cluster.standby();
    let role = cluster.database();
    migrations::install(&role.pool(1)).unwrap();
    Session::of(&role).sql("CREATE ROLE nobody LOGIN");
    for (url, arguments, word) in [
        (latin.url(), "", "LATIN1"),
        (standby.url("postgres"), "", "standby"),
        (
            role.url_with("user", "nobody"),
            "--needs-schema",
            "may not use all of the schema",
        ),
    ] {
        let (status, lines) = found(&url, arguments);
        assert_eq!(status, Some(1));
        let failed: Vec<_> = lines
            .iter()
            .filter(|line| line["level"] == "fail")
            .collect();
        assert_eq!(failed.len(), 1, "{failed:#?}");
        assert!(
            failed[0]["found"].as_str().unwrap().contains(word),
            "{failed:#?}"
        );
    }
}

/// Spoils an installed schema in one way after the other. Each is named by a word, and repaired by
/// what is pasted.
#[track_caller]
fn repaired(spoils: &[(&str, &str)]) {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql("SELECT resource_control.claim_service_request('x', 1, '1 day')");
    for (spoil, word) in spoils {
        session.sql(spoil);
        let mut status = remedied(url, url, "", "fail", word);
        // The views of which a column was one went with it.
        if status == Some(1) && *word == LACKS_COLUMN {
            status = remedied(url, url, "", "fail", "lacks ");
        }
        assert_eq!(status, Some(0), "{spoil}");
    }
    migrations::check(&database.pool(1)).unwrap();
}

const LACKS_COLUMN: &str = "lacks the column";

#[test]
fn functions_that_were_changed_are_repaired() {
    repaired(&[
        (
            "CREATE OR REPLACE FUNCTION resource_control.pass_fence(name text, token bigint)
                RETURNS boolean
                LANGUAGE sql AS 'SELECT true'",
            "resource_control.pass_fence is not that of this release",
        ),
        (
            "CREATE OR REPLACE FUNCTION resource_control.elapsed(span interval) RETURNS interval
                LANGUAGE sql IMMUTABLE RETURN span",
            "resource_control.elapsed is not that of this release",
        ),
        (
            "ALTER FUNCTION resource_control.lock_key RESET search_path",
            "resource_control.lock_key is not that of this release",
        ),
        (
            "DROP FUNCTION resource_control.prune_service_requests",
            "lacks prune_service_requests",
        ),
    ]);
}

#[test]
fn tables_and_views_that_were_changed_are_repaired() {
    repaired(&[
        ("DROP VIEW resource_control.leader", "lacks leader"),
        ("DROP TABLE resource_control.fence", "lacks fence"),
        (
            "ALTER TABLE resource_control.schedule DROP paused_at CASCADE;
             ALTER TABLE resource_control.schedule ADD paused_at timestamptz",
            "lacks schedule_state",
        ),
        (
            "ALTER TABLE resource_control.once DROP CONSTRAINT once_pkey",
            "has no primary key",
        ),
        (
            "DELETE FROM resource_control.installed_migration WHERE version =
            '20000101000001'",
            "migrations of this release are pending",
        ),
    ]);
}

#[test]
fn columns_that_were_dropped_are_repaired() {
    repaired(&[
        (
            "ALTER TABLE resource_control.throttle DROP details CASCADE",
            LACKS_COLUMN,
        ),
        (
            "ALTER TABLE resource_control.service_request DROP claim CASCADE",
            LACKS_COLUMN,
        ),
        (
            "ALTER TABLE resource_control.rate_limit DROP since CASCADE",
            LACKS_COLUMN,
        ),
    ]);
}

/// What breaks a promise of the schema, and the word by which `doctor` names it.
#[test]
fn what_is_not_as_installed_is_named_and_cured() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql("CREATE ROLE app LOGIN");
    grant(&database, "--set=role=app");
    session.sql(
        "CREATE FUNCTION ignore() RETURNS trigger LANGUAGE plpgsql
        AS 'BEGIN RETURN NULL; END'",
    );
    for (spoil, level, word) in [
        ("TABLE once SET UNLOGGED", "fail", "once is UNLOGGED"),
        (
            "TABLE service_request SET UNLOGGED",
            "fail",
            "service_request is UNLOGGED",
        ),
        ("SEQUENCE fencing_token CACHE 100", "fail", "(CACHE 100)"),
        (
            "SEQUENCE fencing_token AS integer",
            "fail",
            "(MAXVALUE 2147483647)",
        ),
        (
            "SEQUENCE service_request_id_seq INCREMENT 10 MAXVALUE 1000 CYCLE",
            "fail",
            "(INCREMENT 10, MAXVALUE 1000, CYCLE)",
        ),
        (
            "TABLE schedule ENABLE ROW LEVEL SECURITY",
            "fail",
            "rows of resource_control.schedule",
        ),
        (
            "TABLE installed_migration ENABLE ROW LEVEL SECURITY",
            "fail",
            "rows of resource_control.installed_migration",
        ),
        (
            "VIEW leader SET (security_barrier)",
            "fail",
            "the view resource_control.leader has",
        ),
        (
            "TABLE service_request SET (autovacuum_enabled = off)",
            "warn",
            "autovacuum is off for",
        ),
        (
            "CREATE RULE nothing AS ON INSERT TO resource_control.once DO INSTEAD NOTHING",
            "fail",
            "the rule nothing on resource_control.once",
        ),
        (
            "CREATE TRIGGER ignore BEFORE UPDATE ON resource_control.fence FOR EACH ROW EXECUTE
                FUNCTION ignore()",
            "warn",
            "the trigger ignore on resource_control.fence",
        ),
    ] {
        session.sql(&match spoil.split_once(' ') {
            Some((kind @ ("TABLE" | "VIEW" | "SEQUENCE"), rest)) => {
                format!("ALTER {kind} resource_control.{rest}")
            }
            _ => spoil.to_owned(),
        });
        // As the role of the application, whose rows a policy may hide.
        let of_app = &database.url_with("user", "app");
        let (status, lines) = found(of_app, "--strict");
        assert_eq!(status, Some(1), "{spoil}: {lines:#?}");
        let bad = lines.iter().filter(|line| line["level"] != "ok").count();
        assert_eq!(bad, 1, "{spoil}: {lines:#?}");
        remedied(of_app, url, "", level, word);
        let (status, lines) = found(of_app, "--strict");
        assert_eq!(status, Some(0), "{spoil}: {lines:#?}");
    }
}

#[test]
fn times_of_a_clock_that_was_ahead_are_named_and_set_back() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql("ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'it''s'");
    for (spoil, word) in [
        (
            "throttle (name, key, throttle_interval, last_granted)
                VALUES ('news', '', '15 s', now() + interval '1 day')",
            "1 throttles were granted in the future, such as news",
        ),
        (
            "throttled_resource VALUES ('it''s', '15 s', now() + interval '1 day', 'web-3')",
            "the resource it's was granted in the future",
        ),
        (
            "rate_limit VALUES ('api', 'a', now() + interval '1 day', now() + interval '1 day',
                now() + interval '2 days', 1000000, 10)",
            "1 keys of rate limits were spent in the future, such as one of api",
        ),
        (
            "schedule (name, tick, counted_from) VALUES ('hourly', now(), now() + interval '1 day')",
            "the schedule hourly has a tick of the future",
        ),
        (
            "service_request (service, slot, created_at, expires_at)
                VALUES ('x', 0, now() + interval '1 day', now() + interval '2 days')",
            "of x was made in the future",
        ),
    ] {
        session.sql(&format!("INSERT INTO resource_control.{spoil}"));
        remedied(url, url, "", "warn", word);
        let (status, lines) = found(url, "--strict");
        assert_eq!(status, Some(0), "{spoil}: {lines:#?}");
    }
    let denied = "SELECT count(*) FROM resource_control.throttle_state WHERE due_at > now() +
        interval '1 hour'";
    assert_eq!(session.number(denied), 0);
}

#[test]
fn a_token_that_nobody_has_drawn_costs_no_other_token() {
    const DRAW: &str = "resource_control.next_token('resource_control.fencing_token')";
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    let before = session.number(DRAW);
    let passes = |token: &str| format!("resource_control.pass_fence('f', {token})::int");
    assert_eq!(session.number(&passes("9223372036854775807")), 1);
    remedied(
        url,
        url,
        "",
        "fail",
        "the fence f was passed with 9223372036854775807",
    );
    let next = session.number(DRAW);
    assert!(next > before && next < before + 100, "{next}");
    assert_eq!(session.number(&passes(&next.to_string())), 1);
    assert_eq!(session.number(&passes(&before.to_string())), 0);
    // The sequences, too, as by a remedy that was wrong.
    for sequence in ["fencing_token", "service_request_id_seq"] {
        session.sql(&format!(
            "SELECT setval('resource_control.{sequence}', 9223372036854775807)"
        ));
        remedied(
            url,
            url,
            "",
            "fail",
            &format!("resource_control.{sequence} is near its end"),
        );
        let (status, lines) = found(url, "--strict");
        assert_eq!(status, Some(0), "{sequence}: {lines:#?}");
        assert!(session.number(DRAW) > next);
    }
    session.sql("SELECT resource_control.claim_service_request('x', 1, '1 day')");
}

#[test]
fn settings_are_set_back_by_what_is_pasted() {
    let cluster = healthy();
    let database = cluster.database();
    let (url, name) = (&database.url(), database.name());
    let mut session = Session::of(&database);
    // Under a timeout of less than a second, a look may be cut short, and is then repeated.
    for (setting, level, word) in [
        (
            "idle_session_timeout = '1h'",
            "warn",
            "idle_session_timeout = ",
        ),
        (
            "statement_timeout = '900ms'",
            "warn",
            "statement_timeout = ",
        ),
        ("lock_timeout = '900ms'", "warn", "lock_timeout = "),
        ("synchronous_commit = off", "warn", "synchronous_commit = "),
        (
            "deadlock_timeout = '100ms'",
            "warn",
            "deadlock_timeout = 100ms",
        ),
        (
            "client_connection_check_interval = '5min'",
            "warn",
            "client_connection_check_interval = 300000ms",
        ),
        (
            "search_path = public, pg_catalog",
            "fail",
            "search_path = public, pg_catalog",
        ),
        (
            "default_transaction_read_only = on",
            "fail",
            "default_transaction_read_only = ",
        ),
    ] {
        session.sql(&format!(
            "BEGIN READ WRITE; ALTER DATABASE {name} SET {setting}; COMMIT"
        ));
        eventually("doctor has finished", || {
            let lines = printed(&mut interlock(url, "doctor --json")).1;
            lines.contains(word) && lines.starts_with('[')
        });
        remedied(url, url, "", level, word);
    }
}

/// No role is to be altered for what the connection sets.
#[test]
fn a_setting_of_the_connection_itself_is_taken_out_there() {
    let cluster = healthy();
    let database = cluster.database();
    for (option, level, word) in [
        ("idle_session_timeout=1h", "warn", "idle_session_timeout = "),
        ("synchronous_commit=off", "warn", "synchronous_commit = off"),
        (
            "search_path=public,pg_catalog",
            "fail",
            "search_path = public",
        ),
    ] {
        let url = &database.url_with("options", &format!("-c {option}"));
        let found = line(url, "", level, word);
        assert_eq!(found["sql"], "", "{found}");
        let why = found["why"].as_str().unwrap();
        assert!(why.contains("options of DATABASE_URL"), "{why}");
    }
}

#[test]
fn standbys_are_judged_as_each_role_sees_them() {
    let cluster = healthy();
    let database = cluster.database();
    let mut session = Session::of(&database);
    session.sql("CREATE ROLE app LOGIN");
    let _standby = cluster.standby();
    let urls = [database.url(), database.url_with("user", "app")];
    let mut judged = |names: &str, level: &str, word: &str| {
        session.sql(&format!(
            "ALTER SYSTEM SET synchronous_standby_names = '{names}'"
        ));
        session.sql("SELECT pg_reload_conf()");
        for url in &urls {
            eventually(word, || {
                let (_, lines) = found(url, "");
                let is_it = |line: &Value| {
                    line["level"] == level && line["found"].as_str().unwrap().contains(word)
                };
                lines.iter().any(is_it)
            });
        }
    };
    judged("", "warn", "1 standbys, and none is synchronous");
    judged("ANY 1 (*)", "ok", "1 standbys, and a commit waits for 1");
    judged("FIRST 2 (*)", "fail", "needs 2, and 1 such are connected");
    judged("any 2 (*)", "fail", "needs 2, and 1 such are connected");
    judged("*", "ok", "1 standbys, and a commit waits for 1");
    // Without the standby, the end of the test would wait for it.
    judged("", "warn", "1 standbys, and none is synchronous");
}

#[test]
fn who_may_connect_without_a_reason_is_named_and_shut_out() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql(
        "CREATE ROLE stranger LOGIN; CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA
        resource_control TO app",
    );
    let strangers = "stranger: each can take every advisory lock";
    assert_eq!(
        status(&mut run(
            &database.url_with("user", "stranger"),
            "x",
            "true"
        )),
        Some(0)
    );
    remedied(url, url, "", "warn", strangers);
    let (status_of_stranger, text) = printed(&mut run(
        &database.url_with("user", "stranger"),
        "x",
        "true",
    ));
    assert_eq!(status_of_stranger, Some(78), "{text}");
    assert_eq!(
        status(&mut run(&database.url_with("user", "app"), "x", "true")),
        Some(0)
    );
    // It is told how to get in, too.
    let (status, lines) = found(&database.url_with("user", "stranger"), "");
    assert_eq!(status, Some(78), "{lines:#?}");
    let why = lines[0]["why"].as_str().unwrap();
    assert!(why.starts_with("GRANT CONNECT ON DATABASE "), "{why}");
}

#[test]
fn rights_are_granted_by_what_is_pasted() {
    let cluster = healthy();
    let database = cluster.database();
    migrations::install(&database.pool(1)).unwrap();
    Session::of(&database).sql("CREATE ROLE \"the app\" LOGIN");
    let url = &database.url_with("user", "the app");
    remedied(
        url,
        &database.url(),
        "--needs-schema",
        "fail",
        "may not use all of the schema",
    );
    Session::of(&database).sql("ALTER ROLE \"the app\" CONNECTION LIMIT 4");
    remedied(
        url,
        &database.url(),
        "",
        "warn",
        "connections of the ROLE \"the app\"",
    );
}

#[test]
fn what_holds_back_vacuum_is_ended_by_what_is_pasted() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.sql("SELECT pg_create_physical_replication_slot('left', true)");
    remedied(
        url,
        url,
        "",
        "warn",
        "the replication slot left is used by nobody",
    );
    session.sql("BEGIN; SELECT 1");
    remedied(
        url,
        url,
        "--transaction-age 0s",
        "warn",
        &format!("in session {}", session.pid()),
    );
    let mut session = Session::of(&database);
    session.sql("BEGIN; SELECT pg_advisory_xact_lock(1); PREPARE TRANSACTION 'it''s'");
    let (_, text) = printed(&mut interlock(url, "kill 1 --number --yes"));
    assert!(text.contains("ROLLBACK PREPARED 'it''s';"), "{text}");
    remedied(
        url,
        url,
        "--transaction-age 0s",
        "warn",
        "prepared transaction it's",
    );
}

#[test]
fn stuck_holders_of_each_kind_are_found_and_ended() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.take("x");
    let mut in_transaction = Session::of(&database);
    in_transaction.sql("BEGIN; SELECT pg_advisory_xact_lock_shared(7, -12)");
    let mut looks = Session::of(&database);
    looks.sql(
        "SELECT resource_control.claim_service_request('it''s', 1, '1 day', 'web-3');
         INSERT INTO resource_control.schedule (name, tick, token, runner, started_at, expires_at)
            VALUES ('it''s', now(), 7, 'web-5', now() - interval '1 min', now() + interval
                '1 day')",
    );
    for word in [
        &*format!("holds the lock {}", id("x")),
        "holds the lock 7, -12",
        "has slot 0 of it's",
        "web-5 runs the schedule it's",
    ] {
        remedied(url, url, "--holder-age 0s", "warn", word);
    }
    assert_eq!(looks.locks(true), 0);
}

#[test]
fn a_connection_that_is_refused_is_told_why() {
    let cluster = healthy();
    let database = cluster.database();
    let mut session = Session::of(&database);
    session.sql("CREATE ROLE full_up LOGIN CONNECTION LIMIT 0; CREATE ROLE no_login");
    for (url, status, remedy) in [
        (
            database.url_with("user", "nobody at all"),
            78,
            "CREATE ROLE \"nobody at all\" LOGIN;",
        ),
        (
            database.url_with("dbname", "nowhere"),
            78,
            "CREATE DATABASE \"nowhere\" ENCODING 'UTF8' TEMPLATE template0;",
        ),
        (
            database.url_with("user", "full_up"),
            69,
            "ALTER ROLE \"full_up\" CONNECTION LIMIT -1;",
        ),
        (
            database.url_with("user", "no_login"),
            78,
            "ALTER ROLE \"no_login\" LOGIN;",
        ),
        (
            database.url_with("schema", "public"),
            78,
            "correct DATABASE_URL",
        ),
        (
            database.url_with("options", "-c no_such_setting=1"),
            78,
            "correct the options",
        ),
        (String::new(), 78, "correct DATABASE_URL"),
        (
            database.url_with("host", "/no/such/directory"),
            69,
            "start the server",
        ),
    ] {
        let (found, lines) = found(&url, "");
        assert_eq!(found, Some(status), "{lines:#?}");
        let why = lines[0]["why"].as_str().unwrap();
        assert!(why.contains(remedy), "{remedy} is not in {lines:#?}");
    }
}

#[test]
fn a_standby_that_every_commit_waits_for_is_missed() {
    let cluster = healthy();
    let url = &cluster.url("postgres");
    let mut session = Session(cluster.endpoint("postgres").connect());
    session.sql("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'");
    session.sql("SELECT pg_reload_conf()");
    let setting = "SELECT current_setting('synchronous_standby_names')";
    eventually("it is set", || !session.text(setting).is_empty());
    let word = "needs 1, and 0 such are connected";
    let remedy = line(url, "", "fail", word)["sql"].clone();
    for statement in remedy.as_str().unwrap().split_inclusive(';') {
        session.sql(statement);
    }
    eventually("it is reset", || session.text(setting).is_empty());
    let (status, lines) = found(url, "--strict");
    assert_eq!(status, Some(0), "{lines:#?}");
}

#[test]
fn what_the_checklist_sets_up_passes_the_check_of_the_checklist() {
    let cluster = healthy();
    let database = cluster.database();
    let (name, mut session) = (database.name(), Session::of(&database));
    migrations::install(&database.pool(1)).unwrap();
    session.sql(&format!(
        "CREATE ROLE app LOGIN; CREATE ROLE grafana LOGIN; CREATE ROLE cron LOGIN;
         REVOKE CONNECT ON DATABASE {name} FROM PUBLIC;
         GRANT CONNECT ON DATABASE {name} TO app, grafana, cron"
    ));
    grant(&database, "--set=role=app");
    grant(&database, "--set=role=grafana --set=reads=1");
    for (role, arguments, word) in [
        ("app", "--strict --needs-schema", "is complete"),
        ("grafana", "--strict", "may read the views"),
        ("cron", "--strict", "locks need no right"),
    ] {
        let url = &database.url_with("user", role);
        let (status, lines) = found(url, arguments);
        assert_eq!(status, Some(0), "{role}: {lines:#?}");
        line(url, arguments, "ok", word);
    }
    let url = &database.url_with("user", "cron");
    line(
        url,
        "--needs-schema",
        "fail",
        "may not use all of the schema",
    );
    assert_eq!(
        printed(&mut run(url, "x", "true")),
        (Some(0), String::new())
    );
}

#[test]
fn tokens_never_go_down_after_a_sequence_was_lost() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql(
        "INSERT INTO resource_control.schedule (name, tick, token) VALUES ('hourly', now(), 700);
         INSERT INTO resource_control.fence (name, token) VALUES ('rows', 600)",
    );
    remedied(url, url, "", "fail", "their sequence was not copied");
    let last = "SELECT last_value FROM resource_control.fencing_token";
    assert_eq!(session.number(last), 700);
    session.sql("UPDATE resource_control.fence SET token = 800");
    remedied(url, url, "", "fail", "their sequence was not copied");
    assert_eq!(session.number(last), 800);
}

#[test]
fn a_copy_fails_until_its_owner_has_installed() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    session.sql(
        "CREATE ROLE app LOGIN; UPDATE resource_control.token_base SET identity = '';
         INSERT INTO resource_control.fence VALUES ('rows', 7)",
    );
    grant(&database, "--set=role=app");
    let of_app = &database.url_with("user", "app");
    let (status, text) = printed(&mut interlock(of_app, "install"));
    assert_eq!(status, Some(78), "{text}");
    assert!(text.contains("as the role postgres"), "{text}");
    // Nothing contradicts it.
    let (_, lines) = found(of_app, "");
    let failed = lines.iter().filter(|line| line["level"] == "fail");
    assert_eq!(failed.count(), 1, "{lines:#?}");
    remedied(of_app, url, "", "fail", "a copy of another one");
    session.sql("UPDATE resource_control.token_base SET identity = ''");
    let (_, text) = printed(&mut interlock(url, "install"));
    assert!(text.contains("fencing tokens continue"), "{text}");
    let (status, lines) = found(url, "");
    assert_eq!(status, Some(0), "{lines:#?}");
}

#[test]
fn an_index_of_slots_that_is_another_one_is_made_anew() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    migrations::install(&database.pool(1)).unwrap();
    let mut session = Session::of(&database);
    let name = "service_request_in_flight";
    let create = format!("INDEX {name} ON resource_control.service_request (service, slot)");
    for spoil in [
        format!(
            "DROP INDEX resource_control.{name};
             CREATE {create} WHERE completed_at IS NULL AND timed_out_at IS NULL"
        ),
        format!("DROP INDEX resource_control.{name}; CREATE UNIQUE {create}"),
        format!(
            "UPDATE pg_index SET indisvalid = false
                WHERE indexrelid = 'resource_control.{name}'::regclass"
        ),
    ] {
        session.sql(&spoil);
        remedied(url, url, "", "fail", name);
    }
    // What PostgreSQL prints is compared as it prints it by default.
    session.sql(&format!(
        "ALTER DATABASE {} SET quote_all_identifiers = on",
        database.name()
    ));
    let (status, lines) = found(url, "--strict");
    assert_eq!(status, Some(0), "{lines:#?}");
}

#[test]
fn a_small_table_of_locks_is_named() {
    let cluster = Cluster::builder()
        .setting("max_locks_per_transaction", "10")
        .start();
    let few = line(
        &cluster.url("postgres"),
        "",
        "warn",
        "max_locks_per_transaction = 10",
    );
    assert_eq!(
        few["sql"],
        "ALTER SYSTEM SET max_locks_per_transaction = 128;"
    );
}

#[test]
fn an_old_snapshot_of_a_standby_is_named_here_and_there() {
    let cluster = healthy();
    let standby = cluster.standby();
    let mut there = Session(standby.endpoint("postgres").connect());
    there.sql("ALTER SYSTEM SET hot_standby_feedback = on");
    there.sql("ALTER SYSTEM SET wal_receiver_status_interval = '1s'");
    there.sql("SELECT pg_reload_conf()");
    there.sql("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class");
    let pid = there.pid();
    let mut here = Session(cluster.endpoint("postgres").connect());
    let age = "SELECT GREATEST((SELECT max(age(backend_xmin)) FROM pg_stat_replication),
        (SELECT max(age(xmin)) FROM pg_replication_slots), 0)";
    eventually("the standby tells its snapshot", || {
        here.sql(
            "DO $$ BEGIN FOR i IN 1 .. 1000 LOOP PERFORM pg_current_xact_id(); COMMIT; END
            LOOP; END $$",
        );
        here.number(age) > 3000
    });
    let url = cluster.url("postgres");
    let snapshot = line(
        &url,
        "--transaction-age 7m",
        "warn",
        "(hot_standby_feedback)",
    );
    let remedy = snapshot["sql"].as_str().unwrap();
    assert!(remedy.contains("interval '00:07:00'; -- on"), "{remedy}");
    let open = format!("in session {pid}");
    line(
        &standby.url("postgres"),
        "--transaction-age 0s",
        "warn",
        &open,
    );
    let (_, lines) = found(&standby.url("postgres"), "");
    let failed = |line: &&Value| {
        line["found"]
            .as_str()
            .unwrap()
            .contains("query of doctor has failed")
    };
    assert_eq!(lines.iter().filter(failed).count(), 0, "{lines:#?}");
}
