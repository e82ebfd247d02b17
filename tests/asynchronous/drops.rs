//! Futures that are dropped after every number of polls leave nothing held and no connection lost.

use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;
use diesel_interlock::{Async, Pool};
use tokio::runtime::{Builder, Runtime};
use workbench::Database;

use crate::half::{
    Admission, AdvisoryLock, Error, Leader, LockKey, NOTICES_BROKEN, Once, PgPool, Quota,
    RateLimit, Semaphore, Throttle, execute, make_pool, polled,
};
use crate::support::{
    IN_FLIGHT, Observer, assert_few_are_prepared, eventually, foreign_holder, installed, number,
    run, truth,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("drops");
static SLOT: Semaphore = Semaphore::named("drops", 1, Duration::from_secs(3600));
static KEPT: Semaphore = Semaphore::named("kept", 1, Duration::from_secs(3600)).keep_alive();
static ONCE: Once = Once::named("drops");
static THROTTLE: Throttle = Throttle::named("drops", Duration::from_micros(1));
static LIMIT: RateLimit = RateLimit::named("drops", Quota::per_second(1_000_000));

/// No operation takes more polls. Each number of polls is tried once.
const POLLS: usize = 30;

fn runtimes() -> [Runtime; 2] {
    [
        Builder::new_current_thread().enable_all().build().unwrap(),
        Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap(),
    ]
}

/// Drops an operation after each number of polls until it is ready, in each kind of runtime and
/// with pools of 1 and 4. Asserts after each drop that nothing is held, and that the pool has all
/// of its connections.
fn try_all<F: Future>(database: &Database, operation: impl Fn(PgPool) -> F) {
    let mut observer = Observer::of(database);
    let has_permits = truth(
        observer.conn(),
        "(to_regclass('resource_control.service_request') IS NOT NULL)",
    );
    for runtime in runtimes() {
        for size in [1, 4] {
            let pool = {
                let _entered = runtime.enter();
                crate::pool::make(&database.url(), size, Duration::from_secs(20))
            };
            runtime.block_on(async {
                for polls in 0..POLLS {
                    let ended = polled(polls, operation(pool.clone())).await.map(drop);
                    // The pool has all of its connections again only after the tasks of the drop
                    // have ended.
                    let mut all = Vec::new();
                    for _ in 0..size {
                        all.push(pool.check_out(None).await.unwrap());
                    }
                    for conn in &mut all {
                        execute(conn, "SELECT 1").await.unwrap();
                    }
                    drop(all);
                    if ended.is_some() {
                        break;
                    }
                }
                // The server may end a discarded session a moment later, and a task of this runtime
                // releases a dropped permit.
                for _ in 0..10_000 {
                    let permits = match has_permits {
                        true => number(observer.conn(), IN_FLIGHT),
                        false => 0,
                    };
                    if observer.all_held() == 0 && observer.in_transaction() == 0 && permits == 0 {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                panic!("a lock or a permit is still held");
            });
            let _entered = runtime.enter();
            drop(pool);
        }
    }
}

/// The next user of the connection would write into a transaction that nobody commits.
#[test]
fn dropped_work_under_a_lock_leaves_no_transaction_of_plain_sql() {
    let database = Database::new();
    let several = AdvisoryLock::all([&LOCK, &LOCK.key("another")]);
    for lock in [&LOCK, &several] {
        try_all(&database, |pool| async move {
            let work = async |conn: &mut AsyncPgConnection| {
                execute(conn, "BEGIN").await?;
                execute(conn, "SELECT 1").await?;
                Err::<(), _>(Error::TimedOut)
            };
            lock.with(&pool, work).await
        });
        try_all(&database, |pool| async move {
            let mut guard = lock.acquire(&pool).await?;
            execute(guard.conn(), "BEGIN").await?;
            drop(guard);
            Ok::<_, Error>(())
        });
    }
}

#[test]
fn dropped_tries_waits_and_releases_of_a_session_lock_leave_nothing() {
    let database = Database::new();
    try_all(&database, |pool| async move {
        LOCK.try_acquire(&pool).await.map(drop)
    });
    try_all(&database, |pool| async move {
        LOCK.acquire(&pool).await.map(drop)
    });
    try_all(&database, |pool| async move {
        LOCK.acquire(&pool).await?.release().await
    });
    try_all(&database, |pool| async move {
        let mut guard = LOCK.acquire(&pool).await?;
        let _ = guard.is_held().await?;
        execute(guard.conn(), "SELECT 1").await?;
        drop(guard);
        Ok::<_, Error>(())
    });
    try_all(&database, |pool| async move {
        LOCK.with(&pool, async |conn| {
            Ok::<_, Error>(execute(conn, "SELECT 1").await?)
        })
        .await
    });
}

fn several() -> AdvisoryLock {
    let shared = LOCK.key("shared").shared();
    AdvisoryLock::all([
        &LOCK.key(1),
        &shared,
        &AdvisoryLock::new(LockKey::pair(-1, 1)),
    ])
}

#[test]
fn dropped_tries_waits_and_releases_of_several_locks_leave_nothing() {
    let database = Database::new();
    try_all(&database, |pool| async move {
        several().try_acquire(&pool).await.map(drop)
    });
    try_all(&database, |pool| async move {
        several().acquire(&pool).await?.release().await
    });
    try_all(&database, |pool| async move {
        let mut guard = several().acquire(&pool).await?;
        let _ = guard.is_held().await?;
        execute(guard.conn(), "SELECT 1").await?;
        drop(guard);
        Ok::<_, Error>(())
    });
    try_all(&database, |pool| async move {
        let mut conn = pool.check_out(None).await?;
        several()
            .with_on(&mut conn, async |conn| {
                Ok::<_, Error>(execute(conn, "SELECT 1").await?)
            })
            .await
    });
    try_all(&database, |pool| async move {
        let mut conn = pool.check_out(None).await?;
        several()
            .transaction(&mut conn, async |conn| {
                let timeout = Duration::from_secs(20);
                let more = AdvisoryLock::all([&LOCK.key(2), &LOCK.key(3)]);
                // The discarded session of the operation before may still hold the lock.
                let _ = more.try_acquire_xact(conn).await?;
                more.acquire_xact_timeout(conn, timeout).await.map(drop)
            })
            .await
    });
}

/// Waits for a lock that another session holds, and drops the wait after each number of polls, in
/// each kind of runtime and with pools of 1 and 4, concurrently. Asserts that nothing is held
/// afterwards, and that nobody waits.
fn wait_for(held: &AdvisoryLock, waits: impl AsyncFn(&PgPool, usize) + Sync) {
    let (held, waits) = (held.lock_key(), &waits);
    std::thread::scope(|scope| {
        for (kind, size) in [(0, 1), (0, 4), (1, 1), (1, 4)] {
            scope.spawn(move || {
                let database = Database::new();
                let holder = foreign_holder(&database, held);
                runtimes()[kind].block_on(async {
                    let pool = crate::pool::make(&database.url(), size, Duration::from_secs(20));
                    for polls in 0..POLLS {
                        waits(&pool, polls).await;
                    }
                    let mut all = Vec::new();
                    for _ in 0..size {
                        all.push(pool.check_out(None).await.unwrap());
                    }
                });
                drop(holder);
                let mut observer = Observer::of(&database);
                eventually("nothing is held", || observer.all_held() == 0);
                eventually("nobody waits", || observer.all_waiting() == 0);
            });
        }
    });
}

#[test]
fn dropped_waits_for_several_locks_of_which_one_is_busy_leave_nothing() {
    if !NOTICES_BROKEN {
        return; // the pool lends the marked connection again, as it does after Diesel's own transactions
    }
    let all = several();
    wait_for(&LOCK.key(1), async |pool, polls| {
        let timeout = Duration::from_millis(10 * polls as u64);
        polled(polls, all.acquire_timeout(pool, timeout)).await;
        let waits = async {
            let mut conn = pool.check_out(None).await?;
            all.transaction(&mut conn, async |_conn| Ok::<_, Error>(()))
                .await
        };
        polled(polls, tokio::time::timeout(timeout, waits)).await;
    });
}

#[test]
fn dropped_waits_for_a_busy_session_lock_leave_nothing() {
    wait_for(&LOCK, async |pool, polls| {
        let timeout = Duration::from_millis(20 * polls as u64);
        polled(polls, LOCK.acquire_timeout(pool, timeout)).await;
    });
}

/// Each kind of operation is called once before, because a future that is dropped while a statement
/// is prepared leaves that statement in its session.
#[test]
fn keys_of_dropped_operations_add_no_prepared_statements() {
    const MOMENT: Duration = Duration::from_millis(10);
    const KINDS: usize = 8;
    // This kind of operation is left out, because a dropped transaction costs its session.
    const TRANSACTIONS: usize = 7;
    let database = installed();
    let pool = crate::half::pool(&database, 1);
    let mut observer = Observer::of(&database);
    let holder = foreign_holder(&database, LOCK.lock_key());
    let operate = async |kind: usize, key: usize| {
        let lock = LOCK.key(key);
        let both = AdvisoryLock::all([&lock, &LOCK.key(key + 1_000_000).shared()]);
        match kind {
            0 => drop(lock.try_acquire(&pool).await?),
            1 => drop(lock.shared().acquire(&pool).await?),
            2 => drop(both.try_acquire(&pool).await?),
            3 => {
                let mut guard = both.acquire(&pool).await?;
                guard.is_held().await?;
                guard.fencing_token().await?;
            }
            4 => {
                let busy = AdvisoryLock::all([&LOCK, &both]);
                let _ = busy.acquire_timeout(&pool, MOMENT).await;
                let _ = LOCK.acquire_timeout(&pool, MOMENT).await;
            }
            5 => {
                let slot = SLOT.key(key).acquire(&pool).await?;
                slot.renew().await?;
                slot.release().await?;
            }
            6 => assert!(THROTTLE.key(key).attempt(&pool).await?.is_granted()),
            _ => {
                let limits = [1, 2, 3].map(|place| LIMIT.key(format!("{key} {place}")));
                let limits: Vec<_> = limits.iter().take(1 + key % 3).collect();
                assert!(RateLimit::check_all(&limits, &pool).await?.is_allowed());
                let _ = limits[0].check(&pool).await?;
            }
        }
        Ok::<_, Error>(())
    };
    let pid = workbench::block_on(async {
        for kind in 0..KINDS {
            operate(kind, kind).await.unwrap();
            if kind < TRANSACTIONS {
                polled(3, operate(kind, 10 + kind)).await;
            }
        }
        LOCK.key("pid").acquire(&pool).await.unwrap().backend_pid()
    });
    // A reply that takes longer than two seconds after a drop costs the connection.
    let (mut is_slow, mut began) = (false, Instant::now());
    workbench::block_on(async {
        for key in 100..900 {
            let (kind, polls) = (key % KINDS, key / KINDS % 10);
            if kind < TRANSACTIONS {
                polled(polls, operate(kind, key)).await;
            } else {
                // The pool has one connection, so this call waits until the dropped ones have given
                // it back.
                operate(kind, key).await.unwrap();
                is_slow |= began.elapsed() > Duration::from_secs(2);
                began = Instant::now();
            }
        }
    });
    assert_few_are_prepared(&pool);
    assert!(
        observer.is_alive(pid) || is_slow,
        "the session was replaced"
    );
    drop(holder);
    eventually("nothing is held", || observer.all_held() == 0);
}

/// The first release is dropped before its statement is prepared.
#[test]
fn dropped_releases_add_no_prepared_statements() {
    let database = Database::new();
    for polls in 1..4 {
        for is_one in [true, false] {
            let pool = crate::half::pool(&database, 1);
            workbench::block_on(async {
                for key in 0..300 {
                    let lock = LOCK.key(key);
                    let both = AdvisoryLock::all([&lock, &LOCK.key(key + 1000)]);
                    let lock = if is_one { &lock } else { &both };
                    let guard = lock.acquire(&pool).await.unwrap();
                    let _ = polled(polls, guard.release()).await;
                }
            });
            assert_few_are_prepared(&pool);
        }
    }
}

/// Each dropped future leaves another prepared statement in the session, and after a number of them
/// the crate replaces the session.
#[test]
fn futures_that_are_dropped_while_they_prepare_do_not_fill_a_session() {
    const DROPS: usize = 130;
    // Without those of the pool, whose own test of a connection may be dropped, too.
    const FEW: &str = "DO $$ DECLARE of_all CONSTANT text[] := ARRAY( \
            SELECT statement FROM pg_prepared_statements WHERE statement LIKE '%pg_catalog.%'); \
        BEGIN ASSERT cardinality(of_all) < 80, array_to_string(of_all, E'\\n'); END $$";
    let database = installed();
    let fill = async |pool: &PgPool, kind: usize, key: usize| {
        let lock = LOCK.key(key);
        let both = AdvisoryLock::all([&lock, &LOCK.key(key + 1_000_000).shared()]);
        match kind {
            0 => drop(lock.try_acquire(pool).await?),
            1 => drop(both.try_acquire(pool).await?),
            2 => drop(SLOT.key(key).try_acquire(pool).await?),
            3 => drop(THROTTLE.key(key).attempt(pool).await?),
            4 => drop(LIMIT.key(key).check(pool).await?),
            5 => drop(RateLimit::check_all(&[&LIMIT.key(key)], pool).await?),
            6 => drop(LIMIT.key(key).peek(pool).await?),
            _ => drop(ONCE.key(key).begin(pool).await?),
        }
        Ok::<_, Error>(())
    };
    for kind in 0..8 {
        for polls in 2..5 {
            // In a runtime of one thread, the same number of polls ends in the same place.
            crate::half::block_on_one_thread(async {
                let pool = crate::pool::make(&database.url(), 1, Duration::from_secs(20));
                for key in 0..DROPS {
                    polled(polls, fill(&pool, kind, key)).await;
                }
                let mut conn = pool.check_out(None).await.unwrap();
                execute(&mut conn, FEW).await.unwrap();
            });
        }
    }
}

/// A future that is dropped between `BEGIN` and diesel-async's note of it leaves a transaction that
/// diesel-async does not see: <https://github.com/diesel-rs/diesel_async/issues/198>.
#[test]
fn dropped_scopes_and_transactions_on_a_callers_connection_leave_nothing() {
    let database = Database::new();
    run(&mut database.connect(), "CREATE TABLE written ()");
    try_all(&database, |pool| async move {
        let mut conn = pool.check_out(None).await?;
        LOCK.with_on(&mut conn, async |conn| {
            Ok::<_, Error>(execute(conn, "SELECT 1").await?)
        })
        .await
    });
    try_all(&database, |pool| async move {
        let mut conn = pool.check_out(None).await?;
        LOCK.transaction(&mut conn, async |conn| {
            Ok::<_, Error>(execute(conn, "INSERT INTO written DEFAULT VALUES").await?)
        })
        .await
    });
}

#[test]
fn dropped_work_of_once_leaves_nothing() {
    if !NOTICES_BROKEN {
        return; // the pool lends the marked connection again, as it does after Diesel's own transactions
    }
    let database = installed();
    run(&mut database.connect(), "CREATE TABLE written ()");
    try_all(&database, |pool| async move {
        let mut conn = pool.check_out(None).await?;
        // Each run does the work, until one run is not dropped.
        ONCE.run(&mut conn, async |conn| {
            execute(conn, "INSERT INTO written DEFAULT VALUES").await?;
            Ok::<_, Error>("done")
        })
        .await
    });
    let conn = &mut database.connect();
    for table in ["written", "resource_control.once"] {
        let rows = number(conn, &format!("(SELECT count(*) FROM {table})"));
        assert_eq!(rows, 1, "{table}");
    }
}

#[test]
fn dropped_permits_attempts_and_checks_leave_nothing() {
    let database = installed();
    try_all(&database, |pool| async move {
        SLOT.try_acquire(&pool).await.map(drop)
    });
    try_all(&database, |pool| async move {
        SLOT.acquire(&pool).await?.release().await
    });
    try_all(&database, |pool| async move {
        let permit = SLOT.acquire(&pool).await?;
        permit.renew().await?;
        drop(permit);
        Ok::<_, Error>(())
    });
    try_all(&database, |pool| async move {
        KEPT.try_acquire(&pool).await.map(drop)
    });
    try_all(&database, |pool| async move {
        THROTTLE.attempt(&pool).await.map(drop)
    });
    try_all(&database, |pool| async move {
        LIMIT.check(&pool).await.map(drop)
    });
    try_all(&database, |pool| async move {
        LIMIT
            .acquire_timeout(&pool, Duration::from_secs(1))
            .await
            .map(drop)
    });
    try_all(&database, |pool| async move {
        RateLimit::check_all(&[&LIMIT, &LIMIT.key(1)], &pool)
            .await
            .map(drop)
    });
}

#[test]
fn a_wait_for_a_slot_that_is_given_up_takes_none() {
    let database = installed();
    let pool = make_pool(&database.url(), 2, Duration::from_secs(20));
    workbench::block_on(async {
        let Admission::Admitted(permit) = SLOT.try_acquire(&pool).await.unwrap() else {
            panic!("the slot is taken")
        };
        for polls in 0..POLLS {
            polled(polls, SLOT.acquire(&pool)).await;
        }
        permit.release().await.unwrap();
        // A claim whose future was dropped may hold the slot for a moment, until the background
        // reads its reply.
        let minute = Duration::from_secs(60);
        let admission = SLOT.acquire_timeout(&pool, minute).await.unwrap();
        assert!(admission.is_admitted());
    });
}

#[test]
fn a_leader_whose_future_is_dropped_resigns() {
    let database = installed();
    let leader = Leader::named("drops", Duration::from_secs(60));
    let mut observer = Observer::of(&database);
    workbench::block_on(async {
        let pool = crate::pool::make(&database.url(), 2, Duration::from_secs(20));
        for polls in 0..POLLS {
            // After these polls a leader is next polled for its renewal, so a timeout drops its
            // future, too.
            let lead = polled(polls, leader.lead(&pool, |_term| std::future::pending()));
            let _ = tokio::time::timeout(Duration::from_millis(20), lead).await;
        }
    });
    let leads = "(SELECT count(*) FROM resource_control.leader)";
    eventually("nobody leads", || number(observer.conn(), leads) == 0);
}

/// Compiles only if an application can name the trait and its mode.
fn _is_asynchronous(pool: PgPool) -> impl Pool<Mode = Async> {
    pool
}

/// A web framework drops the future of a handler whose client hangs up.
#[test]
fn begun_work_that_is_dropped_after_any_poll_is_undone_and_costs_no_session() {
    use diesel_interlock::once::Begun;
    const SESSIONS: &str =
        "(SELECT coalesce(sum(pid), 0) FROM pg_stat_activity WHERE datname = current_database()
        AND pid <> pg_backend_pid() AND backend_type = 'client backend')";
    let database = installed();
    let conn = &mut database.connect();
    run(conn, "CREATE TABLE effect (key int)");
    for (number_of, runtime) in runtimes().into_iter().enumerate() {
        // The sessions of the pool before and of the installation are ending.
        eventually("nobody is connected", || number(conn, SESSIONS) == 0);
        let pool = {
            let _entered = runtime.enter();
            crate::pool::unchecked(&database, 1)
        };
        runtime.block_on(async {
            let mut sessions = None;
            // When the last future was dropped.
            let mut began = Instant::now();
            for polls in 0.. {
                let key = 1000 * number_of + polls;
                let (once, insert) = (ONCE.key(key), format!("INSERT INTO effect VALUES ({key})"));
                // Opens the connection first: if the future were dropped during that, the pool
                // would discard the connection.
                execute(&mut pool.check_out(None).await.unwrap(), "SELECT 1")
                    .await
                    .unwrap();
                let ended = polled(polls, async {
                    let Begun::First(mut doing) = once.begin(&pool).await? else {
                        panic!("nobody else begins");
                    };
                    execute(doing.conn(), &insert).await?;
                    doing.finish("done").await
                });
                let ended = ended.await.transpose().unwrap().is_some();
                execute(&mut pool.check_out(None).await.unwrap(), "SELECT 1")
                    .await
                    .unwrap();
                let now = number(conn, SESSIONS);
                // A reply that takes longer than two seconds costs the connection.
                let is_same = sessions.replace(now).is_none_or(|before| before == now);
                let is_slow = began.elapsed() > Duration::from_secs(2);
                assert!(is_same || is_slow, "a session was replaced at {polls}");
                began = Instant::now();
                // Work that was dropped during `finish` is done wholly, or not at all.
                let done = matches!(once.begin(&pool).await.unwrap(), Begun::Before(_));
                let effects = number(
                    conn,
                    &format!("(SELECT count(*) FROM effect WHERE key = {key})"),
                );
                assert_eq!(effects, i64::from(done), "{polls}");
                assert!(done || !ended);
                if ended {
                    // In the runtime with two threads all replies may have arrived at the first
                    // poll.
                    let has_one_thread = number_of == 0;
                    assert!(polls > 3 || !has_one_thread, "the work was never dropped");
                    break;
                }
            }
        });
    }
}
