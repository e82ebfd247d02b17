//! Deletes rows that are no longer needed: call these daily, for example from a
//! [schedule](crate::schedule).
//!
//! Each function deletes rows of all names, and returns how many. It sends a `DELETE` of at most
//! 10,000 rows until one finds fewer, and skips rows that others have locked. The role needs the
//! right to delete, which `grants.sql` gives.
//!
//! Errors are [`Error::Pool`], [`Error::NotInstalled`], [`Error::Standby`], [`Error::Database`],
//! and [`Error::Input`] if `older_than` exceeds 1,000 years.
//!
//! ```
//! use std::time::Duration;
//!
//! use diesel_interlock::{Error, PgPool, prune};
//!
//! const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);
//!
//! fn tidy(pool: &PgPool) -> Result<(), Error> {
//!     prune::throttles(pool)?; // `.await` each over deadpool and bb8
//!     prune::rate_limits(pool)?;
//!     prune::requests(pool, WEEK)?;
//!     prune::once(pool, WEEK)?;
//!     Ok(())
//! }
//! # let database = workbench::Database::new();
//! # let pool = database.pool(1);
//! # diesel_interlock::migrations::install(&pool)?;
//! # tidy(&pool)?;
//! # Ok::<(), Error>(())
//! ```

use std::time::Duration;

use diesel::sql_types::BigInt;

use crate::call::in_batches;
use crate::error::{Error, Result};
use crate::input::LONGEST;
use crate::mode::Mode;
use crate::pool::{Pool, Reply};
use crate::statement::Statement;
use crate::{once, rate_limit, semaphore, throttle};

/// Deletes the keys of throttles that have been due for as long as their interval.
pub fn throttles<P: Pool>(pool: &P) -> Reply<'_, P, u64> {
    P::Mode::drive(in_batches(pool, throttle::sql::prune()))
}

/// Deletes the keys of rate limits that are full.
pub fn rate_limits<P: Pool>(pool: &P) -> Reply<'_, P, u64> {
    P::Mode::drive(in_batches(pool, rate_limit::sql::prune()))
}

/// Deletes requests that ended longer ago than `older_than` from the log of all semaphores and
/// elections. The oldest are deleted first.
pub fn requests<P: Pool>(pool: &P, older_than: Duration) -> Reply<'_, P, u64> {
    P::Mode::drive(older(pool, older_than, semaphore::sql::prune))
}

/// Forgets work of [`Once`](crate::once::Once) that was done longer ago than `older_than`. A client
/// that repeats such a request has the work done again.
pub fn once<P: Pool>(pool: &P, older_than: Duration) -> Reply<'_, P, u64> {
    P::Mode::drive(older(pool, older_than, once::sql::prune))
}

async fn older<P: Pool>(
    pool: &P,
    older_than: Duration,
    prune: fn(Duration) -> Statement<BigInt>,
) -> Result<u64> {
    if older_than > LONGEST {
        return Err(Error::input("`older_than` must be at most 1,000 years"));
    }
    in_batches(pool, prune(older_than)).await
}
