//! Units that are given back.

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use crate::half::error::Input;
use crate::half::prelude::*;
use crate::half::{
    Error, Quota, RateLimit, Spent, cancel, cancel_on, give_back, give_back_on, instrumented_pool,
};
use diesel::connection::{InstrumentationEvent, SimpleConnection};

use super::{API, HOUR, age, allowed, assert_about, database, limited, reserved};

#[test]
fn units_are_given_back_less_the_time_that_has_passed() {
    let database = database();
    let pool = database.pool(1);
    let conn = &mut database.connect();
    let spent = allowed(API.cost(5).check(&pool).unwrap());
    assert_eq!(give_back(&pool, &spent, 3).unwrap(), 3);
    assert_eq!(allowed(API.cost(2).check(&pool).unwrap()).remaining, 1);

    // After an hour one unit has come back by itself.
    API.reset(&pool).unwrap();
    let mut spent = allowed(API.cost(5).check(&pool).unwrap());
    age(conn, "1 hour");
    spent.at -= HOUR;
    assert_eq!(give_back_on(conn, &spent, 2).unwrap(), 1);
    // Of two units one had come back already, so one was given back.
    assert_eq!(API.peek(&pool).unwrap().remaining, 2);
    age(conn, "1 hour");
    spent.at -= HOUR;
    assert_eq!(give_back_on(conn, &spent, 2).unwrap(), 0);
}

#[test]
fn what_was_refilled_or_reset_or_pruned_meanwhile_is_not_given_back() {
    let database = database();
    let pool = database.pool(1);
    let conn = &mut database.connect();
    // A key that has refilled owes nothing of it, also if others have spent since.
    let mut spent = allowed(API.cost(5).check(&pool).unwrap());
    age(conn, "5 hours");
    spent.at -= 5 * HOUR;
    let _ = allowed(API.cost(5).check(&pool).unwrap());
    assert_eq!(give_back(&pool, &spent, 5).unwrap(), 0);
    limited(API.check(&pool).unwrap());

    let spent = allowed(API.key(1).cost(5).check(&pool).unwrap());
    assert!(API.key(1).reset(&pool).unwrap());
    assert_eq!(give_back(&pool, &spent, 1).unwrap(), 0);
    let _ = allowed(API.key(1).cost(5).check(&pool).unwrap());
    assert_eq!(give_back(&pool, &spent, 4).unwrap(), 0);
    limited(API.key(1).check(&pool).unwrap());
}

