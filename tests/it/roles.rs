//! Roles that do not own the schema, with the grants of `grants.sql` and without.

use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::sql_types::Text;

use crate::adoption::catalogue;
use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, Cluster, Database, Error, Quota, RateLimit, Semaphore, Throttle, error::Schema,
    migrations, sync, sync_intervals, throttled_resources,
};
use crate::installation::{directories, number, pg_dump};
use crate::migrations::directory;
use crate::support::{assert_matches, eventually};

const GRANTS: &str = include_str!("../../grants.sql");

throttled_resources! {
    enum Resource { Mail = "mail" every Duration::from_secs(1) }
}
throttled_resources! {
    enum Other { Import = "import" every Duration::from_secs(1) }
}

/// A server that logs all DDL, and whose roles are ours to make.
pub(crate) fn server() -> &'static Cluster {
    static SERVER: OnceLock<Cluster> = OnceLock::new();
    SERVER.get_or_init(|| Cluster::builder().setting("log_statement", "ddl").start())
}

/// A role that owns nothing, on [`server`] or on the server of a database.
pub(crate) struct Role {
    name: String,
    /// Of its superuser, to a database of that server.
    url: String,
}

impl Role {
    pub(crate) fn new(database: &Database) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("interlock_test_{}_{number}", std::process::id());
        database
            .connect()
            .batch_execute(&format!("CREATE ROLE {name} LOGIN"))
            .unwrap();
        let url = database.url();
        Self { name, url }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The connection string of the role's own, on [`server`].
    pub(crate) fn url(&self) -> String {
        let url = self
            .url
            .replacen("postgres@", &format!("{}@", self.name), 1);
        assert_ne!(url, self.url);
        url
    }

    pub(crate) fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url()).unwrap()
    }

    /// Runs `grants.sql`, as psql does.
    pub(crate) fn grant(&self, owner: &mut PgConnection) {
        #[derive(QueryableByName)]
        struct Command {
            #[diesel(sql_type = Text)]
            format: String,
        }
        let script = GRANTS
            .replace(":\"role\"", &self.name)
            .replace(":'role'", &format!("'{}'", self.name));
        let script = script.replace("\\set ON_ERROR_STOP on", "");
        let (with_queries, last) = script.rsplit_once("\\gexec").unwrap();
        for part in with_queries.split("\\gexec") {
            let (before, query) = part.rsplit_once("SELECT format").unwrap();
            // Between two queries there is a comment alone, which Diesel refuses.
            owner.batch_execute(&format!("{before}; SELECT 1")).unwrap();
            let query = diesel::sql_query(format!("SELECT format{query}"));
            let commands: Vec<Command> = query.load(owner).unwrap();
            for Command { format } in commands {
                owner.batch_execute(&format).unwrap();
            }
        }
        owner.batch_execute(last).unwrap();
    }

    /// The DDL that the role has sent, as [`server`] has logged it, refused or not.
    pub(crate) fn ddl(&self) -> Vec<String> {
        let sent = format!(" {}@", self.name);
        let log = server().log();
        let lines = log
            .lines()
            .filter(|line| line.contains(&sent) && line.contains(" LOG: "));
        lines.map(str::to_owned).collect()
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        if let Ok(mut conn) = PgConnection::establish(&self.url) {
            let name = &self.name;
            let _ = conn.batch_execute(&format!("DROP OWNED BY {name}; DROP ROLE {name}"));
        }
    }
}

/// Nothing is anybody's by default.
pub(crate) const NOTHING_FOR_ALL: &str = "
    ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
    ALTER DEFAULT PRIVILEGES REVOKE USAGE ON TYPES FROM PUBLIC;
    REVOKE ALL ON SCHEMA public FROM PUBLIC;
    GRANT USAGE ON SCHEMA public TO PUBLIC;
    DO $$ BEGIN
        EXECUTE format('REVOKE CREATE, TEMPORARY ON DATABASE %I FROM PUBLIC', current_database());
    END $$";

