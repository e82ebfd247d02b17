//! Schemas that somebody made by hand: adopted where they are what ours is, refused where they differ.

use std::process::Command;
use std::sync::Barrier;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};
use diesel_interlock::error::Schema;
use diesel_interlock::{Error, ResourceLabel, Throttle, migrations};
use workbench::Database;

use crate::installation::{directories, pg_dump, versions};
use crate::roles::{Role, server};
use crate::support::{Observer, assert_matches};

pub(crate) const BY_HAND: &str = include_str!("by_hand.sql");

/// What a user has built on it.
const DEPENDANTS: &str = "
    ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'mail';
    CREATE TABLE job (
        id int PRIMARY KEY,
        resource resource_control.throttled_resource_enum REFERENCES resource_control.throttled_resource
    );
    INSERT INTO job VALUES (1, 'nightly report');
    CREATE VIEW job_view AS SELECT id, last_locked FROM job
        JOIN resource_control.throttled_resource ON resource_id = resource;
    CREATE FUNCTION job_lock(resource resource_control.throttled_resource_enum) RETURNS boolean LANGUAGE sql
        AS $$ SELECT resource_control.lock_throttled_resource(resource, 'job') $$;
    ALTER TABLE resource_control.throttled_resource SET (fillfactor = 90);
    COMMENT ON TABLE resource_control.throttled_resource IS 'theirs';
    GRANT SELECT ON resource_control.throttled_resource TO pg_monitor;
    GRANT EXECUTE ON FUNCTION resource_control.lock_throttled_resource TO pg_monitor;";

#[derive(QueryableByName, Debug, PartialEq, Eq)]
struct Line {
    #[diesel(sql_type = Nullable<Text>)]
    line: Option<String>,
}

fn lines(conn: &mut PgConnection, sql: &str) -> Vec<Line> {
    diesel::sql_query(sql)
        .load(conn)
        .unwrap_or_else(|error| panic!("{sql}: {error}"))
}

/// Every row of the catalogue that DDL could have changed, by who wrote it.
pub(crate) fn catalogue(conn: &mut PgConnection) -> Vec<String> {
    let mut rows = Vec::new();
    for table in [
        "pg_namespace",
        "pg_class",
        "pg_type",
        "pg_proc",
        "pg_attribute",
        "pg_constraint",
        "pg_description",
        "pg_enum",
        "pg_depend",
    ] {
        rows.extend(lines(
            conn,
            &format!("SELECT '{table} ' || xmin || ' ' || ctid AS line FROM pg_catalog.{table} ORDER BY 1"),
        ));
    }
    rows.into_iter().filter_map(|row| row.line).collect()
}

/// What there is in the schema, apart from rows, labels and the user's own.
fn schema(conn: &mut PgConnection) -> Vec<Line> {
    lines(
        conn,
        "SELECT line FROM (
            SELECT 'function ' || pg_get_functiondef(oid) || coalesce(obj_description(oid, 'pg_proc'), '') AS line
                FROM pg_proc WHERE pronamespace = 'resource_control'::regnamespace
            UNION ALL SELECT 'table ' || relname || coalesce(array_to_string(reloptions, ', '), '')
                    || coalesce(obj_description(oid, 'pg_class'), '') FROM pg_class
                WHERE relnamespace = 'resource_control'::regnamespace
            UNION ALL SELECT 'column ' || attrelid::regclass || '.' || attname || format_type(atttypid, atttypmod)
                    || attnotnull || coalesce(col_description(attrelid, attnum), '')
                FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
                WHERE relnamespace = 'resource_control'::regnamespace AND attnum > 0
            UNION ALL SELECT 'constraint ' || conrelid::regclass || '.' || conname || pg_get_constraintdef(oid)
                FROM pg_constraint WHERE connamespace = 'resource_control'::regnamespace
        ) AS everything ORDER BY line",
    )
}

fn expected_schema() -> Vec<Line> {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    schema(conn)
}

