//! `interlock` in a database where others may create functions, operators, types and relations in
//! `public`, which comes first in the search path.

use diesel_interlock::migrations;
use workbench::{Cluster, Database, Endpoint};

use crate::support::*;

/// A session whose search path finds PostgreSQL's own functions first.
fn session(database: &Database) -> Session {
    let mut session = Session::of(database);
    session.sql("SET search_path = pg_catalog, pg_temp");
    session
}

#[track_caller]
fn assert_untrapped(database: &Database, line: &str, expected: i32) -> String {
    let (status, text) = printed(&mut interlock(&database.url(), line));
    assert_eq!(status, Some(expected), "{line}: {text}");
    assert!(!text.contains("trap"), "{line}: {text}");
    assert!(!text.contains("has failed"), "{line}: {text}");
    assert_eq!(database.sprung_traps(), 0, "{line}: {text}");
    text
}

#[test]
fn a_program_that_trusts_the_search_path_springs_the_traps() {
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
fn without_the_schema_no_object_of_another_role_is_used() {
    let database = Database::new();
    let mut holder = session(&database);
    database.set_traps(true);
    holder.take("held");
    assert_untrapped(&database, "ps", 0);
    assert_untrapped(&database, "ps --json --name held", 0);
    let doctor = assert_untrapped(&database, "doctor --holder-age 0s --transaction-age 0s", 1);
    assert!(doctor.contains("holds the lock"), "{doctor}");
    assert_eq!(doctor.matches("fail  ").count(), 1, "{doctor}");
    assert!(doctor.contains("fail  search_path = "), "{doctor}");
    assert!(assert_untrapped(&database, "run held -- true", 73).contains("holds it"));
    assert_untrapped(&database, "run free --wait 5s -- true", 0);
    assert_untrapped(&database, "kill nobody --yes", 1);
    assert_untrapped(&database, "kill held --yes", 0);
    assert_untrapped(&database, "install", 0);
    assert_untrapped(&database, "install", 0);
    assert_untrapped(&database, "run free -- true", 0);
}

#[test]
fn with_the_schema_no_object_of_another_role_is_used() {
    let database = Database::new();
    migrations::install(&database.pool(1)).unwrap();
    let mut admin = session(&database);
    admin.sql(
        "SELECT resource_control.claim_service_request('geocoder', 1, '1 day');
         SELECT resource_control.claim_service_request('leader reports', 1, '1 day', 'web-3');
         INSERT INTO resource_control.schedule (name, tick, token, started_at, expires_at)
            VALUES ('hourly', now(), nextval('resource_control.fencing_token'), now(),
                now() + interval '1 day')",
    );
    let id =
        admin.number("SELECT id FROM resource_control.slot_in_flight WHERE service = 'geocoder'");
    database.set_traps(true);
    let shown = assert_untrapped(&database, "ps", 0);
    for name in ["geocoder", "reports", "hourly"] {
        assert!(shown.contains(name), "{shown}");
    }
    let doctor = assert_untrapped(&database, "doctor --holder-age 0s --transaction-age 0s", 1);
    assert_eq!(doctor.matches("fail  ").count(), 1, "{doctor}");
    assert_untrapped(&database, "pause hourly", 0);
    assert_untrapped(&database, "resume hourly", 0);
    assert_untrapped(&database, "run x --lease 30s -- true", 0);
    assert_untrapped(&database, "run geocoder --lease 30s -- true", 73);
    assert_untrapped(&database, "kill geocoder --yes", 1);
    assert_untrapped(&database, &format!("kill geocoder --slot {id} --yes"), 0);
    assert_untrapped(&database, "kill reports --leader --yes", 0);
    assert_untrapped(&database, "kill hourly --run --yes", 0);
    assert_untrapped(&database, "run x -- true", 0);
    assert_untrapped(&database, "install", 0);
    assert_untrapped(&database, "install --repair", 0);
}

/// PostgreSQL looks in the whole search path for an operator that `pg_catalog` does not have for
/// exactly these types.
#[test]
fn no_operator_of_another_role_is_used() {
    let cluster = Cluster::start();
    for is_installed in [false, true] {
        let database = cluster.database();
        let mut admin = session(&database);
        if is_installed {
            migrations::install(&database.pool(1)).unwrap();
            admin.sql(
                "SELECT resource_control.claim_service_request('geocoder', 1, '1 day');
                 SELECT resource_control.claim_service_request('leader reports', 1, '1 day');
                 INSERT INTO resource_control.schedule (name, tick, token, started_at, expires_at)
                    VALUES ('hourly', now(), nextval('resource_control.fencing_token'), now(),
                        now() + interval '1 day');
                 UPDATE resource_control.service_request SET created_at = now() - interval '1 day'",
            );
        }
        let id = if is_installed {
            let id = "SELECT id FROM resource_control.slot_in_flight WHERE service = 'geocoder'";
            admin.number(id)
        } else {
            0
        };
        database.set_operators();
        admin.take("held");
        let slot = format!("kill geocoder --slot {id} --yes");
        let lines = [
            ("ps", true),
            ("ps --json --name held", true),
            ("doctor --holder-age 0s --transaction-age 0s", true),
            ("run held -- true", true),
            ("run free --wait 5s -- true", true),
            ("kill nobody --yes", true),
            ("kill held --yes", true),
            ("pause hourly", is_installed),
            ("resume hourly", is_installed),
            ("run geocoder --lease 30s -- true", is_installed),
            ("run x --lease 30s -- true", is_installed),
            (&slot, is_installed),
            ("kill reports --leader --yes", is_installed),
            ("kill hourly --run --yes", is_installed),
            ("install --repair", true),
            ("install", true),
        ];
        for (line, _) in lines.iter().filter(|(_, is_tried)| *is_tried) {
            let (_, text) = printed(&mut interlock(&database.url(), line));
            let found = cluster.found_operators();
            assert!(found.is_empty(), "{line}: {text}\n{}", found.join("\n"));
            assert!(!text.contains("only a shell"), "{line}: {text}");
        }
    }
}

#[test]
fn a_superuser_calls_nothing_in_a_schema_of_another_role() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let url = &database.url();
    let mut admin = session(&database);
    admin.sql(&format!(
        "CREATE ROLE mallory LOGIN; GRANT CREATE ON DATABASE {} TO mallory",
        database.name()
    ));
    let mut mallory = Session(Endpoint::new(&database.url_with("user", "mallory")).connect());
    let rise = "BEGIN ALTER ROLE mallory SUPERUSER; RETURN NULL; END";
    mallory.sql(&format!(
        "CREATE SCHEMA resource_control;
         CREATE FUNCTION resource_control.rise() RETURNS text LANGUAGE plpgsql AS '{rise}';
         CREATE FUNCTION resource_control.next_token(regclass) RETURNS bigint LANGUAGE plpgsql
            AS '{rise}';
         CREATE FUNCTION resource_control.fire() RETURNS trigger LANGUAGE plpgsql AS '{rise}';
         CREATE TABLE resource_control.installed_migration (version text PRIMARY KEY,
            run_at timestamptz DEFAULT now());
         CREATE TRIGGER fire BEFORE INSERT ON resource_control.installed_migration
            FOR EACH ROW EXECUTE FUNCTION resource_control.fire();
         CREATE VIEW resource_control.slot_in_flight AS SELECT resource_control.rise() AS service,
            1 AS slot, 1::bigint AS id, now() AS created_at, now() AS expires_at, '' AS details;
         CREATE TABLE resource_control.schedule AS SELECT 'hourly'::text AS name;
         CREATE VIEW resource_control.schedule_state AS
            SELECT resource_control.rise() AS name, 'running' AS state"
    ));
    let mut all = |word: &str| {
        for (line, expected) in [
            ("ps", 0),
            ("ps --json", 0),
            ("doctor", 0),
            ("doctor --needs-schema", 1),
            ("install", 78),
            ("install --repair", 78),
            ("install --restored", 78),
            ("kill nobody --yes", 1),
            ("kill x --slot 1 --yes", 78),
            ("kill x --leader --yes", 78),
            ("kill x --run --yes", 78),
            ("pause hourly", 78),
            ("resume hourly", 78),
            ("run x --lease 30s -- true", 78),
            ("run x -- true", 0),
        ] {
            let (status, text) = printed(&mut interlock(url, line));
            assert_eq!(status, Some(expected), "{line}: {text}");
            assert!(text.contains(word), "{line}: {text}");
            let risen = "SELECT rolsuper::int FROM pg_roles WHERE rolname = 'mallory'";
            assert_eq!(admin.number(risen), 0, "{line}: {text}");
        }
    };
    all("connect as mallory instead");
    // One object of another role in the schema is enough.
    let mut owner = session(&database);
    owner.sql("ALTER SCHEMA resource_control OWNER TO CURRENT_USER");
    all("connect as mallory instead");
    // The owner of that object has no more rights than before.
    owner.sql("DROP SCHEMA resource_control CASCADE");
    let of_mallory = &database.url_with("user", "mallory");
    for line in ["install", "ps", "doctor", "run x --lease 30s -- true"] {
        let (status, text) = printed(&mut interlock(of_mallory, line));
        assert_eq!(status, Some(0), "{line}: {text}");
    }
}

