//! A PostgreSQL server of its own.

pub(crate) mod binaries;
mod builder;
#[cfg(feature = "tls")]
mod tls;

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub use self::builder::ClusterBuilder;
use crate::endpoint::{Endpoint, cannot};
use crate::watcher::{POLL, Watcher};

/// How long a server may take to be set up, to accept connections, or to stop. An idle machine needs half a second.
const DEADLINE: Duration = Duration::from_secs(120);

/// A throwaway PostgreSQL server.
///
/// It listens only on a Unix socket in its own directory, unless its settings differ, trusts everybody who can reach the
/// socket, and has the superuser `postgres`. PostgreSQL refuses to run as root, so if this process does, the server runs as
/// the user `postgres` or else `nobody`. Dropping the value stops the server and removes its directory.
///
/// ```
/// use diesel::prelude::*;
/// use workbench::{Cluster, StopMode};
///
/// let cluster = Cluster::start();
/// let mut conn = cluster.endpoint("postgres").connect();
/// cluster.restart(StopMode::Immediate);
/// assert!(diesel::sql_query("SELECT 1").execute(&mut conn).is_err());
/// ```
#[derive(Debug)]
#[must_use = "the server is stopped when the value drops"]
pub struct Cluster {
    builder: ClusterBuilder,
    binaries: PathBuf,
    directory: String,
    watcher: Mutex<Watcher>,
}

/// How [`Cluster::stop`] stops the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// Ends all sessions, rolling their transactions back, and writes a checkpoint.
    Fast,
    /// Ends all processes at once, as a crash does. The next start recovers from the write-ahead log.
    Immediate,
}

impl Cluster {
    /// Starts a server with the default settings.
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// Prepares a server with settings of its own.
    pub fn builder() -> ClusterBuilder {
        ClusterBuilder::new()
    }

    /// Creates the data directory with a command of the watcher, and starts the server.
    fn set_up(builder: ClusterBuilder, binaries: PathBuf, command: &str) -> Self {
        let mut watcher = Watcher::start(&binaries, &builder.environment);
        watcher.run(command);
        assert!(
            watcher.succeeds_within(DEADLINE),
            "the directory of a server cannot be made:\n{}",
            watcher.read("setup")
        );
        let directory = watcher.directory().to_owned();
        let builder = builder.setting("unix_socket_directories", &directory);
        let mut cluster = Self {
            builder,
            binaries,
            directory,
            watcher: Mutex::new(watcher),
        };
        cluster.append(&cluster.builder.settings);
        #[cfg(feature = "tls")]
        cluster.set_up_tls();
        let mut port = cluster.choose_port();
        cluster.serve(|| port = cluster.choose_port());
        cluster.builder.port = port;
        cluster
    }

