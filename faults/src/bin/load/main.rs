//! Lets many tasks of one process want few locks over few connections, and checks that each of them is served, that the memory
//! does not grow, and that the runtime stays responsive.
//!
//! Run by `scripts/faults load`. Each task takes its lock, holds it, releases it, and wants it again at once, until the time
//! is over. Then each task that still waits is served once more.

mod holders;
mod options;
mod process;
mod timer;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::{RecyclingMethod, bb8};
use diesel_interlock::asynchronous::Pool;
use workbench::Database;

use self::holders::Holders;
use self::options::{Options, PoolKind};
use self::timer::Lateness;

/// No task may wait longer.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// A timer of 10 milliseconds may be late by so much, in 99 of 100 cases.
const LATEST_TIMER: Duration = Duration::from_millis(50);

/// The memory may grow by so much from the time when all tasks wait to the end.
const GROWTH: f64 = 0.1;

fn main() -> ExitCode {
    let options = match Options::parse(lexopt::Parser::from_env()) {
        Ok(options) => options,
        Err(problem) => {
            eprintln!("{problem}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    let mut is_clean = true;
    for kind in options.pools() {
        let database = Database::new();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .expect("a runtime can be started");
        let mut report = runtime.block_on(async {
            match kind {
                PoolKind::Deadpool => run(options, &database.deadpool(options.connections)).await,
                PoolKind::Bb8 => run(options, &patient_bb8(&database, options.connections)).await,
            }
        });
        // The sessions end, and report what they did.
        drop(runtime);
        report.statements = statements(&database);
        is_clean &= report.print(kind, options);
    }
    if is_clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// How many statements the database has executed, each in its own transaction.
fn statements(database: &Database) -> i64 {
    const COUNT: &str = "SELECT xact_commit + xact_rollback AS number FROM pg_stat_database \
                         WHERE datname = current_database()";
    #[derive(QueryableByName)]
    struct Count {
        #[diesel(sql_type = BigInt)]
        number: i64,
    }
    std::thread::sleep(Duration::from_secs(1));
    let count = diesel::sql_query(COUNT).get_result::<Count>(&mut database.connect());
    count.expect("the server replies").number
}

/// A pool whose checkouts wait as long as the tasks do.
fn patient_bb8(database: &Database, size: u32) -> bb8::Pool<AsyncPgConnection> {
    bb8::Pool::builder()
        .max_size(size)
        .test_on_check_out(false)
        .connection_timeout(2 * LONGEST_WAIT)
        .build_unchecked(database.async_manager(RecyclingMethod::Fast))
}

/// What was seen.
struct Report {
    holders: Arc<Holders>,
    /// How many locks each task took in time.
    times: Vec<u64>,
    /// How long the last waits took after the time was over.
    drained: Duration,
    timer: Lateness,
    statements: i64,
    /// The resident memory in kilobytes: before the tasks, when all wait, at the end, and after the tasks.
    memory: [u64; 4],
}

async fn run<P: Pool>(options: Options, pool: &P) -> Report {
    drop(
        pool.check_out()
            .await
            .expect("the server accepts connections"),
    );
    let before = process::resident_memory();
    let is_over = Arc::new(AtomicBool::new(false));
    let timer = tokio::spawn(timer::measure(Arc::clone(&is_over)));
    let holders = Arc::new(Holders::of(options));
    let tasks: Vec<_> = (0..options.tasks)
        .map(|task| {
            let (holders, pool, is_over) =
                (Arc::clone(&holders), pool.clone(), Arc::clone(&is_over));
            tokio::spawn(async move { holders.work(task, &pool, &is_over).await })
        })
        .collect();
    tokio::time::sleep(options.duration / 4).await;
    let all_wait = process::resident_memory();
    tokio::time::sleep(options.duration * 3 / 4).await;
    let end = process::resident_memory();
    is_over.store(true, Ordering::Relaxed);
    let over = Instant::now();
    let mut times = Vec::with_capacity(options.tasks);
    for task in tasks {
        times.push(task.await.expect("no task panics"));
    }
    Report {
        holders,
        times,
        drained: over.elapsed(),
        timer: timer.await.expect("a timer does not panic"),
        statements: 0,
        memory: [before, all_wait, end, process::resident_memory()],
    }
}

impl Report {
    /// Prints it, and returns whether every promise was kept.
    fn print(&self, kind: PoolKind, options: Options) -> bool {
        println!(
            "{}: {} tasks, {} locks, {} connections, {} s, held for {} ms on average",
            kind.name(),
            options.tasks,
            options.locks,
            options.connections,
            options.duration.as_secs(),
            options.hold.as_millis(),
        );
        let served = &self.holders;
        let fewest = self.times.iter().min().copied().unwrap_or(0);
        let most = self.times.iter().max().copied().unwrap_or(0);
        let rate = served.times() as f64 / (options.duration + self.drained).as_secs_f64();
        println!("  locks taken      {} ({rate:.0} a second)", served.times());
        println!(
            "  statements       {:.2} per lock",
            self.statements as f64 / served.times() as f64
        );
        println!("  per task         {fewest} to {most}");
        println!(
            "  waits            median {:.2} s, 99 of 100 {:.2} s, longest {:.2} s",
            served.wait(0.5).as_secs_f64(),
            served.wait(0.99).as_secs_f64(),
            served.wait(1.0).as_secs_f64(),
        );
        println!("  last waits       {:.2} s", self.drained.as_secs_f64());
        println!(
            "  timer of 10 ms   late by {:.1} ms (median), {:.1} ms (99 of 100), {:.1} ms at most",
            self.timer.quantile(0.5).as_secs_f64() * 1e3,
            self.timer.quantile(0.99).as_secs_f64() * 1e3,
            self.timer.quantile(1.0).as_secs_f64() * 1e3,
        );
        let [before, all_wait, end, after] = self.memory.map(|kilobytes| kilobytes as f64 / 1024.0);
        println!(
            "  resident memory  {before:.1} MB before, {all_wait:.1} MB after a quarter of the time, {end:.1} MB at its end, \
             {after:.1} MB after the tasks"
        );
        let mut is_clean = true;
        let mut require = |is_kept: bool, promise: &str| {
            if !is_kept {
                println!("  BROKEN: {promise}");
                is_clean = false;
            }
        };
        require(served.errors() == 0, "no operation fails");
        require(served.doubles() == 0, "a holder is alone");
        require(fewest > 0, "each task is served");
        require(
            served.wait(1.0) < LONGEST_WAIT,
            "no wait takes a minute or longer",
        );
        require(
            self.timer.quantile(0.99) < LATEST_TIMER,
            "a timer is late by less than 50 ms in 99 of 100 cases",
        );
        require(end < all_wait * (1.0 + GROWTH), "the memory does not grow");
        is_clean
    }
}
