//! A tour of the locks and throttles, live on a PostgreSQL server: what goes wrong without them,
//! what goes wrong with PostgreSQL's bare functions and a connection pool, and what a guard does
//! about it.
//!
//! ```sh
//! scripts/tour    # or, where PostgreSQL is installed: cargo run --example tour
//! ```
//!
//! It starts a throwaway server, unless `DATABASE_URL` names one, and works in a database of its
//! own. Whatever it claims it has looked up before, most of it in `pg_locks` and from another
//! connection; if anything is not as claimed, it panics.

// Diesel's macro writes a module and structs that carry no documentation.
#![allow(missing_docs)]

use std::error::Error;
use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Barrier, LazyLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::dsl::{exists, sql};
use diesel::prelude::*;
use diesel::sql_types::{Integer, Text};
use diesel_interlock::functions::{
    pg_advisory_unlock, pg_backend_pid, pg_terminate_backend, pg_try_advisory_lock,
};
use diesel_interlock::{
    AdvisoryLock, Decision, LockKey, PgPool, Throttle, fnv1a, migrations, sync, throttled_resources,
};
use workbench::Database;

fn main() -> Result<(), Box<dyn Error>> {
    let database = Database::new();
    let server =
        sql::<Text>("SHOW server_version").get_result::<String>(&mut database.connect())?;
    say(format!("PostgreSQL {server}"));

    ten_requests_for_one_server(&database)?;
    a_lock_that_got_stuck_in_the_pool(&database)?;
    three_guards_that_end_badly(&database)?;
    three_instances_of_one_cron_job(&database)
}

// 1. The transaction lock: check, then insert.

diesel::table! {
    reserved_servers (datacenter_id, server_id, user_id) {
        datacenter_id -> Integer,
        server_id -> Integer,
        user_id -> Integer,
        start_date -> Timestamp,
        end_date -> Timestamp,
    }
}

#[derive(Insertable)]
#[diesel(table_name = reserved_servers)]
struct Reservation {
    datacenter_id: i32,
    server_id: i32,
    user_id: i32,
    start_date: SystemTime,
    end_date: SystemTime,
}

impl Reservation {
    /// Everybody wants the same server at the same time: from 2021-01-01 14:45 for three days.
    fn by_user(user_id: i32) -> Self {
        let start_date = UNIX_EPOCH + Duration::from_secs(1_609_512_300);
        Self {
            datacenter_id: 223,
            server_id: 345,
            user_id,
            start_date,
            end_date: start_date + Duration::from_secs(3 * 24 * 60 * 60),
        }
    }

    fn overlaps_another(&self, conn: &mut PgConnection) -> QueryResult<bool> {
        use self::reserved_servers::dsl::*;
        let others = reserved_servers
            .filter(datacenter_id.eq(self.datacenter_id))
            .filter(server_id.eq(self.server_id))
            .filter(start_date.le(self.end_date))
            .filter(end_date.ge(self.start_date));
        diesel::select(exists(others)).get_result(conn)
    }

    fn insert(&self, conn: &mut PgConnection) -> QueryResult<()> {
        diesel::insert_into(reserved_servers::table)
            .values(self)
            .execute(conn)?;
        Ok(())
    }
}

/// Answers whether the server was free and is booked now. A transaction is not enough: nobody sees
/// what the others have not committed yet. The barrier stands for the bad luck that makes it happen.
fn book_without_lock(
    conn: &mut PgConnection,
    wanted: &Reservation,
    bad_luck: &Barrier,
) -> QueryResult<bool> {
    conn.transaction(|conn| {
        let taken = wanted.overlaps_another(conn);
        bad_luck.wait();
        if taken? {
            return Ok(false);
        }
        wanted.insert(conn)?;
        Ok(true)
    })
}

