//! Semaphores: never more than N in flight, and fencing ids that ascend per slot.

use std::collections::BTreeMap;

use super::lost::Lost;
use super::{Findings, History, Request, Told, Truth};
use crate::clock::Micros;
use crate::record::Record;
use crate::subjects::{BY_THE_ARTICLE, SEMAPHORES};

pub(super) fn examine(history: &History, truth: &Truth, lost: &Lost, findings: &mut Findings) {
    findings.examined("requests", truth.requests.len());
    by_the_server(truth, findings);
    by_belief(history, truth, lost, findings);
    ids_ascend(truth, findings);
    reissued_ids(truth, lost, findings);
}

fn slots(service: &str) -> usize {
    SEMAPHORES
        .iter()
        .chain([&BY_THE_ARTICLE])
        .find(|semaphore| semaphore.service() == service)
        .map_or(0, |semaphore| semaphore.slots() as usize)
}

impl Request {
    /// The time from which the request no longer counts.
    fn ended(&self) -> Micros {
        self.completed.unwrap_or(self.expires)
    }
}

/// The time that a request has a slot.
#[derive(Clone, Copy)]
struct Stay {
    id: i64,
    from: Micros,
    until: Micros,
    lost: bool,
}

/// The requests that the stored functions have claimed. The article's steps read the clock and draw the id before they have
/// the slot.
fn ours(truth: &Truth) -> impl Iterator<Item = &Request> {
    truth
        .requests
        .iter()
        .filter(|request| request.service != BY_THE_ARTICLE.service())
}

fn by_the_server(truth: &Truth, findings: &mut Findings) {
    let mut stays: BTreeMap<&str, Vec<Stay>> = BTreeMap::new();
    for request in ours(truth) {
        stays.entry(&request.service).or_default().push(Stay {
            id: request.id,
            from: request.created,
            until: request.ended(),
            lost: false,
        });
    }
    for (service, stays) in stays {
        for crowd in crowds(stays, slots(service)) {
            findings.violation(format!(
                "semaphore {service}: in flight were {}",
                list(&crowd)
            ));
        }
    }
}

/// The reports of permits about themselves, which never exceed the records of the server.
fn by_belief(history: &History, truth: &Truth, lost: &Lost, findings: &mut Findings) {
    let expiries: BTreeMap<_, _> = truth
        .requests
        .iter()
        .map(|request| ((request.id, request.created), request.expires))
        .collect();
    let mut created: BTreeMap<(usize, i64), Micros> = BTreeMap::new();
    let mut stays: BTreeMap<&str, Vec<Stay>> = BTreeMap::new();
    for Told { worker, record, .. } in &history.told {
        match record {
            Record::Claimed {
                id, created: at, ..
            } => _ = created.insert((*worker, *id), *at),
            Record::Believed {
                service,
                id,
                from,
                until,
            } => {
                findings.examined("beliefs in a permit", 1);
                let Some(&at) = created.get(&(*worker, *id)) else {
                    continue;
                };
                let is_lost = lost.requests.contains(&(*id, at));
                let expires = expiries.get(&(*id, at)).copied();
                let renewed = lost.renewals.get(&(*id, at)).copied();
                if let Some(expires) = expires.max(renewed).filter(|expires| until > expires) {
                    findings.violation(format!(
                        "semaphore {service}: worker {worker} believed in {id} at {until}, which had expired at {expires}"
                    ));
                }
                // From the expiry that the server knows on, another one may have the slot of a lost renewal.
                let known = expires
                    .filter(|_| renewed.is_some())
                    .map_or(*until, |expires| expires.clamp(*from, *until));
                let stays = stays.entry(service).or_default();
                for (from, until, lost) in [(*from, known, is_lost), (known, *until, true)] {
                    let id = *id;
                    if from < until || !lost {
                        stays.push(Stay {
                            id,
                            from,
                            until,
                            lost,
                        });
                    }
                }
            }
            _ => {}
        }
    }
    for (service, stays) in stays {
        for crowd in crowds(stays, slots(service)) {
            if crowd.iter().any(|stay| stay.lost) {
                *findings.losses.entry("slots given again").or_default() += 1;
            } else {
                findings.violation(format!(
                    "semaphore {service}: permits believed: {}",
                    list(&crowd)
                ));
            }
        }
    }
}

fn list(crowd: &[Stay]) -> String {
    let stays = crowd
        .iter()
        .map(|stay| format!("{} from {} to {}", stay.id, stay.from, stay.until));
    stays.collect::<Vec<_>>().join(", ")
}

/// All sets of more than `allowed` requests that were in flight together, each at the start of its last one.
fn crowds(mut stays: Vec<Stay>, allowed: usize) -> Vec<Vec<Stay>> {
    stays.sort_by_key(|stay| stay.from);
    let mut present: Vec<Stay> = Vec::new();
    let mut crowds = Vec::new();
    for stay in stays {
        present.retain(|other| other.until > stay.from);
        present.push(stay);
        if present.len() > allowed {
            crowds.push(present.clone());
        }
    }
    crowds
}

/// Checks that the requests of a slot, ordered by id, do not overlap.
fn ids_ascend(truth: &Truth, findings: &mut Findings) {
    let mut requests: Vec<&Request> = ours(truth).collect();
    requests.sort_by_key(|request| (&request.service, request.slot, request.id));
    for pair in requests.windows(2) {
        let [one, next] = pair else { continue };
        if (&one.service, one.slot) == (&next.service, next.slot) && next.created < one.ended() {
            findings.violation(format!(
                "semaphore: the fencing ids of one slot do not ascend, or overlap: {one:?} and {next:?}"
            ));
        }
    }
}

/// Counts the ids of lost claims that were given again, as is documented for asynchronous failovers.
fn reissued_ids(truth: &Truth, lost: &Lost, findings: &mut Findings) {
    let reissued = truth
        .requests
        .iter()
        .filter(|request| lost.requests.iter().any(|(id, _)| *id == request.id))
        .count();
    if reissued > 0 {
        findings.losses.insert("fencing ids given again", reissued);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: i64, slot: i16, created: Micros, completed: Micros) -> Request {
        Request {
            id,
            service: SEMAPHORES[1].service().into(),
            slot,
            created,
            expires: created + 1000,
            completed: Some(completed),
        }
    }

    fn violations(requests: Vec<Request>) -> usize {
        let truth = Truth {
            requests,
            ..Truth::default()
        };
        let mut findings = Findings::default();
        let lost = Lost::default();
        examine(&History::default(), &truth, &lost, &mut findings);
        findings.violations.len()
    }

    #[test]
    fn one_request_too_many_is_seen() {
        assert_eq!(
            violations(vec![request(1, 0, 0, 10), request(2, 0, 10, 20)]),
            0
        );
        assert_eq!(
            violations(vec![request(1, 0, 0, 10), request(2, 1, 9, 20)]),
            1
        );
    }

    #[test]
    fn a_smaller_fencing_id_after_a_greater_one_is_seen() {
        assert_eq!(
            violations(vec![request(2, 0, 0, 10), request(1, 0, 10, 20)]),
            1
        );
    }
}
