//! Installing the schema, by `migrations::install` and by the migration files.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use workbench::Database;

use crate::assert_matches;
use crate::half::*;
use crate::support::{Observer, Role, assert_pool_whole, eventually, number, run, text, truth};

const RECORDED: &str = "(SELECT count(*) FROM resource_control.installed_migration)";

/// The directories of the migrations, in their order.
fn directories() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let entries = std::fs::read_dir(root).unwrap();
    let mut all: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    all.sort();
    all
}

fn file(directory: &Path, name: &str) -> String {
    std::fs::read_to_string(directory.join(name)).unwrap()
}

/// Every object of the schema with its columns and the text of views and functions.
fn catalogue(conn: &mut PgConnection) -> String {
    text(
        conn,
        "(SELECT string_agg(o, E'\\n' ORDER BY o) FROM (
            SELECT c.relname || ' ' || c.relkind::text || ' ' || COALESCE(pg_get_viewdef(c.oid), '') || ' ' || COALESCE((SELECT string_agg(
                a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || ' ' || a.attnotnull, ', ' ORDER BY a.attnum)
                FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0), '')
                FROM pg_class AS c WHERE c.relnamespace = 'resource_control'::regnamespace
            UNION ALL SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p WHERE p.pronamespace = 'resource_control'::regnamespace
            UNION ALL SELECT pg_get_constraintdef(k.oid) FROM pg_constraint AS k WHERE k.connamespace = 'resource_control'::regnamespace
        ) AS all_of_it (o))",
    )
}

#[test]
fn a_second_installation_changes_nothing() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let conn = &mut database.connect();
    wait(migrations::install(&pool)).unwrap();
    assert_eq!(number(conn, RECORDED), directories().len() as i64);
    let before = catalogue(conn);
    wait(migrations::install(&pool)).unwrap();
    assert_eq!(catalogue(conn), before);
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn a_check_changes_nothing_and_says_what_is_missing() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let conn = &mut database.connect();
    let check = || wait(migrations::check(&pool));
    assert_matches!(check(), Err(Error::NotInstalled));
    assert_eq!(
        text(conn, "to_regnamespace('resource_control') IS NULL"),
        "true"
    );
    wait(migrations::install(&pool)).unwrap();
    check().unwrap();
    run(conn, "DROP TABLE resource_control.fence");
    assert_matches!(check(), Err(Error::Incomplete { .. }));
    run(
        conn,
        "DELETE FROM resource_control.installed_migration WHERE version = '20000101000001'",
    );
    assert_matches!(check(), Err(Error::NotInstalled));
    wait(migrations::install(&pool)).unwrap();
    check().unwrap();
}

#[test]
fn over_two_idle_connections_the_check_of_exclusion_leaves_nothing() {
    let database = Database::new();
    let pool = pool(&database, 2);
    wait(on_all(&pool, "SELECT 1")).unwrap();
    wait(migrations::install(&pool)).unwrap();
    assert_pool_whole(&pool, &database);
}

#[test]
fn twenty_instances_install_at_once_under_every_default_isolation_level() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = Database::new();
        let conn = &mut database.connect();
        let name = database.name();
        run(
            conn,
            &format!("ALTER DATABASE {name} SET default_transaction_isolation = '{level}'"),
        );
        let start = Barrier::new(20);
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    let pool = pool(&database, 1);
                    start.wait();
                    wait(migrations::install(&pool)).unwrap();
                });
            }
        });
        assert_eq!(number(conn, RECORDED), directories().len() as i64);
        let mut observer = Observer::of(&database);
        assert_eq!((observer.all_held(), observer.in_transaction()), (0, 0));
    }
}

#[test]
fn missing_objects_are_repaired_by_the_statement_in_the_message() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let conn = &mut database.connect();
    wait(migrations::install(&pool)).unwrap();
    let whole = catalogue(conn);
    run(
        conn,
        "INSERT INTO resource_control.fence VALUES ('kept', 7)",
    );
    for damage in [
        "DROP TABLE resource_control.rate_limit, resource_control.once CASCADE",
        "DROP FUNCTION resource_control.lock_throttled_resource; DROP FUNCTION resource_control.lock_key",
        "DROP VIEW resource_control.leader",
        "DROP INDEX resource_control.service_request_in_flight",
        "DROP SEQUENCE resource_control.fencing_token",
        "DROP TYPE resource_control.throttled_resource_enum CASCADE; DROP TABLE resource_control.throttled_resource",
        // CASCADE drops the columns of the type, and leaves the table.
        "DROP TYPE resource_control.throttled_resource_enum CASCADE",
        "DROP DOMAIN resource_control.service_name CASCADE",
        "DROP DOMAIN resource_control.slot_number CASCADE",
        "DROP DOMAIN resource_control.request_expiry CASCADE",
        "DROP TABLE resource_control.service_request, resource_control.schedule, resource_control.throttle CASCADE",
    ] {
        run(conn, damage);
        let refused = wait(migrations::install(&pool));
        assert_matches!(refused, Err(Error::Incomplete { .. }));
        let message = refused.unwrap_err().to_string();
        let (_, repair) = message.split_once("run ").unwrap();
        let (repair, _) = repair.split_once(" and install again").unwrap();
        run(conn, repair);
        wait(migrations::install(&pool)).unwrap();
    }
    assert_eq!(catalogue(conn), whole);
    assert_eq!(
        number(conn, "(SELECT token FROM resource_control.fence)"),
        7
    );
}