/// The same under a lock: whoever checks sees what everybody before has booked.
fn book_under_lock(conn: &mut PgConnection, wanted: &Reservation) -> QueryResult<bool> {
    let key = LockKey::parts([wanted.datacenter_id, wanted.server_id]);
    AdvisoryLock::new(key).transaction(conn, |conn| {
        if wanted.overlaps_another(conn)? {
            return Ok(false);
        }
        wanted.insert(conn)?;
        Ok(true)
    })
}

fn ten_requests_for_one_server(database: &Database) -> Result<(), Box<dyn Error>> {
    title("1. Ten requests book server 345 in data centre 223, at the same time");
    let barrier = Barrier::new(10);

    say("In a transaction: conn.transaction(|conn| { check, then insert })");
    let booked = ten_at_once(database, |conn, wanted| {
        book_without_lock(conn, wanted, &barrier)
    })?;
    assert_eq!(booked.len(), 10);
    bad("10 rows: ten users were told that the server is theirs");

    say("Under a lock: AdvisoryLock::new(key).transaction(conn, |conn| { … })");
    let key = LockKey::parts([223, 345]);
    assert_eq!(key, LockKey::bigint(3755351481708176604));
    note(format!("the key: LockKey::parts([223, 345]) is {key}"));
    let booked = ten_at_once(database, |conn, wanted| {
        barrier.wait();
        book_under_lock(conn, wanted)
    })?;
    let [user] = booked[..] else {
        panic!("the server was booked by {booked:?}")
    };
    good(format!(
        "1 row: user {user} has the server, nine were told that it is taken"
    ));
    Ok(())
}

/// Answers which users have the server in the end.
fn ten_at_once(
    database: &Database,
    book: impl Fn(&mut PgConnection, &Reservation) -> QueryResult<bool> + Sync,
) -> QueryResult<Vec<i32>> {
    let mut conn = database.connect();
    conn.batch_execute(
        "DROP TABLE IF EXISTS reserved_servers;
         CREATE TABLE reserved_servers (datacenter_id integer, server_id integer, user_id integer,
                                        start_date timestamp, end_date timestamp)",
    )?;

    let book = &book;
    let conns: Vec<_> = (0..10).map(|_| database.connect()).collect();
    let told_yes = thread::scope(|scope| {
        let requests: Vec<_> = (1..=10)
            .zip(conns)
            .map(|(user, mut conn)| {
                scope.spawn(move || book(&mut conn, &Reservation::by_user(user)))
            })
            .collect();
        let mut told_yes = 0;
        for request in requests {
            if request.join().expect("no request panics")? {
                told_yes += 1;
            }
        }
        QueryResult::Ok(told_yes)
    })?;

    let users = reserved_servers::table
        .select(reserved_servers::user_id)
        .load::<i32>(&mut conn)?;
    assert_eq!(
        users.len(),
        told_yes,
        "the table has what the users were told"
    );
    Ok(users)
}

// 2. and 3. The session lock: work that is longer than a transaction.

static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");

fn a_lock_that_got_stuck_in_the_pool(database: &Database) -> Result<(), Box<dyn Error>> {
    title("2. A session lock and a connection pool");
    let pool = database.pool(2);
    let mut observer = database.connect();

    say("PostgreSQL's functions, each on whatever connection the pool gives");
    let number = fnv1a("nightly report");
    let mut first = pool.get()?;
    let mut second = pool.get()?; // another request has the other connection
    let holder = pid(&mut first)?;
    let locked: bool = diesel::select(pg_try_advisory_lock(number)).get_result(&mut first)?;
    assert!(locked);
    note(format!(
        "pid {holder}: pg_try_advisory_lock({number}) answers {locked}"
    ));
    drop(first); // back to the pool, while the report is written

    let other = pid(&mut second)?;
    let unlocked: bool = diesel::select(pg_advisory_unlock(number)).get_result(&mut second)?;
    assert!(!unlocked);
    drop(second);
    bad(format!(
        "pid {other}: pg_advisory_unlock({number}) answers {unlocked}"
    ));

    assert_eq!(holders(&mut observer)?, [(holder, "idle".to_owned())]);
    assert!(NIGHTLY.try_acquire_on(&mut observer)?.is_busy());
    bad(format!(
        "pg_locks: held by pid {holder}, idle in the pool; nobody else gets it"
    ));

    // Only the session itself can free it, and the pool does not say which of the two that is.
    for conn in &mut [pool.get()?, pool.get()?] {
        conn.batch_execute("SELECT pg_advisory_unlock_all()")?;
    }

    say("The guard: let mut guard = NIGHTLY.acquire(&pool)?");
    let mut guard = NIGHTLY.acquire(&pool)?;
    let working = pid(guard.conn())?; // the report is written on the connection that has the lock
    assert_eq!(working, guard.backend_pid());
    assert_held_by(guard.backend_pid(), &mut observer)?;
    guard.release()?;
    good("guard.release() answers Ok(())");
    assert_eq!(holders(&mut observer)?, []);
    good("pg_locks: nobody holds it");
    assert_pool_is_whole(&pool)
}