/// Each of these rights would be available to a view of a role that lacks it.
#[test]
fn a_schema_of_a_role_with_fewer_rights_is_not_trusted() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut admin = session(&database);
    let name = database.name();
    admin.sql(&format!(
        "CREATE ROLE mallory LOGIN; GRANT CREATE ON DATABASE {name} TO mallory;
         CREATE ROLE admins CREATEROLE; CREATE ROLE owner LOGIN;
         CREATE ROLE dba LOGIN; GRANT CONNECT ON DATABASE {name} TO dba"
    ));
    let mut mallory = Session(Endpoint::new(&database.url_with("user", "mallory")).connect());
    mallory.sql(
        "CREATE SCHEMA resource_control; GRANT USAGE ON SCHEMA resource_control TO PUBLIC;
         CREATE FUNCTION resource_control.rise() RETURNS text LANGUAGE plpgsql
            AS $$ BEGIN RAISE 'trap %', current_user; END $$;
         CREATE VIEW resource_control.slot_in_flight AS SELECT resource_control.rise() AS service,
            1 AS slot, 1::bigint AS id, now() AS created_at, now() AS expires_at, '' AS details;
         GRANT SELECT ON resource_control.slot_in_flight TO PUBLIC",
    );
    let url = &database.url_with("user", "dba");
    let reads_it = |text: &str| text.contains("trap dba");
    let (_, text) = printed(&mut interlock(url, "ps"));
    assert!(reads_it(&text), "an ordinary role trusts it: {text}");
    for (power, none) in [
        ("ALTER ROLE dba CREATEROLE", "ALTER ROLE dba NOCREATEROLE"),
        ("ALTER ROLE dba REPLICATION", "ALTER ROLE dba NOREPLICATION"),
        ("ALTER ROLE dba BYPASSRLS", "ALTER ROLE dba NOBYPASSRLS"),
        (
            "GRANT pg_execute_server_program TO dba",
            "REVOKE pg_execute_server_program FROM dba",
        ),
        (
            "GRANT pg_read_all_data TO dba",
            "REVOKE pg_read_all_data FROM dba",
        ),
        // A function may `SET ROLE` to every role that its caller is a member of.
        (
            "ALTER ROLE dba NOINHERIT; GRANT admins TO dba",
            "ALTER ROLE dba INHERIT; REVOKE admins FROM dba",
        ),
        (
            &*format!("ALTER DATABASE {name} OWNER TO dba"),
            &*format!("ALTER DATABASE {name} OWNER TO CURRENT_USER"),
        ),
    ] {
        admin.sql(power);
        for (line, expected) in [
            ("ps", 0),
            ("doctor --needs-schema", 1),
            ("install", 78),
            ("kill x --slot 1 --yes", 78),
            ("run x --lease 30s -- true", 78),
            ("run x -- true", 0),
        ] {
            let (status, text) = printed(&mut interlock(url, line));
            assert_eq!(status, Some(expected), "{power}: {line}: {text}");
            assert!(
                text.contains("connect as mallory instead"),
                "{power}: {line}: {text}"
            );
            assert!(!reads_it(&text), "{power}: {line}: {text}");
        }
        admin.sql(none);
    }
    // An owner with the same rights, or one that is a member of this role, gains nothing.
    admin.sql("ALTER ROLE dba CREATEROLE; GRANT admins TO mallory");
    let (_, text) = printed(&mut interlock(url, "ps"));
    assert!(reads_it(&text), "{text}");
    // The rights of roles that only observe do not count.
    admin.sql("ALTER ROLE dba NOCREATEROLE; GRANT pg_monitor, pg_signal_backend TO dba");
    let (_, text) = printed(&mut interlock(url, "ps"));
    assert!(reads_it(&text), "{text}");
}

