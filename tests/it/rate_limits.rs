//! Rate limits: what they allow, what they limit, and what they tell.

mod by_hand;
mod contention;
mod give_back;
mod headers;
mod input;
mod local;
pub(crate) mod overrides;
mod promise;
mod settings;
mod transactions;

use std::time::Duration;

use crate::half::prelude::*;
use crate::half::{
    Check, CheckAll, Database, Limited, LimitedReason, Quota, RateLimit, Reservation, Reserve,
    RoundTrips, Spent, give_back, migrations, silent_pool,
};
use diesel::connection::SimpleConnection;

use crate::support::{number, setting, truth};

/// Nothing of it comes back while a test runs.
pub(crate) const SLOW: Quota = Quota::per_day(24).burst(5);
pub(crate) const API: RateLimit = RateLimit::named("api", SLOW);
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// A database with the schema.
pub(crate) fn database() -> Database {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    database
}

#[track_caller]
pub(crate) fn allowed(check: Check) -> Spent {
    match check {
        Check::Allowed(spent) => spent,
        Check::Limited(limited) => panic!("{limited:?}"),
    }
}

#[track_caller]
pub(crate) fn limited(check: Check) -> Limited {
    match check {
        Check::Allowed(spent) => panic!("{spent:?}"),
        Check::Limited(limited) => limited,
    }
}

#[track_caller]
pub(crate) fn reserved(reserve: Reserve) -> Reservation {
    match reserve {
        Reserve::Reserved(reservation) => reservation,
        Reserve::Limited(limited) => panic!("{limited:?}"),
    }
}

/// Moves the time: everything was so long ago.
pub(crate) fn age(conn: &mut PgConnection, interval: &str) {
    conn.batch_execute(&format!(
        "UPDATE resource_control.rate_limit SET created_at = created_at - interval '{interval}', \
         changed_at = changed_at - interval '{interval}', full_at = full_at - interval '{interval}', \
         reserved_until = reserved_until - interval '{interval}'"
    ))
    .unwrap();
}

/// The difference is less than a minute, which a slow machine may need.
#[track_caller]
pub(crate) fn assert_about(time: Duration, expected: Duration) {
    assert!(
        time <= expected && expected - time < Duration::from_secs(60),
        "{time:?}, not {expected:?}"
    );
}

#[test]
fn the_burst_is_allowed_at_once_and_then_a_unit_per_interval() {
    let database = database();
    let conn = &mut database.connect();
    for left in (0..5).rev() {
        let spent = allowed(API.check_on(conn).unwrap());
        assert_eq!((spent.units, spent.remaining), (1, left));
        assert_about(spent.full_in, (5 - left) * HOUR);
        assert_eq!(spent.quota, SLOW);
    }
    let denied = limited(API.check_on(conn).unwrap());
    assert_eq!(denied.reason, LimitedReason::Spent);
    assert_eq!(denied.remaining, 0);
    assert_about(denied.retry_after.unwrap(), HOUR);
    assert_about(denied.full_in, 5 * HOUR);
    assert_eq!(
        u128::from(denied.retry_after_secs().unwrap()),
        denied
            .retry_after
            .unwrap()
            .as_nanos()
            .div_ceil(1_000_000_000)
    );

    age(conn, "59 minutes");
    let denied = limited(API.check_on(conn).unwrap());
    assert_about(denied.retry_after.unwrap(), Duration::from_secs(60));
    age(conn, "1 minute");
    assert_eq!(allowed(API.check_on(conn).unwrap()).remaining, 0);
    limited(API.check_on(conn).unwrap());
    age(conn, "2 hours");
    assert_eq!(allowed(API.check_on(conn).unwrap()).remaining, 1);
    age(conn, "100 days");
    assert_eq!(allowed(API.check_on(conn).unwrap()).remaining, 4);
}

#[test]
fn each_key_has_the_whole_quota_and_no_key_is_another_one() {
    let database = database();
    let pool = database.pool(1);
    let all = API.cost(5);
    for limit in [all.clone(), all.key(7), all.key("⚿ \\ '"), all.key(8)] {
        assert_eq!(allowed(limit.check(&pool).unwrap()).remaining, 0);
        limited(limit.check(&pool).unwrap());
        limited(limit.cost(1).check(&pool).unwrap());
    }
    let other = RateLimit::new(String::from("api 2"), SLOW);
    assert_eq!(allowed(other.check(&pool).unwrap()).remaining, 4);
    assert_eq!(allowed(other.key(7).check(&pool).unwrap()).remaining, 4);
}

