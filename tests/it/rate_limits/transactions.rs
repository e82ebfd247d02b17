//! Open transactions around a call.

use crate::half::error::Misplaced;
use crate::half::prelude::*;
use crate::half::{Error, RateLimit, give_back_on};
use diesel::connection::SimpleConnection;

use super::{API, HOUR, allowed, database, limited};
use crate::support::setting;

fn is_misplaced<T: std::fmt::Debug>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Misplaced(Misplaced::SpendInTransaction)))
}

#[test]
fn an_open_transaction_is_refused_before_anything_is_sent() {
    let database = database();
    let conn = &mut database.connect();
    let spent = allowed(API.key(7).cost(2).check_on(conn).unwrap());
    conn.transaction(|conn| {
        assert!(is_misplaced(API.check_on(conn)));
        assert!(is_misplaced(API.reserve_on(conn, HOUR)));
        assert!(is_misplaced(API.reset_on(conn)));
        assert!(is_misplaced(API.reset_all_on(conn)));
        assert!(is_misplaced(RateLimit::check_all_on(conn, &[&API])));
        assert!(is_misplaced(RateLimit::prune_on(conn)));
        assert!(is_misplaced(give_back_on(conn, &spent, 1)));
        assert_eq!(API.key(7).peek_on(conn).unwrap().remaining, 3);
        QueryResult::Ok(())
    })
    .unwrap();
    // What was refused was not counted as given back.
    assert_eq!(give_back_on(conn, &spent, 2).unwrap(), 2);
    assert_eq!(API.peek_on(conn).unwrap().remaining, 5);
}

#[test]
fn a_test_transaction_counts_as_none() {
    let database = database();
    let conn = &mut database.connect();
    conn.begin_test_transaction().unwrap();
    let spent = allowed(API.cost(5).check_on(conn).unwrap());
    limited(API.check_on(conn).unwrap());
    assert_eq!(give_back_on(conn, &spent, 1).unwrap(), 1);
    let both = RateLimit::check_all_on(conn, &[&API, &API.key(7)]).unwrap();
    assert!(both.is_allowed());
    assert!(API.reset_on(conn).unwrap());
    let _ = RateLimit::prune_on(conn).unwrap();
    assert_eq!(API.peek_on(&mut database.connect()).unwrap().remaining, 5);
}

#[test]
fn a_begin_that_diesel_does_not_know_of_is_found_and_the_units_are_given_back() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute("CREATE TABLE work (); BEGIN; INSERT INTO work DEFAULT VALUES")
        .unwrap();
    assert!(is_misplaced(API.cost(5).check_on(conn)));
    assert!(is_misplaced(RateLimit::check_all_on(
        conn,
        &[&API, &API.key(7)]
    )));
    // The caller's transaction goes on.
    conn.batch_execute("COMMIT").unwrap();
    let rows: i64 = diesel::select(diesel::dsl::sql::<diesel::sql_types::BigInt>(
        "(SELECT count(*) FROM work)",
    ))
    .get_result(conn)
    .unwrap();
    assert_eq!(rows, 1);
    assert_eq!(API.peek_on(conn).unwrap().remaining, 5);
    let _ = allowed(API.check_on(conn).unwrap());
}

#[test]
fn a_transaction_that_diesel_does_not_see_still_waits_for_the_disk_when_it_commits() {
    let database = database();
    let conn = &mut database.connect();
    let spent = allowed(API.cost(2).check_on(conn).unwrap());
    let used_up = API.key("used up");
    let _ = allowed(used_up.cost(5).check_on(conn).unwrap());
    let operations: [&dyn Fn(&mut PgConnection) -> bool; 6] = [
        &|conn| is_misplaced(API.check_on(conn)),
        &|conn| is_misplaced(used_up.check_on(conn)),
        &|conn| is_misplaced(API.reserve_on(conn, HOUR)),
        &|conn| is_misplaced(RateLimit::check_all_on(conn, &[&API, &API.key(7)])),
        &|conn| give_back_on(conn, &spent, 1).unwrap() == 1,
        &|conn| API.reset_on(conn).unwrap(),
    ];
    for (place, operation) in operations.into_iter().enumerate() {
        conn.batch_execute("BEGIN").unwrap();
        assert!(operation(conn), "{place}");
        assert_eq!(setting(conn, "synchronous_commit"), "on", "{place}");
        conn.batch_execute("COMMIT").unwrap();
    }
    // A durable limit leaves the setting as it is.
    let durable = API.key("durable").durable();
    for is_all in [false, true] {
        conn.batch_execute("BEGIN; SET LOCAL synchronous_commit = local")
            .unwrap();
        assert!(if is_all {
            is_misplaced(RateLimit::check_all_on(conn, &[&durable]))
        } else {
            is_misplaced(durable.check_on(conn))
        });
        assert!(durable.reset_on(conn).is_ok());
        assert_eq!(setting(conn, "synchronous_commit"), "local");
        conn.batch_execute("COMMIT").unwrap();
    }
}

#[test]
fn a_transaction_that_was_left_open_in_the_pool_is_rolled_back() {
    let database = database();
    let pool = database.pool(1);
    let _ = allowed(API.check(&pool).unwrap());
    let operations: [&dyn Fn() -> Result<(), Error>; 4] = [
        &|| API.check(&pool).map(drop),
        &|| API.reset(&pool).map(drop),
        &|| RateLimit::check_all(&pool, &[&API]).map(drop),
        &|| API.reserve(&pool, HOUR).map(drop),
    ];
    for operation in operations {
        pool.get().unwrap().batch_execute("BEGIN").unwrap();
        assert!(matches!(operation(), Err(Error::TransactionInPool)));
        assert_eq!(API.peek(&pool).unwrap().remaining, 4);
    }
    crate::support::assert_pool_whole(&pool, &database);
}
