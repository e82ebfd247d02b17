//! The schema, by files and by `install`, and what programs add to it.

use std::process::Command;
use std::sync::Barrier;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::error::{Input, Misplaced, Schema};
use diesel_interlock::{
    DeclaredResources, Error, ThrottledResource, migrations, sync, sync_intervals,
    throttled_resources,
};
use workbench::Database;

use crate::keys::short_names;
use crate::roles::{Role, server};
use crate::support::{Observer, assert_matches, backend_pid, truth};

throttled_resources! {
    enum Resource {
        One = "one" every Duration::from_secs(1),
        Quoted = "it's \\ \"two\"" every Duration::from_micros(1),
    }
}

#[derive(QueryableByName)]
struct Number {
    #[diesel(sql_type = diesel::sql_types::BigInt)]
    number: i64,
}

pub(crate) fn number(conn: &mut PgConnection, sql: &str) -> i64 {
    diesel::sql_query(format!("SELECT ({sql})::bigint AS number"))
        .get_result::<Number>(conn)
        .unwrap()
        .number
}

/// What `pg_dump` prints, or `None` if there is no `pg_dump` for the major version of the server.
pub(crate) fn pg_dump(arguments: &[&str], conn: &mut PgConnection, url: &str) -> Option<String> {
    let Ok(version) = Command::new("pg_dump").arg("--version").output() else {
        eprintln!("no pg_dump here: not tried");
        return None;
    };
    let version = String::from_utf8(version.stdout).unwrap();
    let major = number(
        conn,
        "SELECT current_setting('server_version_num')::int / 10000",
    );
    if !version.contains(&format!(" {major}.")) {
        eprintln!("{version} does not dump PostgreSQL {major}: not tried");
        return None;
    }
    let dump = Command::new("pg_dump").args(arguments).arg(url).output();
    let dump = dump.unwrap();
    assert!(dump.status.success(), "{dump:?}");
    Some(String::from_utf8(dump.stdout).unwrap())
}

pub(crate) fn directories() -> Vec<std::path::PathBuf> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let mut directories: Vec<_> = std::fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    directories.sort();
    directories
}

/// The versions of our migrations, in their order.
pub(crate) fn versions() -> Vec<String> {
    let version = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        name.split('_').next().unwrap().replace('-', "")
    };
    directories().into_iter().map(version).collect()
}

#[test]
fn each_up_in_order_and_each_down_in_reverse_leaves_nothing() {
    let database = Database::new();
    let conn = &mut database.connect();
    let before = number(conn, "SELECT count(*) FROM pg_depend");
    let run = |conn: &mut PgConnection, directory: &std::path::Path, file: &str| {
        conn.batch_execute(&std::fs::read_to_string(directory.join(file)).unwrap())
            .unwrap_or_else(|error| panic!("{}/{file}: {error}", directory.display()));
    };
    let recorded = "SELECT count(*) FROM resource_control.installed_migration";
    for _ in 0..2 {
        for (before, directory) in (0..).zip(directories()) {
            run(conn, &directory, "up.sql");
            assert_eq!(number(conn, recorded), before + 1);
        }
        let _ = sync::<Resource>(conn).unwrap();
        for (left, directory) in directories().iter().enumerate().rev() {
            run(conn, directory, "down.sql");
            // The first one's table has gone with it.
            if left > 0 {
                assert_eq!(number(conn, recorded), left as i64);
            }
        }
        assert_eq!(
            number(
                conn,
                "SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control'"
            ),
            0
        );
        assert_eq!(number(conn, "SELECT count(*) FROM pg_depend"), before);
    }
}

#[test]
fn psql_runs_the_files_as_they_are() {
    let database = Database::new();
    if Command::new("psql").arg("--version").output().is_err() {
        eprintln!("no psql here: not tried");
        return;
    }
    for directory in directories() {
        let output = Command::new("psql")
            .args(["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--file"])
            .arg(directory.join("up.sql"))
            .arg(database.url())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn twenty_instances_install_and_sync_at_once() {
    let database = Database::new();
    let start = Barrier::new(20);
    let (installed, added): (Vec<_>, Vec<_>) = std::thread::scope(|scope| {
        let instances: Vec<_> = (0..20)
            .map(|_| {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    start.wait();
                    let installed = migrations::install(conn).unwrap().len();
                    (installed, sync::<Resource>(conn).unwrap().added.len())
                })
            })
            .collect();
        instances
            .into_iter()
            .map(|instance| instance.join().unwrap())
            .unzip()
    });
    assert_eq!(installed.iter().sum::<usize>(), directories().len());
    assert_eq!(added.iter().sum::<usize>(), Resource::ALL.len());
    assert_eq!(Observer::of(&database).all_held(), 0);
}

