//! Rows that somebody deleted or changed by hand.

use crate::half::prelude::*;
use crate::half::{CheckAll, LimitedReason, Quota, RateLimit};
use diesel::connection::SimpleConnection;

use crate::support::number;

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
}

#[test]
fn a_key_that_is_closed_by_hand_is_limited_until_it_is_reset() {
    let database = database();
    let conn = &mut database.connect();
    let closed = OFTEN.key("closed");
    let _ = allowed(closed.check_on(conn).unwrap());
    conn.batch_execute("UPDATE resource_control.rate_limit SET full_at = 'infinity'")
        .unwrap();
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
