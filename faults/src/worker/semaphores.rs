//! Semaphores: claimed, renewed, overstayed, dropped, abandoned.

use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{Admission, Claim, Error, Permit, Semaphore};

use super::report::report;
use super::{Hand, panic_deliberately};
use crate::chance::Chance;
use crate::clock::{self, Micros};
use crate::fault::Fault;
use crate::record::{Outcome, Record};
use crate::subjects::SEMAPHORES;

pub(super) fn work(hand: &mut Hand<'_>) -> Result<Outcome, Error> {
    if hand.random.one_in(3) {
        return super::article::work(hand);
    }
    let Some(semaphore) = hand.random.choice(&SEMAPHORES) else {
        return Ok(Outcome::Busy);
    };
    let timeout = hand.random.millis(0, 400);
    let sent = clock::now();
    let attempt = match hand.random.u64(..4) {
        0 => return elsewhere(hand, semaphore),
        1 => semaphore.try_acquire(&hand.pool)?,
        _ => {
            let start = Instant::now();
            let attempt = semaphore.acquire_timeout(&hand.pool, timeout)?;
            if matches!(attempt, Admission::Full(_)) && start.elapsed() < timeout {
                hand.violation(format!(
                    "a wait of {timeout:?} for a slot ended after {:?}",
                    start.elapsed()
                ));
            }
            attempt
        }
    };
    let Admission::Admitted(permit) = attempt else {
        return Ok(Outcome::Busy);
    };
    let from = clock::now();
    claimed(semaphore, permit.claim(), sent);
    let mut stay = Stay {
        service: semaphore.service(),
        id: permit.fencing_token(),
        until: None,
    };
    let done = stay.spend(hand, semaphore, permit);
    if let Some(until) = stay.until {
        report(&Record::Believed {
            service: stay.service.to_owned(),
            id: stay.id,
            from,
            until,
        });
    }
    done
}

/// Claims and completes without a permit.
fn elsewhere(hand: &mut Hand<'_>, semaphore: &Semaphore) -> Result<Outcome, Error> {
    let sent = clock::now();
    let Admission::Admitted(claim) = semaphore.claim_on(&mut *hand.connection()?)? else {
        return Ok(Outcome::Busy);
    };
    claimed(semaphore, &claim, sent);
    thread::sleep(hand.random.millis(0, 30));
    if hand.random.one_in(20) {
        semaphore.renew_on(&mut *hand.connection()?, claim.id)?;
    }
    let mut conn = hand.connection()?;
    let sent = clock::now();
    let in_time = semaphore.complete_on(&mut conn, claim.id)?;
    released(&claim, in_time, sent);
    Ok(if in_time {
        Outcome::Done
    } else {
        Outcome::Lost
    })
}

fn claimed(semaphore: &Semaphore, claim: &Claim, sent: Micros) {
    report(&Record::Claimed {
        service: semaphore.service().to_owned(),
        id: claim.id,
        slot: claim.slot,
        created: claim.created_at.timestamp_micros(),
        sent,
    });
}

fn released(claim: &Claim, in_time: bool, sent: Micros) {
    report(&Record::Released {
        id: claim.id,
        created: claim.created_at.timestamp_micros(),
        in_time,
        sent,
    });
}

/// The time until which a permit reported that it had not timed out.
struct Stay {
    service: &'static str,
    id: i64,
    /// `None` if the claim returned so late that the permit had timed out.
    until: Option<Micros>,
}

impl Stay {
    /// Reads the clock before the permit, whose result is then no older than that.
    fn believe(&mut self, permit: &Permit) -> bool {
        let now = clock::now();
        let valid = !permit.remaining().is_zero();
        if valid {
            self.until = Some(now);
        }
        valid
    }

    fn spend(
        &mut self,
        hand: &mut Hand<'_>,
        semaphore: &Semaphore,
        mut permit: Permit,
    ) -> Result<Outcome, Error> {
        let end = Instant::now()
            + if hand.befalls(Fault::OverstayedPermit) {
                semaphore.timeout() + Duration::from_millis(50)
            } else if hand.random.one_in(40) {
                semaphore.timeout() / 2
            } else {
                hand.random.millis(0, 30)
            };
        while self.believe(&permit) && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
            if hand.random.one_in(100) {
                permit.renew()?;
            }
        }
        if hand.befalls(Fault::Panic) {
            panic_deliberately();
        }
        if hand.befalls(Fault::AbandonedPermit) {
            let _: Claim = permit.into_claim();
            return Ok(Outcome::Done);
        }
        let full = hand.befalls(Fault::FullPool);
        if full {
            hand.exhaust_pool();
        }
        if full || hand.random.one_in(10) {
            drop(permit);
            return Ok(Outcome::Done);
        }
        let claim = permit.claim().clone();
        let sent = clock::now();
        match permit.release() {
            Ok(()) => {
                released(&claim, true, sent);
                Ok(Outcome::Done)
            }
            Err(Error::TimedOut { .. }) => {
                released(&claim, false, sent);
                Ok(Outcome::Lost)
            }
            Err(error) => Err(error),
        }
    }
}
