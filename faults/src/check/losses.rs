//! Losses of session locks: each must have a cause.

use super::{Findings, History, Told};
use crate::clock::Micros;
use crate::record::Record;

/// How long a session may live after its end was requested.
const DYING: Micros = 2_000_000;

/// How long a process may have had a lock before it notes that, because it was frozen.
const FROZEN: Micros = 5_000_000;

/// How long a reload may take to reach a session: the file is written, the postmaster signals, and the session reads the
/// file before its next statement. Until then a lock is acquired under the setting from before. The campaign's
/// `idle_session_timeout` is in force for longer.
const RELOADING: Micros = 1_000_000;

pub(super) fn examine(history: &History, findings: &mut Findings) {
    for Told { worker, record, at } in &history.told {
        let Record::Lost {
            pid,
            wanted,
            acquired,
            asked,
        } = record
        else {
            continue;
        };
        // Networks and poolers lose connections, and the campaign does not record which.
        if !history.direct.contains(worker) {
            continue;
        }
        findings.examined("losses of session locks", 1);
        let held_since = *wanted.max(&(acquired - FROZEN));
        if !history.has_cause(*pid, held_since, *at) {
            let reload = history
                .reloads
                .iter()
                .find(|reload| reload.began <= *at && reload.ended >= held_since);
            let meanwhile = reload.map_or(String::new(), |reload| {
                format!(
                    ", while a reload had changed {} since {}",
                    reload.setting, reload.began
                )
            });
            findings.violation(format!(
                "loss: worker {worker} was told at {asked} that pid {pid} had lost the lock of {acquired}, wanted at {wanted}, without a cause{meanwhile}"
            ));
        }
    }
}

impl History {
    /// Whether the session, or all sessions, were ended after it may have had the lock.
    fn has_cause(&self, pid: i32, held_since: Micros, at: Micros) -> bool {
        let condemned = self.condemned.get(&pid).into_iter().flatten();
        let mut condemned = condemned.filter(|sent| **sent >= held_since - DYING);
        condemned.any(|sent| *sent <= at)
            || self
                .outages
                .iter()
                .any(|outage| outage.began <= at && outage.stopped >= held_since)
            || self.was_reloaded_under_the_lock(held_since, at)
    }

    /// Whether an `idle_session_timeout` can have reached the session after it had the lock. A guard lifts only the one that is in
    /// force as it acquires the lock, as is documented.
    fn was_reloaded_under_the_lock(&self, held_since: Micros, at: Micros) -> bool {
        self.reloads.iter().any(|reload| {
            reload.setting == "idle_session_timeout"
                && held_since < reload.began + RELOADING
                && reload.began <= at
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Outage, Reload};
    use super::*;

    fn violations(history: History) -> usize {
        let record = Record::Lost {
            pid: 7,
            wanted: 10_000_000,
            acquired: 10_000_100,
            asked: 10_000_400,
        };
        let history = History {
            told: vec![Told {
                worker: 3,
                record,
                at: 10_000_500,
            }],
            ..history
        };
        let mut findings = Findings::default();
        examine(&history, &mut findings);
        findings.violations.len()
    }

    fn direct() -> History {
        History {
            direct: [3].into(),
            ..History::default()
        }
    }

    #[test]
    fn a_loss_without_a_cause_is_a_violation() {
        assert_eq!(violations(direct()), 1);
        assert_eq!(violations(History::default()), 0);
    }

    #[test]
    fn an_ended_session_or_an_outage_is_a_cause() {
        let condemned = |pid, sent| History {
            condemned: [(pid, vec![sent])].into(),
            ..direct()
        };
        assert_eq!(violations(condemned(7, 10_000_100)), 0);
        assert_eq!(violations(condemned(7, 9_999_000)), 0);
        assert_eq!(violations(condemned(8, 10_000_100)), 1);
        assert_eq!(violations(condemned(7, 10_000_600)), 1);
        assert_eq!(violations(condemned(7, 1_000_000)), 1);
        let outage = |began, stopped| History {
            outages: vec![Outage { began, stopped }],
            ..direct()
        };
        assert_eq!(violations(outage(9_999_000, 10_000_100)), 0);
        assert_eq!(violations(outage(9_998_000, 9_999_000)), 1);
        assert_eq!(violations(outage(10_000_600, 10_000_700)), 1);
    }

    #[test]
    fn a_reload_is_a_cause_only_if_it_can_have_come_after_the_lock() {
        let reload = |setting, began| History {
            reloads: vec![Reload {
                setting,
                began,
                ended: 10_000_450,
            }],
            ..direct()
        };
        assert_eq!(violations(reload("idle_session_timeout", 10_000_001)), 0);
        assert_eq!(violations(reload("idle_session_timeout", 9_000_001)), 0);
        assert_eq!(violations(reload("idle_session_timeout", 9_000_000)), 1);
        assert_eq!(violations(reload("lock_timeout", 10_000_001)), 1);
    }
}
