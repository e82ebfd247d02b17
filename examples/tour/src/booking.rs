//! The transaction lock: check, then insert.

use std::error::Error;
use std::sync::Barrier;
use std::thread;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::AdvisoryLock;
use workbench::Database;

use crate::look::text;

static SERVER: AdvisoryLock = AdvisoryLock::named("server");

const TABLE: &str = "DROP TABLE IF EXISTS booking;
    CREATE TABLE booking (server integer, customer integer, during daterange)";
const OVERLAPPING: &str = "EXISTS (SELECT FROM booking
    WHERE server = 345 AND during && daterange '[2021-01-01, 2021-01-04)')";

/// Returns whether the booking is confirmed to the customer.
fn book(conn: &mut PgConnection, customer: i32, between: impl FnOnce()) -> QueryResult<bool> {
    let is_taken = text(conn, OVERLAPPING);
    between();
    if is_taken? == "true" {
        return Ok(false);
    }
    let insert =
        format!("INSERT INTO booking VALUES (345, {customer}, '[2021-01-01, 2021-01-04)')");
    conn.batch_execute(&insert)?;
    Ok(true)
}

pub(crate) fn ten_requests_for_one_server(database: &Database) -> Result<(), Box<dyn Error>> {
    println!("\n1. Ten requests book server 345 for the same days, at the same time");
    let barrier = Barrier::new(10);

    println!("\n  In a transaction: conn.transaction(|conn| {{ check, then insert }})");
    // No transaction sees uncommitted rows of others. The barrier makes the race certain.
    let rows = book_ten_at_once(database, |conn, customer| {
        conn.transaction(|conn| book(conn, customer, || _ = barrier.wait()))
    })?;
    assert_eq!(rows, "10");
    println!("    ✗ {rows} rows: ten customers were told that the server is theirs");

    println!("\n  Under a lock: SERVER.key(345).transaction(conn, |conn| {{ … }})");
    let key = SERVER.key(345);
    println!("    · PostgreSQL locks the number {}", key.lock_key().id()?);
    let rows = book_ten_at_once(database, |conn, customer| {
        barrier.wait();
        key.transaction(conn, |conn| book(conn, customer, || ()))
    })?;
    assert_eq!(rows, "1");
    println!("    ✓ {rows} row: one customer has the server, nine were told that it is taken");
    Ok(())
}

/// Returns the number of bookings at the end.
fn book_ten_at_once(
    database: &Database,
    book: impl Fn(&mut PgConnection, i32) -> QueryResult<bool> + Sync,
) -> QueryResult<String> {
    let look = &mut database.connect();
    look.batch_execute(TABLE)?;
    let told_yes = thread::scope(|scope| {
        let request = |customer| {
            let (mut conn, book) = (database.connect(), &book);
            scope.spawn(move || book(&mut conn, customer))
        };
        let requests: Vec<_> = (0..10).map(request).collect();
        let replies = requests
            .into_iter()
            .map(|it| it.join().expect("no request panics"));
        replies.filter(|reply| *reply == Ok(true)).count()
    });
    let rows = text(look, "SELECT count(*) FROM booking")?;
    assert_eq!(
        rows,
        told_yes.to_string(),
        "customers were told what the table has"
    );
    Ok(rows)
}
