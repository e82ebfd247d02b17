//! What the crate offers to its users' tests.

use std::panic::{AssertUnwindSafe, catch_unwind};

use diesel_interlock::{AdvisoryLock, LockId, LockKey, testing};
use workbench::Database;

static LOCK: AdvisoryLock = AdvisoryLock::named("testing");

#[test]
fn what_is_held_is_listed_and_asserted() {
    let database = Database::new();
    let pool = database.pool(2);
    let conn = &mut database.connect();
    testing::assert_nothing_held(conn);

    let named = LOCK.acquire(&pool).unwrap();
    let pair = AdvisoryLock::new(LockKey::pair(-1, i32::MIN)).shared();
    let shared = pair.acquire(&pool).unwrap();
    let held = testing::held_locks(conn).unwrap();
    assert_eq!(held.len(), 2);
    let of = |id: LockId| held.iter().find(|lock| lock.key == id).unwrap();
    let exclusive = of(LOCK.key().id().unwrap());
    assert!(!exclusive.shared);
    assert_eq!(exclusive.session.pid, Some(named.backend_pid()));
    assert!(of(LockId::Pair(-1, i32::MIN)).shared);

    let failed = catch_unwind(AssertUnwindSafe(|| testing::assert_nothing_held(conn)));
    assert!(failed.is_err());
    drop(named);
    testing::assert_not_held(&LOCK, conn);
    let failed = catch_unwind(AssertUnwindSafe(|| testing::assert_not_held(&pair, conn)));
    assert!(failed.is_err());
    drop(shared);
    testing::assert_nothing_held(conn);
}

#[test]
fn a_prefix_keeps_tests_apart_and_ends_with_its_value() {
    let plain = LOCK.key().id().unwrap();
    {
        let _outer = testing::key_prefix("one");
        let one = LOCK.key().id().unwrap();
        assert_ne!(one, plain);
        {
            let _inner = testing::key_prefix("two");
            assert_ne!(LOCK.key().id().unwrap(), one);
        }
        assert_eq!(LOCK.key().id().unwrap(), one);
        assert!(LockKey::named("").id().is_err());
        assert_eq!(LockKey::bigint(7).id().unwrap(), LockId::BigInt(7));
        let elsewhere = std::thread::spawn(|| LOCK.key().id().unwrap());
        assert_eq!(elsewhere.join().unwrap(), plain);
    }
    assert_eq!(LOCK.key().id().unwrap(), plain);
}

#[test]
#[cfg(feature = "migrations")]
fn migrations_exclude_each_other_under_any_prefix() {
    let lock = &diesel_interlock::migrations::LOCK;
    let number = diesel_interlock::fnv1a(lock.key().name().unwrap());
    let _prefix = testing::key_prefix("one");
    assert_eq!(lock.key().id().unwrap(), LockId::BigInt(number));
}

#[test]
fn two_tests_with_prefixes_do_not_exclude_each_other() {
    let database = Database::new();
    let pool = database.pool(2);
    let _one = {
        let _prefix = testing::key_prefix("one");
        LOCK.acquire(&pool).unwrap()
    };
    let _prefix = testing::key_prefix("two");
    assert!(!LOCK.try_acquire(&pool).unwrap().is_busy());
}
