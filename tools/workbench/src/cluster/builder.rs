//! The settings of a server before it is started.

use std::path::Path;

use super::Cluster;

/// The settings of a [`Cluster`] to be started. Made by [`Cluster::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is started before `start` is called"]
pub struct ClusterBuilder {
    /// Lines of `postgresql.conf`.
    pub(super) settings: String,
    pub(super) port: u16,
    pub(super) environment: Vec<(String, String)>,
    /// Whether the server demands TLS on a TCP port that it chooses.
    pub(super) tls: bool,
}

impl ClusterBuilder {
    /// Without fsync, because nobody needs the data after a crash of the machine. Dynamic shared memory is in the data
    /// directory instead of `/dev/shm`, so that removing the directory removes everything.
    pub(super) fn new() -> Self {
        let nothing = Self {
            settings: String::new(),
            port: 5432,
            environment: Vec::new(),
            tls: false,
        };
        nothing
            .setting("listen_addresses", "")
            .setting("fsync", "off")
            .setting("full_page_writes", "off")
            .setting("max_connections", "300")
            .setting("shared_buffers", "32MB")
            .setting("dynamic_shared_memory_type", "mmap")
            .setting("wal_keep_size", "128MB")
            .setting("log_line_prefix", "%m [%p] %q%u@%d ")
    }

    /// Sets a parameter in `postgresql.conf`, such as `("max_connections", "10")`. The value needs no quotes. Of two
    /// calls for one parameter the later wins.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings += &line(name, value);
        self
    }

    /// Sets the port, which is part of the name of the Unix socket. Defaults to 5432.
    pub fn port(mut self, port: u16) -> Self {
        self.port = port;
        self.setting("port", &port.to_string())
    }

    /// Sets an environment variable of the server process. Defaults to the environment of this process without the
    /// variables whose names start with `PG`.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Creates the server's directory with `initdb`, starts the server, and waits until it accepts connections: half a
    /// second in all.
    pub fn start(self) -> Cluster {
        self.start_with(&super::binaries::directory())
    }

    /// As [`start`](Self::start), with the PostgreSQL programs in the directory `binaries`.
    pub fn start_with(self, binaries: &Path) -> Cluster {
        Cluster::set_up(self, binaries.to_owned(), "create")
    }
}

/// A line of `postgresql.conf`.
pub(super) fn line(name: &str, value: &str) -> String {
    let quoted = value.replace('\\', r"\\").replace('\'', "''");
    format!("{name} = '{quoted}'\n")
}
