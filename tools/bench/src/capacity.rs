//! How much one server does in a second.

use std::convert::Infallible;
use std::time::Duration;

use diesel_interlock::schedule::RunDue;
use diesel_interlock::{Quota, RateLimit, Schedule};
use workbench::Database;

use crate::Bench;
use crate::compare::{Boxed, threads};
use crate::report::Report;
use crate::server::pool;
use crate::{locks, rate_limits, semaphores, throttles};

const CLIENTS: [usize; 2] = [8, 32];
const KEYS: u32 = 1_000_000;
static WIDE: RateLimit = RateLimit::named("wide", Quota::per_second(1_000_000));

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let few = bench.server.database();
    let many = bench.server.database();
    rate_limits::fill(&few, 10_000);
    rate_limits::fill(&many, KEYS);
    crate::server::run(&many, "CHECKPOINT");
    type Make<'a> = &'a dyn Fn(usize) -> Boxed;
    let rows: [(&str, Make<'_>); 9] = [
        ("session locks, taken and released", &|n| {
            locks::pairs(&few, n)
        }),
        ("grants of a throttle, a key for each client", &|n| {
            throttles::granted(&few, n)
        }),
        ("denials of a throttle, one key", &|n| {
            throttles::denied(&few, n)
        }),
        ("rate limit, allowed, 10,000 keys", &|n| {
            rate_limits::allowed(&few, n, 1)
        }),
        ("rate limit, allowed, a million keys", &|n| {
            rate_limits::allowed(&many, n, KEYS / 10_000)
        }),
        ("rate limit, allowed, one hot key", &|n| hot(&few, n)),
        ("rate limit, limited, one key", &|n| {
            rate_limits::limited(&few, n)
        }),
        ("slots of 64, claimed and released", &|n| {
            semaphores::claims(&few, n)
        }),
        ("ticks, a schedule for each client", &|n| ticks(&few, n)),
    ];
    for (work, make) in rows {
        for clients in CLIENTS {
            report.rate(work, clients, make(clients));
        }
    }
}

/// Threads that are allowed, all for the same key.
fn hot(database: &Database, number: usize) -> Boxed {
    let pool = pool(database, number);
    threads(number, |_| {
        let pool = pool.clone();
        move || {
            let check = WIDE.key("hot").check(&pool).expect("it can be checked");
            assert!(check.is_allowed());
        }
    })
}

/// Threads that run ticks, each of a schedule of its own, which has always a tick that is due.
fn ticks(database: &Database, number: usize) -> Boxed {
    let pool = pool(database, number);
    threads(number, |thread| {
        let (pool, schedule) = (pool.clone(), Schedule::named("often").key(thread));
        move || loop {
            let next = |after| Some(after + Duration::from_micros(1));
            let look = schedule.run_due(&pool, next, |_| Ok::<_, Infallible>(()));
            match look.expect("the server replies") {
                RunDue::Ran => break,
                // The first look stores when the schedule begins.
                RunDue::Later(_) => {}
                other => panic!("{other:?}"),
            }
        }
    })
}