#[test]
fn a_call_that_is_limited_spends_nothing() {
    let database = database();
    let pool = database.pool(1);
    assert_eq!(allowed(API.cost(3).check(&pool).unwrap()).remaining, 2);
    for _ in 0..3 {
        let denied = limited(API.cost(4).check(&pool).unwrap());
        assert_eq!(denied.remaining, 2);
        assert_about(denied.retry_after.unwrap(), 2 * HOUR);
    }
    assert_eq!(allowed(API.cost(2).check(&pool).unwrap()).remaining, 0);
}

#[test]
fn what_is_left_after_a_burst_is_whole_although_the_interval_is_not() {
    let database = database();
    let conn = &mut database.connect();
    let sevenths = RateLimit::named("sevenths", Quota::per(7, 10 * HOUR));
    for left in (0..7).rev() {
        assert_eq!(allowed(sevenths.check_on(conn).unwrap()).remaining, left);
    }
    let odd = RateLimit::named("odd", Quota::per(7, 10 * HOUR).burst(20));
    assert_eq!(allowed(odd.cost(20).check_on(conn).unwrap()).remaining, 0);
    assert_eq!(
        limited(odd.check_on(conn).unwrap())
            .retry_after
            .map(|it| it.as_secs() / 60),
        Some(85)
    );
}

#[test]
fn a_billion_per_second_is_a_quota() {
    let database = database();
    let conn = &mut database.connect();
    let fast = RateLimit::named("fast", Quota::per_second(1_500_000_000).burst(u32::MAX));
    let spent = allowed(fast.cost(u32::MAX).check_on(conn).unwrap());
    assert_eq!(spent.remaining, 0);
    assert_eq!(spent.full_in, Duration::from_micros(2_863_312));
    let slow = RateLimit::named("slow", Quota::per(1, 366 * 24 * HOUR).burst(100));
    assert_eq!(allowed(slow.cost(99).check_on(conn).unwrap()).remaining, 1);
    assert_eq!(allowed(slow.check_on(conn).unwrap()).remaining, 0);
    let denied = limited(slow.check_on(conn).unwrap());
    assert_about(denied.retry_after.unwrap(), 366 * 24 * HOUR);
    assert_about(denied.full_in, 100 * 366 * 24 * HOUR);
}

#[test]
fn a_peek_reads_and_a_reset_makes_the_key_full() {
    let database = database();
    let pool = database.pool(1);
    let (seven, eight) = (API.key(7), API.key(8));
    assert_eq!(seven.peek(&pool).unwrap().remaining, 5);
    assert!(!seven.reset(&pool).unwrap());
    for limit in [&seven, &eight, &API] {
        let _ = allowed(limit.cost(2).check(&pool).unwrap());
    }
    for _ in 0..2 {
        let state = seven.peek(&pool).unwrap();
        assert_eq!((state.remaining, state.quota), (3, SLOW));
        assert_about(state.full_in, 2 * HOUR);
    }
    assert!(seven.reset(&pool).unwrap());
    assert_eq!(seven.peek(&pool).unwrap().remaining, 5);
    assert_eq!(eight.peek(&pool).unwrap().remaining, 3);
    assert_eq!(API.peek(&pool).unwrap().remaining, 3);
    assert_eq!(API.reset_all(&pool).unwrap(), 2);

    // A key that is full again, but still has a row.
    let _ = allowed(seven.check(&pool).unwrap());
    age(&mut database.connect(), "1 day");
    assert!(!seven.reset(&pool).unwrap());
    assert_eq!(eight.peek(&pool).unwrap().remaining, 5);
    assert_eq!(API.peek_on(&mut pool.get().unwrap()).unwrap().remaining, 5);
}

#[test]
fn a_limited_call_assigns_no_transaction_id_and_locks_nothing() {
    let database = database();
    let conn = &mut database.connect();
    let _ = allowed(API.cost(5).check_on(conn).unwrap());
    conn.begin_test_transaction().unwrap();
    limited(API.check_on(conn).unwrap());
    assert!(truth(conn, "pg_current_xact_id_if_assigned() IS NULL"));
    assert_eq!(
        number(
            conn,
            "(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode LIKE 'Row%')"
        ),
        0
    );
    assert_eq!(setting(conn, "synchronous_commit"), "on");
    let _ = allowed(API.key(7).check_on(conn).unwrap());
    assert_eq!(setting(conn, "synchronous_commit"), "off");
}

#[test]
fn a_durable_limit_waits_for_the_disk_and_keeps_the_state() {
    let database = database();
    let conn = &mut database.connect();
    let _ = allowed(API.cost(4).check_on(conn).unwrap());
    let durable = API.durable();
    conn.begin_test_transaction().unwrap();
    assert_eq!(allowed(durable.check_on(conn).unwrap()).remaining, 0);
    assert_eq!(setting(conn, "synchronous_commit"), "on");
}

