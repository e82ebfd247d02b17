//! Fencing tokens of session locks, and the fence that checks them.

use std::sync::atomic::{AtomicBool, Ordering};

use diesel::connection::{SimpleConnection, TransactionManager};

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, AnsiTransactionManager, Cluster, Database, Error, Fence, RoundTrips, StopMode,
    error::{Input, Misplaced},
    migrations,
};
use crate::semaphores::database;
use crate::support::{
    Expect, Observer, assert_matches, eventually, number, round_trips_of, setting,
};

const LOCK: AdvisoryLock = AdvisoryLock::named("fenced").fenced();
const PLAIN: AdvisoryLock = AdvisoryLock::named("fenced");
const FENCE: Fence = Fence::named("rows");

fn pass(conn: &mut PgConnection, token: i64) -> Result<(), Error> {
    conn.transaction(|conn| FENCE.pass(conn, token))
}

#[test]
fn each_holders_token_is_greater_than_those_before_however_it_was_drawn() {
    let database = database();
    let pool = database.pool(8);
    let mut tokens = Vec::new();
    let drawn = std::sync::Mutex::new(&mut tokens);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (pool, drawn) = (&pool, &drawn);
            scope.spawn(move || {
                for _ in 0..20 {
                    let lock = if thread % 2 == 0 { &LOCK } else { &PLAIN };
                    let mut guard = lock.acquire(pool).unwrap();
                    drawn.lock().unwrap().push(guard.fencing_token().unwrap());
                    guard.release().unwrap();
                }
            });
        }
    });
    assert_eq!(tokens.len(), 160);
    assert!(
        tokens.windows(2).all(|pair| pair[0] < pair[1]),
        "{tokens:?}"
    );
}

#[test]
fn a_fenced_lock_brings_its_token_in_the_same_round_trip() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let prepared = LOCK.try_acquire_on(conn).unwrap().expect_acquired();
    prepared.release().unwrap();
    let mut token = 0;
    let trips = round_trips_of(&proxy, || {
        let mut guard = LOCK.try_acquire_on(conn).unwrap().expect_acquired();
        token = guard.fencing_token().unwrap();
        guard.release().unwrap();
    });
    assert!(token > 0);
    assert_eq!(trips, 2);

    let mut guard = PLAIN.try_acquire_on(conn).unwrap().expect_acquired();
    assert!(guard.fencing_token().unwrap() > token);
    assert_eq!(proxy.count(|| drop(guard.fencing_token())), 0);
}

#[test]
fn a_lock_that_is_taken_draws_no_token() {
    let database = database();
    let (holder, other) = (&mut database.connect(), &mut database.connect());
    let _guard = PLAIN.try_acquire_on(holder).unwrap().expect_acquired();
    let next = |conn: &mut PgConnection| {
        #[derive(QueryableByName)]
        struct Next {
            #[diesel(sql_type = diesel::sql_types::Text)]
            next: String,
        }
        diesel::sql_query("SELECT pg_snapshot_xmax(pg_current_snapshot())::text AS next")
            .get_result::<Next>(conn)
            .unwrap()
            .next
    };
    // Other tests use the same cluster, so this may take more than one attempt.
    eventually("a refusal without a transaction id", || {
        let before = next(other);
        assert!(LOCK.try_acquire_on(other).unwrap().is_busy());
        next(other) == before
    });
}

#[test]
fn a_crash_of_the_server_gives_no_token_again() {
    // Only a session that must write the log does so.
    let cluster = Cluster::builder()
        .setting("wal_writer_delay", "10s")
        .start();
    let mut last = 0;
    for lock in [&LOCK, &PLAIN, &LOCK, &PLAIN] {
        let conn = &mut PgConnection::establish(&cluster.url("postgres")).unwrap();
        let mut guard = lock.try_acquire_on(conn).unwrap().expect_acquired();
        let token = guard.fencing_token().unwrap();
        assert!(token > last, "{token} after {last}");
        last = token;
        cluster.restart(StopMode::Immediate);
        assert!(guard.release().is_err());
    }
}

