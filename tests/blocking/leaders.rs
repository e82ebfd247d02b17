//! Elections of the blocking half: one instance leads at a time, and another one follows.
#![cfg(feature = "testing")] // whose terms may be short

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel_interlock::monitor::Leadership;
use diesel_interlock::testing::depose;

use crate::assert_matches;
use crate::half::*;
use crate::support::{
    IN_FLIGHT, Observer, eventually, impatient_pool, installed, number, run, text,
};

const TTL: Duration = Duration::from_millis(600);
const DISPATCHER: Leader = Leader::named("dispatcher", TTL);
/// A term long enough not to be lost on a slow machine, and short enough for a test that waits for
/// its end.
const PATIENT: Leader = Leader::named("dispatcher", Duration::from_secs(12));
const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn one_instance_leads_at_a_time_and_each_term_has_a_larger_token() {
    let database = installed();
    let (begun, terms) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let stop = Stop::new();
    std::thread::scope(|scope| {
        for instance in 0..3 {
            let (begun, terms, stop) = (&begun, &terms, &stop);
            let pool = pool(&database, 2);
            scope.spawn(move || {
                DISPATCHER.lead(&pool, stop, |term| {
                    let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
                    term.pause(Duration::from_millis(20));
                    let mut terms = terms.lock().unwrap();
                    let last = begun.load(Ordering::SeqCst);
                    // A term that a slow machine has lost may overlap with the next one.
                    if term.is_leader() {
                        assert_eq!(number, last, "two instances lead");
                        terms.push((instance, term.fencing_token()));
                    }
                })
            });
        }
        // An instance that has resigned pauses before it is a candidate again, so others have their
        // turn.
        eventually("there were six terms of at least two instances", || {
            let terms = terms.lock().unwrap();
            terms.len() >= 6 && terms.iter().any(|term| term.0 != terms[0].0)
        });
        stop.stop();
    });
    let terms = terms.into_inner().unwrap();
    assert!(terms.windows(2).all(|two| two[0].1 < two[1].1), "{terms:?}");
}

/// The rest lasts half an hour. An instance that is elected again ends the election.
#[test]
fn an_instance_that_has_led_rests_while_another_one_is_elected() {
    let database = installed();
    let (first, second) = (pool(&database, 2), pool(&database, 2));
    let (leader, terms, stop) = (Leader::named("rests", HOUR), AtomicU64::new(0), Stop::new());
    let leads = "(SELECT count(*) FROM resource_control.leader)";
    let admin = &mut database.connect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            leader.lead(&first, &stop, |_| {
                if terms.fetch_add(1, Ordering::SeqCst) > 0 {
                    stop.stop();
                }
            })
        });
        eventually("the first instance has led", || {
            terms.load(Ordering::SeqCst) > 0 && number(admin, leads) == 0
        });
        leader.lead(&second, &stop, |_| stop.stop()).unwrap();
    });
    assert_eq!(terms.into_inner(), 1);
}

#[test]
fn a_stop_resigns_though_the_sessions_of_the_pool_have_ended() {
    const LONG: Leader = Leader::named("long", Duration::from_secs(3600));
    let database = installed();
    for _ in 0..5 {
        let pool = unchecked_pool(&database, 3);
        let stop = Stop::new();
        let led = LONG.lead(&pool, &stop, |_term| {
            on_all(&pool, "SELECT 1").unwrap();
            Observer::of(&database).kill_all();
            stop.stop();
        });
        led.unwrap();
        assert_eq!(number(&mut database.connect(), IN_FLIGHT), 0);
    }
}

#[test]
fn a_stop_ends_the_pause_and_the_term_and_another_instance_leads() {
    let database = installed();
    let pool = pool(&database, 4);
    let (first, second) = (Stop::new(), Stop::new());
    let (elected, followed) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            PATIENT.lead(&pool, &first, |term| {
                elected.store(term.fencing_token() as u64, Ordering::SeqCst);
                assert!(!term.pause(Duration::MAX));
                assert!(!term.is_leader());
            })
        });
        eventually("the first instance leads", || {
            elected.load(Ordering::SeqCst) > 0
        });
        scope.spawn(|| {
            PATIENT.lead(&pool, &second, |term| {
                followed.store(term.fencing_token() as u64, Ordering::SeqCst);
                second.stop();
            })
        });
        first.stop();
        eventually("the second instance leads", || {
            followed.load(Ordering::SeqCst) > 0
        });
    });
    assert!(followed.into_inner() > elected.into_inner());
}

