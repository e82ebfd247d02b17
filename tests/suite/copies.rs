//! A copy of a database is recognized, and its fencing tokens continue above those of the original.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use diesel::PgConnection;
use workbench::Database;

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, Error, PgPool, Schedule, Semaphore, make_pool, migrations, on_first, pool, wait,
    while_it_runs,
};
use crate::support::{LEASE, Role, eventually, installed, number, run, text, truth};

static LOCK: AdvisoryLock = AdvisoryLock::named("copies");
static SLOT: Semaphore = Semaphore::named("copies", 1, Duration::from_secs(60));

const PATIENCE: Duration = Duration::from_secs(20);

/// Makes the database look like a copy whose sequences begin at 1 again.
const COPY: &str = "UPDATE resource_control.token_base SET identity = '', base = 0;
    SELECT setval('resource_control.fencing_token', 1, false),
        setval('resource_control.service_request_id_seq', 1, false);";

/// A token above the first numbers of all ranges of the next hundred years.
const FAR: i64 = 100_000 << 40;

fn token_of_lock(pool: &PgPool) -> i64 {
    let mut guard = wait(LOCK.acquire(pool)).unwrap();
    let token = wait(guard.fencing_token()).unwrap();
    wait(guard.release()).unwrap();
    token
}

fn token_of_permit(pool: &PgPool) -> i64 {
    let permit = wait(SLOT.acquire(pool)).unwrap();
    let token = permit.fencing_token();
    wait(permit.release()).unwrap();
    token
}

/// Installs, and returns the smaller one of the next tokens of a lock and a permit.
fn next_token(pool: &PgPool) -> i64 {
    wait(migrations::install(pool)).unwrap();
    wait(migrations::check(pool)).unwrap();
    token_of_lock(pool).min(token_of_permit(pool))
}

fn base(conn: &mut PgConnection) -> String {
    text(
        conn,
        "(SELECT b::text FROM resource_control.token_base AS b)",
    )
}

/// The copy has other sequences than the original, so only rows show which tokens the original has
/// drawn. Each of the rows below shows a large token; some others must not be taken for tokens.
#[test]
fn tokens_of_a_copy_are_larger_than_all_tokens_in_its_rows() {
    let far = FAR + 7;
    for shown in [
        format!(
            "INSERT INTO resource_control.service_request (id, service, slot, completed_at)
                OVERRIDING SYSTEM VALUE VALUES ({far}, 's', 0, now())"
        ),
        format!(
            "INSERT INTO resource_control.schedule (name, tick, token) VALUES ('s', now(), {far})"
        ),
        format!("INSERT INTO resource_control.fence VALUES ('f', {far})"),
        format!("SELECT setval('resource_control.fencing_token', {far})"),
        format!("SELECT setval('resource_control.service_request_id_seq', {far})"),
        "UPDATE resource_control.token_base SET base = 100000".to_owned(),
        // Too large to be a base.
        format!(
            "UPDATE resource_control.token_base SET base = 1::bigint << 22;
             INSERT INTO resource_control.fence VALUES ('f', {far})"
        ),
        // Only some tables were copied, and `token_base` was not among them.
        format!(
            "DELETE FROM resource_control.token_base; INSERT INTO resource_control.fence VALUES ('f', {far})"
        ),
    ] {
        let database = installed();
        let conn = &mut database.connect();
        // Too large to be tokens.
        run(
            conn,
            &format!(
                "{COPY} INSERT INTO resource_control.fence VALUES ('absurd', (1::bigint << 62)), ('largest', {});
                 INSERT INTO resource_control.schedule (name, tick, token) VALUES ('absurd', now(), 1::bigint << 62);
                 INSERT INTO resource_control.service_request (id, service, slot, completed_at)
                    OVERRIDING SYSTEM VALUE VALUES (1::bigint << 62, 'absurd', 0, now());
                 {shown}",
                i64::MAX
            ),
        );
        let token = next_token(&pool(&database, 1));
        assert!(
            token > 100_001 << 40 && token < 100_002 << 40,
            "{token} after {shown}"
        );
        assert_eq!(
            number(conn, "(SELECT base FROM resource_control.token_base)"),
            100_001
        );
    }
}

#[test]
fn a_database_without_tokens_begins_at_the_first_range() {
    let database = Database::new();
    assert_eq!(next_token(&pool(&database, 1)), 1);
    let conn = &mut database.connect();
    assert_eq!(
        number(conn, "(SELECT base FROM resource_control.token_base)"),
        0
    );
}

