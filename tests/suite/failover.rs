//! During and after a failover: tokens grow, the pool leaves a server that refuses to write, and
//! claims wait for their commit.

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use diesel::PgConnection;
use diesel_interlock::schedule::every;
use workbench::{Cluster, Database, StopMode};

use crate::assert_matches;
use crate::half::{
    Admission, AdvisoryLock, Attempt, Begun, Check, Conn, Done, Error, Fence, Once, PgPool, Quota,
    RateLimit, Schedule, Semaphore, Throttle, begin, end, execute, make_pool, migrations, on_all,
    on_first, on_one, wait,
};
use crate::support::{Observer, eventually, installed, number, run, text};

static LOCK: AdvisoryLock = AdvisoryLock::named("failover");
static SLOT: Semaphore = Semaphore::named("failover", 1, Duration::from_secs(60));
static SCHEDULE: Schedule = Schedule::named("failover");
static LIMIT: RateLimit = RateLimit::named("failover", Quota::per_minute(100));
static THROTTLE: Throttle = Throttle::named("failover", Duration::from_micros(1));

const PATIENCE: Duration = Duration::from_secs(20);

/// Draws a token of a lock, a permit and a run.
fn tokens(pool: &PgPool) -> [i64; 3] {
    let mut guard = wait(LOCK.acquire(pool)).unwrap();
    let of_lock = wait(guard.fencing_token()).unwrap();
    wait(guard.release()).unwrap();
    let Admission::Admitted(permit) = wait(SLOT.try_acquire(pool)).unwrap() else {
        panic!("the slot is taken")
    };
    let of_permit = permit.fencing_token();
    wait(permit.release()).unwrap();
    [of_lock, of_permit, token_of_run(pool)]
}

/// The token of the next run of the schedule.
fn token_of_run(pool: &PgPool) -> i64 {
    let token = Mutex::new(0);
    eventually("the schedule has run a tick", || {
        let next = every(Duration::from_millis(1));
        let looked = wait(SCHEDULE.run_due(pool, next, crate::work_of_tick!(token)));
        let _ = looked.unwrap();
        *token.lock().unwrap() > 0
    });
    token.into_inner().unwrap()
}

#[test]
fn tokens_grow_when_a_standby_is_promoted_that_has_lost_commits() {
    let mut primary = Cluster::start();
    let pool = make_pool(&primary.url("postgres"), 2, PATIENCE);
    wait(migrations::install(&pool)).unwrap();
    let mut largest = tokens(&pool);
    for _ in 0..2 {
        let standby = primary.standby();
        let pool = make_pool(&primary.url("postgres"), 2, PATIENCE);
        wait_for(&primary, &standby);
        standby.detach();
        // Draws more numbers than a sequence logs ahead in the WAL: 32, `SEQ_LOG_VALS` in
        // PostgreSQL's sequence.c.
        for _ in 0..40 {
            largest = tokens(&pool);
        }
        primary.stop(StopMode::Immediate);
        standby.promote();
        let pool = make_pool(&standby.url("postgres"), 2, PATIENCE);
        for (new, old) in tokens(&pool).into_iter().zip(largest) {
            assert!(new > old, "{new} after {old}");
        }
        largest = tokens(&pool);
        primary = standby;
    }
}

/// Waits until the standby has replayed all commits of its primary.
fn wait_for(primary: &Cluster, standby: &Cluster) {
    let written = text(
        &mut primary.endpoint("postgres").connect(),
        "pg_current_wal_lsn()",
    );
    let standby = &mut standby.endpoint("postgres").connect();
    eventually("the standby has replayed all commits", || {
        number(
            standby,
            &format!("(pg_last_wal_replay_lsn() >= '{written}'::pg_lsn)::int"),
        ) == 1
    });
}

/// After a promotion, each session that has drawn a number below the floor raises the sequence. A
/// slower session must not set it back.
#[test]
fn sessions_that_raise_a_sequence_at_the_same_time_draw_different_tokens() {
    const FLOOR: i64 = 1 << 40;
    // The crate's own lock, under which a sequence is raised.
    const RAISING: &str = "20000101000009";
    let database = installed();
    // What a session of the database reads once after a promotion.
    let floor = format!(
        "ALTER DATABASE {} SET diesel_interlock.token_floor = '{FLOOR}'",
        database.name()
    );
    run(&mut database.connect(), &floor);
    let pool = make_pool(&database.url(), 2, PATIENCE);
    let mut observer = Observer::of(&database);
    let draw = |key| {
        let mut guard = wait(LOCK.key(key).acquire(&pool)).unwrap();
        wait(guard.fencing_token()).unwrap()
    };
    let drawn = thread::scope(|scope| {
        let mut holder = database.connect();
        run(&mut holder, &format!("SELECT pg_advisory_lock({RAISING})"));
        let both = [1, 2].map(|key| scope.spawn(move || draw(key)));
        eventually("both raise the sequence", || observer.all_waiting() == 2);
        drop(holder);
        both.map(|drawing| drawing.join().unwrap())
    });
    assert!(drawn.iter().all(|token| *token > FLOOR), "{drawn:?}");
    assert_ne!(drawn[0], drawn[1]);
}

