//! The statements of a rate limit, and the rows that they return.

use diesel::data_types::{PgInterval, PgTimestamp};

use self::internal::{decide_rate_limit, spend_rate_limit};
use crate::functions::{
    check_rate_limits, give_back_rate_limit, peek_rate_limit, prune_rate_limits, reset_rate_limit,
};
use crate::installed::Needs;
use crate::text::Name;
use crate::time::Timestamp;

/// The stored functions that only this crate calls.
// Diesel's macro writes public items without documentation, and the functions have many arguments.
#[allow(missing_docs, unreachable_pub, clippy::too_many_arguments)]
mod internal {
    use diesel::sql_types::{BigInt, Bool, Interval, Nullable, Record, Text, Timestamptz};

    /// The result of [`spend_rate_limit()`] and [`decide_rate_limit()`]: how many units were spent, why none were, the time of the
    /// decision, when the key is full, and the quota in force: N, the period in microseconds, and the burst, all null if it is the
    /// caller's own.
    pub(super) type SpentUnits = Record<(
        BigInt,
        Nullable<Text>,
        Timestamptz,
        Timestamptz,
        Nullable<BigInt>,
        Nullable<BigInt>,
        Nullable<BigInt>,
    )>;

    #[diesel::declare_sql_function]
    extern "SQL" {
        /// As `reserve_rate_limit`, in microseconds. With `at_least` it spends fewer units than the cost, down to `at_least`, if
        /// fewer are left. Returns [`SpentUnits`].
        #[sql_name = "resource_control.decide_rate_limit"]
        fn decide_rate_limit(
            name: Text,
            key: Text,
            n: BigInt,
            period_us: BigInt,
            burst: BigInt,
            cost: BigInt,
            max_wait_us: BigInt,
            at_least: Nullable<BigInt>,
            commit_async: Bool,
        ) -> SpentUnits;

        /// As [`decide_rate_limit()`], and faster. `allowance` and `increase` must be what the quota, the wait and the cost
        /// amount to.
        #[sql_name = "resource_control.spend_rate_limit"]
        fn spend_rate_limit(
            name: Text,
            key: Text,
            n: BigInt,
            period_us: BigInt,
            burst: BigInt,
            cost: BigInt,
            max_wait_us: BigInt,
            commit_async: Bool,
            allowance: Nullable<Interval>,
            increase: Interval,
        ) -> SpentUnits;
    }
}

/// The arguments of a call that passed every check that needs no database.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) name: Name<'a>,
    pub(super) key: &'a str,
    pub(super) n: i64,
    pub(super) period_us: i64,
    pub(super) burst: i64,
    pub(super) cost: i64,
    pub(super) max_wait_us: i64,
    /// The largest debt with which the program's own quota allows the call. `None` if none does.
    pub(super) allowance_us: Option<i64>,
    /// What the cost adds to the debt under that quota.
    pub(super) increase_us: i64,
    pub(super) commit_async: bool,
}

/// The row of a check: how many units were spent, why none were, when that was decided, when the key is full again, and the
/// quota in force, unless it is the program's own: N, the period in microseconds and the burst.
pub(super) type SpentRow = (
    i64,
    Option<String>,
    PgTimestamp,
    PgTimestamp,
    Option<i64>,
    Option<i64>,
    Option<i64>,
);

/// The row of a check of several limits: whether all allow it, which does not, from 1 on, why, and the wait. The arrays have
/// one value for each limit, or one for the limit that does not allow it: when that was decided, how many units are left, how
/// long until the key is full, and the quota in force.
pub(super) type AllSpentRow = (
    bool,
    Option<i32>,
    Option<String>,
    Option<PgInterval>,
    Option<Vec<PgTimestamp>>,
    Option<Vec<i64>>,
    Option<Vec<PgInterval>>,
    Option<Vec<i64>>,
    Option<Vec<PgInterval>>,
    Option<Vec<i64>>,
);

/// The row of a peek: how many units are left, how long until the key is full, and the quota in force.
pub(super) type StateRow = (i64, PgInterval, i64, PgInterval, i64);

/// The row of a step of pruning: how many keys it deleted, and where it stopped, unless it reached the end.
pub(super) type PrunedRow = (i32, Option<String>, Option<String>);

