//! A database that does not reply does not delay releases in another database.

use std::time::Duration;

use diesel_interlock::Semaphore;
use workbench::RoundTrips;

use crate::half::{make_pool, pool};
use crate::support::{IN_FLIGHT, eventually, installed, number};

static SLOT: Semaphore = Semaphore::named("silence", 1, Duration::from_secs(3600));

#[test]
fn late_releases_of_a_silent_database_do_not_hold_up_those_of_another() {
    let (silent, healthy) = (installed(), installed());
    let proxy = RoundTrips::in_front_of(&silent);
    let pools = [
        make_pool(&proxy.url(), 1, Duration::from_secs(20)),
        pool(&healthy, 1),
    ];
    let permits = pools.each_ref().map(|pool| SLOT.acquire(pool).unwrap());
    let [first, second] = permits;
    let lent = pools[0].get().unwrap();
    drop(first);
    proxy.cut();
    // The late release is sent now, and has no reply.
    drop(lent);
    let lent = pools[1].get().unwrap();
    drop(second);
    let admin = &mut healthy.connect();
    assert_eq!(number(admin, IN_FLIGHT), 1);
    drop(lent);
    eventually("the slot of the healthy database is free", || {
        number(admin, IN_FLIGHT) == 0
    });
    assert_eq!(number(&mut silent.connect(), IN_FLIGHT), 1);
    proxy.restore();
    let admin = &mut silent.connect();
    eventually("the slot of the silent database is free, too", || {
        number(admin, IN_FLIGHT) == 0
    });
}
