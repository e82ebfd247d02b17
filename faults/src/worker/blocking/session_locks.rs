//! Session locks: acquired in every form, held over several statements, and released in every way.

use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel::prelude::*;
use diesel_interlock::{AdvisoryLockGuard, Attempt, Error, GuardConnection, LockId, PgPool};

use super::{WorkerThread, copies, fenced_writes};
use crate::chance::Chance;
use crate::clock;
use crate::fault::Fault;
use crate::record::{Outcome, Primitive};
use crate::worker::instructions::{inflicts, is_due};
use crate::worker::lateness::{BETWEEN_TRIES, LATE, Lateness, too_late};
use crate::worker::report::violation;
use crate::worker::sections::{Holder, Id, Wanted, require_patience};
use crate::worker::{errors, panic_deliberately};

pub(super) fn work(worker: &mut WorkerThread<'_>) -> Result<Outcome, Error> {
    let section = Section(Wanted::any(&mut worker.random));
    let lock = &section.0.lock;
    let timeout = worker.random.millis(0, 900);
    match worker.random.u64(..5) {
        0 => section.enter(worker, lock.try_acquire(&worker.pool.clone())?),
        1 => section.enter(
            worker,
            Attempt::Acquired(lock.acquire(&worker.pool.clone())?),
        ),
        2 | 3 => {
            let sent = Instant::now();
            let attempt = lock.acquire_timeout(&worker.pool.clone(), timeout)?;
            require_patience(&attempt, sent, timeout);
            section.enter(worker, attempt)
        }
        _ => {
            let mut conn = worker.connection()?;
            let sent = Instant::now();
            let attempt = lock.acquire_timeout_on(&mut conn, timeout)?;
            require_patience(&attempt, sent, timeout);
            let done = section.enter(worker, attempt);
            // A transaction that was left open on a borrowed connection is the caller's.
            if matches!(done, Ok(Outcome::Done)) {
                let _ = conn.batch_execute("ROLLBACK");
            }
            done
        }
    }
}

/// The work under a lock.
struct Section(Wanted);

impl Section {
    fn enter<C: GuardConnection>(
        &self,
        worker: &mut WorkerThread<'_>,
        attempt: Attempt<AdvisoryLockGuard<C>>,
    ) -> Result<Outcome, Error> {
        let Attempt::Acquired(mut guard) = attempt else {
            return Ok(Outcome::Busy);
        };
        let holder = Holder::new(guard.backend_pid(), &self.0);
        // After an error the connection is broken, or a timeout of the user was reached. The release shows which.
        let token = self.draw(worker, &mut guard).unwrap_or(None);
        let lost = self
            .occupy(worker, &mut guard, holder, token)
            .unwrap_or(false);
        let done = self.leave(worker, guard, holder, lost);
        if let Some(token) = token.filter(|_| inflicts(Fault::LateWrite)) {
            fenced_writes::write_late(worker, self.0.number, token);
        }
        done
    }

    /// Most holders have a token, which comes with the lock where it is fenced, or is drawn now.
    fn draw<C: GuardConnection>(
        &self,
        worker: &mut WorkerThread<'_>,
        guard: &mut AdvisoryLockGuard<C>,
    ) -> Result<Option<i64>, Error> {
        if !self.0.exclusive || worker.random.one_in(4) {
            return Ok(None);
        }
        let token = guard.fencing_token()?;
        self.0.drew(token);
        Ok(Some(token))
    }

    /// Records a section on the session that holds the lock, for a while. Returns whether the lock was found lost.
    fn occupy<C: GuardConnection>(
        &self,
        worker: &mut WorkerThread<'_>,
        guard: &mut AdvisoryLockGuard<C>,
        holder: Holder,
        token: Option<i64>,
    ) -> Result<bool, Error> {
        let id: Id = self.0.begin(token).get_result(guard.conn())?;
        if let Some(token) = token {
            self.write(worker, guard, token)?;
        }
        if worker.random.one_in(if self.0.exclusive { 8 } else { 3 }) {
            self.work_elsewhere(worker, guard, holder)?;
        }

        for _ in 0..worker.random.u64(..4) {
            let long = worker.random.one_in(40);
            thread::sleep(worker.random.millis(0, if long { 700 } else { 25 }));
            // This process may have been stopped for longer than its session lives, without noticing.
            if let Some(token) = token.filter(|_| worker.random.one_in(3)) {
                self.write(worker, guard, token)?;
            }
            if worker.random.one_in(2) {
                let asked = clock::now();
                if !guard.is_held()? {
                    holder.lost(worker.settings, asked);
                    return Ok(true);
                }
                holder.held(asked);
            }
            id.extend().execute(guard.conn())?;
        }
        Ok(false)
    }

