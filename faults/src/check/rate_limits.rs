//! Rate limits: never more units in a window than the quota promises, and no spend that counted and was lost without a cause.

use std::collections::{BTreeMap, BTreeSet};

use super::windows::{self, Use};
use super::{Failover, Findings, History, Told, Truth, lost};
use crate::clock::Micros;
use crate::record::Record;
use crate::subjects::{LOGIN, loosest_quota};

/// How long before a crash the spends may be lost of a limit that is not durable: three times the `wal_writer_delay` of 200
/// milliseconds, and as long again for a machine that is too busy to run the process in time.
const LAST_MOMENTS: Micros = 1_200_000;

/// A spend: the name of the limit, the key, and the time of the database clock.
type Spend<'a> = (&'a str, &'a str, Micros);

pub(super) fn examine(history: &History, truth: &Truth, findings: &mut Findings) {
    let recorded = recorded(truth);
    let returned = returned(history, findings);
    let resets = resets(truth, findings);
    let mut segments: BTreeMap<(&str, &str, usize), Vec<Use>> = BTreeMap::new();
    // What was given back by key although its spend was lost, so others may use it once more.
    let mut doubled: BTreeMap<(&str, &str), Vec<Use>> = BTreeMap::new();
    for Told { worker, record, at } in &history.told {
        let Record::Allowed {
            limit,
            key,
            units,
            at: spent_at,
            usable,
            durable,
            sent,
        } = record
        else {
            continue;
        };
        findings.examined("calls that rate limits allowed", 1);
        let spend = (limit.as_str(), key.as_str(), *spent_at);
        let Some(id) = recorded.get(&spend) else {
            // What was lost may be allowed once more.
            if is_excused(history, *durable, *sent, *at) {
                if let Some(back) = returned.get(&spend) {
                    doubled.entry(spend_key(spend)).or_default().push(*back);
                }
                *findings.losses.entry("spends of rate limits").or_default() += 1;
            } else {
                findings.violation(format!(
                    "worker {worker}: the spend of {units} of {limit:?} {key:?} at {spent_at}, sent at {sent}, is lost"
                ));
            }
            continue;
        };
        let back = returned.get(&spend).map_or(0, |back| back.units);
        let units = units.saturating_sub(back);
        if units > 0 {
            let segment = resets
                .get(&spend_key(spend))
                .map_or(0, |ids| ids.range(..id).count());
            let uses = segments.entry((spend.0, spend.1, segment)).or_default();
            uses.push(Use { at: *usable, units });
        }
    }
    for ((limit, key, _), uses) in segments {
        let Some(quota) = loosest_quota(limit) else {
            findings.violation(format!("rate limit {limit:?} is unknown"));
            continue;
        };
        let doubled = doubled.get(&(limit, key)).map_or(&[][..], Vec::as_slice);
        if let Some(excess) = windows::worst(&uses, doubled, quota) {
            findings.violation(format!(
                "rate limit {limit:?} {key:?}: {:.3} units above the promise in a window that ends at {}",
                excess.units, excess.at
            ));
        }
    }
}

const fn spend_key<'a>((limit, key, _): Spend<'a>) -> (&'a str, &'a str) {
    (limit, key)
}

/// The spends that the server has recorded, with their ids.
fn recorded(truth: &Truth) -> BTreeMap<Spend<'_>, i64> {
    let spends = truth.changes.iter().filter(|change| !change.deleted);
    spends
        .map(|change| {
            (
                (change.name.as_str(), change.key.as_str(), change.at),
                change.id,
            )
        })
        .collect()
}

