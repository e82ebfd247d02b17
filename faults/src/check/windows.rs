//! The worst of all windows: how far the units that were allowed exceed what a quota promises.

use diesel_interlock::Quota;

use crate::clock::Micros;

/// Units that were allowed at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Use {
    pub(crate) at: Micros,
    pub(crate) units: u32,
}

/// How many units too many were allowed in the worst window, which ends at `at`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Excess {
    pub(crate) at: Micros,
    pub(crate) units: f64,
}

/// Returns the worst of all windows in which more than `burst + W × n / period` units were allowed. `None` if there is none.
/// Units that came back may be allowed once more from their moment on.
///
/// Replays the calls in the order of their moments, with the debt that an ideal limit would have. The debt after a call is the
/// largest of all windows that end with the call, so one pass is enough. Each call is rounded to microseconds, so each one of a
/// window may be a microsecond early.
pub(crate) fn worst(uses: &[Use], back: &[Use], quota: Quota) -> Option<Excess> {
    let mut events: Vec<_> = back.iter().map(|it| (it.at, true, it.units)).collect();
    events.extend(uses.iter().map(|it| (it.at, false, it.units)));
    events.sort();
    let period = quota.period.as_micros() as i128;
    let (n, burst) = (i128::from(quota.n), i128::from(quota.burst));
    // Moments are multiplied by n here, so that nothing is rounded.
    let (mut full_at, mut calls) = (i128::MIN, 0);
    let mut worst = 0;
    let mut worst_at = 0;
    for (at, is_back, units) in events {
        let now = i128::from(at) * n;
        if full_at <= now {
            (full_at, calls) = (now, 0);
        }
        if is_back {
            full_at = now.max(full_at - i128::from(units) * period);
            continue;
        }
        calls += 1;
        full_at += i128::from(units) * period;
        let over = full_at - now - burst * period - calls * n;
        if over > worst {
            (worst, worst_at) = (over, at);
        }
    }
    (worst > 0).then(|| Excess {
        at: worst_at,
        units: worst as f64 / period as f64,
    })
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;

    fn uses(calls: &[(Micros, u32)]) -> Vec<Use> {
        calls.iter().map(|&(at, units)| Use { at, units }).collect()
    }

    /// The same, over all pairs of calls.
    fn is_kept(uses: &[Use], quota: Quota) -> bool {
        let period = quota.period.as_micros() as i128;
        uses.iter().all(|first| {
            uses.iter().filter(|last| last.at >= first.at).all(|last| {
                let window = uses
                    .iter()
                    .filter(|it| (first.at..=last.at).contains(&it.at));
                let (calls, units) = window.fold((0, 0), |(calls, units), it| {
                    (calls + 1, units + i128::from(it.units))
                });
                let slack = calls + i128::from(last.at - first.at);
                (units - i128::from(quota.burst)) * period <= slack * i128::from(quota.n)
            })
        })
    }

    #[test]
    fn the_burst_and_what_is_refilled_are_promised_and_no_unit_more() {
        let quota = Quota::per_second(1).burst(2);
        for (calls, is_kept) in [
            (&[][..], true),
            (&[(0, 2)], true),
            (&[(0, 3)], false),
            (&[(0, 1), (0, 1), (1_000_000, 1)], true),
            (&[(0, 1), (0, 1), (999_000, 1)], false),
            (&[(5_000_000, 2), (0, 2)], true),
            (
                &[(0, 2), (9_000_000, 1), (9_000_000, 1), (9_500_000, 1)],
                false,
            ),
            (
                &[(0, 2), (1_000_000, 1), (2_000_000, 1), (2_900_000, 1)],
                false,
            ),
        ] {
            let excess = worst(&uses(calls), &[], quota);
            assert_eq!(excess.is_none(), is_kept, "{calls:?}: {excess:?}");
        }
    }

    #[test]
    fn the_excess_is_that_of_the_worst_window() {
        let quota = Quota::per_second(10).burst(2);
        let calls = uses(&[(0, 3), (1_000_000, 2), (1_050_000, 2), (1_250_000, 1)]);
        let excess = worst(&calls, &[], quota).unwrap();
        assert_eq!(excess.at, 1_050_000);
        assert!((excess.units - 1.5).abs() < 0.001, "{excess:?}");
    }

    #[test]
    fn a_call_may_be_a_microsecond_early() {
        let quota = Quota::per(7, std::time::Duration::from_secs(1)).burst(1);
        // A unit takes 142,857 and one seventh of a microsecond.
        let calls: Vec<_> = (0..1000).map(|number| (number * 142_857, 1)).collect();
        assert_eq!(worst(&uses(&calls), &[], quota), None);
        let calls: Vec<_> = (0..1000).map(|number| (number * 142_855, 1)).collect();
        assert!(worst(&uses(&calls), &[], quota).is_some());
    }

    #[test]
    fn one_pass_finds_what_all_pairs_of_calls_show() {
        let mut random = Rng::with_seed(7);
        let mut kept = 0;
        for _ in 0..2000 {
            let quota = Quota::per_second(random.u32(1..5000)).burst(random.u32(1..9));
            let span = random.i64(1..20_000);
            let calls: Vec<_> = (0..random.usize(1..12))
                .map(|_| Use {
                    at: random.i64(..span),
                    units: random.u32(1..4),
                })
                .collect();
            let is_kept = is_kept(&calls, quota);
            assert_eq!(
                worst(&calls, &[], quota).is_none(),
                is_kept,
                "{quota:?}: {calls:?}"
            );
            kept += u32::from(is_kept);
        }
        assert!((300..1700).contains(&kept), "{kept}");
    }
}
