//! Giving back units that were spent, over a pool and on a connection, blocking.

use diesel::pg::PgConnection;

use super::{Reservation, Spent, operations};
use crate::error::Result;
#[cfg(feature = "r2d2")]
use crate::pool::{self, PgPool};
use crate::session::{Blocking, now};

impl Spent {
    /// Gives back units that were not used, through a connection from the pool. Returns how many units that was worth, rounded
    /// up.
    ///
    /// The key has been refilled since the units were spent, and must not be refilled twice. So the key gets back
    /// `units × period / N` of time, less the time that has passed since. The result is that time as units. It is zero if
    /// - nothing of that time is left,
    /// - the key was reset, pruned or given another quota since then,
    /// - the server has lost the spend, and the key was not used since,
    /// - the clock was set back, or
    /// - another transaction has locked the key for 250 milliseconds.
    ///
    /// If the key has reservations, the time until the moment of the last one counts as passed, even if it was cancelled, because
    /// the moments that callers were told do not change.
    ///
    /// One round trip: `SELECT resource_control.give_back_rate_limit($1, …)`.
    ///
    /// # Blocking
    ///
    /// As [`RateLimit::check`](crate::RateLimit::check).
    ///
    /// # Errors
    ///
    /// - [`Input::BadUnits`](crate::error::Input::BadUnits) for zero units, and for more units than are left to give back. If a
    ///   call fails after its statement was sent, its units count as given back.
    /// - The [errors of checks](crate::RateLimit#errors-of-checks).
    #[cfg(feature = "r2d2")]
    pub fn give_back(&self, pool: &PgPool, units: u32) -> Result<u32> {
        let mut conn = pool::check_out(pool, None)?;
        let session = &mut Blocking::pooled(&mut conn);
        now(operations::give_back(session, self, units))
    }

    /// As [`give_back`](Self::give_back), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`give_back`](Self::give_back).
    pub fn give_back_on(&self, conn: &mut PgConnection, units: u32) -> Result<u32> {
        now(operations::give_back(
            &mut Blocking::lent(conn),
            self,
            units,
        ))
    }
}

impl Reservation {
    /// Gives back all units that were not given back yet, through a connection from the pool. Returns how many units that was
    /// worth, rounded up.
    ///
    /// Until the units may be used, they come back in full. After that moment they come back as with [`Spent::give_back`], and the
    /// time that has passed counts from that moment. The same holds before it if another call has reserved a later moment (even
    /// if it was cancelled since), or if the key was reset or given another quota.
    ///
    /// One round trip: `SELECT resource_control.give_back_rate_limit($1, …)`. If no units are left, this returns zero, takes no
    /// connection, and sends nothing.
    ///
    /// # Blocking
    ///
    /// As [`RateLimit::check`](crate::RateLimit::check).
    ///
    /// # Errors
    ///
    /// The [errors of checks](crate::RateLimit#errors-of-checks).
    #[cfg(feature = "r2d2")]
    pub fn cancel(self, pool: &PgPool) -> Result<u32> {
        if self.spent.is_given_back() {
            return Ok(0);
        }
        let mut conn = pool::check_out(pool, None)?;
        now(operations::cancel(&mut Blocking::pooled(&mut conn), &self))
    }

    /// As [`cancel`](Self::cancel), on the given connection.
    ///
    /// # Errors
    ///
    /// As [`cancel`](Self::cancel).
    pub fn cancel_on(self, conn: &mut PgConnection) -> Result<u32> {
        now(operations::cancel(&mut Blocking::lent(conn), &self))
    }
}
