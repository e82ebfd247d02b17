//! What a worker was told, and the server does not know any more.

use std::collections::{BTreeMap, BTreeSet};

use super::{Failover, Findings, Grant, History, Truth};
use crate::clock::{Micros, SECOND};
use crate::record::Record;

/// How far an asynchronous standby may lag behind: more than it takes to fall over.
const LAG: Micros = 10 * SECOND;

/// How much was lost, by kind.
pub(crate) type Losses = BTreeMap<&'static str, usize>;

/// What an asynchronous failover lost.
#[derive(Debug, Default)]
pub(super) struct Lost {
    pub(super) grants: BTreeSet<Grant>,
    /// By id and time of creation: an id may be given again.
    pub(super) requests: BTreeSet<(i64, Micros)>,
}

/// Looks up everything that was told. What is missing is a violation, unless an asynchronous failover followed.
pub(super) fn find(history: &History, truth: &Truth, findings: &mut Findings) -> Lost {
    let bookings: BTreeSet<_> = truth.bookings.iter().map(|b| (b.lock, b.number)).collect();
    let grants: BTreeSet<_> = truth.grants.iter().collect();
    let requests: BTreeMap<_, _> = truth
        .requests
        .iter()
        .map(|request| ((request.id, request.created), request))
        .collect();

    let mut lost = Lost::default();
    let excused = |sent, kind: &'static str, text: String, findings: &mut Findings| {
        if is_excused(&history.failovers, sent) {
            *findings.losses.entry(kind).or_default() += 1;
        } else {
            findings.violation(text);
        }
    };
    for (worker, record) in &history.told {
        match record {
            Record::Booked { lock, number, sent } => {
                findings.examined("committed bookings", 1);
                if !bookings.contains(&(*lock, *number)) {
                    let text = format!(
                        "worker {worker}: the booking {number} of {lock}, sent at {sent}, is lost"
                    );
                    excused(*sent, "bookings", text, findings);
                }
            }
            Record::Granted {
                resource,
                key,
                at,
                sent,
            } => {
                findings.examined("grants", 1);
                let grant = Grant {
                    resource: resource.clone(),
                    key: key.clone(),
                    at: *at,
                };
                if !grants.contains(&grant) {
                    let text = format!("worker {worker}: {grant:?}, sent at {sent}, is lost");
                    excused(*sent, "grants", text, findings);
                    lost.grants.insert(grant);
                }
            }
            Record::Claimed {
                service,
                id,
                created,
                sent,
                ..
            } => {
                findings.examined("claims", 1);
                if !requests.contains_key(&(*id, *created)) {
                    let text = format!(
                        "worker {worker}: the claim {id} of {service}, sent at {sent}, is lost"
                    );
                    excused(*sent, "claims", text, findings);
                    lost.requests.insert((*id, *created));
                }
            }
            Record::Released {
                id,
                created,
                in_time,
                sent,
            } => {
                findings.examined("releases", 1);
                let completed = requests
                    .get(&(*id, *created))
                    .map(|request| request.completed);
                match completed {
                    Some(Some(_)) if !in_time => findings.violation(format!(
                        "worker {worker}: request {id} was told to have timed out, and is completed"
                    )),
                    Some(None) if *in_time => {
                        let text = format!(
                            "worker {worker}: the release of {id}, sent at {sent}, is lost"
                        );
                        excused(*sent, "releases", text, findings);
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    lost
}

fn is_excused(failovers: &[Failover], sent: Micros) -> bool {
    failovers.iter().any(|failover| {
        !failover.synchronous && sent <= failover.stopped && sent > failover.began - LAG
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted() -> Record {
        Record::Granted {
            resource: "quick".into(),
            key: "a".into(),
            at: 1,
            sent: 100 * SECOND,
        }
    }

    fn history(synchronous: bool) -> History {
        History {
            told: vec![(0, granted())],
            failovers: vec![Failover {
                began: 101 * SECOND,
                stopped: 102 * SECOND,
                synchronous,
            }],
            ..History::default()
        }
    }

    #[test]
    fn an_asynchronous_failover_may_lose_what_was_told() {
        let mut findings = Findings::default();
        let lost = find(&history(false), &Truth::default(), &mut findings);
        assert!(findings.violations.is_empty());
        assert_eq!(findings.losses["grants"], 1);
        assert_eq!(lost.grants.len(), 1);
    }

    #[test]
    fn a_synchronous_one_may_not() {
        let mut findings = Findings::default();
        find(&history(true), &Truth::default(), &mut findings);
        assert_eq!(findings.violations.len(), 1);
    }
}