/// All that an application does.
fn work(conn: &mut PgConnection) -> Result<(), Error> {
    assert_eq!(migrations::install(conn)?, []);
    assert_eq!(sync::<Resource>(conn)?.added, Vec::<String>::new());
    let _ = sync_intervals::<Resource>(conn)?;
    let mail = Throttle::of(Resource::Mail);
    let _ = mail.details("me").attempt_on(conn)?;
    let _ = mail.key(7).details("me").attempt_on(conn)?;
    let geocoder = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    let claim = geocoder.claim_on(conn)?.admitted().expect("a free slot");
    geocoder.renew_on(conn, claim.id)?;
    assert!(geocoder.complete_on(conn, claim.id)?);
    AdvisoryLock::named("roles")
        .acquire_on(conn)?
        .run(|_| Ok::<_, Error>(()))?;
    conn.batch_execute(
        "SELECT resource_control.lock_key('a');
         SELECT resource_control.lock_throttled_resource('mail', 'psql');
         UPDATE resource_control.throttled_key SET last_locked = '-infinity';
         SELECT resource_control.prune_throttled_keys(10);
         DELETE FROM resource_control.throttled_key;
         SELECT resource_control.complete_service_request(id), resource_control.renew_service_request(id, '1 s')
            FROM resource_control.claim_service_request('geocoder', 4, '1 s');
         SELECT resource_control.prune_service_requests('0', 10);
         DELETE FROM resource_control.service_request",
    )?;
    Ok(())
}

/// Installs the schema, on which nobody but its owner has a right.
fn install_for_nobody(owner: &mut PgConnection) {
    owner.batch_execute(NOTHING_FOR_ALL).unwrap();
    migrations::install(owner).unwrap();
    let _ = sync::<Resource>(owner).unwrap();
}

#[test]
fn a_role_with_only_the_grants_does_everything_and_sends_no_ddl() {
    let database = server().database();
    let role = Role::new(&database);
    let source = directory(
        "grants",
        &[("2026-01-01-000000_users", "CREATE TABLE users (id int)")],
    );
    let owner = &mut database.connect();
    install_for_nobody(owner);
    migrations::run_pending(owner, source.migrations()).unwrap();
    role.grant(owner);
    let before = catalogue(owner);

    let conn = &mut role.connect();
    work(conn).unwrap();
    assert_eq!(
        migrations::run_pending(conn, source.migrations()).unwrap(),
        []
    );
    assert_eq!(role.ddl(), Vec::<String>::new());
    assert_eq!(catalogue(owner), before);

    let its_versions = "DELETE FROM resource_control.installed_migration";
    assert!(conn.batch_execute(its_versions).is_err());
    // That DDL would have shown.
    assert!(
        conn.batch_execute("CREATE TABLE IF NOT EXISTS t ()")
            .is_err()
    );
    eventually("the server has logged it", || role.ddl().len() == 1);
}

/// The sequences among what the role may not read, as `pg_dump` does.
const UNREADABLE_SEQUENCES: &str = "SELECT count(*) FROM pg_class \
    WHERE relnamespace = 'resource_control'::regnamespace \
    AND CASE WHEN relkind = 'S' THEN NOT has_sequence_privilege(oid, 'SELECT') END";

#[test]
fn a_role_with_only_the_grants_dumps_the_schema_with_pg_dump() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    install_for_nobody(owner);
    assert_eq!(number(&mut role.connect(), UNREADABLE_SEQUENCES), 1);
    role.grant(owner);
    assert_eq!(number(&mut role.connect(), UNREADABLE_SEQUENCES), 0);

    let dumped = pg_dump(&["--schema=resource_control"], owner, &role.url());
    let Some(dumped) = dumped else {
        return;
    };
    assert!(dumped.contains("mail"), "{dumped}");
}

#[test]
fn no_function_lends_the_rights_of_its_owner() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let lend = "SELECT count(*) FROM pg_proc WHERE pronamespace = 'resource_control'::regnamespace AND prosecdef = ";
    assert_eq!(number(conn, &format!("{lend}true")), 0);
    assert!(number(conn, &format!("{lend}false")) > 10);
}

#[test]
fn what_a_later_release_adds_is_granted_by_default() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    owner.batch_execute(NOTHING_FOR_ALL).unwrap();
    for directory in &directories()[..2] {
        let up = std::fs::read_to_string(directory.join("up.sql")).unwrap();
        owner.batch_execute(&up).unwrap();
    }
    role.grant(owner);
    migrations::install(owner).unwrap();
    let _ = sync::<Resource>(owner).unwrap();
    work(&mut role.connect()).unwrap();
    assert_eq!(number(&mut role.connect(), UNREADABLE_SEQUENCES), 0);
    assert_eq!(role.ddl(), Vec::<String>::new());
}

