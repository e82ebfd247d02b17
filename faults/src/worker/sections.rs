//! What the workers of both halves do alike with session locks.

use std::time::{Duration, Instant};

use diesel::query_builder::SqlQuery;
use diesel::sql_types::BigInt;
use diesel::{QueryableByName, sql_query};
use diesel_interlock::{AdvisoryLock, Attempt};
use fastrand::Rng;

use super::Settings;
use super::report::{report, violation};
use crate::chance::Chance;
use crate::clock::{self, Micros};
use crate::record::Record;
use crate::subjects;

/// A lock that is to be acquired.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// A time before the lock is requested.
    pub(super) asked: Micros,
    pub(super) number: i32,
    pub(super) exclusive: bool,
    pub(super) lock: AdvisoryLock,
}

impl Wanted {
    pub(super) fn any(random: &mut Rng) -> Self {
        let number = random.u64(..subjects::LOCKS) as i32;
        let exclusive = !random.one_in(3);
        let mut lock = subjects::session_lock(number);
        if !exclusive {
            lock = lock.shared();
        } else if random.one_in(2) {
            lock = lock.fenced();
        }
        Self {
            asked: clock::now(),
            number,
            exclusive,
            lock,
        }
    }

    /// The statement that records a section on the session that holds the lock, and returns its [`Id`].
    pub(super) fn begin(&self, token: Option<i64>) -> SqlQuery {
        let Self {
            number, exclusive, ..
        } = self;
        let token = token.map_or("NULL".to_owned(), |token| token.to_string());
        sql_query(format!(
            "INSERT INTO faults.section (lock, exclusive, pid, began, ended, token) \
             SELECT {number}, {exclusive}, pg_backend_pid(), at, at, {token} \
             FROM faults.micros(clock_timestamp()) AS at RETURNING id"
        ))
    }

    /// A token was drawn under this lock.
    pub(super) fn drew(&self, token: i64) {
        report(&Record::Drawn {
            lock: self.number,
            token,
            sent: self.asked,
        });
    }
}

#[derive(QueryableByName)]
pub(super) struct Id {
    #[diesel(sql_type = BigInt)]
    pub(super) id: i64,
}

impl Id {
    /// The statement that extends the section to now, on the session that holds the lock.
    pub(super) fn extend(&self) -> SqlQuery {
        sql_query(format!(
            "UPDATE faults.section SET ended = faults.micros(clock_timestamp()) WHERE id = {}",
            self.id
        ))
    }
}

/// A session that has acquired a lock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holder {
    pub(super) pid: i32,
    /// A time before the lock was requested.
    wanted: Micros,
    /// A time at which the lock was held.
    pub(super) acquired: Micros,
}

impl Holder {
    pub(super) fn new(pid: i32, wanted: &Wanted) -> Self {
        Self {
            pid,
            wanted: wanted.asked,
            acquired: clock::now(),
        }
    }

    /// A query that was sent at `asked` returned that the lock is still held.
    pub(super) fn held(self, asked: Micros) {
        report(&Record::Held {
            pid: self.pid,
            acquired: self.acquired,
            asked,
        });
    }

    /// A watch reported for the last time at `at` that the lock had been held `within` that time before.
    pub(super) fn watched(self, at: Micros, within: Duration) {
        report(&Record::Watched {
            pid: self.pid,
            acquired: self.acquired,
            at,
            within: within.as_micros() as Micros,
        });
    }

    /// A query that was sent at `asked` returned that the lock was lost. Losses of sessions with timeouts are not reported,
    /// because the campaign does not know their reasons.
    pub(super) fn lost(self, settings: &Settings, asked: Micros) {
        if !settings.impatient {
            report(&Record::Lost {
                pid: self.pid,
                wanted: self.wanted,
                acquired: self.acquired,
                asked,
            });
        }
    }
}

/// A wait is refused at its timeout, and not before.
pub(super) fn require_patience<G>(attempt: &Attempt<G>, sent: Instant, timeout: Duration) {
    if matches!(attempt, Attempt::Busy) && sent.elapsed() < timeout {
        violation(format!(
            "a wait of {timeout:?} for a session lock ended after {:?}",
            sent.elapsed()
        ));
    }
}
