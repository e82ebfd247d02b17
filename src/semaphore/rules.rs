//! What is checked before a claim is sent, and what its row means.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::PgInterval;

use super::sql::{ClaimRow, Request};
use super::{Admission, Claim, Full, Semaphore};
use crate::error::{Input, Result};
use crate::text::{self, Name};
use crate::time::{self, Timestamp};

impl Semaphore {
    /// Checks the arguments of a claim. `name` turns the service into a name as it is sent on a session.
    pub(super) fn checked<'a>(
        &'a self,
        name: impl FnOnce(&'a str) -> Name<'a>,
    ) -> Result<Request<'a>> {
        let service = checked_service(&self.service, name)?;
        text::check(&self.details, "the details", text::LONGEST_DETAILS)?;
        let slots = match i16::try_from(self.slots) {
            Ok(slots @ 1..) => slots.into(),
            _ => {
                return Err(Input::BadSlots {
                    service: self.service.to_string(),
                    slots: self.slots,
                }
                .into());
            }
        };
        Ok(Request {
            service,
            slots,
            timeout: interval(&self.service, self.timeout)?,
            details: &self.details,
        })
    }
}

/// Checks a service alone.
pub(crate) fn checked_service<'a>(
    service: &'a str,
    name: impl FnOnce(&'a str) -> Name<'a>,
) -> Result<Name<'a>> {
    if service.is_empty() {
        return Err(Input::EmptyName.into());
    }
    Ok(name(service).checked("the name of a service")?)
}

/// Returns the timeout of a semaphore as it is sent.
pub(super) fn interval(service: &str, timeout: Duration) -> Result<PgInterval> {
    match time::microseconds(timeout) {
        Some(microseconds) => Ok(PgInterval::from_microseconds(microseconds)),
        None => Err(Input::BadTimeout {
            service: service.to_owned(),
        }
        .into()),
    }
}

/// Returns when a request expires. It never does, or after the last time that chrono represents, if an operator wrote that.
pub(super) fn expiry(expires_at: Timestamp) -> DateTime<Utc> {
    expires_at.at().unwrap_or(DateTime::<Utc>::MAX_UTC)
}

/// Returns what the row of a claim means. The hint is the timeout of the semaphore where the row has none.
pub(super) fn admission(row: ClaimRow, semaphore: &Semaphore) -> Admission<Claim> {
    let (id, slot, created_at, expires_at, replied_at, next_expiry) = row;
    if let (Some(id), Some(slot), Some(created_at), Some(expires_at)) = (
        id,
        slot,
        created_at.and_then(Timestamp::at),
        expires_at.and_then(Timestamp::at),
    ) {
        return Admission::Admitted(Claim {
            id,
            slot,
            created_at,
            expires_at,
        });
    }
    let retry_after = match (next_expiry.and_then(Timestamp::at), replied_at.at()) {
        (Some(next), Some(now)) => (next - now)
            .to_std()
            .unwrap_or_default()
            .max(Duration::from_micros(1)),
        _ => semaphore.timeout,
    };
    Admission::Full(Full {
        retry_after,
        service: semaphore.service.clone(),
        slots: semaphore.slots,
    })
}

#[cfg(test)]
mod tests {
    use diesel::data_types::PgTimestamp;

    use super::*;
    use crate::Error;

    const MINUTE: Duration = Duration::from_secs(60);
    const GEOCODER: Semaphore = Semaphore::named("geocoder", 4, MINUTE);

    fn at(microseconds: i64) -> Timestamp {
        PgTimestamp(microseconds).into()
    }

    fn check(service: &str, slots: u32, timeout: Duration, details: &str) -> Result<(), Input> {
        let semaphore = Semaphore::new(service, slots, timeout).details(details.to_owned());
        match semaphore.checked(Name::anywhere) {
            Ok(_) => Ok(()),
            Err(Error::Input(input)) => Err(input),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn what_is_sent_is_within_its_limits() {
        let (long, longest) = ("x".repeat(1001), "x".repeat(1000));
        let (long_details, longest_details) = ("x".repeat(8193), "x".repeat(8192));
        let thousand_years = Duration::from_secs(1000 * 360 * 24 * 60 * 60);
        let too_long = |what, longest| Err(Input::TooLong { what, longest });
        let bad_slots = |slots| {
            Err(Input::BadSlots {
                service: "x".into(),
                slots,
            })
        };
        let bad_timeout = || {
            Err(Input::BadTimeout {
                service: "x".into(),
            })
        };
        for (service, slots, timeout, details, expected) in [
            ("x", 1, MINUTE, "", Ok(())),
            ("x", 32_767, MINUTE, "web-3", Ok(())),
            ("x", 1, Duration::from_nanos(1), "", Ok(())),
            ("x", 1, thousand_years, "", Ok(())),
            (&longest, 1, MINUTE, &longest_details, Ok(())),
            ("", 1, MINUTE, "", Err(Input::EmptyName)),
            ("\0", 1, MINUTE, "", Err(Input::NulCharacter)),
            (
                &long,
                1,
                MINUTE,
                "",
                too_long("the name of a service", 1000),
            ),
            ("x", 1, MINUTE, "\0", Err(Input::NulCharacter)),
            ("x", 1, MINUTE, &long_details, too_long("the details", 8192)),
            ("x", 0, MINUTE, "", bad_slots(0)),
            ("x", 32_768, MINUTE, "", bad_slots(32_768)),
            ("x", u32::MAX, MINUTE, "", bad_slots(u32::MAX)),
            ("x", 1, Duration::ZERO, "", bad_timeout()),
            ("x", 1, 2 * thousand_years, "", bad_timeout()),
        ] {
            let checked = check(service, slots, timeout, details);
            assert_eq!(checked, expected, "{service:?} {slots} {timeout:?}");
        }
    }

    #[test]
    fn a_row_with_an_id_is_a_claim() {
        let row = (
            Some(7),
            Some(3),
            Some(at(0)),
            Some(at(30_000_000)),
            at(5),
            None,
        );
        let Admission::Admitted(claim) = admission(row, &GEOCODER) else {
            panic!("full");
        };
        assert_eq!((claim.id, claim.slot), (7, 3));
        assert_eq!((claim.expires_at - claim.created_at).num_seconds(), 30);
    }

    #[test]
    fn a_full_semaphore_tells_when_to_retry_and_never_at_once() {
        for (next_expiry, expected) in [
            (Some(at(8_500_000)), Duration::from_millis(1500)),
            (Some(at(7_000_000)), Duration::from_micros(1)),
            (Some(at(6_000_000)), Duration::from_micros(1)),
            (Some(Timestamp::Infinity), MINUTE),
            (None, MINUTE),
        ] {
            let row = (None, None, None, None, at(7_000_000), next_expiry);
            let full = admission(row, &GEOCODER).full().unwrap();
            assert_eq!(full.retry_after, expected, "{next_expiry:?}");
            assert_eq!((&*full.service, full.slots), ("geocoder", 4));
        }
    }
}
