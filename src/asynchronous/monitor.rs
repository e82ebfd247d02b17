//! The functions of the monitor that take a connection, for asynchronous connections.
//!
//! The queries, their columns and their conditions are those of [`monitor`](crate::monitor), and run on either kind of
//! connection.

pub use crate::monitor::asynchronous::{holders_of, keys_near_limit, slots, waiters_of};
