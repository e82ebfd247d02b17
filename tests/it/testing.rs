//! What the crate offers to its users' tests.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use diesel::connection::SimpleConnection;

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, Database, DenialReason, Error, IS_ASYNCHRONOUS, LockId, LockKey, Quota,
    RateLimit, ResourceLabel, Semaphore, Throttle, cancel_on,
    error::{Input, Schema},
    fnv1a, give_back, give_back_on, migrations, monitor,
    schema::resource_control::{service_request, throttled_resource},
    testing::{self, KeyPrefix},
    throttled_resources,
};
use crate::rate_limits::allowed;
use crate::support::{
    Expect, assert_after_drop, assert_matches, attempt, database_with, is_granted,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("testing");
static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
static RENDERER: Semaphore = Semaphore::named("renderer", 1, Duration::from_secs(30));

throttled_resources! {
    enum Resource {
        CacheRebuild = "cache rebuild" every Duration::from_secs(3600),
        TenantImport = "tenant import" every Duration::from_secs(31_104_000_000),
    }
}

/// What it panics with.
fn panic_message(work: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(work)).expect_err("it panics");
    *panic
        .downcast()
        .expect("with a message that was put together")
}

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

    let message = panic_message(|| testing::assert_nothing_held(conn));
    let pid = format!("pid: Some({})", named.backend_pid());
    assert_eq!(message.matches(&pid).count(), 1, "{message}");
    // The asynchronous half names the place of the assertion, because a panic there is reported at the place of an `await`.
    let lines = if IS_ASYNCHRONOUS { 4 } else { 3 };
    assert_eq!(message.lines().count(), lines, "{message}");
    drop(named);
    testing::assert_not_held(conn, &LOCK);
    let message = panic_message(|| testing::assert_not_held(conn, &pair));
    assert!(message.contains("nobody holds the lock"), "{message}");
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
fn prefixes_end_in_any_order() {
    let names = || testing::prefixed("x").into_owned();
    let (a, b, c) = ["a", "b", "c"].map(testing::key_prefix).into();
    drop(b);
    assert_eq!(names(), "c x");
    drop(c);
    assert_eq!(names(), "a x");
    let d = testing::key_prefix("d");
    drop(a);
    assert_eq!(names(), "d x");
    drop(d);
    assert_eq!(names(), "x");
}

#[test]
fn a_prefix_that_a_thread_keeps_ends_with_the_thread() {
    thread_local! {
        static KEPT: RefCell<Option<testing::EnteredPrefix>> = const { RefCell::new(None) };
        static NAME: AtEnd = const { AtEnd };
    }
    /// Uses a name while the thread ends.
    struct AtEnd;
    impl Drop for AtEnd {
        fn drop(&mut self) {
            assert!(testing::prefixed("x").ends_with('x'));
        }
    }
    let thread = std::thread::spawn(|| {
        // The values of a thread are dropped in the reverse of the order in which they were first used.
        NAME.with(|_| ());
        KEPT.with_borrow_mut(|kept| *kept = Some(testing::key_prefix("one")));
        testing::prefixed("x").into_owned()
    });
    assert_eq!(thread.join().unwrap(), "one x");
}

#[test]
fn no_prefix_is_taken_for_the_first_part_of_a_name() {
    let id = |prefix: &str, key: &LockKey| {
        let _prefix = testing::key_prefix(prefix);
        key.id().unwrap()
    };
    let (one, parts) = (LockKey::named("x"), LockKey::parts(["1", "x"]));
    assert_ne!(id("test 1", &one), id("test", &parts));
    assert_ne!(id("test\\ 1", &one), id("test 1", &one));
    assert_eq!(id("test 1", &one), LockId::BigInt(fnv1a("test\\ 1 x")));
    assert_eq!(
        id("test", &parts),
        LockKey::parts(["test", "1", "x"]).id().unwrap()
    );
}

