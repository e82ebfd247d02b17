//! Results that a worker was given and that the server has lost.

use std::collections::{BTreeMap, BTreeSet};

use super::{Failover, Findings, Grant, History, Told, Truth};
use crate::clock::Micros;
use crate::record::Record;

/// The number of losses by kind.
pub(crate) type Losses = BTreeMap<&'static str, usize>;

/// The losses of asynchronous failovers.
#[derive(Debug, Default)]
pub(super) struct Lost {
    pub(super) grants: BTreeSet<Grant>,
    /// By id and time of creation, because an id may be given again.
    pub(super) requests: BTreeSet<(i64, Micros)>,
    /// The requests whose renewal is lost, and when they would have expired.
    pub(super) renewals: BTreeMap<(i64, Micros), Micros>,
}

/// Looks up every reported result. A missing one is a violation, unless an asynchronous failover followed.
pub(super) fn find(history: &History, truth: &Truth, findings: &mut Findings) -> Lost {
    let bookings: BTreeSet<_> = truth.bookings.iter().map(|b| (b.lock, b.number)).collect();
    let grants: BTreeSet<_> = truth.grants.iter().collect();
    let writes: BTreeSet<_> = truth.writes.iter().map(|w| (w.id, w.token)).collect();
    let requests: BTreeMap<_, _> = truth
        .requests
        .iter()
        .map(|request| ((request.id, request.created), request))
        .collect();

    let mut lost = Lost::default();
    let excused = |sent, at, kind: &'static str, text: String, findings: &mut Findings| {
        if is_excused(&history.failovers, sent, at) {
            *findings.losses.entry(kind).or_default() += 1;
        } else {
            findings.violation(text);
        }
    };
    for Told { worker, record, at } in &history.told {
        let told_at = *at;
        match record {
            Record::Booked { lock, number, sent } => {
                findings.examined("committed bookings", 1);
                if !bookings.contains(&(*lock, *number)) {
                    let text = format!(
                        "worker {worker}: the booking {number} of {lock}, sent at {sent}, is lost"
                    );
                    excused(*sent, told_at, "bookings", text, findings);
                }
            }
            Record::Wrote { id, token, sent } => {
                findings.examined("committed writes behind fences", 1);
                if !writes.contains(&(*id, *token)) {
                    let text = format!(
                        "worker {worker}: the write {id} with {token}, sent at {sent}, is lost"
                    );
                    excused(*sent, told_at, "writes behind fences", text, findings);
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
                    excused(*sent, told_at, "grants", text, findings);
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
                    excused(*sent, told_at, "claims", text, findings);
                    lost.requests.insert((*id, *created));
                }
            }
            Record::Renewed {
                id,
                created,
                expires,
                sent,
            } => {
                findings.examined("renewals", 1);
                let request = requests.get(&(*id, *created));
                if request.is_some_and(|request| request.expires < *expires) {
                    let text = format!(
                        "worker {worker}: the renewal of {id} until {expires}, sent at {sent}, is lost"
                    );
                    excused(*sent, told_at, "renewals", text, findings);
                    let renewal = lost.renewals.entry((*id, *created)).or_default();
                    *renewal = (*renewal).max(*expires);
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
                        excused(*sent, told_at, "releases", text, findings);
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    lost
}

/// Whether the old primary was sent the operation, and returned after the standby was last known to have everything.
pub(super) fn is_excused(failovers: &[Failover], sent: Micros, at: Micros) -> bool {
    failovers.iter().any(|failover| {
        !failover.synchronous && sent <= failover.stopped && at >= failover.followed
    })
}

#[cfg(test)]
mod tests {
    use super::super::Request;
    use super::*;
    use crate::subjects::SEMAPHORES;

    fn told(record: Record, at: Micros) -> Told {
        Told {
            worker: 0,
            record,
            at,
        }
    }

    fn granted() -> Record {
        Record::Granted {
            resource: "quick".into(),
            key: "a".into(),
            at: 1,
            sent: 100,
        }
    }

    fn history(synchronous: bool, at: Micros) -> History {
        History {
            told: vec![told(granted(), at)],
            failovers: vec![Failover {
                followed: 101,
                began: 102,
                stopped: 103,
                synchronous,
            }],
            ..History::default()
        }
    }

    #[test]
    fn an_asynchronous_failover_may_lose_what_was_confirmed() {
        let mut findings = Findings::default();
        let lost = find(&history(false, 101), &Truth::default(), &mut findings);
        assert!(findings.violations.is_empty());
        assert_eq!(findings.losses["grants"], 1);
        assert_eq!(lost.grants.len(), 1);
    }

    #[test]
    fn a_permit_that_is_believed_longer_than_the_server_knows_has_lost_its_renewal() {
        let request = Request {
            id: 1,
            service: SEMAPHORES[0].service().into(),
            slot: 0,
            created: 10,
            expires: 200,
            completed: None,
        };
        let truth = Truth {
            requests: vec![request],
            ..Truth::default()
        };
        let renewed = |expires| Record::Renewed {
            id: 1,
            created: 10,
            expires,
            sent: 100,
        };
        for (synchronous, expires, violations, renewals) in
            [(false, 200, 0, 0), (false, 201, 0, 1), (true, 201, 1, 1)]
        {
            let mut history = history(synchronous, 101);
            history.told = vec![told(renewed(expires), 101)];
            let mut findings = Findings::default();
            let lost = find(&history, &truth, &mut findings);
            assert_eq!(findings.violations.len(), violations);
            assert_eq!(lost.renewals.len(), renewals);
        }
    }

    #[test]
    fn nothing_is_lost_that_had_reached_the_standby() {
        let mut findings = Findings::default();
        find(&history(false, 100), &Truth::default(), &mut findings);
        assert_eq!(findings.violations.len(), 1);
    }

    #[test]
    fn a_synchronous_failover_may_not() {
        let mut findings = Findings::default();
        find(&history(true, 101), &Truth::default(), &mut findings);
        assert_eq!(findings.violations.len(), 1);
    }
}
