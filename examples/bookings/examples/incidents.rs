//! The application with requests, and with incidents on demand, for `scripts/check metrics`. It
//! writes the port of `/metrics` and the URL of its database, which goes away with it. Each line
//! that it reads is the name of an incident, which lasts until the next line.

use std::error::Error;
use std::io::BufRead;
use std::thread;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use bookings::blocking;
use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use diesel_interlock::{AdvisoryLock, Leader, PgPool, Stop, Throttle};
use tower::ServiceExt;
use workbench::Database;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

static LOST: AdvisoryLock = AdvisoryLock::named("lost");
static SLOW: AdvisoryLock = AdvisoryLock::named("slow");
static STUCK: AdvisoryLock = AdvisoryLock::named("stuck");
static NEWS: Throttle = Throttle::named("news", Duration::from_secs(15));
static REPORTS: Leader = Leader::named("reports", Duration::from_secs(3));

#[tokio::main]
async fn main() -> Result {
    let metrics = bookings::metrics()?;
    let database = Database::new();
    let (pool, url) = (database.pool(16), database.url());
    let started = (pool.clone(), url.clone());
    tokio::task::spawn_blocking(move || {
        let (pool, url) = started;
        blocking::start_up(&pool, &url).map_err(|error| error.to_string())
    })
    .await??;
    let router = blocking::router(pool.clone()).merge(metrics);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
    println!("{}\n{url}", listener.local_addr()?.port());
    let requests = router.clone();
    tokio::spawn(async move {
        for number in 0_u64.. {
            for (method, path) in [
                ("POST", format!("/servers/{}/bookings", number % 10)),
                ("GET", "/streets/main".to_owned()),
                ("POST", "/cache".to_owned()),
            ] {
                let request = Request::builder().method(method).uri(path);
                let request = request.header("x-customer", format!("customer {}", number % 7));
                if let Ok(request) = request.body(Body::empty()) {
                    let _ = requests.clone().oneshot(request).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    thread::spawn(move || {
        let mut stop = Stop::new();
        let mut threads = Vec::new();
        for name in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
            stop.stop();
            for one in threads.drain(..) {
                let _: thread::Result<()> = thread::JoinHandle::join(one);
            }
            stop = Stop::new();
            if let Err(error) = begin(&name, &database, &pool, &stop, &mut threads) {
                eprintln!("{name}: {error}");
            }
            println!("{name}");
        }
    });
    Ok(axum::serve(listener, router).await?)
}

fn begin(
    name: &str,
    database: &Database,
    pool: &PgPool,
    stop: &Stop,
    threads: &mut Vec<thread::JoinHandle<()>>,
) -> Result {
    let mut conn = database.connect();
    match name {
        "InterlockLost" => {
            let guard = LOST.try_acquire(pool)?.acquired().ok_or("it is busy")?;
            conn.batch_execute(
                "SELECT pg_terminate_backend(pid) FROM resource_control.advisory_lock
                    WHERE is_held AND number = resource_control.lock_key('lost')",
            )?;
            assert!(guard.release().is_err());
        }
        "InterlockFails" => {
            conn.batch_execute("ALTER TABLE resource_control.throttle RENAME TO away")?;
            let failed = NEWS.attempt(pool);
            conn.batch_execute("ALTER TABLE resource_control.away RENAME TO throttle")?;
            assert!(failed.is_err());
        }
        // A leader of which nothing is heard.
        "InterlockNobodyLeads" => {
            conn.batch_execute(
                "SELECT resource_control.claim_service_request('leader reports', 1, '1 hour')",
            )?;
            threads.push(lead(pool, stop, ""));
            threads.push(until_stopped(stop, move || {
                let _ = conn.batch_execute(
                    "SELECT resource_control.complete_service_request(service, id)
                        FROM resource_control.slot_in_flight WHERE service = 'leader reports'",
                );
            }));
        }
        // The alert does not know that these are two elections.
        "InterlockTwoLead" => {
            threads.push(lead(pool, stop, "a"));
            threads.push(lead(pool, stop, "b"));
        }
        "InterlockWaitsLong" => {
            let (pool, stop) = (pool.clone(), stop.clone());
            threads.push(thread::spawn(move || {
                while !stop.is_stopped() {
                    if hold(&mut conn, "slow").is_err() {
                        return;
                    }
                    thread::scope(|scope| {
                        scope.spawn(|| drop(SLOW.acquire(&pool)));
                        thread::sleep(Duration::from_secs(1));
                        let _ = conn.batch_execute("SELECT pg_advisory_unlock_all()");
                    });
                }
            }));
        }
        // A holder that is stuck.
        "InterlockWaitsInVain" => {
            hold(&mut conn, "stuck")?;
            let pool = pool.clone();
            threads.push(thread::spawn(move || drop(STUCK.acquire(&pool))));
            threads.push(until_stopped(stop, move || {
                let _ = conn.batch_execute("SELECT pg_advisory_unlock_all()");
            }));
        }
        // What a process leaves that dies in the middle of a run.
        "InterlockScheduleFailed" => {
            conn.batch_execute(
                "INSERT INTO resource_control.schedule (name, tick, attempt, started_at, expires_at)
                    VALUES ('nightly', now() - interval '1 min', 1, now() - interval '1 min',
                        now() - interval '1 s')",
            )?;
            threads.push(until_stopped(stop, move || {
                let _ = conn.batch_execute("DELETE FROM resource_control.schedule");
            }));
        }
        // No instance is up that would run it.
        "InterlockTickOverdue" => {
            conn.batch_execute(
                "INSERT INTO resource_control.schedule
                    (name, tick, attempt, started_at, ended_at, next_at)
                    VALUES ('hourly', now() - interval '1 hour', 1, now() - interval '1 hour',
                        now() - interval '1 hour', now() - interval '5 s')",
            )?;
            threads.push(until_stopped(stop, move || {
                let _ = conn.batch_execute("DELETE FROM resource_control.schedule");
            }));
        }
        "end" => {}
        _ => return Err("no such incident".into()),
    }
    Ok(())
}

fn hold(conn: &mut PgConnection, name: &str) -> Result {
    let take = format!("SELECT pg_advisory_lock(resource_control.lock_key('{name}'))");
    Ok(conn.batch_execute(&take)?)
}

fn lead(pool: &PgPool, stop: &Stop, key: &'static str) -> thread::JoinHandle<()> {
    let (pool, stop) = (pool.clone(), stop.clone());
    thread::spawn(move || {
        let leader = if key.is_empty() {
            REPORTS.clone()
        } else {
            REPORTS.key(key)
        };
        let led = leader.lead(&pool, &stop, |term| {
            while term.is_leader() && term.pause(Duration::from_millis(100)) {}
        });
        if let Err(error) = led {
            eprintln!("{error}");
        }
    })
}

fn until_stopped(stop: &Stop, end: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    let stop = stop.clone();
    thread::spawn(move || {
        while !stop.is_stopped() {
            thread::sleep(Duration::from_millis(50));
        }
        end();
    })
}
