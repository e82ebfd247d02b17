//! Measures how long a lock stays with a host that has vanished, and how long a client waits for a server that has vanished,
//! over a network between network namespaces that loses every packet.
//!
//! Run by `scripts/faults dead_host`, which puts this process into a network namespace of its own, that of the server. A
//! second namespace is a router, which loses the packets, and a third is the clients' host.

mod client;
mod network;

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::Integer;
use workbench::Cluster;

use self::network::Network;

/// The longest time that is measured.
const PATIENCE: Duration = Duration::from_secs(30);

/// How much later than its settings promise a loss may be noticed, on a busy machine.
const SLACK: Duration = Duration::from_secs(8);

/// The server ends a session whose host has vanished, and the lock is free: whether the session idles, what it set, and
/// the seconds that this promises.
const SERVER_SIDE: [(&str, &str, Option<u64>); 7] = [
    ("idle", "", None),
    (
        "idle",
        "tcp_keepalives_idle=2 tcp_keepalives_interval=1 tcp_keepalives_count=3",
        Some(5),
    ),
    (
        "idle",
        "tcp_keepalives_idle=5 tcp_keepalives_interval=2 tcp_keepalives_count=3",
        Some(11),
    ),
    (
        "idle",
        "tcp_keepalives_idle=2 tcp_keepalives_interval=1 tcp_keepalives_count=3 tcp_user_timeout=10000",
        Some(10),
    ),
    ("idle", "tcp_user_timeout=4000", None),
    (
        "busy",
        "tcp_keepalives_idle=2 tcp_keepalives_interval=1 tcp_keepalives_count=3",
        None,
    ),
    (
        "busy",
        "tcp_keepalives_idle=2 tcp_keepalives_interval=1 tcp_keepalives_count=3 client_connection_check_interval=1000",
        Some(6),
    ),
];

/// A client finds out that its server has vanished: what it does, its connection string's settings, and the seconds that
/// they promise.
const CLIENT_SIDE: [(&str, &str, Option<u64>); 7] = [
    ("is_held", "", None),
    (
        "is_held",
        "keepalives_idle=2 keepalives_interval=1 keepalives_count=3",
        None,
    ),
    ("is_held", "tcp_user_timeout=4000", Some(4)),
    (
        "release",
        "keepalives_idle=2 keepalives_interval=1 keepalives_count=3 tcp_user_timeout=4000",
        Some(4),
    ),
    ("wait", "tcp_user_timeout=4000", None),
    (
        "wait",
        // Unless its next slice has just been sent, and is not acknowledged.
        "keepalives_idle=2 keepalives_interval=1 keepalives_count=3",
        None,
    ),
    (
        "wait",
        "keepalives_idle=2 keepalives_interval=1 keepalives_count=3 tcp_user_timeout=4000",
        Some(4),
    ),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [what, url, key] = arguments.as_slice() {
        client::run(what, url, key.parse().expect("the key is a number"));
        return ExitCode::SUCCESS;
    }
    let network = Network::make();
    let cluster = server();
    let url = format!(
        "host={} port=5432 user=postgres dbname=postgres",
        network::SERVER
    );
    // The guard of the lock that the waiters wait for.
    let mut observer = PgConnection::establish(&cluster.url("postgres")).expect("the server runs");
    diesel::sql_query("SELECT pg_advisory_lock(0)")
        .execute(&mut observer)
        .expect("nobody else is here");

    let holders: Vec<Client> = (1..)
        .zip(&SERVER_SIDE)
        .map(|(key, (state, settings, _))| {
            let options: Vec<_> = settings
                .split_whitespace()
                .map(|s| format!("-c {s}"))
                .collect();
            Client::start(
                state,
                &format!("{url} options='{}'", options.join(" ")),
                key,
            )
        })
        .collect();
    let askers: Vec<Client> = (101..)
        .zip(&CLIENT_SIDE)
        .map(|(key, (what, settings, _))| {
            let key = if *what == "wait" { 0 } else { key };
            Client::start(what, &format!("{url} {settings}"), key)
        })
        .collect();

    // Until the data that the waiters have sent is acknowledged, which the kernel delays where no reply is due.
    thread::sleep(Duration::from_millis(100));
    network.swallow();
    let vanished = Instant::now();
    let mut askers: Vec<_> = askers.into_iter().map(Client::go).collect();
    let mut freed = vec![None; holders.len()];
    let mut noticed = vec![None; askers.len()];
    while vanished.elapsed() < PATIENCE {
        let held = held(&mut observer);
        for (key, freed) in (1..).zip(&mut freed) {
            if freed.is_none() && !held.contains(&key) {
                *freed = Some(vanished.elapsed());
            }
        }
        for (asker, noticed) in askers.iter_mut().zip(&mut noticed) {
            if noticed.is_none() {
                *noticed = asker
                    .lines
                    .try_recv()
                    .ok()
                    .map(|line| (vanished.elapsed(), line));
            }
        }
        thread::sleep(Duration::from_millis(20));
    }

    let mut late = 0;
    println!("The client's host vanishes: the server frees its lock after");
    for ((state, settings, promise), freed) in SERVER_SIDE.iter().zip(freed) {
        let text = freed.map(|after| format!("{:.1} s", after.as_secs_f64()));
        late += print_row(text, state, settings, is_late(freed, *promise));
    }
    println!("The server's host vanishes: a client knows after");
    for ((what, settings, promise), noticed) in CLIENT_SIDE.iter().zip(noticed) {
        let (after, text) = noticed.unzip();
        late += print_row(text, what, settings, is_late(after, *promise));
    }
    if late == 0 {
        ExitCode::SUCCESS
    } else {
        println!("{late} later than their settings promise");
        ExitCode::FAILURE
    }
}

