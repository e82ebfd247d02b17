//! One instance leads, and hands over.

use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::monitor::Leadership;

use crate::assert_matches;
use crate::half::{Error, Leader, Semaphore, Stop, pool};
use crate::support::{eventually, installed, run};

const TTL: Duration = Duration::from_millis(600);

static LEADER: Leader = Leader::named("dispatcher of mails", TTL);

#[test]
fn one_leads_at_a_time_and_each_term_has_a_larger_token() {
    let database = installed();
    let (leading, terms, last) = (AtomicI32::new(0), AtomicI32::new(0), AtomicI64::new(0));
    thread::scope(|scope| {
        let stop = Stop::new();
        for _ in 0..3 {
            let (stop, database) = (stop.clone(), &database);
            let (leading, terms, last) = (&leading, &terms, &last);
            scope.spawn(move || {
                let pool = pool(database, 2);
                let led = LEADER.lead(&pool, &stop, |term| {
                    assert_eq!(leading.fetch_add(1, Ordering::SeqCst), 0);
                    assert!(last.swap(term.token(), Ordering::SeqCst) < term.token());
                    term.pause(Duration::from_millis(20));
                    leading.fetch_sub(1, Ordering::SeqCst);
                    terms.fetch_add(1, Ordering::SeqCst);
                });
                led.unwrap();
            });
        }
        eventually("there were ten terms", || {
            terms.load(Ordering::SeqCst) >= 10
        });
        stop.stop();
    });
    assert_eq!(
        Leadership::all().load(&mut database.connect()).unwrap(),
        [],
        "a stop resigns"
    );
}

#[test]
fn the_view_tells_who_leads() {
    let database = installed();
    let pool = pool(&database, 2);
    let stop = Stop::new();
    let leader = LEADER.key("a b").details("web-1");
    leader
        .lead(&pool, &stop, |term| {
            let [leadership] = &Leadership::all().load(&mut database.connect()).unwrap()[..] else {
                panic!("nobody leads")
            };
            assert_eq!(
                (leadership.name.as_str(), leadership.holder.as_str()),
                (r"dispatcher of mails a b", "web-1")
            );
            assert_eq!(leadership.token, term.token());
            stop.stop();
            assert!(!term.is_leader());
            assert!(!term.pause(Duration::from_secs(3600)), "it returns at once");
        })
        .unwrap();
}

#[test]
fn a_leader_that_is_deposed_is_told() {
    let database = installed();
    let pool = pool(&database, 2);
    let stop = Stop::new();
    LEADER
        .lead(&pool, &stop, |term| {
            run(
                &mut database.connect(),
                "UPDATE resource_control.service_request SET completed_at = clock_timestamp()",
            );
            while term.pause(Duration::from_secs(3600)) {}
            assert!(!term.is_leader());
            stop.stop();
        })
        .unwrap();
}

#[test]
fn a_stop_ends_a_campaign() {
    let database = installed();
    let pool = pool(&database, 2);
    let stop = Stop::new();
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let leader = Leader::named("other", Duration::from_secs(60));
            leader.lead(&pool, &stop, |_| {
                sender.send(()).unwrap();
                while !stop.is_stopped() {
                    thread::yield_now();
                }
            })
        });
        receiver.recv().unwrap();
        let candidate = scope.spawn(|| {
            Leader::named("other", Duration::from_secs(60))
                .lead(&pool, &stop, |_| panic!("two lead"))
        });
        stop.stop();
        candidate.join().unwrap().unwrap();
    });
}

#[test]
fn no_semaphore_has_the_service_of_a_leader() {
    let database = installed();
    let pool = pool(&database, 1);
    let second = Duration::from_secs(1);
    for semaphore in [
        Semaphore::named("leader dispatcher", 1, second),
        Semaphore::named("leader", 1, second).key("dispatcher"),
    ] {
        assert_matches!(semaphore.try_acquire(&pool), Err(Error::Input(_)));
    }
    for leader in [
        Leader::named("", TTL),
        Leader::named("x", Duration::from_millis(1)),
    ] {
        assert_matches!(
            leader.lead(&pool, &Stop::new(), |_| ()),
            Err(Error::Input(_))
        );
    }
}