#[test]
#[cfg(feature = "migrations")]
fn migrations_exclude_each_other_under_any_prefix() {
    let lock = &migrations::LOCK;
    let number = fnv1a(lock.key().name().unwrap());
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

#[test]
fn a_request_in_flight_is_listed_and_held() {
    let database = database_with::<Resource>();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    testing::assert_nothing_held(conn);

    let permit = GEOCODER.details("web-3").try_acquire(&pool);
    let permit = permit.unwrap().expect_acquired();
    let requests = testing::requests_in_flight(conn).unwrap();
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].id, permit.fencing_token());

    let message = panic_message(|| testing::assert_nothing_held(conn));
    assert!(message.contains("nothing is held, but") && message.contains("\"web-3\""));
    let message = panic_message(|| testing::assert_none_in_flight(conn, &GEOCODER));
    assert!(message.contains("no request to \"geocoder\" is in flight, but"));
    assert!(message.contains("\"web-3\""));
    testing::assert_none_in_flight(conn, &RENDERER);

    permit.release().unwrap();
    testing::assert_none_in_flight(conn, &GEOCODER);
    testing::assert_nothing_held(conn);
}

#[test]
fn a_request_that_timed_out_is_not_held() {
    let database = database_with::<Resource>();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let _permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    testing::expire(conn, &GEOCODER).unwrap();
    testing::assert_none_in_flight(conn, &GEOCODER);
    testing::assert_nothing_held(conn);
}

#[test]
fn a_release_that_is_still_to_be_delivered_is_waited_for() {
    let database = database_with::<Resource>();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let only = pool.get().unwrap();
    drop(permit);
    assert_eq!(testing::requests_in_flight(conn).unwrap().len(), 1);
    drop(only);
    testing::assert_none_in_flight(conn, &GEOCODER);
}

#[test]
fn an_older_schema_or_none_has_nothing_in_flight_and_says_so_in_a_transaction_too() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.begin_test_transaction().unwrap();
    assert_eq!(testing::requests_in_flight(conn).unwrap(), []);
    testing::assert_nothing_held(conn);
    conn.batch_execute("CREATE SCHEMA resource_control")
        .unwrap();
    testing::assert_nothing_held(conn);
}

#[test]
fn what_the_schema_is_needed_for_says_that_it_is_missing() {
    let database = Database::new();
    let conn = &mut database.connect();
    let expired = testing::expire(conn, &GEOCODER);
    assert_matches!(expired, Err(Error::Schema(Schema::NotInstalled)));
    let due = testing::make_due(conn, &Throttle::of(Resource::CacheRebuild));
    assert_matches!(due, Err(Error::Schema(Schema::NotInstalled)));
    let message = panic_message(|| testing::assert_none_in_flight(conn, &GEOCODER));
    assert!(message.contains("NotInstalled"), "{message}");
}

#[test]
fn a_service_that_no_semaphore_can_have_is_refused_before_anything_is_sent() {
    let database = Database::new(); // without the schema
    let conn = &mut database.connect();
    let long = "x".repeat(1001);
    for (service, kind) in [
        ("", "EmptyName"),
        ("a\0b", "NulCharacter"),
        (&long, "TooLong"),
    ] {
        let semaphore = Semaphore::new(service, 1, Duration::from_secs(30));
        let claimed = match semaphore.claim_on(conn) {
            Err(Error::Input(input)) => input,
            other => panic!("{other:?}"),
        };
        for refused in [
            testing::expire(conn, &semaphore).map(drop),
            monitor::slots(conn, service, 1).map(drop),
        ] {
            assert_matches!(refused, Err(Error::Input(input)) if *input == claimed);
        }
        let message = panic_message(|| testing::assert_none_in_flight(conn, &semaphore));
        assert!(message.contains(kind), "{message}");
    }
}

/// Operators ahead of PostgreSQL's own that find nothing.
const IMPOSTORS: &str = "
    CREATE SCHEMA impostor;
    CREATE FUNCTION impostor.no(pg_catalog.text, pg_catalog.text) RETURNS bool IMMUTABLE LANGUAGE sql AS 'SELECT false';
    CREATE FUNCTION impostor.no(timestamptz, timestamptz) RETURNS bool IMMUTABLE LANGUAGE sql AS 'SELECT false';
    CREATE FUNCTION impostor.no(resource_control.throttled_resource_enum, resource_control.throttled_resource_enum)
        RETURNS bool IMMUTABLE LANGUAGE sql AS 'SELECT false';
    CREATE FUNCTION impostor.never(timestamptz, interval) RETURNS timestamptz IMMUTABLE LANGUAGE sql
        AS $$SELECT timestamptz 'infinity'$$;
    CREATE OPERATOR impostor.= (LEFTARG = pg_catalog.text, RIGHTARG = pg_catalog.text, FUNCTION = impostor.no);
    CREATE OPERATOR impostor.= (LEFTARG = resource_control.throttled_resource_enum,
        RIGHTARG = resource_control.throttled_resource_enum, FUNCTION = impostor.no);
    CREATE OPERATOR impostor.> (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = impostor.no);
    CREATE OPERATOR impostor.- (LEFTARG = timestamptz, RIGHTARG = interval, FUNCTION = impostor.never);
    SET search_path = impostor, pg_catalog";

