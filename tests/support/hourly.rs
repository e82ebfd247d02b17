//! Ticks an hour apart.

use std::sync::OnceLock;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};

/// The first tick after a time. No tick is due while a test runs, because the last one was half an
/// hour before the first call.
pub(crate) fn hourly(after: DateTime<Utc>) -> Option<DateTime<Utc>> {
    static TICK: OnceLock<DateTime<Utc>> = OnceLock::new();
    let tick = *TICK.get_or_init(|| Utc::now().trunc_subsecs(0) - TimeDelta::minutes(30));
    let hours = (after - tick).num_seconds().div_euclid(3600);
    Some(tick + TimeDelta::hours(hours + 1))
}
