//! The functions of the schema `resource_control` that answer a value.

use diesel::sql_types::{BigInt, Integer, Interval, Nullable, Record, SmallInt, Text, Timestamptz};

/// A claim's id, slot, and times of creation and expiry, all null if none was free; when that was answered;
/// and when enough of those in flight will have expired for a claim, where that was read.
pub type Admitted = Record<(
    Nullable<BigInt>,
    Nullable<SmallInt>,
    Nullable<Timestamptz>,
    Nullable<Timestamptz>,
    Timestamptz,
    Nullable<Timestamptz>,
)>;

#[diesel::declare_sql_function]
extern "SQL" {
    /// The number of a name: 64-bit FNV-1a, as [`fnv1a`](crate::fnv1a) computes it.
    #[sql_name = "resource_control.lock_key"]
    fn lock_key(name: Text) -> BigInt;

    /// An interval as elapsed time, in which a day is 24 hours and a month 30 days. At most 1,000 years.
    #[sql_name = "resource_control.elapsed"]
    fn elapsed(span: Interval) -> Interval;

    /// Deletes at most that many keys whose interval has passed, and returns how many. Skips those
    /// that are being taken. Attempts at those keys are denied while they are deleted and until the
    /// transaction ends: keep the batch in the hundreds, and commit at once.
    #[sql_name = "resource_control.prune_throttled_keys"]
    fn prune_throttled_keys(batch: Integer) -> Integer;

    /// Claims one of the slots of a service; never waits for one. What it answers is [`Admitted`]. In a
    /// transaction, the slot is kept from everyone until its end.
    ///
    /// Bad arguments are a check violation whose constraint names the argument, as
    /// `diesel_interlock_bad_slots` does.
    #[sql_name = "resource_control.admit_service_request"]
    fn admit_service_request(
        service: Text,
        slots: Integer,
        timeout: Interval,
        details: Text,
    ) -> Admitted;

    /// Ends a request to a service and frees its slot; false if it had ended or timed out before.
    #[sql_name = "resource_control.complete_service_request"]
    fn complete_service_request(id: BigInt) -> Bool;

    /// Lets a request to a service expire that long from now, never sooner than before, and answers
    /// when; null if it had ended or timed out before.
    #[sql_name = "resource_control.renew_service_request"]
    fn renew_service_request(id: BigInt, timeout: Interval) -> Nullable<Timestamptz>;

    /// Lets a fencing token pass unless a greater one has, and answers whether it did. For the
    /// transaction that writes what the fence protects.
    #[sql_name = "resource_control.pass_fence"]
    fn pass_fence(name: Text, token: BigInt) -> Bool;

    /// Deletes at most that many requests to services that ended, or expired, longer ago than that,
    /// and returns how many. Begins with the oldest and skips those that are locked. Marks at most as many of those that
    /// are overdue.
    #[sql_name = "resource_control.prune_service_requests"]
    fn prune_service_requests(older_than: Interval, batch: Integer) -> Integer;
}