fn three_guards_that_end_badly(database: &Database) -> Result<(), Box<dyn Error>> {
    title("3. Whatever happens under a guard, the lock is freed");
    let pool = database.pool(2);
    let mut observer = database.connect();

    say("The work panics");
    let guard = NIGHTLY.acquire(&pool)?;
    assert_held_by(guard.backend_pid(), &mut observer)?;
    let message = panic_message_of(move || {
        let _guard = guard;
        panic!("out of paper");
    });
    note(format!("panicked: {message}"));
    assert_free(&mut observer)?;
    assert_pool_is_whole(&pool)?;

    say("The guard is dropped inside an aborted transaction");
    let mut guard = NIGHTLY.acquire(&pool)?;
    assert_held_by(guard.backend_pid(), &mut observer)?;
    let conn = guard.conn();
    conn.batch_execute("BEGIN")?; // Diesel does not know of it
    let error = conn.batch_execute("SELECT 1 / 0").unwrap_err();
    let aborted = conn.batch_execute("SELECT 1").is_err();
    assert!(aborted);
    note(format!("BEGIN; SELECT 1 / 0: {error}"));
    drop(guard);
    assert_free(&mut observer)?;
    assert_pool_is_whole(&pool)?;

    say("The server ends the session that has the lock");
    let mut guard = NIGHTLY.acquire(&pool)?;
    assert_held_by(guard.backend_pid(), &mut observer)?;
    let killed: bool =
        diesel::select(pg_terminate_backend(guard.backend_pid())).get_result(&mut observer)?;
    assert!(killed);
    note(format!("pg_terminate_backend({})", guard.backend_pid()));
    assert_free(&mut observer)?;
    assert!(!guard.is_held()?);
    good("guard.is_held() answers false: the work can tell that it is on its own");
    let error = guard.release().unwrap_err();
    good("guard.release() answers an error:");
    note(error);
    assert_pool_is_whole(&pool)
}

// 4. The throttle: at most once per interval, whoever asks.

throttled_resources! {
    enum Job {
        Newsletter = "newsletter" every Duration::from_secs(3600),
    }
}

