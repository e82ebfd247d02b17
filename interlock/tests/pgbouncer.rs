//! `interlock` behind PgBouncer of any version.

mod support;

use workbench::{Cluster, PgBouncer, PoolMode};

use self::support::*;

#[test]
fn a_permit_works_and_doctor_names_the_pooler() {
    let database = installed();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 3);
    let url = &pooler.url();
    let mut session = Session::of(&database);
    let mut running = Running::start(&mut run(url, "x --lease 12s", UNTIL_TERM));
    assert_eq!(running.line(), "ready");
    let renewed = "SELECT count(*) FROM resource_control.slot_in_flight
        WHERE expires_at > created_at + interval '13 s'";
    eventually("the permit was renewed", || session.number(renewed) == 1);
    assert_eq!(status(&mut run(url, "x --lease 12s", "true")), Some(73));
    running.signal("TERM");
    assert_eq!(running.status(), Some(9));
    let in_flight = "SELECT count(*) FROM resource_control.slot_in_flight";
    assert_eq!(session.number(in_flight), 0);

    assert_eq!(status(&mut interlock(url, "ps")), Some(0));
    assert_eq!(status(&mut interlock(url, "install")), Some(0));
    let (status, text) = printed(&mut interlock(url, "doctor"));
    assert_eq!(status, Some(1), "{text}");
    let found = "fail  session locks exclude nobody on this pool";
    assert!(text.contains(found), "{text}");
    let (status, text) = printed(&mut interlock(&database.url(), "doctor"));
    assert_eq!(status, Some(0), "{text}");

    // Without --lease the command does not run, and no lock is left.
    let (status, text) = printed(&mut run(url, "x", "echo ran"));
    assert_eq!(status, Some(78), "{text}");
    assert!(
        !text.contains("ran\n") && text.contains("--lease"),
        "{text}"
    );
    assert_eq!(session.locks(true), 0);
}

#[test]
fn behind_a_pooler_in_session_mode_everything_works() {
    let cluster = Cluster::builder()
        .setting("client_connection_check_interval", "10s")
        .setting("idle_in_transaction_session_timeout", "5min")
        .start();
    let database = cluster.database();
    diesel_interlock::migrations::install(&database.pool(1)).unwrap();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Session, 8);
    let url = &pooler.url();
    let (status, text) = printed(&mut interlock(url, "doctor --strict --needs-schema"));
    assert_eq!(status, Some(0), "{text}");
    assert!(!text.contains("warn"), "{text}");
    for line in ["x", "x --lease 30s"] {
        let (status, text) = printed(&mut run(url, line, "exit 5"));
        assert_eq!(status, Some(5), "{text}");
    }
    assert_eq!(Session::of(&database).locks(true), 0);
}

#[test]
fn doctor_works_over_one_or_two_sessions_of_the_pooler() {
    let database = installed();
    for (sessions, word) in [
        (
            1,
            "warn  it could not be checked whether session locks exclude",
        ),
        (2, "ok    session locks exclude"),
    ] {
        let pooler = PgBouncer::in_front_of(&database, PoolMode::Session, sessions);
        let (status, text) = printed(&mut interlock(&pooler.url(), "doctor --needs-schema"));
        assert_eq!(status, Some(0), "{text}");
        for found in [word, "ok    the schema resource_control is complete"] {
            assert!(text.contains(found), "{text}");
        }
    }
}

#[test]
fn commands_do_not_change_the_search_path_of_other_clients_of_the_pooler() {
    let database = installed();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 1);
    let url = &pooler.url();
    for line in [
        "ps",
        "doctor",
        "install",
        "run x --lease 30s -- true",
        "kill x --yes",
        "run x -- true",
    ] {
        printed(&mut interlock(url, line));
    }
    let other = &mut workbench::Endpoint::new(url).connect();
    let path = diesel::dsl::sql::<diesel::sql_types::Text>("current_setting('search_path')");
    let path: String = diesel::RunQueryDsl::get_result(diesel::select(path), other).unwrap();
    assert_eq!(path, "\"$user\", public");
}