/// The units that were given back, with a time before the first of them was. Where the outcome is unknown, all that was sent,
/// because nobody uses it.
fn returned<'a>(history: &'a History, findings: &mut Findings) -> BTreeMap<Spend<'a>, Use> {
    let mut back: BTreeMap<Spend<'_>, Use> = BTreeMap::new();
    // By worker, because its records are in their order.
    let mut unknown: BTreeMap<(usize, Spend<'_>), u32> = BTreeMap::new();
    for Told {
        worker,
        record,
        at: told_at,
    } in &history.told
    {
        let at_first = Use {
            at: *told_at,
            units: 0,
        };
        match record {
            Record::Returning {
                limit,
                key,
                at,
                units,
            } => {
                let spend = (limit.as_str(), key.as_str(), *at);
                *unknown.entry((*worker, spend)).or_default() += units;
                back.entry(spend).or_insert(at_first);
            }
            Record::Returned {
                limit,
                key,
                at,
                units,
            } => {
                findings.examined("units of rate limits given back", *units as usize);
                let spend = (limit.as_str(), key.as_str(), *at);
                unknown.remove(&(*worker, spend));
                back.entry(spend).or_insert(at_first).units += units;
            }
            _ => {}
        }
    }
    for ((_, spend), units) in unknown {
        if let Some(back) = back.get_mut(&spend) {
            back.units += units;
        }
    }
    back
}

/// The ids of the resets by key. A reset makes a key full, so the promise begins anew. Keys of the other limits are only pruned,
/// which must change nothing.
fn resets<'a>(
    truth: &'a Truth,
    findings: &mut Findings,
) -> BTreeMap<(&'a str, &'a str), BTreeSet<i64>> {
    let mut resets: BTreeMap<_, BTreeSet<i64>> = BTreeMap::new();
    for change in truth.changes.iter().filter(|change| change.deleted) {
        if change.name == LOGIN.name() {
            let key = (change.name.as_str(), change.key.as_str());
            resets.entry(key).or_default().insert(change.id);
            findings.examined("resets of rate limits", 1);
        } else {
            findings.examined("keys of rate limits that were pruned", 1);
        }
    }
    resets
}

/// Whether a spend may be lost that was sent and told at these times. One that waits for the disk and for a synchronous standby
/// is lost only by an asynchronous failover.
fn is_excused(history: &History, durable: bool, sent: Micros, told: Micros) -> bool {
    let is_last = |began: Micros, stopped: Micros| sent <= stopped && told >= began - LAST_MOMENTS;
    lost::is_excused(&history.failovers, sent, told)
        || !durable
            && (history
                .outages
                .iter()
                .any(|it| is_last(it.began, it.stopped))
                || (history.failovers.iter()).any(
                    |Failover {
                         followed, stopped, ..
                     }| is_last(*followed, *stopped),
                ))
}

#[cfg(test)]
mod tests {
    use super::super::{LimitChange, Outage};
    use super::*;
    use crate::subjects::{CALLS, PAID};

    fn told(record: Record, at: Micros) -> Told {
        Told {
            worker: 0,
            record,
            at,
        }
    }

    fn allowed(limit: &str, units: u32, at: Micros) -> Told {
        let record = Record::Allowed {
            limit: limit.into(),
            key: "hot".into(),
            units,
            at,
            usable: at,
            durable: limit == PAID.name(),
            sent: at - 100,
        };
        told(record, at + 100)
    }

    fn change(id: i64, limit: &str, at: Micros, deleted: bool) -> LimitChange {
        LimitChange {
            id,
            name: limit.into(),
            key: "hot".into(),
            at,
            deleted,
        }
    }

    fn findings(history: &History, changes: Vec<LimitChange>) -> Findings {
        let truth = Truth {
            changes,
            ..Truth::default()
        };
        let mut findings = Findings::default();
        examine(history, &truth, &mut findings);
        findings
    }

    fn violations(told: Vec<Told>, changes: Vec<LimitChange>) -> usize {
        let history = History {
            told,
            ..History::default()
        };
        findings(&history, changes).violations.len()
    }

    const AT: Micros = 50_000_000;

    #[test]
    fn more_units_than_the_burst_at_once_are_seen() {
        let name = CALLS.name();
        let changes = || vec![change(1, name, AT, false), change(2, name, AT + 1, false)];
        let told = |units| vec![allowed(name, 2, AT), allowed(name, units, AT + 1)];
        assert_eq!(violations(told(1), changes()), 0);
        assert_eq!(violations(told(2), changes()), 1);
    }

