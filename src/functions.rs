//! The stored functions of the schema `resource_control`, for your own queries.
//!
//! ```
//! use diesel::prelude::*;
//! use diesel_interlock::functions::lock_key;
//!
//! # let database = workbench::Database::new();
//! # diesel_interlock::migrations::install(&database.pool(1))?;
//! # let conn = &mut database.connect();
//! let number: i64 = diesel::select(lock_key("223 345")).get_result(conn)?;
//! assert_eq!(number, 3755351481708176604);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use diesel::sql_types::{BigInt, Integer, Interval, Nullable, Record, SmallInt, Text, Timestamptz};

use crate::schema::resource_control::sql_types::ThrottledResourceEnum;

/// The result of a claim: the id, which is the fencing token; the slot; the time of the claim; the
/// time of expiry; and how long to wait before the next try. If no slot was free, the first four
/// are null; otherwise the last is null.
pub type Claimed = Record<(
    Nullable<BigInt>,
    Nullable<SmallInt>,
    Nullable<Timestamptz>,
    Nullable<Timestamptz>,
    Nullable<Interval>,
)>;

#[diesel::declare_sql_function]
extern "SQL" {
    /// Returns the number of the lock with this name, as [`LockKey::named`](crate::LockKey::named)
    /// does.
    #[sql_name = "resource_control.lock_key"]
    fn lock_key(name: Text) -> BigInt;

    /// Converts an interval to elapsed time, where a day has 24 hours and a month 30 days.
    #[sql_name = "resource_control.elapsed"]
    fn elapsed(span: Interval) -> Interval;

    /// Grants a resource if its interval has passed, and returns whether it was granted. Commit
    /// right afterwards.
    #[sql_name = "resource_control.lock_throttled_resource"]
    fn lock_throttled_resource(resource: ThrottledResourceEnum, details: Text) -> Bool;

    /// Claims one of the slots of a service, and returns [`Claimed`]. Never waits for a slot.
    /// Commit right afterwards.
    #[sql_name = "resource_control.claim_service_request"]
    fn claim_service_request(
        service: Text,
        slots: Integer,
        timeout: Interval,
        details: Text,
    ) -> Claimed;

    /// Ends a request and frees its slot. Returns `false` if the request had ended or timed out
    /// before, or belongs to another service.
    #[sql_name = "resource_control.complete_service_request"]
    fn complete_service_request(service: Text, id: BigInt) -> Bool;

    /// Extends a request to `timeout` from now, and never shortens it. Returns whether the request
    /// was in flight.
    #[sql_name = "resource_control.renew_service_request"]
    fn renew_service_request(service: Text, id: BigInt, timeout: Interval) -> Bool;

    /// Deletes at most `batch` requests that ended or expired more than `older_than` ago, and
    /// returns how many.
    #[sql_name = "resource_control.prune_service_requests"]
    fn prune_service_requests(older_than: Interval, batch: Integer) -> Integer;

    /// Passes a fence with a token, unless a larger token has passed it. Returns whether the token
    /// passed. Call it in the transaction that writes what the fence protects, and roll that
    /// transaction back if it returns `false`.
    #[sql_name = "resource_control.pass_fence"]
    fn pass_fence(name: Text, token: BigInt) -> Bool;
}
