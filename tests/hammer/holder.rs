//! A client process that holds slots through this crate, with a pool of connections.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::{Admission, Error, Permit, PgPool, Semaphore};

use crate::clients::say;
use crate::dice::Dice;
use crate::fragile;

/// More than there are connections.
const THREADS: usize = 4;
const CONNECTIONS: u32 = 2;

/// Holds slots until the input ends.
pub(crate) fn run(url: &str, address: &str, slots: u32, services: &[&str]) {
    let pool = Pool::builder()
        .max_size(CONNECTIONS)
        .min_idle(Some(0))
        .build(ConnectionManager::new(url))
        .unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut dice = Dice::new();
                while !over.load(Ordering::Relaxed) {
                    let service = services[dice.below(services.len())];
                    match hold(&mut dice, &pool, address, slots, service) {
                        Ok(()) => {}
                        // Nothing was asked: the other threads had the connections for so long.
                        Err(Error::Pool(_)) => {}
                        Err(error) => say(&format!("failed {error:?}").replace('\n', " ")),
                    }
                }
            });
        }
        let _ = io::read_to_string(io::stdin());
        over.store(true, Ordering::Relaxed);
    });
}

/// Claims a slot, calls the service, and gives the slot back, or fails to.
fn hold(
    dice: &mut Dice,
    pool: &PgPool,
    address: &str,
    slots: u32,
    service: &str,
) -> Result<(), Error> {
    let semaphore =
        Semaphore::new(service, slots, dice.milliseconds(700..1300)).details("by the crate");
    let attempt = if dice.one_in(4) {
        semaphore.acquire_timeout(pool, dice.milliseconds(1..100))?
    } else {
        semaphore.try_acquire(pool)?
    };
    let Admission::Admitted(mut permit) = attempt else {
        say("refused");
        thread::sleep(dice.milliseconds(0..10));
        return Ok(());
    };
    let (slot, token) = (permit.claim().slot, permit.fencing_token());
    say(&format!("claimed {token} {slot}"));
    let call = |permit: &Permit, work: Duration| {
        // In this order: kept waiting in between, we name a deadline that is too early.
        let deadline = SystemTime::now() + permit.remaining();
        fragile::call(address, service, slots, (slot, token), deadline, work);
    };

    call(&permit, dice.milliseconds(1..20));
    if dice.one_in(10) {
        match permit.renew() {
            Ok(_) => say(&format!("renewed {token}")),
            Err(error) => return told(error, token),
        }
        call(&permit, dice.milliseconds(1..20));
    }
    match dice.below(80) {
        0 => {
            let _forgotten = permit.into_claim();
            return Ok(());
        }
        1 => thread::sleep(permit.remaining() + dice.milliseconds(0..300)), // late
        2..10 => {
            drop(permit);
            return Ok(());
        }
        _ => {}
    }
    match permit.release() {
        Ok(()) => say(&format!("released {token}")),
        Err(error) => return told(error, token),
    }
    Ok(())
}

/// That the permit had timed out is an answer, and any other error is a failure.
fn told(error: Error, token: i64) -> Result<(), Error> {
    match error {
        Error::TimedOut { id, .. } if id == token => {
            say(&format!("timed-out {token}"));
            Ok(())
        }
        error => Err(error),
    }
}
