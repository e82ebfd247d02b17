//! How the figures change with a slower disk and a longer network, and whether that can be foretold.
//!
//! The model: an operation takes what it takes here, and for each of its round trips as much more as a round trip takes
//! longer, and for each of its commits as much more as a commit takes longer. It is checked on servers whose commits are
//! held up (`commit_delay`) and behind a proxy that holds everything up.

use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::{Error, Semaphore, Throttle};

use crate::Bench;
use crate::delay;
use crate::harness::{Contender, Contenders, Plan, Rates, Ratio, compare, median, threads};
use crate::libpq::Session;
use crate::report::{NO_GOAL, Report};
use crate::server::{BenchDatabase, pool};
use crate::session_locks::lock;
use crate::throttles::{self, Resource};

/// Of each operation: its round trips and its commits.
const OPERATIONS: [(&str, f64, f64); 6] = [
    ("session lock, take and release", 2.0, 0.0),
    ("transaction lock around an insert", 4.0, 1.0),
    ("throttle, denied", 1.0, 0.0),
    ("throttle, granted", 1.0, 1.0),
    ("semaphore, claim and release", 2.0, 2.0),
    ("semaphore, refusal", 1.0, 0.0),
];

/// Microseconds that are added to a round trip, and to a commit.
const LINKS: [(u64, u64); 6] = [
    (0, 0),
    (500, 0),
    (2000, 0),
    (0, 2000),
    (0, 10_000),
    (2000, 2000),
];

const ROUND_TRIP: &str = "SELECT 1";
const READ: &str = "a statement that reads";
const WRITE: &str = "a statement that writes";

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    report.scenario("model: predicted / measured", 1);
    let database = throttles::prepared(&bench.server);
    let mut session = database.session();
    session.query("CREATE TABLE speed AS SELECT 0 AS n");
    session.query("CREATE TABLE parcel (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY)");
    let full = Semaphore::named("full", 1, Duration::from_secs(3600));
    let permit = full
        .try_acquire(&database.pool(1))
        .unwrap()
        .admitted()
        .expect("nobody else is here");

    let mut contenders = Contenders::new();
    for (network, commit) in LINKS {
        let url = url(bench, &database, network, commit);
        contenders.extend(statements(&url, network, commit));
        contenders.extend(operations(&url, network, commit, &full));
    }
    let plan = bench.options.plan();
    let plan = Plan {
        rounds: plan.rounds.min(5),
        slice: plan.slice,
        warm_up: plan.slice / 2,
    };
    let rates = compare(plan, contenders);
    permit.release().unwrap();

    for (network, commit) in LINKS {
        let (network_ms, commit_ms) = (network as f64 / 1e3, commit as f64 / 1e3);
        // Each measured where nothing else is changed.
        let longer = median(&round_trip(&rates, network, 0)) - median(&round_trip(&rates, 0, 0));
        let slower = median(&commit_time(&rates, 0, commit)) - median(&commit_time(&rates, 0, 0));
        let what = |operation: &str| {
            format!("+{network_ms} ms network, +{commit_ms} ms commit: {operation}")
        };
        report.figure(
            &what("round trip"),
            "µs",
            median(&round_trip(&rates, network, commit)),
        );
        report.figure(
            &what("commit"),
            "µs",
            median(&commit_time(&rates, network, commit)),
        );
        for (operation, trips, commits) in OPERATIONS {
            let measured = times(&rates, network, commit, operation);
            let here = median(&times(&rates, 0, 0, operation));
            let predicted = here + trips * longer + commits * slower;
            let ratios: Vec<f64> = measured
                .iter()
                .map(|measured| predicted / measured)
                .collect();
            let ratio = Ratio {
                ours: median(&measured),
                reference: predicted,
                ratios,
            };
            if (network, commit) != (0, 0) {
                report.add_ratio(
                    &what(operation),
                    "µs, measured and predicted",
                    &ratio,
                    NO_GOAL,
                );
            }
        }
    }
}

fn name(network: u64, commit: u64, operation: &str) -> String {
    format!("{network} {commit} {operation}")
}