#[test]
fn what_the_owner_adds_later_is_granted_also_if_a_superuser_has_run_the_script() {
    let database = server().database();
    let [owner, role] = [(); 2].map(|()| Role::new(&database));
    let superuser = &mut database.connect();
    superuser.batch_execute(NOTHING_FOR_ALL).unwrap();
    let may_create = format!(
        "GRANT CREATE ON DATABASE {} TO {}",
        database.name(),
        owner.name()
    );
    superuser.batch_execute(&may_create).unwrap();
    let conn = &mut owner.connect();
    conn.batch_execute(NOTHING_FOR_ALL).unwrap();
    for directory in &directories()[..2] {
        let up = std::fs::read_to_string(directory.join("up.sql")).unwrap();
        conn.batch_execute(&up).unwrap();
    }
    role.grant(superuser);
    migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    work(&mut role.connect()).unwrap();
}

#[test]
fn a_role_that_may_not_read_diesels_table_is_told_so() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    let source = directory("unreadable", &[("2026-01-01-000000_one", "SELECT 1")]);
    install_for_nobody(owner);
    role.grant(owner);
    migrations::run_pending(owner, source.migrations()).unwrap();

    let refused = migrations::run_pending(&mut role.connect(), source.migrations());
    let Err(Error::Schema(Schema::MissingRights {
        role: named,
        missing,
        ..
    })) = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!(named, role.name());
    assert!(
        missing.starts_with("SELECT on __diesel_schema_migrations"),
        "{missing}"
    );
    role.grant(owner);
    let run = migrations::run_pending(&mut role.connect(), source.migrations());
    assert_eq!(run.unwrap(), []);
}

#[test]
fn without_a_grant_the_error_names_it() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    install_for_nobody(owner);
    let conn = &mut role.connect();
    let missing = |refused: Result<(), Error>| match refused {
        Err(Error::Schema(Schema::MissingRights { role, missing, .. })) => (role, missing),
        other => panic!("{other:?}"),
    };
    for (revoke, expected) in [
        ("USAGE ON SCHEMA resource_control", "USAGE"),
        (
            "EXECUTE ON ALL FUNCTIONS IN SCHEMA resource_control",
            "EXECUTE",
        ),
        ("UPDATE ON resource_control.throttled_resource", "UPDATE"),
        ("SELECT ON resource_control.installed_migration", "SELECT"),
        ("DELETE ON resource_control.throttled_key", "DELETE"),
    ] {
        role.grant(owner);
        owner
            .batch_execute(&format!("REVOKE {revoke} FROM {}", role.name()))
            .unwrap();
        owner
            .batch_execute("UPDATE resource_control.throttled_resource SET last_locked = '-infinity', last_locker_details = ''")
            .unwrap();
        let refused = migrations::install(conn)
            .and_then(|_| Throttle::of(Resource::Mail).details("me").attempt_on(conn))
            .and_then(|_| {
                Throttle::of(Resource::Mail)
                    .key(1)
                    .details("me")
                    .attempt_on(conn)
            })
            .map(drop);
        if expected == "DELETE" {
            continue; // nothing above deletes
        }
        let (name, missing) = missing(refused);
        assert_eq!(name, role.name());
        assert!(missing.contains(expected), "{revoke}: {missing}");
    }
    role.grant(owner);
    work(conn).unwrap();
}

