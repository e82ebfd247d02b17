//! Rows of the monitor as JSON, for a status page.

use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::monitor::{Slot, ThrottleState};
use diesel_interlock::{Semaphore, Throttle, migrations};
use serde_json::to_value;
use workbench::Database;

#[test]
fn intervals_are_seconds_and_times_are_text() {
    let database = Database::new();
    let pool = database.pool(1);
    migrations::install(&pool).unwrap();
    let semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(3600));
    let permit = semaphore.try_acquire(&pool).unwrap().admitted().unwrap();
    let throttle = Throttle::named("cache", Duration::from_millis(1500));
    assert!(throttle.attempt(&pool).unwrap().is_granted());

    let conn = &mut database.connect();
    let slot = to_value(Slot::all().first(conn).unwrap()).unwrap();
    assert_eq!(slot["service"], "geocoder");
    assert_eq!(slot["id"], permit.fencing_token());
    assert!((3000.0..=3600.0).contains(&slot["remaining"].as_f64().unwrap()));
    let created: chrono::DateTime<chrono::Utc> =
        slot["created_at"].as_str().unwrap().parse().unwrap();
    assert!(created <= chrono::Utc::now());
    let throttle = to_value(ThrottleState::all().first(conn).unwrap()).unwrap();
    assert_eq!(throttle["throttle_interval"], 1.5);
}