/// Microseconds, in each round.
fn times(rates: &Rates, network: u64, commit: u64, operation: &str) -> Vec<f64> {
    rates
        .of(&name(network, commit, operation))
        .iter()
        .map(|rate| 1e6 / rate)
        .collect()
}

fn round_trip(rates: &Rates, network: u64, commit: u64) -> Vec<f64> {
    times(rates, network, commit, ROUND_TRIP)
}

fn commit_time(rates: &Rates, network: u64, commit: u64) -> Vec<f64> {
    let (reads, writes) = (
        times(rates, network, commit, READ),
        times(rates, network, commit, WRITE),
    );
    writes
        .iter()
        .zip(reads)
        .map(|(write, read)| write - read)
        .collect()
}

/// All of them go through a proxy, so that it makes no difference between them.
fn url(bench: &Bench, database: &BenchDatabase, network: u64, commit: u64) -> String {
    let port = bench.server.address().1;
    let socket = bench
        .server
        .cluster
        .socket_directory()
        .join(format!(".s.PGSQL.{port}"));
    let proxy = delay::in_front_of(socket, Duration::from_micros(network));
    format!(
        "postgresql://postgres@127.0.0.1:{proxy}/{}?sslmode=disable&gssencmode=disable\
         &options=-c%20commit_delay%3D{commit}%20-c%20commit_siblings%3D0",
        database.name()
    )
}

fn statements(url: &str, network: u64, commit: u64) -> Contenders {
    let contender = |what: &str, statement: &str| {
        threads(&name(network, commit, what), 1, |_| {
            let mut session = Session::connect(url);
            let prepared = session.prepare("statement", statement);
            move || drop(session.run(&prepared, &[]))
        })
    };
    vec![
        contender(ROUND_TRIP, "SELECT 1"),
        contender(READ, "SELECT n FROM speed"),
        contender(WRITE, "UPDATE speed SET n = n + 1"),
    ]
}

fn operations(url: &str, network: u64, commit: u64, full: &Semaphore) -> Contenders {
    let pool = pool(url, 1, false);
    let contender = |at: usize, operation: Box<dyn FnMut() + Send>| -> Box<dyn Contender> {
        let (what, _, _) = OPERATIONS[at];
        // There is one thread, which takes it.
        let mut operation = Some(operation);
        threads(&name(network, commit, what), 1, |_| {
            operation.take().expect("one thread")
        })
    };
    let session_lock = {
        let (lock, pool) = (lock(0), pool.clone());
        move || {
            lock.try_acquire(&pool)
                .unwrap()
                .acquired()
                .expect("it is free")
                .release()
                .unwrap()
        }
    };
    let transaction_lock = {
        let (lock, pool) = (lock(0), pool.clone());
        move || {
            let insert = |conn: &mut PgConnection| {
                let inserted = diesel::insert_into(parcel::table)
                    .default_values()
                    .execute(conn);
                Ok::<_, Error>(inserted?)
            };
            assert_eq!(
                lock.transaction(&mut pool.get().unwrap(), insert).unwrap(),
                1
            );
        }
    };
    let throttle = |resource, granted| {
        let pool = pool.clone();
        move || {
            let mut conn = pool.get().unwrap();
            let decision = Throttle::of(resource)
                .details("web-3 pid 811")
                .attempt_on(&mut conn)
                .unwrap();
            assert_eq!(decision.granted().is_some(), granted);
        }
    };
    let claim = {
        let (semaphore, pool) = (crate::semaphores::semaphore(), pool.clone());
        move || {
            semaphore
                .try_acquire(&pool)
                .unwrap()
                .admitted()
                .expect("a slot is free")
                .release()
                .unwrap()
        }
    };
    let refusal = {
        let (full, pool) = (full.clone(), pool.clone());
        move || assert!(full.try_acquire(&pool).unwrap().is_full())
    };
    vec![
        contender(0, Box::new(session_lock)),
        contender(1, Box::new(transaction_lock)),
        contender(2, Box::new(throttle(Resource::Hourly, false))),
        contender(3, Box::new(throttle(Resource::AtOnce, true))),
        contender(4, Box::new(claim)),
        contender(5, Box::new(refusal)),
    ]
}

diesel::table! {
    parcel (id) {
        id -> BigInt,
    }
}
