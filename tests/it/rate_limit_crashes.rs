//! What a crash of the server leaves of limits that many clients spend from.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use diesel::prelude::*;
use diesel_interlock::{Quota, RateLimit, migrations};
use workbench::{Cluster, StopMode};

use crate::rate_limits::{allowed, limited};
use crate::support::{eventually, number};

/// Nothing of it comes back while the test runs.
const QUOTA: Quota = Quota::per_day(3).burst(100_000);
const LIMIT: RateLimit = RateLimit::named("crash", QUOTA);

fn connect(cluster: &Cluster) -> PgConnection {
    PgConnection::establish(&cluster.url("postgres")).unwrap()
}

/// What the clients of a limit share.
#[derive(Default)]
struct Clients {
    /// How many units they were told that they have spent.
    told: AtomicU32,
    is_crashing: AtomicBool,
}

impl Clients {
    /// Spends units until the server crashes, and not without end if the test fails before.
    fn spend(&self, cluster: &Cluster, limit: &RateLimit, start: &Barrier) {
        let conn = &mut connect(cluster);
        start.wait();
        for _ in 0..20_000 {
            match limit.check_on(conn) {
                Ok(check) => self.told.fetch_add(allowed(check).units, Ordering::SeqCst),
                Err(_) if self.is_crashing.load(Ordering::SeqCst) => break,
                Err(error) => panic!("{error}"),
            };
        }
    }

    fn told(&self) -> u32 {
        self.told.load(Ordering::SeqCst)
    }
}

/// Returns how many more units the limit allows.
fn rest(limit: &RateLimit, conn: &mut PgConnection) -> u32 {
    let rest = limit.peek_on(conn).unwrap().remaining;
    let _ = allowed(limit.cost(rest).check_on(conn).unwrap());
    limited(limit.check_on(conn).unwrap());
    rest
}

/// Crashes a server while clients spend from either limit. The log reaches the disk with each durable check, or by the WAL
/// writer alone if there is no client of the durable limit.
fn crash(cluster: &Cluster, of_durable: usize, of_other: usize) {
    let (durable, other) = (LIMIT.key("durable").durable(), LIMIT.key("other"));
    let conn = &mut connect(cluster);
    let _ = LIMIT.durable().reset_all_on(conn).unwrap();
    let [durables, others] = [Clients::default(), Clients::default()];
    let start = Barrier::new(of_durable + of_other + 1);
    let on_disk = std::thread::scope(|scope| {
        for _ in 0..of_durable {
            scope.spawn(|| durables.spend(cluster, &durable, &start));
        }
        for _ in 0..of_other {
            scope.spawn(|| others.spend(cluster, &other, &start));
        }
        start.wait();
        // More than one generation of the row.
        eventually("many units are spent", || others.told() > 500);
        let on_disk = others.told();
        let written = number(conn, "pg_current_wal_insert_lsn() - '0/0'");
        eventually("the log reaches the disk", || {
            number(conn, "pg_current_wal_flush_lsn() - '0/0'") >= written
        });
        for clients in [&durables, &others] {
            clients.is_crashing.store(true, Ordering::SeqCst);
        }
        cluster.stop(StopMode::Immediate);
        on_disk
    });
    cluster.start_again();

    let conn = &mut connect(cluster);
    if of_durable > 0 {
        assert!(durables.told() + rest(&durable, conn) <= QUOTA.burst);
    }
    // What was spent after the last moment that is certainly on the disk may be allowed again, and nothing else.
    let rest = rest(&other, conn);
    assert!(
        on_disk + rest <= QUOTA.burst,
        "{on_disk} on the disk, {rest} again, {} in all",
        others.told()
    );
}

#[test]
fn a_crash_while_clients_spend_loses_nothing_that_is_durable_and_of_the_rest_the_last_moments() {
    let cluster = Cluster::start();
    migrations::install(&mut connect(&cluster)).unwrap();
    crash(&cluster, 2, 2);
    crash(&cluster, 0, 4);
    crash(&cluster, 3, 1);
}
