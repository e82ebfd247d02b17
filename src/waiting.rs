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
//!
//! **One queue for each key in the process, and only its oldest waiter waits on the server.** Pure
//! polling is unfair between processes (of three processes, the shares were .06 to .64, and the
//! longest wait 3.4 to 7.2 s). If every waiter waited on the server, each would need a connection.
//! With one waiting connection for each key and process, shares are fair (.333), the longest wait
//! is 49 ms, and the rest of the pool stays free for work.
//!
//! **A queue for each database.** Pools have no identity, so a refusal says which database it comes
//! from, in 20 bits of the number that it returns. If two databases have the same bits by chance,
//! they share a queue. This costs time, but not correctness.
//!
//! **Who wants fewer units of a rate limit stands before who wants more**, because the smaller
//! number is there first. If one who wants many stood first, units that are there would not be
//! spent. In return, a call that costs much may wait for as long as cheaper calls take all units.
//! It would have to reserve units to be sure of its turn, and who gives up would have to give them
//! back.
//!
//! **Deadlines are counted in measured round trips.** No try begins if less than two and a half
//! times the last round trip is left until the deadline. So at any distance from the server, a busy
//! lock is reported as `Busy`, and no reply is cut off.
//!
//! **No order is promised.** For a place in the queue that survives a crash of its process, there
//! would have to be a table, and each release would have to read it.
//!
//! **The n-th waiter** sends little: 3,000 waiters send some ten tries a second in addition to
//! those of the oldest.

mod share;
mod turns;

use std::time::Duration;

pub(crate) use self::turns::{Turns, What, let_others_pass, wake_oldest};

/// How long the oldest waits on the server at a time. While it waits, it holds a snapshot, and a
/// `CREATE INDEX CONCURRENTLY` of the lock's holder waits for that snapshot: a deadlock, unless the
/// slice is shorter than `deadlock_timeout`. If the future of a waiter is dropped, its session
/// waits on until the end of the slice.
const SLICE: Duration = Duration::from_millis(200);
/// The shortest and the longest pause of the oldest where it polls.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// The n-th waiter tries n − 1 times this after it was refused.
const SECOND: Duration = Duration::from_secs(1);
/// For how long a process lives on its own releases of slots before it leaves slots to others, at
/// least and at most.
const SHORTEST_SPAN: Duration = Duration::from_millis(500);
const LONGEST_SPAN: Duration = Duration::from_secs(10);
/// For how long it does: the longest pause of a poll, and a margin. Round trips cancel out: they
/// add as much to the time between two polls of another process as to the time from a release here
/// to the next try of this process.
const YIELD: Duration = Duration::from_millis(140);
/// How much later than the oldest a newcomer tries then.
const AFTER_THE_OLDEST: Duration = Duration::from_millis(20);
