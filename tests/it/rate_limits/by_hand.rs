//! Rows that somebody deleted or changed by hand.

use crate::half::prelude::*;
use crate::half::{CheckAll, LimitedReason, Quota, RateLimit, give_back_on};
use diesel::connection::SimpleConnection;

use crate::support::{Observer, number, truth};

use super::{HOUR, allowed, database, limited, reserved};

/// Enough for a second generation.
const OFTEN: RateLimit = RateLimit::named("often", Quota::per_day(86_400).burst(1000));

const ROWS: &str = "SELECT count(*) FROM resource_control.rate_limit";

/// Leaves only rows that a later generation had replaced.
fn leave_replaced_rows(conn: &mut PgConnection, by_hand: &str) {
    let _ = OFTEN.reset_on(conn).unwrap();
    for _ in 0..201 {
        let _ = allowed(OFTEN.check_on(conn).unwrap());
    }
    assert_eq!(number(conn, ROWS), 2);
    conn.batch_execute(by_hand).unwrap();
}

#[test]
fn a_key_of_which_only_replaced_rows_are_left_is_full() {
    let database = database();
    let conn = &mut database.connect();
    // An operation that does not end fails here.
    conn.batch_execute("SET statement_timeout = '5s'").unwrap();
    for by_hand in [
        "DELETE FROM resource_control.rate_limit WHERE full_at > now()",
        "UPDATE resource_control.rate_limit SET full_at = '-infinity'",
    ] {
        leave_replaced_rows(conn, by_hand);
        assert_eq!(allowed(OFTEN.check_on(conn).unwrap()).remaining, 999);

        leave_replaced_rows(conn, by_hand);
        let other = RateLimit::named("often", Quota::per_day(43_200).burst(100));
        assert_eq!(allowed(other.check_on(conn).unwrap()).remaining, 99);

        leave_replaced_rows(conn, by_hand);
        assert_eq!(
            reserved(OFTEN.reserve_on(conn, HOUR).unwrap())
                .wait
                .as_secs(),
            0
        );

        leave_replaced_rows(conn, by_hand);
        let all = RateLimit::check_all_on(conn, &[&OFTEN]).unwrap();
        assert!(matches!(all, CheckAll::Allowed(_)), "{all:?}");

        leave_replaced_rows(conn, by_hand);
        assert_eq!(OFTEN.peek_on(conn).unwrap().remaining, 1000);
        assert!(!OFTEN.reset_on(conn).unwrap());
        assert_eq!(number(conn, ROWS), 0);

        leave_replaced_rows(conn, by_hand);
        assert_eq!(RateLimit::prune_on(conn).unwrap(), 1);
        assert_eq!(number(conn, ROWS), 0);
    }
}

/// As when another call has forgotten and used the key meanwhile.
#[test]
fn only_a_key_of_which_replaced_rows_are_left_is_forgotten() {
    let database = database();
    let conn = &mut database.connect();
    let _ = allowed(OFTEN.check_on(conn).unwrap());
    conn.batch_execute("SELECT resource_control.forget_rate_limit('often', '', 1)")
        .unwrap();
    assert_eq!(number(conn, ROWS), 1);
    for _ in 0..200 {
        let _ = allowed(OFTEN.check_on(conn).unwrap());
    }
    conn.batch_execute("SELECT resource_control.forget_rate_limit('often', '', 1)")
        .unwrap();
    assert_eq!(number(conn, ROWS), 2);
}

#[test]
fn a_key_that_is_used_while_pruning_waits_for_it_is_not_pruned() {
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    leave_replaced_rows(
        conn,
        "DELETE FROM resource_control.rate_limit WHERE full_at > now()",
    );
    other
        .batch_execute("BEGIN; LOCK TABLE resource_control.rate_limit IN EXCLUSIVE MODE")
        .unwrap();
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let pruning = scope.spawn(|| RateLimit::prune_on(&mut database.connect()).unwrap());
        // It waits for 50 milliseconds at most.
        while !pruning.is_finished() && observer.all_waiting() == 0 {}
        other
            .batch_execute(
                "INSERT INTO resource_control.rate_limit \
                     SELECT name, key, 2, 1, now(), now(), now() + interval '1 hour', n, period_us FROM resource_control.rate_limit; \
                 COMMIT",
            )
            .unwrap();
        assert_eq!(pruning.join().unwrap(), 0);
    });
    assert_eq!(number(conn, ROWS), 2);
}

#[test]
fn a_key_of_which_only_replaced_rows_are_left_keeps_no_other_from_its_new_quota() {
    let database = database();
    let conn = &mut database.connect();
    let versions = [24, 48].map(|n| {
        let quota = Quota::per_day(n).burst(5);
        (RateLimit::named("a", quota), RateLimit::named("b", quota))
    });
    let [(a, b), (new_a, new_b)] = &versions;
    let _ = allowed(a.check_on(conn).unwrap());
    let _ = allowed(b.cost(5).check_on(conn).unwrap());
    conn.batch_execute(
        "UPDATE resource_control.rate_limit SET full_at = '-infinity' WHERE name = 'a'",
    )
    .unwrap();
    let all = RateLimit::check_all_on(conn, &[new_a, new_b]).unwrap();
    assert!(matches!(all, CheckAll::Limited { .. }), "{all:?}");
    assert_eq!(
        number(
            conn,
            "SELECT n FROM resource_control.rate_limit WHERE name = 'b'"
        ),
        48
    );
}

#[test]
fn a_key_that_is_closed_by_hand_is_limited_until_it_is_reset() {
    let database = database();
    let conn = &mut database.connect();
    let closed = OFTEN.key("closed");
    let spent = allowed(closed.check_on(conn).unwrap());
    conn.batch_execute("UPDATE resource_control.rate_limit SET full_at = 'infinity'")
        .unwrap();
    assert_eq!(give_back_on(conn, &spent, 1).unwrap(), 0);
    // As if the clock had been set back.
    let later = "UPDATE resource_control.rate_limit SET changed_at = now() + interval '1 hour'";
    for is_later in [false, true] {
        if is_later {
            conn.batch_execute(later).unwrap();
        }
        let _ = limited(closed.check_on(conn).unwrap());
        assert!(truth(
            conn,
            "SELECT full_at = 'infinity' FROM resource_control.rate_limit"
        ));
    }
    for limited in [
        limited(closed.check_on(conn).unwrap()),
        limited(
            RateLimit::named("often", Quota::per_day(100))
                .key("closed")
                .check_on(conn)
                .unwrap(),
        ),
    ] {
        assert_eq!(limited.reason, LimitedReason::Spent);
        assert!(limited.retry_after.unwrap() > 1000 * HOUR, "{limited:?}");
    }
    assert_eq!(closed.peek_on(conn).unwrap().remaining, 0);
    assert!(closed.reset_on(conn).unwrap());
    let _ = allowed(closed.check_on(conn).unwrap());
}
