//! What `docs/interop.md` gives to programs in other languages. `tests/interop.rs` has the part that needs
//! Python and Node.js.

use std::thread;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Text};
use diesel_interlock::{LockKey, Semaphore, fnv1a, throttled_resources};
use workbench::Database;

use crate::support::{Expect, database_with};

const PAGE: &str = include_str!("../../docs/interop.md");
static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));

throttled_resources! {
    enum Resource {
        CacheRebuild = "cache rebuild" every Duration::from_secs(15),
        TenantImport = "tenant import" every Duration::from_secs(60),
    }
}

/// The SQL of the page.
fn blocks() -> Vec<&'static str> {
    PAGE.split("```sql\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

/// What a client sends that keeps rows of its own.
fn own_claim() -> &'static str {
    let mut blocks = blocks().into_iter();
    blocks.find(|sql| sql.contains("LOCK TABLE")).unwrap()
}

fn count(conn: &mut PgConnection, condition: &str) -> i64 {
    let from = format!("count(*) FROM resource_control.service_request WHERE {condition}");
    diesel::select(sql::<BigInt>(&from))
        .get_result(conn)
        .unwrap()
}

#[test]
fn all_the_sql_of_the_page_runs() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    assert_eq!(blocks().len(), 5);
    for sql in blocks() {
        conn.batch_execute(sql)
            .unwrap_or_else(|error| panic!("{error}: {sql}"));
    }
}

#[test]
fn a_client_with_rows_of_its_own_and_our_claims_keep_one_limit() {
    let database = database_with::<Resource>();
    let conn = &mut database.connect();
    for in_flight in [1, 2] {
        conn.batch_execute(own_claim()).unwrap();
        assert_eq!(count(conn, "completed_at IS NULL"), in_flight);
    }
    for _ in 0..2 {
        let _ = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    }
    assert!(GEOCODER.claim_on(conn).unwrap().is_full());
    conn.batch_execute(own_claim()).unwrap();
    assert_eq!(count(conn, "completed_at IS NULL"), 4);
    assert_eq!(count(conn, "slot BETWEEN 0 AND 3"), 4);

    let expire =
        "UPDATE resource_control.service_request SET expires_at = clock_timestamp() WHERE slot = 2";
    conn.batch_execute(expire).unwrap();
    conn.batch_execute(own_claim()).unwrap();
    assert_eq!(count(conn, "timed_out_at IS NOT NULL"), 1);
    assert_eq!(count(conn, "slot = 2 AND timed_out_at IS NULL"), 1);
}

/// How many requests of a client that waited for the table longer than its timeout are in flight when
/// the wait ends.
fn in_flight_after_a_long_wait(claim: &str) -> i64 {
    let database = database_with::<Resource>();
    let (holder, observer) = (&mut database.connect(), &mut database.connect());
    let client = &mut database.connect();
    let claim = claim.replace("30 seconds", "100 milliseconds");
    holder
        .batch_execute(
            "BEGIN; LOCK TABLE resource_control.service_request IN SHARE ROW EXCLUSIVE MODE",
        )
        .unwrap();
    let released: String = thread::scope(|scope| {
        scope.spawn(|| client.batch_execute(&claim).unwrap());
        let waits = "EXISTS (SELECT FROM pg_locks WHERE locktype = 'relation' AND NOT granted \
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
        while !diesel::select(sql::<Bool>(waits))
            .get_result::<bool>(observer)
            .unwrap()
        {}
        holder.batch_execute("SELECT pg_sleep(0.2)").unwrap();
        let now = sql::<Text>("clock_timestamp()::text");
        let released = diesel::select(now).get_result(holder).unwrap();
        holder.batch_execute("COMMIT").unwrap();
        released
    });
    assert_eq!(count(observer, "true"), 1);
    count(observer, &format!("expires_at > '{released}'"))
}

#[test]
fn a_client_that_waited_for_the_table_has_its_whole_timeout() {
    assert_eq!(in_flight_after_a_long_wait(own_claim()), 1);
}

#[test]
fn with_the_transactions_time_it_is_born_expired() {
    let of_the_article = own_claim().replace("clock_timestamp()", "now()");
    assert_eq!(in_flight_after_a_long_wait(&of_the_article), 0);
}

#[test]
fn the_keys_that_the_database_computes_are_those_of_the_projects() {
    let database = Database::new();
    let conn = &mut database.connect();
    // What pg_locks had for pg-boss 10.4.2 in a database named postgres.
    let sql_of = |text: &str| {
        blocks()[0]
            .lines()
            .find(|line| line.contains(text))
            .unwrap()
            .to_owned()
    };
    let number = |conn: &mut PgConnection, statement: &str| {
        let expression = statement
            .trim_start_matches("SELECT ")
            .trim_end_matches(';');
        diesel::select(sql::<BigInt>(expression))
            .get_result::<i64>(conn)
            .unwrap()
    };
    let pg_boss = sql_of("pgboss").replace("current_database()", "'postgres'");
    assert_eq!(number(conn, &pg_boss), -6_933_726_825_547_352_964);
    // The first sixteen digits of the text's MD5.
    let good_job = sql_of("good_jobs");
    let digits: String = diesel::select(sql::<Text>("md5('good_jobs-the id of the job')"))
        .get_result(conn)
        .unwrap();
    let expected = u64::from_str_radix(&digits[..16], 16).unwrap() as i64;
    assert_eq!(number(conn, &good_job), expected);
}

#[test]
fn the_gems_integers_are_pairs_as_its_vectors_say() {
    let gem = include_str!("vectors/gem.tsv");
    for (integer, key) in [
        ("42", LockKey::pair(42, 0)),
        ("-1", LockKey::pair(i32::MAX, 0)),
    ] {
        let row = format!("int:{integer}\tunset\t");
        let row = gem
            .lines()
            .find_map(|line| line.strip_prefix(&row))
            .unwrap();
        let mut cells = row.split('\t').map(|cell| cell.parse::<i32>());
        let (Some(Ok(first)), Some(Ok(second))) = (cells.next(), cells.next()) else {
            panic!("{row}");
        };
        assert_eq!(LockKey::pair(first, second), key);
    }
}

#[test]
fn the_numbers_in_the_page_are_those_of_their_names() {
    assert!(PAGE.contains(&fnv1a("nightly report").to_string()));
    let unsigned = fnv1a("a") as u64;
    assert!(PAGE.contains(&unsigned.to_string()) && unsigned > i64::MAX as u64);
}
