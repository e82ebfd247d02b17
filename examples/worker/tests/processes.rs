//! Three processes: one leads, another one after it was killed, and each tick runs once.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use workbench::Database;

const MINUTE: Duration = Duration::from_secs(60);

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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

/// What the instances have said.
struct Said {
    lines: Receiver<(usize, String)>,
    leads: VecDeque<(usize, i64)>,
    /// The attempts of each beat.
    beats: BTreeMap<i64, Vec<i64>>,
}

impl Said {
    /// Listens until it is so, for a minute.
    fn until(&mut self, mut is_so: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + MINUTE;
        while !is_so(self) {
            let rest = end.saturating_duration_since(Instant::now());
            let (number, line) = self
                .lines
                .recv_timeout(rest)
                .expect("it is so within a minute");
            let mut words = line.split(' ');
            let kind = words.next();
            let mut value = || words.next().unwrap().parse::<i64>().unwrap();
            match kind {
                Some("lead") => self.leads.push_back((number, value())),
                Some("beat") => {
                    let tick = value();
                    self.beats.entry(tick).or_default().push(value());
                }
                _ => {}
            }
        }
    }

    fn leader(&mut self) -> (usize, i64) {
        self.until(|said| !said.leads.is_empty());
        self.leads.pop_front().unwrap()
    }

    fn three_more_beats(&mut self) {
        let wanted = self.beats.len() + 3;
        self.until(|said| said.beats.len() >= wanted);
    }
}

#[test]
fn another_one_leads_and_no_tick_is_lost() {
    let database = Database::new();
    let (sender, lines) = channel();
    let mut processes: Vec<_> = (0..3)
        .map(|number| start(number, &database, &sender))
        .collect();
    let mut said = Said {
        lines,
        leads: VecDeque::new(),
        beats: BTreeMap::new(),
    };
    let (leader, first) = said.leader();
    said.three_more_beats();
    processes[leader].0.kill().unwrap();
    let (next, second) = said.leader();
    assert_ne!(next, leader);
    assert!(second > first, "the token grows with each term");
    said.three_more_beats();
    drop(processes);

    for (earlier, later) in said.beats.keys().zip(said.beats.keys().skip(1)) {
        assert_eq!(later - earlier, 1, "a tick is missing after {earlier}");
    }
    for (tick, attempts) in &said.beats {
        // A tick runs again only if its run crashed.
        let expected: Vec<_> = (1..=attempts.len() as i64).collect();
        assert_eq!(*attempts, expected, "{tick}");
    }
}
