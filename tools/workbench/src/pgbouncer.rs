//! A pooler between clients and a server.

use std::fs;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::Command;

use crate::endpoint::{Endpoint, cannot};
use crate::program;
use crate::watcher::Watcher;

/// How long the pooler assigns a server session to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolMode {
    /// As long as it is connected.
    Session,
    /// One transaction.
    Transaction,
    /// One statement: the pooler refuses `BEGIN`.
    Statement,
}

/// `PgBouncer` in front of a database. It goes away with the value, or with the process that started it. Connections and
/// pools through it are those of its [`Endpoint`].
///
/// It needs the program `pgbouncer` on the `PATH`, or in `/usr/sbin`, where Debian has it.
#[derive(Debug)]
#[must_use = "the pooler ends when the value drops"]
pub struct PgBouncer {
    _watcher: Watcher,
    endpoint: Endpoint,
}

impl PgBouncer {
    /// Starts a pooler with at most `sessions` server sessions. Clients may also use named prepared statements in
    /// transaction mode if the pooler [follows them](Self::follows_prepared_statements).
    pub fn in_front_of(server: &Endpoint, mode: PoolMode, sessions: u32) -> Self {
        Self::with_settings(server, mode, sessions, "")
    }

    /// The same with more settings: lines such as `server_round_robin = 1`.
    pub fn with_settings(server: &Endpoint, mode: PoolMode, sessions: u32, more: &str) -> Self {
        let mut watcher = Watcher::start(&binaries(), &[]);
        let directory = watcher.directory();
        let endpoint = server.clone().with_address(directory, 6432);
        let mode = match mode {
            PoolMode::Session => "session",
            PoolMode::Transaction => "transaction",
            PoolMode::Statement => "statement",
        };
        let (host, port) = server.address();
        let user = server.user();
        // Earlier versions reject the setting.
        let follows = Self::follows_prepared_statements();
        let prepared = if follows {
            "max_prepared_statements = 200"
        } else {
            ""
        };
        let settings = format!(
            "[databases]\n\
             * = host={host} port={port} user='{user}'\n\
             [pgbouncer]\n\
             listen_port = 6432\n\
             unix_socket_dir = {directory}\n\
             auth_type = any\n\
             pool_mode = {mode}\n\
             default_pool_size = {sessions}\n\
             max_client_conn = 500\n\
             server_login_retry = 0.2\n\
             {prepared}\n\
             {more}\n"
        );
        fs::write(watcher.path("pgbouncer.ini"), settings)
            .unwrap_or_else(cannot("write the settings"));
        watcher.run("pool");
        program::wait_until_it_listens("PgBouncer", &watcher, 6432);
        Self {
            _watcher: watcher,
            endpoint,
        }
    }

    /// Whether clients may use named prepared statements in transaction mode: since version 1.21.
    pub fn follows_prepared_statements() -> bool {
        Self::version() >= [1, 21]
    }

    /// The installed version, major and minor. Versions 1.18 to 1.20 may crash when a client cancels a query and does not
    /// wait until the pooler has forwarded the request (<https://github.com/pgbouncer/pgbouncer/pull/846>); tokio-postgres
    /// does not wait.
    pub fn version() -> [u32; 2] {
        let output = Command::new(binaries().join("pgbouncer"))
            .arg("--version")
            .output();
        let text = output.expect("PgBouncer can be run").stdout;
        let text = String::from_utf8_lossy(&text);
        let version = text.split_whitespace().nth(1).unwrap_or_default();
        let mut numbers = version.split('.').map(|number| number.parse().ok());
        [(); 2].map(|()| numbers.next().flatten().expect("it tells its version"))
    }
}

impl Deref for PgBouncer {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

fn binaries() -> PathBuf {
    program::directory_of("pgbouncer", "pgbouncer")
}