/// A claim sets `enable_seqscan = off`. A sequential scan would then have a cost at which
/// PostgreSQL compiles the statement by JIT, for most of a second at each claim:
/// <https://www.mail-archive.com/pgsql-hackers@lists.postgresql.org/msg20716.html>.
#[test]
fn a_claim_scans_no_table_for_the_base_of_tokens() {
    let database = installed();
    let conn = &mut database.connect();
    run(
        conn,
        "BEGIN; SELECT resource_control.claim_service_request('s', 1, '1 minute')",
    );
    let scans = "(SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'token_base')";
    assert_eq!(number(conn, scans), 0);
}

#[test]
fn on_a_restored_server_tokens_go_on_after_those_of_the_server_before() {
    let database = installed();
    let pool = make_pool(&database.url(), 2, PATIENCE);
    let conn = &mut database.connect();
    // As after a restore of a database with so many promotions that its range is above that of
    // today.
    run(
        conn,
        "UPDATE resource_control.token_base SET identity = '', base = 0;
         SELECT setval('resource_control.fencing_token', (1000000::bigint << 40) + 7),
             setval('resource_control.service_request_id_seq', (1000000::bigint << 40) + 7)",
    );
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| wait(migrations::install(&pool)).unwrap());
        }
    });
    let base = "(SELECT base FROM resource_control.token_base)";
    assert_eq!(number(conn, base), 1_000_001);
    let first = tokens(&pool);
    for token in first {
        assert!(token > 1_000_001 << 40, "{token}");
    }
    wait(migrations::install(&pool)).unwrap();
    for (new, old) in tokens(&pool).into_iter().zip(first) {
        assert!(new > old, "{new} after {old}");
    }
    assert_eq!(number(conn, base), 1_000_001);
}

#[test]
fn the_pool_leaves_a_server_that_refuses_to_write() {
    let cluster = Cluster::start();
    let pool = make_pool(&cluster.url("postgres"), 2, PATIENCE);
    wait(migrations::install(&pool)).unwrap();
    let conn = &mut cluster.endpoint("postgres").connect();
    let refuse = |conn: &mut PgConnection, value: &str| {
        run(
            conn,
            &format!("ALTER SYSTEM SET default_transaction_read_only = {value}"),
        );
        run(conn, "SELECT pg_reload_conf()");
        eventually("the setting is in force", || {
            text(conn, "current_setting('default_transaction_read_only')") == value
        });
    };
    refuse(conn, "on");
    // Each session reads a reloaded setting before its next statement, not at once.
    eventually("all sessions have read it", || {
        let is_on = "DO $$ BEGIN \
             ASSERT current_setting('default_transaction_read_only') = 'on'; END $$";
        wait(on_all(&pool, is_on)).is_ok()
    });
    let refused = wait(THROTTLE.attempt(&pool)).unwrap_err();
    assert_matches!(refused, Error::Standby);
    assert!(refused.is_unavailable());
    assert_matches!(wait(SLOT.try_acquire(&pool)), Err(Error::Standby));
    run(conn, "SET default_transaction_read_only = off");
    refuse(conn, "off");
    eventually("all sessions write", || {
        wait(THROTTLE.attempt(&pool)).is_ok()
    });
    on_one(&pool, |conn| {
        wait(execute(conn, "SET default_transaction_read_only = on")).unwrap();
        assert_matches!(wait(THROTTLE.attempt_on(conn)), Err(Error::Standby));
        let own = wait(execute(conn, "CREATE TABLE refused ()")).unwrap_err();
        assert!(Error::from(own).is_unavailable());
    });
}

static ONCE: Once = Once::named("failover");

const ELSEWHERE: &str =
    "(SELECT count(*) FROM pg_stat_activity WHERE application_name = 'elsewhere')";

