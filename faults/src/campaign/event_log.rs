//! The records of the workers, and the faults that were injected.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastrand::Rng;

use crate::check::{Death, Failover, History, Outage, Reload, Told};
use crate::clock::{self, Micros};
use crate::fault::Fault;
use crate::half::Half;
use crate::record::{Outcome, Primitive, Record};

/// Collects the histories of all workers, from many threads.
#[derive(Debug, Default)]
pub(super) struct EventLog(Mutex<Events>);

/// The contents of an [`EventLog`].
#[derive(Debug, Default)]
pub(super) struct Events {
    pub(super) history: History,
    pub(super) violations: Vec<String>,
    pub(super) operations: BTreeMap<(Half, Primitive, Outcome), u64>,
    pub(super) faults: BTreeMap<Fault, u64>,
    /// The faults that workers of that half have inflicted on themselves.
    pub(super) inflicted: BTreeMap<(Half, Fault), u64>,
    pub(super) longest_recovery: BTreeMap<Fault, Duration>,
    recovering: Vec<Recovery>,
    /// When the last successful operation began, by worker.
    successes: BTreeMap<(usize, Primitive), Micros>,
    rested: BTreeMap<usize, (u32, u32)>,
}

/// A worker that has not succeeded since a fault.
#[derive(Debug)]
struct Recovery {
    kind: Fault,
    worker: usize,
    since: Micros,
}

impl EventLog {
    pub(super) fn events(&self) -> MutexGuard<'_, Events> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a fault that ended just now, and the workers that it hit.
    pub(super) fn fault(&self, kind: Fault, workers: impl IntoIterator<Item = usize>) {
        self.events().struck(kind, workers);
    }

    /// The kind that was injected least often so far.
    pub(super) fn scarcest(&self, kinds: &[Fault], random: &mut Rng) -> Fault {
        let mut kinds = kinds.to_vec();
        random.shuffle(&mut kinds);
        let events = self.events();
        kinds
            .into_iter()
            .min_by_key(|kind| events.faults.get(kind).copied().unwrap_or(0))
            .expect("there are some")
    }

    pub(super) fn death(&self, pid: i32, death: Death) {
        let deaths = &mut self.events().history.deaths;
        deaths.entry(pid).or_default().push(death);
    }

    /// Records a session before its end is requested.
    pub(super) fn condemned(&self, pid: i32, sent: Micros) {
        let condemned = &mut self.events().history.condemned;
        condemned.entry(pid).or_default().push(sent);
    }

    pub(super) fn reload(&self, reload: Reload) {
        self.events().history.reloads.push(reload);
    }

    pub(super) fn outage(&self, outage: Outage) {
        self.events().history.outages.push(outage);
    }

    pub(super) fn failover(&self, failover: Failover) {
        self.events().history.failovers.push(failover);
    }

    pub(super) fn violation(&self, text: impl Into<String>) {
        self.events().violations.push(text.into());
    }

    pub(super) fn take(&self, worker: usize, half: Half, record: Record) {
        let mut events = self.events();
        match record {
            Record::Did {
                what,
                outcome,
                began,
            } => {
                *events.operations.entry((half, what, outcome)).or_default() += 1;
                if matches!(outcome, Outcome::Done | Outcome::Busy) {
                    events.succeeded(worker, what, began);
                }
            }
            Record::Fault { kind } => {
                *events.inflicted.entry((half, kind)).or_default() += 1;
                events.struck(kind, [worker]);
            }
            Record::Violation { text } => {
                let text = format!("worker {worker}: {text}");
                eprintln!("VIOLATION {text}");
                events.violations.push(text);
            }
            Record::Rested { given, of } => _ = events.rested.insert(worker, (given, of)),
            record => events.history.told.push(Told {
                worker,
                record,
                at: clock::now(),
            }),
        }
    }
}

impl Events {
    fn struck(&mut self, kind: Fault, workers: impl IntoIterator<Item = usize>) {
        let since = clock::now();
        *self.faults.entry(kind).or_default() += 1;
        let hit = workers.into_iter().map(|worker| Recovery {
            kind,
            worker,
            since,
        });
        self.recovering.extend(hit);
    }

    fn succeeded(&mut self, worker: usize, what: Primitive, began: Micros) {
        let latest = self.successes.entry((worker, what)).or_default();
        *latest = began.max(*latest);
        let now = clock::now();
        let longest = &mut self.longest_recovery;
        self.recovering.retain(|recovery| {
            if recovery.worker != worker || began < recovery.since {
                return true;
            }
            let took = Duration::from_micros((now - recovery.since).max(0) as u64);
            let longest = longest.entry(recovery.kind).or_default();
            *longest = took.max(*longest);
            false
        });
    }

    /// Whether the worker has succeeded in an operation of this kind that began since then.
    pub(super) fn has_succeeded(&self, worker: usize, what: Primitive, since: Micros) -> bool {
        self.successes
            .get(&(worker, what))
            .is_some_and(|&began| began >= since)
    }

    /// How many connections the pool of a resting worker gave, and how many it has.
    pub(super) fn rested(&self, worker: usize) -> Option<(u32, u32)> {
        self.rested.get(&worker).copied()
    }
}
