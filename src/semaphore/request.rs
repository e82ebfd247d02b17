//! A request for a slot: what is checked before it is sent, and what comes back.

use std::time::Duration;

use diesel::data_types::PgInterval;
use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use super::Semaphore;
use super::admission::{self, Admission, Claim};
use super::query;
use crate::error::{Error, Input, Misplaced, Result};
use crate::text::{self, Name};
use crate::transaction::{self, Transaction};

/// A claim that passed every check that needs no database.
pub(super) struct Request<'a> {
    service: Name<'a>,
    slots: i32,
    timeout: Duration,
    interval: PgInterval,
    details: &'a str,
}

/// What came back, and in what kind of transaction.
pub(super) enum Sent {
    Answered(Admission<Claim>),
    /// One that Diesel does not know of. The connection is marked as broken.
    InTransaction(Admission<Claim>),
}

impl<'a> Request<'a> {
    /// As `of`, with the name that the service has on that connection.
    pub(super) fn on(conn: &mut PgConnection, semaphore: &'a Semaphore) -> Result<Self> {
        Self::new(semaphore, Name::on(conn, &semaphore.service))
    }

    pub(super) fn of(semaphore: &'a Semaphore) -> Result<Self> {
        Self::new(semaphore, Name::anywhere(&semaphore.service))
    }

    fn new(semaphore: &'a Semaphore, service: Name<'a>) -> Result<Self> {
        if semaphore.service.is_empty() {
            return Err(Error::Input(Input::EmptyName));
        }
        let service = service.checked("the name of a service")?;
        text::check(&semaphore.details, "the details", text::LONGEST_DETAILS)?;
        let slots = match i16::try_from(semaphore.slots) {
            Ok(slots @ 1..) => slots,
            _ => {
                return Err(Error::Input(Input::BadSlots {
                    service: semaphore.service.to_string(),
                    slots: semaphore.slots,
                }));
            }
        };
        Ok(Self {
            service,
            slots: slots.into(),
            timeout: semaphore.timeout,
            interval: semaphore.interval()?,
            details: &semaphore.details,
        })
    }

    pub(super) fn send(&self, conn: &mut PgConnection) -> Result<Sent> {
        let before = transaction::of(conn);
        match before {
            Transaction::None => {}
            Transaction::Test => return self.ask(conn).map(Sent::Answered),
            Transaction::Open => return Err(Error::Misplaced(Misplaced::ClaimInTransaction)),
            Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
        }
        match transaction::probed(conn, |conn| self.ask(conn)) {
            (Ok(admission), true) => Ok(Sent::InTransaction(admission)),
            (answer, _) => answer.map(Sent::Answered),
        }
    }

    fn ask(&self, conn: &mut PgConnection) -> Result<Admission<Claim>> {
        let answer = query::claim(
            conn,
            self.service.as_str(),
            self.slots,
            self.interval,
            self.details,
        )?;
        Ok(admission::from_answer(&answer, self.timeout))
    }
}