#[test]
fn a_term_is_renewed_and_a_pause_lasts_as_long_as_it_should() {
    let database = installed();
    let pool = pool(&database, 2);
    let (stop, mut lost) = (Stop::new(), 0);
    DISPATCHER
        .lead(&pool, &stop, |term| {
            let began = Instant::now();
            if term.pause(3 * TTL) {
                assert!(began.elapsed() >= 3 * TTL);
                return stop.stop();
            }
            // On a slow machine a term may be lost, but not every term.
            lost += 1;
            assert!(lost < 20, "every term was lost");
        })
        .unwrap();
}

#[test]
fn a_deposed_leader_notices_and_is_a_candidate_again() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let (stop, mut is_deposed) = (Stop::new(), false);
    DISPATCHER
        .lead(&pool, &stop, |term| {
            if is_deposed {
                return stop.stop();
            }
            // On a slow machine the term may be lost before it can be deposed.
            is_deposed = depose(&DISPATCHER, &other).unwrap();
            assert!(!term.pause(Duration::MAX));
            assert!(!term.is_leader() && !stop.is_stopped());
        })
        .unwrap();
    assert!(is_deposed);
}

#[test]
fn after_a_crash_another_instance_leads() {
    let database = installed();
    let pool = pool(&database, 2);
    let admin = &mut database.connect();
    // Nobody renews this request, as after a crash.
    let claim =
        "(SELECT id FROM resource_control.claim_service_request('leader dispatcher', 1, '600 ms'))";
    let crashed = number(admin, claim);
    let stop = Stop::new();
    DISPATCHER
        .lead(&pool, &stop, |term| {
            assert!(term.fencing_token() > crashed);
            stop.stop();
        })
        .unwrap();
    let timed_out = format!(
        "(SELECT count(timed_out_at) FROM resource_control.service_request WHERE id = {crashed})"
    );
    assert_eq!(number(admin, &timed_out), 1);
}

#[test]
fn a_claim_that_takes_longer_than_its_term_does_not_win() {
    let database = installed();
    let pool = pool(&database, 2);
    run(
        &mut database.connect(),
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.7); RETURN NEW; END $$;
        CREATE TRIGGER slow BEFORE INSERT ON resource_control.service_request FOR EACH ROW
            WHEN (NEW.id = 1) EXECUTE FUNCTION slow()",
    );
    let stop = Stop::new();
    DISPATCHER
        .lead(&pool, &stop, |term| {
            assert!(term.fencing_token() > 1);
            stop.stop();
        })
        .unwrap();
}

#[test]
fn a_leader_whose_work_panics_resigns() {
    let database = installed();
    let pool = pool(&database, 2);
    let stop = Stop::new();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        DISPATCHER.lead(&pool, &stop, |_| panic!("the work"))
    }));
    assert!(panicked.is_err());
    let leads =
        "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NULL)";
    let admin = &mut database.connect();
    eventually("nobody leads", || text(admin, leads) == "0");
}

#[test]
fn an_outage_is_retried_and_a_missing_schema_ends_the_election() {
    let database = workbench::Database::new();
    let stop = Stop::new();
    assert_matches!(
        DISPATCHER.lead(&pool(&database, 1), &stop, |_| {}),
        Err(Error::NotInstalled)
    );
    let installed = installed();
    let pool = impatient_pool(&installed, Duration::from_millis(100));
    std::thread::scope(|scope| {
        let conn = pool.get().unwrap();
        let leads = scope.spawn(|| DISPATCHER.lead(&pool, &stop, |_| stop.stop()));
        let began = Instant::now();
        eventually("the pool was empty several times", || began.elapsed() > TTL);
        assert!(!leads.is_finished());
        drop(conn);
        leads.join().unwrap().unwrap();
    });
}

