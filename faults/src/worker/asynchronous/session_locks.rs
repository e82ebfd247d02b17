//! Session locks: acquired in every form, held over several statements, nested, and released in every way.

use std::time::{Duration, Instant};

use diesel_async::{
    AnsiTransactionManager, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection,
    TransactionManager,
};
use diesel_interlock::asynchronous::{AdvisoryLock, AdvisoryLockGuard, GuardConnection, Pool};
use diesel_interlock::{Attempt, Error, LockId};
use tokio::time::{sleep, timeout};

use super::lender::{LeftOpen, Lender};
use super::pools::AnyPool;
use super::{WorkerTask, drops, fenced_writes};
use crate::chance::Chance;
use crate::clock;
use crate::fault::Fault;
use crate::record::{Outcome, Primitive};
use crate::worker::instructions::{inflicts, is_due};
use crate::worker::lateness::{BETWEEN_TRIES, LATE, Lateness, too_late};
use crate::worker::report::violation;
use crate::worker::sections::{Holder, Id, Wanted, require_patience};
use crate::worker::{errors, panic_deliberately};

pub(super) async fn work(worker: &mut WorkerTask) -> Result<Outcome, Error> {
    let wanted = Wanted::any(&mut worker.random);
    let form = worker.random.u64(..6);
    let section = Section {
        lock: AdvisoryLock::from(wanted.lock.clone()),
        wanted,
        is_lent: form == 5,
        left_open: LeftOpen::default(),
    };
    let lock = &section.lock;
    let pool = worker.pool.clone();
    let limit = worker.random.millis(0, 900);
    match form {
        0 => {
            let attempt = lock.try_acquire(&pool).await?;
            section.enter(worker, attempt).await
        }
        1 => {
            let guard = lock.acquire(&pool).await?;
            section.enter(worker, Attempt::Acquired(guard)).await
        }
        2 | 3 => {
            let sent = Instant::now();
            let attempt = lock.acquire_timeout(&pool, limit).await?;
            require_patience(&attempt, sent, limit);
            section.enter(worker, attempt).await
        }
        4 => {
            let pause = worker.random.millis(0, 25);
            let work = async |conn: &mut AsyncPgConnection| {
                let id: Id = section.wanted.begin(None).get_result(conn).await?;
                sleep(pause).await;
                id.extend().execute(conn).await?;
                Ok::<_, Error>(())
            };
            lock.with(&pool, work).await?;
            Ok(Outcome::Done)
        }
        _ => {
            let mut lender = Lender::new(worker.connection().await?, &section.left_open);
            let sent = Instant::now();
            let attempt = lock.acquire_timeout_on(lender.conn(), limit).await?;
            require_patience(&attempt, sent, limit);
            let done = section.enter(worker, attempt).await;
            lender.roll_back().await;
            done
        }
    }
}

/// The work under a lock.
struct Section {
    wanted: Wanted,
    lock: AdvisoryLock,
    /// Whether the connection is lent to the guard.
    is_lent: bool,
    left_open: LeftOpen,
}

impl Section {
    async fn enter<C: GuardConnection>(
        &self,
        worker: &mut WorkerTask,
        attempt: Attempt<AdvisoryLockGuard<C>>,
    ) -> Result<Outcome, Error> {
        let Attempt::Acquired(mut guard) = attempt else {
            return Ok(Outcome::Busy);
        };
        let holder = Holder::new(guard.backend_pid(), &self.wanted);
        // After an error the connection is broken, or a timeout of the user was reached. The release shows which.
        let token = self.draw(worker, &mut guard).await.unwrap_or(None);
        let lost = self
            .occupy(worker, &mut guard, holder, token)
            .await
            .unwrap_or(false);
        let done = self.leave(worker, guard, holder, lost).await;
        if let Some(token) = token.filter(|_| inflicts(Fault::LateWrite)) {
            fenced_writes::write_late(worker, self.wanted.number, token).await;
        }
        done
    }

