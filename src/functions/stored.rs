//! The functions of the schema `resource_control` that return a value.

// The stored functions of rate limits have more arguments than a Rust function should.
#![allow(clippy::too_many_arguments)]

use diesel::sql_types::{
    Array, BigInt, Bool, Integer, Interval, Nullable, Record, SmallInt, Text, Timestamptz,
};

/// The result of a claim: its id, its slot, and its times of creation and expiry, all null if no slot was free; the time of
/// the decision; and the time at which enough requests in flight will have expired for a claim, if the function read it.
pub type Admitted = Record<(
    Nullable<BigInt>,
    Nullable<SmallInt>,
    Nullable<Timestamptz>,
    Nullable<Timestamptz>,
    Timestamptz,
    Nullable<Timestamptz>,
)>;

/// The result of a check of a rate limit: whether it is allowed, how many units were spent, why none were (`spent`,
/// `contended` or `above_burst`), the time of the decision, how long to wait before the units may be used, or until the call may
/// be repeated, how many units are left, how long until the key is full, and the quota in force: N, period and burst.
pub type Checked = Record<(
    Bool,
    BigInt,
    Nullable<Text>,
    Timestamptz,
    Nullable<Interval>,
    Nullable<Interval>,
    BigInt,
    Interval,
    BigInt,
    Interval,
    BigInt,
)>;

/// The result of a check of several rate limits: whether all allow it; if not, which one refuses it, from 1 on, why, and the wait.
/// That is the one with the longest wait, or the first one that refuses while the units are being spent. Then, for each limit, or
/// only for the one that refuses: the time of the decision, how many units are left, how long until the key is full, and the quota
/// in force (N, period and burst).
pub type CheckedAll = Record<(
    Bool,
    Nullable<Integer>,
    Nullable<Text>,
    Nullable<Interval>,
    Nullable<Array<Timestamptz>>,
    Nullable<Array<BigInt>>,
    Nullable<Array<Interval>>,
    Nullable<Array<BigInt>>,
    Nullable<Array<Interval>>,
    Nullable<Array<BigInt>>,
)>;

/// What is left of a key of a rate limit: how many units, how long until the key is full, and the quota in force: N, period
/// and burst.
pub type Peeked = Record<(BigInt, Interval, BigInt, Interval, BigInt)>;

/// The result of a step of pruning: how many keys it deleted, and the name and key to go on after, or null at the end.
pub type Pruned = Record<(Integer, Nullable<Text>, Nullable<Text>)>;