/// A check. It returns one value, because the row of a table costs the server more.
pub(super) type Spend<'a> = diesel::dsl::select<
    spend_rate_limit<
        &'a str,
        &'a str,
        i64,
        i64,
        i64,
        i64,
        i64,
        bool,
        Option<PgInterval>,
        PgInterval,
    >,
>;

pub(super) const SPEND_NEEDS: &Needs = &[
    ("spend_rate_limit", "EXECUTE"),
    ("rate_limit", "SELECT, INSERT, UPDATE, DELETE"),
    ("rate_limit_override", "SELECT"),
];

pub(super) fn spend<'a>(call: &'a Call<'_>) -> Spend<'a> {
    diesel::select(spend_rate_limit(
        call.name.as_str(),
        call.key,
        call.n,
        call.period_us,
        call.burst,
        call.cost,
        call.max_wait_us,
        call.commit_async,
        call.allowance_us.map(PgInterval::from_microseconds),
        PgInterval::from_microseconds(call.increase_us),
    ))
}

/// A check that spends fewer units than its cost, but at least so many, if fewer are left.
pub(super) type SpendAtLeast<'a> = diesel::dsl::select<
    decide_rate_limit<&'a str, &'a str, i64, i64, i64, i64, i64, Option<i64>, bool>,
>;

pub(super) const SPEND_AT_LEAST_NEEDS: &Needs = &[
    ("decide_rate_limit", "EXECUTE"),
    ("rate_limit", "SELECT, INSERT, UPDATE, DELETE"),
    ("rate_limit_override", "SELECT"),
];

pub(super) fn spend_at_least<'a>(call: &'a Call<'_>, at_least: u32) -> SpendAtLeast<'a> {
    diesel::select(decide_rate_limit(
        call.name.as_str(),
        call.key,
        call.n,
        call.period_us,
        call.burst,
        call.cost,
        call.max_wait_us,
        Some(at_least.into()),
        call.commit_async,
    ))
}

/// The arrays of a check of several limits.
#[derive(Debug, Default)]
pub(super) struct Calls<'a> {
    pub(super) names: Vec<&'a str>,
    pub(super) keys: Vec<&'a str>,
    pub(super) ns: Vec<i64>,
    pub(super) periods: Vec<PgInterval>,
    pub(super) bursts: Vec<i64>,
    pub(super) costs: Vec<i64>,
    pub(super) commit_async: bool,
}

pub(super) type SpendAll<'a> = diesel::dsl::select<
    check_rate_limits<
        &'a [&'a str],
        &'a [&'a str],
        &'a [i64],
        &'a [PgInterval],
        &'a [i64],
        &'a [i64],
        bool,
    >,
>;

pub(super) const SPEND_ALL_NEEDS: &Needs = &[
    ("check_rate_limits", "EXECUTE"),
    ("rate_limit", "SELECT, INSERT, UPDATE, DELETE"),
    ("rate_limit_override", "SELECT"),
];

pub(super) fn spend_all<'a>(calls: &'a Calls<'a>) -> SpendAll<'a> {
    diesel::select(check_rate_limits(
        calls.names.as_slice(),
        calls.keys.as_slice(),
        calls.ns.as_slice(),
        calls.periods.as_slice(),
        calls.bursts.as_slice(),
        calls.costs.as_slice(),
        calls.commit_async,
    ))
}

/// Units that are given back.
#[derive(Debug)]
pub(super) struct Units<'a> {
    pub(super) name: Name<'a>,
    pub(super) key: &'a str,
    pub(super) units: i64,
    pub(super) spent_at: Timestamp,
    pub(super) wait_us: i64,
    pub(super) commit_async: bool,
}

pub(super) type GiveBack<'a> =
    diesel::dsl::select<give_back_rate_limit<&'a str, &'a str, i64, Timestamp, PgInterval, bool>>;

pub(super) const GIVE_BACK_NEEDS: &Needs = &[
    ("give_back_rate_limit", "EXECUTE"),
    ("rate_limit", "SELECT, UPDATE"),
];

pub(super) fn give_back<'a>(units: &'a Units<'_>) -> GiveBack<'a> {
    diesel::select(give_back_rate_limit(
        units.name.as_str(),
        units.key,
        units.units,
        units.spent_at,
        PgInterval::from_microseconds(units.wait_us),
        units.commit_async,
    ))
}