/// For example, of a dump that is restored twice.
#[test]
fn a_later_copy_of_the_same_original_continues_above_an_earlier_one() {
    let database = installed();
    let (pool, conn) = (pool(&database, 1), &mut database.connect());
    // As after thirty promotions of the original.
    let mut largest = 30 << 40;
    for _ in 0..3 {
        run(
            conn,
            &format!("DELETE FROM resource_control.service_request; {COPY}"),
        );
        let token = next_token(&pool);
        assert!(token > largest, "{token} after {largest}");
        largest = token;
    }
}

#[test]
fn a_copy_within_the_server_is_noticed() {
    let database = installed();
    let (of_original, server) = (pool(&database, 1), Database::new());
    let before = next_token(&of_original);
    drop(of_original);
    let conn = &mut server.connect();
    let (original, copy) = (database.name(), format!("{}_copy", database.name()));
    let copied = format!("CREATE DATABASE {copy} TEMPLATE {original}");
    eventually("nobody is connected to the original", || {
        use diesel::connection::SimpleConnection;
        conn.batch_execute(&copied).is_ok()
    });
    let copied = make_pool(&database.url().replace(original, &copy), 1, PATIENCE);
    let is_known = wait(migrations::check(&copied));
    // The original is not taken for a copy.
    wait(migrations::check(&pool(&database, 1))).unwrap();
    let after = next_token(&copied);
    drop(copied);
    run(conn, &format!("DROP DATABASE {copy} WITH (FORCE)"));
    assert_matches!(is_known, Err(Error::CopiedSchema { .. }));
    assert!(
        after > 1 << 40 && before < 1 << 40,
        "{after} after {before}"
    );
}

/// As `pg_restore --clean` does.
#[test]
fn a_restore_into_the_same_database_is_noticed() {
    let database = installed();
    let (pool, conn) = (pool(&database, 1), &mut database.connect());
    wait(migrations::check(&pool)).unwrap();
    run(
        conn,
        "CREATE TABLE restored (LIKE resource_control.token_base INCLUDING ALL);
         INSERT INTO restored SELECT * FROM resource_control.token_base;
         DROP TABLE resource_control.token_base;
         ALTER TABLE restored SET SCHEMA resource_control;
         ALTER TABLE resource_control.restored RENAME TO token_base",
    );
    assert_matches!(
        wait(migrations::check(&pool)),
        Err(Error::CopiedSchema { .. })
    );
    assert!(next_token(&pool) > 1 << 40);
}

#[test]
fn rewriting_the_table_of_the_base_makes_no_copy() {
    let database = installed();
    let (pool, conn) = (pool(&database, 1), &mut database.connect());
    let before = base(conn);
    for rewritten in [
        "VACUUM FULL resource_control.token_base",
        "REINDEX TABLE resource_control.token_base",
        "CLUSTER resource_control.token_base USING token_base_pkey",
        "ALTER TABLE resource_control.token_base SET UNLOGGED",
        "ALTER TABLE resource_control.token_base SET LOGGED",
    ] {
        run(conn, rewritten);
        wait(migrations::check(&pool)).unwrap();
        wait(migrations::install(&pool)).unwrap();
    }
    assert_eq!(base(conn), before);
}

#[test]
fn a_role_that_may_not_set_the_base_is_told_who_may() {
    let database = installed();
    let role = Role::new(&database);
    if !role.grant() {
        return;
    }
    let (owner, conn) = (pool(&database, 1), &mut database.connect());
    let own = make_pool(role.url(), 1, PATIENCE);
    wait(migrations::install(&own)).unwrap();
    run(conn, COPY);
    let before = base(conn);
    let name = text(conn, "current_user");
    for refused in [
        wait(migrations::install(&own)),
        wait(migrations::check(&own)),
        wait(migrations::check(&owner)),
    ] {
        assert_matches!(refused, Err(Error::CopiedSchema { owner, .. }) if *owner == name);
        let refused = refused.unwrap_err();
        assert!(!refused.is_unavailable() && refused.to_string().contains(&name));
    }
    assert_matches!(
        wait(migrations::restart_tokens(&own)),
        Err(Error::Database(_))
    );
    assert_eq!(base(conn), before);
    assert_eq!(token_of_lock(&own), 1);
    let token = next_token(&owner);
    assert!(token > 1 << 40, "{token}");
    wait(migrations::check(&own)).unwrap();
    wait(migrations::install(&own)).unwrap();
    assert!(token_of_lock(&own) > token);
}