fn three_instances_of_one_cron_job(database: &Database) -> Result<(), Box<dyn Error>> {
    title("4. Three instances run the same cron job, at most once per hour");
    let mut conn = database.connect();
    migrations::install(&mut conn)?; // the schema resource_control
    let synced = sync::<Job>(&mut conn)?;
    assert_eq!(synced.added, ["newsletter"]);

    say("On each: Throttle::of(Job::Newsletter).attempt(conn, \"cron on web-…\")");
    let barrier = Barrier::new(3);
    let barrier = &barrier;
    let decisions = thread::scope(|scope| {
        let instances: Vec<_> = (1..=3)
            .map(|number| {
                let mut conn = database.connect();
                scope.spawn(move || {
                    barrier.wait();
                    let decision = Throttle::of(Job::Newsletter)
                        .attempt(&mut conn, &format!("cron on web-{number}"))?;
                    Ok::<_, diesel_interlock::Error>((number, decision))
                })
            })
            .collect();
        instances
            .into_iter()
            .map(|instance| instance.join().expect("no instance panics"))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let mut runs = 0;
    for (number, decision) in decisions {
        match decision {
            Decision::Granted(grant) => {
                runs += 1;
                let until = grant.until.format("%H:%M:%S");
                good(format!("web-{number} sends it; due again at {until}"));
            }
            Decision::Denied(denied) => note(format!(
                "web-{number} is denied, {:?}: again in {} s",
                denied.reason,
                denied.retry_after_secs()
            )),
        }
    }
    assert_eq!(runs, 1, "one instance runs the job");

    let denied = Throttle::of(Job::Newsletter)
        .attempt(&mut conn, "psql")?
        .denied()
        .expect("the interval has not passed");
    let holder = denied.holder.expect("whoever took it said so");
    good(format!("last sent by: {holder}"));
    Ok(())
}

// What is looked up to prove it.

/// Who holds an advisory lock in this database: pids, and what their sessions do.
fn holders(observer: &mut PgConnection) -> QueryResult<Vec<(i32, String)>> {
    sql::<(Integer, Text)>(
        "SELECT pid, state FROM pg_locks JOIN pg_stat_activity USING (pid) \
         WHERE locktype = 'advisory' AND granted AND datname = current_database() \
         AND database = datid",
    )
    .load(observer)
}

fn assert_held_by(pid: i32, observer: &mut PgConnection) -> QueryResult<()> {
    assert_eq!(holders(observer)?, [(pid, "idle".to_owned())]);
    good(format!("pg_locks: held by pid {pid}"));
    Ok(())
}

/// Looks until nobody holds a lock: PostgreSQL frees the locks of a session as it ends, some
/// milliseconds after its connection was discarded.
fn assert_free(observer: &mut PgConnection) -> QueryResult<()> {
    let start = Instant::now();
    while !holders(observer)?.is_empty() {
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "a lock is still held"
        );
        thread::sleep(Duration::from_millis(1));
    }
    good(format!(
        "pg_locks: nobody holds it, after less than {} ms",
        start.elapsed().as_millis() + 1
    ));
    Ok(())
}

/// The pool gives out as many connections as it should, and they work.
fn assert_pool_is_whole(pool: &PgPool) -> Result<(), Box<dyn Error>> {
    let mut conns = Vec::new();
    let mut pids = Vec::new();
    for _ in 0..pool.max_size() {
        let mut conn = pool.get()?;
        pids.push(conn.transaction(|conn| pid(conn))?);
        conns.push(conn);
    }
    good(format!(
        "the pool gives out its {} connections, pids {pids:?}",
        conns.len()
    ));
    Ok(())
}

fn pid(conn: &mut PgConnection) -> QueryResult<i32> {
    diesel::select(pg_backend_pid()).get_result(conn)
}

/// Runs work that panics, without Rust's report of it on the screen.
fn panic_message_of(work: impl FnOnce()) -> &'static str {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let outcome = panic::catch_unwind(AssertUnwindSafe(work));
    panic::set_hook(hook);
    let payload = outcome.expect_err("the work panics");
    payload
        .downcast_ref::<&str>()
        .expect("its message is a literal")
}

// The screen.

/// Whether to print in colours: on a terminal, and not if `NO_COLOR` is set.
static COLOURS: LazyLock<bool> = LazyLock::new(|| {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
});

fn title(text: impl Display) {
    println!("\n{}", in_colour("1", text));
}

fn say(text: impl Display) {
    println!("\n  {text}");
}

fn note(text: impl Display) {
    println!("    {} {}", in_colour("2", "·"), in_colour("2", text));
}

fn good(text: impl Display) {
    println!("    {} {text}", in_colour("1;32", "✓"));
}

fn bad(text: impl Display) {
    println!("    {} {text}", in_colour("1;31", "✗"));
}

fn in_colour(code: &str, text: impl Display) -> String {
    if *COLOURS {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_string()
    }
}