#[test]
fn a_former_holder_is_stopped_at_the_fence_once_the_next_one_has_passed() {
    let database = database();
    let pool = database.pool(3);
    let mut former = LOCK.acquire(&pool).unwrap();
    let old = former.fencing_token().unwrap();
    let conn = &mut pool.get().unwrap();
    pass(conn, old).unwrap();
    pass(conn, old).unwrap();
    Observer::of(&database).kill(former.backend_pid());
    pass(conn, old).unwrap(); // nobody else has been here yet
    let mut next = LOCK.acquire(&pool).unwrap();
    let new = next.fencing_token().unwrap();
    pass(conn, new).unwrap();
    let refused = pass(conn, old);
    assert_matches!(refused, Err(Error::Fenced { name, token }) if name == "rows" && *token == old);
    pass(conn, new).unwrap();
    assert_matches!(former.release(), Err(Error::LockLost { .. }));
}

#[test]
fn what_a_passing_transaction_rolls_back_has_not_passed() {
    let database = database();
    let conn = &mut database.connect();
    pass(conn, 5).unwrap();
    let rolled_back: Result<(), Error> = conn.transaction(|conn| {
        FENCE.pass(conn, 9)?;
        Err(diesel::result::Error::RollbackTransaction.into())
    });
    assert!(rolled_back.is_err());
    pass(conn, 7).unwrap();
    assert_matches!(pass(conn, 6), Err(Error::Fenced { .. }));
    conn.transaction(|conn| Fence::new("another").pass(conn, 1))
        .unwrap();
}

#[test]
fn a_late_writer_waits_for_the_one_that_is_passing_and_is_refused() {
    let database = database();
    let (conn, late) = (&mut database.connect(), &mut database.connect());
    let observer = &mut Observer::of(&database);
    pass(conn, 1).unwrap();
    std::thread::scope(|scope| {
        let refused = conn.transaction(|conn| {
            FENCE.pass(conn, 3)?;
            let writer = scope.spawn(|| pass(late, 2));
            eventually("the late writer waits", || {
                diesel::sql_query(
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() \
                     AND wait_event_type = 'Lock' AND query LIKE '%pass_fence%'",
                )
                .execute(observer.conn())
                .unwrap()
                    == 1
            });
            Ok::<_, Error>(writer)
        });
        let refused = refused.unwrap().join().unwrap();
        assert_matches!(refused, Err(Error::Fenced { token: 2, .. }));
    });
}

#[test]
fn misuse_is_refused() {
    let database = database();
    let conn = &mut database.connect();
    assert_matches!(
        FENCE.pass(conn, 1),
        Err(Error::Misplaced(Misplaced::FenceOutsideTransaction))
    );
    let of = |name: String, conn: &mut PgConnection| {
        conn.transaction(|conn| Fence::new(name).pass(conn, 1))
    };
    assert_matches!(of(String::new(), conn), Err(Error::Input(Input::EmptyName)));
    assert_matches!(
        of("a\0b".into(), conn),
        Err(Error::Input(Input::NulCharacter))
    );
    assert_matches!(
        of("x".repeat(1001), conn),
        Err(Error::Input(Input::TooLong { .. }))
    );
    of("x".repeat(1000), conn).unwrap();
}

#[test]
fn at_a_stricter_level_a_late_writer_gets_an_error_that_says_so() {
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    pass(other, 1).unwrap();
    let late: Result<(), Error> = conn.build_transaction().repeatable_read().run(|conn| {
        diesel::select(diesel::dsl::now).execute(conn)?;
        pass(other, 2)?;
        FENCE.pass(conn, 3)
    });
    assert_matches!(late, Err(Error::StrictIsolation));
    assert_eq!(FENCE.name(), "rows");
}

