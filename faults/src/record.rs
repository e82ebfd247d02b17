//! What a worker tells, line by line, while it works.

use crate::clock::Micros;
use crate::fault::Fault;

/// One line. `sent` is when an operation began. Times are the worker's clock, which is the server's, unless they are called the database's.
#[derive(Debug, Clone, PartialEq, Eq)]
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Primitive {
    SessionLock,
    Fence,
    TransactionLock,
    Throttle,
    Semaphore,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

const PRIMITIVES: [(&str, Primitive); 5] = [
    ("session locks", Primitive::SessionLock),
    ("fenced writes", Primitive::Fence),
    ("transaction locks", Primitive::TransactionLock),
    ("throttles", Primitive::Throttle),
    ("semaphores", Primitive::Semaphore),
];

const OUTCOMES: [(&str, Outcome); 4] = [
    ("done", Outcome::Done),
    ("busy", Outcome::Busy),
    ("lost", Outcome::Lost),
    ("failed", Outcome::Failed),
];

impl Primitive {
    pub(crate) const ALL: [Self; 5] = [
        Self::SessionLock,
        Self::Fence,
        Self::TransactionLock,
        Self::Throttle,
        Self::Semaphore,
    ];

    pub(crate) fn name(self) -> &'static str {
        name_of(&PRIMITIVES, self)
    }
}

impl Outcome {
    pub(crate) const ALL: [Self; 4] = [Self::Done, Self::Busy, Self::Lost, Self::Failed];

    pub(crate) fn name(self) -> &'static str {
        name_of(&OUTCOMES, self)
    }
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], wanted: T) -> &'static str {
    names
        .iter()
        .find_map(|(name, value)| (*value == wanted).then_some(*name))
        .unwrap_or_default()
}

fn named<T: Copy>(names: &[(&str, T)], wanted: &str) -> Option<T> {
    names
        .iter()
        .find_map(|(name, value)| (*name == wanted).then_some(*value))
}

impl Record {
    /// The line, without its end. Fields are separated by tabs, which no text of ours has.
    pub(crate) fn to_line(&self) -> String {
        match self {
            Self::Did {
                what,
                outcome,
                began,
            } => format!("did\t{}\t{}\t{began}", what.name(), outcome.name()),
            Self::Fault { kind } => format!("fault\t{}", kind.name()),
            Self::Held {
                pid,
                acquired,
                asked,
            } => format!("held\t{pid}\t{acquired}\t{asked}"),
            Self::Lost {
                pid,
                acquired,
                asked,
            } => format!("lost\t{pid}\t{acquired}\t{asked}"),
            Self::Watched {
                pid,
                acquired,
                at,
                within,
            } => format!("watched\t{pid}\t{acquired}\t{at}\t{within}"),
            Self::Drawn { lock, token, sent } => format!("drawn\t{lock}\t{token}\t{sent}"),
            Self::Wrote { id, token, sent } => format!("wrote\t{id}\t{token}\t{sent}"),
            Self::Fenced {
                lock,
                token,
                holds,
                sent,
            } => format!("fenced\t{lock}\t{token}\t{holds}\t{sent}"),
            Self::Booked { lock, number, sent } => format!("booked\t{lock}\t{number}\t{sent}"),
            Self::Granted {
                resource,
                key,
                at,
                sent,
            } => format!("granted\t{resource}\t{key}\t{at}\t{sent}"),
            Self::Claimed {
                service,
                id,
                slot,
                created,
                sent,
            } => format!("claimed\t{service}\t{id}\t{slot}\t{created}\t{sent}"),
            Self::Believed {
                service,
                id,
                from,
                until,
            } => format!("believed\t{service}\t{id}\t{from}\t{until}"),
            Self::Released {
                id,
                created,
                in_time,
                sent,
            } => format!("released\t{id}\t{created}\t{in_time}\t{sent}"),
            Self::Violation { text } => {
                format!("violation\t{}", text.replace(['\t', '\n', '\r'], " "))
            }
            Self::Rested { given, of } => format!("rested\t{given}\t{of}"),
        }
    }

