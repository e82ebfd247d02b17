//! Units that a process takes several at a time.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::half::error::Input;
use crate::half::{
    Database, Error, LimitedReason, LocalRateLimit, Quota, RateLimit, RoundTrips, migrations,
    silent_pool,
};

use super::{API, HOUR, allowed, assert_about, database, limited};

const WIDE: RateLimit = RateLimit::named("wide", Quota::per_day(24).burst(100));

#[test]
fn a_chunk_is_handed_out_without_a_round_trip_and_given_back_on_drop() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let local = WIDE.local(&pool, 10).unwrap();
    let check = |cost: u32| allowed(local.check("7", cost).unwrap());
    assert_eq!(proxy.count(|| assert_eq!(check(1).remaining, 99)), 2); // it is prepared as well
    assert_eq!(
        proxy.count(|| assert_eq!((check(4).units, check(3).remaining), (4, 92))),
        0
    );
    // Two are left, so two more are needed, and ten are taken.
    assert_eq!(proxy.count(|| assert_eq!(check(4).remaining, 88)), 1);
    assert_eq!(WIDE.key(7).peek(&pool).unwrap().remaining, 80);
    assert_eq!(WIDE.peek(&pool).unwrap().remaining, 100);
    assert_eq!(allowed(local.check("", 1).unwrap()).remaining, 99);
    drop(local);
    assert_eq!(WIDE.key(7).peek(&pool).unwrap().remaining, 88);
    assert_eq!(WIDE.peek(&pool).unwrap().remaining, 99);
}

#[test]
fn fewer_are_taken_where_fewer_are_left() {
    let database = database();
    let pool = database.pool(1);
    let local = API.local(&pool, 50).unwrap();
    let _ = allowed(API.key(7).cost(2).check(&pool).unwrap());
    for left in (0..3).rev() {
        assert_eq!(allowed(local.check("7", 1).unwrap()).remaining, left);
        assert_eq!(API.key(7).peek(&pool).unwrap().remaining, 0);
    }
    assert_about(
        limited(local.check("7", 1).unwrap()).retry_after.unwrap(),
        HOUR,
    );
    match local.check("8", 6) {
        Err(Error::Input(Input::CostAboveBurst { .. })) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(allowed(local.check("8", 5).unwrap()).remaining, 0);
}

#[test]
fn a_limited_call_is_remembered_for_each_cost_and_for_a_second_at_most() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let local = API.local(&pool, 1).unwrap();
    let _ = allowed(API.key(7).cost(3).check(&pool).unwrap());
    let denied = limited(local.check("7", 5).unwrap());
    assert_about(denied.retry_after.unwrap(), 3 * HOUR);
    let since = Instant::now();
    let trips = proxy.count(|| {
        let denied = limited(local.check("7", 5).unwrap());
        assert_eq!((denied.reason, denied.remaining), (LimitedReason::Spent, 2));
        assert_about(denied.retry_after.unwrap(), 3 * HOUR);
        let denied = limited(local.check("7", 4).unwrap());
        assert_about(denied.retry_after.unwrap(), 2 * HOUR);
    });
    assert!(trips == 0 || since.elapsed() > Duration::from_millis(900));
    // A cost for which enough is left is not limited.
    assert_eq!(allowed(local.check("7", 2).unwrap()).remaining, 0);
    let _ = limited(local.check("7", 1).unwrap());
    API.key(7).reset(&pool).unwrap();
    std::thread::sleep(Duration::from_millis(1001));
    assert_eq!(allowed(local.check("7", 1).unwrap()).remaining, 4);
}

#[test]
fn what_was_taken_is_void_when_it_has_come_back_by_itself() {
    let database = database();
    let pool = database.pool(1);
    let quota = Quota::per_second(100).burst(20);
    let limit = RateLimit::named("void", quota);
    let local = limit.local(&pool, 10).unwrap();
    let _ = allowed(local.check("7", 1).unwrap());
    std::thread::sleep(Duration::from_millis(120));
    let before = limit.key(7).peek(&pool).unwrap();
    assert_eq!(before.full_in, Duration::ZERO);
    let _ = allowed(local.check("7", 1).unwrap());
    assert!(limit.key(7).peek(&pool).unwrap().full_in > Duration::ZERO);
}

#[test]
fn a_bad_chunk_a_bad_cost_and_a_bad_key_are_errors() {
    let database = Database::new();
    let pool = database.pool(1);
    assert!(matches!(
        API.local(&pool, 0),
        Err(Error::Input(Input::BadUnits { .. }))
    ));
    let bad = RateLimit::named("api", Quota::per_second(0));
    assert!(matches!(
        bad.local(&pool, 1),
        Err(Error::Input(Input::BadQuota { .. }))
    ));
    let local = API.local(&pool, 1).unwrap();
    assert!(matches!(
        local.check("7", 0),
        Err(Error::Input(Input::BadUnits { .. }))
    ));
    assert!(matches!(
        local.check("\0", 1),
        Err(Error::Input(Input::NulCharacter))
    ));
    // An error is not remembered.
    assert!(matches!(local.check("7", 1), Err(Error::Schema(_))));
    migrations::install(&mut database.connect()).unwrap();
    let _ = allowed(local.check("7", 1).unwrap());
}

#[test]
fn ten_processes_that_hoard_keep_the_promise_with_a_chunk() {
    let database = database();
    let quota = Quota::per_second(200).burst(40);
    let limit = RateLimit::named("hoard", quota);
    let pools: Vec<_> = (0..10).map(|_| database.pool(1)).collect();
    let locals: Vec<LocalRateLimit> = pools
        .iter()
        .map(|pool| limit.local(pool, 10).unwrap())
        .collect();
    let used = Mutex::new(Vec::new());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (process, local) in locals.iter().enumerate() {
            let used = &used;
            scope.spawn(move || {
                while start.elapsed() < Duration::from_millis(1500) {
                    // Takes a chunk, holds it, and then spends all of it at one moment.
                    std::thread::sleep(Duration::from_millis(20 + process as u64));
                    let mut mine = Vec::new();
                    for _ in 0..10 {
                        let before = start.elapsed();
                        if local.check("7", 1).unwrap().is_allowed() {
                            mine.push((before, start.elapsed()));
                        }
                    }
                    used.lock().unwrap().extend(mine);
                }
            });
        }
    });
    let mut used = used.into_inner().unwrap();
    used.sort();
    // From before the first to after the last call of each span.
    for (place, (first, _)) in used.iter().enumerate() {
        for (count, (_, last)) in used[place..].iter().enumerate() {
            let span = last.saturating_sub(*first).as_secs_f64();
            let promised = 40.0 + 10.0 + span * 200.0;
            assert!((count + 1) as f64 <= promised, "{} in {span} s", count + 1);
        }
    }
    assert!(used.len() > 100, "{}", used.len());
}
