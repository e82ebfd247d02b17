//! What users would pick instead: sqlx's `PgAdvisoryLock`, limits in a Redis that keeps nothing on disk, `governor` for a limit in memory.

use std::num::NonZeroU32;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{Quota, RateLimit};
use governor::DefaultKeyedRateLimiter;
use redis::{Commands, Connection, Script};
use sqlx::postgres::{PgAdvisoryLock, PgAdvisoryLockKey, PgPool, PgPoolOptions};
use workbench::Database;

use crate::Bench;
use crate::compare::{Boxed, tasks, threads};
use crate::locks::async_pairs;
use crate::rate_limits::{KEYS, allowed, fill};
use crate::report::Report;
use crate::server::{pool, url};

const CLIENTS: usize = 8;
/// More a second than a process can ask for, so that no check is a refusal.
const UNITS: u32 = 1_000_000_000;
const CHUNK: u32 = 1_000_000;
static IN_MEMORY: RateLimit = RateLimit::named("in memory", Quota::per_second(UNITS));

/// The algorithm and the quota of `rate_limits::allowed`: a unit each microsecond, and a burst of a million.
const GCRA: &str = "local time = redis.call('TIME')
    local now = time[1] * 1000000 + time[2]
    local full = math.max(now, tonumber(redis.call('GET', KEYS[1]) or 0)) + 1
    if full - now > 1000000 then return 0 end
    redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', 1000)
    return 1";

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    fill(&database, KEYS);
    report.row(
        "session lock, take and release, async / sqlx's `PgAdvisoryLock`",
        CLIENTS,
        None,
        async_pairs(&database, CLIENTS),
        sqlx_pairs(&database),
    );
    match Redis::start(bench) {
        Some(redis) => {
            let references: [(&str, Boxed); 2] = [
                ("the same algorithm by a script", gcra(&redis)),
                ("a counter per second by INCR", counters(&redis)),
            ];
            for (reference, theirs) in references {
                let work = format!(
                    "rate limit, allowed, 10,000 keys / Redis, nothing on disk, {reference}"
                );
                let ours = allowed(&database, CLIENTS, 1);
                report.row(&work, CLIENTS, None, ours, theirs);
            }
        }
        None => eprintln!("The rows of Redis are left out: there is no program redis-server"),
    }
    for number in [1, CLIENTS] {
        let work = "rate limit in memory, allowed, one key / `governor`, which counts one process";
        let ours = in_memory(&database, number);
        report.row(work, number, None, ours, governed(number));
    }
}

fn sqlx_pairs(database: &Database) -> Boxed {
    let _entered = workbench::runtime().enter();
    let pool = PgPoolOptions::new()
        .max_connections(CLIENTS as u32)
        .test_before_acquire(false)
        .connect_lazy(&url(database))
        .expect("the URL is one of sqlx, too");
    let make = |task| {
        let key = PgAdvisoryLockKey::BigInt(1000 + task as i64);
        (pool.clone(), PgAdvisoryLock::with_key(key))
    };
    tasks(
        CLIENTS,
        make,
        async |(pool, lock): (PgPool, PgAdvisoryLock)| {
            let conn = pool.acquire().await.expect("the pool has a connection");
            let taken = lock.try_acquire(conn).await.expect("the server replies");
            let guard = taken.left().expect("nobody else wants it");
            guard.release_now().await.expect("it is held");
            (pool, lock)
        },
    )
}

/// A server on a socket beside PostgreSQL's. A shell ends it when this process has ended, however that was.
struct Redis {
    shell: Child,
    url: String,
}

impl Redis {
    fn start(bench: &Bench) -> Option<Self> {
        let program = "redis-server";
        let version = Command::new(program).arg("--version").output();
        version.ok().filter(|output| output.status.success())?;
        let socket = bench.server.cluster().directory().join("redis.sock");
        let socket = socket.display().to_string();
        let shell = Command::new("sh")
            .args(["-c", "\"$@\" & read -r _; kill $!", "sh", program])
            .args(["--port", "0", "--unixsocket", &socket])
            .args(["--save", "", "--appendonly", "no"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("there is a shell");
        let redis = Self {
            shell,
            url: format!("redis+unix://{socket}"),
        };
        drop(redis.connect());
        Some(redis)
    }

    fn connect(&self) -> Connection {
        let client = redis::Client::open(self.url.as_str()).expect("the URL is one of Redis");
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match client.get_connection() {
                Ok(connection) => return connection,
                Err(error) if Instant::now() > deadline => panic!("Redis: {error}"),
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// Threads with a connection each, which they keep: Redis needs no pool here.
fn gcra(redis: &Redis) -> Boxed {
    threads(CLIENTS, |_| {
        let (mut conn, script) = (redis.connect(), Script::new(GCRA));
        move || {
            let check = script.key(fastrand::u32(0..KEYS)).invoke(&mut conn);
            assert_eq!(check, Ok(1));
        }
    })
}

/// The key of a counter ends a second after the first call, and a second call of that second is one command.
fn counters(redis: &Redis) -> Boxed {
    threads(CLIENTS, |_| {
        let mut conn = redis.connect();
        move || {
            let key = format!("counter {}", fastrand::u32(0..KEYS));
            let count: u32 = conn.incr(&key, 1).expect("Redis replies");
            if count == 1 {
                let _: bool = conn.expire(&key, 1).expect("Redis replies");
            }
            assert!(count <= 1_000_000);
        }
    })
}

fn in_memory(database: &Database, number: usize) -> Boxed {
    let local = IN_MEMORY.local(pool(database, number), CHUNK);
    threads(number, |_| {
        let local = local.clone();
        move || {
            let check = local.check("key").expect("it can be checked");
            assert!(check.is_allowed());
        }
    })
}

fn governed(number: usize) -> Boxed {
    let units = NonZeroU32::new(UNITS).expect("it is not zero");
    let quota = governor::Quota::per_second(units);
    let limiter = Arc::new(DefaultKeyedRateLimiter::<&str>::keyed(quota));
    threads(number, |_| {
        let limiter = limiter.clone();
        move || assert!(limiter.check_key(&"key").is_ok())
    })
}
