//! What is checked before a call is sent, and what its row means.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::result::{Error as DieselError, QueryResult};

use super::kept::Kept;
use super::sql::{AllSpentRow, Call, Calls, SpentRow, StateRow, Units};
use super::{
    Check, CheckAll, Limited, LimitedReason, Quota, RateLimit, RateLimitState, Reservation,
    Reserve, Spent,
};
use crate::error::{Error, Input, Result};
use crate::text::{self, Name};
use crate::time::{Timestamp, elapsed};

/// The longest period and the longest wait, in microseconds: 366 days.
const LONGEST_PERIOD: u128 = 366 * 24 * 60 * 60 * 1_000_000;

/// The longest time in which a burst is refilled, in microseconds: 36,600 days.
const LONGEST_REFILL: u128 = 100 * LONGEST_PERIOD;

/// The hint of a call that met another transaction, which is how long it has waited for that.
const CONTENDED: Duration = Duration::from_millis(250);

impl RateLimit {
    /// Checks the arguments of a call. `name` turns the name into one as it is sent on a session. A cost above the burst is
    /// not checked here, because an override may have raised the burst.
    pub(super) fn checked<'a>(
        &'a self,
        max_wait: Duration,
        name: impl FnOnce(&'a str) -> Name<'a>,
    ) -> Result<Call<'a>> {
        let key = self.checked_key()?;
        let name = self.checked_name(name)?;
        if self.cost == 0 {
            return Err(self.bad_units(0, u32::MAX).into());
        }
        let (n, period_us, burst) = self.checked_quota()?;
        Ok(Call {
            name,
            key,
            n,
            period_us,
            burst,
            cost: self.cost.into(),
            max_wait_us: max_wait.as_micros().min(LONGEST_PERIOD) as i64,
            allowance_us: self
                .quota
                .room_for(self.cost)
                .map(|room| (room + max_wait.as_micros().min(LONGEST_PERIOD)) as i64),
            increase_us: self.quota.time_of(self.cost).min(LONGEST_REFILL) as i64,
            commit_async: !self.durable,
        })
    }

    /// Checks the quota, and returns N, the period in microseconds and the burst.
    pub(crate) fn checked_quota(&self) -> Result<(i64, i64, i64)> {
        let Quota { n, burst, .. } = self.quota;
        let period = self.quota.period_us();
        let is_in_range = n > 0
            && burst > 0
            && (1..=LONGEST_PERIOD).contains(&period)
            && u128::from(burst) * period <= u128::from(n) * LONGEST_REFILL;
        match i64::try_from(period) {
            Ok(period_us) if is_in_range => Ok((n.into(), period_us, burst.into())),
            _ => {
                let name = self.name.to_string();
                Err(Input::BadQuota { name }.into())
            }
        }
    }

    /// Checks the name alone.
    pub(crate) fn checked_name<'a>(
        &'a self,
        name: impl FnOnce(&'a str) -> Name<'a>,
    ) -> Result<Name<'a>> {
        if self.name.is_empty() {
            return Err(Input::EmptyName.into());
        }
        Ok(name(&self.name).checked("the name of a rate limit")?)
    }

    /// Checks the key. The limit without a key is the key that is empty.
    pub(super) fn checked_key(&self) -> Result<&str> {
        let Some(key) = &self.key else {
            return Ok("");
        };
        let key = key.as_deref().ok_or(Input::Unformatted)?;
        if key.is_empty() {
            return Err(Input::EmptyKey.into());
        }
        text::check(key, "the key", text::LONGEST_NAME)?;
        Ok(key)
    }

    pub(super) fn bad_units(&self, units: u32, most: u32) -> Input {
        Input::BadUnits {
            name: self.name.to_string(),
            units,
            most,
        }
    }
}