#[test]
fn the_table_keeps_no_fence_without_a_name() {
    let database = database();
    let conn = &mut database.connect();
    for name in ["''", "repeat('x', 1001)"] {
        let passed = diesel::sql_query(format!("SELECT resource_control.pass_fence({name}, 1)"));
        assert!(passed.execute(conn).is_err(), "{name}");
    }
}

#[test]
fn no_search_path_lets_a_smaller_token_pass() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "CREATE SCHEMA impostor; \
         CREATE FUNCTION impostor.always(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'; \
         CREATE OPERATOR impostor.<= (FUNCTION = impostor.always, LEFTARG = bigint, RIGHTARG = bigint); \
         SET search_path = impostor, pg_catalog",
    )
    .unwrap();
    pass(conn, 9).unwrap();
    assert_matches!(pass(conn, 5), Err(Error::Fenced { .. }));
}

/// The transaction id is not in the log before the commit, so a crash would assign it again.
#[test]
fn a_token_is_not_drawn_inside_an_open_transaction() {
    let database = database();
    let pool = database.pool(1);
    let conn = &mut database.connect();
    let mut guard = PLAIN.acquire(&pool).unwrap();
    for _ in 0..2 {
        guard.conn().batch_execute("BEGIN").unwrap();
        let refused = guard.fencing_token();
        assert_matches!(
            refused,
            Err(Error::Misplaced(Misplaced::TokenInTransaction))
        );
        guard.conn().batch_execute("COMMIT").unwrap();
    }
    let token = guard.fencing_token().unwrap();
    guard.conn().batch_execute("BEGIN").unwrap();
    assert_eq!(guard.fencing_token().unwrap(), token);
    guard.conn().batch_execute("COMMIT").unwrap();
    guard.release().unwrap();

    let mut guard = PLAIN.acquire_on(conn).unwrap();
    AnsiTransactionManager::begin_transaction(guard.conn()).unwrap();
    let refused = guard.fencing_token();
    assert_matches!(
        refused,
        Err(Error::Misplaced(Misplaced::TokenInTransaction))
    );
    AnsiTransactionManager::commit_transaction(guard.conn()).unwrap();
    guard.conn().batch_execute("BEGIN").unwrap();
    guard.conn().batch_execute("SELECT 1/0").unwrap_err();
    assert_matches!(guard.fencing_token(), Err(Error::Database(_)));
    guard.conn().batch_execute("ROLLBACK").unwrap();
    assert!(guard.fencing_token().unwrap() > token);
    guard.release().unwrap();
    conn.transaction(|_| QueryResult::Ok(())).unwrap();

    conn.begin_test_transaction().unwrap();
    let mut guard = PLAIN.acquire_on(conn).unwrap();
    guard.fencing_token().unwrap();
}

#[test]
fn guards_of_one_lock_on_one_session_have_one_token() {
    let database = database();
    let pool = database.pool(2);
    for (outer, inner) in [(&LOCK, &LOCK), (&PLAIN, &PLAIN), (&LOCK, &PLAIN)] {
        let mut outer_guard = outer.acquire(&pool).unwrap();
        let token = outer_guard.fencing_token().unwrap();
        let mut inner_guard = inner.acquire_on(outer_guard.conn()).unwrap();
        assert_eq!(inner_guard.fencing_token().unwrap(), token);
        let mut third = LOCK
            .clone()
            .shared()
            .acquire_on(inner_guard.conn())
            .unwrap();
        assert_eq!(third.fencing_token().unwrap(), token);
        pass(&mut pool.get().unwrap(), token).unwrap();
        third.release().unwrap();
        inner_guard.release().unwrap();
        pass(&mut pool.get().unwrap(), token).unwrap();
        outer_guard.release().unwrap();

        let mut next = outer.acquire(&pool).unwrap();
        assert!(next.fencing_token().unwrap() > token);
        next.release().unwrap();
    }
    // Another lock on the same session has its own hold.
    let mut outer = LOCK.acquire(&pool).unwrap();
    let token = outer.fencing_token().unwrap();
    let other = AdvisoryLock::named("fenced, another").fenced();
    let mut inner = other.acquire_on(outer.conn()).unwrap();
    assert!(inner.fencing_token().unwrap() > token);
}