/// Whoever has the right TRIGGER on a table may let it call a function.
#[test]
fn a_trigger_of_a_stranger_is_named_and_not_called() {
    let cluster = Cluster::start();
    let database = cluster.database();
    migrations::install(&database.pool(1)).unwrap();
    let mut admin = session(&database);
    admin.sql(
        "CREATE ROLE mallory LOGIN; GRANT CREATE ON SCHEMA public TO mallory;
         GRANT USAGE ON SCHEMA resource_control TO mallory;
         GRANT TRIGGER ON resource_control.schedule TO mallory;
         INSERT INTO resource_control.schedule (name) VALUES ('hourly')",
    );
    Session(Endpoint::new(&database.url_with("user", "mallory")).connect()).sql(
        "CREATE FUNCTION public.rise() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN RAISE 'trap %', current_user; END $$;
         CREATE TRIGGER rise BEFORE UPDATE ON resource_control.schedule
            FOR EACH ROW EXECUTE FUNCTION public.rise()",
    );
    let (status, text) = printed(&mut interlock(&database.url(), "pause hourly"));
    assert_eq!(status, Some(78), "{text}");
    assert!(
        text.contains("the trigger rise on resource_control.schedule"),
        "{text}"
    );
    admin.sql("DROP TRIGGER rise ON resource_control.schedule");
    let (status, text) = printed(&mut interlock(&database.url(), "pause hourly"));
    assert_eq!(status, Some(0), "{text}");
}