    /// Most holders have a token, which comes with the lock where it is fenced, or is drawn now.
    async fn draw<C: GuardConnection>(
        &self,
        worker: &mut WorkerTask,
        guard: &mut AdvisoryLockGuard<C>,
    ) -> Result<Option<i64>, Error> {
        if !self.wanted.exclusive || worker.random.one_in(4) {
            return Ok(None);
        }
        let token = guard.fencing_token().await?;
        self.wanted.drew(token);
        Ok(Some(token))
    }

    /// Records a section on the session that holds the lock, for a while. Returns whether the lock was found lost.
    async fn occupy<C: GuardConnection>(
        &self,
        worker: &mut WorkerTask,
        guard: &mut AdvisoryLockGuard<C>,
        holder: Holder,
        token: Option<i64>,
    ) -> Result<bool, Error> {
        let id: Id = self.wanted.begin(token).get_result(guard.conn()).await?;
        if let Some(token) = token {
            self.write(worker, guard, token).await?;
        }
        if worker
            .random
            .one_in(if self.wanted.exclusive { 8 } else { 3 })
        {
            self.work_elsewhere(worker, guard, holder).await?;
        }
        for _ in 0..worker.random.u64(..4) {
            let long = worker.random.one_in(40);
            let pause = worker.random.millis(0, if long { 700 } else { 25 });
            if worker.random.one_in(3) {
                if timeout(pause, guard.lost()).await.is_ok() {
                    worker.lost(holder, clock::now());
                    return Ok(true);
                }
            } else {
                sleep(pause).await;
            }
            // This process may have been stopped for longer than its session lives, without noticing.
            if let Some(token) = token.filter(|_| worker.random.one_in(3)) {
                self.write(worker, guard, token).await?;
            }
            if worker.random.one_in(4) {
                self.nest(worker, guard.conn()).await?;
            }
            if worker.random.one_in(2) {
                let asked = clock::now();
                if !guard.is_held().await? {
                    worker.lost(holder, asked);
                    return Ok(true);
                }
                holder.held(asked);
            }
            id.extend().execute(guard.conn()).await?;
        }
        Ok(false)
    }

    /// Writes behind the fence, on the session that holds the lock or on another one. Only a later holder can make the write
    /// fail, and there is none while this one holds the lock.
    async fn write<C: GuardConnection>(
        &self,
        worker: &mut WorkerTask,
        guard: &mut AdvisoryLockGuard<C>,
        token: i64,
    ) -> Result<(), Error> {
        let number = self.wanted.number;
        let other = if worker.random.one_in(2) {
            worker.pool.try_check_out().await
        } else {
            None
        };
        let refused = match other {
            Some(mut conn) => fenced_writes::write(number, token, &mut conn).await,
            None => fenced_writes::write(number, token, guard.conn()).await,
        };
        if let Some(write) = refused {
            write.refused(guard.is_held().await?);
        }
        Ok(())
    }

