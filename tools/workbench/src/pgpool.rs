//! A pooler that sends reads to a standby.

use std::fs;
use std::ops::Deref;
use std::path::Path;

use crate::endpoint::{Endpoint, cannot};
use crate::program;
use crate::watcher::Watcher;

/// pgpool-II in front of a primary and a standby. Every read-only statement outside a transaction goes to the standby, and
/// everything else to the primary. For pgpool-II, a `SELECT` is read-only if each function in its text is stable or immutable.
/// Connections and pools through it are those of its [`Endpoint`]. The 61st connection waits until another one closes.
///
/// A client has one session on the primary and one on the standby for as long as it is connected. It listens on a Unix socket
/// only, and ends with the value, or with the process that started it.
///
/// It needs the program `pgpool` on the `PATH`, or in `/usr/sbin`, where Debian has it.
#[derive(Debug)]
#[must_use = "the pooler ends when the value drops"]
pub struct Pgpool {
    watcher: Watcher,
    endpoint: Endpoint,
}

impl Pgpool {
    /// Starts a pooler in front of a database, which the standby must have, too: make the database before the
    /// [standby](crate::Cluster::standby).
    pub fn in_front_of(primary: &Endpoint, standby: &Endpoint) -> Self {
        let binaries = program::directory_of("pgpool", "pgpool2");
        let mut watcher = Watcher::start(&binaries, &[]);
        let directory = watcher.directory();
        let endpoint = primary.clone().with_address(directory, 5432);
        let [(primary, first_port), (standby, second_port)] =
            [primary, standby].map(Endpoint::address);
        // The names of directories changed in 4.4 and 4.7, and a version ignores the names of others. The port is part of the
        // socket's name. Caches are small because they are allocated even if unused.
        let settings = format!(
            "backend_clustering_mode = 'streaming_replication'\n\
             listen_addresses = ''\n\
             port = 5432\n\
             socket_dir = '{directory}'\n\
             unix_socket_directories = '{directory}'\n\
             pcp_listen_addresses = ''\n\
             pcp_socket_dir = '{directory}'\n\
             pid_file_name = '{directory}/pgpool.pid'\n\
             logdir = '{directory}'\n\
             work_dir = '{directory}'\n\
             pool_passwd = ''\n\
             num_init_children = 60\n\
             memqcache_total_size = 1MB\n\
             memqcache_max_num_cache = 1000\n\
             sr_check_period = 0\n\
             load_balance_mode = on\n\
             statement_level_load_balance = on\n\
             backend_hostname0 = '{primary}'\n\
             backend_port0 = {first_port}\n\
             backend_weight0 = 0\n\
             backend_flag0 = 'ALWAYS_PRIMARY'\n\
             backend_hostname1 = '{standby}'\n\
             backend_port1 = {second_port}\n\
             backend_weight1 = 1\n"
        );
        fs::write(watcher.path("pgpool.conf"), settings)
            .unwrap_or_else(cannot("write the settings"));
        watcher.run("balance");
        program::wait_until_it_listens("pgpool-II", &watcher, 5432);
        Self { watcher, endpoint }
    }

    /// The directory of the Unix socket, the log, and the file `pgpool.pid`.
    pub fn directory(&self) -> &Path {
        Path::new(self.watcher.directory())
    }
}

impl Deref for Pgpool {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}
