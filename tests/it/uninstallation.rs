//! Uninstalling drops what is ours, and nothing else.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::error::{Misplaced, Schema};
use diesel_interlock::{DeclaredResources, Error, migrations, sync, throttled_resources};
use workbench::Database;

use crate::adoption::{BY_HAND, catalogue};
use crate::installation::{directories, number, versions};
use crate::roles::{Role, server};
use crate::support::{Observer, assert_matches};

throttled_resources! {
    enum Resource { Mail = "mail" every std::time::Duration::from_secs(1) }
}

fn in_the_way(conn: &mut PgConnection) -> Vec<String> {
    let before = catalogue(conn);
    let objects = match migrations::uninstall(conn) {
        Err(Error::Schema(Schema::InUse { objects })) => objects,
        other => panic!("{other:?}"),
    };
    assert_eq!(catalogue(conn), before, "{objects:?}");
    objects
}

fn is_gone(conn: &mut PgConnection) -> bool {
    let schema = "SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control'";
    number(conn, schema) == 0
}

#[test]
fn what_was_installed_or_adopted_is_gone_without_a_trace() {
    let database = Database::new();
    let conn = &mut database.connect();
    let before = number(conn, "SELECT count(*) FROM pg_depend");
    let newest_first: Vec<_> = versions().into_iter().rev().collect();
    for make in ["SELECT 1", BY_HAND] {
        conn.batch_execute(make).unwrap();
        migrations::install(conn).unwrap();
        let _ = sync::<Resource>(conn).unwrap();
        conn.batch_execute(
            "SELECT resource_control.claim_service_request('s', 1, '1 s'); \
             COMMENT ON TABLE resource_control.throttled_key IS 'theirs'; \
             GRANT SELECT ON resource_control.throttled_key TO pg_monitor; \
             ALTER DEFAULT PRIVILEGES IN SCHEMA resource_control GRANT SELECT ON TABLES TO pg_monitor; \
             ALTER TABLE resource_control.throttled_key SET (autovacuum_enabled = off)",
        )
        .unwrap();
        let reverted = migrations::uninstall(conn).unwrap();
        assert_eq!(
            reverted.iter().map(ToString::to_string).collect::<Vec<_>>(),
            newest_first
        );
        assert!(is_gone(conn));
        assert_eq!(number(conn, "SELECT count(*) FROM pg_depend"), before);
        assert_eq!(migrations::uninstall(conn).unwrap(), []);
    }
    assert_eq!(migrations::install(conn).unwrap().len(), versions().len());
    assert_eq!(
        sync::<Resource>(conn).unwrap().added.len(),
        Resource::ALL.len()
    );
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn all_objects_that_depend_on_it_or_lie_in_it_are_named() {
    for (theirs, expected) in [
        (
            "CREATE TABLE job (resource resource_control.throttled_resource_enum \
             CONSTRAINT job_fkey REFERENCES resource_control.throttled_resource)",
            &[
                "table column public.job.resource",
                "table constraint job_fkey on public.job",
            ][..],
        ),
        (
            "CREATE TABLE job (resources resource_control.throttled_resource_enum[])",
            &["table column public.job.resources"],
        ),
        (
            "CREATE TABLE job (request bigint CONSTRAINT job_fkey REFERENCES resource_control.service_request)",
            &["table constraint job_fkey on public.job"],
        ),
        (
            "CREATE TABLE job (key bigint DEFAULT resource_control.lock_key('job'))",
            &["default value for public.job.key"],
        ),
        (
            "CREATE TABLE child () INHERITS (resource_control.throttled_key)",
            &[
                "table column public.child.resource_id",
                "table public.child",
            ],
        ),
        (
            "CREATE VIEW v AS SELECT * FROM resource_control.throttled_key",
            &["view public.v"],
        ),
        (
            "CREATE MATERIALIZED VIEW v AS SELECT resource_control.lock_key('job')",
            &["materialized view public.v"],
        ),
        (
            "CREATE FUNCTION f(resource_control.throttled_resource_enum) RETURNS int LANGUAGE sql AS 'SELECT 1'",
            &["function public.f(resource_control.throttled_resource_enum)"],
        ),
        (
            "CREATE FUNCTION f() RETURNS SETOF resource_control.service_request LANGUAGE sql \
             AS 'SELECT * FROM resource_control.service_request'",
            &["function public.f()"],
        ),
        (
            "CREATE DOMAIN d AS resource_control.throttled_resource_enum",
            &["type public.d"],
        ),
        (
            "CREATE TABLE resource_control.theirs (id int PRIMARY KEY)",
            &["table resource_control.theirs"],
        ),
        (
            "CREATE FUNCTION resource_control.theirs() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            &["function resource_control.theirs()"],
        ),
        (
            "CREATE TYPE resource_control.theirs AS (id int); CREATE SEQUENCE resource_control.numbers; \
             CREATE VIEW resource_control.shown AS SELECT 1 AS one",
            &[
                "sequence resource_control.numbers",
                "type resource_control.theirs",
                "view resource_control.shown",
            ],
        ),
        (
            "CREATE INDEX theirs ON resource_control.throttled_resource (last_locked)",
            &["index resource_control.theirs"],
        ),
        (
            "ALTER TABLE resource_control.throttled_resource ADD note text DEFAULT 'none'",
            &["table column resource_control.throttled_resource.note"],
        ),
        (
            "ALTER TABLE resource_control.throttled_resource ALTER throttle_interval SET DEFAULT '1 s'",
            &["default value for resource_control.throttled_resource.throttle_interval"],
        ),
        (
            "ALTER TABLE resource_control.throttled_resource ADD CONSTRAINT theirs UNIQUE (last_locked)",
            &["table constraint theirs on resource_control.throttled_resource"],
        ),
        (
            "CREATE SCHEMA theirs; \
             CREATE STATISTICS theirs.s ON last_locked, throttle_interval FROM resource_control.throttled_resource; \
             CREATE STATISTICS resource_control.s ON service, slot FROM resource_control.service_request",
            &[
                "statistics object resource_control.s",
                "statistics object theirs.s",
            ],
        ),
        (
            "CREATE SEQUENCE resource_control.numbers OWNED BY resource_control.fence.token",
            &["sequence resource_control.numbers"],
        ),
        (
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
             CREATE TRIGGER theirs AFTER UPDATE ON resource_control.fence EXECUTE FUNCTION f()",
            &["trigger theirs on resource_control.fence"],
        ),
        (
            "CREATE RULE theirs AS ON DELETE TO resource_control.fence DO ALSO NOTIFY theirs",
            &["rule theirs on resource_control.fence"],
        ),
        (
            "CREATE POLICY theirs ON resource_control.fence USING (true)",
            &["policy theirs on resource_control.fence"],
        ),
        (
            "CREATE PUBLICATION theirs FOR TABLE resource_control.fence",
            &["publication relation resource_control.fence in publication theirs"],
        ),
        (
            "CREATE OPERATOR resource_control.=== (LEFTARG = text, RIGHTARG = text, FUNCTION = pg_catalog.texteq); \
             CREATE TEXT SEARCH CONFIGURATION resource_control.theirs (COPY = simple); \
             CREATE COLLATION resource_control.theirs FROM \"C\"",
            &[
                "collation resource_control.theirs",
                "operator resource_control.===(pg_catalog.text,pg_catalog.text)",
                "text search configuration resource_control.theirs",
            ],
        ),
        (
            "CREATE CAST (resource_control.throttled_resource_enum AS int) WITH INOUT",
            &["cast (resource_control.throttled_resource_enum AS integer)"],
        ),
        (
            "CREATE OPERATOR public.=== (LEFTARG = resource_control.throttled_resource_enum, RIGHTARG = text, \
             FUNCTION = resource_control.lock_throttled_resource)",
            &["operator public.===(resource_control.throttled_resource_enum,pg_catalog.text)"],
        ),
        (
            "ALTER EXTENSION plpgsql ADD TABLE resource_control.throttled_resource; \
             ALTER EXTENSION plpgsql ADD FUNCTION resource_control.lock_key",
            &["extension plpgsql"],
        ),
        (
            // An overload of ours is theirs.
            "CREATE FUNCTION resource_control.lock_key(int) RETURNS int LANGUAGE sql AS 'SELECT 1'",
            &["function resource_control.lock_key(integer)"],
        ),
    ] {
        for make in ["SELECT 1", BY_HAND] {
            let database = Database::new();
            let conn = &mut database.connect();
            conn.batch_execute(make).unwrap();
            migrations::install(conn).unwrap();
            conn.batch_execute(theirs).unwrap();
            assert_eq!(in_the_way(conn), expected, "{theirs}");
        }
    }
}

/// To find out what is its own, it renames the schema for a moment.
#[test]
fn no_other_schema_is_in_the_way() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.batch_execute("CREATE SCHEMA diesel_interlock_aside")
        .unwrap();
    assert_eq!(migrations::uninstall(conn).unwrap().len(), versions().len());
}