/// Operators set these timeouts for the statements of an application. An installation waits for
/// another instance for as long as that takes.
#[test]
fn no_timeout_of_a_role_ends_an_installation_that_waits_for_another() {
    let by_role = |database: &Database, timeout: &str| {
        let name = database.name();
        run(
            &mut database.connect(),
            &format!("ALTER DATABASE {name} SET {timeout} = '500ms'"),
        );
        pool(database, 1)
    };
    let by_session = |database: &Database, timeout: &str| {
        let url = database.url_with("options", &format!("-c {timeout}=500ms"));
        make_pool(&url, 1, Duration::from_secs(20))
    };
    let knows = |name: &str| {
        let known = format!("EXISTS (SELECT FROM pg_settings WHERE name = '{name}')");
        truth(&mut Database::new().connect(), &known)
    };
    let tried = |pool_of: fn(&Database, &str) -> PgPool, timeout: &str| {
        let database = Database::new();
        let (mut holder, admin) = (database.connect(), &mut database.connect());
        run(
            &mut holder,
            "BEGIN; SELECT pg_advisory_xact_lock(20000101000000)",
        );
        std::thread::scope(|scope| {
            let installs = scope.spawn(|| wait(migrations::install(&pool_of(&database, timeout))));
            let has_waited = "(SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database()
                AND wait_event_type = 'Lock' AND query_start < clock_timestamp() - interval '1500 ms')";
            eventually("the installation waits for three times the timeout", || {
                assert!(!installs.is_finished(), "{timeout}");
                truth(admin, has_waited)
            });
            run(&mut holder, "COMMIT");
            installs.join().unwrap().unwrap();
        });
        assert_eq!(number(admin, RECORDED), directories().len() as i64);
        // Afterwards the session has the timeout of its role again.
        let pool = pool_of(&database, timeout);
        wait(migrations::install(&pool)).unwrap();
        let own = format!("DO $$ BEGIN ASSERT current_setting('{timeout}') = '500ms'; END $$");
        wait(on_all(&pool, &own)).unwrap();
    };
    let timeouts = ["lock_timeout", "statement_timeout", "transaction_timeout"];
    std::thread::scope(|scope| {
        for timeout in timeouts.into_iter().filter(|name| knows(name)) {
            for pool_of in [by_role as fn(&Database, &str) -> PgPool, by_session] {
                scope.spawn(move || tried(pool_of, timeout));
            }
        }
    });
}

#[test]
fn for_a_role_without_rights_a_second_installation_succeeds() {
    let database = Database::new();
    let role = Role::new(&database);
    let own = make_pool(role.url(), 1, Duration::from_secs(20));
    let conn = &mut database.connect();

    assert_matches!(
        wait(migrations::install(&own)),
        Err(Error::Migration { .. })
    );
    assert_eq!(
        number(
            conn,
            "(SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control')"
        ),
        0
    );
    wait(migrations::install(&pool(&database, 1))).unwrap();
    assert_matches!(wait(migrations::install(&own)), Err(Error::Database(_)));
    run(
        conn,
        &format!(
            "GRANT USAGE ON SCHEMA resource_control TO {name}; GRANT SELECT ON resource_control.installed_migration TO {name}",
            name = role.name()
        ),
    );
    wait(migrations::install(&own)).unwrap();

    run(
        conn,
        "DELETE FROM resource_control.installed_migration WHERE version = (SELECT max(version) FROM resource_control.installed_migration)",
    );
    let refused = wait(migrations::install(&own));
    assert_matches!(refused, Err(Error::Migration { .. }));
}

#[test]
fn a_role_that_owns_an_empty_schema_may_install() {
    let database = Database::new();
    let role = Role::new(&database);
    run(
        &mut database.connect(),
        &format!(
            "CREATE SCHEMA resource_control AUTHORIZATION {}",
            role.name()
        ),
    );
    let own = make_pool(role.url(), 1, Duration::from_secs(20));
    wait(migrations::install(&own)).unwrap();
    assert!(
        wait(Throttle::named("t", Duration::from_secs(60)).attempt(&own))
            .unwrap()
            .is_granted()
    );
}