    /// `None` for a line that was cut short as its worker was killed.
    pub(crate) fn from_line(line: &str) -> Option<Self> {
        let mut fields = line.split('\t');
        let kind = fields.next()?;
        let mut text = || fields.next().map(str::to_owned);
        let record = match kind {
            "did" => Self::Did {
                what: named(&PRIMITIVES, &text()?)?,
                outcome: named(&OUTCOMES, &text()?)?,
                began: text()?.parse().ok()?,
            },
            "fault" => Self::Fault {
                kind: Fault::named(&text()?)?,
            },
            "held" => Self::Held {
                pid: text()?.parse().ok()?,
                acquired: text()?.parse().ok()?,
                asked: text()?.parse().ok()?,
            },
            "lost" => Self::Lost {
                pid: text()?.parse().ok()?,
                acquired: text()?.parse().ok()?,
                asked: text()?.parse().ok()?,
            },
            "watched" => Self::Watched {
                pid: text()?.parse().ok()?,
                acquired: text()?.parse().ok()?,
                at: text()?.parse().ok()?,
                within: text()?.parse().ok()?,
            },
            "drawn" => Self::Drawn {
                lock: text()?.parse().ok()?,
                token: text()?.parse().ok()?,
                sent: text()?.parse().ok()?,
            },
            "wrote" => Self::Wrote {
                id: text()?.parse().ok()?,
                token: text()?.parse().ok()?,
                sent: text()?.parse().ok()?,
            },
            "fenced" => Self::Fenced {
                lock: text()?.parse().ok()?,
                token: text()?.parse().ok()?,
                holds: text()?.parse().ok()?,
                sent: text()?.parse().ok()?,
            },
            "booked" => Self::Booked {
                lock: text()?.parse().ok()?,
                number: text()?.parse().ok()?,
                sent: text()?.parse().ok()?,
            },
            "granted" => Self::Granted {
                resource: text()?,
                key: text()?,
                at: text()?.parse().ok()?,
                sent: text()?.parse().ok()?,
            },
            "claimed" => Self::Claimed {
                service: text()?,
                id: text()?.parse().ok()?,
                slot: text()?.parse().ok()?,
                created: text()?.parse().ok()?,
                sent: text()?.parse().ok()?,
            },
            "believed" => Self::Believed {
                service: text()?,
                id: text()?.parse().ok()?,
                from: text()?.parse().ok()?,
                until: text()?.parse().ok()?,
            },
            "released" => Self::Released {
                id: text()?.parse().ok()?,
                created: text()?.parse().ok()?,
                in_time: text()?.parse().ok()?,
                sent: text()?.parse().ok()?,
            },
            "violation" => Self::Violation { text: text()? },
            "rested" => Self::Rested {
                given: text()?.parse().ok()?,
                of: text()?.parse().ok()?,
            },
            _ => return None,
        };
        fields.next().is_none().then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Primitive, Record};
    use crate::fault::Fault;

    #[test]
    fn what_is_told_is_read() {
        let records = [
            Record::Did {
                what: Primitive::Semaphore,
                outcome: Outcome::Lost,
                began: 5,
            },
            Record::Fault {
                kind: Fault::LockTimeout,
            },
            Record::Lost {
                pid: 1,
                acquired: 2,
                asked: 3,
            },
            Record::Watched {
                pid: 1,
                acquired: 2,
                at: 3,
                within: 4,
            },
            Record::Drawn {
                lock: 1,
                token: 2,
                sent: 3,
            },
            Record::Wrote {
                id: 1,
                token: 2,
                sent: 3,
            },
            Record::Fenced {
                lock: 1,
                token: 2,
                holds: true,
                sent: 3,
            },
            Record::Granted {
                resource: "slow".into(),
                key: String::new(),
                at: -1,
                sent: 2,
            },
            Record::Released {
                id: 1,
                created: 2,
                in_time: false,
                sent: 3,
            },
        ];
        for record in records {
            assert_eq!(Record::from_line(&record.to_line()), Some(record));
        }
    }

    #[test]
    fn a_line_that_was_cut_short_is_none() {
        assert_eq!(Record::from_line("held\t12\t34"), None);
        assert_eq!(Record::from_line("hel"), None);
    }
}
