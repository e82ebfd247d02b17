//! What the workers of both halves do alike behind a fence.

use diesel::query_builder::SqlQuery;
use diesel::sql_query;
use diesel_interlock::Error;

use super::errors;
use super::report::report;
use super::sections::Id;
use crate::clock::{self, Micros};
use crate::record::{Outcome, Primitive, Record};

/// A write with a token that was drawn under a lock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Write {
    lock: i32,
    token: i64,
    sent: Micros,
}

impl Write {
    /// A write that is sent now.
    pub(super) fn new(lock: i32, token: i64) -> Self {
        Self {
            lock,
            token,
            sent: clock::now(),
        }
    }

    /// The statement that writes, after the fence was passed, and returns its [`Id`].
    pub(super) fn statement(&self) -> SqlQuery {
        sql_query(format!(
            "INSERT INTO faults.fenced_write (lock, token) VALUES ({}, {}) RETURNING id",
            self.lock, self.token
        ))
    }

    /// Reports what the transaction returned. Returns whether the fence refused the write.
    pub(super) fn is_refused(&self, written: Result<Id, Error>) -> bool {
        let outcome = match &written {
            Ok(Id { id }) => {
                report(&Record::Wrote {
                    id: *id,
                    token: self.token,
                    sent: self.sent,
                });
                Outcome::Done
            }
            Err(Error::Fenced { .. }) => Outcome::Busy,
            Err(error) => {
                errors::examine(Primitive::Fence, error);
                Outcome::Failed
            }
        };
        report(&Record::Did {
            what: Primitive::Fence,
            outcome,
            began: self.sent,
        });
        outcome == Outcome::Busy
    }

    /// Reports that the fence refused the write of a session that `holds` the lock, or of a former holder.
    pub(super) fn refused(&self, holds: bool) {
        report(&Record::Fenced {
            lock: self.lock,
            token: self.token,
            holds,
            sent: self.sent,
        });
    }
}
