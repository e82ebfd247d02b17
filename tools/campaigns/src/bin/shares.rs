//! Measures how evenly competing processes share a semaphore. Slots have no queue on the server, so
//! a process that wakes its own waiters could starve other processes. The figures depend on the
//! machine, so nothing is checked.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_interlock::{PgPool, Semaphore, migrations};
use workbench::{Cluster, Endpoint};

const USAGE: &str = "usage: scripts/campaign shares [--processes N] [--threads N] [--slots N] [--job MICROSECONDS] [--seconds S]

  --processes N       competing processes (default: 3)
  --threads N         threads per process; its r2d2 pool has two connections more (default: 8)
  --slots N           slots of the semaphore (default: 1)
  --job MICROSECONDS  how long a slot is held (default: 1000)
  --seconds S         how long they compete (default: 10)

Prints the grants per second of one process alone and of all processes together, then the share of
each process and the longest wait of its threads.";

#[derive(Clone, Copy)]
struct Setting {
    processes: u32,
    threads: u32,
    slots: u32,
    job: Duration,
    seconds: Duration,
}

/// The result of a process or thread.
struct Got {
    grants: u64,
    longest: Duration,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut setting = Setting {
        processes: 3,
        threads: 8,
        slots: 1,
        job: Duration::from_millis(1),
        seconds: Duration::from_secs(10),
    };
    let mut url = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or(USAGE)?;
        match argument.as_str() {
            "--processes" => setting.processes = value.parse()?,
            "--threads" => setting.threads = value.parse()?,
            "--slots" => setting.slots = value.parse()?,
            "--job" => setting.job = Duration::from_micros(value.parse()?),
            "--seconds" => setting.seconds = Duration::from_secs(value.parse()?),
            // Internal: this is one of the competing processes.
            "--url" => url = Some(value),
            _ => return Err(USAGE.into()),
        }
    }
    if let Some(url) = url {
        return compete(&url, setting);
    }
    let cluster = Cluster::builder().setting("max_connections", "500").start();
    let database = cluster.database();
    migrations::install(&database.pool(1))?;
    let alone = measure(&database.url(), 1, setting)?;
    let all = measure(&database.url(), setting.processes, setting)?;
    let per_second = |all: &[Got]| {
        all.iter().map(|got| got.grants).sum::<u64>() as f64 / setting.seconds.as_secs_f64()
    };
    println!(
        "one process alone: {:.0} grants a second, longest wait {} ms",
        per_second(&alone),
        alone[0].longest.as_millis()
    );
    println!(
        "{} processes: {:.0} grants a second, {:+.1} %",
        setting.processes,
        per_second(&all),
        (per_second(&all) / per_second(&alone) - 1.0) * 100.0
    );
    let total = all.iter().map(|got| got.grants).sum::<u64>().max(1) as f64;
    for got in &all {
        println!(
            "share {:.3}, longest wait {} ms",
            got.grants as f64 / total,
            got.longest.as_millis()
        );
    }
    Ok(())
}

/// Starts processes, lets them compete once all are connected, and returns their results.
fn measure(url: &str, processes: u32, setting: Setting) -> Result<Vec<Got>, Box<dyn Error>> {
    let mut all = Vec::new();
    for _ in 0..processes {
        all.push(Competitor::start(url, setting)?);
    }
    for competitor in &mut all {
        competitor.read_line()?;
    }
    for competitor in &mut all {
        competitor.stdin.write_all(b"go\n")?;
    }
    let mut got = Vec::new();
    for mut competitor in all {
        let line = competitor.read_line()?;
        let (grants, longest) = line.trim().split_once(' ').ok_or("a process failed")?;
        got.push(Got {
            grants: grants.parse()?,
            longest: Duration::from_micros(longest.parse()?),
        });
        competitor.child.wait()?;
    }
    Ok(got)
}

struct Competitor {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Competitor {
    fn start(url: &str, setting: Setting) -> Result<Self, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--url", url])
            .args(["--threads", &setting.threads.to_string()])
            .args(["--slots", &setting.slots.to_string()])
            .args(["--job", &setting.job.as_micros().to_string()])
            .args(["--seconds", &setting.seconds.as_secs().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().ok_or("stdin is not piped")?;
        let stdout = BufReader::new(child.stdout.take().ok_or("stdout is not piped")?);
        Ok(Self {
            child,
            stdin,
            stdout,
        })
    }

    fn read_line(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        Ok(line)
    }
}

/// Competes for slots, then prints the number of grants and the longest wait in microseconds.
fn compete(url: &str, setting: Setting) -> Result<(), Box<dyn Error>> {
    let size = setting.threads + 2;
    let pool = Endpoint::new(url).pool(size);
    let mut all = Vec::new();
    for _ in 0..size {
        all.push(pool.get()?);
    }
    for conn in &mut all {
        conn.batch_execute("SELECT 1")?;
    }
    drop(all);
    println!("connected");
    std::io::stdin().read_line(&mut String::new())?;
    let end = Instant::now() + setting.seconds;
    let got: Vec<Got> = thread::scope(|scope| {
        let threads = (0..setting.threads).map(|_| scope.spawn(|| take(&pool, setting, end)));
        let threads: Vec<_> = threads.collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|got| got.expect("no thread panics")).collect()
    });
    let grants: u64 = got.iter().map(|got| got.grants).sum();
    let longest = got.iter().map(|got| got.longest).max().unwrap_or_default();
    println!("{grants} {}", longest.as_micros());
    Ok(())
}

fn take(pool: &PgPool, setting: Setting, end: Instant) -> Got {
    let semaphore = Semaphore::named("shares", setting.slots, Duration::from_secs(60));
    let mut got = Got {
        grants: 0,
        longest: Duration::ZERO,
    };
    while Instant::now() < end {
        let began = Instant::now();
        let rest = end - began;
        let admission = semaphore
            .acquire_timeout(pool, rest)
            .expect("the server runs");
        // Also counts a wait that ended without a slot.
        got.longest = got.longest.max(began.elapsed());
        if let Some(permit) = admission.admitted() {
            thread::sleep(setting.job);
            permit.release().expect("the permit has not expired");
            got.grants += 1;
        }
    }
    got
}