/// Asserts that the pool closes the connection after `elsewhere` has used it, instead of lending it
/// again.
#[track_caller]
fn leaves(pool: &PgPool, observer: &mut PgConnection, elsewhere: impl FnOnce(&mut Conn)) {
    on_one(pool, |conn| {
        wait(execute(conn, "SET application_name = 'elsewhere'")).unwrap();
        elsewhere(conn);
    });
    wait(on_first(pool, "SELECT 1")).unwrap();
    eventually("the pool has closed the connection", || {
        number(observer, ELSEWHERE) == 0
    });
}

#[test]
fn a_callers_connection_to_a_standby_leaves_its_pool() {
    let primary = Cluster::start();
    let url = primary.url("postgres");
    wait(migrations::install(&make_pool(&url, 2, PATIENCE))).unwrap();
    let standby = primary.standby();
    wait_for(&primary, &standby);
    let pool = make_pool(&standby.url("postgres"), 1, PATIENCE);
    let observer = &mut standby.endpoint("postgres").connect();
    leaves(&pool, observer, |conn| {
        let done: Result<Done, Error> = wait(ONCE.run(conn, work!(|_conn| Ok(""))));
        assert_matches!(done, Err(Error::Standby));
    });
    leaves(&pool, observer, |conn| {
        let held: Result<(), Error> = wait(LOCK.transaction(conn, work!(|_conn| Ok(()))));
        assert_matches!(held, Err(Error::Standby));
    });
    leaves(&pool, observer, |conn| {
        let held: Result<Attempt<()>, Error> = wait(LOCK.try_with_on(conn, work!(|_conn| Ok(()))));
        assert_matches!(held, Err(Error::Standby));
    });
    leaves(&pool, observer, |conn| {
        begin(conn);
        assert_matches!(wait(LOCK.acquire_xact(conn)), Err(Error::Standby));
    });
}

#[test]
fn a_callers_connection_that_is_read_only_leaves_its_pool() {
    let database = installed();
    let pool = make_pool(&database.url(), 1, PATIENCE);
    let observer = &mut database.connect();
    const REFUSE: &str = "SET default_transaction_read_only = on";
    leaves(&pool, observer, |conn| {
        wait(execute(conn, REFUSE)).unwrap();
        let has_worked = std::cell::Cell::new(false);
        let done: Result<Done, Error> = wait(ONCE.run(
            conn,
            work!(|_conn| {
                has_worked.set(true);
                Ok("")
            }),
        ));
        assert_matches!(done, Err(Error::Standby));
        // The work could have effects outside the database.
        assert!(!has_worked.get());
    });
    leaves(&pool, observer, |conn| {
        wait(execute(conn, REFUSE)).unwrap();
        let held: Result<(), Error> = wait(LOCK.transaction(conn, work!(|_conn| Ok(()))));
        assert_matches!(held, Err(Error::Standby));
    });
    leaves(&pool, observer, |conn| {
        wait(execute(conn, REFUSE)).unwrap();
        let held: Result<Attempt<()>, Error> = wait(LOCK.try_with_on(conn, work!(|_conn| Ok(()))));
        assert_matches!(held, Err(Error::Standby));
    });
    let mut guard = wait(LOCK.acquire(&pool)).unwrap();
    wait(execute(guard.conn(), "SET application_name = 'elsewhere'")).unwrap();
    wait(execute(guard.conn(), REFUSE)).unwrap();
    assert_matches!(wait(guard.fencing_token()), Err(Error::Standby));
    wait(guard.release()).unwrap();
    eventually("the pool has closed the connection", || {
        number(observer, ELSEWHERE) == 0
    });
}