fn differences(conn: &mut PgConnection) -> Vec<String> {
    let before = catalogue(conn);
    let differences = match migrations::install(conn) {
        Err(Error::Schema(Schema::Foreign { differences })) => differences,
        other => panic!("{other:?}"),
    };
    assert_eq!(catalogue(conn), before, "{differences:?}");
    differences
}

#[test]
fn a_schema_made_by_hand_is_adopted_and_all_that_was_built_on_it_stays() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    conn.batch_execute(DEPENDANTS).unwrap();
    conn.batch_execute(
        "SELECT resource_control.lock_throttled_resource('nightly report', 'web-1')",
    )
    .unwrap();
    const THEIRS: &str = "SELECT last_locked || last_locker_details AS line FROM resource_control.throttled_resource \
        UNION ALL SELECT 'labels ' || count(*) FROM pg_enum UNION ALL SELECT 'jobs ' || count(*) FROM job \
        UNION ALL SELECT relname || ' ' || oid || ' ' || relfilenode || coalesce(relacl::text, '') FROM pg_class \
            WHERE relname IN ('throttled_resource', 'job', 'job_view') \
        UNION ALL SELECT proname || ' ' || oid || ' ' || coalesce(proacl::text, '') FROM pg_proc \
            WHERE proname IN ('lock_throttled_resource', 'job_lock') ORDER BY line";
    let theirs = lines(conn, THEIRS);

    let adopted = migrations::install(conn).unwrap();
    let all: Vec<_> = versions();
    assert_eq!(
        adopted.iter().map(ToString::to_string).collect::<Vec<_>>(),
        all
    );
    assert_eq!(lines(conn, THEIRS), theirs);
    assert_eq!(schema(conn), expected_schema());
    let settled = catalogue(conn);
    assert_eq!(migrations::install(conn).unwrap(), []);
    assert_eq!(catalogue(conn), settled);

    let denied = Throttle::of(ResourceLabel("nightly report".into()))
        .details("me")
        .attempt_on(conn);
    assert!(denied.unwrap().denied().is_some());
    let _ = Throttle::of(ResourceLabel("nightly report".into()))
        .key(7)
        .details("me")
        .attempt_on(conn)
        .unwrap();
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn it_is_adopted_once_by_twenty_instances_under_any_settings() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    conn.batch_execute(
        "CREATE SCHEMA impostor; CREATE DOMAIN impostor.text AS int; CREATE DOMAIN impostor.interval AS int;
         CREATE FUNCTION impostor.length(pg_catalog.text) RETURNS int LANGUAGE sql AS 'SELECT 0'",
    )
    .unwrap();
    let start = Barrier::new(20);
    let adopted: usize = std::thread::scope(|scope| {
        let instances: Vec<_> = (0..20)
            .map(|_| {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    conn.batch_execute(
                        "SET search_path = impostor, public, pg_catalog; \
                         SET default_transaction_isolation = serializable; \
                         SET standard_conforming_strings = off; SET TimeZone = 'Europe/Paris'; \
                         SET IntervalStyle = 'sql_standard'; SET DateStyle = 'German'",
                    )
                    .unwrap();
                    start.wait();
                    migrations::install(conn).unwrap().len()
                })
            })
            .collect();
        instances.into_iter().map(|it| it.join().unwrap()).sum()
    });
    assert_eq!(adopted, versions().len());
    assert_eq!(schema(conn), expected_schema());
}

#[test]
fn adopting_waits_for_no_session_and_no_session_waits_for_it() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    let taking = &mut database.connect();
    taking
        .batch_execute(
            "BEGIN; SELECT resource_control.lock_throttled_resource('nightly report', 'web-1')",
        )
        .unwrap();
    conn.batch_execute("SET lock_timeout = '5s'").unwrap();
    migrations::install(conn).unwrap();
    taking
        .batch_execute(
            "SELECT resource_control.lock_throttled_resource('nightly report', 'web-1'); COMMIT",
        )
        .unwrap();
}

