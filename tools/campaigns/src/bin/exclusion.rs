//! Is the answer of `check_exclusion` right? Behind `PgBouncer` in transaction mode it must find the
//! pooler, whatever the number and order of the pooler's sessions, and the load. On a direct server
//! it must find nothing. It must leave no lock, and cause no error of another client.

use std::collections::HashSet;
use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool};
use diesel::sql_types::Text;
use diesel_interlock::{Error as InterlockError, PgPool, check_exclusion};
use workbench::{Cluster, Endpoint, PgBouncer, PoolMode};

const USAGE: &str = "usage: scripts/campaign exclusion [--runs N] [--direct N]

  --runs N    the least number of checks behind PgBouncer (default: 200): with 1 to 8 sessions,
              server_round_robin 0 and 1, both orders of first use, idle and beside ten busy clients
  --direct N  the number of checks on a direct server, which must find nothing (default: 50)

Prints a line for each wrong answer and, at the end, their number. Exits with 1 if there was one, if
a lock was left, or if a client saw an error.";

/// Busy clients beside the check.
const CLIENTS: usize = 10;

/// The transaction of a busy client, as in pgbench: each statement is a round trip.
const WORK: [&str; 4] = [
    "BEGIN",
    "UPDATE account SET balance = balance + 1 WHERE id = 1 + pg_backend_pid() % 100",
    "SELECT balance FROM account WHERE id = 1",
    "COMMIT",
];

fn main() -> Result<(), Box<dyn Error>> {
    let (mut runs, mut direct) = (200_usize, 50_usize);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or(USAGE)?;
        match argument.as_str() {
            "--runs" => runs = value.parse()?,
            "--direct" => direct = value.parse()?,
            _ => return Err(USAGE.into()),
        }
    }
    let cluster = Cluster::start();
    let database = cluster.database();
    database.connect().batch_execute(
        "CREATE TABLE account AS SELECT id, 0 AS balance FROM generate_series(1, 100) AS id;
         CREATE UNIQUE INDEX ON account (id)",
    )?;

    let mut behind = Answers::default();
    // 1 to 8 sessions, two settings of server_round_robin, two orders, idle and busy.
    let each = runs.div_ceil(8 * 2 * 2 * 2);
    for sessions in 1..=8 {
        for round_robin in [0, 1] {
            let pooler = PgBouncer::with_settings(
                &database,
                PoolMode::Transaction,
                sessions,
                &format!("server_round_robin = {round_robin}\nquery_wait_timeout = 30"),
            );
            open_all(&pooler, sessions);
            for clients in [0, CLIENTS] {
                let place = format!(
                    "{sessions} sessions, server_round_robin = {round_robin}, {clients} clients"
                );
                behind.add(&pooler, &database, clients, each, &place, is_pooler);
            }
        }
    }
    println!("behind PgBouncer {:?}: {behind}", PgBouncer::version());

    let mut straight = Answers::default();
    for clients in [0, CLIENTS] {
        let place = format!("a direct server, {clients} clients");
        straight.add(
            &database,
            &database,
            clients,
            direct.div_ceil(4),
            &place,
            Result::is_ok,
        );
    }
    println!("on a direct server: {straight}");
    if behind.are_right() && straight.are_right() {
        return Ok(());
    }
    Err("check_exclusion was wrong".into())
}

/// Whether a pooler was found. The variant is also that of an engine whose locks do nothing, so the
/// text decides.
fn is_pooler(answer: &Result<(), InterlockError>) -> bool {
    matches!(answer, Err(InterlockError::NotExclusive(found)) if found.contains("pooler"))
}

#[derive(Default)]
struct Answers {
    runs: usize,
    wrong: usize,
    locks_left: usize,
    transactions: usize,
    errors: usize,
}

