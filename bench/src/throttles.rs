//! Attempts at a throttled resource, granted and denied.
//!
//! What is granted again and again has an interval of a microsecond: the database writes and commits each time. Redis
//! has no interval shorter than a millisecond, so there each grant is the first of a new key, and is compared with
//! ours of a new key.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::{Decision, Throttle, ThrottledResource, sync, throttled_resources};

use crate::Bench;
use crate::harness::{Contender, compare, threads};
use crate::pgbench::Pgbench;
use crate::redis_server::RedisServer;
use crate::report::{NO_GOAL, Report, at_least};
use crate::server::{BenchDatabase, Server};

throttled_resources! {
    pub(crate) enum Resource {
        AtOnce = "due at once" every Duration::from_micros(1),
        Hourly = "due in an hour" every Duration::from_secs(3600),
    }
}

const OURS: &str = "ours";
const PGBENCH: &str = "pgbench -M prepared, same call";
const REDIS: &str = "Redis, script";
const REDIS_SYNCED: &str = "Redis, script, appendfsync always";
pub(crate) const DETAILS: &str = "web-3 pid 811";

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = prepared(&bench.server);
    let synced = RedisServer::start(
        bench.options.transport,
        &["--appendonly", "yes", "--appendfsync", "always"],
    );
    verify(bench, &database);
    let (plan, long_turns) = (bench.options.plan(), bench.options.plan_of_long_turns());
    for number in [1, 8] {
        report.scenario("throttle, denied", number);
        let rates = compare(
            long_turns,
            vec![
                ours(OURS, &database, number, Resource::Hourly, |_| None, false),
                Box::new(pgbench(
                    &bench.server,
                    &database,
                    number,
                    Resource::Hourly,
                    false,
                )),
                redis(REDIS, &bench.redis, number, false),
            ],
        );
        report.ratio(&rates, OURS, PGBENCH, at_least(0.85));
        report.ratio(&rates, OURS, REDIS, NO_GOAL);

        report.scenario("throttle, denied for a key", number);
        let rates = compare(
            long_turns,
            vec![
                ours(OURS, &database, number, Resource::Hourly, one_key, false),
                Box::new(pgbench(
                    &bench.server,
                    &database,
                    number,
                    Resource::Hourly,
                    true,
                )),
            ],
        );
        report.ratio(&rates, OURS, PGBENCH, at_least(0.85));
    }

    report.scenario("throttle, granted", 1);
    let rates = compare(
        long_turns,
        vec![
            ours(OURS, &database, 1, Resource::AtOnce, |_| None, true),
            Box::new(pgbench(
                &bench.server,
                &database,
                1,
                Resource::AtOnce,
                false,
            )),
        ],
    );
    report.ratio(&rates, OURS, PGBENCH, at_least(0.85));

    for number in [1, 8] {
        report.scenario("throttle, granted for a key", number);
        let rates = compare(
            long_turns,
            vec![
                ours(OURS, &database, number, Resource::AtOnce, one_key, true),
                Box::new(pgbench(
                    &bench.server,
                    &database,
                    number,
                    Resource::AtOnce,
                    true,
                )),
            ],
        );
        report.ratio(&rates, OURS, PGBENCH, at_least(0.85));

        report.scenario("throttle, granted for a new key", number);
        let rates = compare(
            plan,
            vec![
                ours(
                    OURS,
                    &database,
                    number,
                    Resource::Hourly,
                    |_| Some(new_key()),
                    true,
                ),
                redis(REDIS, &bench.redis, number, true),
                redis(REDIS_SYNCED, &synced, number, true),
            ],
        );
        report.ratio(&rates, OURS, REDIS, NO_GOAL);
        report.ratio(&rates, OURS, REDIS_SYNCED, NO_GOAL);
    }
}

/// A database with the resources, of which the slow one has been taken, also for the keys of the threads.
pub(crate) fn prepared(server: &Server) -> BenchDatabase {
    let database = server.database();
    prepare(&mut database.connect());
    database
}

pub(crate) fn prepare(conn: &mut PgConnection) {
    let _ = sync::<Resource>(conn).unwrap();
    let throttle = Throttle::of(Resource::Hourly);
    assert!(attempt(&throttle, conn), "it was never taken");
    for thread in 0..8 {
        let throttle = throttle.key(one_key(thread).unwrap());
        assert!(attempt(&throttle, conn), "it was never taken");
    }
}

/// The key of a thread, by which `pgbench` knows it as well.
pub(crate) fn one_key(thread: usize) -> Option<String> {
    Some(thread.to_string())
}

pub(crate) fn new_key() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("tenant {}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn attempt(throttle: &Throttle<Resource>, conn: &mut PgConnection) -> bool {
    matches!(
        throttle.details(DETAILS).attempt_on(conn).unwrap(),
        Decision::Granted(_)
    )
}

