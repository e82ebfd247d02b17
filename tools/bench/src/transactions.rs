//! What happens in a transaction, beside the same by hand with Diesel: locks, work that is done once, renewals.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};
use diesel_interlock::{AdvisoryLock, Error, LockKey, Once, Semaphore};
use workbench::Database;

use crate::Bench;
use crate::compare::{Boxed, threads};
use crate::report::Report;
use crate::server::{self, ROLE, pool};

diesel::define_sql_function!(fn pg_try_advisory_xact_lock(key: BigInt) -> Bool);

const CLIENTS: usize = 8;
const MARK: &str = "INSERT INTO by_hand (name, key) VALUES ('charge', $1)";
const STORE: &str = "UPDATE by_hand SET outcome = 'done' WHERE name = 'charge' AND key = $1";
const RENEW: &str = "UPDATE resource_control.service_request SET expires_at = clock_timestamp() + '1 hour' \
     WHERE id = $1 AND completed_at IS NULL AND timed_out_at IS NULL";

static CHARGE: Once = Once::named("charge");
static SLOTS: Semaphore = Semaphore::named("renewed", CLIENTS as u32, Duration::from_secs(3600));

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    let table = format!(
        "CREATE TABLE by_hand (name text, key text, outcome text, PRIMARY KEY (name, key)); GRANT ALL ON by_hand TO {ROLE}"
    );
    server::run(&database, &table);
    let rows: [(&str, Option<f64>, Boxed, Boxed); 3] = [
        (
            "transaction lock / the lock by hand in a transaction",
            None,
            locks(&database),
            locks_by_hand(&database),
        ),
        (
            "`Once` / an INSERT and an UPDATE by hand in a transaction",
            Some(1.0),
            once(&database),
            once_by_hand(&database),
        ),
        (
            "renewal of a permit / an UPDATE by hand",
            None,
            renewals(&database),
            renewals_by_hand(&database),
        ),
    ];
    for (work, aim, ours, hand) in rows {
        report.row(work, CLIENTS, aim, ours, hand);
    }
}

fn locks(database: &Database) -> Boxed {
    let pool = pool(database, CLIENTS);
    threads(CLIENTS, |thread| {
        let pool = pool.clone();
        let lock = AdvisoryLock::new(LockKey::bigint(thread as i64));
        move || {
            let conn = &mut pool.get().expect("the pool has a connection");
            let done = lock.transaction(conn, |_| Ok::<_, Error>(()));
            done.expect("nobody else wants it");
        }
    })
}

fn locks_by_hand(database: &Database) -> Boxed {
    let pool = pool(database, CLIENTS);
    threads(CLIENTS, |thread| {
        let (pool, key) = (pool.clone(), 1000 + thread as i64);
        move || {
            let conn = &mut pool.get().expect("the pool has a connection");
            let done = conn.transaction(|conn| {
                diesel::select(pg_try_advisory_xact_lock(key)).get_result::<bool>(conn)
            });
            assert!(done.expect("the server replies"));
        }
    })
}

/// Keys that no run has had before.
fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn once(database: &Database) -> Boxed {
    let pool = pool(database, CLIENTS);
    threads(CLIENTS, |_| {
        let pool = pool.clone();
        move || {
            let conn = &mut pool.get().expect("the pool has a connection");
            let done = CHARGE.key(fresh()).run(conn, |_| Ok::<_, Error>("done"));
            assert!(done.expect("it can be done").is_first());
        }
    })
}

fn once_by_hand(database: &Database) -> Boxed {
    let pool = pool(database, CLIENTS);
    threads(CLIENTS, |_| {
        let pool = pool.clone();
        move || {
            let conn = &mut pool.get().expect("the pool has a connection");
            let key = fresh().to_string();
            let done = conn.transaction(|conn| {
                diesel::sql_query(MARK)
                    .bind::<Text, _>(&key)
                    .execute(conn)?;
                diesel::sql_query(STORE).bind::<Text, _>(&key).execute(conn)
            });
            assert_eq!(done.expect("the server replies"), 1);
        }
    })
}

fn renewals(database: &Database) -> Boxed {
    let pool = pool(database, CLIENTS);
    threads(CLIENTS, |_| {
        let permit = SLOTS.try_acquire(&pool).expect("a slot can be claimed");
        let permit = permit.admitted().expect("a slot is free");
        move || permit.renew().expect("it is in flight")
    })
}

fn renewals_by_hand(database: &Database) -> Boxed {
    let pool = pool(database, CLIENTS);
    let other = SLOTS.key("by hand");
    threads(CLIENTS, |_| {
        let permit = other.try_acquire(&pool).expect("a slot can be claimed");
        let id = permit.admitted().expect("a slot is free").detach();
        let pool = pool.clone();
        move || {
            let conn = &mut pool.get().expect("the pool has a connection");
            let renewed = diesel::sql_query(RENEW).bind::<BigInt, _>(id).execute(conn);
            assert_eq!(renewed.expect("the server replies"), 1);
        }
    })
}
