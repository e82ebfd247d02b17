//! A cluster whose primary Patroni chooses.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Bool;

use crate::cluster::binaries;
use crate::endpoint::{Endpoint, cannot};
use crate::program;
use crate::watcher::{POLL, Watcher, random};

const NODES: usize = 3;
/// Patroni's ttl in seconds: how long the leader key outlives the last renewal by the primary's
/// Patroni. Newer versions accept no shorter one.
const TTL: u32 = 20;
/// How long servers may take to be copied, rewound, promoted, and caught up with.
const DEADLINE: Duration = Duration::from_secs(120);
/// How long a running Patroni may take to reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Three servers, each with its Patroni, an etcd, and `HAProxy`, which routes clients to the server
/// that its Patroni calls the primary.
///
/// Everything listens on free ports of the loopback interface and trusts everybody on this machine.
/// Every program ends, and every directory goes away, with the value, or with the process that
/// started them.
///
/// It needs the programs `patroni`, `etcd` and `haproxy` on the `PATH`, or in `/usr/sbin`.
#[derive(Debug)]
#[must_use = "the servers are stopped when the value drops"]
pub struct Patroni {
    nodes: Vec<Node>,
    proxy: Watcher,
    _store: Watcher,
    ports: [u16; 2],
}

/// A server and its Patroni.
#[derive(Debug)]
struct Node {
    watcher: Watcher,
    /// The port of Patroni's REST API.
    api: u16,
    server: Endpoint,
}

impl Patroni {
    /// How long the leader key outlives the last renewal by the primary's Patroni.
    pub const TTL: Duration = Duration::from_secs(TTL as u64);

    /// Starts everything, and waits until two standbys follow their primary, asynchronously.
    pub fn start() -> Self {
        let ports = free_ports(2 + 2 + 2 * NODES);
        let [store_port, peer_port, first, second, rest @ ..] = &ports[..] else {
            unreachable!("`free_ports` returns as many ports as requested");
        };
        let store = start_store(*store_port, *peer_port);
        let nodes: Vec<_> = rest
            .chunks(2)
            .enumerate()
            .map(|(number, ports)| Node::start(number, ports[0], ports[1], *store_port))
            .collect();
        let proxy = start_proxy([*first, *second], rest);
        let patroni = Self {
            nodes,
            proxy,
            _store: store,
            ports: [*first, *second],
        };
        patroni.wait_for_standbys(false);
        patroni
    }

    /// The primary. The proxy closes sessions on a server whose Patroni no longer replies.
    pub fn endpoint(&self) -> Endpoint {
        endpoint(self.ports[0])
    }

    /// The primary, through a proxy without `on-marked-down shutdown-sessions`: sessions stay on the
    /// old primary until that closes them.
    pub fn lingering_endpoint(&self) -> Endpoint {
        endpoint(self.ports[1])
    }

    /// The number of the node whose Patroni says that it is the primary.
    pub fn primary(&self) -> Option<usize> {
        (0..NODES).find(|node| self.says_primary(*node))
    }

    fn says_primary(&self, node: usize) -> bool {
        matches!(
            self.nodes[node].ask("GET", "/primary", "", REPLY_TIMEOUT),
            Ok((200, _))
        )
    }

    /// Whether a server accepts writes, whatever its Patroni says.
    pub fn takes_writes(&self, node: usize) -> bool {
        let Ok(mut conn) = PgConnection::establish(&self.nodes[node].server.url()) else {
            return false;
        };
        holds(&mut conn, "NOT pg_is_in_recovery()")
    }

    /// Waits until another node than this one is the primary.
    pub fn wait_for_other_primary(&self, node: usize) {
        self.wait_until("primary", || {
            (0..NODES).any(|other| other != node && self.says_primary(other))
        });
    }

    /// Waits until all standbys follow the primary, synchronously or not.
    pub fn wait_for_standbys(&self, is_synchronous: bool) {
        let sync = u8::from(is_synchronous);
        let follow = format!(
            "count(*) = {} AND count(*) FILTER (WHERE sync_state <> 'async') = {sync}
                FROM pg_stat_replication WHERE state = 'streaming'",
            NODES - 1
        );
        self.wait_until("standbys", || {
            let Some(primary) = self.primary() else {
                return false;
            };
            let conn = PgConnection::establish(&self.nodes[primary].server.url());
            // Patroni promotes only the standby that it considers synchronous.
            let knows = (0..NODES)
                .filter(|node| self.nodes[*node].replies("/synchronous"))
                .count();
            knows == usize::from(is_synchronous)
                && conn.is_ok_and(|mut conn| holds(&mut conn, &format!("(SELECT {follow})")))
        });
    }

