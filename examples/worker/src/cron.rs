//! Ticks by a cron expression in a time zone.

use std::str::FromStr;

use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use croner::Cron;

/// Returns the first tick after a time.
///
/// # Panics
///
/// For an expression that is none: it is a constant of the program.
pub(crate) fn next(
    expression: &str,
    zone: Tz,
) -> impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync {
    let cron = Cron::from_str(expression).expect("the expression is a constant");
    move |after| {
        let next = cron
            .find_next_occurrence(&after.with_timezone(&zone), false)
            .ok()?;
        Some(next.with_timezone(&Utc))
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeZone;

    use super::*;

    /// The ticks from a midnight in Berlin to the next one.
    fn ticks(expression: &str, year: i32, month: u32, day: u32) -> Vec<String> {
        let zone = chrono_tz::Europe::Berlin;
        let next = next(expression, zone);
        let midnight = |day| {
            zone.with_ymd_and_hms(year, month, day, 0, 0, 0)
                .unwrap()
                .with_timezone(&Utc)
        };
        let (mut at, end) = (midnight(day), midnight(day + 1));
        let mut ticks = Vec::new();
        while let Some(tick) = next(at).filter(|tick| *tick < end) {
            ticks.push(tick.with_timezone(&zone).format("%H:%M %:z").to_string());
            at = tick;
        }
        ticks
    }

    #[test]
    fn a_nightly_tick_comes_once_on_days_of_23_and_25_hours() {
        assert_eq!(ticks("0 3 * * *", 2026, 3, 28), ["03:00 +01:00"]);
        assert_eq!(
            ticks("0 3 * * *", 2026, 3, 29),
            ["03:00 +02:00"],
            "23 hours"
        );
        assert_eq!(
            ticks("0 3 * * *", 2026, 10, 25),
            ["03:00 +01:00"],
            "25 hours"
        );
        // In the hour that is left out, and in the one that is repeated.
        assert_eq!(ticks("30 2 * * *", 2026, 3, 29).len(), 1);
        assert_eq!(ticks("30 2 * * *", 2026, 10, 25).len(), 1);
    }

    /// Where clocks change at midnight, by half an hour, in the other half of the year, and not at all.
    #[test]
    fn a_year_has_each_day_once_and_each_hour_that_there_is_in_five_zones() {
        use chrono_tz::{America, Asia, Australia, Europe};
        for (zone, nights) in [
            (Europe::Berlin, 365),
            (America::New_York, 365),
            (America::Santiago, 365),
            (Australia::Lord_Howe, 365),
            (Asia::Kolkata, 365),
        ] {
            let first = |year| {
                let new_year = zone.with_ymd_and_hms(year, 1, 1, 0, 0, 0).unwrap();
                new_year.with_timezone(&Utc) - chrono::TimeDelta::microseconds(1)
            };
            for (expression, expected) in [("30 2 * * *", nights), ("0 0 * * *", nights)] {
                let next = next(expression, zone);
                let (mut at, mut days) = (first(2026), std::collections::BTreeSet::new());
                let mut ticks = 0;
                while let Some(tick) = next(at).filter(|tick| *tick <= first(2027)) {
                    assert!(tick > at, "{zone}: {tick} after {at}");
                    // The expression counts from anywhere before as from the tick before.
                    let between = at + (tick - at) / 2;
                    assert_eq!(next(between), Some(tick), "{zone}: from {between}");
                    days.insert(tick.with_timezone(&zone).date_naive());
                    (at, ticks) = (tick, ticks + 1);
                }
                assert_eq!(
                    (ticks, days.len()),
                    (expected, expected),
                    "{zone}: {expression}"
                );
            }
            // Each hour that passes has its tick.
            let hourly = next("0 * * * *", zone);
            let (mut at, mut ticks) = (first(2026), 0);
            while let Some(tick) = hourly(at).filter(|tick| *tick <= first(2027)) {
                assert!(
                    tick - at <= chrono::TimeDelta::minutes(90),
                    "{zone}: {tick} after {at}"
                );
                (at, ticks) = (tick, ticks + 1);
            }
            assert!((8759..=8761).contains(&ticks), "{zone}: {ticks}");
        }
    }

    /// The page on schedules shows this function.
    #[test]
    fn the_documentation_shows_it() {
        let page = include_str!("../../../docs/schedules.md");
        let (_, here) = include_str!("cron.rs")
            .split_once("/// For an expression")
            .unwrap();
        let function = &here[here.find("pub(crate)").unwrap()..here.find("#[cfg(test)]").unwrap()];
        assert!(page.contains(function.trim()));
    }

    #[test]
    fn an_hourly_tick_comes_23_and_25_times() {
        assert_eq!(ticks("15 * * * *", 2026, 3, 29).len(), 23);
        assert_eq!(ticks("15 * * * *", 2026, 10, 25).len(), 25);
    }
}
