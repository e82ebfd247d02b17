//! The one way to wait, for locks, slots and units.
//!
//! The first try is made at once. Waiters of this process that were refused join a queue, in the
//! order in which they came; but those who want fewer units of a rate limit stand before those who
//! want more, because their units are there sooner. There is one queue for each awaited thing in
//! each database. Only the first waiter of a queue acts, and holds a connection only while it acts;
//! all others sleep. The first is called the oldest here.
//!
//! - For a session lock, the oldest waits on the server, where processes take turns, if the pool
//!   can spare a connection for that. If the pool cannot, it polls.
//! - For a slot of a semaphore, it polls after the time that the refusal hints at, because no queue
//!   on the server outlives a transaction.
//! - For units of a rate limit, it sleeps until they are refilled.
//!
//! A release in this process wakes the oldest at once. But the oldest may be a future that nobody
//! polls, or its pool may be empty. So the n-th waiter tries, too, after about n − 1 seconds. No
//! order is promised.

mod share;
mod turns;

pub(crate) use self::turns::{Turns, What, let_others_pass, wake_oldest};