#[test]
fn locks_leave_a_server_that_refuses_to_write() {
    let database = installed();
    let pool = make_pool(&database.url(), 1, PATIENCE);
    let observer = &mut database.connect();
    for locks in [LOCK.clone(), AdvisoryLock::all([&LOCK, &LOCK.key(1)])] {
        wait(on_first(&pool, "SET application_name = 'elsewhere'")).unwrap();
        wait(on_first(&pool, "SET default_transaction_read_only = on")).unwrap();
        // The retry uses another connection, whose session can write.
        wait(wait(locks.acquire(&pool)).unwrap().release()).unwrap();
        eventually("the pool has closed the connection", || {
            number(observer, ELSEWHERE) == 0
        });
    }
    // Operations that open a transaction themselves retry in the same way.
    let limits = [&LIMIT, &LIMIT.key(1)];
    wait(on_first(&pool, "SET application_name = 'elsewhere'")).unwrap();
    wait(on_first(&pool, "SET default_transaction_read_only = on")).unwrap();
    assert_matches!(
        wait(RateLimit::check_all(&limits, &pool)),
        Ok(Check::Allowed(_))
    );
    eventually("the pool has closed the connection", || {
        number(observer, ELSEWHERE) == 0
    });
    let empty = Database::new();
    let installing = make_pool(&empty.url(), 1, PATIENCE);
    wait(on_first(
        &installing,
        "SET default_transaction_read_only = on",
    ))
    .unwrap();
    wait(migrations::install(&installing)).unwrap();
    // The mode of the caller's own transaction does not count: READ ONLY there is a choice of the
    // caller.
    on_one(&pool, |conn| {
        begin(conn);
        wait(execute(conn, "SET TRANSACTION READ ONLY")).unwrap();
        wait(LOCK.acquire_xact(conn)).unwrap();
        end(conn);
        wait(execute(conn, "SET default_transaction_read_only = on")).unwrap();
        begin(conn);
        wait(execute(conn, "SET TRANSACTION READ WRITE")).unwrap();
        wait(LOCK.acquire_xact(conn)).unwrap();
        end(conn);
        wait(execute(conn, "SET default_transaction_read_only = off")).unwrap();
    });
    let refusing = database.url_with("options", "-c default_transaction_read_only=on");
    let pool = make_pool(&refusing, 1, PATIENCE);
    let refused = wait(LOCK.try_acquire(&pool)).map(|_| ());
    assert!(refused.as_ref().unwrap_err().is_unavailable());
    assert_matches!(refused, Err(Error::Standby));
}

#[test]
fn claims_wait_for_their_commit_whatever_the_role_has_set() {
    let database = installed();
    let pool = make_pool(&database.url(), 1, PATIENCE);
    for (setting, expected) in [
        ("off", "on"),
        ("local", "on"),
        ("remote_write", "remote_write"),
    ] {
        on_one(&pool, |conn| {
            wait(execute(
                conn,
                &format!("BEGIN; SET LOCAL synchronous_commit = {setting}"),
            ))
            .unwrap();
            let is_kept = format!(
                "DO $$ BEGIN ASSERT current_setting('synchronous_commit') = '{expected}'; END $$"
            );
            let claim = "SELECT resource_control.claim_service_request('s', 9, '1 minute')";
            let pass = "SELECT resource_control.pass_fence('f', 1)";
            for takes in [claim, pass] {
                let again = format!("SET LOCAL synchronous_commit = {setting}; {takes}; {is_kept}");
                wait(execute(conn, &again)).unwrap();
            }
            wait(execute(
                conn,
                &format!("SET LOCAL synchronous_commit = {setting}"),
            ))
            .unwrap();
            assert!(wait(THROTTLE.attempt_on(conn)).unwrap().is_granted());
            wait(execute(conn, &is_kept)).unwrap();
            wait(execute(conn, "ROLLBACK")).unwrap();
        });
    }
}

/// Runs `takes`, and lets each of its commits go on that waits for a synchronous standby. Returns
/// whether one has waited.
fn waits_for_standby(conn: &mut PgConnection, takes: impl FnOnce() + Send) -> bool {
    // A session may wait with its next statement, too.
    const WAITS: &str = "(SELECT COALESCE(max(concat_ws(' ', pid, query_start)), '')
        FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend')";
    thread::scope(|scope| {
        let taking = scope.spawn(takes);
        let mut has_waited = false;
        while !taking.is_finished() {
            let waits = text(conn, WAITS);
            if let Some((pid, _)) = waits.split_once(' ') {
                has_waited = true;
                run(conn, &format!("SELECT pg_cancel_backend({pid})"));
                eventually("the commit goes on", || text(conn, WAITS) != waits);
            }
        }
        taking.join().unwrap();
        has_waited
    })
}