#[test]
fn in_a_read_only_session_a_second_installation_succeeds() {
    let database = Database::new();
    let read_only = database.url_with("options", "-c default_transaction_read_only=on");
    let read_only = make_pool(&read_only, 1, Duration::from_secs(20));
    assert_matches!(wait(migrations::install(&read_only)), Err(Error::Standby));
    wait(migrations::install(&pool(&database, 1))).unwrap();
    wait(migrations::install(&read_only)).unwrap();
}

#[test]
fn a_database_with_another_encoding_is_refused() {
    let database = Database::with_encoding("LATIN1");
    let refused = wait(migrations::install(&pool(&database, 1)));
    assert_matches!(refused, Err(Error::Encoding(encoding)) if encoding == "LATIN1");
}

#[test]
fn a_file_that_fails_leaves_nothing_and_says_why() {
    let database = Database::new();
    let conn = &mut database.connect();
    run(
        conn,
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF pg_catalog.to_regclass('resource_control.throttle') IS NOT NULL THEN RAISE 'no changes on Fridays'; END IF; END $$; \
         CREATE EVENT TRIGGER refuse ON ddl_command_end EXECUTE FUNCTION refuse()",
    );
    let pool = pool(&database, 1);
    let failed = wait(migrations::install(&pool));
    assert_matches!(
        failed,
        Err(Error::Migration {
            version: "20000101000001",
            ..
        })
    );
    assert!(
        failed
            .unwrap_err()
            .to_string()
            .contains("no changes on Fridays")
    );
    assert_eq!(
        text(conn, "to_regnamespace('resource_control') IS NULL"),
        "true"
    );
    assert_eq!(Observer::of(&database).in_transaction(), 0);
    run(conn, "DROP EVENT TRIGGER refuse");
    wait(migrations::install(&pool)).unwrap();
}

#[test]
fn objects_of_the_same_names_ahead_in_the_search_path_are_not_used() {
    let database = Database::new();
    let conn = &mut database.connect();
    let name = database.name();
    run(conn, &format!(
        "CREATE SCHEMA evil;
         CREATE FUNCTION evil.refuse(text, text) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE $$evil$$; END';
         CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.refuse);
         CREATE FUNCTION evil.to_regclass(text) RETURNS regclass LANGUAGE sql AS 'SELECT NULL::regclass';
         CREATE FUNCTION evil.unnest(text[]) RETURNS SETOF text LANGUAGE sql AS 'SELECT $$evil$$';
         CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT $$-infinity$$::timestamptz';
         CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT $$-infinity$$::timestamptz';
         CREATE TABLE evil.pg_class (evil int); CREATE TABLE evil.pg_proc (evil int); CREATE DOMAIN evil.text AS int;
         ALTER DATABASE {name} SET search_path = evil, pg_catalog"
    ));
    let pool = pool(&database, 2);
    for _ in 0..2 {
        wait(migrations::install(&pool)).unwrap();
    }
    run(
        conn,
        "SELECT resource_control.claim_service_request('geocoder', 1, '1 s'), resource_control.pass_fence('f', 1)",
    );
    assert_eq!(
        number(
            conn,
            "(SELECT pg_catalog.count(*) FROM pg_catalog.pg_depend AS d JOIN pg_catalog.pg_proc AS p ON p.oid OPERATOR(pg_catalog.=) d.refobjid \
        WHERE p.pronamespace OPERATOR(pg_catalog.=) 'evil'::pg_catalog.regnamespace AND d.classid OPERATOR(pg_catalog.<>) 'pg_catalog.pg_operator'::pg_catalog.regclass)"
        ),
        0
    );
}

#[test]
fn an_installation_keeps_the_migrations_of_a_newer_release_and_adds_missing_ones() {
    for older in 0..=directories().len() {
        let database = Database::new();
        let conn = &mut database.connect();
        for directory in &directories()[..older] {
            run(conn, &file(directory, "up.sql"));
        }
        if older > 0 {
            run(
                conn,
                "INSERT INTO resource_control.installed_migration (version) VALUES ('20990101000001')",
            );
        }
        wait(migrations::install(&pool(&database, 1))).unwrap();
        let newer = i64::from(older > 0);
        assert_eq!(number(conn, RECORDED), directories().len() as i64 + newer);
    }
}

#[test]
fn running_each_down_file_in_reverse_order_leaves_nothing() {
    let database = Database::new();
    let conn = &mut database.connect();
    let before = number(conn, "(SELECT count(*) FROM pg_depend)");
    for _ in 0..2 {
        for directory in directories() {
            // The second run changes nothing.
            run(conn, &file(&directory, "up.sql"));
            run(conn, &file(&directory, "up.sql"));
        }
        for directory in directories().iter().rev() {
            run(conn, &file(directory, "down.sql"));
        }
        assert_eq!(
            number(
                conn,
                "(SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control')"
            ),
            0
        );
        assert_eq!(number(conn, "(SELECT count(*) FROM pg_depend)"), before);
    }
}