#[test]
fn an_empty_schema_is_filled() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute("CREATE SCHEMA resource_control")
        .unwrap();
    migrations::install(conn).unwrap();
    assert_eq!(schema(conn), expected_schema());
}

#[test]
fn each_difference_is_stated_and_nothing_is_changed() {
    let on = "resource_control.throttled_resource";
    let column = "table column resource_control.throttled_resource";
    let function = "function resource_control.lock_throttled_resource";
    let cases: [(String, Vec<String>); _] = [
        (
            format!("ALTER TABLE {on} ALTER last_locked TYPE timestamp"),
            vec![format!(
                "{column}.last_locked is \"timestamp without time zone NOT NULL\", \
                 expected \"timestamp with time zone NOT NULL\""
            )],
        ),
        (
            format!("ALTER TABLE {on} ALTER last_locked DROP NOT NULL, ALTER last_locker_details DROP DEFAULT"),
            vec![
                format!("{column}.last_locked is \"timestamp with time zone\", expected"),
                format!("default value for {on}.last_locker_details is missing"),
            ],
        ),
        (
            format!("ALTER TABLE {on} ALTER last_locked SET DEFAULT 'infinity'"),
            vec![format!("default value for {on}.last_locked is \"'infinity'::")],
        ),
        (
            format!("ALTER TABLE {on} ALTER throttle_interval SET DEFAULT '1 second'"),
            vec![format!("default value for {on}.throttle_interval is not expected")],
        ),
        (
            format!(
                "ALTER TABLE {on} DROP CONSTRAINT empty_rules, ALTER last_locker_details TYPE text COLLATE \"C\", \
                 ADD CONSTRAINT empty_rules CHECK (\
                     last_locked = '-infinity' AND last_locker_details = '' \
                     OR last_locked <> '-infinity' AND length(trim(last_locker_details)) > 0)"
            ),
            vec![format!("{column}.last_locker_details is \"text COLLATE ")],
        ),
        (
            format!("ALTER TABLE {on} DROP CONSTRAINT positive_delays_only"),
            vec![format!("table constraint positive_delays_only on {on} is missing")],
        ),
        (
            format!(
                "ALTER TABLE {on} DROP CONSTRAINT positive_delays_only, \
                 ADD CONSTRAINT positive_delays_only CHECK (throttle_interval > '1 second')"
            ),
            vec![format!("table constraint positive_delays_only on {on} is \"CHECK")],
        ),
        (
            format!(
                "ALTER TABLE {on} DROP CONSTRAINT positive_delays_only, \
                 ADD CONSTRAINT positive_delays_only CHECK (throttle_interval > '0') NOT VALID"
            ),
            vec![format!("table constraint positive_delays_only on {on} is \"CHECK")],
        ),
        (
            format!("ALTER TABLE {on} RENAME CONSTRAINT empty_rules TO rules"),
            vec![
                format!("table constraint empty_rules on {on} is missing"),
                format!("table constraint rules on {on} is not expected"),
            ],
        ),
        (
            format!("ALTER TABLE {on} DROP last_locker_details"),
            vec![
                format!("{column}.last_locker_details is missing"),
                format!("table constraint empty_rules on {on} is missing"),
            ],
        ),
        (
            format!("ALTER TABLE {on} DROP CONSTRAINT throttled_resource_pkey"),
            vec![format!("table constraint throttled_resource_pkey on {on} is missing")],
        ),
        (
            format!("ALTER TABLE {on} ADD tenant int NOT NULL DEFAULT 0; ALTER TABLE {on} ALTER tenant DROP DEFAULT"),
            vec![format!("{column}.tenant is not expected")],
        ),
        (
            format!("ALTER TABLE {on} ADD note text"),
            vec![format!("{column}.note is not expected")],
        ),
        (
            format!("CREATE UNIQUE INDEX theirs ON {on} (last_locked)"),
            vec!["index resource_control.theirs is not expected".to_owned()],
        ),
        (
            // It fails for some rows.
            format!("CREATE INDEX theirs ON {on} ((1 / length(last_locker_details))) WHERE last_locker_details <> ''"),
            vec!["index resource_control.theirs is not expected".to_owned()],
        ),
        (
            format!("CREATE STATISTICS public.theirs ON last_locked, throttle_interval FROM {on}"),
            vec!["statistics object public.theirs is not expected".to_owned()],
        ),
        (
            format!("ALTER TABLE {on} RENAME TO mine; CREATE VIEW {on} AS SELECT * FROM resource_control.mine"),
            vec![
                format!("table {on} is missing"),
                format!("view {on} is not expected"),
                "table resource_control.mine is not expected".to_owned(),
            ],
        ),
        (
            format!("ALTER TABLE {on} SET UNLOGGED"),
            vec![format!("table {on} is \"an unlogged table\", expected \"a table\"")],
        ),
        (
            format!("ALTER TABLE {on} ENABLE ROW LEVEL SECURITY"),
            vec![format!("table {on} is \"a table with row security\"")],
        ),
        (
            format!("ALTER TABLE {on} FORCE ROW LEVEL SECURITY"),
            vec![format!("table {on} is \"a table with row security for its owner\"")],
        ),
        (
            format!("CREATE POLICY theirs ON {on} USING (false)"),
            vec![format!("policy theirs on {on} is not expected")],
        ),
        (
            // With this one the function grants again and again.
            format!("CREATE RULE theirs AS ON UPDATE TO {on} DO INSTEAD NOTHING"),
            vec![format!("rule theirs on {on} is not expected")],
        ),
        (
            format!("CREATE RULE theirs AS ON UPDATE TO {on} DO ALSO NOTIFY theirs; ALTER TABLE {on} DISABLE RULE theirs"),
            vec![format!("rule theirs on {on} is not expected")],
        ),
        (
            format!(
                "CREATE FUNCTION theirs() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; \
                 CREATE TRIGGER theirs BEFORE UPDATE ON {on} FOR EACH ROW EXECUTE FUNCTION theirs()"
            ),
            vec![format!("trigger theirs on {on} is not expected")],
        ),
        (
            format!("ALTER TABLE {on} REPLICA IDENTITY NOTHING"),
            vec![format!("table {on} is \"a table with the replica identity n\"")],
        ),
        (
            format!("CREATE TABLE child () INHERITS ({on})"),
            vec![format!("table {on} is \"a table that others inherit\"")],
        ),
        (
            format!("CREATE TABLE parent (throttle_interval interval NOT NULL); ALTER TABLE {on} INHERIT parent"),
            vec![format!("table {on} is \"a table that inherits\"")],
        ),
        (
            format!("ALTER TABLE {on} ALTER resource_id TYPE text"),
            vec![format!("{column}.resource_id is \"text NOT NULL\", expected \"resource_control.throttled_resource_enum")],
        ),
        (
            format!(
                "DROP FUNCTION resource_control.lock_throttled_resource; \
                 CREATE {function}(resource_id_var resource_control.throttled_resource_enum, details_var text) \
                 RETURNS integer LANGUAGE sql AS 'SELECT 1'"
            ),
            vec![format!("{function}(resource_control.throttled_resource_enum,pg_catalog.text) is \"a function of (")],
        ),
        (
            format!(
                "DROP FUNCTION resource_control.lock_throttled_resource; \
                 CREATE {function}(a resource_control.throttled_resource_enum, b text) \
                 RETURNS boolean LANGUAGE sql AS 'SELECT true'"
            ),
            vec![format!("{function}(resource_control.throttled_resource_enum,pg_catalog.text) is \"a function of (a ")],
        ),
        (
            format!(
                "DROP FUNCTION resource_control.lock_throttled_resource; \
                 CREATE {function}(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true'"
            ),
            vec![
                format!("{function}(resource_control.throttled_resource_enum,pg_catalog.text) is missing"),
                format!("{function}(pg_catalog.text,pg_catalog.text) is not expected"),
            ],
        ),
        (
            // A call with two literals would mean this one.
            format!("CREATE {function}(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true'"),
            vec![format!("{function}(pg_catalog.text,pg_catalog.text) is not expected")],
        ),
        (
            "DROP FUNCTION resource_control.lock_throttled_resource".to_owned(),
            vec![format!("{function}(resource_control.throttled_resource_enum,pg_catalog.text) is missing")],
        ),
        (
            "CREATE TABLE resource_control.service_request (id bigserial PRIMARY KEY, service text NOT NULL)"
                .to_owned(),
            vec![
                "sequence resource_control.service_request_id_seq is not expected".to_owned(),
                "table resource_control.service_request is not expected".to_owned(),
            ],
        ),
        (
            // It has the name of our table of versions.
            "CREATE VIEW resource_control.installed_migration AS SELECT 1 AS version".to_owned(),
            vec!["view resource_control.installed_migration is not expected".to_owned()],
        ),
        (
            "CREATE OPERATOR resource_control.= (LEFTARG = text, RIGHTARG = text, FUNCTION = pg_catalog.textne)"
                .to_owned(),
            vec!["operator resource_control.=(pg_catalog.text,pg_catalog.text) is not expected".to_owned()],
        ),
        (
            "CREATE TEXT SEARCH CONFIGURATION resource_control.theirs (COPY = simple)".to_owned(),
            vec!["text search configuration resource_control.theirs is not expected".to_owned()],
        ),
    ];
    for (change, expected) in cases {
        let database = Database::new();
        let conn = &mut database.connect();
        conn.batch_execute(BY_HAND).unwrap();
        conn.batch_execute(&change)
            .unwrap_or_else(|error| panic!("{change}: {error}"));
        let differences = differences(conn);
        for expected in expected {
            let stated = differences.iter().any(|it| it.starts_with(&expected));
            assert!(stated, "{change}: {expected:?} in {differences:#?}");
        }
        let unique: std::collections::BTreeSet<_> = differences.iter().collect();
        assert_eq!(unique.len(), differences.len(), "{differences:#?}");
    }
}

