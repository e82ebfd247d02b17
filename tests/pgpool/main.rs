//! Behind pgpool-II, which sends read-only statements to a standby: session locks exclude, and
//! their release frees them.
//!
//! Run by `scripts/test with pgpool`, which installs it.

use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::{
    AdvisoryLock, Error, LockKey, Once, Quota, RateLimit, Semaphore, Throttle, check_exclusion,
    migrations,
};
use workbench::{Cluster, Database, Pgpool};

/// The timeout of a wait for a lock that is soon free.
const PATIENCE: Duration = Duration::from_secs(30);

/// The numbers of sessions that hold an advisory lock of the database, and that wait for one.
const HELD: &str = "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
const WAITING: &str = "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";

const TAKE: &str = "SELECT pg_advisory_lock(4711)";
const LET_GO: &str = "SELECT pg_advisory_unlock(4711)";

/// A primary, its standby, and the pooler in front of both. The order of the fields is the order in
/// which they are dropped.
struct Replicated {
    pooler: Pgpool,
    database: Database,
    _standby: Cluster,
    _primary: Cluster,
}

impl Replicated {
    fn start() -> Self {
        let primary = Cluster::start();
        let database = primary.database();
        let standby = primary.standby();
        let pooler = Pgpool::in_front_of(&database, &standby.endpoint("postgres"));
        assert_eq!(
            number(&mut pooler.connect(), STANDBY),
            1,
            "pgpool does not send a read-only statement to the standby"
        );
        Self {
            pooler,
            database,
            _standby: standby,
            _primary: primary,
        }
    }
}

/// 1 if a standby executes the statement. pgpool takes it for read-only, because the function is
/// stable.
const STANDBY: &str = "(current_setting('transaction_read_only') = 'on')::int::bigint";

/// The number that an SQL expression returns.
fn number(conn: &mut PgConnection, expression: &str) -> i64 {
    let number = diesel::dsl::sql::<diesel::sql_types::BigInt>(expression);
    diesel::select(number).get_result(conn).unwrap()
}

#[track_caller]
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !happened() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Ten times: waits for a lock that another session holds, gets it, checks that others are refused,
/// and releases it.
macro_rules! a_lock_that_was_waited_for_is_free_after_its_release {
    ($($half:ident)::+, $pool:ident, $wait:path) => {{
        const LOCK: $($half)::+::AdvisoryLock =
            $($half)::+::AdvisoryLock::new(LockKey::bigint(4711));

        let replicated = Replicated::start();
        let pool = replicated.pooler.$pool(3);
        let [holder, observer] = &mut [(); 2].map(|()| replicated.database.connect());
        for round in 0..10 {
            holder.batch_execute(TAKE).unwrap();
            let (is_held, is_busy, released, left) = thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    let attempt = $wait(LOCK.acquire_timeout(&pool, PATIENCE)).unwrap();
                    let mut guard = attempt.acquired().expect("the lock is free");
                    let is_held = $wait(guard.is_held());
                    let is_busy = $wait(LOCK.try_acquire(&pool)).map(|attempt| attempt.is_busy());
                    (is_held, is_busy, $wait(guard.release()))
                });
                until("the lock is awaited", || number(observer, WAITING) == 1);
                assert!(!waiter.is_finished(), "the wait ended while the lock was held");
                holder.batch_execute(LET_GO).unwrap();
                let (is_held, is_busy, released) = waiter.join().unwrap();
                (is_held, is_busy, released, number(observer, HELD))
            });
            assert!(matches!(is_held, Ok(true)), "round {round}: is_held is {is_held:?}");
            assert!(matches!(is_busy, Ok(true)), "round {round}: busy is {is_busy:?}");
            assert!(released.is_ok(), "round {round}: {released:?}");
            assert_eq!(left, 0, "round {round}: after its release the lock is still held");
        }
    }};
}

