//! What is checked before a call is sent, and what its errors mean.

use std::time::Duration;

use diesel::data_types::PgInterval;

use super::sql::{Call, Calls, Units};
use super::{CheckAll, Quota, RateLimit, Spent};
use crate::error::{Error, Input, Result};
use crate::text::{self, Name};
use crate::time::Timestamp;

/// The longest period and the longest wait, in microseconds: 366 days.
const LONGEST_PERIOD: u128 = 366 * 24 * 60 * 60 * 1_000_000;

/// The longest time in which a burst is refilled, in microseconds: 36,600 days.
const LONGEST_REFILL: u128 = 100 * LONGEST_PERIOD;

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
        let name = self.sent_name.get().unwrap_or_else(|| name(&self.name));
        Ok(name.checked("the name of a rate limit")?)
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

impl Call<'_> {
    fn has_key_of(&self, other: &Call<'_>) -> bool {
        self.name.as_str() == other.name.as_str() && self.key == other.key
    }
}

/// Checks the arguments of calls before a connection is there.
#[cfg(any(feature = "r2d2", feature = "async"))]
pub(super) fn check_each(limits: &[&RateLimit]) -> Result<()> {
    limits
        .iter()
        .try_for_each(|limit| limit.checked(Duration::ZERO, Name::anywhere).map(drop))
}

/// Returns the arrays of a check of several limits.
pub(super) fn calls<'a>(limits: &[&RateLimit], calls: &'a [Call<'a>]) -> Result<Calls<'a>> {
    let mut arrays = Calls {
        // One durable limit makes the whole check durable.
        commit_async: calls.iter().all(|call| call.commit_async),
        ..Calls::default()
    };
    for (place, call) in calls.iter().enumerate() {
        if let Some(other) = calls[..place].iter().find(|other| other.has_key_of(call)) {
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

/// Returns which of several limits the database refuses because its cost is above its burst, with the sum of the costs of its key.
/// `details` are those of the error, which have its place. Otherwise it is the first whose cost is above the program's burst.
pub(super) fn above_burst(
    limits: &[&RateLimit],
    calls: &[Call<'_>],
    details: Option<&str>,
) -> Option<RateLimit> {
    let place = details.and_then(|text| text.strip_prefix("place ")?.parse::<usize>().ok());
    let cost_of_key = |call: &Call<'_>| {
        let same_key = calls.iter().filter(|other| other.has_key_of(call));
        same_key.map(|it| it.cost).sum::<i64>()
    };
    let mut costs = limits
        .iter()
        .zip(calls)
        .zip(1_usize..)
        .map(|((limit, call), number)| (limit, call, cost_of_key(call), number));
    let (limit, _, cost, _) = costs.find(|(_, call, cost, number)| match place {
        Some(place) => *number == place,
        None => *cost > call.burst,
    })?;
    Some(limit.cost(u32::try_from(cost).unwrap_or(u32::MAX)))
}

/// Returns which of several limits the result of their check is about: the one that refused, or whose arguments are refused. Else
/// it is the first.
pub(super) fn decisive<'a>(
    limits: &[&'a RateLimit],
    first: &'a RateLimit,
    checked: &Result<CheckAll>,
) -> &'a RateLimit {
    let mut limits = limits.iter().copied();
    let found = match checked {
        Ok(CheckAll::Limited { by, .. }) => limits.nth(*by),
        Err(Error::Input(Input::CostAboveBurst { name, .. } | Input::DifferentQuotas { name })) => {
            limits.find(|limit| limit.name == *name)
        }
        Err(Error::Input(_)) => {
            limits.find(|limit| limit.checked(Duration::ZERO, Name::anywhere).is_err())
        }
        _ => None,
    };
    found.unwrap_or(first)
}

impl Spent {
    /// Checks that so many units may be given back, and counts them as given back.
    pub(super) fn take_back(&self, units: u32) -> Result<Units<'_>> {
        self.back(|| match self.kept.take_back(units) {
            Ok(()) => Ok(units),
            Err(kept) => Err(self.limit.bad_units(units, kept).into()),
        })
    }

    /// Returns whether all units were given back.
    pub(super) fn is_given_back(&self) -> bool {
        self.kept.is_empty()
    }

    /// Counts all units that are left as given back. These may be none.
    pub(super) fn take_all_back(&self) -> Result<Units<'_>> {
        self.back(|| Ok(self.kept.take_all()))
    }

    /// Checks what is sent, before it takes any units.
    fn back(&self, take: impl FnOnce() -> Result<u32>) -> Result<Units<'_>> {
        let key = self.limit.checked_key()?;
        let name = self.limit.checked_name(Name::anywhere)?; // the name as it was sent
        Ok(Units {
            name,
            key,
            units: take()?.into(),
            spent_at: Timestamp::At(self.at),
            wait_us: self.wait_us,
            commit_async: !self.limit.durable,
        })
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
    fn the_limit_whose_cost_is_above_its_burst_is_found() {
        let (one, four, eleven) = (API.key(1), API.cost(4), API.key(2).cost(11));
        for (limits, expected) in [
            (vec![&one, &four], None),
            (vec![&one, &eleven], Some(11)),
            (vec![&one, &four, &four, &four], Some(12)),
        ] {
            let calls: Vec<_> = limits.iter().map(|limit| checked(limit).unwrap()).collect();
            let found = above_burst(&limits, &calls, None);
            assert_eq!(found.map(|limit| limit.cost), expected);
        }
    }
}