    /// Sets Patroni's `synchronous_mode`, and waits until the standbys follow in that way.
    pub fn set_synchronous(&self, is_synchronous: bool) {
        let primary = self.primary().expect("a primary runs");
        let setting = format!(r#"{{"synchronous_mode": {is_synchronous}}}"#);
        let reply = self.nodes[primary].ask("PATCH", "/config", &setting, REPLY_TIMEOUT);
        let (status, text) = reply.unwrap_or_else(cannot("set the mode"));
        assert!(status == 200, "the mode is not set: {text}");
        self.wait_for_standbys(is_synchronous);
    }

    /// Asks Patroni to make a standby the primary.
    pub fn switch_over(&self, primary: usize) {
        let request = format!(r#"{{"leader": "node{primary}"}}"#);
        let reply = self.nodes[primary].ask("POST", "/switchover", &request, DEADLINE);
        let (status, text) = reply.unwrap_or_else(cannot("switch over"));
        assert!(status == 200, "no switchover: {text}");
    }

    /// Kills a node's Patroni and the first process of its server.
    pub fn crash(&mut self, node: usize) {
        let server = self.nodes[node].watcher.read("data/postmaster.pid");
        self.nodes[node].watcher.signal("KILL");
        let pid = server.lines().next().expect("the server runs");
        let killed = Command::new("kill").args(["-KILL", pid]).status();
        assert!(
            killed.is_ok_and(|status| status.success()),
            "the server {pid} is not killed"
        );
    }

    /// Starts a node again after a [crash](Self::crash). Its Patroni makes it a standby.
    pub fn start_again(&mut self, node: usize) {
        let watcher = &mut self.nodes[node].watcher;
        let deadline = Instant::now() + program::DEADLINE;
        while watcher.is_running() && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        watcher.run("node");
    }

    /// Suspends a node's Patroni. Its server keeps running.
    pub fn suspend(&mut self, node: usize) {
        self.nodes[node].watcher.signal("STOP");
    }

    /// Resumes a suspended Patroni.
    pub fn resume(&mut self, node: usize) {
        self.nodes[node].watcher.signal("CONT");
    }

    /// A directory that goes away with the value, or with the process.
    pub fn directory(&self) -> &Path {
        Path::new(self.proxy.directory())
    }

    fn wait_until(&self, what: &str, mut happened: impl FnMut() -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !happened() {
            if Instant::now() > deadline {
                let logs = self.nodes.iter().map(|node| end_of(&node.watcher));
                panic!("Patroni has no {what}:\n{}", logs.collect::<String>());
            }
            thread::sleep(10 * POLL);
        }
    }
}

impl Node {
    fn start(number: usize, port: u16, api: u16, store: u16) -> Self {
        let programs = program::directory_of("patroni", "patroni");
        let mut watcher = Watcher::start(&programs, &[]);
        let directory = watcher.directory();
        let binaries = binaries::directory();
        let binaries = binaries.display();
        // The settings of `Cluster`, where Patroni allows them. Not `etcd3`: with etcd's third API,
        // Patroni 3.0.2 was seen to name no synchronous standby for minutes after a switchover
        // ("key updated by someone else"), as https://github.com/patroni/patroni/pull/2783 describes.
        let settings = format!(
            "scope: workbench
name: node{number}
restapi: {{listen: '127.0.0.1:{api}', connect_address: '127.0.0.1:{api}'}}
etcd: {{host: '127.0.0.1:{store}'}}
bootstrap:
  dcs:
    ttl: {TTL}
    loop_wait: 2
    retry_timeout: 5
    postgresql:
      use_pg_rewind: true
      parameters: {{max_connections: 200, wal_keep_size: 128MB}}
  initdb: [encoding: UTF8, locale: C, auth: trust, no-sync]
postgresql:
  listen: 127.0.0.1:{port}
  connect_address: 127.0.0.1:{port}
  data_dir: '{directory}/data'
  bin_dir: '{binaries}'
  pgpass: '{directory}/pgpass'
  remove_data_directory_on_rewind_failure: true
  remove_data_directory_on_diverged_timelines: true
  authentication:
    superuser: {{username: postgres}}
    replication: {{username: postgres}}
  pg_hba: [local all all trust, host all all 127.0.0.1/32 trust,
    host replication all 127.0.0.1/32 trust]
  parameters:
    unix_socket_directories: '{directory}'
    client_connection_check_interval: 1s
    fsync: 'off'
    full_page_writes: 'on'
    shared_buffers: 32MB
    dynamic_shared_memory_type: mmap
    log_line_prefix: '%m [%p] %q%u@%d '
watchdog: {{mode: 'off'}}
"
        );
        fs::write(watcher.path("patroni.yml"), settings)
            .unwrap_or_else(cannot("write the settings"));
        watcher.run("node");
        Self {
            watcher,
            api,
            server: endpoint(port),
        }
    }

    fn replies(&self, path: &str) -> bool {
        matches!(self.ask("GET", path, "", REPLY_TIMEOUT), Ok((200, _)))
    }

    /// The status and the text of a reply of Patroni's REST API.
    fn ask(
        &self,
        method: &str,
        path: &str,
        body: &str,
        limit: Duration,
    ) -> io::Result<(u16, String)> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.api))?;
        stream.set_read_timeout(Some(limit))?;
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}"
        )?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply)?;
        let status = reply.split_whitespace().nth(1);
        let status = status.and_then(|status| status.parse().ok());
        Ok((status.ok_or(io::ErrorKind::InvalidData)?, reply))
    }
}

