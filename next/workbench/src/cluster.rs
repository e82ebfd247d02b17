//! A PostgreSQL server of its own.

mod binaries;
mod builder;
pub(crate) mod directory;
mod owner;
mod watcher;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::Bool;

pub use self::builder::ClusterBuilder;
pub(crate) use self::watcher::Watcher;
use crate::database::{ConnectionString, Database};

/// How long `initdb` or `pg_basebackup` may take. They take half a second on an idle machine.
const SETTING_UP: Duration = Duration::from_secs(120);

/// How long a server may take until it accepts connections.
const STARTING: Duration = Duration::from_secs(60);

/// How long a server may take to stop.
const STOPPING: Duration = Duration::from_secs(60);

/// A throwaway PostgreSQL server.
///
/// It listens on a Unix socket in its own directory only, trusts everybody who can reach that, and
/// has the superuser `postgres`. When the tests run as root, which PostgreSQL refuses to run as,
/// the server runs as the user `postgres` or else `nobody`.
///
/// # Nothing is left behind
///
/// Dropping the value stops the server and removes its directory. The same happens when the process
/// ends without dropping it: at the end of `main` for a value in a `static`, after a panic,
/// `abort`, Ctrl-C or `kill -9`, and also while the server is still being set up. It takes a shell
/// that outlives the process by a fraction of a second.
///
/// ```
/// use diesel::prelude::*;
/// use workbench::{Cluster, StopMode};
///
/// let cluster = Cluster::start();
/// let mut conn = PgConnection::establish(&cluster.url("postgres")).unwrap();
/// cluster.restart(StopMode::Immediate);
/// assert!(diesel::sql_query("SELECT 1").execute(&mut conn).is_err());
/// ```
#[derive(Debug)]
pub struct Cluster {
    builder: ClusterBuilder,
    binaries: PathBuf,
    directory: PathBuf,
    watcher: Mutex<Watcher>,
}

/// How [`Cluster::stop`] stops the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// Ends all sessions, rolling their transactions back, and writes a checkpoint.
    Fast,
    /// Ends all processes at once, as a crash does. The next start recovers from the write-ahead
    /// log.
    Immediate,
}

impl Cluster {
    /// Starts a server with the default settings, and panics if it cannot. See
    /// [`ClusterBuilder::start`].
    #[must_use = "the server is stopped when the value drops"]
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// Prepares a server with settings of its own.
    pub fn builder() -> ClusterBuilder {
        ClusterBuilder::new()
    }

    fn create(builder: ClusterBuilder) -> Self {
        let cluster = Self::watched(builder, binaries::directory());
        cluster.set_up(&cluster.builder.creation(), "initdb");
        cluster.configure();
        cluster.start_again();
        cluster
    }

    /// A cluster whose directory is still empty.
    fn watched(builder: ClusterBuilder, binaries: PathBuf) -> Self {
        let watcher = Watcher::start(&binaries, builder.environment());
        let directory = watcher.directory().to_owned();
        Self {
            builder,
            binaries,
            directory,
            watcher: Mutex::new(watcher),
        }
    }

    /// Runs the program that makes the data directory.
    fn set_up(&self, command: &str, program: &str) {
        let mut watcher = self.watcher();
        watcher.run(command);
        let status = watcher.exit_within(SETTING_UP);
        let output = || fs::read_to_string(self.directory.join("setup")).unwrap_or_default();
        match status {
            Some(0) => {}
            Some(status) => panic!(
                "{}/{program} failed with status {status}:\n{}",
                self.binaries.display(),
                output()
            ),
            None => panic!(
                "{}/{program} is not done after {SETTING_UP:?}:\n{}",
                self.binaries.display(),
                output()
            ),
        }
    }

