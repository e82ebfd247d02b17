//! `Once::begin`: work that is finished has its effect once, and work that is not finished has
//! none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use diesel::PgConnection;
use workbench::{Cluster, Database};

use crate::assert_matches;
use crate::half::*;
use crate::support::{
    Observer, assert_pool_whole, eventually, in_a_quick_round, install, installed, number, run,
};

static CHARGE: Once = Once::named("charge");

const EFFECT: &str = "INSERT INTO effect DEFAULT VALUES";
const EFFECTS: &str = "(SELECT count(*) FROM effect)";
const DONE: &str = "(SELECT count(*) FROM resource_control.once)";
/// The number of other sessions of the database, and the sum of their pids, which changes if one of
/// them is replaced.
const COUNT: &str = "(SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend')";
const SESSIONS: &str = "(SELECT coalesce(sum(pid), 0) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend')";

/// A database with the schema, and a table for the effects of the work.
fn database() -> Database {
    let database = installed();
    run(&mut database.connect(), "CREATE TABLE effect (id serial)");
    database
}

#[track_caller]
fn begin(once: &Once, pool: &PgPool) -> Doing {
    match wait(once.begin(pool)).unwrap() {
        Begun::First(doing) => doing,
        other => panic!("{other:?}"),
    }
}

/// Begins the work and has its effect.
#[track_caller]
fn worked(once: &Once, pool: &PgPool) -> Doing {
    let mut doing = begin(once, pool);
    wait(execute(doing.conn(), EFFECT)).unwrap();
    doing
}

#[track_caller]
fn assert_before(once: &Once, pool: &PgPool, outcome: &str) {
    match wait(once.begin(pool)).unwrap() {
        Begun::Before(bytes) => assert_eq!(bytes, outcome.as_bytes()),
        other => panic!("{other:?}"),
    }
}

fn counts(conn: &mut PgConnection) -> (i64, i64) {
    (number(conn, EFFECTS), number(conn, DONE))
}

/// Begins the work, and ends it by `leave`. Asserts that the work had no effect, and that the next
/// caller does the work on the same session. A reply that takes longer than two seconds costs the
/// session, so a slower round proves nothing.
#[track_caller]
fn assert_undone(leave: impl Fn(Doing)) {
    let is_same = in_a_quick_round(Duration::from_secs(2), || {
        let database = database();
        let (pool, conn) = (pool(&database, 1), &mut database.connect());
        wait(on_first(&pool, "SELECT 1")).unwrap();
        eventually("only the pool is connected", || number(conn, COUNT) == 1);
        let sessions = number(conn, SESSIONS);
        leave(worked(&CHARGE, &pool));
        // The pool has one connection, so this call waits until the connection is back.
        let doing = worked(&CHARGE, &pool);
        assert_eq!(counts(conn), (0, 0));
        wait(doing.finish("anew")).unwrap();
        assert_before(&CHARGE, &pool, "anew");
        assert_eq!(counts(conn), (1, 1));
        let is_same = number(conn, SESSIONS) == sessions;
        assert_pool_whole(&pool, &database);
        is_same
    });
    assert!(is_same, "a session was replaced");
}

#[test]
fn begun_work_can_be_finished_on_another_thread() {
    fn is_sent<T: Send + 'static>(_: &T) {}
    let database = database();
    let pool = pool(&database, 1);
    let begun = wait(CHARGE.begin(&pool)).unwrap();
    is_sent(&begun);
    let Begun::First(doing) = begun else { panic!() };
    thread::spawn(|| wait(doing.finish("done")))
        .join()
        .unwrap()
        .unwrap();
    assert_before(&CHARGE, &pool, "done");
}

#[test]
fn the_first_caller_finishes_and_later_callers_get_its_bytes() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = database();
        let conn = &mut database.connect();
        let name = database.name();
        run(
            conn,
            &format!("ALTER DATABASE {name} SET default_transaction_isolation = '{level}'"),
        );
        let pool = pool(&database, 2);
        let once = CHARGE.key("a").fingerprint("4200");
        let mut doing = worked(&once, &pool);
        let ours = "DO $$ BEGIN ASSERT current_setting('transaction_isolation') = 'read committed'; END $$";
        wait(execute(doing.conn(), ours)).unwrap();
        assert_eq!(counts(conn), (0, 0));
        assert_matches!(wait(once.begin(&pool)), Ok(Begun::Busy));
        wait(doing.finish("done")).unwrap();
        assert_eq!(counts(conn), (1, 1));
        for once in [&once, &CHARGE.key("a")] {
            assert_before(once, &pool, "done");
        }
        let other = wait(CHARGE.key("a").fingerprint("1").begin(&pool));
        assert_matches!(other, Err(Error::OtherRequest("charge")));
        assert_eq!(counts(conn), (1, 1));
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn dropped_work_is_rolled_back_and_its_session_stays() {
    assert_undone(drop);
}

