//! The worker processes.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use url::Url;
use workbench::{PgBouncer, PoolMode, RoundTrips};

use super::cleanup::CleanupProcess;
use super::event_log::EventLog;
use super::primary::Primary;
use crate::chance::Chance;
use crate::fault::Fault;
use crate::half::Half;
use crate::options::Options;
use crate::record::Primitive;
use crate::role::Role;
use crate::worker::{Instruction, PoolKind, Settings};

/// How long a worker may take to end at the end of the campaign.
const ENDING: Duration = Duration::from_secs(5);

/// How a worker reaches the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// Over the server's Unix socket.
    Socket,
    /// Over TCP, through a proxy that can lose every packet.
    Network,
    /// The same, to PgBouncer in session mode.
    SessionPooler,
    /// The same, to PgBouncer in transaction mode.
    TransactionPooler,
}

const ROUTES: [Route; 4] = [
    Route::Network,
    Route::SessionPooler,
    Route::TransactionPooler,
    Route::Socket,
];

/// All workers, each at its place.
#[derive(Debug)]
pub(super) struct Workers {
    places: Vec<Place>,
    cleanup: Arc<CleanupProcess>,
    log: Arc<EventLog>,
    random: Mutex<Rng>,
    session_pooler: Mutex<PgBouncer>,
    transaction_pooler: Mutex<PgBouncer>,
    /// The proxy of the second server of the workers.
    second_server: RoundTrips,
}

/// The place of a worker, which is replaced when it is killed.
#[derive(Debug)]
struct Place {
    number: usize,
    half: Half,
    route: Route,
    url: String,
    proxy: Option<RoundTrips>,
    worker: Mutex<Option<Worker>>,
}

#[derive(Debug)]
struct Worker {
    settings: Settings,
    child: Child,
    stdin: ChildStdin,
}

impl Workers {
    pub(super) fn start(
        options: &Options,
        primary: &Primary,
        cleanup: &Arc<CleanupProcess>,
        log: &Arc<EventLog>,
        random: Rng,
    ) -> Self {
        let pooler = |mode, sessions| {
            PgBouncer::in_front_of_socket(primary.socket_directory(), mode, sessions)
        };
        let session_pooler = pooler(PoolMode::Session, 60);
        let transaction_pooler = pooler(PoolMode::Transaction, 6);
        let places = (0..options.workers)
            .map(|number| {
                let half = options.only.unwrap_or(Half::ALL[number / ROUTES.len() % 2]);
                let route = match (half, ROUTES[number % ROUTES.len()]) {
                    // A dropped wait is cancelled, which may crash the pooler.
                    (Half::Asynchronous, Route::SessionPooler)
                        if !PgBouncer::survives_cancellations() =>
                    {
                        Route::Network
                    }
                    // diesel-async refers to every statement by a name.
                    (Half::Asynchronous, Route::TransactionPooler)
                        if !PgBouncer::follows_prepared_statements() =>
                    {
                        Route::Socket
                    }
                    (_, route) => route,
                };
                let target = match route {
                    Route::Socket | Route::Network => primary.url(),
                    Route::SessionPooler => session_pooler.url("postgres"),
                    Route::TransactionPooler => transaction_pooler.url("postgres"),
                };
                let proxy = (route != Route::Socket).then(|| RoundTrips::in_front_of_url(&target));
                let url = proxy.as_ref().map_or(target, RoundTrips::url);
                Place {
                    number,
                    half,
                    route,
                    url: with_settings(&url, half, &format!("worker-{number}")),
                    proxy,
                    worker: Mutex::new(None),
                }
            })
            .collect();
        let workers = Self {
            places,
            cleanup: Arc::clone(cleanup),
            log: Arc::clone(log),
            random: Mutex::new(random),
            session_pooler: Mutex::new(session_pooler),
            transaction_pooler: Mutex::new(transaction_pooler),
            second_server: RoundTrips::in_front_of_url(&primary.url()),
        };
        for number in workers.numbers() {
            workers.start_worker(number);
        }
        workers
    }

    pub(super) fn numbers(&self) -> std::ops::Range<usize> {
        0..self.places.len()
    }

