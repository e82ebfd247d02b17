//! Reading who leads, and terms that are lost.
#![cfg(feature = "testing")] // whose terms may be short

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::testing::depose;

use crate::half::monitor::Leadership;
use crate::half::*;
use crate::support::{eventually, installed};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn every_instance_reads_who_leads() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let of_election = Leader::named("dispatcher", 20 * SECOND);
    for leader in [of_election.clone(), of_election.key("a b")] {
        let leader = leader.details("web-3");
        let current = || wait(leader.current(&other)).unwrap();
        assert_eq!(current(), None);
        let token = AtomicU64::new(0);
        while_it_leads(
            &leader,
            &pool,
            |its| token.store(its, Ordering::SeqCst),
            || {
                eventually("the instance leads", || token.load(Ordering::SeqCst) > 0);
                let leads = current().unwrap();
                assert_eq!(leads.fencing_token as u64, token.load(Ordering::SeqCst));
                assert_eq!(leads.holder, "web-3");
                assert!(leads.since < leads.until);
                // The view shows the same, except `until`, which a renewal may have moved.
                let of_view = Leadership::all().load(&mut database.connect()).unwrap();
                let [of_view] = &of_view[..] else {
                    panic!("not one leader: {of_view:?}")
                };
                assert_eq!(
                    (
                        &of_view.name,
                        &of_view.holder,
                        of_view.since,
                        of_view.fencing_token
                    ),
                    (&leads.name, &leads.holder, leads.since, leads.fencing_token)
                );
                // Nobody leads under another key.
                assert_eq!(wait(leader.key("another").current(&other)).unwrap(), None);
            },
        );
        eventually("the leader has resigned", || current().is_none());
    }
    for bad in [Leader::named("", 20 * SECOND), of_election.key("")] {
        assert!(matches!(wait(bad.current(&other)), Err(Error::Input(_))));
    }
}

#[test]
fn an_instance_whose_term_has_expired_is_not_the_leader() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    // The term is so long that its first renewal comes long after the test.
    let leader = Leader::named("expired", 600 * SECOND);
    let terms = AtomicU64::new(0);
    let elected = |_| {
        terms.fetch_add(1, Ordering::SeqCst);
    };
    while_it_leads(&leader, &pool, elected, || {
        eventually("the instance leads", || terms.load(Ordering::SeqCst) == 1);
        assert!(wait(leader.current(&other)).unwrap().is_some());
        assert!(wait(depose(&leader, &other)).unwrap());
        assert_eq!(wait(leader.current(&other)).unwrap(), None);
    });
}

/// A pause of the machine may also end such a short term, so rounds are repeated.
#[cfg(feature = "metrics")]
#[test]
fn a_term_that_is_lost_is_counted_as_deposed_once() {
    use workbench::RoundTrips;

    use crate::support::exporter::{Metrics, exported};
    use crate::support::{fresh, once_at_least};

    let _ = exported();
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let (pool, other) = (make_pool(&proxy.url(), 2, 20 * SECOND), pool(&database, 1));
    for is_cut in [false, true] {
        once_at_least("one of two terms is deposed", || {
            let name = fresh("deposed");
            let metrics = Metrics(name);
            let leader = Leader::named(name, SECOND);
            let terms = AtomicU64::new(0);
            let elected = |_| {
                terms.fetch_add(1, Ordering::SeqCst);
            };
            let mut is_held_once = false;
            while_it_leads(&leader, &pool, elected, || {
                eventually("the instance leads", || terms.load(Ordering::SeqCst) > 0);
                is_held_once = (metrics.held(), metrics.lost()) == (1.0, 0.0);
                if is_cut {
                    proxy.cut();
                    eventually("the term is lost", || metrics.lost() > 0.0);
                    proxy.sever();
                    proxy.restore();
                } else {
                    let _ = wait(depose(&leader, &other)).unwrap();
                }
                eventually("the instance leads again", || {
                    terms.load(Ordering::SeqCst) > 1
                });
            });
            let outcomes = ["deposed", "resigned", "lost", "released"];
            let ends = || outcomes.map(|outcome| metrics.operations(outcome));
            eventually("all ends are counted", || {
                let began = terms.load(Ordering::SeqCst) as f64;
                let ended = metrics.holdings();
                metrics.held() == 0.0 && ended >= began && ended == ends().iter().sum::<f64>()
            });
            assert_eq!(metrics.operations("deposed"), metrics.lost());
            is_held_once && (ends(), metrics.lost()) == ([1.0, 1.0, 0.0, 0.0], 1.0)
        });
    }
}
