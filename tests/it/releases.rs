//! Programs of one release on the schema of another.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::error::Schema;
use diesel_interlock::{Error, Semaphore, Throttle, migrations, sync, throttled_resources};
use workbench::Database;

use crate::adoption::catalogue;
use crate::installation::{directories, versions};
use crate::support::{assert_matches, attempt, is_granted};

throttled_resources! {
    enum Resource { Mail = "mail" every Duration::from_secs(1) }
}

/// What a newer release may have added.
const NEWER: &str = "
    INSERT INTO resource_control.installed_migration VALUES ('20990101000001');
    ALTER TABLE resource_control.throttled_resource ADD note text, ADD tries int NOT NULL DEFAULT 0;
    ALTER TABLE resource_control.throttled_key ADD tries int NOT NULL DEFAULT 0;
    ALTER TABLE resource_control.service_request ADD priority int NOT NULL DEFAULT 0;
    ALTER TABLE resource_control.installed_migration ADD run_by text DEFAULT current_user;
    CREATE TABLE resource_control.queue (id int);
    CREATE FUNCTION resource_control.attempt_throttled_resource_2(text) RETURNS int LANGUAGE sql AS 'SELECT 1';";

/// Runs the first migrations, as an older release did.
fn install_first(conn: &mut PgConnection, count: usize) {
    for directory in &directories()[..count] {
        let up = std::fs::read_to_string(directory.join("up.sql")).unwrap();
        conn.batch_execute(&up).unwrap();
    }
}

#[test]
fn an_old_program_runs_on_a_new_schema() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.batch_execute(NEWER).unwrap();
    let before = catalogue(conn);
    assert_eq!(migrations::install(conn).unwrap(), []);
    assert_eq!(catalogue(conn), before);
    assert_eq!(sync::<Resource>(conn).unwrap().added, ["mail"]);
    let mail = Throttle::of(Resource::Mail);
    for throttle in [mail.clone(), mail.key(7)] {
        assert!(is_granted(conn, &throttle, "me"));
        assert!(!is_granted(conn, &throttle, "me"));
    }
    let geocoder = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    let claim = geocoder.claim_on(conn).unwrap().admitted().unwrap();
    assert!(geocoder.renew_on(conn, claim.id).unwrap().is_some());
    assert!(geocoder.complete_on(conn, claim.id).unwrap());
    conn.batch_execute(
        "SELECT resource_control.prune_throttled_keys(10);
         SELECT resource_control.renew_service_request(id, '1 s'), resource_control.complete_service_request(id)
            FROM resource_control.claim_service_request('geocoder', 4, '1 s');
         SELECT resource_control.prune_service_requests('0', 10)",
    )
    .unwrap();
}

#[test]
fn an_old_program_that_installs_something_first_still_leaves_what_is_newer() {
    let database = Database::new();
    let conn = &mut database.connect();
    install_first(conn, 2);
    conn.batch_execute(
        "INSERT INTO resource_control.installed_migration VALUES ('20990101000001')",
    )
    .unwrap();
    let ran = migrations::install(conn).unwrap();
    assert_eq!(ran.len(), versions().len() - 2);
    assert_eq!(migrations::install(conn).unwrap(), []);
}

#[test]
fn a_new_program_on_an_old_schema_says_so() {
    let database = Database::new();
    let conn = &mut database.connect();
    let key = Throttle::of(Resource::Mail).key(7);
    let refused = |conn: &mut PgConnection| {
        let refused = key.details("me").attempt_on(conn);
        assert_matches!(refused, Err(Error::Schema(Schema::NotInstalled)));
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("migrations::install"), "{message}");
    };
    refused(conn);
    install_first(conn, 2);
    let _ = sync::<Resource>(conn).unwrap();
    refused(conn);
    let claim = Semaphore::named("geocoder", 4, Duration::from_secs(30)).claim_on(conn);
    assert_matches!(claim, Err(Error::Schema(Schema::NotInstalled)));
    // What is there works, until somebody may install the rest.
    let _ = attempt(conn, &Throttle::of(Resource::Mail), "me");
    migrations::install(conn).unwrap();
    let _ = attempt(conn, &key, "me");
}

#[test]
fn install_runs_what_an_older_release_lacks() {
    for count in 0..versions().len() {
        let database = Database::new();
        let conn = &mut database.connect();
        install_first(conn, count);
        let ran: Vec<_> = migrations::install(conn).unwrap();
        let ran: Vec<_> = ran.iter().map(ToString::to_string).collect();
        assert_eq!(ran, versions()[count..]);
    }
}