    /// Chooses the port before the first start. Another program may take a free TCP port before the server does.
    fn choose_port(&self) -> u16 {
        if !self.builder.tls {
            return self.builder.port;
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let address = listener.and_then(|listener| listener.local_addr());
        let port = address.unwrap_or_else(cannot("find a free port")).port();
        self.append(&builder::line("port", &port.to_string()));
        port
    }

    /// Appends lines to `postgresql.conf`. The last line for a parameter wins.
    fn append(&self, lines: &str) {
        let path = self.directory().join("data/postgresql.conf");
        let file = fs::OpenOptions::new().append(true).open(path);
        file.and_then(|mut file| file.write_all(lines.as_bytes()))
            .unwrap_or_else(cannot("write the settings"));
    }

    /// Starts a server that was stopped or killed, with the same data and the same [`url`](Self::url), and waits until it
    /// accepts connections.
    pub fn start_again(&self) {
        self.serve(|| ());
    }

    /// Starts the server, and waits until it accepts connections. Calls `before_retry` before each retry.
    fn serve(&self, mut before_retry: impl FnMut()) {
        let mut watcher = self.watcher();
        watcher.run("serve");
        self.wait_until("ready", || {
            if !watcher.is_running() {
                // Retries while processes of a killed server still run, and if another program has taken the port that was
                // free when it was chosen.
                let log = self.end_of_log();
                let is_port_taken = self.builder.tls && log.contains("Address already in use");
                let is_in_use = is_port_taken || log.contains("is still in use");
                assert!(is_in_use, "the server ended:\n{log}");
                before_retry();
                watcher.run("serve");
            }
            // The first line is the pid, and the eighth the state.
            let state = watcher.read("data/postmaster.pid");
            let mut lines = state.lines().map(str::trim);
            lines.next() == Some(watcher.read("pid").trim()) && lines.nth(6) == Some("ready")
        });
    }

    /// Stops the server and waits until it has stopped. Does nothing if it does not run.
    pub fn stop(&self, mode: StopMode) {
        self.end(match mode {
            StopMode::Fast => "INT",
            StopMode::Immediate => "QUIT",
        });
    }

    /// Kills the server's first process, as an out-of-memory killer would. The others end when they notice.
    pub fn kill(&self) {
        self.end("KILL");
    }

    fn end(&self, signal: &str) {
        let mut watcher = self.watcher();
        if watcher.is_running() {
            watcher.signal(signal);
        }
        self.wait_until("down", || !watcher.is_running());
    }

    /// Stops the server and starts it again.
    pub fn restart(&self, mode: StopMode) {
        self.stop(mode);
        self.start_again();
    }

    /// Starts a hot standby of this server, which must be running, and waits until it accepts connections for reading.
    ///
    /// The standby follows this server through its Unix socket by streaming replication, asynchronously, with the same
    /// settings. It is a cluster of its own.
    pub fn standby(&self) -> Self {
        assert!(
            self.binaries.join("pg_basebackup").is_file(),
            "{} has no pg_basebackup, which makes a standby: `--skip standby` leaves out the tests \
             that need one, whose names contain the word",
            self.binaries.display()
        );
        let copy = format!("copy {}", self.url("postgres"));
        Self::set_up(self.builder.clone(), self.binaries.clone(), &copy)
    }

    /// Starts a base backup of this server, which must be running, as another server. Like a restored snapshot or machine
    /// image, that server cannot know that it is a copy.
    pub fn backup(&self) -> Self {
        let backup = format!("backup {}", self.url("postgres"));
        Self::set_up(self.builder.clone(), self.binaries.clone(), &backup)
    }

    /// Stops this server, and starts a new one with its data, upgraded by the `pg_upgrade` in the directory `binaries`.
    pub fn upgraded(&self, binaries: &Path) -> Self {
        self.stop(StopMode::Fast);
        let upgrade = format!(
            "upgrade {} {}/data",
            self.binaries.display(),
            self.directory
        );
        Self::set_up(self.builder.clone(), binaries.to_owned(), &upgrade)
    }

    /// Promotes a standby, which then accepts writes. After [`detach`](Self::detach), later commits of its primary are missing.
    pub fn promote(&self) {
        let mut conn = self.endpoint("postgres").connect();
        let promoted = diesel::select(diesel::dsl::sql::<diesel::sql_types::Bool>(
            "pg_catalog.pg_promote()",
        ));
        let promoted: bool = diesel::RunQueryDsl::get_result(promoted, &mut conn)
            .unwrap_or_else(cannot("promote the standby"));
        assert!(
            promoted,
            "the standby was not promoted:\n{}",
            self.end_of_log()
        );
    }

    /// Cuts a standby off from its primary, so that a promotion loses what the primary commits from now on.
    pub fn detach(&self) {
        use diesel::connection::SimpleConnection;

        let mut conn = self.endpoint("postgres").connect();
        conn.batch_execute("ALTER SYSTEM SET primary_conninfo = ''")
            .and_then(|()| conn.batch_execute("SELECT pg_catalog.pg_reload_conf()"))
            .unwrap_or_else(cannot("cut the standby off"));
        self.wait_until("cut off", || {
            let receives = diesel::dsl::sql::<diesel::sql_types::Bool>(
                "EXISTS (SELECT FROM pg_catalog.pg_stat_wal_receiver)",
            );
            diesel::RunQueryDsl::get_result(diesel::select(receives), &mut conn) == Ok(false)
        });
    }

    fn wait_until(&self, what: &str, mut happened: impl FnMut() -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !happened() {
            if Instant::now() > deadline {
                panic!("the server is not {what}:\n{}", self.end_of_log());
            }
            thread::sleep(POLL);
        }
    }

    /// Where clients connect to a database of this server; `"postgres"` always exists.
    pub fn endpoint(&self, database: &str) -> Endpoint {
        Endpoint::new("postgresql://postgres@localhost")
            .with_address(&self.directory, self.builder.port)
            .with("dbname", database)
    }

    /// The URL of a database of this server; `"postgres"` always exists.
    pub fn url(&self, database: &str) -> String {
        self.endpoint(database).url()
    }

    /// What the server has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory().join("log")).unwrap_or_default()
    }

    /// The operators of [`Database::set_operators`] that statements referred to, each with the
    /// beginning of the statement.
    ///
    /// [`Database::set_operators`]: crate::Database::set_operators
    pub fn found_operators(&self) -> Vec<String> {
        let log = self.log();
        let found = log.split("operator is only a shell: ").skip(1);
        found
            .map(|found| found.lines().take(6).collect::<Vec<_>>().join("\n"))
            .collect()
    }

    fn end_of_log(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// The directory of the Unix socket, and of the directory `data`.
    pub fn directory(&self) -> &Path {
        Path::new(&self.directory)
    }

    /// The directory of the server's programs, for those that come with it, such as `pgbench`.
    pub fn binaries(&self) -> &Path {
        &self.binaries
    }

    fn watcher(&self) -> MutexGuard<'_, Watcher> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