/// Returns the arrays of a check of several limits.
pub(super) fn calls<'a>(limits: &[&RateLimit], calls: &'a [Call<'a>]) -> Result<Calls<'a>> {
    let mut arrays = Calls {
        // One durable limit makes the whole check durable.
        commit_async: calls.iter().all(|call| call.commit_async),
        ..Calls::default()
    };
    for (place, call) in calls.iter().enumerate() {
        let same_key =
            |other: &&Call<'_>| other.name.as_str() == call.name.as_str() && other.key == call.key;
        if let Some(other) = calls[..place].iter().find(same_key) {
            let quotas = [call, other].map(|it| (it.n, it.period_us, it.burst));
            if quotas[0] != quotas[1] {
                let name = limits[place].name.to_string();
                return Err(Input::DifferentQuotas { name }.into());
            }
        }
        arrays.names.push(call.name.as_str());
        arrays.keys.push(call.key);
        arrays.ns.push(call.n);
        arrays
            .periods
            .push(PgInterval::from_microseconds(call.period_us));
        arrays.bursts.push(call.burst);
        arrays.costs.push(call.cost);
    }
    Ok(arrays)
}

/// Returns the first of several limits whose cost is above its burst, with the sum of the costs of its key.
pub(super) fn above_burst(limits: &[&RateLimit], calls: &[Call<'_>]) -> Option<RateLimit> {
    let cost_of_key = |call: &Call<'_>| {
        let same_key =
            |other: &&Call<'_>| other.name.as_str() == call.name.as_str() && other.key == call.key;
        calls.iter().filter(same_key).map(|it| it.cost).sum::<i64>()
    };
    let mut costs = limits
        .iter()
        .zip(calls)
        .map(|(limit, call)| (limit, call, cost_of_key(call)));
    let (limit, _, cost) = costs.find(|(_, call, cost)| *cost > call.burst)?;
    Some(limit.cost(u32::try_from(cost).unwrap_or(u32::MAX)))
}

impl Spent {
    /// Returns how many units were not given back yet.
    pub(super) fn kept(&self) -> u32 {
        self.kept.units()
    }

    /// Checks that so many units may be given back, and counts them as given back.
    pub(super) fn take_back<'a>(
        &'a self,
        units: u32,
        name: impl FnOnce(&'a str) -> Name<'a>,
    ) -> Result<Units<'a>> {
        let key = self.limit.checked_key()?;
        let name = self.limit.checked_name(name)?;
        if let Err(kept) = self.kept.take_back(units) {
            return Err(self.limit.bad_units(units, kept).into());
        }
        Ok(Units {
            name,
            key,
            units: units.into(),
            spent_at: Timestamp::At(self.at),
            wait_us: self.wait_us,
            commit_async: !self.limit.durable,
        })
    }
}

/// The reply to a check, before it is told as an outcome.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) units: u32,
    reason: LimitedReason,
    at: DateTime<Utc>,
    debt_us: u128,
    quota: Quota,
}