/// The only synchronous standby does not exist.
#[test]
fn what_takes_something_waits_for_the_standby_whatever_the_role_has_set() {
    static FENCE: Fence = Fence::named("failover");
    let cluster = Cluster::start();
    let endpoint = cluster.endpoint("postgres");
    let conn = &mut endpoint.connect();
    let url = endpoint.url_with("options", "-c synchronous_commit=off");
    let pool = make_pool(&url, 2, PATIENCE);
    wait(migrations::install(&pool)).unwrap();
    // A sequence logs numbers ahead, so the next token is no reason to wait.
    let _ = tokens(&pool);
    run(
        conn,
        "ALTER SYSTEM SET synchronous_standby_names = 'nobody'",
    );
    run(conn, "SELECT pg_reload_conf()");
    let permit = Mutex::new(None);
    let durable = LIMIT.clone().durable();
    let done = |key| {
        on_one(&pool, |conn| {
            let done: Result<_, Error> = wait(ONCE.key(key).run(conn, work!(|_conn| Ok("done"))));
            assert_matches!(done, Ok(Done::First(_)));
        });
    };
    eventually("the server waits for a standby", || {
        waits_for_standby(conn, || drop(wait(THROTTLE.attempt(&pool)).unwrap()))
    });
    let operations: [(&str, bool, &(dyn Fn() + Sync)); 11] = [
        ("token", true, &|| {
            let mut guard = wait(LOCK.acquire(&pool)).unwrap();
            wait(guard.fencing_token()).unwrap();
            wait(guard.release()).unwrap();
        }),
        ("claim", true, &|| {
            *permit.lock().unwrap() = wait(SLOT.try_acquire(&pool)).unwrap().admitted();
        }),
        ("renewal", true, &|| {
            wait(permit.lock().unwrap().as_ref().unwrap().renew()).unwrap();
        }),
        ("completion", false, &|| {
            wait(permit.lock().unwrap().take().unwrap().release()).unwrap();
        }),
        ("throttle", true, &|| {
            assert!(wait(THROTTLE.attempt(&pool)).unwrap().is_granted());
        }),
        ("first grant of a throttle", true, &|| {
            assert!(wait(THROTTLE.key(1).attempt(&pool)).unwrap().is_granted());
        }),
        ("rate limit", false, &|| {
            assert!(wait(LIMIT.check(&pool)).unwrap().is_allowed());
        }),
        ("several rate limits", true, &|| {
            let check = wait(RateLimit::check_all(&[&LIMIT.key(1), &durable], &pool));
            assert!(check.unwrap().is_allowed());
        }),
        ("once", true, &|| done(1)),
        ("fence", true, &|| {
            on_one(&pool, |conn| {
                let passed: Result<(), Error> =
                    wait(LOCK.transaction(conn, work!(|conn| reply!(FENCE.pass(conn, 1)))));
                passed.unwrap();
            });
        }),
        ("run", true, &|| {
            token_of_run(&pool);
        }),
    ];
    for (operation, expected, takes) in operations {
        assert_eq!(waits_for_standby(conn, takes), expected, "{operation}");
    }
}

/// The only session of the pool may not write, so the operation is tried once more, on a new one.
#[test]
fn what_a_session_refuses_that_may_not_write_is_done_on_another() {
    let database = installed();
    let pool = make_pool(&database.url(), 1, PATIENCE);
    let several = AdvisoryLock::all([&LOCK.key(1), &LOCK.key(2)]);
    let operations: [(&str, &dyn Fn() -> bool); 8] = [
        ("lock", &|| {
            wait(LOCK.try_acquire(&pool)).unwrap().is_acquired()
        }),
        ("several locks", &|| {
            wait(several.try_acquire(&pool)).unwrap().is_acquired()
        }),
        ("claim", &|| {
            wait(SLOT.try_acquire(&pool)).unwrap().is_admitted()
        }),
        ("throttle", &|| {
            wait(THROTTLE.attempt(&pool)).unwrap().is_granted()
        }),
        ("rate limit", &|| {
            wait(LIMIT.check(&pool)).unwrap().is_allowed()
        }),
        ("several rate limits", &|| {
            wait(RateLimit::check_all(&[&LIMIT], &pool))
                .unwrap()
                .is_allowed()
        }),
        ("pause", &|| wait(SCHEDULE.pause(&pool)).unwrap()),
        ("begin", &|| {
            matches!(wait(ONCE.key(1).begin(&pool)).unwrap(), Begun::First(_))
        }),
    ];
    for (operation, is_done) in operations {
        wait(on_first(&pool, "SET default_transaction_read_only = on")).unwrap();
        assert!(is_done(), "{operation}");
    }
}

/// A deferred trigger refuses each commit.
#[test]
fn what_cannot_be_committed_is_an_error() {
    let database = installed();
    let (pool, conn) = (
        make_pool(&database.url(), 1, PATIENCE),
        &mut database.connect(),
    );
    run(
        conn,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            RAISE 'this commit is refused'; END $$",
    );
    for table in ["throttle", "service_request", "rate_limit", "schedule"] {
        run(
            conn,
            &format!(
                "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE
                    ON resource_control.{table}
                    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
            ),
        );
    }
    assert_matches!(wait(THROTTLE.attempt(&pool)), Err(Error::Database(_)));
    assert_matches!(wait(SLOT.try_acquire(&pool)), Err(Error::Database(_)));
    assert_matches!(wait(LIMIT.check(&pool)), Err(Error::Database(_)));
    assert_matches!(wait(SCHEDULE.pause(&pool)), Err(Error::Database(_)));
}
