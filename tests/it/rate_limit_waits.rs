//! Waits for a rate limit on a lent connection, which only the blocking half has.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::error::Misplaced;
use diesel_interlock::{Error, Quota, RateLimit};

use crate::rate_limits::database;

const API: RateLimit = RateLimit::named("api", Quota::per_day(24).burst(5));
const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_wait_that_would_be_too_long_is_refused_at_once_and_spends_nothing() {
    let database = database();
    let conn = &mut database.connect();
    let spent = API.cost(5).acquire_timeout_on(conn, Duration::MAX).unwrap();
    assert!(spent.is_allowed());
    let before = API.peek_on(conn).unwrap().full_in;
    for timeout in [Duration::ZERO, Duration::from_secs(30)] {
        let check = API.acquire_timeout_on(conn, timeout).unwrap();
        assert!(check.limited().unwrap().retry_after.unwrap() > timeout);
    }
    assert!(API.peek_on(conn).unwrap().full_in <= before);
}

#[test]
fn a_transaction_and_a_read_only_session_are_refused() {
    let database = database();
    let conn = &mut database.connect();
    conn.transaction(|conn| {
        let refused = API.acquire_timeout_on(conn, HOUR);
        assert!(matches!(
            refused,
            Err(Error::Misplaced(Misplaced::SpendInTransaction))
        ));
        QueryResult::Ok(())
    })
    .unwrap();
    conn.batch_execute("SET default_transaction_read_only = on")
        .unwrap();
    let refused = API.acquire_timeout_on(conn, HOUR);
    assert!(matches!(refused, Err(Error::ReadOnly)));
}
