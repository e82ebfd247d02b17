//! Fences: writes whose token is smaller than one that has passed, and tokens that do not ascend.

use std::collections::BTreeMap;

use super::{Findings, History, Section, Told, Truth, lost};
use crate::record::Record;

pub(super) fn examine(history: &History, truth: &Truth, findings: &mut Findings) {
    tokens_ascend(truth, findings);
    writes_ascend(truth, findings);
    refusals(history, findings);
}

/// Checks that the token grows from each holder to the next, as the sessions of the holders have recorded it.
fn tokens_ascend(truth: &Truth, findings: &mut Findings) {
    let mut sections: Vec<&Section> = truth.sections.iter().filter(|s| s.exclusive).collect();
    sections.sort_by_key(|section| (section.lock, section.began));
    let mut last: BTreeMap<i32, i64> = BTreeMap::new();
    for Section {
        lock, token, began, ..
    } in sections
    {
        let Some(token) = *token else { continue };
        findings.examined("fencing tokens of session locks", 1);
        if let Some(before) = last.insert(*lock, token).filter(|before| token <= *before) {
            findings.violation(format!(
                "fencing token: the holder of lock {lock} since {began} has {token}, the one before had {before}"
            ));
        }
    }
}

/// Checks the writes in the order of their commits.
fn writes_ascend(truth: &Truth, findings: &mut Findings) {
    let mut writes = truth.writes.clone();
    writes.sort_by_key(|write| (write.lock, write.id));
    findings.examined("writes behind fences", writes.len());
    for pair in writes.windows(2) {
        let [one, next] = pair else { continue };
        if one.lock == next.lock && next.token < one.token {
            findings.violation(format!(
                "fence {}: {} was written with {}, after {} with {}",
                one.lock, next.id, next.token, one.id, one.token
            ));
        }
    }
}

/// Checks that a fence stops former holders. It may stop a holder only if a greater token has passed that a failover lost.
fn refusals(history: &History, findings: &mut Findings) {
    let mut forgotten: Vec<(i32, i64)> = Vec::new();
    for Told { record, at, .. } in &history.told {
        if let Record::Drawn { lock, token, sent } = record {
            if lost::is_excused(&history.failovers, *sent, *at) {
                forgotten.push((*lock, *token));
            }
        }
    }
    for Told { worker, record, .. } in &history.told {
        let Record::Fenced {
            lock,
            token,
            holds,
            sent,
        } = record
        else {
            continue;
        };
        if !holds {
            findings.examined("former holders stopped by a fence", 1);
        } else if forgotten
            .iter()
            .any(|(other, greater)| other == lock && greater > token)
        {
            *findings.losses.entry("fencing tokens").or_default() += 1;
        } else {
            findings.violation(format!(
                "fence {lock}: worker {worker} held the lock with {token}, and was refused at {sent}"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Failover, Write};
    use super::*;

    #[test]
    fn a_smaller_token_after_a_greater_one_is_seen() {
        let write = |id, lock, token| Write { id, lock, token };
        let violations = |writes| {
            let truth = Truth {
                writes,
                ..Truth::default()
            };
            let mut findings = Findings::default();
            examine(&History::default(), &truth, &mut findings);
            findings.violations.len()
        };
        assert_eq!(
            violations(vec![write(3, 1, 8), write(1, 1, 7), write(2, 1, 7)]),
            0
        );
        assert_eq!(violations(vec![write(1, 1, 8), write(2, 2, 7)]), 0);
        assert_eq!(violations(vec![write(1, 1, 8), write(2, 1, 7)]), 1);
    }

    #[test]
    fn a_token_that_is_no_greater_than_that_of_the_holder_before_is_seen() {
        let section = |began, token| Section {
            lock: 1,
            exclusive: true,
            pid: 7,
            began,
            ended: began,
            token: Some(token),
        };
        let violations = |sections| {
            let truth = Truth {
                sections,
                ..Truth::default()
            };
            let mut findings = Findings::default();
            tokens_ascend(&truth, &mut findings);
            findings.violations.len()
        };
        assert_eq!(violations(vec![section(2, 6), section(1, 5)]), 0);
        assert_eq!(violations(vec![section(1, 5), section(2, 5)]), 1);
    }

    #[test]
    fn a_holder_is_stopped_only_by_a_token_that_a_failover_forgot() {
        let told = |record| Told {
            worker: 0,
            record,
            at: 12,
        };
        let refused = told(Record::Fenced {
            lock: 1,
            token: 5,
            holds: true,
            sent: 30,
        });
        let drawn = told(Record::Drawn {
            lock: 1,
            token: 6,
            sent: 11,
        });
        let violations = |synchronous| {
            let history = History {
                told: vec![refused.clone(), drawn.clone()],
                failovers: vec![Failover {
                    followed: 10,
                    began: 13,
                    stopped: 14,
                    synchronous,
                }],
                ..History::default()
            };
            let mut findings = Findings::default();
            refusals(&history, &mut findings);
            findings.violations.len()
        };
        assert_eq!(violations(false), 0);
        assert_eq!(violations(true), 1);
    }
}
