//! A client process that checks a rate limit through this crate, with or without units that it takes in advance.

use std::io;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::{Check, LocalRateLimit, Quota, RateLimit};
use fastrand::Rng;
use serde::{Deserialize, Serialize};

use super::clients::{Message, send};
use crate::chance::Chance;

/// What a client checks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(super) url: String,
    /// How many threads check, each on a connection of its own, or all on the units that the process has taken.
    pub(super) threads: usize,
    pub(super) key: String,
    pub(super) n: u32,
    pub(super) burst: u32,
    /// How many units the process takes at a time; 0 for a round trip for each check.
    pub(super) chunk: u32,
}

/// The name of the limit, which the Python clients use as well.
const NAME: &str = "contended";

impl Settings {
    pub(super) const fn quota(&self) -> Quota {
        Quota::per_second(self.n).burst(self.burst)
    }
}

/// Checks from the first line of the input to its end.
pub(crate) fn run(settings: &Settings) -> ExitCode {
    let limit = RateLimit::named(NAME, settings.quota());
    if settings.chunk == 0 {
        let limit = limit.key(&settings.key);
        let connect = || PgConnection::establish(&settings.url).expect("the server runs");
        let conns = (0..settings.threads).map(|_| connect());
        check_repeatedly(conns.map(|mut conn| {
            let limit = limit.clone();
            move || limit.check_on(&mut conn)
        }))
    } else {
        let pool = Pool::builder()
            .max_size(1)
            .build(ConnectionManager::new(&settings.url))
            .expect("the server runs");
        let local: LocalRateLimit =
            (limit.local(&pool, settings.chunk)).expect("the quota is valid");
        let local = &local;
        check_repeatedly((0..settings.threads).map(|_| move || local.check(&settings.key, 1)))
    }
}

/// Checks in a thread for each of the functions.
fn check_repeatedly<F>(checks: impl Iterator<Item = F>) -> ExitCode
where
    F: FnMut() -> diesel_interlock::error::Result<Check> + Send,
{
    let mut checks: Vec<F> = checks.collect();
    send(&Message::Ready);
    if io::stdin().read_line(&mut String::new()).is_err() {
        return ExitCode::FAILURE;
    }
    let over = AtomicBool::new(false);
    let (attempts, grants) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for check in &mut checks {
            let (over, attempts, grants) = (&over, &attempts, &grants);
            scope.spawn(move || {
                let mut random = Rng::new();
                while !over.load(Ordering::Relaxed) {
                    attempts.fetch_add(1, Ordering::Relaxed);
                    match check().expect("no session of this part is ended") {
                        Check::Allowed(spent) => {
                            grants.fetch_add(1, Ordering::Relaxed);
                            let at = spent.at.timestamp_micros();
                            send(&Message::Allowed { at });
                        }
                        Check::Limited(_) => thread::sleep(random.millis(0, 5)),
                    }
                }
            });
        }
        let _ = io::read_to_string(io::stdin());
        over.store(true, Ordering::Relaxed);
    });
    send(&Message::Attempted {
        attempts: attempts.into_inner(),
        grants: grants.into_inner(),
    });
    ExitCode::SUCCESS
}
