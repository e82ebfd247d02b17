//! Watches: their results about sessions that had ended.

use super::{Findings, History, Told};
use crate::record::Record;

pub(super) fn examine(history: &History, findings: &mut Findings) {
    for Told { worker, record, .. } in &history.told {
        let Record::Watched {
            pid,
            acquired,
            at,
            within,
        } = record
        else {
            continue;
        };
        findings.examined("words of a watch", 1);
        if history.was_dead(*pid, *acquired, at - within) {
            findings.violation(format!(
                "watch: worker {worker} was told at {at} that pid {pid} had held the lock of {acquired} within {within} µs, and it was dead"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Death, Outage};
    use super::*;
    use crate::clock::Micros;

    fn violations(at: Micros, deaths: Vec<Death>, outages: Vec<Outage>) -> usize {
        let history = History {
            told: vec![Told {
                worker: 0,
                record: Record::Watched {
                    pid: 7,
                    acquired: 100,
                    at,
                    within: 50,
                },
                at,
            }],
            deaths: [(7, deaths)].into(),
            outages,
            ..History::default()
        };
        let mut findings = Findings::default();
        examine(&history, &mut findings);
        findings.violations.len()
    }

    #[test]
    fn a_watch_may_be_late_by_what_it_says_and_no_later() {
        let death = Death {
            sent: 200,
            gone: 210,
        };
        assert_eq!(violations(260, vec![death], Vec::new()), 0);
        assert_eq!(violations(261, vec![death], Vec::new()), 1);
        let outage = Outage {
            began: 200,
            stopped: 210,
        };
        assert_eq!(violations(260, Vec::new(), vec![outage]), 0);
        assert_eq!(violations(261, Vec::new(), vec![outage]), 1);
    }

    #[test]
    fn the_death_of_an_earlier_session_with_the_same_pid_is_none() {
        let death = Death { sent: 90, gone: 95 };
        assert_eq!(violations(900, vec![death], Vec::new()), 0);
    }
}
