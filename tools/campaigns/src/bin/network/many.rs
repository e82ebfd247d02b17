//! Measures how processes share a lock, and how many round trips thousands of waiters cause.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{AdvisoryLock, deadpool};
use workbench::{Cluster, Database, RoundTrips, block_on, runtime};

const PROCESSES: usize = 3;
const THREADS: usize = 8;
const POOL: u32 = 10;
/// How long the processes work.
const LENGTH: Duration = Duration::from_secs(10);
/// How long each holds the lock.
const HELD: Duration = Duration::from_millis(1);
const URL: &str = "NETWORK_URL";

static LOCK: AdvisoryLock = AdvisoryLock::named("shared");

pub(crate) fn is_process() -> bool {
    std::env::var(URL).is_ok()
}

/// Takes the lock again and again, and prints the length of each wait in microseconds.
pub(crate) fn run_process() -> Result<(), Box<dyn Error>> {
    let pool: diesel_interlock::PgPool = diesel::r2d2::Pool::builder()
        .max_size(POOL)
        .build(diesel::r2d2::ConnectionManager::new(std::env::var(URL)?))?;
    println!("ready");
    // All begin at the same time.
    std::io::stdin().read_exact(&mut [0])?;
    let end = Instant::now() + LENGTH;
    let work = || {
        let mut waits = Vec::new();
        while Instant::now() < end {
            let began = Instant::now();
            let guard = LOCK.acquire(&pool)?;
            waits.push(began.elapsed().as_micros());
            thread::sleep(HELD);
            guard.release()?;
        }
        Ok::<_, diesel_interlock::Error>(waits)
    };
    let waits: Vec<Vec<_>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        let joined = threads
            .into_iter()
            .map(|it| it.join().expect("no thread panics"));
        joined.collect::<Result<_, _>>()
    })?;
    for wait in waits.concat() {
        println!("{wait}");
    }
    Ok(())
}

pub(crate) fn measure() -> Result<(), Box<dyn Error>> {
    let cluster = Cluster::start();
    let database = cluster.database();
    for _ in 0..3 {
        share(&database)?;
    }
    for waiters in [0, 3_000, 10_000] {
        crowd(&database, waiters)?;
    }
    Ok(())
}

/// Prints the shares and waits of processes that compete for one lock.
fn share(database: &Database) -> Result<(), Box<dyn Error>> {
    let start = || {
        Command::new(std::env::current_exe()?)
            .env(URL, database.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
    };
    let mut processes: Vec<Child> = (0..PROCESSES).map(|_| start()).collect::<Result<_, _>>()?;
    let mut outputs = Vec::new();
    for process in &mut processes {
        let mut lines = BufReader::new(process.stdout.take().ok_or("no output")?).lines();
        lines.next().ok_or("a process ended early")??;
        outputs.push(lines);
    }
    for process in &mut processes {
        process.stdin.take().ok_or("no input")?.write_all(b"\n")?;
    }
    let (mut turns, mut waits) = (Vec::new(), Vec::new());
    for (lines, process) in outputs.into_iter().zip(&mut processes) {
        let of_process: Vec<u64> = lines
            .map(|line| Ok(line?.parse()?))
            .collect::<Result<_, Box<dyn Error>>>()?;
        if !process.wait()?.success() {
            return Err("a process failed".into());
        }
        turns.push(of_process.len() as f64);
        waits.extend(of_process);
    }
    waits.sort_unstable();
    let longest = |of: usize| waits[waits.len() - 1 - waits.len() / of] / 1000;
    let all: f64 = turns.iter().sum();
    let shares: Vec<_> = turns.iter().map(|it| format!("{:.3}", it / all)).collect();
    println!(
        "{PROCESSES} processes of {THREADS} threads on a lock that is held for {HELD:?}: shares {}, {:.0} turns a second; half \
         of the waits took {} ms at most, 99 of 100 {}, 999 of 1000 {}, all {}",
        shares.join(" "),
        all / LENGTH.as_secs_f64(),
        longest(2),
        longest(100),
        longest(1000),
        longest(usize::MAX),
    );
    Ok(())
}

/// Prints how many round trips the futures that wait for one lock cause, and how long others wait
/// for a connection of the same pool.
fn crowd(database: &Database, waiters: u64) -> Result<(), Box<dyn Error>> {
    const CROWD: deadpool::AdvisoryLock = deadpool::AdvisoryLock::named("crowd");
    let proxy = RoundTrips::in_front_of(database);
    let pool = proxy.deadpool(POOL);
    let other = database.deadpool(1);
    let guard = block_on(CROWD.acquire(&other))?;
    let tasks: Vec<_> = (0..waiters)
        .map(|_| {
            let pool = pool.clone();
            runtime().spawn(async move { CROWD.acquire(&pool).await?.release().await })
        })
        .collect();
    let came = Instant::now();
    // Wait until each has tried once.
    while proxy.round_trips() < waiters {
        thread::sleep(Duration::from_millis(1));
    }
    let came = came.elapsed();
    // The n-th waiter tries again after n − 1 seconds, in case the oldest is not polled.
    thread::sleep(Duration::from_secs(2));
    let (before, began) = (proxy.round_trips(), Instant::now());
    let (mut others, mut longest) = (0_u64, Duration::ZERO);
    while began.elapsed() < Duration::from_secs(10) {
        let asked = Instant::now();
        drop(block_on(pool.get())?);
        longest = longest.max(asked.elapsed());
        others += 1;
        thread::sleep(Duration::from_millis(5));
    }
    let sent = (proxy.round_trips() - before) as f64 / began.elapsed().as_secs_f64();
    let released = Instant::now();
    block_on(guard.release())?;
    for task in tasks {
        block_on(task)??;
    }
    println!(
        "{waiters} futures of one key: refused within {came:.1?}, then {sent:.0} round trips a second; longest of {others} check-outs \
         by others {longest:.1?}; all had their turn {:.1?} after the release",
        released.elapsed()
    );
    Ok(())
}
