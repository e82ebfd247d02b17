//! Measures `diesel_interlock` beside what its users would pick instead, on throwaway servers: `scripts/bench`.
//!
//! Every contender is checked to do its job before it is timed, and those that are compared take turns: `harness`.
//! A panic anywhere ends it, so that no figure is made of something that went wrong.

mod asynchronous;
mod churn;
mod cores;
mod delay;
mod growth;
mod harness;
mod libpq;
mod libpq_pool;
mod memory;
mod model;
mod options;
mod pgbench;
mod rate_limits;
mod redis_server;
mod report;
mod runlimit;
mod semaphores;
mod server;
mod session_locks;
mod throttles;
mod transaction_locks;
mod waiting;

use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;

use crate::options::{Options, USAGE};
use crate::redis_server::RedisServer;
use crate::report::Report;
use crate::server::{Server, Speed};

/// What every scenario gets.
pub(crate) struct Bench {
    pub(crate) options: Options,
    pub(crate) server: Server,
    /// Redis as Debian configures it. It replies before a write is on the disk.
    pub(crate) redis: RedisServer,
    /// For asynchronous peers: as many threads as there are cores.
    pub(crate) runtime: Arc<tokio::runtime::Runtime>,
}

type Scenario = (&'static str, fn(&Bench, &mut Report));

const SCENARIOS: [Scenario; 11] = [
    ("session_locks", session_locks::run),
    ("asynchronous", asynchronous::run),
    ("transaction_locks", transaction_locks::run),
    ("throttles", throttles::run),
    ("rate_limits", rate_limits::run),
    ("semaphores", semaphores::run),
    ("waiting", waiting::run),
    ("growth", growth::run),
    ("churn", churn::run),
    ("memory", memory::run),
    ("model", model::run),
];

fn main() -> ExitCode {
    let names = SCENARIOS.map(|(name, _)| name);
    let options = match Options::parse(lexopt::Parser::from_env(), &names) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n\n{USAGE}{}", names.join(", "));
            return ExitCode::from(2);
        }
    };
    // A panic in one thread would leave the others waiting for it.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        std::process::exit(101);
    }));
    let bench = Bench {
        server: Server::start(options.transport),
        redis: RedisServer::start(options.transport, &[]),
        runtime: Arc::new(tokio::runtime::Runtime::new().expect("a runtime can be started")),
        options,
    };
    let mut report = Report::new(environment(&bench));
    // Also at once, so that a file that cannot be written is no news after half an hour.
    let save = |report: &Report| bench.options.json.iter().for_each(|file| report.save(file));
    save(&report);
    for (name, run) in SCENARIOS {
        if bench.options.wants(name) {
            run(&bench, &mut report);
            save(&report);
        }
    }
    report.finish(speed(&bench));
    save(&report);
    ExitCode::SUCCESS
}

/// How fast the machine is now, in microseconds: at the beginning and at the end, which tells whether it was quiet.
fn speed(bench: &Bench) -> serde_json::Value {
    cores::assign(cores::Cores::One);
    let speed = Speed::of(bench.server.database().url());
    let round = |value: f64| (value * 10.0).round() / 10.0;
    json!({
        "round_trip_us": round(speed.round_trip.0),
        "round_trip_p95_us": round(speed.round_trip.1),
        "commit_us": round(speed.commit),
    })
}

fn environment(bench: &Bench) -> serde_json::Value {
    json!({
        "cores": server::cores(),
        "processor": server::processor(),
        "postgresql": bench.server.version(),
        "redis": bench.redis.version(),
        "transport": bench.options.transport.name(),
        "before": speed(bench),
        "settings": Server::settings(),
        "quick": bench.options.quick,
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
    })
}
