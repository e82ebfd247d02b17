//! Session locks: taken in every form, held over several statements, and given back in every way.

use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Integer};
use diesel_interlock::{AdvisoryLock, AdvisoryLockGuard, Attempt, Error, Lease, LockId};

use super::report::report;
use super::{Hand, panic_deliberately};
use crate::clock::{self, Micros};
use crate::record::{Outcome, Record};
use crate::subjects;

pub(super) fn work(hand: &mut Hand<'_>) -> Result<Outcome, Error> {
    let number = hand.random.below(subjects::LOCKS) as i32;
    let exclusive = !hand.random.one_in(3);
    let mut lock = subjects::session_lock(number);
    if !exclusive {
        lock = lock.shared();
    }
    let section = Section {
        number,
        exclusive,
        lock: &lock,
    };
    let timeout = hand.random.millis(0, 900);
    match hand.random.below(5) {
        0 => section.enter(hand, lock.try_acquire(&hand.pool.clone())?),
        1 => section.enter(hand, Attempt::Acquired(lock.acquire(&hand.pool.clone())?)),
        2 | 3 => {
            let sent = Instant::now();
            let attempt = lock.acquire_timeout(&hand.pool.clone(), timeout)?;
            require_patience(hand, &attempt, sent, timeout);
            section.enter(hand, attempt)
        }
        _ => {
            let mut conn = hand.connection()?;
            let sent = Instant::now();
            let attempt = lock.acquire_timeout_on(&mut conn, timeout)?;
            require_patience(hand, &attempt, sent, timeout);
            let done = section.enter(hand, attempt);
            // A transaction that was left open on a borrowed connection is the caller's.
            if matches!(done, Ok(Outcome::Done)) {
                let _ = conn.batch_execute("ROLLBACK");
            }
            done
        }
    }
}

/// A refusal comes when the time is up, and not before.
fn require_patience<G>(hand: &Hand<'_>, attempt: &Attempt<G>, sent: Instant, timeout: Duration) {
    if matches!(attempt, Attempt::Busy) && sent.elapsed() < timeout {
        hand.violation(format!(
            "a wait of {timeout:?} for a session lock ended after {:?}",
            sent.elapsed()
        ));
    }
}

/// What is done under a lock.
struct Section<'a> {
    number: i32,
    exclusive: bool,
    lock: &'a AdvisoryLock,
}

#[derive(QueryableByName)]
struct Id {
    #[diesel(sql_type = BigInt)]
    id: i64,
}

impl Section<'_> {
    fn enter<C: Lease>(
        &self,
        hand: &mut Hand<'_>,
        attempt: Attempt<AdvisoryLockGuard<C>>,
    ) -> Result<Outcome, Error> {
        let Attempt::Acquired(mut guard) = attempt else {
            return Ok(Outcome::Busy);
        };
        let acquired = clock::now();
        // After an error the connection is broken, or the user's own time-out struck. The release tells which.
        let lost = self.occupy(hand, &mut guard, acquired).unwrap_or(false);
        self.leave(hand, guard, acquired, lost)
    }

    /// Writes down that it is inside, on the session that holds the lock, for a while. Answers whether the lock was found
    /// lost.
    fn occupy<C: Lease>(
        &self,
        hand: &mut Hand<'_>,
        guard: &mut AdvisoryLockGuard<C>,
        acquired: Micros,
    ) -> Result<bool, Error> {
        let pid = guard.backend_pid();
        let Id { id } = diesel::sql_query(
            "INSERT INTO faults.section (lock, exclusive, pid, began, ended) \
             SELECT $1, $2, pg_backend_pid(), at, at FROM faults.micros(clock_timestamp()) AS at RETURNING id",
        )
        .bind::<Integer, _>(self.number)
        .bind::<Bool, _>(self.exclusive)
        .get_result(guard.conn())?;

        for _ in 0..hand.random.below(4) {
            let long = hand.random.one_in(40);
            thread::sleep(hand.random.millis(0, if long { 700 } else { 25 }));
            if hand.random.one_in(2) {
                let asked = clock::now();
                if !guard.is_held()? {
                    return Ok(true);
                }
                report(&Record::Held {
                    pid,
                    acquired,
                    asked,
                });
            }
            diesel::sql_query(
                "UPDATE faults.section SET ended = faults.micros(clock_timestamp()) WHERE id = $1",
            )
            .bind::<BigInt, _>(id)
            .execute(guard.conn())?;
        }
        Ok(false)
    }

    fn leave<C: Lease>(
        &self,
        hand: &mut Hand<'_>,
        mut guard: AdvisoryLockGuard<C>,
        acquired: Micros,
        lost: bool,
    ) -> Result<Outcome, Error> {
        match hand.random.below(30) {
            0..=2 => {
                drop(guard);
                return Ok(Outcome::Done);
            }
            3 => {
                hand.fault("panic while holding");
                panic_deliberately();
            }
            4 => {
                hand.fault("transaction left open");
                let _ = guard.conn().batch_execute("BEGIN");
            }
            5 => {
                hand.fault("transaction aborted");
                let _ = guard.conn().batch_execute("BEGIN; SELECT 1/0");
            }
            6 => {
                hand.fault("transaction left open");
                let _ = AnsiTransactionManager::begin_transaction(guard.conn());
            }
            7 if hand.orders.impatient => {
                hand.fault("statement_timeout");
                let _ = diesel::sql_query("SELECT pg_sleep(1)").execute(guard.conn());
            }
            8 if hand.orders.impatient && self.exclusive => self.run_into_lock_timeout(hand),
            _ => {}
        }
        self.release(hand, guard, acquired, lost)
    }

    fn release<C: Lease>(
        &self,
        hand: &mut Hand<'_>,
        guard: AdvisoryLockGuard<C>,
        acquired: Micros,
        lost: bool,
    ) -> Result<Outcome, Error> {
        let pid = guard.backend_pid();
        let asked = clock::now();
        match guard.release() {
            Ok(()) if lost => {
                hand.violation(format!("{} was lost, and then released", self.lock.key()));
            }
            Ok(()) => report(&Record::Held {
                pid,
                acquired,
                asked,
            }),
            Err(Error::TransactionLeftOpen { .. }) => {}
            Err(Error::LockLost { .. } | Error::ReleaseFailed { .. }) => return Ok(Outcome::Lost),
            Err(error) => return Err(error),
        }
        Ok(Outcome::Done)
    }

    /// The user's own wait for the lock, on another connection.
    fn run_into_lock_timeout(&self, hand: &Hand<'_>) {
        let (Some(mut conn), Ok(id)) = (hand.pool.try_get(), self.lock.key().id()) else {
            return;
        };
        hand.fault("lock_timeout");
        let key = match id {
            LockId::BigInt(number) => number.to_string(),
            LockId::Pair(first, second) => format!("{first}, {second}"),
        };
        let _ =
            diesel::sql_query(format!("SELECT pg_advisory_xact_lock({key})")).execute(&mut conn);
    }
}
