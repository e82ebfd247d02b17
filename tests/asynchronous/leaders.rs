//! Elections of the asynchronous half: the future of a leader's work is dropped when its term is
//! lost.
#![cfg(feature = "testing")] // whose terms may be short

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use diesel_interlock::testing::depose;
use workbench::block_on;

use crate::assert_matches;
use crate::half::*;
use crate::support::{eventually, installed, number, run, truth};

const TTL: Duration = Duration::from_millis(600);
static DISPATCHER: Leader = Leader::named("dispatcher", TTL);

/// Counts in the work of a leader, and counts out when the future of the work is dropped.
struct Leads(Arc<AtomicI64>);

impl Leads {
    fn begin(leading: &Arc<AtomicI64>) -> Self {
        assert_eq!(
            leading.fetch_add(1, Ordering::SeqCst),
            0,
            "two terms at a time"
        );
        Self(leading.clone())
    }
}

impl Drop for Leads {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn one_instance_leads_at_a_time_also_in_spawned_tasks() {
    let database = installed();
    let (begun, terms) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(Mutex::new(Vec::new())),
    );
    let runtime = workbench::runtime();
    let instances: Vec<_> = (0..3)
        .map(|_| {
            let (pool, begun, terms) = (pool(&database, 2), begun.clone(), terms.clone());
            runtime.spawn(async move {
                let leads = DISPATCHER.lead(&pool, |term| {
                    let (begun, terms) = (begun.clone(), terms.clone());
                    async move {
                        let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
                        term.pause(Duration::from_millis(20)).await;
                        let mut terms = terms.lock().unwrap();
                        let last = begun.load(Ordering::SeqCst);
                        // A term that a slow machine has lost may overlap with the next one.
                        if term.is_leader() {
                            assert_eq!(number, last, "two instances lead");
                            terms.push(term.fencing_token());
                        }
                    }
                });
                leads.await.map(drop)
            })
        })
        .collect();
    eventually("there were five terms", || terms.lock().unwrap().len() >= 5);
    for instance in instances {
        assert!(!instance.is_finished());
        instance.abort();
    }
    let terms = terms.lock().unwrap();
    assert!(terms.windows(2).all(|two| two[0] < two[1]), "{terms:?}");
    let admin = &mut database.connect();
    let leads = "(SELECT count(*) FROM resource_control.leader)";
    eventually("nobody leads", || number(admin, leads) == 0);
}

/// The rest lasts half an hour.
#[test]
fn an_instance_that_has_led_rests_while_another_one_is_elected() {
    let database = installed();
    let (first, second) = (pool(&database, 2), pool(&database, 2));
    let leader = Leader::named("rests", Duration::from_secs(3600));
    let (terms, is_elected) = (AtomicU64::new(0), AtomicU64::new(0));
    block_on(async {
        let leads = leader.lead(&first, |_| {
            terms.fetch_add(1, Ordering::SeqCst);
            std::future::ready(())
        });
        let follows = async {
            while terms.load(Ordering::SeqCst) == 0
                || leader.current(&second).await.unwrap().is_some()
            {
                tokio::task::yield_now().await;
            }
            let follows = leader.lead(&second, |_| {
                is_elected.store(1, Ordering::SeqCst);
                std::future::pending()
            });
            follows.await
        };
        let is_over = async {
            while is_elected.load(Ordering::SeqCst) == 0 && terms.load(Ordering::SeqCst) < 2 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            ended = leads => panic!("{ended:?}"),
            ended = follows => panic!("{ended:?}"),
            () = is_over => {}
        }
    });
    assert_eq!(terms.into_inner(), 1);
}

#[test]
fn the_work_of_a_deposed_leader_is_dropped_and_the_instance_is_a_candidate_again() {
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let (leading, terms) = (Arc::new(AtomicI64::new(0)), AtomicU64::new(0));
    block_on(async {
        let leads = DISPATCHER.lead(&pool, |_| {
            terms.fetch_add(1, Ordering::SeqCst);
            let leads = Leads::begin(&leading);
            async move {
                let _leads = leads;
                std::future::pending().await
            }
        });
        let deposes = async {
            while terms.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
            let (mut last, mut is_deposed) = (0, false);
            // On a slow machine the term may be lost before it can be deposed.
            while !is_deposed {
                last = terms.load(Ordering::SeqCst);
                is_deposed = depose(&DISPATCHER, &other).await.unwrap();
            }
            while terms.load(Ordering::SeqCst) == last {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            ended = leads => panic!("{ended:?}"),
            () = deposes => {}
        }
    });
    assert_eq!(leading.load(Ordering::SeqCst), 0);
}

/// The renewal of the term hangs, because another transaction has locked the row.
#[test]
fn the_work_is_dropped_before_another_instance_can_lead() {
    let database = installed();
    let pool = pool(&database, 2);
    let (admin, open) = (&mut database.connect(), &mut database.connect());
    // The work must be dropped half a second before another instance could lead. On a slow machine
    // it may not be, so rounds are repeated.
    let is_proved = (0..20).any(|round| {
        let leader = Leader::named("dispatcher", Duration::from_secs(5)).key(round);
        let (leading, terms) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicU64::new(0)));
        let leads = {
            let (pool, leading, terms) = (pool.clone(), leading.clone(), terms.clone());
            workbench::runtime().spawn(async move {
                let leads = leader.lead(&pool, |_| {
                    let leads = Leads::begin(&leading);
                    terms.fetch_add(1, Ordering::SeqCst);
                    async move {
                        let _leads = leads;
                        std::future::pending().await
                    }
                });
                leads.await.map(drop)
            })
        };
        eventually("the instance leads", || terms.load(Ordering::SeqCst) >= 1);
        run(
            open,
            "BEGIN; SELECT FROM resource_control.service_request FOR UPDATE",
        );
        eventually("the work is dropped", || {
            leading.load(Ordering::SeqCst) == 0
        });
        let is_held = "(SELECT max(expires_at) > clock_timestamp() + interval '200 ms'
            FROM resource_control.service_request)";
        let is_early = truth(admin, is_held);
        leads.abort();
        run(open, "COMMIT");
        is_early
    });
    assert!(is_proved);
}

#[test]
fn a_missing_schema_and_bad_input_end_an_election() {
    let database = workbench::Database::new();
    let pool = pool(&database, 1);
    let led = block_on(DISPATCHER.lead(&pool, |_| std::future::pending()));
    assert_matches!(led, Err(Error::NotInstalled));
    let bad = Leader::named("", TTL);
    let led = block_on(bad.lead(&pool, |_| std::future::pending()));
    assert_matches!(led, Err(Error::Input(_)));
}

#[test]
fn a_term_notifies_another_task_of_its_loss() {
    static PATIENT: Leader = Leader::named("dispatcher", Duration::from_secs(12));
    let database = installed();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    let (elected, mut terms) = tokio::sync::mpsc::unbounded_channel();
    let leads = PATIENT.lead(&pool, |term| {
        elected.send(term).unwrap();
        std::future::pending()
    });
    block_on(async {
        let lost = async {
            let term = terms.recv().await.unwrap();
            assert!(!term.is_lost());
            assert!(depose(&PATIENT, &other).await.unwrap());
            term.lost().await;
            assert!(term.is_lost() && !term.is_leader());
            assert!(term.wait_for_loss(Duration::MAX).await);
        };
        tokio::select! {
            led = leads => match led.unwrap() {},
            () = lost => {}
        }
    });
}
