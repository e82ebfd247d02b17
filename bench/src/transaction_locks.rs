//! A transaction that inserts one row, with a transaction lock and without.

use diesel::prelude::*;
use diesel_interlock::Error;

use crate::Bench;
use crate::harness::{Contender, compare, threads};
use crate::report::{NO_GOAL, Report};
use crate::server::BenchDatabase;
use crate::session_locks::{lock, number};

const OURS: &str = "ours, lock.transaction";
const WITHOUT: &str = "Diesel, no lock";
const LIBPQ: &str = "libpq, prepared, with the lock";

diesel::table! {
    booking (id) {
        id -> BigInt,
        server -> BigInt,
    }
}

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    database.session().query("CREATE TABLE booking (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, server bigint NOT NULL)");
    verify(&database);
    for number in [1, 8] {
        report.scenario("transaction lock around an insert", number);
        let contenders = vec![
            ours(&database, number),
            without(&database, number),
            libpq(&database, number),
        ];
        let rates = compare(bench.options.plan(), contenders);
        report.ratio(&rates, OURS, WITHOUT, NO_GOAL);
        report.ratio(&rates, OURS, LIBPQ, NO_GOAL);
    }
}

fn insert(conn: &mut PgConnection, thread: usize) -> QueryResult<usize> {
    diesel::insert_into(booking::table)
        .values(booking::server.eq(thread as i64))
        .execute(conn)
}

fn ours(database: &BenchDatabase, number: usize) -> Box<dyn Contender> {
    threads(OURS, number, |thread| {
        let (lock, mut conn) = (lock(thread), database.connect());
        move || {
            let inserted =
                lock.transaction(&mut conn, |conn| Ok::<_, Error>(insert(conn, thread)?));
            assert_eq!(inserted.unwrap(), 1);
        }
    })
}

fn without(database: &BenchDatabase, number: usize) -> Box<dyn Contender> {
    threads(WITHOUT, number, |thread| {
        let mut conn = database.connect();
        move || assert_eq!(conn.transaction(|conn| insert(conn, thread)).unwrap(), 1)
    })
}

fn libpq(database: &BenchDatabase, threads_number: usize) -> Box<dyn Contender> {
    threads(LIBPQ, threads_number, |thread| {
        let mut session = database.session();
        let lock = session.prepare("lock", "SELECT pg_advisory_xact_lock($1)");
        let insert = session.prepare("insert", "INSERT INTO booking (server) VALUES ($1)");
        let key = number(thread);
        move || {
            session.query_c(c"BEGIN");
            session.run(&lock, &[key]);
            assert_eq!(session.run(&insert, &[thread as i64]).changed(), 1);
            session.query_c(c"COMMIT");
        }
    })
}

/// Whether ours holds the lock while it inserts, and has inserted a row when it has released it.
fn verify(database: &BenchDatabase) {
    let (mut conn, mut observer) = (database.connect(), database.session());
    let is_free = format!("SELECT pg_try_advisory_xact_lock({})", number(0));
    lock(0)
        .transaction(&mut conn, |conn| {
            assert!(!observer.query(&is_free).is_true(0), "the lock is held");
            Ok::<_, Error>(insert(conn, 0)?)
        })
        .unwrap();
    assert!(observer.query(&is_free).is_true(0), "the lock is free");
    assert_eq!(
        observer.query("SELECT count(*)::text FROM booking").text(0),
        "1"
    );
}
