//! A pooler between clients and a server.

use std::env;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use diesel::connection::{Connection, SimpleConnection};
use diesel::pg::PgConnection;

use crate::cluster::{Cluster, Watcher};

/// How long a pooler may take to listen.
const STARTING: Duration = Duration::from_secs(10);

/// What a client of the pooler has a server session for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolMode {
    /// As long as it is connected.
    Session,
    /// One transaction.
    Transaction,
}

/// `PgBouncer` in front of a [`Cluster`]. It goes away with the value, or with the process that
/// started it.
///
/// It needs the program `pgbouncer` on the `PATH`, or in `/usr/sbin`, where Debian has it.
#[derive(Debug)]
pub struct PgBouncer {
    watcher: Watcher,
}

impl PgBouncer {
    /// Starts a pooler with at most `sessions` server sessions for each database.
    ///
    /// # Panics
    ///
    /// If PgBouncer is not installed, or does not accept connections.
    pub fn in_front_of(cluster: &Cluster, mode: PoolMode, sessions: u32) -> Self {
        Self::start(cluster.directory(), cluster.port(), mode, sessions)
    }

    /// As [`in_front_of`](Self::in_front_of), for a server whose Unix socket is in this directory, on port 5432. Another
    /// server may take its place there.
    ///
    /// # Panics
    ///
    /// If PgBouncer is not installed, or does not accept connections.
    pub fn in_front_of_socket(directory: &Path, mode: PoolMode, sessions: u32) -> Self {
        Self::start(directory, "5432", mode, sessions)
    }

    fn start(server: &Path, port: &str, mode: PoolMode, sessions: u32) -> Self {
        let binaries = binaries();
        let mut watcher = Watcher::start(&binaries, &[]);
        let mode = match mode {
            PoolMode::Session => "session",
            PoolMode::Transaction => "transaction",
        };
        let directory = watcher.directory().display();
        let mut settings = format!(
            "[databases]\n\
             * = host={} port={port} user=postgres\n\
             [pgbouncer]\n\
             listen_addr =\n\
             listen_port = 6432\n\
             unix_socket_dir = {directory}\n\
             auth_type = any\n\
             pool_mode = {mode}\n\
             default_pool_size = {sessions}\n\
             max_client_conn = 500\n\
             server_login_retry = 0.2\n",
            server.display(),
        );
        if Self::follows_prepared_statements() {
            settings.push_str("max_prepared_statements = 200\n");
        }
        let file = watcher.directory().join("pgbouncer.ini");
        fs::write(&file, settings)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
        watcher.run("pool");
        let pooler = Self { watcher };
        pooler.wait_until_it_serves();
        pooler
    }

    /// Kills the pooler, as a crash does, and starts it again at the same address.
    ///
    /// # Panics
    ///
    /// If it does not end, or does not listen again.
    pub fn crash(&mut self) {
        self.watcher.signal("KILL");
        assert!(
            self.watcher.exit_within(STARTING).is_some(),
            "PgBouncer cannot be killed"
        );
        self.watcher.run("pool");
        let deadline = Instant::now() + STARTING;
        // A connection to the server is not tried, because the server may be down.
        while UnixStream::connect(self.watcher.directory().join(".s.PGSQL.6432")).is_err() {
            assert!(
                Instant::now() < deadline,
                "PgBouncer does not listen again\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets it read its settings again, as the command `RELOAD` does.
    pub fn reload(&mut self) {
        self.watcher.signal("HUP");
    }

    /// Lets it give out no more server sessions, as the command `PAUSE` does.
    pub fn pause(&mut self) {
        self.watcher.signal("USR1");
    }

    /// Ends a [`pause`](Self::pause), as the command `RESUME` does.
    pub fn resume(&mut self) {
        self.watcher.signal("USR2");
    }

    fn log(&self) -> String {
        fs::read_to_string(self.watcher.directory().join("log")).unwrap_or_default()
    }

    /// Whether the program is installed.
    pub fn is_installed() -> bool {
        find().is_some()
    }

    /// Whether a client may name its prepared statements in transaction mode: since version 1.21.
    ///
    /// # Panics
    ///
    /// If the program is not installed, or does not tell its version.
    pub fn follows_prepared_statements() -> bool {
        Self::version() >= (1, 21)
    }

    /// Whether it survives a client that cancels a query and does not wait until the pooler has passed that on, as
    /// tokio-postgres does. Versions 1.18 to 1.20.0 may end with `bad client state` or `server in bad state`.
    ///
    /// # Panics
    ///
    /// If the program is not installed, or does not tell its version.
    pub fn survives_cancellations() -> bool {
        let version = Self::version();
        !((1, 18)..(1, 21)).contains(&version)
    }

    fn version() -> (u32, u32) {
        let output = Command::new(binaries().join("pgbouncer"))
            .arg("--version")
            .output()
            .expect("PgBouncer can be run");
        let text = String::from_utf8_lossy(&output.stdout);
        version(&text).unwrap_or_else(|| panic!("what version is this? {text}"))
    }

    /// A connection string for a database of the server behind it.
    pub fn url(&self, database: &str) -> String {
        let directory = self.watcher.directory().to_str().expect("a path in UTF-8");
        format!(
            "postgresql://postgres@{}:6432/{}",
            crate::database::percent_encoded(directory),
            crate::database::percent_encoded(database)
        )
    }

    fn wait_until_it_serves(&self) {
        let deadline = Instant::now() + STARTING;
        loop {
            let tried = PgConnection::establish(&self.url("postgres"))
                .map_err(|error| error.to_string())
                .and_then(|mut conn| {
                    conn.batch_execute("SELECT 1")
                        .map_err(|error| error.to_string())
                });
            let Err(error) = tried else { return };
            if Instant::now() > deadline {
                panic!(
                    "PgBouncer does not serve connections: {error}\n{}",
                    self.log()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn binaries() -> PathBuf {
    find().expect("PgBouncer is not installed: install the package `pgbouncer`")
}

/// The first two numbers of `PgBouncer 1.18.0`.
fn version(text: &str) -> Option<(u32, u32)> {
    let numbers = text.strip_prefix("PgBouncer ")?.lines().next()?;
    let mut numbers = numbers.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

fn find() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .find(|directory| has_pooler(directory))
}

fn has_pooler(directory: &Path) -> bool {
    directory.join("pgbouncer").is_file()
}
