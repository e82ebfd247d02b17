//! Measures what each operation costs over a slow network. However long replies take, no operation
//! may open a connection per call, and a refusal by the server must be returned as a refusal.

mod many;
mod operations;

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{Error as InterlockError, migrations};
use workbench::{Cluster, Database, RoundTrips};

const USAGE: &str =
    "usage: scripts/campaign network [--round-trip MS] [--runs N] [--only TEXT] | --waiters

  --round-trip MS  only this round trip (default: 0, 5, 20, 60, 120 and 250), with and without
                   jitter, which makes a round trip up to twice as long
  --runs N         measured runs per operation, after three that are not measured (default: 10)
  --only TEXT      only operations whose name contains TEXT
  --waiters        instead, measures how three processes share a lock, and how many round trips
                   thousands of waiters in one process cause

Prints a line for each operation, pool and round trip: new sessions per 100 operations once the pool
is full, round trips per operation including the pool's default test at check-out, and the outcomes.
Exits with 1 if an operation opens more than 2 sessions per 100, or has an unexpected outcome.";

const ROUND_TRIPS: [u64; 6] = [0, 5, 20, 60, 120, 250];

fn main() -> Result<(), Box<dyn Error>> {
    if many::is_process() {
        return many::run_process();
    }
    let (mut round_trips, mut runs, mut only) = (ROUND_TRIPS.to_vec(), 10, String::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--waiters" {
            return many::measure();
        }
        let value = arguments.next().ok_or(USAGE)?;
        match argument.as_str() {
            "--round-trip" => round_trips = vec![value.parse()?],
            "--runs" => runs = value.parse()?,
            "--only" => only = value,
            _ => return Err(USAGE.into()),
        }
    }
    let cluster = Cluster::builder().setting("max_connections", "500").start();
    let database = cluster.database();
    migrations::install(&database.pool(1))?;
    println!("{}", Line::HEAD);
    let (mut lines, mut wrong) = (0, 0);
    for round_trip in round_trips.into_iter().map(Duration::from_millis) {
        for line in measure(&database, round_trip, runs, &only) {
            println!("{line}");
            lines += 1;
            wrong += usize::from(!line.is_right());
        }
    }
    println!("{lines} lines, {wrong} of them wrong");
    if wrong > 0 {
        return Err("an operation depends on the network".into());
    }
    Ok(())
}

/// Measures each group of operations over each pool, with and without jitter, all concurrently.
fn measure(database: &Database, round_trip: Duration, runs: u32, only: &str) -> Vec<Line> {
    let jitters = [Duration::ZERO, round_trip / 2];
    let jitters = &jitters[..if round_trip.is_zero() { 1 } else { 2 }];
    let groups: usize = operations::ALL.iter().map(|(_, groups)| groups.len()).sum();
    let (lines, are_open) = (Mutex::new(Vec::new()), Barrier::new(jitters.len() * groups));
    thread::scope(|scope| {
        let mut number = 0;
        for &jitter in jitters {
            for (pool, groups) in operations::ALL {
                for group in groups {
                    number += 1;
                    let place = Place {
                        pool,
                        round_trip,
                        jitter,
                        runs,
                        only,
                        database,
                        key: format!("{} {number}", round_trip.as_millis()),
                        proxy: RoundTrips::in_front_of(database),
                        are_open: &are_open,
                        lines: &lines,
                    };
                    scope.spawn(move || group(&place));
                }
            }
        }
    });
    let mut lines = lines.into_inner().expect("no operation panics");
    lines.sort_by_key(|line| (line.operation, line.jitter, line.pool));
    lines
}

/// A pool at a round trip, where operations are measured.
pub(crate) struct Place<'a> {
    pool: &'static str,
    pub(crate) round_trip: Duration,
    jitter: Duration,
    runs: u32,
    only: &'a str,
    /// The database past the proxy, without delay.
    pub(crate) database: &'a Database,
    /// Key of all handles, so that places do not interfere.
    pub(crate) key: String,
    pub(crate) proxy: RoundTrips,
    /// Passed when the pools of all places are full.
    are_open: &'a Barrier,
    lines: &'a Mutex<Vec<Line>>,
}

impl Place<'_> {
    /// Slows the network down, after all places have opened their connections: opening is work that
    /// would disturb the measurements of others.
    pub(crate) fn slow_down(&self) {
        self.are_open.wait();
        self.proxy.set_delay(self.round_trip, self.jitter);
    }

    /// A random timeout, long enough for the replies to a check-out and a try.
    pub(crate) fn timeout(&self) -> Duration {
        let slowest = self.round_trip + 2 * self.jitter;
        Duration::from_millis(250) + slowest.mul_f64(3.0 + 3.0 * fastrand::f64())
    }

    /// Measures an operation whose outcome must be one of `right`.
    pub(crate) fn measure(
        &self,
        operation: &'static str,
        right: &'static [&'static str],
        mut run: impl FnMut() -> Result<&'static str, InterlockError>,
        settle: impl Fn(),
    ) {
        if !operation.contains(self.only) {
            return;
        }
        let mut outcomes = BTreeMap::new();
        let (mut sessions, mut round_trips, mut began) = (0, 0, Instant::now());
        for i in 0..3 + self.runs {
            if i == 3 {
                settle();
                (sessions, round_trips) = (self.proxy.connections(), self.proxy.round_trips());
                began = Instant::now();
            }
            let outcome = match run() {
                Ok(outcome) => outcome.to_owned(),
                Err(error) => format!("{error:?}"),
            };
            *outcomes.entry(outcome).or_insert(0_u32) += 1;
        }
        let took = began.elapsed() / self.runs;
        settle();
        let line = Line {
            operation,
            pool: self.pool,
            round_trip: self.round_trip,
            jitter: self.jitter,
            sessions: (self.proxy.connections() - sessions) as f64 * 100.0 / f64::from(self.runs),
            round_trips: (self.proxy.round_trips() - round_trips) as f64 / f64::from(self.runs),
            took,
            is_right: outcomes.keys().all(|it| right.contains(&it.as_str())),
            outcomes,
        };
        let mut lines = self.lines.lock().expect("no operation panics");
        lines.push(line);
    }
}

/// A line of the table.
struct Line {
    operation: &'static str,
    pool: &'static str,
    round_trip: Duration,
    jitter: Duration,
    sessions: f64,
    round_trips: f64,
    took: Duration,
    outcomes: BTreeMap<String, u32>,
    is_right: bool,
}

impl Line {
    const HEAD: &str = "operation                            pool     trip+jitter  sessions/100  trips      ms  outcomes";

    fn is_right(&self) -> bool {
        self.is_right && self.sessions <= 2.0
    }
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let outcomes: Vec<_> = self
            .outcomes
            .iter()
            .map(|(it, n)| format!("{n} {it}"))
            .collect();
        write!(
            f,
            "{:<36} {:<8} {:>5}+{:<5} {:>13.0} {:>6.1} {:>7.0}  {}{}",
            self.operation,
            self.pool,
            self.round_trip.as_millis(),
            2 * self.jitter.as_millis(),
            self.sessions,
            self.round_trips,
            self.took.as_secs_f64() * 1e3,
            outcomes.join(", "),
            if self.is_right() { "" } else { "  <-- WRONG" },
        )
    }
}