    /// The workers that connect to the server directly.
    pub(super) fn direct(&self) -> impl Iterator<Item = usize> {
        self.places
            .iter()
            .filter(|place| place.route == Route::Socket)
            .map(|place| place.number)
    }

    /// The network to the second server, which can be cut.
    pub(super) fn second_server(&self) -> &RoundTrips {
        &self.second_server
    }

    /// The workers whose network can be cut, with the proxy that cuts it.
    pub(super) fn networks(&self) -> Vec<(usize, &RoundTrips)> {
        self.places
            .iter()
            .filter_map(|place| Some((place.number, place.proxy.as_ref()?)))
            .collect()
    }

    /// The half that this worker uses.
    pub(super) fn half(&self, number: usize) -> Half {
        self.places[number].half
    }

    /// The primitives that this worker uses.
    pub(super) fn primitives(&self, number: usize) -> &'static [Primitive] {
        match self.places[number].route {
            // No primitive that needs a session.
            Route::TransactionPooler => &Primitive::ALL[2..],
            _ => &Primitive::ALL,
        }
    }

    pub(super) fn pooler(&self, mode: PoolMode) -> MutexGuard<'_, PgBouncer> {
        let pooler = match mode {
            PoolMode::Session => &self.session_pooler,
            PoolMode::Transaction => &self.transaction_pooler,
        };
        pooler.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The workers behind that pooler.
    pub(super) fn behind(&self, mode: PoolMode) -> impl Iterator<Item = usize> {
        let wanted = match mode {
            PoolMode::Session => Route::SessionPooler,
            PoolMode::Transaction => Route::TransactionPooler,
        };
        self.places
            .iter()
            .filter(move |place| place.route == wanted)
            .map(|place| place.number)
    }

    /// The workers that can inflict this fault on themselves.
    pub(super) fn able_to_inflict(&self, fault: Fault) -> Vec<usize> {
        let is_able = |worker: &Worker| {
            (worker.settings.impatient || !fault.needs_impatience())
                && (!worker.settings.shared_sessions || !fault.needs_session_locks())
        };
        self.places
            .iter()
            .filter(|place| fault.half().is_none_or(|half| half == place.half))
            .filter(|place| place.worker().as_ref().is_some_and(is_able))
            .map(|place| place.number)
            .collect()
    }

    /// Tells a worker to inflict a fault on itself once, at the next opportunity.
    pub(super) fn inflict(&self, number: usize, fault: Fault) {
        self.tell(number, Instruction::Inflict(fault));
    }

    fn tell(&self, number: usize, instruction: Instruction) {
        if let Some(worker) = &mut *self.places[number].worker() {
            let line = serde_json::to_string(&instruction).expect("an instruction is JSON");
            let _ = worker.stdin.write_all(format!("{line}\n").as_bytes());
        }
    }

    fn start_worker(&self, number: usize) {
        let place = &self.places[number];
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        let shared_sessions = place.route == Route::TransactionPooler;
        let settings = Settings {
            pool: match place.half {
                Half::Blocking => PoolKind::R2d2,
                // A worker that was killed is replaced by one with either pool.
                Half::Asynchronous if random.bool() => PoolKind::Deadpool,
                Half::Asynchronous => PoolKind::Bb8,
            },
            url: place.url.clone(),
            second_server: with_settings(
                &self.second_server.url(),
                place.half,
                &format!("second-server-{number}"),
            ),
            seed: random.u64(..),
            shared_sessions,
            tests_connections: random.one_in(2),
            impatient: !shared_sessions && random.one_in(2),
        };
        drop(random);
        // The worker starts once the cleanup process knows it, and does not start if the campaign ends before.
        let mut child = Command::new("/bin/sh")
            .args(["-c", "read -r go && exec \"$@\"", "worker"])
            .arg(std::env::current_exe().expect("this program has a path"))
            .args(Role::Application(settings.clone()).arguments())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C ends the campaign, which ends the worker.
            .process_group(0)
            .spawn()
            .expect("a worker can be started");
        self.cleanup.add(child.id());
        let mut stdin = child.stdin.take().expect("standard input is a pipe");
        stdin.write_all(b"go\n").expect("the worker reads");
        let stdout = child.stdout.take().expect("standard output is a pipe");
        let log = Arc::clone(&self.log);
        let half = place.half;
        thread::spawn(move || read_records(number, half, stdout, &log));
        let stderr = child.stderr.take().expect("standard error is a pipe");
        thread::spawn(move || print_stderr(number, stderr));
        *place.worker() = Some(Worker {
            settings,
            child,
            stdin,
        });
    }

    /// Kills a worker without a warning, and starts another one in its place.
    pub(super) fn replace(&self, number: usize) {
        self.kill(number);
        self.start_worker(number);
    }

    fn kill(&self, number: usize) {
        if let Some(mut worker) = self.places[number].worker().take() {
            let _ = worker.child.kill();
            self.cleanup.remove(worker.child.id());
            let _ = worker.child.wait();
        }
    }

    /// Sends a signal, such as `STOP`.
    pub(super) fn signal(&self, number: usize, signal: &str) {
        // No other thread waits for the child meanwhile, so its pid is not reused.
        let worker = self.places[number].worker();
        if let Some(worker) = &*worker {
            let _ = Command::new("kill")
                .arg(format!("-{signal}"))
                .arg(worker.child.id().to_string())
                .status();
        }
    }

    /// Whether the process of the worker is alive.
    pub(super) fn is_alive(&self, number: usize) -> bool {
        let mut worker = self.places[number].worker();
        match &mut *worker {
            Some(worker) => matches!(worker.child.try_wait(), Ok(None)),
            None => false,
        }
    }

    /// Lets all workers finish their operations, and rest with their connections open.
    pub(super) fn rest(&self) {
        for number in self.numbers() {
            self.tell(number, Instruction::Rest);
        }
    }

    /// Ends all workers, and kills those that do not end by themselves.
    pub(super) fn end_all(&self) {
        for place in &self.places {
            let Some(Worker {
                mut child, stdin, ..
            }) = place.worker().take()
            else {
                continue;
            };
            drop(stdin);
            let end = Instant::now() + ENDING;
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
                thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            self.cleanup.remove(child.id());
            let _ = child.wait();
        }
    }
}

