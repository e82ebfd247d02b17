//! What the module for tests sends.

use std::time::Duration;

use super::LOCK;
use crate::half::prelude::*;
use crate::half::{
    Attempt, Database, RoundTrips, Semaphore, Throttle, sync, testing, throttled_resources,
};
use crate::semaphores::database;

throttled_resources! {
    enum Resource { Report = "report" every Duration::from_secs(3600) }
}

/// Makes the call twice, and counts the second. Not all of these statements are kept prepared.
#[track_caller]
fn takes(trips: u64, proxy: &RoundTrips, mut call: impl FnMut()) {
    call();
    assert_eq!(proxy.count(call), trips);
}

#[test]
fn as_many_as_it_says_for_each_question_and_each_change() {
    let database = database();
    let _ = sync::<Resource>(&mut database.connect()).unwrap();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let semaphore = Semaphore::named("asked about", 2, Duration::from_secs(30));
    let report = Throttle::of(Resource::Report);
    takes(1, &proxy, || testing::make_due(conn, &report).unwrap());
    takes(1, &proxy, || {
        testing::make_due(conn, &Throttle::of(Resource::Report).key("a customer")).unwrap()
    });
    takes(1, &proxy, || {
        assert_eq!(testing::expire(conn, &semaphore).unwrap(), 0)
    });
    takes(1, &proxy, || testing::assert_not_held(conn, &LOCK));
    takes(1, &proxy, || {
        testing::assert_none_in_flight(conn, &semaphore)
    });
    takes(2, &proxy, || {
        assert_eq!(testing::requests_in_flight(conn).unwrap(), [])
    });
    takes(1, &proxy, || {
        assert_eq!(testing::held_locks(conn).unwrap().len(), 0)
    });
    takes(3, &proxy, || testing::assert_nothing_held(conn));
}

#[test]
fn three_more_where_locks_are_held() {
    let (empty, installed) = (Database::new(), database());
    for (database, trips) in [(&empty, 2), (&installed, 4)] {
        let proxy = RoundTrips::in_front_of(database);
        let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
        let mut holder = database.connect();
        let Attempt::Acquired(_guard) = LOCK.try_acquire_on(&mut holder).unwrap() else {
            panic!("nobody else wants it");
        };
        takes(trips, &proxy, || {
            assert_eq!(testing::held_locks(conn).unwrap().len(), 1)
        });
    }
}
