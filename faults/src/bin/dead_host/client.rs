//! The program on the clients' host.

use std::io::BufRead;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel_interlock::{AdvisoryLock, LockKey};

/// Longer than the longest time that is measured.
const LONG: Duration = Duration::from_secs(600);

/// Prints `ready`, waits for a line, performs its operation, and prints its duration and result. Ends with its standard
/// input.
pub(crate) fn run(what: &str, url: &str, key: i32) {
    let (sender, go) = mpsc::channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
        std::process::exit(0);
    });
    let lock = AdvisoryLock::new(LockKey::bigint(key.into()));
    let mut conn = PgConnection::establish(url).expect("the server is there");
    match what {
        "wait" => {
            println!("ready");
            let wait = thread::spawn(move || {
                let waited = lock.acquire_timeout_on(&mut conn, LONG).map(drop);
                (Instant::now(), waited)
            });
            let _ = go.recv();
            let began = Instant::now();
            if let Ok((ended, waited)) = wait.join() {
                tell(
                    ended - began,
                    if waited.is_ok() {
                        "acquired"
                    } else {
                        "an error"
                    },
                );
            }
        }
        _ => {
            let mut guard = lock
                .acquire_on(&mut conn)
                .expect("nobody else has this key");
            if what == "busy" {
                println!("ready");
                let _ = diesel::sql_query("SELECT pg_sleep(600)").execute(guard.conn());
                return;
            }
            println!("ready");
            let _ = go.recv();
            let began = Instant::now();
            let reply = match what {
                "release" => match guard.release() {
                    Ok(()) => "released",
                    Err(_) => "an error",
                },
                _ => match guard.is_held() {
                    Ok(true) => "held",
                    Ok(false) => "lost",
                    Err(_) => "an error",
                },
            };
            tell(began.elapsed(), reply);
            thread::sleep(LONG);
        }
    }
}

fn tell(took: Duration, reply: &str) {
    println!("{:.1} s: {reply}", took.as_secs_f64());
}