#[test]
fn operators_ahead_of_postgresqls_own_change_nothing() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    conn.batch_execute(IMPOSTORS).unwrap();
    let throttle = Throttle::of(Resource::CacheRebuild);
    for throttle in [&throttle, &throttle.key(7)] {
        assert!(is_granted(conn, throttle, "one"));
        assert!(!is_granted(conn, throttle, "one"));
        testing::make_due(conn, throttle).unwrap();
        assert!(is_granted(conn, throttle, "one"));
    }
    let _claim = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    let _other = RENDERER.claim_on(conn).unwrap().expect_acquired();
    assert_eq!(testing::expire(conn, &GEOCODER).unwrap(), 1);
    assert_eq!(testing::expire(conn, &GEOCODER).unwrap(), 0);
}

#[test]
fn expiring_ends_the_requests_of_one_service_and_tells_their_holders() {
    let database = database_with::<Resource>();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    assert_eq!(testing::expire(conn, &GEOCODER).unwrap(), 0);
    let ended = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    ended.release().unwrap();
    let mut renewing = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let other = RENDERER.try_acquire(&pool).unwrap().expect_acquired();

    assert_eq!(testing::expire(conn, &GEOCODER).unwrap(), 1);
    assert_eq!(testing::expire(conn, &GEOCODER).unwrap(), 0);
    assert_matches!(renewing.renew(), Err(Error::TimedOut { .. }));
    let next = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    assert!(next.fencing_token() > renewing.fencing_token());
    assert_matches!(renewing.release(), Err(Error::TimedOut { .. }));
    next.release().unwrap();
    other.release().unwrap();

    let completed = service_request::table
        .filter(service_request::completed_at.is_not_null())
        .count();
    assert_eq!(completed.get_result(conn), Ok(3_i64));
}

#[test]
fn a_key_is_used_up_and_no_other() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    let api = RateLimit::named("api", Quota::per_day(24).burst(5));
    for spent_before in [0, 2, 5] {
        let limit = api.key(spent_before);
        if spent_before > 0 {
            assert!(
                limit
                    .cost(spent_before)
                    .check_on(conn)
                    .unwrap()
                    .is_allowed()
            );
        }
        // The cost of the handle does not count.
        testing::use_up(conn, &limit.cost(3)).unwrap();
        testing::use_up(conn, &limit).unwrap();
        assert_eq!(limit.peek_on(conn).unwrap().remaining, 0);
        assert!(limit.check_on(conn).unwrap().is_limited());
    }
    assert_eq!(api.peek_on(conn).unwrap().remaining, 5);
    let empty = testing::use_up(conn, &api.key(""));
    assert_matches!(empty, Err(Error::Input(Input::EmptyKey)));
}

#[test]
fn a_key_that_another_transaction_has_locked_is_not_used_up() {
    let database = database_with::<Resource>();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    let api = RateLimit::named("api", Quota::per_day(24).burst(5));
    assert!(api.check_on(conn).unwrap().is_allowed());
    other
        .batch_execute("BEGIN; SELECT FROM resource_control.rate_limit FOR UPDATE")
        .unwrap();
    let error = testing::use_up(conn, &api).unwrap_err();
    // The same error is that of a reset, so its message tells of neither.
    assert!(!error.to_string().contains("reset"), "{error}");
    assert_matches!(error, Error::Contended { name } if name == "api");
    other.batch_execute("ROLLBACK").unwrap();
    assert_eq!(api.peek_on(conn).unwrap().remaining, 4);
}

