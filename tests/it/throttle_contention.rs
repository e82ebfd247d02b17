//! Throttles under many connections at once.

use std::collections::HashMap;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;

use crate::half::{Database, Error, ResourceLabel, Throttle};
use crate::support::{assert_matches, attempt};
use crate::throttles::{Resource, database};

const IMPORT: Throttle<Resource> = Throttle::of(Resource::Import);
const INTERVAL: TimeDelta = TimeDelta::milliseconds(100);
const GRANTS: usize = 20;

/// Attempts on sixteen connections as fast as they can until so many are granted, and returns the times of the grants.
fn hammer(database: &Database, settings: &str) -> Vec<DateTime<Utc>> {
    let grants = Mutex::new(Vec::new());
    let start = Barrier::new(16);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                let conn = &mut database.connect();
                conn.batch_execute(settings).unwrap();
                start.wait();
                let end = Instant::now() + Duration::from_secs(60);
                while grants.lock().unwrap().len() < GRANTS && Instant::now() < end {
                    if let Some(grant) = attempt(conn, &IMPORT, "hammer").granted() {
                        grants.lock().unwrap().push(grant.granted_at);
                    }
                }
            });
        }
    });
    let mut grants = grants.into_inner().unwrap();
    grants.sort();
    grants
}

#[test]
fn no_two_grants_are_closer_than_the_interval_at_any_isolation_level() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = database();
        let settings =
            format!("SET default_transaction_isolation = '{level}'; SET TimeZone = 'Europe/Paris'");
        let grants = hammer(&database, &settings);
        for pair in grants.windows(2) {
            assert!(pair[1] - pair[0] >= INTERVAL, "{level}: {pair:?}");
        }
        assert!(grants.len() >= GRANTS, "{level}: only {}", grants.len());
    }
}

#[test]
fn of_many_first_attempts_at_a_key_one_is_granted() {
    const KEYS: usize = 200;
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = database();
        let start = Barrier::new(16);
        let granted = Mutex::new(HashMap::<usize, i32>::new());
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    conn.batch_execute(&format!("SET default_transaction_isolation = '{level}'"))
                        .unwrap();
                    let rebuild = Throttle::of(Resource::Rebuild);
                    start.wait();
                    for key in 0..KEYS {
                        let decision = attempt(conn, &rebuild.key(key), "me");
                        if decision.granted().is_some() {
                            *granted.lock().unwrap().entry(key).or_default() += 1;
                        }
                    }
                });
            }
        });
        let granted = granted.into_inner().unwrap();
        assert!(
            granted.values().all(|times| *times == 1),
            "{level}: {granted:?}"
        );
        assert_eq!(granted.len(), KEYS, "{level}");
    }
}

#[test]
fn a_stricter_transaction_of_the_caller_is_an_error_that_says_so() {
    use crate::half::prelude::*;
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    let failed = conn.build_transaction().repeatable_read().run(|conn| {
        diesel::sql_query("SELECT 1").execute(conn)?;
        let import = Throttle::of(ResourceLabel("cache rebuild".into()));
        assert!(
            import
                .details("other")
                .attempt_on(other)?
                .granted()
                .is_some()
        );
        // By this transaction's snapshot it is due.
        import.details("me").attempt_on(conn).map(drop)
    });
    assert_matches!(failed, Err(Error::StrictIsolation));
}
