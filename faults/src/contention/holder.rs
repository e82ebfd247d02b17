//! A client process that holds slots through this crate, with a pool of connections.

use std::io;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::{Admission, Error, Permit, PgPool, Semaphore};
use fastrand::Rng;
use serde::{Deserialize, Serialize};

use super::clients::{Message, send};
use super::fragile_service;
use crate::chance::Chance;

/// More than there are connections.
const THREADS: usize = 4;
const CONNECTIONS: u32 = 2;

/// What a client holds slots of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(super) url: String,
    /// The address of the fragile service.
    pub(super) address: String,
    pub(super) slots: u32,
    pub(super) services: Vec<String>,
}

/// Holds slots until the input ends.
pub(crate) fn run(settings: &Settings) -> ExitCode {
    let pool = Pool::builder()
        .max_size(CONNECTIONS)
        .min_idle(Some(0))
        .build(ConnectionManager::new(&settings.url))
        .expect("the pool opens no connection yet");
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut random = Rng::new();
                while !over.load(Ordering::Relaxed) {
                    match hold(&mut random, &pool, settings) {
                        Ok(()) => {}
                        // Nothing was sent: the other threads had the connections all the time.
                        Err(Error::Pool(_)) => {}
                        Err(error) => send(&Message::Failed {
                            error: format!("{error:?}"),
                        }),
                    }
                }
            });
        }
        let _ = io::read_to_string(io::stdin());
        over.store(true, Ordering::Relaxed);
    });
    ExitCode::SUCCESS
}

/// Claims a slot, calls the service, and releases the slot, late or not at all in some cases.
fn hold(random: &mut Rng, pool: &PgPool, settings: &Settings) -> Result<(), Error> {
    let Settings {
        address,
        slots,
        services,
        ..
    } = settings;
    let service = &services[random.usize(..services.len())];
    let semaphore =
        Semaphore::new(service, *slots, random.millis(700, 1299)).details("by the crate");
    let attempt = if random.one_in(4) {
        semaphore.acquire_timeout(pool, random.millis(1, 99))?
    } else {
        semaphore.try_acquire(pool)?
    };
    let Admission::Admitted(mut permit) = attempt else {
        send(&Message::Refused);
        thread::sleep(random.millis(0, 9));
        return Ok(());
    };
    let (slot, id) = (permit.claim().slot, permit.fencing_token());
    send(&Message::Claimed { id, slot });
    let call = |permit: &Permit, work: Duration| {
        // The clock is read first. A delay between the two then makes the deadline too early, which is safe.
        let deadline = SystemTime::now() + permit.remaining();
        fragile_service::call(address, service, *slots, (slot, id), deadline, work);
    };

    call(&permit, random.millis(1, 19));
    if random.one_in(10) {
        match permit.renew() {
            Ok(_) => send(&Message::Renewed { id }),
            Err(error) => return send_timeout(error, id),
        }
        call(&permit, random.millis(1, 19));
    }
    match random.u8(..80) {
        0 => {
            let _forgotten = permit.into_claim();
            return Ok(());
        }
        1 => thread::sleep(permit.remaining() + random.millis(0, 299)), // late
        2..10 => {
            drop(permit);
            return Ok(());
        }
        _ => {}
    }
    match permit.release() {
        Ok(()) => send(&Message::Released { id }),
        Err(error) => return send_timeout(error, id),
    }
    Ok(())
}

/// That the permit had timed out is a result of its own; any other error is a failure.
fn send_timeout(error: Error, permit: i64) -> Result<(), Error> {
    match error {
        Error::TimedOut { id, .. } if id == permit => {
            send(&Message::TimedOut { id });
            Ok(())
        }
        error => Err(error),
    }
}