#[test]
fn a_throttle_is_made_due_and_keeps_its_last_locker() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    for resource in [Resource::CacheRebuild, Resource::TenantImport] {
        let throttle = Throttle::of(resource);
        testing::make_due(conn, &throttle).unwrap(); // never taken
        assert!(is_granted(conn, &throttle, "one"));
        assert!(!is_granted(conn, &throttle, "two"));

        testing::make_due(conn, &throttle).unwrap();
        testing::make_due(conn, &throttle).unwrap(); // due already
        let last = monitor::last_lockers()
            .filter(throttled_resource::resource_id.eq(resource))
            .first(conn)
            .unwrap();
        assert_eq!(last.last_locker_details, "one");
        assert!(is_granted(conn, &throttle, "two"));
        assert!(!is_granted(conn, &throttle, "one"));
    }
}

#[test]
fn a_key_is_made_due_and_no_other() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    let throttle = Throttle::of(Resource::TenantImport);
    let (one, two) = (throttle.key(1), throttle.key(2));
    testing::make_due(conn, &one).unwrap(); // never taken
    for throttle in [&one, &two, &throttle] {
        let decision = attempt(conn, throttle, "this test");
        assert!(decision.granted().is_some());
    }
    testing::make_due(conn, &one).unwrap();
    assert!(!is_granted(conn, &two, "a test"));
    assert!(!is_granted(conn, &throttle, "a test"));
    assert!(is_granted(conn, &one, "a test"));
}

#[test]
fn a_throttle_that_was_closed_by_hand_is_opened() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    let throttle = Throttle::of(Resource::CacheRebuild);
    diesel::update(throttled_resource::table)
        .set((
            throttled_resource::last_locked.eq(monitor::Timestamp::Infinity),
            throttled_resource::last_locker_details.eq("closed"),
        ))
        .execute(conn)
        .unwrap();
    assert!(!is_granted(conn, &throttle, "one"));
    testing::make_due(conn, &throttle).unwrap();
    assert!(is_granted(conn, &throttle, "one"));
}

#[test]
fn a_resource_that_is_unknown_is_an_error_which_aborts_no_test_transaction() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    conn.begin_test_transaction().unwrap();
    let unknown = Throttle::of(ResourceLabel("unknown".to_owned()));
    for throttle in [unknown.clone(), unknown.key(7)] {
        let due = testing::make_due(conn, &throttle);
        assert_matches!(
            due,
            Err(Error::Schema(Schema::UnknownResource { label }))
                if label == "unknown"
        );
    }
    let empty = testing::make_due(conn, &Throttle::of(Resource::CacheRebuild).key(""));
    assert_matches!(empty, Err(Error::Input(Input::EmptyKey)));
    conn.batch_execute("SELECT 1").unwrap();
}

#[test]
fn throttles_and_requests_are_moved_inside_a_test_transaction() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    conn.begin_test_transaction().unwrap();
    let throttle = Throttle::of(Resource::CacheRebuild);
    for _ in 0..2 {
        let decision = attempt(conn, &throttle, "a test");
        assert!(decision.granted().is_some());
        testing::make_due(conn, &throttle).unwrap();

        let _claim = GEOCODER.claim_on(conn).unwrap().expect_acquired();
        assert!(GEOCODER.claim_on(conn).unwrap().is_full());
        assert_eq!(testing::expire(conn, &GEOCODER).unwrap(), 1);
    }
    let tenant = attempt(conn, &throttle.key(7), "a test");
    assert!(tenant.granted().is_some());
    assert_eq!(testing::held_locks(conn).unwrap(), []);
    testing::assert_nothing_held(conn);
}

#[test]
fn a_prefix_reaches_semaphores_and_what_looks_at_them() {
    let database = database_with::<Resource>();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let plain = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    {
        let _prefix = testing::key_prefix("one");
        testing::assert_none_in_flight(conn, &GEOCODER);
        let one = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        let slots = monitor::slots(conn, "geocoder", 1).unwrap();
        assert_eq!(slots.in_flight, 1);
        assert_eq!(testing::expire(conn, &GEOCODER).unwrap(), 1);
        assert_matches!(one.release(), Err(Error::TimedOut { .. }));
    }
    plain.release().unwrap();
}