    /// Writes behind the fence, on the session that holds the lock or on another one. Only a later holder can make the write
    /// fail, and there is none while this one holds the lock.
    fn write<C: GuardConnection>(
        &self,
        worker: &mut WorkerThread<'_>,
        guard: &mut AdvisoryLockGuard<C>,
        token: i64,
    ) -> Result<(), Error> {
        let other = worker
            .random
            .one_in(2)
            .then(|| worker.pool.try_get())
            .flatten();
        let refused = match other {
            Some(mut conn) => fenced_writes::write(self.0.number, token, &mut conn),
            None => fenced_writes::write(self.0.number, token, guard.conn()),
        };
        if let Some(write) = refused {
            write.refused(guard.is_held()?);
        }
        Ok(())
    }

    /// Uses no connection, and relies on a watch.
    fn work_elsewhere<C: GuardConnection>(
        &self,
        worker: &mut WorkerThread<'_>,
        guard: &mut AdvisoryLockGuard<C>,
        holder: Holder,
    ) -> Result<(), Error> {
        let watch = guard.watch(&worker.watch_pool, worker.random.millis(10, 50))?;
        let within = worker.random.millis(60, 150);
        let end = Instant::now() + worker.random.millis(100, 900);
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
            if lateness.is_to_be_tried(watch.is_lost(), watch.last_confirmed()) {
                let sent = Instant::now();
                let works = works(&worker.watch_pool);
                if lateness.is_too_late(sent, works) {
                    violation(too_late(watch.last_confirmed()));
                    break;
                }
            }
            thread::sleep(Duration::from_millis(3));
        }
        if let Some(at) = last {
            holder.watched(at, within);
        }
        Ok(())
    }

    fn leave<C: GuardConnection>(
        &self,
        worker: &mut WorkerThread<'_>,
        mut guard: AdvisoryLockGuard<C>,
        holder: Holder,
        lost: bool,
    ) -> Result<Outcome, Error> {
        if inflicts(Fault::Panic) {
            panic_deliberately();
        }
        // Nothing else is sent before the release, because Diesel's `execute` may never end after a panic in a `copy_from`.
        if copies::inflict(worker, guard.conn()) {
            let asked = clock::now();
            if worker.random.one_in(2) && matches!(guard.is_held(), Ok(false)) {
                holder.lost(worker.settings, asked);
            }
        } else if inflicts(Fault::TransactionLeftOpen) {
            if worker.random.one_in(2) {
                let _ = guard.conn().batch_execute("BEGIN");
            } else {
                let _ = AnsiTransactionManager::begin_transaction(guard.conn());
            }
        } else if inflicts(Fault::TransactionAborted) {
            let _ = guard.conn().batch_execute("BEGIN; SELECT 1/0");
        } else if worker.settings.impatient && inflicts(Fault::StatementTimeout) {
            let _ = diesel::sql_query("SELECT pg_sleep(1)").execute(guard.conn());
        } else if worker.settings.impatient && self.0.exclusive {
            self.run_into_lock_timeout(worker);
        }
        if worker.random.one_in(10) {
            drop(guard);
            return Ok(Outcome::Done);
        }
        self.release(worker, guard, holder, lost)
    }

    fn release<C: GuardConnection>(
        &self,
        worker: &mut WorkerThread<'_>,
        guard: AdvisoryLockGuard<C>,
        holder: Holder,
        lost: bool,
    ) -> Result<Outcome, Error> {
        let asked = clock::now();
        match guard.release() {
            Ok(()) if lost => {
                violation(format!("{} was lost, and then released", self.0.lock.key()));
            }
            Ok(()) => holder.held(asked),
            Err(Error::TransactionLeftOpen { .. }) => {}
            Err(error @ Error::LockLost { .. }) => {
                holder.lost(worker.settings, asked);
                errors::examine(Primitive::SessionLock, &error);
                return Ok(Outcome::Lost);
            }
            Err(error @ Error::ReleaseFailed { .. }) => {
                errors::examine(Primitive::SessionLock, &error);
                return Ok(Outcome::Lost);
            }
            Err(error) => return Err(error),
        }
        Ok(Outcome::Done)
    }

    /// The user's own wait for the lock, on another connection.
    fn run_into_lock_timeout(&self, worker: &WorkerThread<'_>) {
        if !is_due(Fault::LockTimeout) {
            return;
        }
        let (Some(mut conn), Ok(id)) = (worker.pool.try_get(), self.0.lock.key().id()) else {
            return;
        };
        if !inflicts(Fault::LockTimeout) {
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

fn works(pool: &PgPool) -> bool {
    let conn = pool.get_timeout(BETWEEN_TRIES);
    conn.is_ok_and(|mut conn| diesel::sql_query("SELECT 1").execute(&mut conn).is_ok())
}
