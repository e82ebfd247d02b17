//! Claims as plain data, on a connection that the caller lends.

use chrono::{DateTime, Utc};
use diesel::pg::PgConnection;

#[cfg(feature = "r2d2")]
use super::handover;
use super::request::{Request, Sent};
use super::{Admission, Claim, Semaphore, query};
use crate::attempt::Attempt;
use crate::error::{Error, Misplaced, Result};
use crate::events;
use crate::session::now;
use crate::time::Timestamp;
use crate::transaction;

/// # On a connection of one's own
///
/// For other pools and wrappers, and for work that ends elsewhere than it began. Errors are those of
/// [all of them](#errors-of-all-of-them).
impl Semaphore {
    /// Claims a slot if one is free, on the given connection, and answers it as plain data; never
    /// waits for a slot. One round trip, as [`try_acquire`](Self::try_acquire).
    ///
    /// Whoever has the [`Claim`]'s `id` ends it, with [`complete_on`](Self::complete_on).
    ///
    /// # Errors
    ///
    /// Those of [all of them](#errors-of-all-of-them).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::Semaphore;
    ///
    /// static RENDERER: Semaphore = Semaphore::named("renderer", 2, Duration::from_secs(600));
    ///
    /// # let database = workbench::Database::new();
    /// # let conn = &mut database.connect();
    /// # diesel_interlock::migrations::install(conn)?;
    /// let claim = RENDERER.claim_on(conn)?.acquired().expect("nobody else is here");
    /// let job = format!("render 7 {}", claim.id); // to a queue; later, in another process:
    /// let id = job.rsplit(' ').next().unwrap().parse()?;
    /// assert!(RENDERER.complete_on(conn, id)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn claim_on(&self, conn: &mut PgConnection) -> Result<Attempt<Claim>> {
        self.admit_on(conn).map(Admission::into_attempt)
    }

    /// As [`claim_on`](Self::claim_on), and if every slot is taken, tells when to ask again.
    ///
    /// # Errors
    ///
    /// Those of [all of them](#errors-of-all-of-them).
    pub fn admit_on(&self, conn: &mut PgConnection) -> Result<Admission<Claim>> {
        let mut call = || match Request::on(conn, self)?.send(conn)? {
            Sent::Answered(admission) => Ok(admission),
            // The transaction is the caller's, so what was claimed is released in it.
            Sent::InTransaction(admission) => {
                transaction::clear_mark(conn);
                if let Admission::Admitted(claim) = admission {
                    query::complete(conn, claim.id)?;
                }
                Err(Error::Misplaced(Misplaced::ClaimInTransaction))
            }
        };
        now(events::observe(
            "acquire",
            self.subject(),
            async { call() },
            Admission::outcome,
        ))
    }

    /// Ends a request and frees its slot; answers whether this ended it. False if it had been ended
    /// before, or had timed out: then more requests than allowed may have been in flight.
    ///
    /// One round trip: `SELECT resource_control.complete_service_request($1)`. Changes no other
    /// request. Inside a transaction the slot is free when that commits.
    ///
    /// # Errors
    ///
    /// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled), [`Schema::MissingRights`](crate::error::Schema::MissingRights), [`Error::ReadOnly`], [`Error::Database`].
    /// - [`Error::StrictIsolation`] for a serialization failure inside the caller's own transaction, which also occurs where
    ///   its snapshot is older than the claim and cannot show the request.
    pub fn complete_on(&self, conn: &mut PgConnection, id: i64) -> Result<bool> {
        let completed = query::complete(conn, id)?;
        #[cfg(feature = "r2d2")]
        handover::wake_one(&self.service);
        Ok(completed)
    }

    /// Extends a request to a full timeout from now, never shortens it, and returns when it expires;
    /// `None` if it had ended or timed out before.
    ///
    /// One round trip: `SELECT resource_control.renew_service_request($1, $2)`.
    ///
    /// # Errors
    ///
    /// As [`complete_on`](Self::complete_on), and [`Input::BadTimeout`](crate::error::Input::BadTimeout).
    pub fn renew_on(&self, conn: &mut PgConnection, id: i64) -> Result<Option<DateTime<Utc>>> {
        let renewed = query::renew(conn, id, self.interval()?)?;
        Ok(renewed.and_then(Timestamp::at))
    }
}