/// The article, word for word.
#[test]
fn the_articles_own_text_is_adopted() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(
        "create schema resource_control;
         -- Simple enumeration of the resources we guard ...
         create type resource_control.throttled_resource_enum
             as enum ('Expensive Cache Rebuild #1');
         /* Table modeling throttled resources + soft lock state */
         create table resource_control.throttled_resource
         (
             resource_id resource_control.throttled_resource_enum primary key,
             throttle_interval interval not null
                 constraint positive_delays_only
                 check (throttle_interval > '00:00:00'),
             last_locked timestamptz not null
                 default '-infinity',
             last_locker_details text not null
                 default ''
                 constraint empty_rules
                 check (
                         (last_locked = '-infinity' and last_locker_details = '')
                     or
                         (last_locked != '-infinity'
                             and length(trim(last_locker_details)) > 0)
                 )
         );
         insert into resource_control.throttled_resource (resource_id, throttle_interval)
             values ('Expensive Cache Rebuild #1', '15 seconds');
         create function resource_control.lock_throttled_resource(
                 resource_id_var resource_control.throttled_resource_enum,
                 details_var text)
         returns boolean strict volatile language plpgsql as
         $$
             declare
                 right_now_var timestamptz := statement_timestamp();
             begin
                 UPDATE resource_control.throttled_resource
                     SET last_locked = right_now_var, last_locker_details = details_var
                     WHERE resource_id = (
                         SELECT tq.resource_id FROM resource_control.throttled_resource tq
                         WHERE tq.resource_id = resource_id_var
                         AND tq.last_locked + tq.throttle_interval < right_now_var
                         FOR UPDATE SKIP LOCKED
                     );
                 return FOUND;
             end;
         $$",
    )
    .unwrap();
    migrations::install(conn).unwrap();
    assert_eq!(schema(conn), expected_schema());
}

