//! The client processes, and the messages that they write.

use std::collections::HashMap;
use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::clock::Micros;
use crate::role::Role;

/// How long a client may take to finish its current operation.
const ENDING: Duration = Duration::from_secs(60);

/// A program that can be started any number of times.
#[derive(Debug, Clone)]
pub(super) struct Program {
    /// The application name of its sessions.
    name: &'static str,
    language: Language,
    isolation: &'static str,
    role: Role,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Language {
    /// This binary.
    Rust,
    /// A file of `faults/clients/`.
    Python(&'static str),
}

impl Program {
    pub(super) const fn new(
        name: &'static str,
        language: Language,
        isolation: &'static str,
        role: Role,
    ) -> Self {
        Self {
            name,
            language,
            isolation,
            role,
        }
    }

    fn command(&self) -> Command {
        let mut command = match self.language {
            Language::Rust => {
                let program = env::current_exe().expect("this program has a path");
                let mut command = Command::new(program);
                command.args(self.role.arguments());
                command
            }
            Language::Python(file) => {
                let python = env::var_os("FAULTS_PYTHON").expect(
                    "FAULTS_PYTHON is not set: run scripts/faults contention, which sets it",
                );
                let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients");
                let mut command = Command::new(python);
                command.arg(directory.join(file)).arg(self.role.to_json());
                command
            }
        };
        let isolation = self.isolation.replace(' ', "\\ ");
        command
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

/// A message of a client. Each is one line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(super) enum Message {
    /// The client is connected and waits for the signal to begin.
    Ready,
    Claimed {
        id: i64,
        slot: i16,
    },
    /// All slots were taken.
    Refused,
    Renewed {
        id: i64,
    },
    Released {
        id: i64,
    },
    /// A release or a renewal returned that the request had timed out.
    TimedOut {
        id: i64,
    },
    /// A session was lost in the middle of an operation.
    Failed {
        error: String,
    },
    /// A check of a rate limit was allowed at a time of the database clock.
    Allowed {
        at: Micros,
    },
    /// How many attempts a client made at a throttle or a rate limit, and how many of them were granted and committed.
    Attempted {
        attempts: usize,
        grants: usize,
    },
}

/// Writes a message to the process that started this one. A line is written in one piece, so that a kill at any moment
/// leaves whole lines.
pub(super) fn send(message: &Message) {
    let line = serde_json::to_string(message).expect("a message is JSON") + "\n";
    let _ = io::stdout().write_all(line.as_bytes());
}

/// All messages so far.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// The slots of claimed requests by id.
    pub(super) claimed: HashMap<i64, i16>,
    pub(super) released: Vec<i64>,
    pub(super) timed_out: Vec<i64>,
    pub(super) refused: usize,
    pub(super) renewed: usize,
    pub(super) failed: Vec<String>,
    pub(super) attempts: usize,
    pub(super) grants: usize,
    /// The times of the checks of a rate limit that were allowed.
    pub(super) allowed: Vec<Micros>,
    ready: usize,
    /// Lines that are not messages.
    pub(super) unknown: Vec<String>,
}

impl Messages {
    pub(super) fn operations(&self) -> usize {
        let releases = self.released.len() + self.timed_out.len();
        self.claimed.len() + self.refused + self.renewed + releases + self.attempts
    }

    fn add(&mut self, line: String) {
        match serde_json::from_str(&line) {
            Ok(Message::Ready) => self.ready += 1,
            Ok(Message::Claimed { id, slot }) => _ = self.claimed.insert(id, slot),
            Ok(Message::Refused) => self.refused += 1,
            Ok(Message::Renewed { .. }) => self.renewed += 1,
            Ok(Message::Released { id }) => self.released.push(id),
            Ok(Message::TimedOut { id }) => self.timed_out.push(id),
            Ok(Message::Failed { error }) => self.failed.push(error),
            Ok(Message::Allowed { at }) => self.allowed.push(at),
            Ok(Message::Attempted { attempts, grants }) => {
                self.attempts += attempts;
                self.grants += grants;
            }
            Err(_) => self.unknown.push(line),
        }
    }
}

/// Processes that run until they are told to end. Dropping the value kills those that still run.
#[derive(Debug, Default)]
pub(super) struct Clients {
    running: Vec<Client>,
    messages: Arc<Mutex<Messages>>,
}

#[derive(Debug)]
struct Client {
    program: Program,
    process: Child,
    input: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
}

impl Clients {
    pub(super) fn start(programs: impl IntoIterator<Item = Program>) -> Self {
        let mut clients = Self::default();
        for program in programs {
            let client = Client::start(program, &clients.messages);
            clients.running.push(client);
        }
        clients
    }

    pub(super) fn count(&self) -> usize {
        self.running.len()
    }

    fn messages(&self) -> MutexGuard<'_, Messages> {
        lock(&self.messages)
    }

    /// Kills one of them without a warning, and starts its program again.
    pub(super) fn kill(&mut self, number: usize) {
        let client = &mut self.running[number];
        client.kill();
        *client = Client::start(client.program.clone(), &self.messages);
    }

    /// Waits until all are ready, and lets them begin.
    pub(super) fn begin(&mut self) {
        let end = Instant::now() + ENDING;
        while self.messages().ready < self.count() {
            assert!(Instant::now() < end, "the clients are not ready");
            thread::sleep(Duration::from_millis(5));
        }
        for client in &mut self.running {
            let input = client.input.as_mut().expect("nobody has ended the client");
            input.write_all(b"\n").expect("the client reads");
        }
    }

    /// Ends all of them. Returns their messages, and a violation for each client that did not end with success.
    pub(super) fn end(mut self) -> (Messages, Vec<String>) {
        for client in &mut self.running {
            client.input = None;
        }
        let end = Instant::now() + ENDING;
        let ends = self.running.iter_mut();
        let violations = ends.filter_map(|client| client.end(end)).collect();
        (std::mem::take(&mut *self.messages()), violations)
    }
}

impl Client {
    fn start(program: Program, messages: &Arc<Mutex<Messages>>) -> Self {
        let mut command = program.command();
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start a client: {error}: {command:?}"));
        let input = process.stdin.take();
        let output = process.stdout.take().expect("standard output is a pipe");
        let messages = Arc::clone(messages);
        let reader = thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                lock(&messages).add(line);
            }
        });
        Self {
            program,
            process,
            input,
            reader: Some(reader),
        }
    }

    /// Ends it at once. The messages that it had written before count.
    fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }

    /// Waits for its end, and returns a violation unless it ends with success.
    fn end(&mut self, deadline: Instant) -> Option<String> {
        let name = self.program.name;
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => {
                    self.kill();
                    return (!status.success()).then(|| format!("a client {name}: {status}"));
                }
                Ok(None) if Instant::now() <= deadline => thread::sleep(Duration::from_millis(5)),
                result => {
                    self.kill();
                    return Some(format!("a client {name} did not end: {result:?}"));
                }
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.kill();
    }
}

fn lock(messages: &Mutex<Messages>) -> MutexGuard<'_, Messages> {
    messages.lock().unwrap_or_else(PoisonError::into_inner)
}