#[test]
fn a_right_that_only_a_key_in_use_needs_is_named() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    install_for_nobody(owner);
    role.grant(owner);
    let api = RateLimit::named("api", Quota::per_day(24).burst(20));
    let conn = &mut role.connect();
    assert!(api.check_on(conn).unwrap().is_allowed());
    // The next generation of the row replaces this one.
    owner
        .batch_execute(&format!(
            "REVOKE DELETE ON resource_control.rate_limit FROM {};
             UPDATE resource_control.rate_limit SET generation = 2, updates = 200",
            role.name()
        ))
        .unwrap();
    let checks = [
        api.check_on(conn).map(drop),
        RateLimit::check_all_on(conn, &[&api]).map(drop),
    ];
    for refused in checks {
        match refused {
            Err(Error::Schema(Schema::MissingRights { missing, .. })) => {
                assert!(missing.contains("DELETE on rate_limit"), "{missing}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn rights_on_some_columns_and_functions_of_others_are_no_missing_rights() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    install_for_nobody(owner);
    role.grant(owner);
    owner
        .batch_execute(&format!(
            "REVOKE INSERT, UPDATE ON resource_control.throttled_resource FROM {name};
             GRANT UPDATE (last_locked, last_locker_details) ON resource_control.throttled_resource TO {name};
             CREATE FUNCTION resource_control.attempt_throttled_resource(int) RETURNS int LANGUAGE sql AS 'SELECT 1'",
            name = role.name()
        ))
        .unwrap();
    let conn = &mut role.connect();
    let mail = Throttle::of(Resource::Mail).details("me");
    assert!(mail.attempt_on(conn).unwrap().granted().is_some());
    conn.batch_execute("SET lock_timeout = '20ms'").unwrap();
    owner
        .batch_execute("BEGIN; LOCK TABLE resource_control.throttled_resource")
        .unwrap();
    assert_matches!(mail.attempt_on(conn), Err(Error::Database(_)));
}

#[test]
fn the_owner_of_what_is_this_crates_lacks_nothing_if_a_migration_fails() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    let schema = format!(
        "CREATE SCHEMA resource_control AUTHORIZATION {}",
        role.name()
    );
    owner.batch_execute(&schema).unwrap();
    let conn = &mut role.connect();
    for directory in &directories()[..2] {
        let up = std::fs::read_to_string(directory.join("up.sql")).unwrap();
        let up = up.replacen("CREATE SCHEMA resource_control;", "", 1);
        conn.batch_execute(&up).unwrap();
    }
    owner
        .batch_execute("CREATE TABLE resource_control.notes (id int)")
        .unwrap();
    owner
        .batch_execute("BEGIN; LOCK TABLE resource_control.installed_migration IN EXCLUSIVE MODE")
        .unwrap();
    conn.batch_execute("SET lock_timeout = '20ms'").unwrap();
    let failed = migrations::install(conn);
    assert_matches!(failed, Err(Error::Migration(_)));
    owner.batch_execute("ROLLBACK").unwrap();
    migrations::install(conn).unwrap();
}

#[test]
fn with_something_to_do_a_role_without_rights_gets_an_error_that_names_them() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    let conn = &mut role.connect();
    let missing = |refused: Result<(), Error>| match refused {
        Err(Error::Schema(Schema::MissingRights { missing, .. })) => missing,
        other => panic!("{other:?}"),
    };
    let make_it = missing(migrations::install(conn).map(drop));
    assert!(make_it.contains("CREATE on the database"), "{make_it}");

    for directory in &directories()[..2] {
        let up = std::fs::read_to_string(directory.join("up.sql")).unwrap();
        owner.batch_execute(&up).unwrap();
    }
    role.grant(owner);
    let extend_it = missing(migrations::install(conn).map(drop));
    assert!(extend_it.contains("ownership"), "{extend_it}");
    let add_to_it = missing(sync::<Other>(conn).map(drop));
    assert!(add_to_it.contains("ownership"), "{add_to_it}");
    assert_eq!(
        number(
            owner,
            "SELECT count(*) FROM resource_control.installed_migration"
        ),
        2
    );
}

#[test]
fn a_role_that_owns_the_schema_needs_no_more_to_install() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    owner
        .batch_execute(&format!(
            "CREATE SCHEMA resource_control AUTHORIZATION {}",
            role.name()
        ))
        .unwrap();
    let conn = &mut role.connect();
    migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    work(conn).unwrap();
    // To learn what is not its own, it would make the schema a second time.
    let refused = migrations::uninstall(conn);
    assert_matches!(
        refused,
        Err(Error::Schema(Schema::MissingRights { missing, .. }))
            if missing.starts_with("CREATE on the database")
    );
    owner
        .batch_execute(&format!(
            "DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO {}', current_database()); END $$",
            role.name()
        ))
        .unwrap();
    migrations::uninstall(conn).unwrap();
}

#[test]
fn psql_runs_the_script() {
    if Command::new("psql").arg("--version").output().is_err() {
        eprintln!("no psql here: not tried");
        return;
    }
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    owner.batch_execute(NOTHING_FOR_ALL).unwrap();
    let psql = |role: Option<&Role>| {
        Command::new("psql")
            .args(["--no-psqlrc", "--quiet"])
            .args(role.map(|role| format!("--set=role={}", role.name())))
            .args(["--file", concat!(env!("CARGO_MANIFEST_DIR"), "/grants.sql")])
            .arg(database.url())
            .output()
            .unwrap()
    };
    assert!(!psql(Some(&role)).status.success(), "there is no schema");
    migrations::install(owner).unwrap();
    let _ = sync::<Resource>(owner).unwrap();
    let source = directory("psql", &[("2026-01-01-000000_one", "SELECT 1")]);
    migrations::run_pending(owner, source.migrations()).unwrap();
    assert!(!psql(None).status.success(), "no role is named");
    for _ in 0..2 {
        let output = psql(Some(&role));
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
    }
    let conn = &mut role.connect();
    work(conn).unwrap();
    assert_eq!(
        migrations::run_pending(conn, source.migrations()).unwrap(),
        []
    );
}