/// Since 14 the server shows `trim(x)` as `TRIM(BOTH FROM x)`. A dump of an older one has `btrim(x)`.
#[test]
fn a_schema_that_an_older_server_dumped_is_adopted() {
    let by_hand = BY_HAND.replace("trim(", "btrim(");
    let copy_without_rows = "
        ALTER TABLE resource_control.throttled_resource
            DROP CONSTRAINT empty_rules,
            ADD CONSTRAINT empty_rules CHECK (
                last_locked = '-infinity' AND last_locker_details = ''
                OR last_locked <> '-infinity' AND length(btrim(last_locker_details)) > 0
            );
        ALTER TABLE resource_control.throttled_key
            DROP CONSTRAINT details_not_empty,
            ADD CONSTRAINT details_not_empty CHECK (length(btrim(last_locker_details)) > 0);
        DELETE FROM resource_control.installed_migration";
    for dumped in [&*by_hand, copy_without_rows] {
        let database = Database::new();
        let conn = &mut database.connect();
        if dumped == copy_without_rows {
            migrations::install(conn).unwrap();
        }
        conn.batch_execute(dumped).unwrap();
        assert_eq!(migrations::install(conn).unwrap().len(), versions().len());
        assert_eq!(migrations::uninstall(conn).unwrap().len(), versions().len());
    }
}

