//! Elections of the asynchronous half: the future of a leader's work is dropped when its term is lost.
#![cfg(feature = "testing")] // whose terms may be short

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use diesel_interlock::testing::depose;
use workbench::block_on;

use crate::assert_matches;
use crate::half::*;
use crate::support::{eventually, installed, number, run, truth};

const TTL: Duration = Duration::from_millis(600);
static DISPATCHER: Leader = Leader::named("dispatcher", TTL);

/// Tells that a future was dropped.
struct Leads(Arc<AtomicI64>);

impl Leads {
    fn begin(leading: &Arc<AtomicI64>) -> Self {
        assert_eq!(leading.fetch_add(1, Ordering::SeqCst), 0, "two lead");
        Self(leading.clone())
    }
}

impl Drop for Leads {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn one_leads_at_a_time_also_in_spawned_tasks() {
    let database = installed();
    let (leading, terms) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicU64::new(0)));
    let runtime = workbench::runtime();
    let instances: Vec<_> = (0..3)
        .map(|_| {
            let (pool, leading, terms) = (pool(&database, 2), leading.clone(), terms.clone());
            runtime.spawn(async move {
                let leads = DISPATCHER.lead(&pool, |term| {
                    let (leads, terms) = (Leads::begin(&leading), terms.clone());
                    async move {
                        let last = terms.swap(term.fencing_token() as u64, Ordering::SeqCst);
                        assert!(last < term.fencing_token() as u64 && term.is_leader());
                        term.pause(Duration::from_millis(20)).await;
                        drop(leads);
                    }
                });
                leads.await.map(drop)
            })
        })
        .collect();
    let look = &mut database.connect();
    let ended = "(SELECT count(completed_at) FROM resource_control.service_request)";
    eventually("there were five terms", || number(look, ended) >= 5);
    for instance in instances {
        assert!(!instance.is_finished());
        instance.abort();
    }
    let leads =
        "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NULL)";
    eventually("nobody leads", || number(look, leads) == 0);
}

#[test]
fn the_work_of_a_leader_that_is_deposed_is_dropped_and_it_stands_again() {
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
            while terms.load(Ordering::SeqCst) < 1 {
                tokio::task::yield_now().await;
            }
            assert!(depose(&DISPATCHER, &other).await.unwrap());
            while terms.load(Ordering::SeqCst) < 2 {
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

/// The renewal of its term hangs.
#[test]
fn the_work_is_dropped_before_another_leads() {
    let database = installed();
    let pool = pool(&database, 2);
    let (look, open) = (&mut database.connect(), &mut database.connect());
    let (leading, terms) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicU64::new(0)));
    let leads = {
        let (leading, terms) = (leading.clone(), terms.clone());
        workbench::runtime().spawn(async move {
            // With a second to spare on a slow machine.
            let leader = Leader::named("dispatcher", Duration::from_secs(10));
            let leads = leader.lead(&pool, |_| {
                terms.fetch_add(1, Ordering::SeqCst);
                let leads = Leads::begin(&leading);
                async move {
                    let _leads = leads;
                    std::future::pending().await
                }
            });
            leads.await.map(drop)
        })
    };
    eventually("it leads", || terms.load(Ordering::SeqCst) == 1);
    run(
        open,
        "BEGIN; SELECT FROM resource_control.service_request FOR UPDATE",
    );
    eventually("its work is dropped", || {
        leading.load(Ordering::SeqCst) == 0
    });
    let is_held = "(SELECT expires_at > clock_timestamp() FROM resource_control.service_request)";
    assert!(truth(look, is_held));
    leads.abort();
    run(open, "COMMIT");
}

#[test]
fn a_missing_schema_and_bad_input_end_it() {
    let database = workbench::Database::new();
    let pool = pool(&database, 1);
    let led = block_on(DISPATCHER.lead(&pool, |_| std::future::pending()));
    assert_matches!(led, Err(Error::NotInstalled));
    let bad = Leader::named("", TTL);
    let led = block_on(bad.lead(&pool, |_| std::future::pending()));
    assert_matches!(led, Err(Error::Input(_)));
}