fn endpoint(port: u16) -> Endpoint {
    Endpoint::new(&format!("postgresql://postgres@127.0.0.1:{port}/postgres"))
}

fn holds(conn: &mut PgConnection, condition: &str) -> bool {
    diesel::select(sql::<Bool>(condition)).get_result(conn) == Ok(true)
}

fn start_store(port: u16, peer: u16) -> Watcher {
    let mut watcher = Watcher::start(&program::directory_of("etcd", "etcd-server"), &[]);
    let settings = format!(
        "name: store
data-dir: '{}/etcd'
listen-client-urls: http://127.0.0.1:{port}
advertise-client-urls: http://127.0.0.1:{port}
listen-peer-urls: http://127.0.0.1:{peer}
initial-advertise-peer-urls: http://127.0.0.1:{peer}
initial-cluster: store=http://127.0.0.1:{peer}
enable-v2: true
",
        watcher.directory()
    );
    fs::write(watcher.path("etcd.yml"), settings).unwrap_or_else(cannot("write the settings"));
    watcher.run("store");
    wait_until_it_listens("etcd", &watcher, port);
    watcher
}

/// Starts `HAProxy`, which asks each Patroni twice a second whether it is the primary.
fn start_proxy(listen: [u16; 2], nodes: &[u16]) -> Watcher {
    let mut watcher = Watcher::start(&program::directory_of("haproxy", "haproxy"), &[]);
    let mut settings = "global
    maxconn 1000
defaults
    mode tcp
    timeout connect 2s
    timeout check 1s
    timeout client 1h
    timeout server 1h
"
    .to_owned();
    for (port, at_the_end) in listen
        .into_iter()
        .zip(["on-marked-down shutdown-sessions", ""])
    {
        settings += &format!(
            "listen primary_{port}
    bind 127.0.0.1:{port}
    option httpchk OPTIONS /primary
    http-check expect status 200
    default-server inter 500ms fall 2 rise 1 {at_the_end}
"
        );
        for (number, ports) in nodes.chunks(2).enumerate() {
            let (server, api) = (ports[0], ports[1]);
            settings += &format!("    server node{number} 127.0.0.1:{server} check port {api}\n");
        }
    }
    fs::write(watcher.path("haproxy.cfg"), settings).unwrap_or_else(cannot("write the settings"));
    watcher.run("proxy");
    wait_until_it_listens("HAProxy", &watcher, listen[1]);
    watcher
}

fn wait_until_it_listens(name: &str, watcher: &Watcher, port: u16) {
    let deadline = Instant::now() + program::DEADLINE;
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        let is_early = watcher.is_running() && Instant::now() < deadline;
        assert!(is_early, "{name} does not listen:\n{}", end_of(watcher));
        thread::sleep(POLL);
    }
}

fn end_of(watcher: &Watcher) -> String {
    let log = watcher.read("log");
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n") + "\n"
}

/// Free ports, below Linux's ephemeral range, so that no connection takes the port of a program that
/// is down for a moment. If another program takes a port first, ours fails and says so.
fn free_ports(number: usize) -> Vec<u16> {
    let mut random = fastrand::Rng::with_seed(random());
    let mut listeners: Vec<(u16, TcpListener)> = Vec::new();
    for _ in 0..10_000 {
        let port = random.u16(10_000..32_000);
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            listeners.push((port, listener));
        }
        if listeners.len() == number {
            break;
        }
    }
    assert!(listeners.len() == number, "there are not enough free ports");
    listeners.into_iter().map(|(port, _)| port).collect()
}