/// What `pg_dump -s` makes: the objects, and no row that says which migrations made them.
fn copy_without_rows(database: &Database) -> Option<Database> {
    let arguments = ["--schema-only", "--no-owner"];
    let dump = pg_dump(&arguments, &mut database.connect(), &database.url())?;
    let copy = Database::new();
    let script = std::env::temp_dir().join(format!("interlock-{}.sql", copy.name()));
    std::fs::write(&script, dump).unwrap();
    let restored = Command::new("psql")
        .args(["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--file"])
        .arg(&script)
        .arg(copy.url())
        .output()
        .unwrap();
    std::fs::remove_file(script).unwrap();
    assert!(restored.status.success(), "{restored:?}");
    Some(copy)
}

#[test]
fn a_copy_without_rows_is_recognised_and_brought_up_to_date() {
    let all = versions();
    let directories = directories();
    for count in 1..=all.len() {
        let database = Database::new();
        let conn = &mut database.connect();
        for directory in &directories[..count] {
            let up = std::fs::read_to_string(directory.join("up.sql")).unwrap();
            conn.batch_execute(&up).unwrap();
        }
        conn.batch_execute(
            "CREATE TABLE resource_control.theirs (id int); \
             CREATE VIEW theirs AS SELECT version FROM resource_control.installed_migration",
        )
        .unwrap();
        let Some(copy) = copy_without_rows(&database) else {
            return;
        };
        let conn = &mut copy.connect();
        // It changes what PostgreSQL tells of its catalogue.
        conn.batch_execute("SET quote_all_identifiers = on")
            .unwrap();
        let uninstalled = migrations::uninstall(conn);
        assert_matches!(uninstalled, Err(Error::Schema(Schema::Foreign { .. })));
        let installed = migrations::install(conn).unwrap();
        let installed: Vec<_> = installed.iter().map(ToString::to_string).collect();
        assert_eq!(installed, all, "copy of {count}");
        assert_eq!(migrations::install(conn).unwrap(), []);
        conn.batch_execute("DROP TABLE resource_control.theirs; DROP VIEW theirs")
            .unwrap();
        conn.batch_execute("RESET quote_all_identifiers").unwrap();
        assert_eq!(schema(conn), expected_schema(), "copy of {count}");
        assert_eq!(migrations::uninstall(conn).unwrap().len(), all.len());
    }
}

