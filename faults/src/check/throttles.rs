//! Throttles: never two grants within an interval.

use std::collections::BTreeMap;

use diesel_interlock::{DeclaredResources, ThrottledResource};

use super::lost::Lost;
use super::{Findings, Grant, History, Truth};
use crate::clock::Micros;
use crate::record::Record;
use crate::subjects::Resource;

pub(super) fn examine(history: &History, truth: &Truth, lost: &Lost, findings: &mut Findings) {
    // Lost grants that were reported count as well as recorded ones.
    let mut grants: Vec<&Grant> = truth.grants.iter().chain(&lost.grants).collect();
    let told: Vec<_> = history
        .told
        .iter()
        .filter_map(|told| match &told.record {
            Record::Granted {
                resource, key, at, ..
            } => Some((resource, key, *at)),
            _ => None,
        })
        .collect();
    findings.examined("grants that were told", told.len());
    grants.sort();

    let intervals: BTreeMap<&str, Micros> = Resource::ALL
        .iter()
        .map(|resource| (resource.label(), resource.interval().as_micros() as Micros))
        .collect();
    for pair in grants.windows(2) {
        let [one, next] = pair else { continue };
        if (&one.resource, &one.key) != (&next.resource, &next.key) {
            continue;
        }
        let interval = intervals
            .get(one.resource.as_str())
            .copied()
            .unwrap_or_default();
        if next.at - one.at >= interval {
            continue;
        }
        if lost.grants.contains(one) || lost.grants.contains(next) {
            *findings.losses.entry("grants given again").or_default() += 1;
        } else {
            findings.violation(format!(
                "throttle: {one:?} and {next:?} are {} µs apart",
                next.at - one.at
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violations(key: &str, times: [Micros; 2]) -> usize {
        let grants = [("a", times[0]), (key, times[1])].map(|(key, at)| Grant {
            resource: Resource::Slow.label().into(),
            key: key.into(),
            at,
        });
        let truth = Truth {
            grants: grants.into(),
            ..Truth::default()
        };
        let mut findings = Findings::default();
        examine(&History::default(), &truth, &Lost::default(), &mut findings);
        findings.violations.len()
    }

    #[test]
    fn two_grants_within_an_interval_are_seen() {
        assert_eq!(violations("a", [500_000, 999_999]), 1);
        assert_eq!(violations("a", [500_000, 1_000_000]), 0);
        assert_eq!(violations("b", [500_000, 500_001]), 0);
    }
}
