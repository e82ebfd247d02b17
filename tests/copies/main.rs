//! Copies of a database: after each kind of dump, restore, backup, upgrade and replication, tokens
//! are larger than those of the original.
//!
//! Run by `scripts/test with copies`, which installs a server of a newer major version.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_interlock::schedule::every;
use diesel_interlock::{AdvisoryLock, Error, PgPool, Schedule, Semaphore, migrations};
use workbench::{Cluster, Endpoint};

static LOCK: AdvisoryLock = AdvisoryLock::named("copies");
static SLOT: Semaphore = Semaphore::named("copies", 1, Duration::from_secs(60));
static SCHEDULE: Schedule = Schedule::named("copies");

/// The directory of the programs of a newer major version than the workbench's.
fn newer() -> PathBuf {
    let directory = std::env::var_os("NEWER_PGBINDIR");
    directory
        .expect("NEWER_PGBINDIR, which scripts/test with copies sets")
        .into()
}

/// The number that an SQL expression returns.
fn number(conn: &mut PgConnection, expression: &str) -> i64 {
    let number = diesel::dsl::sql::<BigInt>(&format!("({expression})::bigint"));
    diesel::select(number).get_result(conn).unwrap()
}

#[track_caller]
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The standard output of a program, which must succeed.
fn output(program: &mut Command) -> Vec<u8> {
    let output = program.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{program:?}");
    output.stdout
}

