//! The settings of a server before it is started.

use super::Cluster;

/// What a throwaway server has in its `postgresql.conf` before the settings of the builder, which win.
///
/// Nothing is synced to the disk, because nobody needs the data after a crash of the machine. Dynamic shared memory is
/// in the data directory rather than in `/dev/shm`, so that removing the directory removes all there is.
const DEFAULTS: [(&str, &str); 9] = [
    ("listen_addresses", ""),
    ("port", "5432"),
    ("fsync", "off"),
    ("full_page_writes", "off"),
    ("max_connections", "300"),
    ("shared_buffers", "32MB"),
    ("dynamic_shared_memory_type", "mmap"),
    ("wal_keep_size", "128MB"),
    ("log_line_prefix", "%m [%p] %q%u@%d "),
];

/// The settings of a [`Cluster`] to be started. Made by [`Cluster::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is started before `start` is called"]
pub struct ClusterBuilder {
    settings: Vec<(String, String)>,
    pub(super) environment: Vec<(String, String)>,
}

impl ClusterBuilder {
    pub(super) fn new() -> Self {
        Self {
            settings: DEFAULTS
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .to_vec(),
            environment: Vec::new(),
        }
    }

    /// Sets a parameter in `postgresql.conf`, such as `("max_connections", "10")`. The value needs no quotes. Of two
    /// calls for one parameter the later wins.
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Sets an environment variable of the server process. Defaults to the environment of this process without the
    /// variables whose names start with `PG`.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Makes the server speak German, so that what depends on the text of an error fails. Needs a PostgreSQL that was
    /// packaged with its translations, and on Linux glibc, but no German locale: `LANGUAGE` chooses the translation once
    /// `lc_messages` is any locale but plain `C`.
    pub fn german(self) -> Self {
        self.env("LANGUAGE", "de").setting("lc_messages", "C.utf8")
    }

    /// Makes the server's directory with `initdb`, starts the server and waits until it accepts connections: half a
    /// second in all.
    #[must_use = "the server is stopped when the value drops"]
    pub fn start(self) -> Cluster {
        Cluster::create(self)
    }

    /// The port, which is part of the name of the Unix socket.
    pub(super) fn port(&self) -> u16 {
        let mut ports = self.settings.iter().filter(|(name, _)| name == "port");
        let port = ports.next_back().and_then(|(_, value)| value.parse().ok());
        port.expect("the setting `port` is a number")
    }

    /// The settings as lines of `postgresql.conf`.
    pub(super) fn lines(&self) -> String {
        let line = |(name, value): &(String, String)| {
            let value = value.replace('\\', r"\\").replace('\'', "''");
            format!("{name} = '{value}'\n")
        };
        self.settings.iter().map(line).collect()
    }
}
