//! What is measured on: one throwaway PostgreSQL as in production, one transport for everybody.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::{PgPool, migrations};
use workbench::{Cluster, Database};

use crate::harness::{median, quantile};
use crate::libpq::Session;
use crate::redis_server::free_port;

/// How clients reach the servers, all of them in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// TCP over the loopback interface.
    Tcp,
    /// A Unix socket.
    Socket,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP over loopback",
            Self::Socket => "Unix socket",
        }
    }
}

/// Makes the server write its log a few files further, and use these again: a file that `initdb` made, or that is new,
/// is slower to sync than one of a server that has run for a day.
fn lengthen_the_log(session: &mut Session) {
    for _ in 0..24 {
        session.query("SELECT pg_create_restore_point('bench')");
        session.query("SELECT pg_switch_wal()");
    }
    session.query("CHECKPOINT");
}

/// What differs from PostgreSQL's defaults: what every tuning guide changes, and nothing that weakens a commit.
const SETTINGS: [(&str, &str); 10] = [
    ("fsync", "on"),
    ("full_page_writes", "on"),
    ("synchronous_commit", "on"),
    ("shared_buffers", "512MB"),
    ("max_wal_size", "8GB"),
    ("min_wal_size", "1GB"),
    ("checkpoint_timeout", "15min"),
    ("max_connections", "300"),
    ("wal_keep_size", "0"),
    ("dynamic_shared_memory_type", "posix"),
];

/// The PostgreSQL server.
pub(crate) struct Server {
    pub(crate) cluster: Cluster,
    pub(crate) transport: Transport,
    port: u16,
}

/// A database of it, with this crate's schema.
pub(crate) struct BenchDatabase {
    database: Database,
    url: String,
}

impl Server {
    pub(crate) fn start(transport: Transport) -> Self {
        let port = free_port();
        let mut builder = Cluster::builder().setting("port", port.to_string());
        for (name, value) in SETTINGS {
            builder = builder.setting(name, value);
        }
        if transport == Transport::Tcp {
            builder = builder.setting("listen_addresses", "127.0.0.1");
        }
        let cluster = builder.start();
        lengthen_the_log(&mut Session::connect(&cluster.url("postgres")));
        Self {
            cluster,
            transport,
            port,
        }
    }

    pub(crate) fn settings() -> BTreeMap<&'static str, &'static str> {
        SETTINGS.into_iter().collect()
    }

    /// A new database.
    pub(crate) fn database(&self) -> BenchDatabase {
        let database = self.cluster.database();
        let url = match self.transport {
            Transport::Socket => self.cluster.url(database.name()),
            Transport::Tcp => format!(
                "postgresql://postgres@127.0.0.1:{}/{}?sslmode=disable",
                self.port,
                database.name()
            ),
        };
        let database = BenchDatabase { database, url };
        migrations::install(&mut database.connect()).expect("the schema can be installed");
        database
    }

    /// Where the server listens, for `pgbench`: a host or a directory, and a port.
    pub(crate) fn address(&self) -> (String, u16) {
        let host = match self.transport {
            Transport::Tcp => "127.0.0.1".to_owned(),
            Transport::Socket => self.cluster.socket_directory().display().to_string(),
        };
        (host, self.port)
    }

    pub(crate) fn version(&self) -> String {
        Session::connect(&self.cluster.url("postgres"))
            .query("SHOW server_version")
            .text(0)
    }
}

impl BenchDatabase {
    pub(crate) fn name(&self) -> &str {
        self.database.name()
    }

    /// A connection string that libpq takes, and sqlx as well.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// A connection string as tokio-postgres accepts it, which refuses parameters that only libpq knows.
    pub(crate) fn async_url(&self) -> String {
        let Some((server, parameters)) = self.url.split_once('?') else {
            return self.url.clone();
        };
        let known: Vec<_> = parameters
            .split('&')
            .filter(|parameter| !parameter.starts_with("gssencmode="))
            .collect();
        format!("{server}?{}", known.join("&"))
    }

    /// The same with settings for its sessions, as a URL has them.
    pub(crate) fn url_with(&self, settings: &str) -> String {
        let mark = if self.url.contains('?') { '&' } else { '?' };
        format!("{}{mark}options={settings}", self.url)
    }

    pub(crate) fn session(&self) -> Session {
        Session::connect(&self.url)
    }

    pub(crate) fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url).expect("the server accepts connections")
    }

    /// A pool of that many connections, all of them open, whose check-out sends nothing, so that what is measured is
    /// ours.
    pub(crate) fn pool(&self, size: usize) -> PgPool {
        pool(&self.url, size, false)
    }

    /// A pool as r2d2 makes it, which asks the server for a sign of life at every check-out.
    pub(crate) fn pool_with_checks(&self, size: usize) -> PgPool {
        pool(&self.url, size, true)
    }
}

pub(crate) fn pool(url: &str, size: usize, checks: bool) -> PgPool {
    Pool::builder()
        .max_size(size as u32)
        .test_on_check_out(checks)
        .build(ConnectionManager::new(url))
        .expect("the server accepts connections")
}

/// What the machine and the server are like.
pub(crate) struct Speed {
    /// A prepared `SELECT 1` over libpq, in microseconds: median and, as a sign of an unquiet machine, the 95th percentile.
    pub(crate) round_trip: (f64, f64),
    /// What a commit adds to a prepared statement that writes one row, in microseconds.
    pub(crate) commit: f64,
}

impl Speed {
    /// Measures for a second.
    pub(crate) fn of(url: &str) -> Self {
        let mut session = Session::connect(url);
        session.query("CREATE TABLE IF NOT EXISTS public.speed AS SELECT 0 AS n");
        let read = session.prepare("read", "SELECT n FROM public.speed");
        let write = session.prepare("write", "UPDATE public.speed SET n = n + 1");
        let one = session.prepare("one", "SELECT 1");
        let round_trips = times(|| drop(session.run(&one, &[])));
        let reads = times(|| drop(session.run(&read, &[])));
        let writes = times(|| drop(session.run(&write, &[])));
        Self {
            round_trip: (median(&round_trips), quantile(&round_trips, 0.95)),
            commit: median(&writes) - median(&reads),
        }
    }
}

/// How long each call took, in microseconds, for a third of a second.
fn times(mut call: impl FnMut()) -> Vec<f64> {
    for _ in 0..10 {
        call();
    }
    let began = Instant::now();
    let mut times = Vec::new();
    while began.elapsed() < Duration::from_millis(330) {
        let sent = Instant::now();
        call();
        times.push(sent.elapsed().as_secs_f64() * 1e6);
    }
    times
}

/// What the processor calls itself.
pub(crate) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    line.map_or("unknown", |line| line.trim_matches([' ', '\t', ':']))
        .to_owned()
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