/// On a schema that is there, so that they really meet.
#[test]
fn twenty_instances_that_sync_at_once_add_each_resource_once() {
    throttled_resources! {
        enum Many {
            A = "a" every Duration::from_secs(1),
            B = "b" every Duration::from_secs(1),
            C = "c" every Duration::from_secs(1),
            D = "d" every Duration::from_secs(1),
            E = "e" every Duration::from_secs(1),
            F = "f" every Duration::from_secs(1),
        }
    }
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let start = Barrier::new(20);
    let mut added: Vec<String> = std::thread::scope(|scope| {
        let instances: Vec<_> = (0..20)
            .map(|_| {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    start.wait();
                    sync::<Many>(conn).unwrap().added
                })
            })
            .collect();
        instances
            .into_iter()
            .flat_map(|instance| instance.join().unwrap())
            .collect()
    });
    added.sort();
    assert_eq!(added, ["a", "b", "c", "d", "e", "f"]);
}

#[test]
fn sync_never_changes_a_row_and_says_what_differs() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let synced = sync::<Resource>(conn).unwrap();
    assert_eq!(
        synced.added,
        Resource::ALL
            .iter()
            .map(|it| it.label().to_owned())
            .collect::<Vec<_>>()
    );
    assert_eq!(synced.different, []);

    let set = "UPDATE resource_control.throttled_resource SET throttle_interval = '1 day' WHERE resource_id = 'one'";
    conn.batch_execute(set).unwrap();
    let synced = sync::<Resource>(conn).unwrap();
    assert_eq!(synced.added, Vec::<String>::new());
    let [difference] = &synced.different[..] else {
        panic!("{synced:?}");
    };
    assert_eq!(difference.label, "one");
    assert_eq!(difference.declared, Duration::from_secs(1));
    assert_eq!(difference.in_database, Duration::from_secs(24 * 60 * 60));

    assert_eq!(sync_intervals::<Resource>(conn).unwrap().different.len(), 1);
    assert_eq!(sync::<Resource>(conn).unwrap().different, []);
}

/// A label without its row: a sync that was killed between the two.
#[test]
fn sync_adds_a_row_whose_label_is_there() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.batch_execute("ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'one'")
        .unwrap();
    assert_eq!(sync::<Resource>(conn).unwrap().added.len(), 2);
    assert_eq!(
        number(
            conn,
            "SELECT count(*) FROM resource_control.throttled_resource"
        ),
        2
    );
}

#[test]
fn what_cannot_be_declared_is_refused_before_anything_is_sent() {
    throttled_resources! {
        enum Zero { Zero = "zero" every Duration::ZERO }
    }
    throttled_resources! {
        enum Endless { Endless = "endless" every Duration::MAX }
    }
    throttled_resources! {
        enum Nameless { Nameless = "" every Duration::from_secs(1) }
    }
    throttled_resources! {
        enum Nul { Nul = "a\0b" every Duration::from_secs(1) }
    }
    throttled_resources! {
        enum Long {
            Long = "1234567890123456789012345678901234567890123456789012345678901234" every Duration::from_secs(1)
        }
    }
    let database = Database::new();
    let conn = &mut database.connect(); // without the schema: asking would fail otherwise
    assert_matches!(
        sync::<Zero>(conn),
        Err(Error::Input(Input::BadInterval { .. }))
    );
    assert_matches!(
        sync::<Endless>(conn),
        Err(Error::Input(Input::BadInterval { .. }))
    );
    assert_matches!(
        sync::<Nameless>(conn),
        Err(Error::Input(Input::BadLabel { .. }))
    );
    assert_matches!(
        sync::<Long>(conn),
        Err(Error::Input(Input::BadLabel { .. }))
    );
    assert_matches!(sync::<Nul>(conn), Err(Error::Input(Input::NulCharacter)));
}