fn psql(endpoint: &Endpoint, sql: &[u8]) {
    use std::io::Write;
    let mut psql = Command::new("psql")
        .args(["-qX", "-v", "ON_ERROR_STOP=1", &endpoint.url()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    psql.stdin.take().unwrap().write_all(sql).unwrap();
    assert!(psql.wait().unwrap().success());
}

/// The largest tokens that were drawn so far: of a lock, a permit and a run.
#[derive(Debug, Default)]
struct Drawn([i64; 3]);

impl Drawn {
    /// Draws tokens of each kind. Asserts that each is larger than the last one.
    #[track_caller]
    fn draw(&mut self, pool: &PgPool) {
        for _ in 0..5 {
            let tokens = [
                token_of_lock(pool),
                token_of_permit(pool),
                token_of_run(pool),
            ];
            for (new, old) in tokens.into_iter().zip(self.0) {
                assert!(new > old, "{tokens:?} after {self:?}");
            }
            self.0 = tokens;
        }
    }

    /// Asserts that the database is found to be a copy. Installs, and draws tokens.
    #[track_caller]
    fn draw_in_copy(&mut self, copy: &Endpoint) {
        let pool = copy.pool(2);
        let checked = migrations::check(&pool);
        assert!(
            matches!(checked, Err(Error::CopiedSchema { .. })),
            "{checked:?}"
        );
        migrations::install(&pool).unwrap();
        migrations::check(&pool).unwrap();
        self.draw(&pool);
        // A second installation changes nothing.
        let conn = &mut copy.connect();
        let base = "SELECT base FROM resource_control.token_base";
        let before = number(conn, base);
        migrations::install(&pool).unwrap();
        assert_eq!(number(conn, base), before);
    }
}

fn token_of_lock(pool: &PgPool) -> i64 {
    let mut guard = LOCK.acquire(pool).unwrap();
    let token = guard.fencing_token().unwrap();
    guard.release().unwrap();
    token
}

fn token_of_permit(pool: &PgPool) -> i64 {
    let permit = SLOT.acquire(pool).unwrap();
    let token = permit.fencing_token();
    permit.release().unwrap();
    token
}

fn token_of_run(pool: &PgPool) -> i64 {
    let mut token = 0;
    until("a tick has run", || {
        let next = every(Duration::from_millis(1));
        let looked = SCHEDULE.run_due(pool, next, |tick| {
            token = tick.fencing_token();
            Ok::<_, Error>(())
        });
        let _ = looked.unwrap();
        token > 0
    });
    token
}

/// A server whose database has tokens, of which some are beyond 2⁴⁰ after a promotion.
fn promoted(drawn: &mut Drawn) -> Cluster {
    let primary = Cluster::builder().setting("wal_level", "logical").start();
    let pool = primary.endpoint("postgres").pool(2);
    migrations::install(&pool).unwrap();
    drawn.draw(&pool);
    let standby = primary.standby();
    let conn = &mut primary.endpoint("postgres").connect();
    let conn_of_standby = &mut standby.endpoint("postgres").connect();
    let written = "pg_current_wal_lsn() - '0/0'::pg_lsn";
    let written = number(conn, written);
    until("the standby has followed", || {
        number(conn_of_standby, "pg_last_wal_replay_lsn() - '0/0'::pg_lsn") >= written
    });
    // A promoted standby is not a copy, so it needs no installation.
    migrations::check(&standby.endpoint("postgres").pool(2)).unwrap();
    standby.detach();
    standby.promote();
    let pool = standby.endpoint("postgres").pool(2);
    migrations::check(&pool).unwrap();
    drawn.draw(&pool);
    assert!(drawn.0.iter().all(|&token| token > 1 << 40), "{drawn:?}");
    standby
}

#[test]
fn a_dump_that_is_restored_into_the_same_server_or_another_one() {
    let mut drawn = Drawn::default();
    let cluster = promoted(&mut drawn);
    let original = cluster.endpoint("postgres");
    let dump = |format: &str| {
        let mut dump = Command::new(cluster.binaries().join("pg_dump"));
        output(dump.args([format, "--dbname", &original.url()]))
    };
    let (custom, plain) = (dump("--format=custom"), dump("--format=plain"));
    let file = cluster.directory().join("dump");
    std::fs::write(&file, custom).unwrap();
    let restore = |into: &Endpoint, arguments: &[&str]| {
        let mut restore = Command::new(cluster.binaries().join("pg_restore"));
        output(
            restore
                .args(["--exit-on-error", "--dbname", &into.url()])
                .args(arguments)
                .arg(&file),
        );
    };
    // The original draws tokens after the dump, which the dump does not contain.
    drawn.draw(&original.pool(2));
    let other = Cluster::builder().start_with(&newer());
    for server in [&cluster, &other] {
        let database = server.database();
        restore(&database, &[]);
        drawn.draw_in_copy(&database);
        let database = server.database();
        psql(&database, &plain);
        drawn.draw_in_copy(&database);
        // Each restore into the same database replaces the one before.
        for _ in 0..2 {
            restore(&database, &["--clean", "--if-exists"]);
            drawn.draw_in_copy(&database);
        }
    }
}

/// The dump is older than two failovers of the original, and is then restored into a new server.
#[test]
fn a_dump_that_is_older_than_promotions_of_its_original() {
    let mut drawn = Drawn::default();
    let mut primary = Cluster::start();
    migrations::install(&primary.endpoint("postgres").pool(2)).unwrap();
    drawn.draw(&primary.endpoint("postgres").pool(2));
    let mut dump = Command::new(primary.binaries().join("pg_dump"));
    let dump = output(dump.args(["--dbname", &primary.url("postgres")]));
    for _ in 0..2 {
        let standby = primary.standby();
        standby.detach();
        standby.promote();
        drawn.draw(&standby.endpoint("postgres").pool(2));
        primary = standby;
    }
    // The timelines of a new server begin at 1 again.
    let new = Cluster::start();
    for _ in 0..2 {
        let database = new.database();
        psql(&database, &dump);
        drawn.draw_in_copy(&database);
    }
}

#[test]
fn a_template_that_is_copied() {
    let mut drawn = Drawn::default();
    let cluster = promoted(&mut drawn);
    let conn = &mut cluster.endpoint("template1").connect();
    let copy = "CREATE DATABASE copy TEMPLATE postgres";
    until("nobody is connected", || conn.batch_execute(copy).is_ok());
    drawn.draw(&cluster.endpoint("postgres").pool(2));
    drawn.draw_in_copy(&cluster.endpoint("copy"));
}

/// A physical backup has the identity of its original, so it is not found to be a copy.
#[test]
fn a_backup_that_is_started_as_it_is() {
    let mut drawn = Drawn::default();
    let original = promoted(&mut drawn);
    let backup = original.backup();
    drawn.draw(&original.endpoint("postgres").pool(2));
    original.stop(workbench::StopMode::Immediate);
    let pool = backup.endpoint("postgres").pool(2);
    migrations::check(&pool).unwrap();
    migrations::restart_tokens(&pool).unwrap();
    migrations::check(&pool).unwrap();
    drawn.draw(&pool);
    let standby = backup.standby();
    standby.detach();
    standby.promote();
    drawn.draw(&standby.endpoint("postgres").pool(2));
}

#[test]
fn an_upgrade_by_pg_upgrade() {
    let mut drawn = Drawn::default();
    let old = promoted(&mut drawn);
    let new = old.upgraded(&newer());
    let versions = [old.binaries(), new.binaries()];
    println!("pg_upgrade from {versions:?}");
    drawn.draw_in_copy(&new.endpoint("postgres"));
    let standby = new.standby();
    standby.detach();
    standby.promote();
    drawn.draw(&standby.endpoint("postgres").pool(2));
}

/// As in a blue-green deployment.
#[test]
fn a_move_by_logical_replication_to_a_newer_server() {
    let mut drawn = Drawn::default();
    let old = promoted(&mut drawn);
    let conn = &mut old.endpoint("postgres").connect();
    let mut dump = Command::new(old.binaries().join("pg_dump"));
    let schema = output(dump.args(["--schema-only", "--dbname", &old.url("postgres")]));
    let of_table = "resource_control.service_request, resource_control.schedule, \
        resource_control.fence, resource_control.installed_migration";
    for (name, tables) in [
        ("whole", "ALL TABLES".to_owned()),
        // In this round `token_base` is not replicated.
        ("parts", format!("TABLE {of_table}")),
    ] {
        conn.batch_execute(&format!("CREATE PUBLICATION {name} FOR {tables}"))
            .unwrap();
        let new = Cluster::builder()
            .setting("wal_level", "logical")
            .start_with(&newer());
        let green = new.endpoint("postgres");
        psql(&green, &schema);
        let conn_of_green = &mut green.connect();
        conn_of_green
            .batch_execute(&format!(
                "CREATE SUBSCRIPTION {name} CONNECTION '{}' PUBLICATION {name}",
                old.url("postgres")
            ))
            .unwrap();
        until("the tables are copied", || {
            number(
                conn_of_green,
                "(SELECT count(*) FILTER (WHERE srsubstate <> 'r') FROM pg_subscription_rel)",
            ) == 0
        });
        // Changes after the initial copy.
        drawn.draw(&old.endpoint("postgres").pool(2));
        let last = "SELECT max(id) FROM resource_control.service_request";
        let last_of_old = number(conn, last);
        until("the last row has come", || {
            number(conn_of_green, last) == last_of_old
                && number(
                    conn_of_green,
                    "SELECT max(token) FROM resource_control.schedule",
                ) == drawn.0[2]
        });
        conn_of_green
            .batch_execute(&format!("DROP SUBSCRIPTION {name}"))
            .unwrap();
        drawn.draw_in_copy(&green);
        // The second round begins with the old server again, whose tokens are smaller.
        drawn = Drawn::default();
    }
}
