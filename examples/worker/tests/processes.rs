//! After a kill or a SIGTERM of the leader, another process leads, and each tick runs once.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use workbench::Database;

const MINUTE: Duration = Duration::from_secs(60);

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    /// Sends SIGTERM, and waits for the end of the process.
    fn terminate(&mut self) -> ExitStatus {
        let pid = self.0.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(sent.unwrap().success());
        let end = Instant::now() + MINUTE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "it does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Starts an instance, whose lines arrive with its number.
fn start(number: usize, database: &Database, lines: &Sender<(usize, String)>) -> Process {
    let mut process = Command::new(env!("CARGO_BIN_EXE_worker"))
        .arg(format!("worker-{number}"))
        .env("DATABASE_URL", database.url())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(process.stdout.take().unwrap());
    let lines = lines.clone();
    thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            let _ = lines.send((number, line));
        }
    });
    Process(process)
}

/// The lines that the instances have printed.
struct Output {
    lines: Receiver<(usize, String)>,
    leads: VecDeque<(usize, i64)>,
    /// The instances and the attempts of each beat.
    beats: BTreeMap<i64, Vec<(usize, i64)>>,
    imports: Vec<i64>,
    imported: Vec<i64>,
}

impl Output {
    fn new(lines: Receiver<(usize, String)>) -> Self {
        Self {
            lines,
            leads: VecDeque::new(),
            beats: BTreeMap::new(),
            imports: Vec::new(),
            imported: Vec::new(),
        }
    }

    /// Reads lines until the condition holds, for at most a minute.
    fn wait_until(&mut self, mut is_met: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + MINUTE;
        while !is_met(self) {
            let rest = end.saturating_duration_since(Instant::now());
            let (number, line) = self
                .lines
                .recv_timeout(rest)
                .expect("the condition holds within a minute");
            let mut words = line.split(' ');
            let kind = words.next();
            let mut value = || words.next().unwrap().parse::<i64>().unwrap();
            match kind {
                Some("lead") => self.leads.push_back((number, value())),
                Some("beat") => {
                    let tick = value();
                    self.beats.entry(tick).or_default().push((number, value()));
                }
                Some("import") => self.imports.push(value()),
                Some("imported") => self.imported.push(value()),
                _ => {}
            }
        }
    }

    fn wait_for_leader(&mut self) -> (usize, i64) {
        self.wait_until(|output| !output.leads.is_empty());
        self.leads.pop_front().unwrap()
    }

    fn wait_for_three_beats(&mut self) {
        let wanted = self.beats.len() + 3;
        self.wait_until(|output| output.beats.len() >= wanted);
    }

    /// No tick is missing. Returns the ticks that did not run just once.
    fn beats_again(&self) -> Vec<&[(usize, i64)]> {
        for (earlier, later) in self.beats.keys().zip(self.beats.keys().skip(1)) {
            assert_eq!(later - earlier, 1, "a tick is missing after {earlier}");
        }
        let runs = self.beats.values().map(Vec::as_slice);
        runs.filter(|runs| !matches!(runs, [(_, 1)])).collect()
    }
}

#[test]
fn after_a_crash_another_one_leads_and_no_tick_is_lost() {
    let database = Database::new();
    let (sender, lines) = channel();
    let mut processes: Vec<_> = (0..3)
        .map(|number| start(number, &database, &sender))
        .collect();
    let mut output = Output::new(lines);
    let (leader, first) = output.wait_for_leader();
    output.wait_for_three_beats();
    processes[leader].0.kill().unwrap();
    let (next, second) = output.wait_for_leader();
    assert_ne!(next, leader);
    assert!(second > first, "the token grows with each term");
    output.wait_for_three_beats();
    drop(processes);

    // Only ticks that the killed process had begun ran again, whether it had printed them or not.
    match output.beats_again()[..] {
        [] | [[(_, 2)]] => {}
        [[(killed, 1), (other, 2)]] => assert!(*killed == leader && *other != leader),
        ref again => panic!("{leader} was killed: {again:?}"),
    }
}

#[test]
fn a_terminated_instance_leaves_nothing_behind() {
    let database = Database::new();
    let (sender, lines) = channel();
    let mut processes: Vec<_> = (0..2)
        .map(|number| start(number, &database, &sender))
        .collect();
    let mut output = Output::new(lines);
    let (leader, first) = output.wait_for_leader();
    output.wait_for_three_beats();
    // A job that took longer than the timeout has kept its permit.
    output.wait_until(|output| !output.imported.is_empty());
    assert_eq!(output.imported[0], output.imports[0]);

    assert!(processes[leader].terminate().success());
    let (next, second) = output.wait_for_leader();
    assert!(next != leader && second > first);
    output.wait_for_three_beats();
    assert!(processes[next].terminate().success());

    assert_eq!(output.beats_again(), [] as [&[(usize, i64)]; 0]);
    let count = |what: &str| -> i64 {
        let count = sql::<BigInt>(&format!("(SELECT count(*) FROM resource_control.{what})"));
        diesel::select(count)
            .get_result(&mut database.connect())
            .unwrap()
    };
    assert_eq!(count("service_request WHERE completed_at IS NULL"), 0);
    assert_eq!(count("schedule WHERE expires_at IS NOT NULL"), 0);
}
