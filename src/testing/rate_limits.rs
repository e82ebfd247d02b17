//! Keys of rate limits that are full, or used up, when a test says so.

use diesel::pg::PgConnection;

use crate::error::Result;
use crate::rate_limit::{self, RateLimit};
use crate::session::{Blocking, now};

/// Spends all units of a key that are left. The next check of it is limited.
///
/// One round trip, as a check. [`RateLimit::reset_on`] makes the key full again.
///
/// # Errors
///
/// The [errors of checks](RateLimit#errors-of-checks), and [`Error::Contended`](crate::Error::Contended) if another transaction
/// has locked the key for 250 milliseconds.
///
/// # Examples
///
/// ```
/// use diesel_interlock::{Quota, RateLimit, testing};
///
/// static API: RateLimit = RateLimit::named("api", Quota::per_hour(100));
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// testing::use_up(conn, &API.key(7))?;
/// assert!(API.key(7).check_on(conn)?.is_limited());
///
/// API.key(7).reset_on(conn)?;
/// assert!(API.key(7).check_on(conn)?.is_allowed());
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn use_up(conn: &mut PgConnection, limit: &RateLimit) -> Result<()> {
    now(rate_limit::use_up(&mut Blocking::lent(conn), limit))
}