    /// Uses no connection, and relies on a watch.
    async fn work_elsewhere<C: GuardConnection>(
        &self,
        worker: &mut WorkerTask,
        guard: &mut AdvisoryLockGuard<C>,
        holder: Holder,
    ) -> Result<(), Error> {
        let every = worker.random.millis(10, 50);
        let watch = guard.watch(&worker.watch_pool, every).await?;
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
                let works = works(&worker.watch_pool).await;
                if lateness.is_too_late(sent, works) {
                    violation(too_late(watch.last_confirmed()));
                    break;
                }
            }
            sleep(Duration::from_millis(3)).await;
        }
        if let Some(at) = last {
            holder.watched(at, within);
        }
        Ok(())
    }

    /// Takes another lock on the session of this one, or this one again.
    async fn nest(
        &self,
        worker: &mut WorkerTask,
        conn: &mut AsyncPgConnection,
    ) -> Result<(), Error> {
        let wanted = if worker.random.one_in(2) {
            Wanted::any(&mut worker.random)
        } else {
            self.wanted.clone()
        };
        let lock = AdvisoryLock::from(wanted.lock.clone());
        let pause = worker.random.millis(0, 20);
        // A try, because two sessions that wait for each other's locks are a deadlock.
        let acquire = async |conn| match lock.try_acquire_on(conn).await? {
            Attempt::Acquired(mut guard) => {
                // A session does not exclude itself.
                if wanted.number != self.wanted.number {
                    let id: Id = wanted.begin(None).get_result(guard.conn()).await?;
                    sleep(pause).await;
                    id.extend().execute(guard.conn()).await?;
                }
                guard.release().await
            }
            Attempt::Busy => Ok(()),
        };
        if worker.random.one_in(3) {
            let polls = worker.random.u32(1..8);
            drops::at_most(polls, acquire(conn)).await.unwrap_or(Ok(()))
        } else {
            acquire(conn).await
        }
    }

    async fn leave<C: GuardConnection>(
        &self,
        worker: &mut WorkerTask,
        mut guard: AdvisoryLockGuard<C>,
        holder: Holder,
        lost: bool,
    ) -> Result<Outcome, Error> {
        if inflicts(Fault::Panic) {
            panic_deliberately();
        }
        let is_impatient = worker.settings.impatient;
        let is_aborted = inflicts(Fault::TransactionAborted);
        let conn = guard.conn();
        if is_aborted {
            self.left_open.set(true);
            let _ = conn.batch_execute("BEGIN; SELECT 1/0").await;
        } else if inflicts(Fault::DroppedQuery) {
            let seconds = worker.random.u64(0..1200) as f64 / 1000.0;
            let query = diesel::sql_query(format!("SELECT pg_sleep({seconds})"));
            let polls = worker.random.u32(1..4);
            let _ = drops::at_most(polls, query.execute(conn)).await;
        } else if inflicts(Fault::TransactionLeftOpen) {
            if worker.random.one_in(2) {
                self.left_open.set(true);
                let _ = conn.batch_execute("BEGIN").await;
            } else {
                let _ = AnsiTransactionManager::begin_transaction(conn).await;
            }
        } else if is_impatient && inflicts(Fault::StatementTimeout) {
            let _ = diesel::sql_query("SELECT pg_sleep(1)").execute(conn).await;
        } else if is_impatient && self.wanted.exclusive {
            self.run_into_lock_timeout(worker).await;
        }
        // On a lent connection the unlock of a dropped guard fails in an aborted transaction, as is documented.
        if worker.random.one_in(6) && !(is_aborted && self.is_lent) {
            drop(guard);
            return Ok(Outcome::Done);
        }
        self.release(worker, guard, holder, lost).await
    }

    async fn release<C: GuardConnection>(
        &self,
        worker: &WorkerTask,
        guard: AdvisoryLockGuard<C>,
        holder: Holder,
        lost: bool,
    ) -> Result<Outcome, Error> {
        let asked = clock::now();
        match guard.release().await {
            Ok(()) if lost => {
                violation(format!("{} was lost, and then released", self.lock.key()));
            }
            Ok(()) => holder.held(asked),
            Err(Error::TransactionLeftOpen { .. }) => {}
            Err(error @ Error::LockLost { .. }) => {
                worker.lost(holder, asked);
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
    async fn run_into_lock_timeout(&self, worker: &WorkerTask) {
        if !is_due(Fault::LockTimeout) {
            return;
        }
        let (Some(mut conn), Ok(id)) = (worker.pool.try_check_out().await, self.lock.key().id())
        else {
            return;
        };
        if !inflicts(Fault::LockTimeout) {
            return;
        }
        let key = match id {
            LockId::BigInt(number) => number.to_string(),
            LockId::Pair(first, second) => format!("{first}, {second}"),
        };
        let query = diesel::sql_query(format!("SELECT pg_advisory_xact_lock({key})"));
        let _ = query.execute(&mut *conn).await;
    }
}

async fn works(pool: &AnyPool) -> bool {
    let works = async {
        let mut conn = pool.check_out().await.ok()?;
        conn.batch_execute("SELECT 1").await.ok()
    };
    timeout(BETWEEN_TRIES, works).await.ok().flatten().is_some()
}
