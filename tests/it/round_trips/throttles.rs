//! Throttles, granted and denied.

use std::time::Duration;

use super::takes;
use crate::half::prelude::*;
use crate::half::{
    Decision, Error, RoundTrips, Throttle, silent_pool, sync, sync_intervals, throttled_resources,
};
use crate::semaphores::database;
use crate::support::{attempt, is_granted};

throttled_resources! {
    enum Resource {
        AtOnce = "due at once" every Duration::from_micros(1),
        Hourly = "due in an hour" every Duration::from_secs(3600),
    }
}

#[test]
fn one_for_an_attempt_with_any_decision() {
    let database = database();
    let _ = sync::<Resource>(&mut database.connect()).unwrap();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = &silent_pool(&proxy, 1);
    for key in [None, Some("tenant 7")] {
        let throttle = |resource| {
            let throttle = Throttle::of(resource);
            match key {
                Some(key) => throttle.key(key),
                None => throttle,
            }
        };
        let (at_once, hourly) = (throttle(Resource::AtOnce), throttle(Resource::Hourly));
        let conn = &mut pool.get().unwrap();
        let mut attempt =
            |throttle: &Throttle<Resource>| attempt(conn, throttle, "web-3").granted();
        takes(1, &proxy, || assert!(attempt(&at_once).is_some()));
        assert!(attempt(&hourly).is_some());
        takes(1, &proxy, || assert_eq!(attempt(&hourly), None));
    }
    // The first attempt of a key makes its row.
    let conn = &mut pool.get().unwrap();
    let mut tenant = 0;
    takes(1, &proxy, || {
        tenant += 1;
        let throttle = Throttle::of(Resource::Hourly).key(format!("new {tenant}"));
        assert!(is_granted(conn, &throttle, "web-3"));
    });
}

#[test]
fn one_for_the_closure_forms() {
    let database = database();
    let _ = sync::<Resource>(&mut database.connect()).unwrap();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = &silent_pool(&proxy, 1);
    let (at_once, hourly) = (
        Throttle::of(Resource::AtOnce),
        Throttle::of(Resource::Hourly),
    );
    let done = |outcome| matches!(outcome, Decision::Granted(()));
    let nothing = |_| Ok::<_, Error>(());
    takes(1, &proxy, || {
        assert!(done(at_once.details("web-3").run(pool, nothing).unwrap()))
    });
    assert!(done(hourly.details("web-3").run(pool, nothing).unwrap()));
    takes(1, &proxy, || {
        assert!(!done(hourly.details("web-3").run(pool, nothing).unwrap()))
    });
    let conn = &mut pool.get().unwrap();
    let nothing_on = |_: &mut PgConnection, _| Ok::<_, Error>(());
    takes(1, &proxy, || {
        assert!(done(
            at_once.details("web-3").run_on(conn, nothing_on).unwrap()
        ))
    });
    takes(1, &proxy, || {
        assert!(!done(
            hourly.details("web-3").run_on(conn, nothing_on).unwrap()
        ))
    });
}

/// Its statements are not kept prepared: it runs once per start of a program.
#[test]
fn synchronizing_takes_one_per_resource_when_there_is_nothing_to_do() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    assert_eq!(
        proxy.count(|| assert!(sync::<Resource>(conn).unwrap().added.is_empty())),
        2
    );
    assert_eq!(
        proxy.count(|| assert!(
            sync_intervals::<Resource>(conn)
                .unwrap()
                .different
                .is_empty()
        )),
        2
    );
    diesel::sql_query("UPDATE resource_control.throttled_resource SET throttle_interval = '1 day'")
        .execute(conn)
        .unwrap();
    assert_eq!(
        proxy.count(|| assert_eq!(sync::<Resource>(conn).unwrap().different.len(), 2)),
        2
    );
    let overwriting = || assert_eq!(sync_intervals::<Resource>(conn).unwrap().different.len(), 2);
    assert_eq!(
        proxy.count(overwriting),
        4,
        "one more for each that differs"
    );
}