#[test]
fn a_lock_that_was_waited_for_is_free_after_its_release() {
    a_lock_that_was_waited_for_is_free_after_its_release!(
        diesel_interlock,
        pool,
        std::convert::identity
    );
}

#[cfg(feature = "deadpool")]
#[test]
fn an_asynchronous_lock_that_was_waited_for_is_free_after_its_release() {
    a_lock_that_was_waited_for_is_free_after_its_release!(
        diesel_interlock::deadpool,
        deadpool,
        workbench::block_on
    );
}

/// Acquires a lock that is free, checks that others are refused, and releases it.
macro_rules! a_free_lock_is_taken_at_once_and_refused_to_others {
    ($($half:ident)::+, $pool:ident, $wait:path) => {{
        const LOCK: $($half)::+::AdvisoryLock =
            $($half)::+::AdvisoryLock::new(LockKey::bigint(4711));

        let replicated = Replicated::start();
        let pool = replicated.pooler.$pool(3);
        let [holder, observer] = &mut [(); 2].map(|()| replicated.database.connect());
        for _ in 0..10 {
            let mut guard = $wait(LOCK.try_acquire(&pool)).unwrap().acquired().unwrap();
            assert_eq!(number(observer, HELD), 1);
            assert!($wait(guard.is_held()).unwrap());
            assert!($wait(LOCK.try_acquire(&pool)).unwrap().is_busy());
            $wait(guard.release()).unwrap();
            assert_eq!(number(observer, HELD), 0);

            holder.batch_execute(TAKE).unwrap();
            assert!($wait(LOCK.try_acquire(&pool)).unwrap().is_busy());
            holder.batch_execute(LET_GO).unwrap();
        }
    }};
}

#[test]
fn a_free_lock_is_taken_at_once_and_refused_to_others() {
    a_free_lock_is_taken_at_once_and_refused_to_others!(
        diesel_interlock,
        pool,
        std::convert::identity
    );
}

#[cfg(feature = "deadpool")]
#[test]
fn a_free_asynchronous_lock_is_taken_at_once_and_refused_to_others() {
    a_free_lock_is_taken_at_once_and_refused_to_others!(
        diesel_interlock::deadpool,
        deadpool,
        workbench::block_on
    );
}

#[test]
fn check_exclusion_finds_that_session_locks_exclude() {
    let replicated = Replicated::start();
    let pool = replicated.pooler.pool(2);
    check_exclusion(&pool).unwrap();
    assert_eq!(number(&mut replicated.database.connect(), HELD), 0);
}

#[test]
fn the_other_primitives_work() {
    const HOUR: Duration = Duration::from_secs(3600);
    static LOCK: AdvisoryLock = AdvisoryLock::named("ledger");
    static REBUILD: Throttle = Throttle::named("rebuild", HOUR);
    static API: RateLimit = RateLimit::named("api", Quota::per_day(5));
    static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, HOUR);
    static CHARGE: Once = Once::named("charge");

    let replicated = Replicated::start();
    let pool = replicated.pooler.pool(3);
    let conn = &mut replicated.pooler.connect();
    let observer = &mut replicated.database.connect();
    migrations::install(&pool).unwrap();
    migrations::install(&pool).unwrap();
    for round in 0..10 {
        assert_eq!(REBUILD.attempt(&pool).unwrap().is_granted(), round == 0);
        assert_eq!(API.key(7).check(&pool).unwrap().is_allowed(), round < 5);
        let permit = GEOCODER.try_acquire(&pool).unwrap().admitted().unwrap();
        assert!(GEOCODER.try_acquire(&pool).unwrap().is_full());
        permit.release().unwrap();
        let ran = CHARGE.run(conn, |_| Ok::<_, Error>("charged")).unwrap();
        assert_eq!(ran.is_first(), round == 0);
        let held = LOCK.transaction(conn, |_| Ok::<_, Error>(number(observer, HELD)));
        assert_eq!(held.unwrap(), 1);
        assert_eq!(number(observer, HELD), 0);
    }
}
