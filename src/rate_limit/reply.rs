//! What the rows of the functions mean.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::PgTimestamp;
use diesel::result::{Error as DieselError, QueryResult};

use super::kept::Kept;
use super::sql::{AllSpentRow, Call, SpentRow, StateRow};
use super::{
    Check, CheckAll, Limited, LimitedReason, Quota, RateLimit, RateLimitState, Reservation,
    Reserve, Spent,
};
use crate::text::SentName;
use crate::time::{Timestamp, elapsed};

/// The hint of a call that met another transaction, which is how long it has waited for that.
const CONTENDED: Duration = Duration::from_millis(250);

/// The reply to a check, before it is told as an outcome.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) units: u32,
    reason: LimitedReason,
    at: DateTime<Utc>,
    debt_us: u128,
    quota: Quota,
    sent_name: SentName,
}

impl Reply {
    /// `own` is the quota of the program.
    pub(super) fn of(row: SpentRow, own: Quota, sent_name: SentName) -> Self {
        let (units, reason, decided_at, full_at, n, period_us, burst) = row;
        let quota = match (n, period_us, burst) {
            (Some(n), Some(period_us), Some(burst)) => quota_of(n, period_us, burst),
            _ => own,
        };
        Self {
            units: units.clamp(0, u32::MAX.into()) as u32,
            reason: reason_of(reason.as_deref()),
            at: time_of(decided_at),
            debt_us: full_at.0.saturating_sub(decided_at.0).max(0) as u128,
            quota,
            sent_name,
        }
    }

    /// Returns what was spent. `None` if nothing was spent.
    pub(super) fn spent(&self, limit: &RateLimit) -> Option<Spent> {
        if self.units == 0 {
            return None;
        }
        let (quota, debt) = (self.quota, self.debt_us);
        let before = debt.saturating_sub(quota.time_of(self.units));
        // The statement reads the clock twice, and a debt is rounded up by less than a microsecond for each call. So that a
        // key does not seem to have a unit less because of that, this tells what is left a moment later.
        let moment = (quota.time_of(1) / 2).min(1000);
        let left = quota
            .burst
            .saturating_sub(saturated(quota.units_owed(before.saturating_sub(moment))));
        let room = quota.room_for(self.units).unwrap_or(0);
        Some(Spent {
            at: self.at,
            units: self.units,
            remaining: left.saturating_sub(self.units),
            full_in: microseconds(debt),
            quota,
            limit: Arc::new(limit.sent_as(self.sent_name.clone())),
            kept: Kept::all(self.units),
            wait_us: before.saturating_sub(room).min(i64::MAX as u128) as i64,
        })
    }

    /// Returns the hint of a call for so many units that was limited.
    pub(super) fn limited(&self, limit: &RateLimit, units: u32) -> Limited {
        let quota = self.quota;
        let retry_after = match self.reason {
            LimitedReason::Contended => Some(CONTENDED),
            LimitedReason::AboveBurst => None,
            LimitedReason::Spent => quota
                .room_for(units)
                .map(|room| microseconds(self.debt_us.saturating_sub(room).max(1))),
        };
        Limited {
            reason: self.reason,
            retry_after,
            remaining: quota
                .burst
                .saturating_sub(saturated(quota.units_owed(self.debt_us))),
            full_in: microseconds(self.debt_us),
            quota,
            limit: Arc::new(limit.clone()),
        }
    }

    pub(super) fn check(&self, limit: &RateLimit) -> Check {
        match self.spent(limit) {
            Some(spent) => Check::Allowed(spent),
            None => Check::Limited(self.limited(limit, limit.cost)),
        }
    }

    pub(super) fn reserve(&self, limit: &RateLimit) -> Reserve {
        match self.spent(limit) {
            Some(spent) => {
                let wait = Duration::from_micros(spent.wait_us.unsigned_abs());
                Reserve::Reserved(Reservation { spent, wait })
            }
            None => Reserve::Limited(self.limited(limit, limit.cost)),
        }
    }
}

/// The values of one limit in the arrays of a check of several limits.
struct Place {
    at: PgTimestamp,
    remaining: u32,
    full_in: Duration,
    quota: Quota,
}

