//! The checks of the recorded requests.

use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};

use super::changes::{BY_THE_ARTICLE, Request};
use super::clients::Messages;
use super::report::Report;

/// Checks that no claim exceeded the number of slots. Returns the largest number of requests in flight.
pub(super) fn check_number_in_flight(
    report: &mut Report,
    requests: &[Request],
    slots: impl Fn(&Request) -> usize,
) -> usize {
    let mut most = 0;
    let mut in_flight: HashMap<&str, Vec<&Request>> = HashMap::new();
    for request in requests {
        let in_flight = in_flight.entry(&request.service).or_default();
        in_flight.retain(|other| other.end() > request.start());
        in_flight.push(request);
        most = most.max(in_flight.len());
        report.check(in_flight.len() <= slots(request), || {
            format!("{} in flight: {in_flight:#?}", in_flight.len())
        });
    }
    most
}

/// Checks that the requests of a slot do not overlap, and that each has a larger id than the one before.
pub(super) fn check_successions(report: &mut Report, requests: &[Request]) {
    for successive in by_slot(requests).values() {
        for pair in successive.windows(2) {
            report.check(pair[0].end() <= pair[1].start(), || {
                format!("two in one slot: {pair:#?}")
            });
            report.check(pair[0].id < pair[1].id, || {
                format!("the older id is greater: {pair:#?}")
            });
        }
    }
}

/// Checks that the slot of a request that expired is claimed again. All clients ask for slots all the time, so that takes
/// at most another timeout. Returns the longest time that a slot was free.
pub(super) fn check_slots_come_back(
    report: &mut Report,
    requests: &[Request],
    end: DateTime<Utc>,
) -> TimeDelta {
    let mut longest = TimeDelta::zero();
    for successive in by_slot(requests).values() {
        for (place, request) in successive.iter().enumerate() {
            let due = request.expires_at + request.timeout();
            if !request.expired() || due > end {
                continue;
            }
            let next = successive.get(place + 1).map_or(end, |next| next.start());
            longest = longest.max(next - request.expires_at);
            report.check(next <= due, || {
                format!("the slot did not come back before {next}: {request:?}")
            });
        }
    }
    longest
}

fn by_slot(requests: &[Request]) -> HashMap<(&str, i16), Vec<&Request>> {
    let mut slots: HashMap<_, Vec<_>> = HashMap::new();
    for request in requests {
        let slot = (request.service.as_str(), request.slot);
        slots.entry(slot).or_default().push(request);
    }
    slots
}

/// Checks that the requests are recorded as the clients were told.
pub(super) fn check_messages(report: &mut Report, requests: &[Request], messages: &Messages) {
    let by_id: HashMap<i64, &Request> = requests.iter().map(|it| (it.id, it)).collect();
    for (id, slot) in &messages.claimed {
        let logged = by_id.get(id).map(|request| request.slot);
        report.check(logged == Some(*slot), || {
            format!("{id} was claimed with slot {slot}, and logged with {logged:?}")
        });
    }
    let mut check_ended = |ids: &[i64], what: &str, is_so: fn(&Request) -> bool| {
        for id in ids {
            let request = by_id.get(id);
            report.check(request.is_some_and(|request| is_so(request)), || {
                format!("{id} was reported as {what}: {request:?}")
            });
        }
    };
    check_ended(&messages.released, "released", |request| {
        request.completed_at.is_some() && request.timed_out_at.is_none()
    });
    check_ended(&messages.timed_out, "timed out", |request| {
        request.completed_at.is_none() && request.timed_out_at.is_some()
    });
    for request in requests {
        let is_so = request
            .timed_out_at
            .is_none_or(|at| at >= request.expires_at);
        report.check(is_so, || format!("timed out before its time: {request:?}"));
        // The late save() of an ORM may write any time.
        let is_so = request.details == BY_THE_ARTICLE
            || request
                .completed_at
                .is_none_or(|at| at >= request.created_at);
        report.check(is_so, || format!("ended before it began: {request:?}"));
    }
}
