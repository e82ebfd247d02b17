//! `interlock doctor` in set-ups that a test has broken: it reports each fault, and no longer
//! reports the fault after its remedy was executed.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use diesel_interlock::{migrations, prune};
use serde_json::Value;
use workbench::{Cluster, Database, Endpoint, RoundTrips, StopMode};

use crate::support::doctor::*;
use crate::support::*;

/// A healthy server, and a database with the schema.
fn healthy_with_schema() -> (Cluster, Database) {
    let cluster = healthy();
    let database = cluster.database();
    migrations::install(&database.pool(1)).unwrap();
    (cluster, database)
}

/// A server, or a pooler, that accepts clients and then sends nothing.
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
            // AuthenticationOk and ReadyForQuery.
            let _ = client.write_all(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I");
            clients.push(client);
        }
    });
    url
}

/// Takes half a minute, which is how long the program waits for a reply.
#[test]
fn a_silent_database_is_not_waited_for_forever() {
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
fn a_good_set_up_has_no_faults_without_and_with_the_schema() {
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
fn with_strict_a_warning_is_a_failure() {
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
fn each_fault_is_reported_once_also_on_a_standby() {
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

/// Breaks an installed schema in one way after the other. Asserts that `doctor` reports each fault
/// by the word, and that its remedy repairs the fault.
#[track_caller]
fn assert_repaired(faults: &[(&str, &str)]) {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.sql("SELECT resource_control.claim_service_request('x', 1, '1 day')");
    for (fault, word) in faults {
        session.sql(fault);
        let mut status = remedied(url, url, "", "fail", word);
        // CASCADE has dropped the views that have the column.
        if status == Some(1) && *word == LACKS_COLUMN {
            status = remedied(url, url, "", "fail", "lacks ");
        }
        assert_eq!(status, Some(0), "{fault}");
    }
    migrations::check(&database.pool(1)).unwrap();
}

const LACKS_COLUMN: &str = "lacks the column";

#[test]
fn functions_that_were_changed_are_repaired() {
    assert_repaired(&[
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
    assert_repaired(&[
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
    assert_repaired(&[
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

/// Each fault breaks a promise of the schema. `doctor` reports it by the word.
#[test]
fn objects_that_are_not_as_installed_are_reported_and_repaired() {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.sql("CREATE ROLE app LOGIN; CREATE ROLE nobody");
    grant(&database, "--set=role=app");
    session.sql(
        "CREATE FUNCTION ignore() RETURNS trigger LANGUAGE plpgsql
        AS 'BEGIN RETURN NULL; END'",
    );
    for (fault, level, word) in [
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
            "TABLE fence ADD CONSTRAINT \"few only\" CHECK (token < 100)",
            "warn",
            "the constraint \"few only\" on TABLE resource_control.fence",
        ),
        (
            "TABLE once ADD UNIQUE (fingerprint)",
            "warn",
            "on TABLE resource_control.once",
        ),
        (
            "CREATE TABLE own (name text PRIMARY KEY);
             ALTER TABLE resource_control.schedule ADD FOREIGN KEY (name) REFERENCES own",
            "warn",
            "on TABLE resource_control.schedule",
        ),
        (
            "ALTER DOMAIN resource_control.slot_number ADD CONSTRAINT few CHECK (VALUE < 2)",
            "warn",
            "the constraint few on DOMAIN resource_control.slot_number",
        ),
        (
            "CREATE OR REPLACE VIEW resource_control.leader AS
                SELECT 'reports' COLLATE \"C\" AS name, details AS holder, created_at AS since,
                    expires_at AS until, id AS fencing_token
                FROM resource_control.slot_in_flight",
            "fail",
            "the view resource_control.leader is not that of this release",
        ),
        (
            "CREATE OR REPLACE VIEW resource_control.slot_in_flight AS
                SELECT r.id, r.service::text AS service, r.slot::smallint AS slot, r.created_at,
                    r.expires_at::timestamptz AS expires_at,
                    r.expires_at - clock_timestamp() AS remaining, r.details
                FROM resource_control.service_request AS r
                WHERE r.completed_at IS NULL AND r.timed_out_at IS NULL",
            "fail",
            "the view resource_control.slot_in_flight is not that of this release",
        ),
        (
            "CREATE TRIGGER ignore BEFORE UPDATE ON resource_control.fence FOR EACH ROW EXECUTE
                FUNCTION ignore()",
            "warn",
            "the trigger ignore on resource_control.fence",
        ),
        (
            "ALTER TABLE resource_control.fence DROP CONSTRAINT fences_have_names;
             ALTER TABLE resource_control.fence ADD CONSTRAINT fences_have_names
                CHECK (token < 100)",
            "fail",
            "the constraint fences_have_names on TABLE resource_control.fence is missing, or not",
        ),
        (
            "ALTER DOMAIN resource_control.slot_number DROP CONSTRAINT slots_count_from_zero",
            "fail",
            "the constraint slots_count_from_zero on DOMAIN resource_control.slot_number is",
        ),
        (
            "CREATE UNIQUE INDEX one ON resource_control.service_request (service)
                WHERE completed_at IS NULL",
            "warn",
            "the index one on resource_control.service_request",
        ),
        (
            "CREATE PUBLICATION everything FOR ALL TABLES;
             ALTER TABLE resource_control.schedule REPLICA IDENTITY NOTHING",
            "fail",
            "resource_control.schedule is published",
        ),
        (
            "TABLE fence RENAME CONSTRAINT fence_pkey TO f",
            "fail",
            "has no primary key fence_pkey (name)",
        ),
        (
            "ALTER TABLE resource_control.rate_limit DROP CONSTRAINT rate_limit_pkey;
             ALTER TABLE resource_control.rate_limit ADD PRIMARY KEY (name, key, burst)",
            "fail",
            "has no primary key rate_limit_pkey (name, key)",
        ),
        (
            "SEQUENCE service_request_id_seq RENAME TO requests",
            "fail",
            "the sequence of resource_control.service_request.id is resource_control.requests",
        ),
        (
            "TABLE fence ALTER token TYPE integer",
            "fail",
            "the column token of resource_control.fence",
        ),
        (
            "TABLE once ALTER name TYPE varchar(9) COLLATE \"default\"",
            "fail",
            "the column name of resource_control.once",
        ),
        (
            "TABLE service_request ALTER expires_at DROP DEFAULT",
            "fail",
            "the column expires_at of resource_control.service_request",
        ),
        (
            "TABLE service_request ALTER claim SET NOT NULL",
            "fail",
            "the column claim of resource_control.service_request",
        ),
        (
            "TABLE once ADD tenant integer NOT NULL",
            "fail",
            "resource_control.once has the column tenant of others",
        ),
        (
            "FUNCTION once_outcome STABLE",
            "fail",
            "resource_control.once_outcome is not that of this release",
        ),
        (
            "FUNCTION claim_service_request STRICT",
            "fail",
            "resource_control.claim_service_request is not that of this release",
        ),
        (
            "CREATE FUNCTION resource_control.lock_key(name varchar) RETURNS bigint LANGUAGE sql
                RETURN 1",
            "fail",
            "resource_control.lock_key is not that of this release",
        ),
        (
            "DROP FUNCTION resource_control.pass_fence;
             CREATE FUNCTION resource_control.pass_fence(name text, what bigint) RETURNS boolean
                LANGUAGE sql RETURN true",
            "fail",
            "resource_control.pass_fence is not that of this release",
        ),
    ] {
        session.sql(&match fault.split_once(' ') {
            Some((kind @ ("TABLE" | "VIEW" | "SEQUENCE" | "FUNCTION"), rest)) => {
                format!("ALTER {kind} resource_control.{rest}")
            }
            _ => fault.to_owned(),
        });
        // Connects as the application's role, from which row security may hide rows.
        let of_app = &database.url_with("user", "app");
        let (status, lines) = found(of_app, "--strict");
        assert_eq!(status, Some(1), "{fault}: {lines:#?}");
        let bad = lines.iter().filter(|line| line["level"] != "ok").count();
        assert_eq!(bad, 1, "{fault}: {lines:#?}");
        remedied(of_app, url, "", level, word);
        let (status, lines) = found(of_app, "--strict");
        assert_eq!(status, Some(0), "{fault}: {lines:#?}");
    }
}

/// The type of a column that a view reads cannot be changed, so the remedy drops the view first.
#[test]
fn a_column_that_a_view_reads_gets_its_type_back() {
    assert_repaired(&[(
        "DROP VIEW resource_control.schedule_state;
         ALTER TABLE resource_control.schedule ALTER token TYPE integer;
         CREATE VIEW resource_control.schedule_state AS SELECT token FROM resource_control.schedule",
        "the column token of resource_control.schedule",
    )]);
}

#[test]
fn a_view_whose_owner_may_not_read_its_table_is_named() {
    let (_cluster, database) = healthy_with_schema();
    let mut session = Session::of(&database);
    session.sql("CREATE ROLE app LOGIN; CREATE ROLE nobody");
    grant(&database, "--set=role=app");
    session.sql("ALTER VIEW resource_control.schedule_state OWNER TO nobody");
    let word = "the view resource_control.schedule_state cannot be read";
    let of_app = &database.url_with("user", "app");
    let status = remedied(of_app, &database.url(), "--strict", "fail", word);
    assert_eq!(status, Some(0));
}

/// Of a role without any right on the schema, only that is reported.
#[test]
fn a_role_that_may_not_use_the_schema_has_one_finding() {
    let (_cluster, database) = healthy_with_schema();
    Session::of(&database).sql("CREATE ROLE app LOGIN");
    let (_, lines) = found(&database.url_with("user", "app"), "--needs-schema");
    let bad: Vec<_> = lines.iter().filter(|line| line["level"] != "ok").collect();
    assert_eq!(bad.len(), 1, "{bad:#?}");
    assert!(of(&lines, "fail", "may not use all of the schema").is_some());
}

#[test]
fn what_others_have_put_into_the_schema_is_their_own() {
    let (_cluster, database) = healthy_with_schema();
    let mut session = Session::of(&database);
    session.sql("CREATE ROLE app LOGIN");
    grant(&database, "--set=role=app");
    session.sql(
        "CREATE TABLE resource_control.secret (x integer NOT NULL CHECK (x > 0));
         CREATE SEQUENCE resource_control.many CACHE 50;
         CREATE MATERIALIZED VIEW resource_control.report AS SELECT 1 AS x;
         CREATE FUNCTION resource_control.own() RETURNS integer LANGUAGE sql RETURN 1;
         REVOKE ALL ON FUNCTION resource_control.own() FROM PUBLIC, app;
         REVOKE ALL ON resource_control.secret, resource_control.many FROM app",
    );
    let (status, lines) = found(&database.url_with("user", "app"), "--strict");
    assert_eq!(status, Some(0), "{lines:#?}");
}

/// The sequence is the only place that knows the tokens of locks.
#[test]
fn a_lost_sequence_does_not_begin_again() {
    const DRAW: &str = "resource_control.next_token('resource_control.fencing_token')";
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.sql("SELECT setval('resource_control.fencing_token', 700)");
    session.sql("DROP SEQUENCE resource_control.fencing_token");
    assert_eq!(
        remedied(url, url, "", "fail", "lacks fencing_token"),
        Some(0)
    );
    assert!(session.number(DRAW) > 700);
}

/// Otherwise no program would find the schema any more.
#[test]
fn a_repair_that_fails_leaves_the_schema_installed() {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    Session::of(&database).sql(
        "DROP FUNCTION resource_control.pass_fence;
         CREATE FUNCTION resource_control.pass_fence(name text, what bigint) RETURNS boolean
            LANGUAGE sql RETURN true",
    );
    let (status, text) = printed(&mut interlock(url, "install --repair"));
    assert_eq!(status, Some(78), "{text}");
    migrations::check(&database.pool(1)).unwrap();
}

#[test]
fn a_session_that_keeps_a_table_for_itself_is_named_and_ended() {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    let mut holder = Session::of(&database);
    holder.take("held");
    let mut session = Session::of(&database);
    session.sql("BEGIN; LOCK TABLE resource_control.schedule");
    let (status, text) = printed(&mut interlock(url, "ps"));
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.contains(&id("held")) && text.contains("interlock doctor"),
        "{text}"
    );
    let (status, text) = printed(&mut interlock(url, "pause hourly"));
    assert_eq!(status, Some(78), "{text}");
    assert!(text.contains("interlock doctor"), "{text}");
    let word = format!("session {} ", session.pid());
    assert_eq!(remedied(url, url, "", "fail", &word), Some(0));
}

/// A terminal does not show all characters of a name, and without them it may be another one's.
#[test]
fn no_statement_is_printed_that_is_about_something_else() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    let mut admin = Session::of(&database);
    for (lock, gid) in [(1, "'bill 1 '"), (2, r"E'bill 1\n'")] {
        admin.sql(&format!(
            "BEGIN; SELECT pg_advisory_xact_lock({lock}); PREPARE TRANSACTION {gid}"
        ));
    }
    let (_, text) = printed(&mut interlock(url, "doctor --transaction-age 0s"));
    assert_eq!(text.matches("ROLLBACK PREPARED").count(), 1, "{text}");
    assert_eq!(
        text.matches("characters that are not shown").count(),
        1,
        "{text}"
    );
    let (_, text) = printed(&mut interlock(url, "kill 2 --number --yes"));
    let statement = &text[text.find("ROLLBACK").unwrap()..];
    admin.sql(statement);
    let of_lock = |lock: &str| {
        format!(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {lock} AND
                database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
    };
    assert_eq!(admin.number(&of_lock("1")), 1);
    assert_eq!(admin.number(&of_lock("2")), 0);
    admin.sql("ROLLBACK PREPARED 'bill 1 '");
}

#[test]
fn the_setting_of_a_role_that_becomes_another_one_is_set_back() {
    let cluster = healthy();
    let database = cluster.database();
    Session::of(&database).sql(
        "CREATE ROLE owner; CREATE ROLE app LOGIN IN ROLE owner;
         ALTER ROLE app SET role = owner; ALTER ROLE app SET idle_session_timeout = '1h'",
    );
    let url = &database.url_with("user", "app");
    let status = remedied(
        url,
        &database.url(),
        "--strict",
        "warn",
        "idle_session_timeout = ",
    );
    assert_eq!(status, Some(0));
}

/// `CREATE OR REPLACE VIEW` cannot drop a column, so the remedy drops the view first.
#[test]
fn a_view_with_other_columns_is_created_again() {
    assert_repaired(&[
        (
            "CREATE OR REPLACE VIEW resource_control.throttle_state AS
                SELECT t.name, t.key, t.is_resource, t.throttle_interval, t.last_granted,
                    t.details, t.last_granted AS due_at, true AS is_due, 7 AS seven
                FROM resource_control.throttle AS t",
            "the view resource_control.throttle_state is not that of this release",
        ),
        (
            "ALTER VIEW resource_control.slot_in_flight RENAME remaining TO rest",
            "the view resource_control.slot_in_flight is not that of this release",
        ),
    ]);
}

#[test]
fn times_of_a_clock_that_was_ahead_are_reported_and_set_back() {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.sql("ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'it''s'");
    for (fault, word) in [
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
        (
            "schedule (name, tick, started_at, expires_at)
                VALUES ('late', now(), now() + interval '1 day', now() + interval '2 days')",
            "a run of the schedule late began in the future",
        ),
    ] {
        session.sql(&format!("INSERT INTO resource_control.{fault}"));
        remedied(url, url, "", "warn", word);
        let (status, lines) = found(url, "--strict");
        assert_eq!(status, Some(0), "{fault}: {lines:#?}");
    }
    let denied = "SELECT count(*) FROM resource_control.throttle_state WHERE due_at > now() +
        interval '1 hour'";
    assert_eq!(session.number(denied), 0);
}

#[test]
fn a_token_that_nobody_has_drawn_blocks_no_other_token() {
    const DRAW: &str = "resource_control.next_token('resource_control.fencing_token')";
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
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
    // A wrong remedy may also set a sequence to such a token.
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
fn the_remedy_of_a_setting_sets_it_back() {
    let cluster = healthy();
    let database = cluster.database();
    let (url, name) = (&database.url(), database.name());
    let mut session = Session::of(&database);
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
        (
            "transaction_timeout = '1h'",
            "warn",
            "transaction_timeout = ",
        ),
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
        let known = "SELECT count(*) FROM pg_settings WHERE name = split_part";
        if session.number(&format!("{known}($${setting}$$, ' ', 1)")) == 0 {
            // This setting is new in PostgreSQL 17.
            assert!(setting.starts_with("transaction_timeout"), "{setting}");
            continue;
        }
        session.sql(&format!(
            "BEGIN READ WRITE; ALTER DATABASE {name} SET {setting}; COMMIT"
        ));
        // Under a timeout of less than a second, a query of `doctor` may time out, so it is
        // repeated.
        let mut line = Value::Null;
        eventually(word, || {
            let (_, lines) = found(url, "");
            line = of(&lines, level, word).cloned().unwrap_or_default();
            !line.is_null()
        });
        let all = paste(&line, url);
        let (status, lines) = found(url, "--strict");
        assert_eq!(status, Some(0), "{setting}, after {all}: {lines:#?}");
    }
}

/// The remedy must not alter a role for a setting of the connection.
#[test]
fn a_setting_of_the_connection_is_to_be_removed_from_the_connection() {
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
    // The database of the cluster, because dropping a database of the test would wait for the
    // missing standby.
    let database = cluster.endpoint("postgres");
    let mut session = Session(database.connect());
    session.sql("CREATE ROLE app LOGIN");
    let _standby = cluster.standby();
    let urls = [database.url(), database.url_with("user", "app")];
    let mut judged = |names: &str, level: &str, word: &str| {
        session.sql(&format!(
            "ALTER SYSTEM SET synchronous_standby_names = '{names}'"
        ));
        session.reload();
        for url in &urls {
            eventually(word, || of(&found(url, "").1, level, word).is_some());
        }
    };
    judged("", "warn", "1 standbys, and none is synchronous");
    judged("ANY 1 (*)", "ok", "1 standbys, and a commit waits for 1");
    judged("FIRST 2 (*)", "fail", "needs 2, and 1 such are connected");
    judged("any 2 (*)", "fail", "needs 2, and 1 such are connected");
    judged("*", "ok", "1 standbys, and a commit waits for 1");
}

#[test]
fn roles_that_may_connect_without_need_are_reported_and_shut_out() {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
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
    // For the role that is shut out, `doctor` has the GRANT.
    let (status, lines) = found(&database.url_with("user", "stranger"), "");
    assert_eq!(status, Some(78), "{lines:#?}");
    let why = lines[0]["why"].as_str().unwrap();
    assert!(why.starts_with("GRANT CONNECT ON DATABASE "), "{why}");
}

#[test]
fn the_remedy_of_a_missing_right_grants_it() {
    let (_cluster, database) = healthy_with_schema();
    Session::of(&database).sql("CREATE ROLE \"the app\" LOGIN");
    let url = &database.url_with("user", "the app");
    remedied(
        url,
        &database.url(),
        "--needs-schema",
        "fail",
        "may not use all of the schema",
    );
    for whose in [
        "ROLE \"the app\"".to_owned(),
        format!("DATABASE {}", database.name()),
    ] {
        Session::of(&database).sql(&format!("ALTER {whose} CONNECTION LIMIT 4"));
        remedied(
            url,
            &database.url(),
            "",
            "warn",
            &format!("connections of the {whose}"),
        );
    }
}

#[test]
fn the_remedy_of_what_holds_back_vacuum_ends_it() {
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
fn stuck_holders_of_each_kind_are_reported_and_ended() {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    let mut session = Session::of(&database);
    session.take("x");
    let mut in_transaction = Session::of(&database);
    in_transaction.sql("BEGIN; SELECT pg_advisory_xact_lock_shared(7, -12)");
    let mut admin = Session::of(&database);
    admin.sql(
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
    assert_eq!(admin.locks(true), 0);
}

#[test]
fn a_refused_connection_is_explained() {
    let cluster = healthy();
    let database = cluster.database();
    let mut session = Session::of(&database);
    session.sql("CREATE ROLE full_up LOGIN CONNECTION LIMIT 0; CREATE ROLE no_login");
    session.sql("CREATE ROLE app LOGIN");
    session.sql("CREATE DATABASE closed ALLOW_CONNECTIONS false");
    session.sql("CREATE DATABASE small CONNECTION LIMIT 0");
    for (url, status, remedy) in [
        (
            cluster.url("closed"),
            78,
            "ALTER DATABASE \"closed\" ALLOW_CONNECTIONS true;",
        ),
        (
            Endpoint::new(&cluster.url("small")).url_with("user", "app"),
            69,
            "ALTER DATABASE \"small\" CONNECTION LIMIT -1;",
        ),
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
        (
            database.url_with("options", "-c work_mem=much"),
            78,
            "correct the options",
        ),
        (
            database.url_with("gssencmode", "require"),
            78,
            "take gssencmode out of DATABASE_URL",
        ),
        (
            "postgres://app@127.0.0.1:1/app".to_owned(),
            69,
            "start the server",
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
        if remedy.ends_with(';') {
            session.sql(remedy);
            connects(&url);
        }
    }
}

#[test]
fn a_missing_standby_that_every_commit_waits_for_is_reported() {
    let cluster = healthy();
    let url = &cluster.url("postgres");
    let mut session = Session(cluster.endpoint("postgres").connect());
    session.sql("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'");
    session.reload();
    let missed = line(url, "", "fail", "needs 1, and 0 such are connected");
    paste(&missed, url);
    let setting = "SELECT current_setting('synchronous_standby_names')";
    eventually("the setting is reset", || session.text(setting).is_empty());
    let (status, lines) = found(url, "--strict");
    assert_eq!(status, Some(0), "{lines:#?}");
}

#[test]
fn a_set_up_by_the_checklist_passes_the_check_of_the_checklist() {
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
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
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
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
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
    // No other finding contradicts this one.
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
fn an_index_of_slots_with_another_definition_is_created_again() {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    let mut session = Session::of(&database);
    let name = "service_request_in_flight";
    let create = format!("INDEX {name} ON resource_control.service_request (service, slot)");
    for fault in [
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
        session.sql(&fault);
        remedied(url, url, "", "fail", name);
    }
    // `doctor` compares definitions as PostgreSQL prints them by default.
    for setting in [
        "quote_all_identifiers = on",
        "extra_float_digits = -10",
        "DateStyle = german",
        "IntervalStyle = iso_8601",
    ] {
        session.sql(&format!("ALTER DATABASE {} SET {setting}", database.name()));
    }
    let (status, lines) = found(url, "--strict");
    assert_eq!(status, Some(0), "{lines:#?}");
}

#[test]
fn what_is_nearly_used_up_has_room_after_a_restart() {
    let cluster = Cluster::builder()
        .setting("max_locks_per_transaction", "10")
        .setting("max_connections", "20")
        .start();
    let url = &cluster.url("postgres");
    let load = || {
        let mut sessions: Vec<_> = (0..14)
            .map(|_| Session(cluster.endpoint("postgres").connect()))
            .collect();
        sessions[0].sql("SELECT count(pg_advisory_lock(n)) FROM generate_series(1, 150) AS n");
        sessions
    };
    let sessions = load();
    for word in [
        "places in the table of locks are used (max_locks_per_transaction = 10)",
        "of 17 connections are used",
    ] {
        paste(&line(url, "", "warn", word), url);
    }
    drop(sessions);
    cluster.restart(StopMode::Fast);
    let _sessions = load();
    let (status, lines) = found(url, "--strict");
    assert_eq!(status, Some(0), "{lines:#?}");
}

#[test]
fn the_primary_is_found_from_a_standby_and_commits_wait_for_it() {
    let cluster = healthy();
    let standby = cluster.standby();
    let url = &standby.url("postgres");
    let word = "the server is a standby";
    let why = line(url, "", "fail", word)["why"].clone();
    let attributes = "name all hosts in DATABASE_URL, and add target_session_attrs=read-write";
    assert!(why.as_str().unwrap().ends_with(attributes), "{why}");
    for attributes in ["read-write", "primary"] {
        let only = Endpoint::new(url).url_with("target_session_attrs", attributes);
        let (status, lines) = found(&only, "");
        assert_eq!(status, Some(69), "{lines:#?}");
        assert_eq!(lines[0]["why"], "connect to the primary", "{lines:#?}");
    }
    let directories = [&standby, &cluster].map(|one| one.directory().display().to_string());
    let both = Endpoint::new(url).url_with("host", &directories.join(","));
    let both = &Endpoint::new(&both).url_with("target_session_attrs", "read-write");
    let (status, lines) = found(both, "");
    assert_eq!(status, Some(0), "{lines:#?}");

    let asynchronous = "1 standbys, and none is synchronous";
    let mut looked = Value::Null;
    eventually("the standby follows", || {
        looked = of(&found(both, "").1, "warn", asynchronous)
            .cloned()
            .unwrap_or_default();
        !looked.is_null()
    });
    paste(&looked, both);
    eventually("commits wait for it", || {
        found(both, "--strict").0 == Some(0)
    });
}

#[test]
fn a_database_of_another_encoding_has_a_new_one_beside_it() {
    let cluster = healthy();
    Session(cluster.endpoint("postgres").connect())
        .sql("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0");
    let latin = &cluster.url("latin");
    paste(&line(latin, "", "fail", "is LATIN1"), latin);
    let new = &cluster.url("latin_utf8");
    assert_eq!(status(&mut interlock(new, "install")), Some(0));
    let (status, lines) = found(new, "--strict");
    assert_eq!(status, Some(0), "{lines:#?}");
}

#[test]
fn ids_of_requests_that_were_not_copied_go_on() {
    let (_cluster, database) = healthy_with_schema();
    let url = &database.url();
    let mut session = Session::of(&database);
    let mut claimed = 0;
    for fault in [
        "TABLE resource_control.service_request ALTER id DROP IDENTITY",
        "SEQUENCE resource_control.service_request_id_seq RESTART",
    ] {
        session.sql("SELECT resource_control.claim_service_request('x', 9, '1 day')");
        session.sql(&format!("ALTER {fault}"));
        if fault.starts_with("TABLE") {
            remedied(url, url, "", "fail", "service_request.id is no identity");
        }
        remedied(url, url, "", "fail", "the ids of requests, which are");
        let (status, lines) = found(url, "--strict");
        assert_eq!(status, Some(0), "{lines:#?}");
        session.sql("SELECT resource_control.claim_service_request('x', 9, '1 day')");
        let newest = session.number("SELECT max(id) FROM resource_control.slot_in_flight");
        assert!(newest > claimed, "{newest} after {claimed}");
        claimed = newest;
    }
    assert_eq!(
        session.number("SELECT count(DISTINCT id) FROM resource_control.slot_in_flight"),
        4
    );
}

/// The tables of which rows are left, by more than a million of them, and by what PostgreSQL
/// believes.
#[test]
fn tables_that_nobody_prunes_are_named_until_they_are_pruned() {
    let cluster = healthy();
    let database = cluster.database();
    let url = &database.url();
    let pool = &database.pool(1);
    migrations::install(pool).unwrap();
    let mut session = Session::of(&database);
    let many = "had 1000001 rows at its last ANALYZE";
    session.sql(
        "INSERT INTO resource_control.once (name, key, outcome)
            SELECT 'charge', n::text, '' FROM generate_series(1, 1000001) AS n;
         ANALYZE resource_control.once",
    );
    let why = line(url, "", "warn", &format!("once {many}"))["why"].clone();
    let why = why.as_str().unwrap();
    assert!(why.contains("diesel_interlock::prune::once "), "{why}");
    assert_eq!(prune::once(pool, Duration::ZERO).unwrap(), 1_000_001);
    session.sql("ANALYZE resource_control.once");
    assert_eq!(found(url, "--strict").0, Some(0));
    for (table, function) in [
        ("throttle", "throttles"),
        ("rate_limit", "rate_limits"),
        ("service_request", "requests"),
    ] {
        session.sql(&format!(
            "UPDATE pg_class SET reltuples = 1000001
                WHERE oid = 'resource_control.{table}'::regclass"
        ));
        let why = line(url, "", "warn", &format!("{table} {many}"))["why"].clone();
        let why = why.as_str().unwrap();
        assert!(why.contains(&format!("::prune::{function} ")), "{why}");
        session.sql(&format!("ANALYZE resource_control.{table}"));
        assert_eq!(found(url, "--strict").0, Some(0));
    }
}

#[test]
fn a_transaction_that_a_round_trip_would_end_is_named_and_cured() {
    let (_cluster, database) = healthy_with_schema();
    Session::of(&database).sql(
        "CREATE ROLE app LOGIN; ALTER ROLE app SET idle_in_transaction_session_timeout = '1ms'",
    );
    grant(&database, "--set=role=app");
    let slow = RoundTrips::in_front_of(&Endpoint::new(&database.url_with("user", "app")));
    slow.set_delay(Duration::from_millis(20), Duration::ZERO);
    let word = "idle_in_transaction_session_timeout = 1ms";
    let status = remedied(&slow.url(), &database.url(), "--strict", "warn", word);
    assert_eq!(status, Some(0));
}

#[test]
fn an_old_snapshot_of_a_standby_is_named_here_and_there() {
    let cluster = healthy();
    let standby = cluster.standby();
    let mut there = Session(standby.endpoint("postgres").connect());
    there.sql("ALTER SYSTEM SET hot_standby_feedback = on");
    there.sql("ALTER SYSTEM SET wal_receiver_status_interval = '1s'");
    there.reload();
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
    let of_standby = &standby.url("postgres");
    let open = format!("in session {pid}");
    line(of_standby, "--transaction-age 0s", "warn", &open);
    let (_, lines) = found(of_standby, "");
    let failed = of(&lines, "warn", "query of doctor has failed");
    assert!(failed.is_none(), "{lines:#?}");
    let now = line(
        &url,
        "--transaction-age 0s",
        "warn",
        "(hot_standby_feedback)",
    );
    paste(&now, of_standby);
    eventually("the standby tells that it has none", || {
        of(&found(&url, "").1, "warn", "(hot_standby_feedback)").is_none()
    });
}