#[test]
fn the_message_names_each_and_what_to_do() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.batch_execute("CREATE VIEW v AS SELECT * FROM resource_control.throttled_key")
        .unwrap();
    let message = migrations::uninstall(conn).unwrap_err().to_string();
    assert!(
        message.contains("are not this crate's: view public.v; drop or move"),
        "{message}"
    );
}

#[test]
fn a_newer_releases_schema_and_one_made_by_hand_are_left_alone() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.batch_execute(
        "INSERT INTO resource_control.installed_migration VALUES ('20990101000001')",
    )
    .unwrap();
    assert_eq!(
        in_the_way(conn),
        ["migration 20990101000001 of a newer release"]
    );

    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    let refused = migrations::uninstall(conn);
    assert_matches!(refused, Err(Error::Schema(Schema::Foreign { .. })));
}

#[test]
fn it_is_refused_inside_a_transaction() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.transaction(|conn| {
        let refused = migrations::uninstall(conn);
        assert_matches!(
            refused,
            Err(Error::Misplaced(Misplaced::CommitsInTransaction))
        );
        QueryResult::Ok(())
    })
    .unwrap();
    conn.begin_test_transaction().unwrap();
    let refused = migrations::uninstall(conn);
    assert_matches!(
        refused,
        Err(Error::Misplaced(Misplaced::CommitsInTransaction))
    );
}

