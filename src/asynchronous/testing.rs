//! Helpers for the tests of an asynchronous application that uses this crate, on a real server.
//!
//! As [`testing`](crate::testing), for asynchronous connections. Each function takes the handles of either half. An asynchronous
//! operation takes the prefix of the test from the task in which it is polled: see [`KeyPrefix::scope`].
//!
//! # Examples
//!
//! ```
//! use diesel_interlock::asynchronous::{AdvisoryLock, testing};
//!
//! static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
//!
//! # let database = workbench::Database::new();
//! # let pool = database.deadpool(2);
//! # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
//! # runtime.block_on(async {
//! let prefix = testing::KeyPrefix::new("nightly() leaves nothing behind");
//! let test = prefix.scope(async {
//!     drop(NIGHTLY.try_acquire(&pool).await?);
//!     testing::assert_not_held(&mut *pool.get().await?, &NIGHTLY).await;
//!     Ok(())
//! });
//! test.await
//! # })
//! # .map_err(|error: Box<dyn std::error::Error>| error)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use crate::testing::asynchronous::{
    assert_none_in_flight, assert_not_held, assert_nothing_held, expire, held_locks, make_due,
    requests_in_flight, use_up,
};
pub use crate::testing::{KEY_PREFIX_VARIABLE, KeyPrefix, prefixed};