impl Place {
    fn worker(&self) -> MutexGuard<'_, Option<Worker>> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The URL with a name for the sessions, and with the settings that bound the wait for a dead network.
fn with_settings(url: &str, half: Half, name: &str) -> String {
    let mut url = Url::parse(url).expect("a server's address is a URL");
    let settings = [
        ("application_name", name),
        ("connect_timeout", "2"),
        ("keepalives_idle", "1"),
        ("keepalives_interval", "1"),
    ];
    // libpq and tokio-postgres have different names and units, and tokio-postgres refuses what only libpq knows.
    let settings_of_half = match half {
        Half::Blocking => [("keepalives_count", "2"), ("tcp_user_timeout", "2000")],
        Half::Asynchronous => {
            let known = url.query().unwrap_or_default().split('&');
            let known = known.filter(|pair| !pair.starts_with("gssencmode="));
            url.set_query(Some(&known.collect::<Vec<_>>().join("&")));
            [("keepalives_retries", "2"), ("tcp_user_timeout", "2")]
        }
    };
    url.query_pairs_mut()
        .extend_pairs(settings)
        .extend_pairs(settings_of_half);
    url.into()
}

/// Prints the standard error of a worker without the notices of the server that libpq prints.
fn print_stderr(number: usize, stderr: ChildStderr) {
    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
        let is_notice = ["WARNING:  ", "FATAL:  ", "DETAIL:  ", "HINT:  "]
            .iter()
            .any(|prefix| line.starts_with(prefix));
        if !is_notice && !line.is_empty() {
            eprintln!("worker {number}: {line}");
        }
    }
}

/// Reads the records of a worker until it ends. The last line may be incomplete.
fn read_records(number: usize, half: Half, stdout: ChildStdout, log: &EventLog) {
    let mut stdout = BufReader::new(stdout);
    let mut line = String::new();
    while stdout.read_line(&mut line).is_ok_and(|length| length > 0) {
        let Some(whole) = line.strip_suffix('\n') else {
            break;
        };
        match serde_json::from_str(whole) {
            Ok(record) => log.take(number, half, record),
            Err(error) => log.violation(format!(
                "worker {number} wrote an unknown record: {error}: {whole}"
            )),
        }
        line.clear();
    }
}