pub(super) type Peek<'a> =
    diesel::dsl::select<peek_rate_limit<&'a str, &'a str, i64, PgInterval, i64>>;

pub(super) const PEEK_NEEDS: &Needs = &[
    ("peek_rate_limit", "EXECUTE"),
    ("rate_limit", "SELECT"),
    ("rate_limit_override", "SELECT"),
];

pub(super) fn peek<'a>(call: &'a Call<'_>) -> Peek<'a> {
    diesel::select(peek_rate_limit(
        call.name.as_str(),
        call.key,
        call.n,
        PgInterval::from_microseconds(call.period_us),
        call.burst,
    ))
}

pub(super) type Reset<'a> = diesel::dsl::select<reset_rate_limit<&'a str, Option<&'a str>, bool>>;

pub(super) const RESET_NEEDS: &Needs = &[
    ("reset_rate_limit", "EXECUTE"),
    ("rate_limit", "SELECT, UPDATE, DELETE"),
];

/// Without a key, it deletes all keys of the name.
pub(super) fn reset<'a>(name: &'a str, key: Option<&'a str>, commit_async: bool) -> Reset<'a> {
    diesel::select(reset_rate_limit(name, key, commit_async))
}

/// Undoes, for the caller's transaction, that a function has switched off the wait for the disk. A value that the session has set
/// is not known any more.
pub(super) const WAIT_FOR_DISK: &str = "SET LOCAL synchronous_commit TO DEFAULT";

pub(super) type Prune<'a> = diesel::dsl::select<prune_rate_limits<&'a str, &'a str, i32>>;

pub(super) const PRUNE_NEEDS: &Needs = &[
    ("prune_rate_limits", "EXECUTE"),
    ("rate_limit", "SELECT, UPDATE, DELETE"),
];

pub(super) fn prune<'a>(after: &'a (String, String), batch: i32) -> Prune<'a> {
    diesel::select(prune_rate_limits(after.0.as_str(), after.1.as_str(), batch))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use diesel::pg::Pg;

    use super::*;
    use crate::rate_limit::{Quota, RateLimit};
    use crate::text::Name;

    static API: RateLimit = RateLimit::named("api", Quota::per_minute(100).burst(20));

    #[test]
    fn a_check_is_one_call() {
        let limit = API.key(7).cost(3);
        let call = limit
            .checked(Duration::from_secs(1), Name::anywhere)
            .unwrap();
        assert_eq!(
            diesel::debug_query::<Pg, _>(&spend(&call)).to_string(),
            "SELECT resource_control.spend_rate_limit($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) \
             -- binds: [\"api\", \"7\", 100, 60000000, 20, 3, 1000000, true, \
             Some(PgInterval { microseconds: 11200000, days: 0, months: 0 }), \
             PgInterval { microseconds: 1800000, days: 0, months: 0 }]"
        );
        let durable = API.clone().durable();
        let call = durable.checked(Duration::ZERO, Name::anywhere).unwrap();
        let sql = diesel::debug_query::<Pg, _>(&spend(&call)).to_string();
        assert!(
            sql.contains("[\"api\", \"\", 100, 60000000, 20, 1, 0, false, Some("),
            "{sql}"
        );
    }

    #[test]
    fn a_peek_a_reset_and_a_step_of_pruning_are_one_call_each() {
        let call = API.checked(Duration::ZERO, Name::anywhere).unwrap();
        assert_eq!(
            diesel::debug_query::<Pg, _>(&peek(&call)).to_string(),
            "SELECT resource_control.peek_rate_limit($1, $2, $3, $4, $5) -- binds: [\"api\", \"\", 100, \
             PgInterval { microseconds: 60000000, days: 0, months: 0 }, 20]"
        );
        assert_eq!(
            diesel::debug_query::<Pg, _>(&reset("api", None, true)).to_string(),
            "SELECT resource_control.reset_rate_limit($1, $2, $3) -- binds: [\"api\", None, true]"
        );
        let start = (String::new(), String::new());
        assert_eq!(
            diesel::debug_query::<Pg, _>(&prune(&start, 500)).to_string(),
            "SELECT resource_control.prune_rate_limits($1, $2, $3) -- binds: [\"\", \"\", 500]"
        );
    }
}
