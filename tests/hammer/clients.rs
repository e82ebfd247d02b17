//! The client processes, and what they say.

use std::collections::HashMap;
use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a client may take to finish what it is at.
const ENDING: Duration = Duration::from_secs(60);

/// A program to be started, any number of times.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// What its sessions are called.
    name: &'static str,
    code: Code,
    isolation: &'static str,
    arguments: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Code {
    /// A mode of this program.
    Rust(&'static str),
    /// A file in this directory.
    Python(&'static str),
}

impl Program {
    pub(crate) fn new(name: &'static str, code: Code, isolation: &'static str) -> Self {
        Self {
            name,
            code,
            isolation,
            arguments: Vec::new(),
        }
    }

    pub(crate) fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments = arguments.iter().map(|&it| it.to_owned()).collect();
        self
    }

    fn command(&self) -> Command {
        let mut command = match self.code {
            Code::Rust(mode) => {
                let mut command = Command::new(env::current_exe().unwrap());
                command.arg(mode);
                command
            }
            Code::Python(file) => {
                let python = env::var_os("HAMMER_PYTHON")
                    .expect("HAMMER_PYTHON is not set: run scripts/hammer, which sets it");
                let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hammer");
                let mut command = Command::new(python);
                command.arg(directory.join(file));
                command
            }
        };
        let isolation = self.isolation.replace(' ', "\\ ");
        command
            .args(&self.arguments)
            .env("PGAPPNAME", self.name)
            .env(
                "PGOPTIONS",
                format!("-c default_transaction_isolation={isolation}"),
            )
            .env("PGTZ", "Europe/Paris")
            .env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }
}

/// What the clients have said so far, in lines.
#[derive(Debug, Default)]
pub(crate) struct Said {
    /// By id: the slots of `claimed ID SLOT`.
    pub(crate) claimed: HashMap<i64, i16>,
    /// The ids of `released ID`.
    pub(crate) released: Vec<i64>,
    /// The ids of `timed-out ID`, which is what a release or a renewal was told.
    pub(crate) timed_out: Vec<i64>,
    /// The number of lines `refused`.
    pub(crate) refused: usize,
    /// The number of lines `renewed ID`.
    pub(crate) renewed: usize,
    /// The messages of `failed MESSAGE`: a session was lost, in the middle of something.
    pub(crate) failed: Vec<String>,
    /// The sums of `attempted ATTEMPTS GRANTS`.
    pub(crate) attempts: usize,
    pub(crate) grants: usize,
    /// The number of lines `ready`.
    ready: usize,
    /// Lines of no meaning.
    pub(crate) nonsense: Vec<String>,
}

impl Said {
    pub(crate) fn operations(&self) -> usize {
        let releases = self.released.len() + self.timed_out.len();
        self.claimed.len() + self.refused + self.renewed + releases + self.attempts
    }

    fn understand(&mut self, line: &str) -> Option<()> {
        let mut words = line.split(' ');
        match words.next()? {
            "claimed" => {
                let id = words.next()?.parse().ok()?;
                self.claimed.insert(id, words.next()?.parse().ok()?);
            }
            "refused" => self.refused += 1,
            "renewed" => self.renewed += 1,
            "released" => self.released.push(words.next()?.parse().ok()?),
            "timed-out" => self.timed_out.push(words.next()?.parse().ok()?),
            "failed" => self.failed.push(words.collect::<Vec<_>>().join(" ")),
            "attempted" => {
                self.attempts += words.next()?.parse::<usize>().ok()?;
                self.grants += words.next()?.parse::<usize>().ok()?;
            }
            "ready" => self.ready += 1,
            _ => return None,
        }
        Some(())
    }
}

/// Says a line to the process that started this one, in one piece, whenever this is killed.
pub(crate) fn say(line: &str) {
    let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
}

/// Processes that run until they are told to end. Those that are left are killed with the value.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    running: Vec<Client>,
    said: Arc<Mutex<Said>>,
}

#[derive(Debug)]
struct Client {
    program: Program,
    process: Child,
    input: Option<ChildStdin>,
    listener: Option<JoinHandle<()>>,
}

impl Clients {
    pub(crate) fn start(programs: impl IntoIterator<Item = Program>) -> Self {
        let mut clients = Self::default();
        for program in programs {
            let client = Client::start(program, &clients.said);
            clients.running.push(client);
        }
        clients
    }

    pub(crate) fn count(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap()
    }

    /// Kills one of them without a warning, and starts its program again.
    pub(crate) fn kill(&mut self, number: usize) {
        let client = &mut self.running[number];
        client.kill();
        *client = Client::start(client.program.clone(), &self.said);
    }

    /// Waits until all have said that they are ready, and lets them begin.
    pub(crate) fn begin(&mut self) {
        let end = Instant::now() + ENDING;
        while self.said().ready < self.count() {
            assert!(Instant::now() < end, "the clients are not ready");
            thread::sleep(Duration::from_millis(5));
        }
        for client in &mut self.running {
            client.input.as_mut().unwrap().write_all(b"\n").unwrap();
        }
    }

    /// Tells all of them to end, and answers what was said, and how they should not have ended.
    pub(crate) fn end(mut self) -> (Said, Vec<String>) {
        for client in &mut self.running {
            client.input = None;
        }
        let end = Instant::now() + ENDING;
        let ends = self.running.iter_mut();
        let violations = ends.filter_map(|client| client.end(end)).collect();
        (std::mem::take(&mut *self.said()), violations)
    }
}

impl Client {
    fn start(program: Program, said: &Arc<Mutex<Said>>) -> Self {
        let mut command = program.command();
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        let said = Arc::clone(said);
        let listener = thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let mut said = said.lock().unwrap();
                if said.understand(&line).is_none() {
                    said.nonsense.push(line);
                }
            }
        });
        Self {
            program,
            process,
            input,
            listener: Some(listener),
        }
    }

    /// Ends it at once. What it had said before counts.
    fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }

    /// Waits for its end; answers what is wrong with that.
    fn end(&mut self, deadline: Instant) -> Option<String> {
        let name = self.program.name;
        loop {
            match self.process.try_wait().unwrap() {
                Some(status) => {
                    self.kill();
                    return (!status.success()).then(|| format!("a client {name}: {status}"));
                }
                None if Instant::now() > deadline => {
                    self.kill();
                    return Some(format!("a client {name} did not end"));
                }
                None => thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.kill();
    }
}