#[test]
fn a_limited_check_of_several_limits_that_rewrites_a_row_does_not_wait_for_the_disk() {
    let database = database();
    let conn = &mut database.connect();
    let _ = allowed(API.cost(5).check_on(conn).unwrap());
    overrides::set(conn, "api", None, "20, '1 day', 5");
    for (limit, expected) in [(API.durable(), "on"), (API, "off")] {
        let conn = &mut database.connect();
        conn.begin_test_transaction().unwrap();
        let check = RateLimit::check_all_on(conn, &[&limit]).unwrap();
        assert!(check.is_limited());
        assert!(truth(conn, "pg_current_xact_id_if_assigned() IS NOT NULL"));
        assert_eq!(setting(conn, "synchronous_commit"), expected);
        // Not left to the end of the session, for whose row the next check waits only a moment.
        conn.batch_execute("ROLLBACK").unwrap();
    }
}

#[test]
fn reservations_are_served_in_their_order() {
    let database = database();
    let pool = database.pool(2);
    let limit = RateLimit::named("mails", Quota::per(1, HOUR).burst(2));
    let _ = allowed(limit.cost(2).check(&pool).unwrap());
    for hours in 1..=3 {
        let reservation = reserved(limit.reserve(&pool, 3 * HOUR).unwrap());
        assert_about(reservation.wait, hours * HOUR);
        let usable = reservation.usable_at() - reservation.spent.at;
        assert_eq!(usable.to_std().unwrap(), reservation.wait);
        assert_eq!(reservation.spent.remaining, 0);
    }
    let refused = limit.reserve(&pool, 3 * HOUR).unwrap().limited().unwrap();
    assert_about(refused.retry_after.unwrap(), 4 * HOUR);
    // A plain check is limited while reservations are ahead of it.
    let denied = limited(limit.check(&pool).unwrap());
    assert_about(denied.retry_after.unwrap(), 4 * HOUR);
    assert_eq!(denied.remaining, 0);
}

#[test]
fn twenty_callers_at_once_are_served_at_the_rate_and_the_others_refused() {
    let database = database();
    let pool = database.pool(4);
    let limit = RateLimit::named("mails", Quota::per_second(10).burst(2));
    let timeout = Duration::from_secs(1);
    let start = std::time::Instant::now();
    let usable = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..20)
            .map(|_| scope.spawn(|| limit.acquire_timeout(&pool, timeout).unwrap()))
            .collect();
        let outcomes = threads.into_iter().map(|thread| thread.join().unwrap());
        outcomes.filter_map(Check::allowed).count()
    });
    // A busy machine may take more than a moment for twenty calls.
    let promised = 2 + start.elapsed().as_millis() as usize / 100;
    assert!((5..=promised).contains(&usable), "{usable} of {promised}");
    // They hold no connection while they wait.
    crate::support::assert_pool_whole(&pool, &database);
}

#[test]
fn a_wait_that_would_be_too_long_is_refused_at_once_and_spends_nothing() {
    let database = database();
    let pool = database.pool(1);
    let _ = allowed(API.cost(5).check(&pool).unwrap());
    for timeout in [Duration::from_secs(1), Duration::from_secs(30)] {
        let denied = limited(API.acquire_timeout(&pool, timeout).unwrap());
        assert_about(denied.retry_after.unwrap(), HOUR);
    }
    assert_about(API.peek(&pool).unwrap().full_in, 5 * HOUR);
    let spent = allowed(API.key(1).acquire_timeout(&pool, Duration::MAX).unwrap());
    assert_eq!(spent.remaining, 4);
}

#[test]
fn full_keys_are_pruned_and_the_others_stay() {
    let database = database();
    let pool = database.pool(1);
    let conn = &mut database.connect();
    for key in 0..2500 {
        let limit = if key % 5 == 0 { &API } else { &API.key(key) };
        let cost = if key % 3 == 0 { 5 } else { 1 };
        if key % 5 != 0 {
            let _ = allowed(limit.cost(cost).check_on(conn).unwrap());
        }
    }
    let rows = number(conn, "(SELECT count(*) FROM resource_control.rate_limit)");
    assert_eq!(rows, 2000);
    assert_eq!(RateLimit::prune(&pool).unwrap(), 0);
    age(conn, "3 hours");
    let kept = number(
        conn,
        "(SELECT count(*) FROM resource_control.rate_limit WHERE full_at > clock_timestamp())",
    );
    assert_eq!(RateLimit::prune(&pool).unwrap(), 2000 - kept as u64);
    assert_eq!(API.key(3).peek(&pool).unwrap().remaining, 3);
    age(conn, "3 hours");
    assert_eq!(RateLimit::prune_on(conn).unwrap(), kept as u64);
    assert_eq!(RateLimit::prune_on(conn).unwrap(), 0);
    assert_eq!(
        number(conn, "(SELECT count(*) FROM resource_control.rate_limit)"),
        0
    );
}