    #[test]
    fn units_that_were_given_back_do_not_count_and_those_of_an_unknown_outcome_neither() {
        let name = CALLS.name();
        let changes = || vec![change(1, name, AT, false), change(2, name, AT + 1, false)];
        let returning = |units| {
            let (limit, key) = (name.to_owned(), "hot".to_owned());
            let at = AT;
            Record::Returning {
                limit,
                key,
                at,
                units,
            }
        };
        let returned = |units| {
            let (limit, key) = (name.to_owned(), "hot".to_owned());
            let at = AT;
            Record::Returned {
                limit,
                key,
                at,
                units,
            }
        };
        let count = |records: Vec<Record>| {
            let mut history = vec![allowed(name, 3, AT), allowed(name, 3, AT + 1)];
            history.extend(records.into_iter().map(|record| told(record, AT)));
            violations(history, changes())
        };
        assert_eq!(count(vec![]), 1);
        assert_eq!(count(vec![returning(3)]), 0);
        assert_eq!(count(vec![returning(3), returned(3)]), 0);
        assert_eq!(count(vec![returning(3), returned(2)]), 1);
        assert_eq!(count(vec![returning(2), returned(2), returning(1)]), 0);
    }

    #[test]
    fn a_reset_begins_the_promise_anew_and_pruning_does_not() {
        for (name, expected) in [(LOGIN.name(), 0), (CALLS.name(), 1)] {
            let told = vec![allowed(name, 4, AT), allowed(name, 3, AT + 1)];
            let changes = vec![
                change(1, name, AT, false),
                change(2, name, AT + 1, true),
                change(3, name, AT + 1, false),
            ];
            assert_eq!(violations(told, changes), expected, "{name}");
        }
    }

    #[test]
    fn a_crash_may_lose_the_last_moments_of_a_limit_that_is_not_durable() {
        let lost = |name: &str, crash: Micros| {
            let history = History {
                told: vec![allowed(name, 1, AT)],
                outages: vec![Outage {
                    began: crash,
                    stopped: crash + 10,
                }],
                ..History::default()
            };
            let findings = findings(&history, Vec::new());
            (findings.violations.len(), findings.losses.len())
        };
        assert_eq!(lost(CALLS.name(), AT + 600_000), (0, 1));
        assert_eq!(lost(CALLS.name(), AT + 2_000_000), (1, 0));
        assert_eq!(lost(CALLS.name(), AT - 2_000_000), (1, 0));
        assert_eq!(lost(PAID.name(), AT + 600_000), (1, 0));
    }

    #[test]
    fn a_lost_spend_that_is_given_back_may_be_used_once_more_from_then_on() {
        let name = CALLS.name();
        let count = |is_lost: bool, units, at| {
            let returned = Record::Returned {
                limit: name.into(),
                key: "hot".into(),
                at: AT,
                units,
            };
            let told = vec![
                allowed(name, 1, AT),
                allowed(name, 3, AT + 100),
                told(returned, at),
                allowed(name, 1, AT + 1000),
            ];
            let history = History {
                told,
                outages: vec![Outage {
                    began: AT + 200,
                    stopped: AT + 300,
                }],
                ..History::default()
            };
            let mut changes = vec![
                change(2, name, AT + 100, false),
                change(3, name, AT + 1000, false),
            ];
            if !is_lost {
                changes.push(change(1, name, AT, false));
            }
            findings(&history, changes).violations.len()
        };
        assert_eq!(count(true, 0, AT + 500), 1);
        assert_eq!(count(true, 1, AT + 500), 0);
        assert_eq!(count(true, 1, AT + 2000), 1);
        assert_eq!(count(false, 1, AT + 500), 1);
    }

    #[test]
    fn what_was_lost_may_be_allowed_once_more() {
        let history = |told| History {
            told,
            outages: vec![Outage {
                began: AT + 200,
                stopped: AT + 300,
            }],
            ..History::default()
        };
        let name = CALLS.name();
        let told = vec![allowed(name, 3, AT), allowed(name, 3, AT + 1000)];
        let kept = vec![change(1, name, AT + 1000, false)];
        assert!(findings(&history(told.clone()), kept).violations.is_empty());
        let both = vec![
            change(1, name, AT, false),
            change(2, name, AT + 1000, false),
        ];
        assert_eq!(findings(&history(told), both).violations.len(), 1);
    }
}
