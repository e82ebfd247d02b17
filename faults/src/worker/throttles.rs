//! Throttles, with and without a key, by themselves and inside transactions.

use std::cell::Cell;
use std::thread;

use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel_interlock::{Decision, Error, Grant, Throttle, ThrottledResource};

use super::Hand;
use super::report::report;
use crate::chance::Chance;
use crate::clock;
use crate::record::{Outcome, Record};
use crate::subjects::{self, Resource};

const DETAILS: &str = "a worker of the campaign";

pub(super) fn work(hand: &mut Hand<'_>) -> Result<Outcome, Error> {
    let resource = if hand.random.one_in(3) {
        Resource::Slow
    } else {
        Resource::Quick
    };
    let key = match hand.random.u64(..2 * subjects::KEYS) {
        key if key < subjects::KEYS => format!("key {key}"),
        _ => String::new(),
    };
    let mut throttle = Throttle::of(resource);
    if !key.is_empty() {
        throttle = throttle.key(&key);
    }
    // Other sessions find the resource while it is being taken, and are denied at once. A session that waited as long as
    // its user's `lock_timeout` would get an error.
    let pause = hand.random.millis(0, 120);
    let sent = clock::now();
    let granted: Option<Grant> = match hand.random.u64(..8) {
        0 => {
            let granted = Cell::new(None);
            let _ = throttle.clone().details(DETAILS).run(&hand.pool, |grant| {
                granted.set(Some(grant));
                Ok::<_, Error>(())
            })?;
            granted.into_inner()
        }
        1 => hand
            .connection()?
            .transaction(|conn| {
                let decision = throttle.clone().details(DETAILS).attempt_on(conn)?;
                thread::sleep(pause);
                Ok::<_, Error>(decision)
            })?
            .granted(),
        2 => {
            // The attempt is rolled back.
            let rolled_back = hand.connection()?.transaction(|conn| {
                let _: Decision = throttle.clone().details(DETAILS).attempt_on(conn)?;
                thread::sleep(pause);
                Err::<(), _>(Error::from(DieselError::RollbackTransaction))
            });
            match rolled_back {
                Err(Error::Database(DieselError::RollbackTransaction)) => None,
                other => return other.map(|()| Outcome::Failed),
            }
        }
        3 if hand.random.one_in(10) => {
            diesel::sql_query("SELECT resource_control.prune_throttled_keys(10)")
                .execute(&mut hand.connection()?)?;
            None
        }
        _ => throttle
            .clone()
            .details(DETAILS)
            .attempt_on(&mut *hand.connection()?)?
            .granted(),
    };
    let Some(grant) = granted else {
        return Ok(Outcome::Busy);
    };
    report(&Record::Granted {
        resource: resource.label().to_owned(),
        key,
        at: grant.granted_at.timestamp_micros(),
        sent,
    });
    Ok(Outcome::Done)
}
