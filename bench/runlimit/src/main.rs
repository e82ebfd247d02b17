//! Checks one key with runlimit-postgres for a while, and prints how many checks a second were made.
//!
//! `bench_runlimit URL CLIENTS MILLISECONDS LIMIT`: with a limit of 1, all checks but the first are denied; with another one,
//! all are allowed.

use std::env::args;
use std::time::{Duration, Instant};

use runlimit_core::{Check, FixedWindowPolicy, KeyHasher, PolicyId, ScopeId};
use runlimit_postgres::PostgresLimiter;
use sqlx::postgres::PgPoolOptions;

#[tokio::main]
async fn main() {
    let arguments: Vec<_> = args().skip(1).collect();
    let [url, clients, milliseconds, limit] = arguments.as_slice() else {
        panic!("usage: bench_runlimit URL CLIENTS MILLISECONDS LIMIT");
    };
    let number = |text: &String| text.parse::<u32>().expect("it is a number");
    let (clients, limit) = (number(clients), number(limit));
    let slice = Duration::from_millis(number(milliseconds).into());
    let pool = PgPoolOptions::new()
        .max_connections(clients)
        .min_connections(clients)
        .test_before_acquire(false)
        .connect(url)
        .await
        .expect("the server accepts connections");
    let limiter = PostgresLimiter::new(pool);
    limiter
        .migrate()
        .await
        .expect("the schema can be installed");

    let checks = (0..clients).map(|_| tokio::spawn(check(limiter.clone(), limit, slice)));
    let mut rate = 0.0;
    for checks in checks.collect::<Vec<_>>() {
        rate += checks.await.expect("a client does not panic");
    }
    println!("{rate}");
}

/// Checks for as long as half a slice, which does not count, and for a slice. Returns how many checks a second it made then.
async fn check(limiter: PostgresLimiter, limit: u32, slice: Duration) -> f64 {
    let policy = FixedWindowPolicy::new(
        PolicyId::new("api").expect("it is a name"),
        ScopeId::new(format!("at most {limit}").replace(' ', "-")).expect("it is a name"),
        limit.into(),
        Duration::from_secs(3600),
    );
    let policy = policy.expect("it is a policy");
    let hasher = KeyHasher::new([7; 32]).expect("it is a secret");
    let key = hasher.hash_for(&policy, b"hot");
    let mut rate = 0.0;
    for slice in [slice / 2, slice] {
        let began = Instant::now();
        let mut count = 0;
        while began.elapsed() < slice {
            let decision = limiter.check(&Check::new(&policy, key)).await;
            let is_allowed = decision.expect("it is decided").is_allowed();
            assert!(limit == 1 || is_allowed, "it is allowed");
            count += 1;
        }
        rate = f64::from(count) / began.elapsed().as_secs_f64();
    }
    rate
}
