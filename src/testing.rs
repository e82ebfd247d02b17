//! Helpers for the tests of an application that uses this crate, on a real server.
//!
//! | Purpose | Function |
//! |---|---|
//! | Make a throttle due without waiting for its interval | [`make_due`] |
//! | Let the holder of a slot time out without waiting | [`expire`] |
//! | Use up a key of a rate limit | [`use_up`] |
//! | Assert that a handler released everything | [`assert_nothing_held`], [`assert_not_held`], [`assert_none_in_flight`] |
//! | List what is held | [`held_locks`], [`requests_in_flight`] |
//! | Use names that no other test uses, on the test's thread or on those of its handlers | [`key_prefix`], [`KeyPrefix`] |
//!
//! ```
//! use std::time::Duration;
//! use diesel_interlock::{AdvisoryLock, Semaphore, testing};
//!
//! static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
//! static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
//!
//! # let database = workbench::Database::new();
//! # let pool = database.pool(2);
//! # diesel_interlock::migrations::install(&mut database.connect())?;
//! // The locks and slots of this test are separate from those of tests that run at the same time.
//! let _prefix = testing::key_prefix("nightly() leaves nothing behind");
//! NIGHTLY.with(&pool, |_| Ok::<_, diesel_interlock::Error>(()))?;
//! drop(GEOCODER.try_acquire(&pool)?);
//!
//! let mut conn = pool.get()?;
//! testing::assert_not_held(&mut conn, &NIGHTLY);
//! testing::assert_none_in_flight(&mut conn, &GEOCODER);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Test transactions
//!
//! Inside a test transaction, which `begin_test_transaction` or r2d2's `TestCustomizer` opens, everything that an
//! application does outside a transaction works, because a test transaction does not count as an open one. Migrations and
//! [`sync`](crate::sync) are refused there, because they commit. Locks that
//! [`AdvisoryLock::transaction`](crate::AdvisoryLock::transaction) takes are held until the test transaction ends. A slot
//! that is claimed, or a resource that is taken, is not available to other sessions until then.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;
mod expiry;
mod held;
mod in_flight;
mod polling;
#[cfg(feature = "postgres")]
mod rate_limits;

#[cfg(feature = "postgres")]
pub use self::expiry::{expire, make_due};
#[cfg(feature = "postgres")]
pub use self::held::{assert_not_held, assert_nothing_held, held_locks};
#[cfg(feature = "postgres")]
pub use self::in_flight::{assert_none_in_flight, requests_in_flight};
#[cfg(feature = "postgres")]
pub use self::rate_limits::use_up;
pub use crate::prefix::{EnteredPrefix, KEY_PREFIX_VARIABLE, KeyPrefix, key_prefix};
pub use crate::text::prefixed;