/// Returns what the row of a check of several limits means. Somebody may have replaced the function, so its arrays may be
/// shorter than the given ones.
pub(super) fn check_all(
    row: AllSpentRow,
    limits: &[&RateLimit],
    calls: &[Call<'_>],
) -> QueryResult<CheckAll> {
    let (allowed, limited_by, reason, retry_after, ats, remaining, full_ins, ns, periods, bursts) =
        row;
    let quotas = ns.into_iter().flatten().zip(periods.into_iter().flatten());
    let quotas = quotas.zip(bursts.into_iter().flatten());
    let left = remaining.into_iter().flatten();
    let left = left.zip(full_ins.into_iter().flatten()).zip(quotas);
    let mut places = ats.into_iter().flatten().zip(left).map(
        |(at, ((remaining, full_in), ((n, period), burst)))| Place {
            at,
            remaining: remaining.clamp(0, u32::MAX.into()) as u32,
            full_in: elapsed(full_in),
            quota: quota_of(n, elapsed(period).as_micros() as i64, burst),
        },
    );
    let short =
        || DieselError::DeserializationError("check_rate_limits returned too little".into());
    if !allowed {
        let by = limited_by.and_then(|place| usize::try_from(place).ok()?.checked_sub(1));
        let by = by.and_then(|by| Some((by, *limits.get(by)?)));
        let ((by, limit), place) = by.zip(places.next()).ok_or_else(short)?;
        return Ok(CheckAll::Limited {
            by,
            limited: Limited {
                reason: reason_of(reason.as_deref()),
                retry_after: retry_after.map(|it| elapsed(it).max(Duration::from_micros(1))),
                remaining: place.remaining,
                full_in: place.full_in,
                quota: place.quota,
                limit: Arc::new(limit.clone()),
            },
        });
    }
    let spent = limits.iter().zip(calls).zip(places);
    let spent = spent.map(|((limit, call), place)| Spent {
        at: time_of(place.at),
        units: limit.cost,
        remaining: place.remaining,
        full_in: place.full_in,
        quota: place.quota,
        limit: Arc::new(limit.sent_as(SentName::of(&call.name))),
        kept: Kept::all(limit.cost),
        wait_us: 0,
    });
    let spent: Vec<_> = spent.collect();
    if spent.len() < limits.len() {
        return Err(short());
    }
    Ok(CheckAll::Allowed(spent))
}

/// Returns what the row of a peek means.
pub(super) fn state(row: StateRow) -> RateLimitState {
    let (remaining, full_in, n, period, burst) = row;
    RateLimitState {
        remaining: remaining.clamp(0, u32::MAX.into()) as u32,
        full_in: elapsed(full_in),
        quota: quota_of(n, elapsed(period).as_micros() as i64, burst),
    }
}

/// Returns the quota that a row has: N, the period in microseconds and the burst.
pub(crate) fn quota_of(n: i64, period_us: i64, burst: i64) -> Quota {
    let count = |number: i64| u32::try_from(number.max(1)).unwrap_or(u32::MAX);
    Quota::per(count(n), Duration::from_micros(period_us.unsigned_abs())).burst(count(burst))
}

fn reason_of(reason: Option<&str>) -> LimitedReason {
    match reason {
        Some("contended") => LimitedReason::Contended,
        Some("above_burst") => LimitedReason::AboveBurst,
        _ => LimitedReason::Spent,
    }
}

fn time_of(timestamp: PgTimestamp) -> DateTime<Utc> {
    Timestamp::from(timestamp).at().unwrap_or_default()
}

fn microseconds(number: u128) -> Duration {
    Duration::from_micros(u64::try_from(number).unwrap_or(u64::MAX))
}

fn saturated(units: u128) -> u32 {
    u32::try_from(units).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use diesel::data_types::PgInterval;

    use super::*;
    use crate::text::Name;

    const SECOND: i64 = 1_000_000;
    static API: RateLimit = RateLimit::named("api", Quota::per_minute(60).burst(10));

    #[test]
    fn a_reply_comes_to_what_the_table_says() {
        // Units, reason and debt after the call; what is left, the wait of a reservation, or when to retry.
        for (units, reason, debt, remaining, wait, retry_after) in [
            (1, None, SECOND, 9, Some(0), None),
            (1, None, 10 * SECOND, 0, Some(0), None),
            (1, None, 12 * SECOND, 0, Some(2 * SECOND), None),
            (0, Some("spent"), 10 * SECOND, 0, None, Some(SECOND)),
            (0, Some("spent"), 9 * SECOND + 1, 0, None, Some(1)),
            (0, Some("contended"), 0, 10, None, Some(SECOND / 4)),
            (0, Some("above_burst"), 0, 10, None, None),
        ] {
            let (at, full_at) = (PgTimestamp(7), PgTimestamp(7 + debt));
            let row = (
                units,
                reason.map(str::to_owned),
                at,
                full_at,
                None,
                None,
                None,
            );
            let reply = Reply::of(row, API.quota(), SentName::NONE);
            let micros = |time: Duration| time.as_micros() as i64;
            match reply.reserve(&API) {
                Reserve::Reserved(reservation) => {
                    assert_eq!(reservation.spent.remaining, remaining, "{debt}");
                    assert_eq!(Some(micros(reservation.wait)), wait, "{debt}");
                }
                Reserve::Limited(limited) => {
                    assert_eq!(limited.remaining, remaining, "{debt}");
                    assert_eq!(limited.retry_after.map(micros), retry_after, "{debt}");
                }
            }
        }
    }

    #[test]
    fn the_row_of_several_limits_may_have_too_few_values() {
        let limits = [&API, &API];
        let calls = limits.map(|limit| limit.checked(Duration::ZERO, Name::anywhere).unwrap());
        let spent = |places: usize| -> AllSpentRow {
            let interval = || Some(vec![PgInterval::from_microseconds(SECOND); places]);
            let number = || Some(vec![1; places]);
            let ats = Some(vec![PgTimestamp(0); places]);
            let (left, full_in, ns) = (number(), interval(), number());
            (
                true,
                None,
                None,
                None,
                ats,
                left,
                full_in,
                ns,
                interval(),
                number(),
            )
        };
        assert!(check_all(spent(2), &limits, &calls).unwrap().is_allowed());
        check_all(spent(1), &limits, &calls).unwrap_err();
        for (by, places, is_good) in [
            (Some(1), 1, true),
            (Some(2), 1, true),
            (Some(3), 1, false),
            (Some(0), 1, false),
            (Some(-1), 1, false),
            (None, 1, false),
            (Some(1), 0, false),
        ] {
            let mut row = spent(places);
            (row.0, row.1) = (false, by);
            let checked = check_all(row, &limits, &calls);
            assert_eq!(checked.is_ok(), is_good, "{by:?} {places}");
        }
    }
}
