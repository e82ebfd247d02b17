//! The records that a worker of the campaign writes while it works. Each is one line of JSON.

use serde::{Deserialize, Serialize};

use crate::clock::Micros;
use crate::fault::Fault;

/// One line. `sent` is when an operation began. Times are the worker's clock, which is the server's, unless they are called the database's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Record {
    /// An operation ended, as it may: with what it wanted, with a busy answer or with an error.
    Did {
        what: Primitive,
        outcome: Outcome,
        began: Micros,
    },
    /// A fault that the worker inflicts on itself.
    Fault { kind: Fault },
    /// The server said, when asked at `asked`, that the session still holds the lock, or that it held it to the end.
    Held {
        pid: i32,
        acquired: Micros,
        asked: Micros,
    },
    /// The server said, or the release did, that a lock was not held any more. Only of sessions without time-outs of
    /// their own.
    Lost {
        pid: i32,
        acquired: Micros,
        asked: Micros,
    },
    /// A watch said for the last time at `at` that the lock had been held that long before, at most.
    Watched {
        pid: i32,
        acquired: Micros,
        at: Micros,
        within: Micros,
    },
    /// A fencing token was drawn.
    Drawn { lock: i32, token: i64, sent: Micros },
    /// A write behind a fence was committed.
    Wrote { id: i64, token: i64, sent: Micros },
    /// A write was refused by its fence; by a holder, who was one afterwards as well, or by a former one.
    Fenced {
        lock: i32,
        token: i64,
        holds: bool,
        sent: Micros,
    },
    /// A booking under a transaction lock was committed.
    Booked {
        lock: i32,
        number: i64,
        sent: Micros,
    },
    /// A throttle was granted, at a time of the database's clock.
    Granted {
        resource: String,
        key: String,
        at: Micros,
        sent: Micros,
    },
    /// A slot was claimed, at a time of the database's clock.
    Claimed {
        service: String,
        id: i64,
        slot: i16,
        created: Micros,
        sent: Micros,
    },
    /// The permit said all the time that it had not timed out.
    Believed {
        service: String,
        id: i64,
        from: Micros,
        until: Micros,
    },
    /// A permit was released in time, or not.
    Released {
        id: i64,
        created: Micros,
        in_time: bool,
        sent: Micros,
    },
    /// Something that must not be.
    Violation { text: String },
    /// The worker rests: the pool gave that many connections out of as many, and they answered.
    Rested { given: u32, of: u32 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Primitive {
    SessionLock,
    Fence,
    TransactionLock,
    Throttle,
    Semaphore,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// Acquired and given back, or granted.
    Done,
    /// Somebody else has it.
    Busy,
    /// Acquired, and lost on the way; the release said so.
    Lost,
    /// An error.
    Failed,
}

impl Primitive {
    pub(crate) const ALL: [Self; 5] = [
        Self::SessionLock,
        Self::Fence,
        Self::TransactionLock,
        Self::Throttle,
        Self::Semaphore,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::SessionLock => "session locks",
            Self::Fence => "fenced writes",
            Self::TransactionLock => "transaction locks",
            Self::Throttle => "throttles",
            Self::Semaphore => "semaphores",
        }
    }
}

impl Outcome {
    pub(crate) const ALL: [Self; 4] = [Self::Done, Self::Busy, Self::Lost, Self::Failed];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Busy => "busy",
            Self::Lost => "lost",
            Self::Failed => "failed",
        }
    }
}