/// Lets the server wait for no standby when it is dropped.
struct NoStandbys<'a> {
    conn: PgConnection,
    is_over: &'a AtomicBool,
}

impl Drop for NoStandbys<'_> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        for change in [
            "ALTER SYSTEM RESET synchronous_standby_names",
            "SELECT pg_reload_conf()",
        ] {
            let _ = self.conn.batch_execute(change);
        }
    }
}

/// Every commit waits there, after `statement_timeout` has ended.
#[test]
fn a_fenced_lock_waits_for_synchronous_standbys_unless_its_session_commits_locally() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut observer = Observer::of(&database);
    let conn = &mut database.connect();
    // The only synchronous standby does not exist.
    observer
        .conn()
        .batch_execute("SET synchronous_commit = local")
        .unwrap();
    let standbys = |observer: &mut Observer, names: &str| {
        let change = format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'");
        observer.conn().batch_execute(&change).unwrap();
        observer
            .conn()
            .batch_execute("SELECT pg_reload_conf()")
            .unwrap();
    };
    standbys(&mut observer, "nobody");
    eventually("the setting is in force", || {
        setting(conn, "synchronous_standby_names") == "nobody"
    });

    conn.batch_execute("SET statement_timeout = '100ms'")
        .unwrap();
    let timeout = std::time::Duration::from_millis(10);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Also after a failure, because otherwise this waits for the standby, and so does the end of the database.
        let _reset = NoStandbys {
            conn: database.connect(),
            is_over: &is_over,
        };
        let fenced = scope.spawn(|| {
            // The server waits for standbys once its checkpointer has read the setting, which may be later.
            while !is_over.load(Ordering::SeqCst) {
                let guard = LOCK.acquire_timeout_on(conn, timeout).unwrap();
                let mut guard = guard.expect_acquired();
                guard.fencing_token().unwrap();
                guard.release().unwrap();
            }
        });
        eventually("it waits for the standby, and holds the lock", || {
            let waiting = number(
                observer.conn(),
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                 AND wait_event = 'SyncRep'",
            );
            waiting == 1 && observer.holders(LOCK.key()) == 1
        });
        let local = &mut database.connect();
        local
            .batch_execute("SET synchronous_commit = local")
            .unwrap();
        let other = AdvisoryLock::named("fenced, locally").fenced();
        other.acquire_on(local).unwrap().release().unwrap();
        is_over.store(true, Ordering::SeqCst);
        standbys(&mut observer, "");
        fenced.join().unwrap();
    });
    observer.assert_free(LOCK.key());
}

/// The error has aborted the transaction in which the fence is passed, so the catalogue cannot be queried.
#[test]
fn a_fence_that_is_not_installed_or_not_allowed_is_an_error_of_the_database() {
    let database = Database::new();
    let refused = pass(&mut database.connect(), 1);
    assert_matches!(refused, Err(Error::Database(_)));

    let cluster = Cluster::start();
    let database = cluster.database();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    conn.batch_execute("CREATE ROLE limited; SET ROLE limited")
        .unwrap();
    let refused = pass(conn, 1);
    assert_matches!(refused, Err(Error::Database(_)));
}

#[cfg(feature = "testing")]
#[test]
fn fences_of_tests_with_a_prefix_each_do_not_meet() {
    use crate::half::testing::key_prefix;
    let database = database();
    let conn = &mut database.connect();
    {
        let _prefix = key_prefix("one test");
        pass(conn, 9).unwrap();
        assert_matches!(pass(conn, 8), Err(Error::Fenced { .. }));
    }
    let _prefix = key_prefix("another test");
    pass(conn, 1).unwrap();
    let too_long = Fence::new("x".repeat(1000));
    let refused = conn.transaction(|conn| too_long.pass(conn, 1));
    assert_matches!(refused, Err(Error::Input(Input::TooLong { .. })));
}
