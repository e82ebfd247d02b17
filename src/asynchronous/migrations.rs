//! Migrations for asynchronous connections: those of this crate, and the application's own under a lock.
//!
//! As in [`migrations`](crate::migrations), which explains the two ways to install the schema and how they work together.
//!
//! All functions but [`write_to`] take a pool. The forms that end in `_on` take a connection instead. [`run_pending`] has no such
//! form.
//!
//! # Dropped futures
//!
//! If a future is dropped, the transaction that is open is rolled back, and the lock is released. The migrations before it stay
//! applied. The application's own migrations are an exception: see [`run_pending`].

pub use crate::migrations::asynchronous::{
    install, install_on, run_pending, take_over, take_over_on, uninstall, uninstall_on,
};
pub use crate::migrations::{LOCK, write_to};