fn is_late(after: Option<Duration>, promise: Option<u64>) -> bool {
    let bound = promise.map(|seconds| Duration::from_secs(seconds) + SLACK);
    bound.is_some_and(|bound| after.is_none_or(|after| after > bound))
}

fn print_row(after: Option<String>, what: &str, settings: &str, late: bool) -> u32 {
    let after = after.unwrap_or(format!("> {} s", PATIENCE.as_secs()));
    let settings = if settings.is_empty() {
        "defaults"
    } else {
        settings
    };
    let late_text = if late { " LATE" } else { "" };
    println!("  {after:<28} {what:<8} {settings}{late_text}");
    late.into()
}

/// A server that listens in this namespace, and trusts every client.
fn server() -> Cluster {
    let cluster = Cluster::builder()
        .setting("listen_addresses", network::SERVER)
        .start();
    let rules = cluster.data_directory().join("pg_hba.conf");
    OpenOptions::new()
        .append(true)
        .open(&rules)
        .and_then(|mut file| file.write_all(b"host all all 0.0.0.0/0 trust\n"))
        .expect("the server's rules can be written");
    let mut conn = PgConnection::establish(&cluster.url("postgres")).expect("the server runs");
    diesel::sql_query("SELECT pg_reload_conf()")
        .execute(&mut conn)
        .expect("the server reads its rules");
    cluster
}

#[derive(QueryableByName)]
struct Held {
    #[diesel(sql_type = Integer)]
    key: i32,
}

/// The keys of the held locks.
fn held(observer: &mut PgConnection) -> Vec<i32> {
    diesel::sql_query(
        "SELECT objid::int AS key FROM pg_locks WHERE locktype = 'advisory' AND granted",
    )
    .load::<Held>(observer)
    .expect("the server replies")
    .into_iter()
    .map(|held| held.key)
    .collect()
}

/// A process on the clients' host. It ends with its standard input.
struct Client {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Client {
    /// Starts it, and waits until it holds its lock or waits for it.
    fn start(what: &str, url: &str, key: i32) -> Self {
        let mut child = Command::new("ip")
            .args(["netns", "exec", network::CLIENTS])
            .arg(std::env::current_exe().expect("this program has a path"))
            .args([what, url, &key.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ip can be started");
        let stdin = child.stdin.take().expect("standard input is a pipe");
        let stdout = child.stdout.take().expect("standard output is a pipe");
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let ready = lines.recv_timeout(PATIENCE);
        assert_eq!(ready.as_deref(), Ok("ready"), "{what} {url}");
        Self {
            child,
            stdin,
            lines,
        }
    }

    /// Lets it use its server, which has vanished.
    fn go(mut self) -> Self {
        self.stdin.write_all(b"go\n").expect("the client reads");
        self
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