#[test]
fn twenty_instances_set_the_base_of_a_copy_once() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = installed();
        let conn = &mut database.connect();
        // As after a replication without `token_base`: the rows show a large token.
        run(
            conn,
            &format!(
                "DELETE FROM resource_control.token_base;
                 INSERT INTO resource_control.fence VALUES ('f', {FAR})"
            ),
        );
        // A `lock_timeout` must not end the waits of the instances for each other.
        let level = level.replace(' ', "\\ ");
        let options = format!("-c lock_timeout=1ms -c default_transaction_isolation={level}");
        let url = database.url_with("options", &options);
        let all = Barrier::new(20);
        let pools: Vec<_> = (0..20).map(|_| make_pool(&url, 1, PATIENCE)).collect();
        std::thread::scope(|scope| {
            for pool in &pools {
                scope.spawn(|| {
                    wait(on_first(pool, "SELECT 1")).unwrap();
                    all.wait();
                    wait(migrations::install(pool)).unwrap();
                });
            }
        });
        assert_eq!(
            number(conn, "(SELECT base FROM resource_control.token_base)"),
            100_001
        );
    }
}

#[test]
fn a_server_that_hides_its_identity_makes_no_copy() {
    let database = installed();
    let role = Role::new(&database);
    if !role.grant() {
        return;
    }
    let (conn, name) = (&mut database.connect(), role.name());
    run(
        conn,
        &format!(
            "REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC;
             GRANT ALL ON resource_control.token_base TO {name}; {COPY}"
        ),
    );
    let own = make_pool(role.url(), 1, PATIENCE);
    wait(migrations::check(&own)).unwrap();
    let before = next_token(&own);
    assert_eq!(before, 1);
    wait(migrations::restart_tokens(&own)).unwrap();
    assert!(next_token(&own) > 1 << 40);
}

#[test]
fn tokens_restart_in_any_case_and_holders_keep_what_they_hold() {
    let database = installed();
    let (pool, conn) = (pool(&database, 8), &mut database.connect());
    let holder = Semaphore::named("holder", 1, Duration::from_secs(3600));
    let schedule = Schedule::named("copies").after_crash(LEASE, 3);
    let is_first = AtomicBool::new(true);
    let work = |_attempt| is_first.swap(false, Ordering::Relaxed);
    let every = diesel_interlock::schedule::every(Duration::from_millis(1));
    let permit = wait(holder.acquire(&pool)).unwrap();
    let mut guard = wait(AdvisoryLock::named("holder").acquire(&pool)).unwrap();
    let token = wait(guard.fencing_token()).unwrap();
    let is_over = AtomicBool::new(false);
    const UNTIL: &str =
        "(SELECT COALESCE(expires_at::text, 'ended') FROM resource_control.schedule)";
    let runs = "(SELECT count(*) FROM resource_control.schedule_state WHERE state = 'running')";
    // No assertion inside: after a panic there, the run would never end.
    let (restarts, drawn, is_running) = while_it_runs(&schedule, &pool, &every, &work, || {
        eventually("a tick runs", || number(conn, runs) == 1);
        let (restarts, drawn) = std::thread::scope(|scope| {
            let drawn = [token_of_lock, token_of_permit].map(|draw| {
                let (pool, is_over) = (&pool, &is_over);
                scope.spawn(move || {
                    let mut all = Vec::new();
                    while !is_over.load(Ordering::Relaxed) {
                        all.push(draw(pool));
                    }
                    all
                })
            });
            let restart = |_| {
                let restarted = wait(migrations::restart_tokens(&pool));
                let base = number(conn, "(SELECT base FROM resource_control.token_base)");
                restarted.map(|()| base)
            };
            let restarts: Vec<_> = (0..20).map(restart).collect();
            is_over.store(true, Ordering::Relaxed);
            (restarts, drawn.map(|all| all.join()))
        });
        let renewed = text(conn, UNTIL);
        eventually("the run is renewed, or lost", || {
            text(conn, UNTIL) != renewed
        });
        let is_running = number(conn, runs) == 1;
        // The run loses its lease, which ends the run.
        run(conn, "UPDATE resource_control.schedule SET claim = 0");
        (restarts, drawn, is_running)
    });
    assert!(is_running);
    let grow = |all: &[i64]| all.windows(2).all(|pair| pair[0] < pair[1]);
    let bases: Result<Vec<_>, _> = restarts.into_iter().collect();
    let bases = bases.unwrap();
    assert!(grow(&bases), "{bases:?}");
    for all in drawn {
        let all = all.unwrap();
        assert!(grow(&all), "{all:?}");
    }
    assert!(wait(guard.is_held()).unwrap());
    assert!(wait(guard.fencing_token()).unwrap() > token);
    wait(guard.release()).unwrap();
    assert!(!permit.is_lost());
    wait(permit.release()).unwrap();
    assert!(truth(
        conn,
        "(SELECT bool_and(completed_at IS NOT NULL) FROM resource_control.service_request)"
    ));
    wait(migrations::check(&pool)).unwrap();
}