#[test]
fn both_are_refused_inside_a_transaction() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.transaction(|conn| {
        assert_matches!(
            migrations::install(conn),
            Err(Error::Misplaced(Misplaced::CommitsInTransaction))
        );
        assert_matches!(
            sync::<Resource>(conn),
            Err(Error::Misplaced(Misplaced::CommitsInTransaction))
        );
        QueryResult::Ok(())
    })
    .unwrap();
    conn.begin_test_transaction().unwrap();
    assert_matches!(
        migrations::install(conn),
        Err(Error::Misplaced(Misplaced::CommitsInTransaction))
    );
    assert_matches!(
        sync::<Resource>(conn),
        Err(Error::Misplaced(Misplaced::CommitsInTransaction))
    );
}

#[test]
fn a_read_only_session_is_an_error_that_says_so() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute("SET default_transaction_read_only = on")
        .unwrap();
    let refused = migrations::install(conn);
    assert_matches!(refused, Err(Error::ReadOnly));
    conn.batch_execute("SET default_transaction_read_only = off")
        .unwrap();
    migrations::install(conn).unwrap();
    conn.batch_execute("SET default_transaction_read_only = on")
        .unwrap();
    assert_eq!(migrations::install(conn).unwrap(), []);
    let refused = migrations::uninstall(conn);
    assert_matches!(refused, Err(Error::ReadOnly));
}

#[test]
fn the_sql_function_hashes_names_as_rust_does() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    for (name, expected) in short_names() {
        let key = number(
            conn,
            &format!(
                "SELECT resource_control.lock_key('{}')",
                name.replace('\'', "''")
            ),
        );
        assert_eq!(key, expected, "{name:?}");
    }
    let of_nothing = "resource_control.lock_key(NULL) IS NULL";
    assert!(truth(conn, of_nothing));
}

#[test]
fn a_version_is_recorded_once() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let again = "INSERT INTO resource_control.installed_migration (version) \
                 SELECT version FROM resource_control.installed_migration";
    assert!(conn.batch_execute(again).is_err());
}

#[test]
fn a_broken_connection_is_not_called_a_transaction() {
    let database = Database::new();
    let conn = &mut database.connect();
    let pid = backend_pid(conn);
    Observer::of(&database).kill(pid);
    conn.batch_execute("SELECT 1").unwrap_err();
    let refused = migrations::install(conn);
    assert_matches!(refused, Err(Error::Database(_)));
    let refused = sync::<Resource>(conn);
    assert_matches!(refused, Err(Error::Database(_)));
}

#[test]
fn a_failure_that_is_not_about_rights_keeps_its_own_error() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql \
         AS $$ BEGIN RAISE 'no changes on Fridays'; END $$; \
         CREATE EVENT TRIGGER refuse ON ddl_command_start EXECUTE FUNCTION refuse()",
    )
    .unwrap();
    let refused = migrations::install(conn);
    assert_matches!(refused, Err(Error::Migration(_)));
}

#[test]
fn a_failure_where_the_schema_exists_is_not_called_missing_rights() {
    let database = server().database();
    let role = Role::new(&database);
    let (conn, name) = (&mut database.connect(), role.name());
    let on = format!("CREATE ON DATABASE {}", database.name());
    conn.batch_execute(&format!("GRANT {on} TO {name}; SET ROLE {name}"))
        .unwrap();
    migrations::install(conn).unwrap();
    // As if the last migration had yet to be run; its table is there.
    conn.batch_execute(
        "DELETE FROM resource_control.installed_migration \
         WHERE version = (SELECT max(version) FROM resource_control.installed_migration)",
    )
    .unwrap();
    let refused = migrations::install(conn);
    assert_matches!(refused, Err(Error::Migration(_)));
    conn.batch_execute(&format!(
        "RESET ROLE; REVOKE {on} FROM {name}; SET ROLE {name}"
    ))
    .unwrap();
    let refused = migrations::install(conn);
    assert_matches!(refused, Err(Error::Migration(_)));
    conn.batch_execute(&format!("RESET ROLE; DROP OWNED BY {name} CASCADE"))
        .unwrap();
}