#[diesel::declare_sql_function]
extern "SQL" {
    /// Returns the number of a name: 64-bit FNV-1a, as [`fnv1a`](crate::fnv1a) computes it.
    #[sql_name = "resource_control.lock_key"]
    fn lock_key(name: Text) -> BigInt;

    /// Converts an interval to elapsed time, in which a day is 24 hours and a month 30 days. At most 1,000 years.
    #[sql_name = "resource_control.elapsed"]
    fn elapsed(span: Interval) -> Interval;

    /// Deletes at most `batch` keys whose interval has passed, and returns their number. Skips keys that are being taken.
    /// Keep the batch in the hundreds and commit at once, because attempts at those keys are denied from their deletion to
    /// the end of the transaction.
    #[sql_name = "resource_control.prune_throttled_keys"]
    fn prune_throttled_keys(batch: Integer) -> Integer;

    /// Claims one of the slots of a service. Returns [`Admitted`] and never waits for a slot. In a transaction, the slot is
    /// not available to other sessions until the transaction ends.
    ///
    /// A bad argument is a check violation, whose constraint names the argument. An example is
    /// `diesel_interlock_bad_slots`.
    #[sql_name = "resource_control.admit_service_request"]
    fn admit_service_request(
        service: Text,
        slots: Integer,
        timeout: Interval,
        details: Text,
    ) -> Admitted;

    /// Ends a request to a service and frees its slot. Returns false if it had ended or timed out before.
    #[sql_name = "resource_control.complete_service_request"]
    fn complete_service_request(id: BigInt) -> Bool;

    /// Lets a request to a service expire after `timeout` from now, but never sooner than before. Returns the time of
    /// expiry, or null if the request had ended or timed out before.
    #[sql_name = "resource_control.renew_service_request"]
    fn renew_service_request(id: BigInt, timeout: Interval) -> Nullable<Timestamptz>;

    /// Lets a fencing token pass unless a greater one has passed. Returns whether it did. Call it in the transaction that
    /// writes what the fence protects.
    #[sql_name = "resource_control.pass_fence"]
    fn pass_fence(name: Text, token: BigInt) -> Bool;

    /// Deletes at most `batch` requests to services that ended or expired more than `older_than` ago, and returns their
    /// number. Starts with the oldest, and skips requests that are locked. Also marks at most `batch` overdue requests.
    #[sql_name = "resource_control.prune_service_requests"]
    fn prune_service_requests(older_than: Interval, batch: Integer) -> Integer;

    /// Spends units of a key if its rate limit allows the call. Returns [`Checked`]. Waits at most 250 milliseconds for each
    /// transaction that it meets at the key. With `commit_async`, the transaction commits without waiting for the disk.
    ///
    /// Commit at once, because every other call for the key waits until then, and a rollback gives the units back. A bad
    /// argument is a check violation, whose constraint names it. An example is `diesel_interlock_bad_quota`.
    #[sql_name = "resource_control.check_rate_limit"]
    fn check_rate_limit(
        name: Text,
        key: Text,
        n: BigInt,
        period: Interval,
        burst: BigInt,
        cost: BigInt,
        commit_async: Bool,
    ) -> Checked;

    /// As [`check_rate_limit()`], for several limits: all calls are allowed, or none is. Returns [`CheckedAll`].
    #[sql_name = "resource_control.check_rate_limits"]
    fn check_rate_limits(
        names: Array<Text>,
        keys: Array<Text>,
        ns: Array<BigInt>,
        periods: Array<Interval>,
        bursts: Array<BigInt>,
        costs: Array<BigInt>,
        commit_async: Bool,
    ) -> CheckedAll;

    /// As [`check_rate_limit()`], and also spends units of the future, if the wait for them is at most `max_wait`.
    #[sql_name = "resource_control.reserve_rate_limit"]
    fn reserve_rate_limit(
        name: Text,
        key: Text,
        n: BigInt,
        period: Interval,
        burst: BigInt,
        cost: BigInt,
        max_wait: Interval,
        commit_async: Bool,
    ) -> Checked;

    /// Gives back units that were spent at `spent_at` and not used, less what was refilled since then, or since the end of the
    /// `wait` of a reservation. Returns how many, rounded up.
    #[sql_name = "resource_control.give_back_rate_limit"]
    fn give_back_rate_limit(
        name: Text,
        key: Text,
        units: BigInt,
        spent_at: Timestamptz,
        wait: Interval,
        commit_async: Bool,
    ) -> BigInt;

    /// Returns how many units of a key are left, as [`Peeked`]. Changes nothing.
    #[sql_name = "resource_control.peek_rate_limit"]
    fn peek_rate_limit(name: Text, key: Text, n: BigInt, period: Interval, burst: BigInt)
    -> Peeked;

    /// Makes a key full, or all keys of the name if the key is null. Returns how many were not.
    #[sql_name = "resource_control.reset_rate_limit"]
    fn reset_rate_limit(name: Text, key: Nullable<Text>, commit_async: Bool) -> BigInt;

    /// Deletes the full keys among the next `batch` rows after this name and key. Returns [`Pruned`]. Commit at once, because
    /// checks of those keys wait until then.
    #[sql_name = "resource_control.prune_rate_limits"]
    fn prune_rate_limits(after_name: Text, after_key: Text, batch: Integer) -> Pruned;

    /// Returns how long a key of a rate limit takes to be full again under the wanted quota, in microseconds. The other
    /// arguments are the columns of its row, and a time.
    #[sql_name = "resource_control.rate_limit_debt"]
    fn rate_limit_debt(
        changed_at: Timestamptz,
        full_at: Timestamptz,
        reserved_until: Nullable<Timestamptz>,
        n: BigInt,
        period_us: BigInt,
        at: Timestamptz,
        wanted_n: BigInt,
        wanted_period_us: BigInt,
        wanted_burst: BigInt,
    ) -> BigInt;

    /// Returns `amount` times `multiplier`, divided by `divisor`, rounded up. At most `i64::MAX`.
    #[sql_name = "resource_control.scaled_up"]
    fn scaled_up(amount: BigInt, multiplier: BigInt, divisor: BigInt) -> BigInt;
}
