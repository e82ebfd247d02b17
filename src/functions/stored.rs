//! The functions of the schema `resource_control` that return a value.

use diesel::sql_types::{BigInt, Integer, Interval, Nullable, Record, SmallInt, Text, Timestamptz};

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
}