    /// Appends the settings to `postgresql.conf`.
    fn configure(&self) {
        let path = self.data_directory().join("postgresql.conf");
        let socket_directory = self
            .directory
            .to_str()
            .expect("the path of a new directory is UTF-8");
        let lines =
            builder::line("unix_socket_directories", socket_directory) + &self.builder.lines();
        let written = fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(lines.as_bytes()));
        written.unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    }

    /// Starts a server that was stopped, with the same data and the same [`url`](Self::url), and
    /// waits until it accepts connections.
    ///
    /// # Panics
    ///
    /// If the server runs, or does not start; the message has the end of its log.
    pub fn start_again(&self) {
        let mut watcher = self.watcher();
        watcher.run("serve");
        let deadline = Instant::now() + STARTING;
        while !self.accepts_connections() {
            if let Some(status) = watcher.exit_within(Duration::from_millis(5)) {
                // The processes of a server that was killed end when they notice it.
                if self.end_of_log().contains("is still in use") && Instant::now() < deadline {
                    thread::sleep(Duration::from_millis(50));
                    watcher.run("serve");
                    continue;
                }
                panic!(
                    "{}/postgres ended with status {status}:\n{}",
                    self.binaries.display(),
                    self.end_of_log()
                );
            }
            assert!(
                Instant::now() < deadline,
                "{}/postgres accepts no connections after {STARTING:?}:\n{}",
                self.binaries.display(),
                self.end_of_log()
            );
        }
    }

    /// Whether the running server says so in the last line of its `postmaster.pid`.
    fn accepts_connections(&self) -> bool {
        let pid = fs::read_to_string(self.directory.join("pid")).unwrap_or_default();
        let state =
            fs::read_to_string(self.data_directory().join("postmaster.pid")).unwrap_or_default();
        let mut lines = state.lines().map(str::trim);
        lines.next() == Some(pid.trim()) && lines.nth(6) == Some("ready")
    }

    /// Stops the server and waits until it has stopped. Does nothing if it does not run.
    ///
    /// # Panics
    ///
    /// If the server still runs after a minute.
    pub fn stop(&self, mode: StopMode) {
        let mut watcher = self.watcher();
        if !watcher.is_running() {
            return;
        }
        watcher.signal(match mode {
            StopMode::Fast => "INT",
            StopMode::Immediate => "QUIT",
        });
        if watcher.exit_within(STOPPING).is_none() {
            panic!(
                "{}/postgres still runs after {STOPPING:?}:\n{}",
                self.binaries.display(),
                self.end_of_log()
            );
        }
    }

    /// Stops the server and starts it again: [`stop`](Self::stop), then
    /// [`start_again`](Self::start_again).
    pub fn restart(&self, mode: StopMode) {
        self.stop(mode);
        self.start_again();
    }

    /// Starts a hot standby of this server, which must be running, and waits until it accepts
    /// connections for reading.
    ///
    /// The standby follows this server through its Unix socket by streaming replication,
    /// asynchronously, with the same settings. It is a cluster of its own: drop it first, or
    /// stop it, where the end of this one should not show in its log.
    ///
    /// # Panics
    ///
    /// If `pg_basebackup` is not installed beside the server's programs, or if the standby does not
    /// start.
    #[must_use = "the standby is stopped when the value drops"]
    pub fn standby(&self) -> Self {
        let standby = Self::watched(self.builder.clone(), self.binaries.clone());
        standby.set_up(&format!("copy {}", self.server_url()), "pg_basebackup");
        standby.configure();
        standby.start_again();
        standby
    }

    /// Makes a standby a primary, and waits until it is one.
    ///
    /// # Panics
    ///
    /// If this is not a running standby.
    pub fn promote(&self) {
        let mut conn = self.connect("postgres");
        let mut ask = |question| {
            diesel::select(diesel::dsl::sql::<Bool>(question)).get_result::<bool>(&mut conn)
        };
        // Not the form that waits: its own snapshot may conflict with what is still to be replayed.
        let promoted = ask("pg_promote(false)");
        let deadline = Instant::now() + STARTING;
        while promoted == Ok(true) && ask("pg_is_in_recovery()") != Ok(false) {
            assert!(
                Instant::now() < deadline,
                "the standby is not promoted after {STARTING:?}:\n{}",
                self.end_of_log()
            );
            thread::sleep(Duration::from_millis(5));
        }
        assert!(
            promoted == Ok(true),
            "the standby is not promoted: {promoted:?}\n{}",
            self.end_of_log()
        );
    }

    /// A connection string for a database of this server, `"postgres"` for one that always exists.
    ///
    /// It is a libpq URL, such as
    /// `postgresql://postgres@%2Ftmp%2Finterlock-0123456789abcdef:5432/postgres`, with the
    /// socket's directory as the host.
    pub fn url(&self, database: &str) -> String {
        ConnectionString::new(&self.server_url())
            .with_database(database)
            .to_string()
    }

    /// Where its socket is.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The number in the name of its socket.
    pub(crate) fn port(&self) -> &str {
        self.builder.value("port").expect("there is a default")
    }

    fn server_url(&self) -> String {
        let directory = self
            .directory
            .to_str()
            .expect("the path of a new directory is UTF-8");
        let port = self.port();
        format!(
            "postgresql://postgres@{}:{port}",
            crate::database::percent_encoded(directory)
        )
    }

    fn connect(&self, database: &str) -> PgConnection {
        PgConnection::establish(&self.url(database)).unwrap_or_else(|error| {
            panic!(
                "cannot connect to {}: {error}\n{}",
                self.url(database),
                self.end_of_log()
            )
        })
    }

    /// Makes an empty database on this server. See [`Database::new`].
    pub fn database(&self) -> Database {
        Database::on_cluster(self)
    }

    /// What the server has logged so far.
    pub fn log(&self) -> String {
        let bytes = fs::read(self.directory.join("log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn end_of_log(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// The data directory, with `postgresql.conf` and `postmaster.pid`.
    pub fn data_directory(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// The directory of the server's programs, for those that come with it, such as `pgbench`.
    pub fn binaries(&self) -> &Path {
        &self.binaries
    }

    /// The directory of the Unix socket, for clients that take a host.
    pub fn socket_directory(&self) -> &Path {
        &self.directory
    }

    fn watcher(&self) -> MutexGuard<'_, Watcher> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
