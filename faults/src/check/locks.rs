//! Locks: sections that overlap, and confirmations of locks that were lost.

use std::collections::BTreeSet;
use std::fmt;

use super::{Findings, History, Told, Truth};
use crate::clock::Micros;
use crate::record::Record;

pub(super) fn examine(history: &History, truth: &Truth, findings: &mut Findings) {
    let sections: Vec<_> = truth
        .sections
        .iter()
        .map(|section| Inside {
            lock: section.lock,
            exclusive: section.exclusive,
            began: section.began,
            ended: section.ended,
            who: format!("pid {}", section.pid),
        })
        .collect();
    findings.examined("sections under session locks", sections.len());
    together("session lock", sections, findings);

    let bookings: Vec<_> = truth
        .bookings
        .iter()
        .map(|booking| Inside {
            lock: booking.lock,
            exclusive: true,
            began: booking.began,
            ended: booking.ended,
            who: format!("number {}", booking.number),
        })
        .collect();
    findings.examined("bookings under transaction locks", bookings.len());
    together("transaction lock", bookings, findings);
    booked_twice(truth, findings);
    told_too_late(history, findings);
}

/// A section under a lock.
struct Inside {
    lock: i32,
    exclusive: bool,
    began: Micros,
    ended: Micros,
    who: String,
}

impl fmt::Display for Inside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            who, began, ended, ..
        } = self;
        let alone = if self.exclusive { ", to be alone" } else { "" };
        write!(f, "{who} from {began} to {ended}{alone}")
    }
}

/// Two sections that overlap, at least one of them exclusive.
fn together(what: &str, mut stretches: Vec<Inside>, findings: &mut Findings) {
    stretches.sort_by_key(|inside| (inside.lock, inside.began));
    // The earlier sections that ended last, of the exclusive ones and of all.
    let mut exclusive: Option<&Inside> = None;
    let mut any: Option<&Inside> = None;
    for inside in &stretches {
        let same_lock = |other: &&Inside| other.lock == inside.lock;
        let conflicting = if inside.exclusive { any } else { exclusive };
        if let Some(other) = conflicting
            .filter(same_lock)
            .filter(|other| other.ended > inside.began)
        {
            findings.violation(format!(
                "{what} {}: together inside were {other}, and {inside}",
                inside.lock
            ));
        }
        let longer = |latest: Option<&Inside>| {
            latest
                .filter(same_lock)
                .is_none_or(|latest| latest.ended < inside.ended)
        };
        if longer(any) {
            any = Some(inside);
        }
        if inside.exclusive && longer(exclusive) {
            exclusive = Some(inside);
        }
    }
}

fn booked_twice(truth: &Truth, findings: &mut Findings) {
    let mut seen = BTreeSet::new();
    for booking in &truth.bookings {
        if !seen.insert((booking.lock, booking.number)) {
            findings.violation(format!(
                "transaction lock: {} was booked twice under {}",
                booking.number, booking.lock
            ));
        }
    }
}

/// "Still held" or "released in order", reported of a session that had ended before the query.
fn told_too_late(history: &History, findings: &mut Findings) {
    for Told { worker, record, .. } in &history.told {
        let Record::Held {
            pid,
            acquired,
            asked,
        } = record
        else {
            continue;
        };
        findings.examined("replies that a session lock is held", 1);
        if history.was_dead(*pid, *acquired, *asked) {
            findings.violation(format!(
                "session lock: pid {pid} was dead at {asked}, and worker {worker} was told that its lock of {acquired} was held"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Death, Section};
    use super::*;

    fn section(exclusive: bool, began: Micros, ended: Micros) -> Section {
        Section {
            lock: 1,
            exclusive,
            pid: 7,
            began,
            ended,
            token: None,
        }
    }

    fn violations(sections: Vec<Section>) -> usize {
        let truth = Truth {
            sections,
            ..Truth::default()
        };
        let mut findings = Findings::default();
        examine(&History::default(), &truth, &mut findings);
        findings.violations.len()
    }

    #[test]
    fn holders_one_after_the_other_are_no_violation() {
        assert_eq!(
            violations(vec![section(true, 1, 5), section(true, 5, 9)]),
            0
        );
        assert_eq!(
            violations(vec![section(false, 1, 5), section(false, 2, 9)]),
            0
        );
    }

    #[test]
    fn an_exclusive_holder_that_is_not_alone_is_seen() {
        assert_eq!(
            violations(vec![section(true, 1, 5), section(true, 4, 9)]),
            1
        );
        assert_eq!(
            violations(vec![section(true, 1, 9), section(false, 4, 5)]),
            1
        );
        assert_eq!(
            violations(vec![
                section(false, 1, 9),
                section(false, 2, 3),
                section(true, 4, 5)
            ]),
            1
        );
    }

    #[test]
    fn a_lock_that_outlives_its_session_is_seen() {
        let history = History {
            told: vec![Told {
                worker: 0,
                record: Record::Held {
                    pid: 7,
                    acquired: 1,
                    asked: 9,
                },
                at: 10,
            }],
            deaths: [(7, vec![Death { sent: 2, gone: 3 }])].into(),
            ..History::default()
        };
        let mut findings = Findings::default();
        examine(&history, &Truth::default(), &mut findings);
        assert_eq!(findings.violations.len(), 1);
    }
}