/// Attempts of so many threads, each on a connection of its own, all of which are granted, or none.
pub(crate) fn ours(
    name: &str,
    database: &BenchDatabase,
    number: usize,
    resource: Resource,
    key: impl Fn(usize) -> Option<String> + Copy + Send + 'static,
    granted: bool,
) -> Box<dyn Contender> {
    threads(name, number, |thread| {
        let mut conn = database.connect();
        move || {
            let throttle = match key(thread) {
                None => Throttle::of(resource),
                Some(key) => Throttle::of(resource).key(key),
            };
            assert_eq!(attempt(&throttle, &mut conn), granted);
        }
    })
}

const COLUMNS: &str = "granted, being_taken, decided_at, next_at, retry_after, holder, held_since";
const CALL: &str = "resource_control.attempt_throttled_resource(:label::resource_control.throttled_resource_enum, :details)";
const CALL_WITH_KEY: &str = "resource_control.attempt_throttled_key(\
                             :label::resource_control.throttled_resource_enum, :client_id::text, :details)";

fn pgbench(
    server: &Server,
    database: &BenchDatabase,
    number: usize,
    resource: Resource,
    keyed: bool,
) -> Pgbench {
    script(server, database, number, resource, COLUMNS, keyed)
}

fn script(
    server: &Server,
    database: &BenchDatabase,
    number: usize,
    resource: Resource,
    columns: &str,
    keyed: bool,
) -> Pgbench {
    let call = if keyed { CALL_WITH_KEY } else { CALL };
    Pgbench::new(
        PGBENCH,
        server,
        database,
        number,
        &format!("SELECT {columns} FROM {call};\n"),
    )
    .variable("label", resource.label())
    .variable("details", DETAILS)
}

/// The same decision in Redis, with what a refused caller is told: how long yet, and who has it.
fn redis_script() -> redis::Script {
    redis::Script::new(
        "if redis.call('set', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return {1} \
         else return {0, redis.call('pttl', KEYS[1]), redis.call('get', KEYS[1])} end",
    )
}

fn redis_attempt(script: &redis::Script, connection: &mut redis::Connection, key: String) -> bool {
    let mut invocation = script.key(key);
    let reply: Vec<redis::Value> = invocation
        .arg(DETAILS)
        .arg(3_600_000)
        .invoke(connection)
        .unwrap();
    reply[0] == redis::Value::Int(1)
}

fn redis(name: &str, server: &RedisServer, number: usize, granted: bool) -> Box<dyn Contender> {
    let script = redis_script();
    redis_attempt(&script, &mut server.connect(), "throttle".to_owned());
    threads(name, number, |_| {
        let (script, mut connection) = (redis_script(), server.connect());
        move || {
            let key = if granted {
                new_key()
            } else {
                "throttle".to_owned()
            };
            assert_eq!(redis_attempt(&script, &mut connection, key), granted);
        }
    })
}

/// Lets eight threads of each want the same at the same time, which one of them is to get.
fn verify(bench: &Bench, database: &BenchDatabase) {
    let throttle = Throttle::of(Resource::Hourly).key("wanted by eight");
    one_of_eight("ours", |_| {
        let (throttle, mut conn) = (throttle.clone(), database.connect());
        move || attempt(&throttle, &mut conn)
    });
    one_of_eight("Redis", |_| {
        let (script, mut connection) = (redis_script(), bench.redis.connect());
        move || redis_attempt(&script, &mut connection, "wanted by eight".to_owned())
    });
    // A result that is not true divides by zero here.
    for keyed in [false, true] {
        for resource in [Resource::AtOnce, Resource::Hourly] {
            let clients = if keyed { 8 } else { 1 };
            let checked = script(
                &bench.server,
                database,
                clients,
                resource,
                "1 / granted::int",
                keyed,
            );
            let granted = resource == Resource::AtOnce;
            assert_eq!(
                checked.succeeds_once(),
                granted,
                "{PGBENCH}: {}",
                resource.label()
            );
        }
    }
}

fn one_of_eight<F: FnMut() -> bool + Send>(name: &str, make: impl Fn(usize) -> F) {
    let granted = Arc::new(AtomicUsize::new(0));
    let start = Barrier::new(8);
    let attempts: Vec<_> = (0..8).map(make).collect();
    thread::scope(|scope| {
        for mut attempt in attempts {
            let (granted, start) = (&granted, &start);
            scope.spawn(move || {
                start.wait();
                for _ in 0..10 {
                    granted.fetch_add(usize::from(attempt()), Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(granted.load(Ordering::SeqCst), 1, "{name}: granted once");
}