#[test]
fn a_role_that_does_not_own_it_may_not() {
    let database = server().database();
    let role = Role::new(&database);
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    role.grant(conn);
    conn.batch_execute(&format!("SET SESSION AUTHORIZATION {}", role.name()))
        .unwrap();
    let refused = migrations::uninstall(conn);
    assert_matches!(refused, Err(Error::Schema(Schema::MissingRights { .. })));
    conn.batch_execute("RESET SESSION AUTHORIZATION").unwrap();
    assert!(!is_gone(conn));
}

#[test]
fn twenty_at_once_drop_it_once() {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let start = std::sync::Barrier::new(20);
    let dropped: usize = std::thread::scope(|scope| {
        let instances: Vec<_> = (0..20)
            .map(|_| {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    start.wait();
                    migrations::uninstall(conn).unwrap().len()
                })
            })
            .collect();
        instances.into_iter().map(|it| it.join().unwrap()).sum()
    });
    assert_eq!(dropped, versions().len());
    assert!(is_gone(&mut database.connect()));
}

#[test]
fn what_it_names_stays_and_goes_on_after_the_rest_is_gone() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.batch_execute(
        "CREATE SEQUENCE resource_control.numbers OWNED BY resource_control.fence.token; \
         SELECT nextval('resource_control.numbers'); \
         CREATE STATISTICS theirs ON service, slot FROM resource_control.service_request",
    )
    .unwrap();
    assert_eq!(
        in_the_way(conn),
        [
            "sequence resource_control.numbers",
            "statistics object public.theirs"
        ]
    );
    conn.batch_execute(
        "ALTER SEQUENCE resource_control.numbers OWNED BY NONE; \
         ALTER SEQUENCE resource_control.numbers SET SCHEMA public; DROP STATISTICS theirs",
    )
    .unwrap();
    assert_eq!(migrations::uninstall(conn).unwrap().len(), versions().len());
    assert_eq!(number(conn, "SELECT nextval('numbers')"), 2);
}

#[test]
fn what_an_older_release_has_made_is_removed_and_nothing_that_looks_like_the_rest() {
    for count in 1..versions().len() {
        let database = Database::new();
        let conn = &mut database.connect();
        for directory in &directories()[..count] {
            let up = std::fs::read_to_string(directory.join("up.sql")).unwrap();
            conn.batch_execute(&up).unwrap();
        }
        conn.batch_execute("CREATE TABLE resource_control.rate_limit (id int)")
            .unwrap();
        assert_eq!(in_the_way(conn), ["table resource_control.rate_limit"]);
        conn.batch_execute("DROP TABLE resource_control.rate_limit")
            .unwrap();
        assert_eq!(migrations::uninstall(conn).unwrap().len(), count);
        assert!(is_gone(conn));
    }
}
