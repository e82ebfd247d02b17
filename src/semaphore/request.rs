//! A request for a slot: what is checked before it is sent, and what comes back.

use std::borrow::Cow;
use std::time::Duration;

use diesel::data_types::PgInterval;
use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use super::Semaphore;
use super::admission::{self, Admission, Claim};
use super::query;
use crate::error::{Error, Result};
use crate::text;
use crate::transaction::{self, Transaction};

/// A claim that passed every check that needs no database.
pub(super) struct Request<'a> {
    service: Cow<'a, str>,
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
        let _names = text::names_on(conn);
        Self::of(semaphore)
    }

    pub(super) fn of(semaphore: &'a Semaphore) -> Result<Self> {
        let service = text::name(&semaphore.service);
        if service.is_empty() {
            return Err(Error::EmptyName);
        }
        text::check(&service, "the name of a service", text::LONGEST_NAME)?;
        text::check(&semaphore.details, "the details", text::LONGEST_DETAILS)?;
        let slots = match i16::try_from(semaphore.slots) {
            Ok(slots @ 1..) => slots,
            _ => {
                return Err(Error::BadSlots {
                    service: service.into_owned(),
                    slots: semaphore.slots,
                });
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
            Transaction::Open => return Err(Error::ClaimInTransaction),
            Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
        }
        match transaction::probed(conn, |conn| self.ask(conn)) {
            (Ok(admission), true) => Ok(Sent::InTransaction(admission)),
            (answer, _) => answer.map(Sent::Answered),
        }
    }

    fn ask(&self, conn: &mut PgConnection) -> Result<Admission<Claim>> {
        let answer = query::claim(conn, &self.service, self.slots, self.interval, self.details)?;
        Ok(admission::from_answer(&answer, self.timeout))
    }
}