#[test]
fn a_prefix_reaches_the_keys_of_throttles() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    let throttle = Throttle::of(Resource::TenantImport);
    let tenant = throttle.key(7);
    let _prefix = testing::key_prefix("one");
    for throttle in [&throttle, &tenant] {
        let decision = attempt(conn, throttle, "one");
        assert!(decision.granted().is_some());
    }
    let _prefix = testing::key_prefix("two");
    let of_the_database = attempt(conn, &throttle, "two");
    assert_eq!(
        of_the_database.denied().unwrap().reason,
        DenialReason::TooSoon
    );
    assert!(is_granted(conn, &tenant, "two"));
    testing::make_due(conn, &tenant).unwrap();
    assert!(is_granted(conn, &tenant, "two"));
    drop(_prefix);
    assert!(!is_granted(conn, &tenant, "one"));
    let long = throttle.key("k".repeat(999));
    let refused = long.details("one").attempt_on(conn);
    assert_matches!(refused, Err(Error::Input(Input::TooLong { .. })));
}

/// How many units of the limit are left, without and with the prefix.
fn left(conn: &mut PgConnection, limit: &RateLimit, prefix: &KeyPrefix) -> [u32; 2] {
    let mut remaining = || limit.peek_on(conn).unwrap().remaining;
    let plain = remaining();
    let _prefix = prefix.enter();
    [plain, remaining()]
}

#[test]
fn units_go_back_to_the_name_that_they_were_taken_from() {
    let database = database_with::<Resource>();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let limit = RateLimit::named("api", Quota::per_day(24).burst(9));
    // A key for each, because units are given back less the time that has passed.
    let [one, two, three, four] = &[1, 2, 3, 4].map(|key| limit.key(key));
    let prefix = &KeyPrefix::new("one");
    for key in [one, two, three] {
        assert!(key.cost(5).check(&pool).unwrap().is_allowed());
    }
    let plain = allowed(four.cost(9).check(&pool).unwrap());
    let (checked, reserved, both) = {
        let _prefix = prefix.enter();
        let reserve = two.cost(9).reserve_on(conn, Duration::ZERO).unwrap();
        let both = RateLimit::check_all_on(conn, &[&three.cost(9), &four.cost(9)]).unwrap();
        (
            allowed(one.cost(9).check_on(conn).unwrap()),
            reserve.reserved().unwrap(),
            both.allowed().unwrap(),
        )
    };
    assert_eq!(give_back(&pool, &checked.clone(), 2).unwrap(), 2);
    assert_eq!(left(conn, one, prefix), [4, 2]);
    assert_eq!(cancel_on(conn, reserved).unwrap(), 9);
    assert_eq!(left(conn, two, prefix), [4, 9]);
    assert_eq!(give_back_on(conn, &both[0], 3).unwrap(), 3);
    assert_eq!(left(conn, three, prefix), [4, 3]);
    {
        let _prefix = prefix.enter();
        assert_eq!(give_back_on(conn, &plain, 4).unwrap(), 4);
    }
    assert_eq!(left(conn, four, prefix), [4, 0]);
}

#[test]
fn a_chunk_goes_back_to_the_name_that_it_was_taken_from() {
    let database = database_with::<Resource>();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let limit = RateLimit::named("api", Quota::per_day(24).burst(20));
    let prefix = &KeyPrefix::new("one");
    let local = limit.local(&pool, 10).unwrap();
    let [one, two] = &[1, 2].map(|key| limit.key(key));
    for key in [one, two] {
        assert!(key.cost(15).check(&pool).unwrap().is_allowed());
    }
    let spent = {
        let _prefix = prefix.enter();
        assert!(local.check("1", 5).unwrap().is_allowed());
        assert!(local.check("2", 1).unwrap().is_allowed());
        allowed(local.check("1", 5).unwrap())
    };
    assert_eq!(give_back_on(conn, &spent, 5).unwrap(), 5);
    assert_eq!(left(conn, one, prefix), [5, 15]);
    drop(local);
    assert_after_drop("what was left is given back", || {
        left(conn, two, prefix) == [5, 19]
    });
}

#[test]
fn a_prefix_is_shown_and_makes_no_name_of_nothing() {
    let prefix = testing::key_prefix("this test");
    assert_eq!(
        format!("{prefix:?}"),
        r#"EnteredPrefix(Some(KeyPrefix("this test")))"#
    );
    // Nothing has no name, with a prefix neither.
    assert_eq!(testing::prefixed(""), "");
}
