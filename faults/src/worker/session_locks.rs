//! Session locks: acquired in every form, held over several statements, and released in every way.

use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable};
use diesel_interlock::{AdvisoryLock, AdvisoryLockGuard, Attempt, Error, GuardConnection, LockId};

use super::neighbour::{LATE, Lateness};
use super::report::report;
use super::{Hand, copies, errors, fenced_writes, mishaps, panic_deliberately};
use crate::chance::Chance;
use crate::clock::{self, Micros};
use crate::fault::Fault;
use crate::record::{Outcome, Primitive, Record};
use crate::subjects;

pub(super) fn work(hand: &mut Hand<'_>) -> Result<Outcome, Error> {
    let number = hand.random.u64(..subjects::LOCKS) as i32;
    let exclusive = !hand.random.one_in(3);
    let mut lock = subjects::session_lock(number);
    if !exclusive {
        lock = lock.shared();
    } else if hand.random.one_in(2) {
        lock = lock.fenced();
    }
    let section = Section {
        asked: clock::now(),
        number,
        exclusive,
        lock: &lock,
    };
    let timeout = hand.random.millis(0, 900);
    match hand.random.u64(..5) {
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

/// A wait is refused at its timeout, and not before.
fn require_patience<G>(hand: &Hand<'_>, attempt: &Attempt<G>, sent: Instant, timeout: Duration) {
    if matches!(attempt, Attempt::Busy) && sent.elapsed() < timeout {
        hand.violation(format!(
            "a wait of {timeout:?} for a session lock ended after {:?}",
            sent.elapsed()
        ));
    }
}

/// The work under a lock.
struct Section<'a> {
    /// Before the lock was.
    asked: Micros,
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
    fn enter<C: GuardConnection>(
        &self,
        hand: &mut Hand<'_>,
        attempt: Attempt<AdvisoryLockGuard<C>>,
    ) -> Result<Outcome, Error> {
        let Attempt::Acquired(mut guard) = attempt else {
            return Ok(Outcome::Busy);
        };
        let acquired = clock::now();
        // After an error the connection is broken, or a timeout of the user was reached. The release shows which.
        let token = self.draw(hand, &mut guard).unwrap_or(None);
        let lost = self
            .occupy(hand, &mut guard, acquired, token)
            .unwrap_or(false);
        let done = self.leave(hand, guard, acquired, lost);
        if let Some(token) = token.filter(|_| hand.befalls(Fault::LateWrite)) {
            fenced_writes::write_late(hand, self.number, token);
        }
        done
    }

    /// Most holders have a token, which comes with the lock where it is fenced, or is drawn now.
    fn draw<C: GuardConnection>(
        &self,
        hand: &mut Hand<'_>,
        guard: &mut AdvisoryLockGuard<C>,
    ) -> Result<Option<i64>, Error> {
        if !self.exclusive || hand.random.one_in(4) {
            return Ok(None);
        }
        let token = guard.fencing_token()?;
        report(&Record::Drawn {
            lock: self.number,
            token,
            sent: self.asked,
        });
        Ok(Some(token))
    }

    /// Records a section on the session that holds the lock, for a while. Returns whether the lock was found lost.
    fn occupy<C: GuardConnection>(
        &self,
        hand: &mut Hand<'_>,
        guard: &mut AdvisoryLockGuard<C>,
        acquired: Micros,
        token: Option<i64>,
    ) -> Result<bool, Error> {
        let pid = guard.backend_pid();
        let Id { id } = diesel::sql_query(
            "INSERT INTO faults.section (lock, exclusive, pid, began, ended, token) \
             SELECT $1, $2, pg_backend_pid(), at, at, $3 FROM faults.micros(clock_timestamp()) AS at RETURNING id",
        )
        .bind::<Integer, _>(self.number)
        .bind::<Bool, _>(self.exclusive)
        .bind::<Nullable<BigInt>, _>(token)
        .get_result(guard.conn())?;
        if let Some(token) = token {
            self.write(hand, guard, token)?;
        }
        if hand.random.one_in(if self.exclusive { 8 } else { 3 }) {
            self.work_elsewhere(hand, guard, acquired)?;
        }

        for _ in 0..hand.random.u64(..4) {
            let long = hand.random.one_in(40);
            thread::sleep(hand.random.millis(0, if long { 700 } else { 25 }));
            // This process may have been stopped for longer than its session lives, without noticing.
            if let Some(token) = token.filter(|_| hand.random.one_in(3)) {
                self.write(hand, guard, token)?;
            }
            if hand.random.one_in(2) {
                let asked = clock::now();
                if !guard.is_held()? {
                    self.report_loss(hand, pid, acquired, asked);
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

    /// Writes behind the fence, on the session that holds the lock or on another one. Only a later holder can make the write
    /// fail, and there is none while this one holds the lock.
    fn write<C: GuardConnection>(
        &self,
        hand: &mut Hand<'_>,
        guard: &mut AdvisoryLockGuard<C>,
        token: i64,
    ) -> Result<(), Error> {
        let sent = clock::now();
        let other = hand.random.one_in(2).then(|| hand.pool.try_get()).flatten();
        let passed = match other {
            Some(mut conn) => fenced_writes::write(hand, self.number, token, &mut conn),
            None => fenced_writes::write(hand, self.number, token, guard.conn()),
        };
        if passed == Some(false) {
            report(&Record::Fenced {
                lock: self.number,
                token,
                holds: guard.is_held()?,
                sent,
            });
        }
        Ok(())
    }

    /// Uses no connection, and relies on a watch.
    fn work_elsewhere<C: GuardConnection>(
        &self,
        hand: &mut Hand<'_>,
        guard: &mut AdvisoryLockGuard<C>,
        acquired: Micros,
    ) -> Result<(), Error> {
        let watch = guard.watch(&hand.asking, hand.random.millis(10, 50))?;
        let within = hand.random.millis(60, 150);
        let end = Instant::now() + hand.random.millis(100, 900);
        let mut last = None;
        let mut lateness = Lateness::new();
        // A watch that is late at the end is observed for longer.
        let is_late = || !watch.is_lost() && watch.last_confirmed() > LATE;
        while Instant::now() < end || is_late() && Instant::now() < end + Duration::from_secs(3) {
            // The clock is read before the watch, whose result is no older than that.
            let at = clock::now();
            if watch.is_held_within(within) {
                last = Some(at);
            }
            if lateness.is_too_late(&watch, &hand.asking) {
                hand.violation(format!(
                    "late watch: nothing was confirmed for {:?}, and the pool answered all the time",
                    watch.last_confirmed()
                ));
                break;
            }
            thread::sleep(Duration::from_millis(3));
        }
        if let Some(at) = last {
            report(&Record::Watched {
                pid: guard.backend_pid(),
                acquired,
                at,
                within: within.as_micros() as Micros,
            });
        }
        Ok(())
    }

    fn leave<C: GuardConnection>(
        &self,
        hand: &mut Hand<'_>,
        mut guard: AdvisoryLockGuard<C>,
        acquired: Micros,
        lost: bool,
    ) -> Result<Outcome, Error> {
        if hand.befalls(Fault::Panic) {
            panic_deliberately();
        }
        // Nothing else is sent before the release, because Diesel's `execute` may never end after a panic in a `copy_from`.
        if copies::befall(hand, guard.conn()) {
            let asked = clock::now();
            if hand.random.one_in(2) && matches!(guard.is_held(), Ok(false)) {
                self.report_loss(hand, guard.backend_pid(), acquired, asked);
            }
        } else if hand.befalls(Fault::TransactionLeftOpen) {
            if hand.random.one_in(2) {
                let _ = guard.conn().batch_execute("BEGIN");
            } else {
                let _ = AnsiTransactionManager::begin_transaction(guard.conn());
            }
        } else if hand.befalls(Fault::TransactionAborted) {
            let _ = guard.conn().batch_execute("BEGIN; SELECT 1/0");
        } else if hand.settings.impatient && hand.befalls(Fault::StatementTimeout) {
            let _ = diesel::sql_query("SELECT pg_sleep(1)").execute(guard.conn());
        } else if hand.settings.impatient && self.exclusive {
            self.run_into_lock_timeout(hand);
        }
        if hand.random.one_in(10) {
            drop(guard);
            return Ok(Outcome::Done);
        }
        self.release(hand, guard, acquired, lost)
    }

    fn release<C: GuardConnection>(
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
            Err(error @ Error::LockLost { .. }) => {
                self.report_loss(hand, pid, acquired, asked);
                if let Some(violation) = errors::must_not_be(Primitive::SessionLock, &error) {
                    hand.violation(violation);
                }
                return Ok(Outcome::Lost);
            }
            Err(Error::ReleaseFailed { .. }) => return Ok(Outcome::Lost),
            Err(error) => return Err(error),
        }
        Ok(Outcome::Done)
    }

    /// Losses of sessions with timeouts are not reported, because the campaign does not know their reasons.
    fn report_loss(&self, hand: &Hand<'_>, pid: i32, acquired: Micros, asked: Micros) {
        if !hand.settings.impatient {
            report(&Record::Lost {
                pid,
                acquired,
                asked,
            });
        }
    }

    /// The user's own wait for the lock, on another connection.
    fn run_into_lock_timeout(&self, hand: &Hand<'_>) {
        if !mishaps().contains(&Fault::LockTimeout) {
            return;
        }
        let (Some(mut conn), Ok(id)) = (hand.pool.try_get(), self.lock.key().id()) else {
            return;
        };
        if !hand.befalls(Fault::LockTimeout) {
            return;
        }
        let key = match id {
            LockId::BigInt(number) => number.to_string(),
            LockId::Pair(first, second) => format!("{first}, {second}"),
        };
        let _ =
            diesel::sql_query(format!("SELECT pg_advisory_xact_lock({key})")).execute(&mut conn);
    }
}