#[test]
fn after_roll_back_has_returned_the_key_is_free() {
    let database = database();
    let pool = pool(&database, 2);
    let conn = &mut database.connect();
    for _ in 0..20 {
        wait(worked(&CHARGE, &pool).roll_back());
        // This call may be served by the other connection of the pool.
        wait(worked(&CHARGE, &pool).roll_back());
        assert_eq!(counts(conn), (0, 0));
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn work_that_failed_or_left_transactions_open_is_rolled_back_and_its_session_stays() {
    let ways_to_fail: [fn(&mut Conn); 2] = [
        |conn| assert!(wait(execute(conn, "SELECT 1/0")).is_err()),
        |conn| {
            wait(begin_inside(conn)).unwrap();
            wait(execute(conn, EFFECT)).unwrap();
            wait(begin_inside(conn)).unwrap();
        },
    ];
    for fail in ways_to_fail {
        assert_undone(|mut doing| fail(doing.conn()));
    }
}

#[test]
fn work_that_cannot_be_committed_is_an_error_and_has_no_effect() {
    for ending in ["SELECT 1/0", "ROLLBACK", "ROLLBACK; BEGIN"] {
        let database = database();
        let pool = pool(&database, 1);
        let mut doing = worked(&CHARGE, &pool);
        let _ = wait(execute(doing.conn(), ending));
        let failed = wait(doing.finish("done"));
        assert_matches!(failed, Err(Error::TransactionEnded | Error::Database(_)));
        assert_eq!(counts(&mut database.connect()), (0, 0));
        wait(worked(&CHARGE, &pool).finish("anew")).unwrap();
        assert_before(&CHARGE, &pool, "anew");
        assert_pool_whole(&pool, &database);
    }
    let database = database();
    let pool = pool(&database, 1);
    let mut doing = worked(&CHARGE, &pool);
    wait(begin_inside(doing.conn())).unwrap();
    assert!(wait(doing.finish("done")).is_err());
    assert_eq!(counts(&mut database.connect()), (0, 0));
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_panic_rolls_back() {
    let database = database();
    let pool = pool(&database, 1);
    let doing = worked(&CHARGE, &pool);
    let caught = catch_unwind(AssertUnwindSafe(move || {
        let _doing = doing;
        panic!("in the handler");
    }));
    assert!(caught.is_err());
    wait(worked(&CHARGE, &pool).finish("anew")).unwrap();
    assert_eq!(counts(&mut database.connect()), (1, 1));
    assert_pool_whole(&pool, &database);
}

/// Nothing was sent over the ended sessions, so the begin may be sent again over a new one.
#[test]
fn sessions_that_have_ended_are_replaced() {
    let database = database();
    let pool = unchecked_pool(&database, 3);
    wait(on_all(&pool, "SELECT 1")).unwrap();
    let mut observer = Observer::of(&database);
    observer.kill_all();
    eventually("the sessions have ended", || observer.sessions() == 0);
    wait(worked(&CHARGE, &pool).finish("done")).unwrap();
    assert_before(&CHARGE, &pool, "done");
}

#[test]
fn a_session_that_ends_in_the_work_is_unavailable() {
    let database = database();
    let pool = unchecked_pool(&database, 1);
    let doing = worked(&CHARGE, &pool);
    Observer::of(&database).kill_all();
    let ended = wait(doing.finish("done")).unwrap_err();
    assert!(ended.is_unavailable(), "{ended:?}");
    wait(worked(&CHARGE, &pool).finish("anew")).unwrap();
    assert_eq!(counts(&mut database.connect()), (1, 1));
}

#[test]
fn bad_input_a_missing_schema_and_a_standby_are_errors() {
    let database = Database::new();
    let pool = pool(&database, 1);
    for once in [
        Once::named(""),
        CHARGE.key(""),
        CHARGE.key("x".repeat(1001)),
    ] {
        let refused = wait(once.begin(&pool)).unwrap_err();
        assert!(refused.is_input(), "{refused:?}");
    }
    assert_matches!(wait(CHARGE.begin(&pool)), Err(Error::NotInstalled));
    assert_pool_whole(&pool, &database);

    let cluster = Cluster::start();
    install(&mut cluster.endpoint("postgres").connect());
    let standby = cluster.standby();
    let patience = Duration::from_secs(20);
    let pool = make_pool(&standby.url("postgres"), 1, patience);
    assert_matches!(wait(CHARGE.begin(&pool)), Err(Error::Standby));
}

/// Twenty threads begin each of sixty keys, and repeat until the key has an outcome. Half of the
/// work that is begun is rolled back, by a drop or by `roll_back`.
#[test]
fn of_twenty_callers_of_each_key_one_has_an_effect() {
    const KEYS: usize = 60;
    const TWINS: usize = 20;
    let database = database();
    let pool = pool(&database, 8);
    let (firsts, start) = (AtomicUsize::new(0), Barrier::new(TWINS));
    let twin = |twin: usize| {
        start.wait();
        let mut turn = twin;
        for key in 0..KEYS {
            let once = CHARGE.key(key);
            loop {
                turn += 1;
                match wait(once.begin(&pool)).unwrap() {
                    Begun::Before(bytes) => break assert_eq!(bytes, key.to_string().as_bytes()),
                    Begun::Busy => thread::yield_now(),
                    Begun::First(mut doing) => {
                        wait(execute(doing.conn(), EFFECT)).unwrap();
                        match turn % 4 {
                            0 => drop(doing),
                            1 => wait(doing.roll_back()),
                            _ => {
                                firsts.fetch_add(1, Ordering::SeqCst);
                                break wait(doing.finish(key.to_string())).unwrap();
                            }
                        }
                    }
                }
            }
        }
    };
    thread::scope(|scope| {
        for number in 0..TWINS {
            let twin = &twin;
            scope.spawn(move || twin(number));
        }
    });
    assert_eq!(firsts.load(Ordering::SeqCst), KEYS);
    assert_eq!(counts(&mut database.connect()), (KEYS as i64, KEYS as i64));
    assert_pool_whole(&pool, &database);
}