impl Answers {
    /// Runs `each` checks per order of first use, while clients work at the same address.
    fn add(
        &mut self,
        address: &Endpoint,
        database: &Endpoint,
        clients: usize,
        each: usize,
        place: &str,
        is_right: fn(&Result<(), InterlockError>) -> bool,
    ) {
        let is_over = AtomicBool::new(false);
        let [transactions, errors] = [(); 2].map(|()| AtomicUsize::new(0));
        let observer = &mut database.connect();
        thread::scope(|scope| {
            for _ in 0..clients {
                scope.spawn(|| {
                    let mut conn = address.connect();
                    while !is_over.load(Ordering::SeqCst) {
                        let worked = WORK.iter().try_for_each(|sql| conn.batch_execute(sql));
                        if let Err(error) = worked {
                            println!("{place}: a client saw an error: {error}");
                            errors.fetch_add(1, Ordering::SeqCst);
                            conn = address.connect();
                        }
                        transactions.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            // Wait until all clients are at work.
            while transactions.load(Ordering::SeqCst) < clients {
                thread::sleep(Duration::from_millis(1));
            }
            let mut seen = locks(observer);
            for run in 0..2 * each {
                let answer = check_exclusion(&pool(address, run % 2 == 1, run % 4 > 1));
                self.runs += 1;
                if !is_right(&answer) {
                    self.wrong += 1;
                    println!("{place}, run {run}: {answer:?}");
                }
                // A lock stays in its session of the pooler, so only new ones count. Terminating
                // the session would cause an error of a client.
                let now = locks(observer);
                if !now.is_subset(&seen) {
                    self.locks_left += 1;
                    println!("{place}, run {run}: a lock is left");
                }
                seen = now;
            }
            is_over.store(true, Ordering::SeqCst);
        });
        self.transactions += transactions.into_inner();
        self.errors += errors.into_inner();
    }

    const fn are_right(&self) -> bool {
        self.wrong + self.locks_left + self.errors == 0
    }
}

impl std::fmt::Display for Answers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            runs,
            wrong,
            locks_left,
            transactions,
            errors,
        } = self;
        write!(
            f,
            "{runs} runs, {wrong} wrong answers, {locks_left} left locks; beside {transactions} transactions of others, \
             {errors} of which saw an error"
        )
    }
}

/// Makes the pooler open all its sessions, which it otherwise does only when none is idle.
fn open_all(pooler: &Endpoint, sessions: u32) {
    let mut clients: Vec<_> = (0..sessions).map(|_| pooler.connect()).collect();
    for sql in ["BEGIN", "COMMIT"] {
        for client in &mut clients {
            client
                .batch_execute(sql)
                .expect("the pooler has a session for each");
        }
    }
}

/// `PgBouncer` before 1.21 does not support prepared statements.
#[derive(Debug)]
struct Unprepared;

impl<E> CustomizeConnection<PgConnection, E> for Unprepared {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), E> {
        conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        Ok(())
    }
}

/// A new pool with two idle connections. If `is_reversed`, the second one was used first. If
/// `is_checked`, each check-out is a round trip, as by r2d2's default, which changes the order in
/// which a pooler hands out its sessions.
fn pool(address: &Endpoint, is_reversed: bool, is_checked: bool) -> PgPool {
    let pool: PgPool = Pool::builder()
        .max_size(2)
        .min_idle(Some(0))
        .test_on_check_out(is_checked)
        .connection_customizer(Box::new(Unprepared))
        .build(ConnectionManager::new(address.url()))
        .expect("the settings are valid");
    let mut both = [(); 2].map(|()| pool.get().expect("PgBouncer accepts connections"));
    if is_reversed {
        both.reverse();
    }
    for conn in &mut both {
        conn.batch_execute("SELECT 1")
            .expect("PgBouncer gives a session");
    }
    if is_reversed {
        both.reverse();
    }
    drop(both);
    pool
}

/// The advisory locks of the database, each as a text.
fn locks(observer: &mut PgConnection) -> HashSet<String> {
    let rows = diesel::dsl::sql::<Text>(
        "SELECT concat_ws(' ', pid, classid, objid) FROM pg_locks WHERE locktype = 'advisory' \
         AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
    );
    let rows = rows.load(observer).expect("the server runs");
    rows.into_iter().collect()
}