#[test]
fn after_the_schema_was_dropped_it_is_installed_anew() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let conn = &mut database.connect();
    wait(migrations::install(&pool)).unwrap();
    let before = catalogue(conn);
    run(conn, "DROP SCHEMA resource_control CASCADE");
    wait(migrations::install(&pool)).unwrap();
    assert_eq!(catalogue(conn), before);
}

#[test]
fn psql_runs_the_files_one_by_one_and_install_finds_nothing_to_do() {
    let database = Database::new();
    for directory in directories() {
        let output = Command::new("psql")
            .args(["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--file"])
            .arg(directory.join("up.sql"))
            .arg(database.url())
            .output();
        let Ok(output) = output else {
            eprintln!("no psql here: not tried");
            return;
        };
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
    }
    let read_only = database.url_with("options", "-c default_transaction_read_only=on");
    wait(migrations::install(&make_pool(
        &read_only,
        1,
        Duration::from_secs(20),
    )))
    .unwrap();
}

#[test]
fn files_are_written_once_and_are_those_of_the_repository() {
    let target =
        std::env::temp_dir().join(format!("interlock-write-{}-{IS_ASYNC}", std::process::id()));
    let written = migrations::write_to(&target).unwrap();
    assert_eq!(written.len(), directories().len());
    for (written, own) in written.iter().zip(directories()) {
        assert_eq!(written.file_name(), own.file_name());
        for name in ["up.sql", "down.sql"] {
            assert_eq!(file(written, name), file(&own, name));
        }
    }
    assert!(migrations::write_to(&target).unwrap().is_empty());
    // As after a release that has added a file, or a disk that was full.
    std::fs::remove_file(written[0].join("down.sql")).unwrap();
    assert_eq!(migrations::write_to(&target).unwrap(), written[..1]);
    std::fs::remove_dir_all(&written[0]).unwrap();
    assert_eq!(migrations::write_to(&target).unwrap(), written[..1]);
    std::fs::remove_dir_all(target).unwrap();
}

#[test]
fn a_role_with_the_grants_may_do_everything_but_declare_labels() {
    throttled_resources! {
        enum Resource { Mail = "mail" every Duration::from_secs(60) }
    }
    throttled_resources! {
        enum Other { Import = "import" every Duration::from_secs(60) }
    }
    let database = Database::new();
    let role = Role::new(&database);
    let owner = pool(&database, 1);
    wait(on_all(
        &owner,
        "ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
        ALTER DEFAULT PRIVILEGES REVOKE USAGE ON TYPES FROM PUBLIC",
    ))
    .unwrap();
    wait(migrations::install(&owner)).unwrap();
    let _ = wait(Throttle::sync::<Resource>(&owner)).unwrap();
    if !role.grant() {
        return;
    }
    let own = &make_pool(role.url(), 2, Duration::from_secs(20));
    wait(migrations::install(own)).unwrap();
    let _ = wait(Throttle::sync::<Resource>(own)).unwrap();
    assert!(wait(Throttle::sync::<Other>(own)).is_err());
    for throttle in [
        Throttle::of(Resource::Mail),
        Throttle::of(Resource::Mail).key(7),
        Throttle::named("t", Duration::from_secs(60)),
    ] {
        assert!(wait(throttle.attempt(own)).unwrap().is_granted());
    }
    wait(prune::throttles(own)).unwrap();
    let semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    let permit = wait(semaphore.try_acquire(own))
        .unwrap()
        .admitted()
        .unwrap();
    wait(permit.release()).unwrap();
    let limit = RateLimit::named("api", Quota::per_day(24));
    assert!(wait(limit.check(own)).unwrap().is_allowed());
    wait(limit.reset(own)).unwrap();
    let done: Result<Done> = on_one(own, |conn| {
        wait(Once::named("o").run(conn, work!(|_conn| Ok("done"))))
    });
    assert!(done.unwrap().is_first());
    assert_eq!(wait(prune::once(own, Duration::ZERO)).unwrap(), 1);
    let mut guard = wait(AdvisoryLock::named("roles").acquire(own)).unwrap();
    let token = wait(guard.fencing_token()).unwrap();
    wait(guard.release()).unwrap();
    let conn = &mut role.connect();
    run(
        conn,
        &format!("SELECT resource_control.pass_fence('f', {token})"),
    );
    for view in [
        "advisory_lock",
        "slot_in_flight",
        "throttle_state",
        "rate_limit_state",
        "leader",
        "schedule_state",
    ] {
        run(conn, &format!("SELECT * FROM resource_control.{view}"));
    }
    assert!(
        conn.batch_execute("DELETE FROM resource_control.installed_migration")
            .is_err()
    );
}
