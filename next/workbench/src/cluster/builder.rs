//! The settings of a server before it is started.

use super::Cluster;

/// What a throwaway server has in its `postgresql.conf` before the settings of the builder, which
/// win.
///
/// Nothing is synced to the disk, since nobody needs the data after a crash of the machine;
/// everything else that is not about size is PostgreSQL's default. Dynamic shared memory is in the
/// data directory rather than in `/dev/shm`, so that removing the directory removes all there is.
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
    environment: Vec<(String, String)>,
    wal_segment_megabytes: u32,
}

impl ClusterBuilder {
    pub(super) fn new() -> Self {
        let settings = DEFAULTS
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec();
        Self {
            settings,
            environment: Vec::new(),
            wal_segment_megabytes: 16,
        }
    }

    /// Sets a parameter in `postgresql.conf`, such as `("max_connections", "10")`. The value needs
    /// no quotes. Of two calls for one parameter the later wins.
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Sets an environment variable of the server process. Defaults to the environment of this
    /// process without the variables whose names start with `PG`.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Writes the log in files of that size, a power of two. Defaults to PostgreSQL's 16 megabytes, of which each new
    /// file, each standby and each promotion writes at least one.
    pub const fn wal_segment_megabytes(mut self, megabytes: u32) -> Self {
        self.wal_segment_megabytes = megabytes;
        self
    }

    /// Makes the server speak German, so that a test which depends on the text of an error fails.
    ///
    /// Needs no German locale: PostgreSQL's translations are chosen by `LANGUAGE`, once
    /// `lc_messages` is any locale but plain `C`. Needs a PostgreSQL that was packaged with its
    /// translations, and on Linux glibc.
    pub fn german(self) -> Self {
        self.env("LANGUAGE", "de").setting("lc_messages", "C.utf8")
    }

    /// Makes the server's directory with `initdb`, starts the server and waits until it accepts
    /// connections: half a second in all.
    ///
    /// # Panics
    ///
    /// If no PostgreSQL is installed, or if it does not start; the message has the end of the
    /// server's log.
    #[must_use = "the server is stopped when the value drops"]
    pub fn start(self) -> Cluster {
        Cluster::create(self)
    }

    /// The watcher's command that makes the data directory.
    pub(super) fn creation(&self) -> String {
        format!("create {}", self.wal_segment_megabytes)
    }

    pub(super) fn environment(&self) -> &[(String, String)] {
        &self.environment
    }

    /// The value of a parameter, if it is set here.
    pub(super) fn value(&self, parameter: &str) -> Option<&str> {
        self.settings
            .iter()
            .rev()
            .find(|(name, _)| name.eq_ignore_ascii_case(parameter))
            .map(|(_, value)| value.as_str())
    }

    /// The settings as lines of `postgresql.conf`.
    pub(super) fn lines(&self) -> String {
        self.settings
            .iter()
            .map(|(name, value)| line(name, value))
            .collect()
    }
}

/// One line of `postgresql.conf`.
pub(super) fn line(name: &str, value: &str) -> String {
    format!(
        "{name} = '{}'\n",
        value.replace('\\', r"\\").replace('\'', "''")
    )
}

#[cfg(test)]
mod tests {
    use super::{ClusterBuilder, line};

    #[test]
    fn values_are_quoted() {
        assert_eq!(
            line("log_line_prefix", r"it's \n"),
            "log_line_prefix = 'it''s \\\\n'\n"
        );
    }

    #[test]
    fn the_later_of_two_values_wins() {
        let builder = ClusterBuilder::new()
            .setting("Port", "1")
            .setting("port", "2");
        assert_eq!(builder.value("port"), Some("2"));
    }
}