#[test]
fn a_copy_that_was_changed_is_refused_with_the_differences() {
    let pass_fence = "function resource_control.pass_fence(pg_catalog.text,bigint)";
    for (change, expected) in [
        (
            "DROP FUNCTION resource_control.pass_fence",
            format!("{pass_fence} is missing"),
        ),
        (
            "CREATE OR REPLACE FUNCTION resource_control.pass_fence(name text, token bigint) RETURNS boolean \
             LANGUAGE sql AS 'SELECT true'",
            format!("body of {pass_fence} is not this crate's"),
        ),
        (
            "ALTER TABLE resource_control.service_request ALTER details DROP DEFAULT",
            "default value for resource_control.service_request.details is missing".to_owned(),
        ),
        (
            "DROP INDEX resource_control.service_request_in_flight",
            "index resource_control.service_request_in_flight is missing".to_owned(),
        ),
        (
            "DROP TABLE resource_control.fence",
            "table resource_control.fence is missing".to_owned(),
        ),
        (
            "ALTER TABLE resource_control.installed_migration ENABLE ROW LEVEL SECURITY",
            "table resource_control.installed_migration is \"a table with row security\", expected \"a table\"".to_owned(),
        ),
    ] {
        let database = Database::new();
        let conn = &mut database.connect();
        migrations::install(conn).unwrap();
        conn.batch_execute("TRUNCATE resource_control.installed_migration")
            .unwrap();
        conn.batch_execute(change).unwrap();
        let differences = differences(conn);
        assert!(
            differences.contains(&expected),
            "{expected:?} in {differences:#?}"
        );
    }
}

#[test]
fn the_message_names_the_differences_and_the_way_out() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute("CREATE SCHEMA resource_control; CREATE DOMAIN resource_control.throttled_resource_enum AS text")
        .unwrap();
    let message = migrations::install(conn).unwrap_err().to_string();
    assert!(
        message.contains("type resource_control.throttled_resource_enum is \"a domain\", expected \"an enumerated type\""),
        "{message}"
    );
    assert!(message.contains("rename it"), "{message}");
}

#[test]
fn a_role_that_does_not_own_it_gets_an_error_that_says_so() {
    let database = server().database();
    let role = Role::new(&database);
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    conn.batch_execute(&format!("SET SESSION AUTHORIZATION {}", role.name()))
        .unwrap();
    let refused = migrations::install(conn);
    assert_matches!(refused, Err(Error::Schema(Schema::MissingRights { .. })));
}

#[test]
fn an_owner_who_may_not_make_schemas_gets_an_error_that_says_so() {
    let database = server().database();
    let role = Role::new(&database);
    let conn = &mut database.connect();
    let name = role.name();
    conn.batch_execute(&format!(
        "CREATE SCHEMA resource_control AUTHORIZATION {name}; SET SESSION AUTHORIZATION {name}; \
         CREATE TYPE resource_control.throttled_resource_enum AS ENUM ()"
    ))
    .unwrap();
    let refused = migrations::install(conn);
    assert_matches!(
        refused,
        Err(Error::Schema(Schema::MissingRights { missing, .. }))
            if missing.starts_with("CREATE on the database, to compare")
    );
    // Before the database goes, what the role owns in it.
    conn.batch_execute("RESET SESSION AUTHORIZATION; DROP SCHEMA resource_control CASCADE")
        .unwrap();
}

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

#[test]
fn what_was_adopted_goes_on_throttling() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.batch_execute(BY_HAND).unwrap();
    migrations::install(conn).unwrap();
    let mut lock = |who: &str| -> i64 {
        diesel::sql_query(
            "SELECT resource_control.lock_throttled_resource('nightly report', $1)::int::bigint AS count",
        )
        .bind::<Text, _>(who)
        .get_result::<Count>(conn)
        .unwrap()
        .count
    };
    assert_eq!(lock("web-1"), 1);
    assert_eq!(lock("web-2"), 0);
}