#[test]
fn a_unit_is_given_back_once() {
    let database = database();
    let pool = database.pool(1);
    let spent = allowed(API.cost(3).check(&pool).unwrap());
    let clone = spent.clone();
    assert_eq!(give_back(&pool, &spent, 2).unwrap(), 2);
    for (spent, units) in [(&spent, 2), (&clone, 2), (&clone, 0), (&spent, u32::MAX)] {
        match give_back(&pool, spent, units) {
            Err(Error::Input(Input::BadUnits {
                units: told,
                most: 1,
                ..
            })) => {
                assert_eq!(told, units);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(give_back(&pool, &clone, 1).unwrap(), 1);
    let message = give_back(&pool, &clone, 1).unwrap_err().to_string();
    assert!(
        message.contains("all units of the call were given back before"),
        "{message}"
    );
    // The milliseconds between are missing.
    assert!(API.peek(&pool).unwrap().full_in < Duration::from_secs(60));
}

#[test]
fn a_reservation_is_cancelled_in_full_until_its_moment() {
    let database = database();
    let pool = database.pool(1);
    let conn = &mut database.connect();
    let _ = allowed(API.cost(5).check(&pool).unwrap());
    let reserve = || API.cost(2).reserve(&pool, 9 * HOUR).unwrap();
    let reservation = reserved(reserve());
    assert_eq!(cancel(&pool, reservation.clone()).unwrap(), 2);
    assert_eq!(cancel(&pool, reservation).unwrap(), 0);

    let mut reservation = reserved(reserve());
    // An hour before its moment it is worth two units, an hour after it one.
    age(conn, "1 hour");
    reservation.spent.at -= HOUR;
    assert_eq!(give_back(&pool, &reservation.spent, 1).unwrap(), 1);
    age(conn, "90 minutes");
    reservation.spent.at -= Duration::from_secs(90 * 60);
    assert_eq!(cancel(&pool, reservation).unwrap(), 1);
}

#[test]
fn a_cancellation_gives_back_what_a_clone_leaves_while_the_pool_has_no_connection() {
    /// The first query on a connection of the pool waits until one unit is given back.
    static MEANWHILE: Mutex<Option<(PgConnection, Spent)>> = Mutex::new(None);
    fn meanwhile(event: InstrumentationEvent<'_>) {
        if let InstrumentationEvent::StartQuery { .. } = event {
            if let Some((mut conn, clone)) = MEANWHILE.lock().unwrap().take() {
                let given = thread::spawn(move || give_back_on(&mut conn, &clone, 1));
                assert_eq!(given.join().unwrap().unwrap(), 1);
            }
        }
    }
    let database = database();
    let pool = instrumented_pool(&database, 1, meanwhile);
    let _ = allowed(API.cost(5).check(&pool).unwrap());
    let reservation = reserved(API.cost(3).reserve(&pool, 9 * HOUR).unwrap());
    let clone = reservation.clone();
    // That is the check of the connection for the cancellation.
    *MEANWHILE.lock().unwrap() = Some((database.connect(), clone.spent.clone()));
    assert_eq!(cancel(&pool, reservation).unwrap(), 2);
    // Nothing is left, so neither a connection nor a transaction matters.
    let only = pool.get().unwrap();
    assert_eq!(cancel(&pool, clone.clone()).unwrap(), 0);
    let cancelled = (database.connect()).transaction(|conn| cancel_on(conn, clone));
    assert_eq!(cancelled.unwrap(), 0);
    drop(only);
    assert_about(API.peek(&pool).unwrap().full_in, 5 * HOUR);
}

#[test]
fn give_backs_on_a_hot_key_reach_the_generation_that_counts() {
    let database = database();
    let conn = &mut database.connect();
    let hot = RateLimit::named("hot", Quota::per_day(1000));
    for _ in 0..450 {
        let spent = allowed(hot.check_on(conn).unwrap());
        assert_eq!(give_back_on(conn, &spent, 1).unwrap(), 1);
    }
    assert!(hot.peek_on(conn).unwrap().remaining >= 990);
}

#[test]
fn units_behind_which_others_have_reserved_are_not_allowed_twice_at_one_moment() {
    let database = database();
    let conn = &mut database.connect();
    let limit = RateLimit::named("queue", Quota::per_hour(1).burst(2));
    let reserve = |conn: &mut PgConnection, key: &str, units, hours| {
        let reserve = limit.key(key).cost(units).reserve_on(conn, 99 * HOUR);
        let reservation = reserved(reserve.unwrap());
        assert_about(reservation.wait, hours * HOUR);
        reservation
    };
    // Each of the calls takes the burst. Which one is given back, how many units of it, and how long the next call waits.
    for (which, units, hours) in [(0, 0, 6), (1, 0, 6), (2, 2, 4)] {
        let key = which.to_string();
        let mut calls: Vec<_> = (0..3)
            .map(|place| reserve(conn, &key, 2, 2 * place))
            .collect();
        let given = cancel_on(conn, calls.remove(which)).unwrap();
        assert_eq!(given, units, "{which}");
        let _ = reserve(conn, &key, 2, hours);
    }

    // The unit behind is an hour later, so one of two units comes back.
    let _ = reserve(conn, "part", 2, 0);
    let first = reserve(conn, "part", 2, 2);
    let _ = reserve(conn, "part", 1, 3);
    assert_eq!(cancel_on(conn, first).unwrap(), 1);
    let _ = reserve(conn, "part", 1, 3);

    // The row of a busy key is replaced, and the next one knows the moment as well.
    let first = reserve(conn, "busy", 2, 0);
    let _ = reserve(conn, "busy", 2, 2);
    for _ in 0..200 {
        let last = reserve(conn, "busy", 1, 3);
        assert_eq!(cancel_on(conn, last).unwrap(), 1);
    }
    assert_eq!(cancel_on(conn, first).unwrap(), 0);
}

#[test]
fn a_spend_that_a_failover_has_lost_is_not_given_back() {
    let database = database();
    let conn = &mut database.connect();
    let limit = RateLimit::named("failed over", Quota::per_hour(1).burst(3));
    let kept = allowed(limit.check_on(conn).unwrap());
    let before = "CREATE TABLE before AS SELECT * FROM resource_control.rate_limit";
    conn.batch_execute(before).unwrap();
    let lost = allowed(limit.check_on(conn).unwrap());
    conn.batch_execute(
        "UPDATE resource_control.rate_limit AS r \
         SET updates = b.updates, changed_at = b.changed_at, full_at = b.full_at FROM before AS b",
    )
    .unwrap();
    assert_eq!(give_back_on(conn, &lost, 1).unwrap(), 0);
    assert_eq!(limit.peek_on(conn).unwrap().remaining, 2);
    assert_eq!(give_back_on(conn, &kept, 1).unwrap(), 1);
}

#[test]
fn units_are_not_given_back_to_a_key_that_another_quota_has_refilled() {
    let database = database();
    let conn = &mut database.connect();
    let slow = RateLimit::named("deployed", Quota::per_hour(1).burst(10));
    let fast = RateLimit::named("deployed", Quota::per_minute(1).burst(10));
    let mut spent = allowed(slow.cost(10).check_on(conn).unwrap());
    let _ = limited(fast.check_on(conn).unwrap());
    age(conn, "10 minutes");
    spent.at -= Duration::from_secs(600);
    let again = allowed(slow.cost(10).check_on(conn).unwrap());
    assert_eq!(give_back_on(conn, &spent, 10).unwrap(), 0);
    assert_eq!(give_back_on(conn, &again, 1).unwrap(), 1);
}

#[test]
fn units_that_were_spent_before_the_clock_was_set_back_are_not_given_back_later() {
    let database = database();
    let conn = &mut database.connect();
    let hourly = RateLimit::named("hourly", Quota::per_hour(5));
    let mut spent = allowed(hourly.cost(5).check_on(conn).unwrap());
    age(conn, "-1 hour");
    spent.at += Duration::from_secs(3600);
    let _ = limited(hourly.check_on(conn).unwrap());
    age(conn, "1 hour 1 second");
    spent.at -= Duration::from_secs(3601);
    let again = allowed(hourly.cost(5).check_on(conn).unwrap());
    assert_eq!(give_back_on(conn, &spent, 5).unwrap(), 0);
    assert_eq!(give_back_on(conn, &again, 1).unwrap(), 1);
}

#[test]
fn a_give_back_after_the_clock_was_set_back_notes_that() {
    let database = database();
    let conn = &mut database.connect();
    let slow = RateLimit::named("slow", Quota::per_hour(6));
    let mut spent = [(); 2].map(|()| allowed(slow.check_on(conn).unwrap()));
    age(conn, "-1 hour");
    spent[0].at += Duration::from_secs(3600);
    assert_eq!(give_back_on(conn, &spent[0], 1).unwrap(), 1);
    // The key is refilled while the clock shows the old times again, so the other unit has come back, too.
    age(conn, "61 minutes");
    spent[1].at -= Duration::from_secs(60);
    let again = allowed(slow.check_on(conn).unwrap());
    assert_eq!(give_back_on(conn, &spent[1], 1).unwrap(), 0);
    assert_eq!(give_back_on(conn, &again, 1).unwrap(), 1);

    // And moves a reserved moment, by which another quota is limited.
    let [one, other] = [Quota::per_hour(1).burst(2), Quota::per(2, 2 * HOUR)]
        .map(|it| RateLimit::named("moved", it));
    let _ = allowed(one.cost(2).check_on(conn).unwrap());
    let mut reservation = reserved(one.reserve_on(conn, HOUR).unwrap());
    age(conn, "-10 hours");
    reservation.spent.at += Duration::from_secs(36_000);
    assert_eq!(cancel_on(conn, reservation).unwrap(), 1);
    assert_about(other.peek_on(conn).unwrap().full_in, 3 * HOUR);
}
