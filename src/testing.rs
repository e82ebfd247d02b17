//! For the tests of an application that uses this crate, on a real server.
//!
//! | A test wants | Use |
//! |---|---|
//! | a throttle that is due, without waiting for its interval | [`make_due`] |
//! | a slot whose holder was too slow, without waiting for its time-out | [`expire`] |
//! | to know that a handler left nothing behind | [`assert_nothing_held`], [`assert_not_held`], [`assert_none_in_flight`] |
//! | to look for itself | [`held_locks`], [`requests_in_flight`] |
//! | names that no other test uses, on its own thread or wherever its handlers work | [`key_prefix`], [`KeyPrefix`] |
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
//! // This test's locks and slots do not meet those of the tests that run beside it.
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
//! # Inside a test transaction
//!
//! that is, after `begin_test_transaction` or with r2d2's `TestCustomizer`, everything works that an
//! application does outside a transaction: it does not count as an open one. Migrations and
//! [`sync`](crate::sync) are refused there, since they commit. What
//! [`AdvisoryLock::transaction`](crate::AdvisoryLock::transaction) takes there stays until the test
//! transaction ends; and a slot that is claimed there, or a resource that is taken, is kept from all
//! other sessions until then.

mod due;
mod expiry;
mod held;
mod in_flight;
mod patience;
mod prefix;
mod tables;

pub use self::due::make_due;
pub use self::expiry::expire;
pub use self::held::{assert_not_held, assert_nothing_held, held_locks};
pub use self::in_flight::{assert_none_in_flight, requests_in_flight};
pub(crate) use self::prefix::enter_carried;
pub use self::prefix::{EnteredPrefix, KEY_PREFIX_VARIABLE, KeyPrefix, key_prefix, prefixed};