impl Reply {
    /// `own` is the quota of the program.
    pub(super) fn of(row: SpentRow, own: Quota) -> Self {
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
        }
    }

    /// Returns what was spent, and how long to wait before it may be used. `None` if nothing was spent.
    pub(super) fn spent(&self, limit: &RateLimit) -> Option<(Spent, Duration)> {
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
        let wait_us = before.saturating_sub(room).min(i64::MAX as u128) as i64;
        let spent = Spent {
            at: self.at,
            units: self.units,
            remaining: left.saturating_sub(self.units),
            full_in: microseconds(debt),
            quota,
            limit: Arc::new(limit.clone()),
            kept: Kept::all(self.units),
            wait_us,
        };
        Some((spent, Duration::from_micros(wait_us.unsigned_abs())))
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
            Some((spent, _)) => Check::Allowed(spent),
            None => Check::Limited(self.limited(limit, limit.cost)),
        }
    }

    pub(super) fn reserve(&self, limit: &RateLimit) -> Reserve {
        match self.spent(limit) {
            Some((spent, wait)) => Reserve::Reserved(Reservation { spent, wait }),
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
pub(super) fn check_all(row: AllSpentRow, limits: &[&RateLimit]) -> QueryResult<CheckAll> {
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
    let spent = limits.iter().zip(places).map(|(limit, place)| Spent {
        at: time_of(place.at),
        units: limit.cost,
        remaining: place.remaining,
        full_in: place.full_in,
        quota: place.quota,
        limit: Arc::new((*limit).clone()),
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

/// Returns what an error of a call means, if it is one of the function.
pub(super) fn refusal(constraint: Option<&str>, limit: &RateLimit) -> Option<Error> {
    let name = limit.name.to_string();
    match constraint? {
        "diesel_interlock_cost_above_burst" => Some(
            Input::CostAboveBurst {
                name,
                cost: limit.cost,
                burst: limit.quota.burst,
            }
            .into(),
        ),
        "diesel_interlock_contended" => Some(Error::Contended { name }),
        _ => None,
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
    use super::*;

    const SECOND: i64 = 1_000_000;
    static API: RateLimit = RateLimit::named("api", Quota::per_minute(60).burst(10));

    fn checked(limit: &RateLimit) -> Result<Call<'_>, Input> {
        match limit.checked(Duration::ZERO, Name::anywhere) {
            Ok(call) => Ok(call),
            Err(Error::Input(input)) => Err(input),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_quota_is_refused_where_the_database_would_refuse_it() {
        let day = Duration::from_secs(24 * 60 * 60);
        for (quota, is_good) in [
            (Quota::per(1, Duration::from_nanos(1)), true),
            (Quota::per(u32::MAX, Duration::from_secs(1)), true),
            (Quota::per(1, 366 * day), true),
            (Quota::per(1, 366 * day).burst(100), true),
            (Quota::per(1, 366 * day).burst(101), false),
            (Quota::per(1, 366 * day + Duration::from_nanos(1)), false),
            (Quota::per(1, Duration::MAX), false),
            (Quota::per(1, Duration::ZERO), false),
            (Quota::per(0, day), false),
            (Quota::per(1, day).burst(0), false),
        ] {
            let limit = RateLimit::named("api", quota);
            let is_refused = matches!(checked(&limit), Err(Input::BadQuota { .. }));
            assert_eq!(is_refused, !is_good, "{quota:?}");
        }
    }

    #[test]
    fn a_call_is_refused_before_it_is_sent() {
        let long = "x".repeat(1001);
        for (limit, expected) in [
            (RateLimit::new("", API.quota()), Input::EmptyName),
            (API.key(""), Input::EmptyKey),
            (API.key("a\0b"), Input::NulCharacter),
            (RateLimit::new("a\0b", API.quota()), Input::NulCharacter),
            (
                API.key(&long),
                Input::TooLong {
                    what: "the key",
                    longest: 1000,
                },
            ),
            (API.cost(0), API.bad_units(0, u32::MAX)),
        ] {
            assert_eq!(checked(&limit).unwrap_err(), expected, "{limit:?}");
        }
    }

    #[test]
    fn a_call_is_sent_with_what_its_quota_amounts_to() {
        // The cost, the largest debt with which it is allowed, and what it adds to the debt.
        for (cost, allowance, increase) in [
            (1, Some(9 * SECOND), SECOND),
            (10, Some(0), 10 * SECOND),
            (11, None, 11 * SECOND),
        ] {
            let limit = API.cost(cost);
            let call = checked(&limit).unwrap();
            assert_eq!((call.allowance_us, call.increase_us), (allowance, increase));
        }
        let waits = API.checked(Duration::MAX, Name::anywhere).unwrap();
        assert_eq!(waits.max_wait_us, LONGEST_PERIOD as i64);
    }

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
            let reply = Reply::of(row, API.quota());
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
        assert!(check_all(spent(2), &limits).unwrap().is_allowed());
        check_all(spent(1), &limits).unwrap_err();
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
            let checked = check_all(row, &limits);
            assert_eq!(checked.is_ok(), is_good, "{by:?} {places}");
        }
    }

    #[test]
    fn the_limit_whose_cost_is_above_its_burst_is_found() {
        let (one, four, eleven) = (API.key(1), API.cost(4), API.key(2).cost(11));
        for (limits, expected) in [
            (vec![&one, &four], None),
            (vec![&one, &eleven], Some(11)),
            (vec![&one, &four, &four, &four], Some(12)),
        ] {
            let calls: Vec<_> = limits.iter().map(|limit| checked(limit).unwrap()).collect();
            let found = above_burst(&limits, &calls);
            assert_eq!(found.map(|limit| limit.cost), expected);
        }
    }
}