/// The owner of a database may let every session there begin with `SET ROLE`, which a function of
/// that owner may reset.
#[test]
fn a_role_that_the_database_sets_does_not_hide_the_rights_of_the_session() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let name = database.name();
    session(&database).sql(&format!(
        "CREATE ROLE mallory LOGIN; ALTER DATABASE {name} OWNER TO mallory"
    ));
    let mut mallory = Session(Endpoint::new(&database.url_with("user", "mallory")).connect());
    mallory.sql(&format!(
        "ALTER DATABASE {name} SET role = mallory;
         CREATE SCHEMA resource_control;
         CREATE FUNCTION resource_control.rise() RETURNS text LANGUAGE plpgsql
            AS $$ BEGIN RESET ROLE; RAISE 'trap %', current_user; END $$;
         CREATE VIEW resource_control.slot_in_flight AS SELECT resource_control.rise() AS service,
            1 AS slot, 1::bigint AS id, now() AS created_at, now() AS expires_at, '' AS details"
    ));
    for (line, expected) in [
        ("ps", 0),
        ("doctor --needs-schema", 1),
        ("install", 78),
        ("kill x --slot 1 --yes", 78),
        ("kill x --yes", 1),
        ("run x --lease 30s -- true", 78),
    ] {
        let (status, text) = printed(&mut interlock(&database.url(), line));
        assert_eq!(status, Some(expected), "{line}: {text}");
        assert!(
            text.contains("connect as mallory instead"),
            "{line}: {text}"
        );
        assert!(!text.contains("trap"), "{line}: {text}");
    }
}

/// On PostgreSQL 14 and 15 a function that is called by a role may grant that role to another one.
#[test]
fn commands_that_only_read_cannot_be_made_to_write() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut admin = session(&database);
    admin.sql("CREATE ROLE mallory LOGIN; CREATE ROLE app LOGIN");
    admin.sql(&format!(
        "GRANT CREATE ON DATABASE {} TO mallory",
        database.name()
    ));
    let mut mallory = Session(Endpoint::new(&database.url_with("user", "mallory")).connect());
    mallory.sql(
        "CREATE SCHEMA resource_control; GRANT USAGE ON SCHEMA resource_control TO PUBLIC;
         CREATE FUNCTION resource_control.rise() RETURNS text LANGUAGE plpgsql
            AS $$ BEGIN
                ALTER ROLE app PASSWORD 'known'; RETURN 'risen';
            END $$;
         CREATE VIEW resource_control.slot_in_flight AS SELECT resource_control.rise() AS service,
            1 AS slot, 1::bigint AS id, now() AS created_at, now() AS expires_at, '' AS details;
         GRANT SELECT ON resource_control.slot_in_flight TO PUBLIC",
    );
    let url = &database.url_with("user", "app");
    for line in ["ps", "doctor"] {
        let (_, text) = printed(&mut interlock(url, line));
        assert!(!text.contains("risen"), "{line}: {text}");
    }
    let known = "SELECT count(*) FROM pg_authid WHERE rolname = 'app' AND rolpassword IS NOT NULL";
    assert_eq!(admin.number(known), 0);
}

#[test]
fn a_schema_that_is_created_while_a_superuser_installs_is_not_trusted() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut admin = session(&database);
    admin.sql(&format!(
        "CREATE ROLE mallory LOGIN; GRANT CREATE ON DATABASE {} TO mallory",
        database.name()
    ));
    let mut mallory = Session(Endpoint::new(&database.url_with("user", "mallory")).connect());
    mallory.sql("SELECT pg_advisory_lock(20000101000000)");
    let mut command = interlock(&database.url(), "install --wait 1s");
    assert_eq!(status(&mut command), Some(73));
    use diesel::connection::SimpleConnection;
    let created = mallory.0.batch_execute("CREATE SCHEMA resource_control");
    assert!(created.is_err());
    mallory.sql("SELECT pg_advisory_unlock(20000101000000)");
    assert_eq!(status(&mut command), Some(0));
}

#[test]
fn the_command_does_not_get_the_search_path() {
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
