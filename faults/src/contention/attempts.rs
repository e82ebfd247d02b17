//! A client process that attempts a throttle through this crate.

use std::io;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel_interlock::{Error, Throttle};
use fastrand::Rng;
use serde::{Deserialize, Serialize};

use super::clients::{Message, send};
use super::throttle::Resource;
use crate::chance::Chance;

/// What a client attempts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(super) url: String,
    pub(super) connections: usize,
    /// How many keys to attempt; 0 for the resource itself.
    pub(super) keys: usize,
}

/// Attempts from the first line of the input to its end. The connections share out the keys in their order, so that the
/// processes meet at the first attempts, and from then on choose keys at random.
pub(crate) fn run(settings: &Settings) -> ExitCode {
    let Settings {
        url,
        connections,
        keys,
    } = settings;
    let mut conns: Vec<_> = (0..*connections)
        .map(|_| PgConnection::establish(url).expect("the server runs"))
        .collect();
    send(&Message::Ready);
    if io::stdin().read_line(&mut String::new()).is_err() {
        return ExitCode::FAILURE;
    }

    let over = AtomicBool::new(false);
    let (attempts, grants) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for (number, conn) in conns.iter_mut().enumerate() {
            let (over, attempts, grants) = (&over, &attempts, &grants);
            scope.spawn(move || {
                let mut random = Rng::new();
                let mut first = (number..*keys).step_by(*connections);
                while !over.load(Ordering::Relaxed) {
                    let granted = if *keys == 0 {
                        thread::sleep(random.millis(0, 3));
                        attempt_resource(&mut random, conn)
                    } else {
                        let key = first.next().unwrap_or_else(|| random.usize(..keys));
                        attempt_key(conn, key)
                    };
                    attempts.fetch_add(1, Ordering::Relaxed);
                    grants.fetch_add(granted.into(), Ordering::Relaxed);
                }
            });
        }
        let _ = io::read_to_string(io::stdin());
        over.store(true, Ordering::Relaxed);
    });
    send(&Message::Attempted {
        attempts: attempts.into_inner(),
        grants: grants.into_inner(),
    });
    ExitCode::SUCCESS
}

/// Returns whether a grant was given and committed. Some transactions are rolled back.
fn attempt_resource(random: &mut Rng, conn: &mut PgConnection) -> bool {
    let throttle = Throttle::of(Resource::Contended);
    if !random.one_in(10) {
        let decision = throttle
            .details("by the crate")
            .attempt_on(conn)
            .expect("no session of this part is ended");
        return decision.granted().is_some();
    }
    let undone = conn
        .build_transaction()
        .read_committed()
        .run(|conn| -> Result<(), Error> {
            let _ = throttle.details("undone").attempt_on(conn)?;
            Err(diesel::result::Error::RollbackTransaction.into())
        });
    assert!(undone.is_err());
    false
}

fn attempt_key(conn: &mut PgConnection, key: usize) -> bool {
    let decision = Throttle::of(Resource::ContendedByKey)
        .key(key)
        .details("by the crate")
        .attempt_on(conn)
        .expect("no session of this part is ended");
    decision.granted().is_some()
}