#[test]
fn elections_have_names_and_keys_of_their_own() {
    let database = installed();
    let pool = pool(&database, 2);
    let stopped = Stop::new();
    for bad in [
        Leader::named("", TTL),
        Leader::named("", TTL).key(7),
        Leader::named("x", TTL).key(""),
        Leader::named("a\0b", TTL),
        Leader::named("x".repeat(1000).leak(), TTL),
        Leader::named("x", Duration::from_millis(299)),
        Leader::named("x", Duration::MAX),
    ] {
        let stop = Stop::new();
        assert_matches!(
            bad.lead(&pool, &stop, |_| stop.stop()),
            Err(Error::Input(_))
        );
    }
    stopped.stop();
    DISPATCHER
        .lead(&pool, &stopped, |_| {
            panic!("the election was stopped before")
        })
        .unwrap();
    let nested = Leader::named("shard 1", HOUR).key("a b").details("web-3");
    let (stop, inner) = (Stop::new(), Stop::new());
    nested
        .lead(&pool, &stop, |_| {
            // Another election: the same words, divided differently into name and key.
            Leader::named("shard", HOUR)
                .key("1 a b")
                .lead(&pool, &inner, |_| inner.stop())
                .unwrap();
            let claim = "(SELECT service || ' by ' || details FROM resource_control.service_request \
                        WHERE completed_at IS NULL)";
            assert_eq!(
                text(&mut database.connect(), claim),
                r"leader shard\ 1 a\ b by web-3"
            );
            stop.stop();
        })
        .unwrap();
}

#[test]
fn the_view_shows_who_leads() {
    let database = installed();
    let pool = pool(&database, 2);
    let stop = Stop::new();
    let leader = PATIENT.key("a b").details("web-1");
    leader
        .lead(&pool, &stop, |term| {
            let [leadership] = &Leadership::all().load(&mut database.connect()).unwrap()[..] else {
                panic!("not one leader")
            };
            let names = (leadership.name.as_str(), leadership.holder.as_str());
            assert_eq!(names, ("dispatcher a b", "web-1"));
            assert_eq!(leadership.fencing_token, term.fencing_token());
            stop.stop();
        })
        .unwrap();
}

#[test]
fn a_stop_ends_a_campaign_and_a_term_though_the_pool_is_empty() {
    let database = installed();
    for is_elected in [false, true] {
        // Longer than a test waits.
        let pool = make_pool(&database.url(), 1, Duration::from_secs(600));
        // A term that is not lost while the pool is empty.
        let leader = Leader::named("patient", Duration::from_secs(60)).key(is_elected);
        let stop = Stop::new();
        let is_at_work = std::sync::Barrier::new(2);
        let mut all = (!is_elected).then(|| pool.get().unwrap());
        std::thread::scope(|scope| {
            let leads = scope.spawn(|| {
                leader.lead(&pool, &stop, |term| {
                    is_at_work.wait();
                    assert!(!term.pause(Duration::MAX));
                })
            });
            if is_elected {
                is_at_work.wait();
                all = Some(pool.get().unwrap());
            }
            let began = Instant::now();
            eventually("the pool was empty for a while", || {
                began.elapsed() > Duration::from_millis(300)
            });
            assert!(!leads.is_finished());
            stop.stop();
            eventually("the election has ended", || leads.is_finished());
            leads.join().unwrap().unwrap();
        });
        drop(all);
        // The leader resigns as soon as the pool has a connection.
        let leads =
            "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NULL)";
        let admin = &mut database.connect();
        eventually("nobody leads", || number(admin, leads) == 0);
    }
}

#[test]
fn a_term_notifies_its_holder_of_its_loss() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let stop = Stop::new();
    PATIENT
        .lead(&pool, &stop, |term| {
            assert!(!term.is_lost());
            assert!(depose(&PATIENT, &other).unwrap());
            term.lost();
            assert!(term.is_lost() && !term.is_leader());
            assert!(term.wait_for_loss(HOUR));
            stop.stop();
        })
        .unwrap();
    assert!(stop.is_stopped());
}
