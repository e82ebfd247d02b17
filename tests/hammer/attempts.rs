//! A client process that attempts a throttle through this crate.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel_interlock::{Error, Throttle};

use crate::clients::say;
use crate::dice::Dice;
use crate::throttle::Resource;

/// Attempts from the first line of the input to its end. Without keys, the resource itself; else the
/// connections share out the keys in their order, so that the processes meet at the first attempts,
/// and from then on take keys at random.
pub(crate) fn run(url: &str, connections: usize, keys: usize) {
    let mut conns: Vec<_> = (0..connections)
        .map(|_| PgConnection::establish(url).unwrap())
        .collect();
    say("ready");
    io::stdin().read_line(&mut String::new()).unwrap();

    let over = AtomicBool::new(false);
    let (attempts, grants) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for (number, conn) in conns.iter_mut().enumerate() {
            let (over, attempts, grants) = (&over, &attempts, &grants);
            scope.spawn(move || {
                let mut dice = Dice::new();
                let mut first = (number..keys).step_by(connections);
                while !over.load(Ordering::Relaxed) {
                    let granted = if keys == 0 {
                        thread::sleep(dice.milliseconds(0..4));
                        attempt_resource(&mut dice, conn)
                    } else {
                        let key = first.next().unwrap_or_else(|| dice.below(keys));
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
    let (attempts, grants) = (attempts.into_inner(), grants.into_inner());
    say(&format!("attempted {attempts} {grants}"));
}

/// Answers whether it was granted, and that was committed: some transactions are rolled back.
fn attempt_resource(dice: &mut Dice, conn: &mut PgConnection) -> bool {
    let throttle = Throttle::of(Resource::Hammered);
    if !dice.one_in(10) {
        let decision = throttle
            .clone()
            .details("by the crate")
            .attempt_on(conn)
            .unwrap();
        return decision.granted().is_some();
    }
    let undone = conn
        .build_transaction()
        .read_committed()
        .run(|conn| -> Result<(), Error> {
            let _ = throttle.clone().details("undone").attempt_on(conn)?;
            Err(diesel::result::Error::RollbackTransaction.into())
        });
    assert!(undone.is_err());
    false
}

fn attempt_key(conn: &mut PgConnection, key: usize) -> bool {
    let throttle = Throttle::of(Resource::HammeredByKey).key(key);
    let decision = throttle
        .clone()
        .details("by the crate")
        .attempt_on(conn)
        .unwrap();
    decision.granted().is_some()
}