#[test]
fn a_hot_key_gets_a_new_generation_and_stays_one_key() {
    let database = database();
    let conn = &mut database.connect();
    let hot = RateLimit::named("hot", Quota::per_day(1_000_000));
    for expected in (999_000..1_000_000).rev() {
        let remaining = allowed(hot.check_on(conn).unwrap()).remaining;
        // A twelfth of a second refills one.
        assert!(
            remaining >= expected && remaining < expected + 1000,
            "{remaining}"
        );
    }
    let generations = "(SELECT string_agg(generation::text, ' ' ORDER BY generation) FROM resource_control.rate_limit)";
    assert!(truth(conn, &format!("{generations} = '1 5'")));
    assert!(hot.peek_on(conn).unwrap().remaining < 1_000_000);
    age(conn, "1 day");
    assert_eq!(RateLimit::prune_on(conn).unwrap(), 1);
    assert!(truth(conn, &format!("{generations} IS NULL")));
    for _ in 0..300 {
        let _ = allowed(hot.check_on(conn).unwrap());
    }
    assert!(truth(conn, &format!("{generations} = '1 2'")));
    assert!(hot.reset_on(conn).unwrap());
    assert!(truth(conn, &format!("{generations} IS NULL")));
}

#[test]
fn all_or_none_of_several_limits() {
    let database = database();
    let pool = database.pool(1);
    let conn = &mut database.connect();
    let global = RateLimit::named("global", Quota::per_day(24).burst(8));
    let tenant = |tenant: i32| API.key(tenant);
    let both = |tenant: &RateLimit| RateLimit::check_all(&pool, &[tenant, &global]).unwrap();
    let spent = both(&tenant(1).cost(3)).allowed().unwrap();
    assert_eq!(spent.len(), 2);
    assert_eq!((spent[0].units, spent[0].remaining), (3, 2));
    assert_eq!((spent[1].units, spent[1].remaining), (1, 7));

    // The tenant's limit is spent, so nothing of the other is.
    match both(&tenant(1).cost(5)) {
        CheckAll::Limited { by: 0, limited } => {
            assert_about(limited.retry_after.unwrap(), 3 * HOUR);
            assert_eq!((limited.remaining, limited.quota), (2, SLOW));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(global.peek(&pool).unwrap().remaining, 7);

    // The longest wait counts.
    let _ = allowed(global.cost(7).check(&pool).unwrap());
    match RateLimit::check_all_on(conn, &[&tenant(1).cost(3), &global.cost(5)]).unwrap() {
        CheckAll::Limited { by: 1, limited } => {
            assert_about(limited.retry_after.unwrap(), 5 * HOUR);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(tenant(1).peek(&pool).unwrap().remaining, 2);

    // The same key twice is summed.
    let twice = [&tenant(2).cost(2), &tenant(2).cost(3)];
    let spent = RateLimit::check_all(&pool, &twice)
        .unwrap()
        .allowed()
        .unwrap();
    assert_eq!((spent[0].units, spent[1].units), (2, 3));
    assert_eq!((spent[0].remaining, spent[1].remaining), (0, 0));
    let spent = RateLimit::check_all(&pool, &[]).unwrap().allowed().unwrap();
    assert!(spent.is_empty());
}

#[test]
fn each_operation_is_one_round_trip() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let limit = RateLimit::named("trips", SLOW);
    let operations = || {
        let mut spent = None;
        [
            proxy.count(|| spent = limit.check(&pool).unwrap().allowed()),
            proxy.count(|| assert!(limit.reserve(&pool, HOUR).unwrap().reserved().is_some())),
            proxy.count(|| assert!(limit.acquire_timeout(&pool, HOUR).unwrap().is_allowed())),
            proxy.count(|| {
                let both = RateLimit::check_all(&pool, &[&limit, &limit.key(1)]);
                assert!(both.unwrap().is_allowed());
            }),
            proxy.count(|| assert!(limit.cost(4).check(&pool).unwrap().is_limited())),
            proxy.count(|| assert_eq!(limit.peek(&pool).unwrap().remaining, 1)),
            proxy.count(|| assert_eq!(give_back(&pool, &spent.take().unwrap(), 1).unwrap(), 1)),
            proxy.count(|| assert_eq!(limit.reset_all(&pool).unwrap(), 2)),
            proxy.count(|| assert_eq!(RateLimit::prune(&pool).unwrap(), 0)),
        ]
    };
    // diesel-async prepares more statements than Diesel, and not all of them at first.
    for _ in 0..12 {
        operations();
    }
    let parses = proxy.parses();
    assert_eq!(operations(), [1; 9]);
    assert_eq!(proxy.parses(), parses, "all of it was prepared before");
}
