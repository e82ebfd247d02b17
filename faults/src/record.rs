//! The records that a worker of the campaign writes while it works. Each is one line of JSON.

use serde::{Deserialize, Serialize};

use crate::clock::Micros;
use crate::fault::Fault;

/// One record. `sent` is when an operation began. Times are read from the clock of the machine, which the worker and the
/// server share, unless the text names the database clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Record {
    /// An operation ended, with success, with a busy outcome or with an error.
    Did {
        what: Primitive,
        outcome: Outcome,
        began: Micros,
    },
    /// The worker inflicts a fault on itself.
    Fault { kind: Fault },
    /// A query that was sent at `asked` returned that the session still holds the lock, or held it to the end.
    Held {
        pid: i32,
        acquired: Micros,
        asked: Micros,
    },
    /// A query or a release returned that the lock was lost. Only sessions without timeouts report this.
    Lost {
        pid: i32,
        wanted: Micros,
        acquired: Micros,
        asked: Micros,
    },
    /// A watch reported for the last time at `at` that the lock had been held `within` that time before.
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
    /// A fence refused a write, either of a holder that still held the lock afterwards or of a former holder.
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
    /// A throttle was granted at a time of the database clock.
    Granted {
        resource: String,
        key: String,
        at: Micros,
        sent: Micros,
    },
    /// Units of a rate limit were allowed at a time of the database clock, to be used from another one on.
    Allowed {
        limit: String,
        key: String,
        units: u32,
        at: Micros,
        usable: Micros,
        durable: bool,
        sent: Micros,
    },
    /// Units that were allowed at that time are about to be given back. The outcome may remain unknown.
    Returning {
        limit: String,
        key: String,
        at: Micros,
        units: u32,
    },
    /// So many of these units were given back.
    Returned {
        limit: String,
        key: String,
        at: Micros,
        units: u32,
    },
    /// A slot was claimed at a time of the database clock.
    Claimed {
        service: String,
        id: i64,
        slot: i16,
        created: Micros,
        sent: Micros,
    },
    /// The permit reported all the time that it had not timed out.
    Believed {
        service: String,
        id: i64,
        from: Micros,
        until: Micros,
    },
    /// A permit was renewed until a time of the database clock.
    Renewed {
        id: i64,
        created: Micros,
        expires: Micros,
        sent: Micros,
    },
    /// A permit was released in time or too late.
    Released {
        id: i64,
        created: Micros,
        in_time: bool,
        sent: Micros,
    },
    /// The worker observed a violation.
    Violation { text: String },
    /// The worker rests. Its pool gave `given` working connections of `of`.
    Rested { given: u32, of: u32 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Primitive {
    SessionLock,
    Fence,
    TransactionLock,
    Throttle,
    Semaphore,
    RateLimit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// Acquired and released, or granted.
    Done,
    /// Another process holds it.
    Busy,
    /// Acquired and then lost, as the release returned.
    Lost,
    /// An error.
    Failed,
}

impl Primitive {
    pub(crate) const ALL: [Self; 6] = [
        Self::SessionLock,
        Self::Fence,
        Self::TransactionLock,
        Self::Throttle,
        Self::Semaphore,
        Self::RateLimit,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::SessionLock => "session locks",
            Self::Fence => "fenced writes",
            Self::TransactionLock => "transaction locks",
            Self::Throttle => "throttles",
            Self::Semaphore => "semaphores",
            Self::RateLimit => "rate limits",
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