/// Operators of another schema that say no to everything, ahead of the server's own.
const IMPOSTORS: &str = r#"
    CREATE SCHEMA impostor;
    DO $$
    DECLARE
        type text;
        name text;
    BEGIN
        FOREACH type IN ARRAY ARRAY['text', 'name', 'oid', '"char"', 'int', 'bigint', 'smallint', 'boolean'] LOOP
            EXECUTE format('CREATE FUNCTION impostor.no(%1$s, %1$s) RETURNS boolean LANGUAGE sql AS $f$ SELECT false $f$', type);
            FOREACH name IN ARRAY ARRAY['=', '<>', '>', '<', '>=', '<='] LOOP
                EXECUTE format('CREATE OPERATOR impostor.%1$s (LEFTARG = %2$s, RIGHTARG = %2$s, FUNCTION = impostor.no)', name, type);
            END LOOP;
        END LOOP;
        CREATE FUNCTION impostor.no(bigint, int) RETURNS boolean LANGUAGE sql AS $f$ SELECT false $f$;
        CREATE OPERATOR impostor.> (LEFTARG = bigint, RIGHTARG = int, FUNCTION = impostor.no);
        CREATE DOMAIN impostor.text AS int;
    END $$;
    SET search_path = impostor, public, pg_catalog"#;

#[test]
fn impostors_of_operators_deceive_neither_install_nor_uninstall() {
    let database = Database::new();
    let conn = &mut database.connect();
    let truly = &mut database.connect();
    conn.batch_execute(IMPOSTORS).unwrap();
    let schema = "SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control'";
    for _ in 0..2 {
        assert_eq!(migrations::install(conn).unwrap().len(), versions().len());
        assert_eq!(migrations::install(conn).unwrap(), []);
        assert_eq!(number(truly, schema), 1);
        assert_eq!(migrations::take_over(conn).unwrap(), []);
        assert_eq!(migrations::uninstall(conn).unwrap().len(), versions().len());
        assert_eq!(number(truly, schema), 0);
        assert_eq!(migrations::uninstall(conn).unwrap(), []);
    }
}

#[test]
fn what_has_the_name_of_the_table_of_versions_is_named() {
    for impostor in [
        "CREATE VIEW resource_control.installed_migration AS SELECT 1 AS id",
        "CREATE VIEW resource_control.installed_migration AS SELECT '20000101000001' AS version",
        "CREATE TABLE resource_control.installed_migration (id int)",
        "CREATE MATERIALIZED VIEW resource_control.installed_migration AS SELECT 1 AS version",
        "CREATE SEQUENCE resource_control.installed_migration",
    ] {
        let database = Database::new();
        let conn = &mut database.connect();
        conn.batch_execute("CREATE SCHEMA resource_control")
            .unwrap();
        conn.batch_execute(impostor).unwrap();
        let message = match migrations::install(conn) {
            Err(error @ Error::Schema(Schema::Foreign { .. })) => error.to_string(),
            other => panic!("{impostor}: {other:?}"),
        };
        assert!(
            message.contains("resource_control.installed_migration"),
            "{message}"
        );
    }
}

#[test]
fn only_a_lock_on_the_table_of_versions_holds_up_an_install_with_nothing_to_do() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let locking = &mut database.connect();
    for table in ["throttled_resource", "throttled_key", "service_request"] {
        locking
            .batch_execute(&format!("BEGIN; LOCK TABLE resource_control.{table}"))
            .unwrap();
        assert_eq!(migrations::install(conn).unwrap(), []);
        locking.batch_execute("COMMIT").unwrap();
    }
    locking
        .batch_execute("BEGIN; LOCK TABLE resource_control.installed_migration IN EXCLUSIVE MODE")
        .unwrap();
    assert_eq!(migrations::install(conn).unwrap(), []);
    locking
        .batch_execute("LOCK TABLE resource_control.installed_migration")
        .unwrap();
    conn.batch_execute("SET lock_timeout = '50ms'").unwrap();
    let bounded = migrations::install(conn);
    assert_matches!(bounded, Err(Error::Database(_)));
    locking.batch_execute("COMMIT").unwrap();
    assert_eq!(migrations::install(conn).unwrap(), []);
}
