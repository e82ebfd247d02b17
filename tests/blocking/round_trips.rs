//! The round trips of each operation, which a proxy counts.

use std::time::Duration;

use diesel::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool};
use workbench::{Database, RoundTrips};

use crate::half::{
    AdvisoryLock, Done, Error, Once, PgPool, Quota, RateLimit, Semaphore, Throttle, begin, end,
    migrations,
};
use crate::support::installed;

static LOCK: AdvisoryLock = AdvisoryLock::named("trips");
static SLOT: Semaphore = Semaphore::named("trips", 1, Duration::from_secs(60));
static THROTTLE: Throttle = Throttle::named("trips", Duration::from_secs(60));
static LIMIT: RateLimit = RateLimit::named("trips", Quota::per_day(1000));

/// A pool that does not check its connections.
fn silent_pool(proxy: &RoundTrips) -> PgPool {
    Pool::builder()
        .max_size(1)
        .test_on_check_out(false)
        .build(ConnectionManager::new(proxy.url()))
        .unwrap()
}

#[test]
fn each_operation_takes_one_round_trip_and_is_prepared_once() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy);
    let all = || {
        let guard = LOCK.acquire(&pool).unwrap();
        guard.release().unwrap();
        drop(LOCK.try_acquire(&pool).unwrap());
        let permit = SLOT.acquire(&pool).unwrap();
        assert!(SLOT.try_acquire(&pool).unwrap().is_full());
        permit.renew().unwrap();
        permit.release().unwrap();
        let _ = THROTTLE.attempt(&pool).unwrap();
        let _ = LIMIT.check(&pool).unwrap();
    };
    all(); // prepares the statements, and inserts the rows of the keys
    let parses = proxy.parses();

    let guard = LOCK.acquire(&pool).unwrap();
    assert_eq!(proxy.count(|| guard.release().unwrap()), 1, "release");
    let mut guard = None;
    assert_eq!(
        proxy.count(|| guard = LOCK.try_acquire(&pool).unwrap().acquired()),
        1,
        "try_acquire"
    );
    assert_eq!(proxy.count(|| drop(guard.take())), 1, "drop of a guard");
    assert_eq!(
        proxy.count(|| guard = Some(LOCK.acquire(&pool).unwrap())),
        1,
        "acquire"
    );
    drop(guard);

    let mut permit = None;
    assert_eq!(
        proxy.count(|| permit = SLOT.try_acquire(&pool).unwrap().admitted()),
        1,
        "claim"
    );
    assert_eq!(
        proxy.count(|| assert!(SLOT.try_acquire(&pool).unwrap().is_full())),
        1,
        "refusal"
    );
    assert_eq!(
        proxy.count(|| permit.as_ref().unwrap().renew().unwrap()),
        1,
        "renewal"
    );
    assert_eq!(
        proxy.count(|| permit.take().unwrap().release().unwrap()),
        1,
        "release of a permit"
    );

    assert_eq!(
        proxy.count(|| assert!(THROTTLE.attempt(&pool).unwrap().is_denied())),
        1,
        "denial"
    );
    assert_eq!(
        proxy.count(|| assert!(LIMIT.check(&pool).unwrap().is_allowed())),
        1,
        "check"
    );
    assert_eq!(proxy.parses(), parses, "a statement was prepared again");
    // The first attempt of a key inserts its row.
    let first = THROTTLE.key("new");
    assert!(proxy.count(|| assert!(first.attempt(&pool).unwrap().is_granted())) >= 2);
}

#[test]
fn several_locks_take_as_many_round_trips_as_one() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let (pool, other) = (silent_pool(&proxy), database.pool(1));
    let keys: Vec<_> = (0..100).map(|key| LOCK.key(key)).collect();
    let (all, few) = (AdvisoryLock::all(&keys), AdvisoryLock::all(&keys[..3]));
    all.acquire(&pool).unwrap().release().unwrap();
    let parses = proxy.parses();
    for locks in [&all, &few] {
        let mut guard = None;
        assert_eq!(
            proxy.count(|| guard = locks.try_acquire(&pool).unwrap().acquired()),
            1,
            "try_acquire"
        );
        assert_eq!(proxy.count(|| drop(guard.take())), 1, "drop");
        assert_eq!(
            proxy.count(|| guard = Some(locks.acquire(&pool).unwrap())),
            1,
            "acquire"
        );
        assert_eq!(
            proxy.count(|| guard.take().unwrap().release().unwrap()),
            1,
            "release"
        );
        let _holder = keys[2].acquire(&other).unwrap();
        assert_eq!(
            proxy.count(|| assert!(locks.try_acquire(&pool).unwrap().is_busy())),
            1,
            "busy"
        );
    }
    assert_eq!(proxy.parses(), parses, "a statement was prepared again");
    let conn = &mut pool.get().unwrap();
    begin(conn);
    few.try_acquire_xact(conn).unwrap().acquired().unwrap();
    few.acquire_xact(conn).unwrap();
    assert_eq!(proxy.count(|| few.acquire_xact(conn).unwrap()), 1, "xact");
    assert_eq!(
        proxy.count(|| assert!(few.try_acquire_xact(conn).unwrap().is_acquired())),
        3,
        "try_acquire_xact"
    );
    end(conn);
}

#[test]
fn work_of_once_takes_a_few_round_trips() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut silent_pool(&proxy).get().unwrap();
    let run = |key: i32, conn: &mut PgConnection| -> Result<Done, Error> {
        Once::named("trips").key(key).run(conn, |_conn| Ok("done"))
    };
    run(0, conn).unwrap().into_bytes(); // prepares the statements
    let parses = proxy.parses();
    let first = proxy.count(|| assert!(run(1, conn).unwrap().is_first()));
    assert_eq!(first, 4, "BEGIN, the lock and a query, INSERT, COMMIT");
    let again = proxy.count(|| assert!(!run(1, conn).unwrap().is_first()));
    assert_eq!(again, 3, "BEGIN, the lock and a query, COMMIT");
    // BEGIN and COMMIT are not prepared.
    assert_eq!(proxy.parses(), parses, "a statement was prepared again");
}

#[test]
fn an_installation_with_nothing_pending_takes_a_few_round_trips() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy);
    migrations::install(&pool).unwrap();
    assert!(proxy.count(|| migrations::install(&pool).unwrap()) <= 3);
}
