//! The operations, over each pool.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::schedule::RunDue;
use diesel_interlock::{
    Admission, Attempt, Check, Decision, Error, LockKey, Pool, Quota, Result, check_exclusion,
};

use crate::Place;

const POOL: u32 = 3;
const TIMEOUT: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);
const PLENTY: Quota = Quota::per_second(1_000_000);
const ONE: Quota = Quota::new(1, HOUR);

/// Operations that share a pool.
type Group = fn(&Place<'_>);

pub(crate) const ALL: [(&str, &[Group]); 3] = [
    ("r2d2", r2d2::GROUPS),
    ("deadpool", deadpool::GROUPS),
    ("bb8", bb8::GROUPS),
];

const fn name_attempt<T>(attempt: &Attempt<T>) -> &'static str {
    match attempt {
        Attempt::Acquired(_) => "acquired",
        Attempt::Busy => "busy",
    }
}

const fn name_admission<T>(admission: &Admission<T>) -> &'static str {
    match admission {
        Admission::Admitted(_) => "admitted",
        Admission::Full(_) => "full",
    }
}

const fn name_check(check: &Check) -> &'static str {
    match check {
        Check::Allowed(_) => "allowed",
        Check::Limited(_) => "limited",
    }
}

const fn name_run_due(ran: RunDue) -> &'static str {
    match ran {
        RunDue::Ran => "ran",
        RunDue::Later(_) => "later",
        RunDue::Paused => "paused",
        RunDue::Never => "never",
    }
}

/// Holds the lock on a connection of its own, past the proxy, until that is dropped.
fn hold_elsewhere(place: &Place<'_>, key: &LockKey) -> PgConnection {
    let mut conn = place.database.connect();
    let id = key.id().expect("the key is valid");
    conn.batch_execute(&format!("SELECT pg_advisory_lock({id})"))
        .expect("the lock is free");
    conn
}

/// Opens all connections of a pool.
fn fill<P: Pool>(pool: &P) {
    workbench::block_on(async {
        let mut all = Vec::new();
        for _ in 0..POOL {
            all.push(pool.check_out(None).await.expect("the server accepts"));
        }
    });
}

/// The same operations over each pool. `$wait` gets the result of an operation, and `$half` has the
/// operations that take closures.
macro_rules! pool {
    ($name:ident, $($handles:ident)::*, $wait:ident, $half:ident) => {
        mod $name {
            use super::*;
            use $($handles)::*::{AdvisoryLock, PgPool, RateLimit, Semaphore, Throttle, drain};

            pub(super) const GROUPS: &[Group] = &[
                locks, waits, crowds, several, slots, waits_for_slots, dropped, limits, transactions, rows, loops, exclusion,
            ];

            /// Opens a full pool, then slows its network down.
            fn open(place: &Place<'_>) -> PgPool {
                let pool = pools::$name(&place.proxy.url());
                fill(&pool);
                place.slow_down();
                pool
            }

            /// Waits until dropped operations have ended.
            fn settle() {
                let _ = $wait(drain(Duration::from_secs(10)));
            }

            fn locks(place: &Place<'_>) {
                let pool = &open(place);
                let lock = &AdvisoryLock::named("free").key(&place.key);
                place.measure("lock: try, release", &["acquired"], || {
                    let attempt = $wait(lock.try_acquire(pool))?;
                    let word = name_attempt(&attempt);
                    if let Some(guard) = attempt.acquired() {
                        $wait(guard.release())?;
                    }
                    Ok(word)
                }, settle);
                place.measure("lock: wait (free), drop", &["acquired"], || {
                    let word = name_attempt(&$wait(lock.acquire_timeout(pool, place.timeout()))?);
                    // The next run must find the lock free.
                    settle();
                    Ok(word)
                }, settle);
                let busy = &AdvisoryLock::named("busy").key(&place.key);
                let _holder = hold_elsewhere(place, busy.lock_key());
                place.measure("lock: try (busy)", &["busy"], || {
                    Ok(name_attempt(&$wait(busy.try_acquire(pool))?))
                }, settle);
                $half::drop_somewhere(place, "lock: try (free), dropped", || lock.try_acquire(pool));
                $half::drop_somewhere(place, "lock: wait (busy), dropped", || busy.acquire(pool));
            }

            fn waits(place: &Place<'_>) {
                let pool = &open(place);
                let busy = &AdvisoryLock::named("busy wait").key(&place.key);
                let _holder = hold_elsewhere(place, busy.lock_key());
                place.measure("lock: wait (busy)", &["busy"], || {
                    Ok(name_attempt(&$wait(busy.acquire_timeout(pool, place.timeout()))?))
                }, settle);
                let lock = &AdvisoryLock::named("handed over").key(&place.key);
                place.measure("lock: wait until a release", &["acquired"], || {
                    let guard = $wait(lock.acquire(pool))?;
                    std::thread::scope(|scope| {
                        let waiter = scope.spawn(|| {
                            let attempt = $wait(lock.acquire_timeout(pool, TIMEOUT))?;
                            let word = name_attempt(&attempt);
                            if let Some(guard) = attempt.acquired() {
                                $wait(guard.release())?;
                            }
                            Ok(word)
                        });
                        std::thread::sleep(4 * place.round_trip);
                        $wait(guard.release())?;
                        waiter.join().expect("no operation panics")
                    })
                }, settle);
            }

            /// Several threads that wait on one pool.
            fn crowds(place: &Place<'_>) {
                let pool = &open(place);
                let busy = &AdvisoryLock::named("crowd").key(&place.key);
                let _holder = hold_elsewhere(place, busy.lock_key());
                place.measure("lock: five wait (busy)", &["busy"], || {
                    // Three connections for five waiters: a timeout includes the wait for one.
                    let timeout = 3 * place.timeout();
                    std::thread::scope(|scope| {
                        let waiters: Vec<_> = (0..5)
                            .map(|_| scope.spawn(|| $wait(busy.acquire_timeout(pool, timeout))))
                            .collect();
                        let mut word = "busy";
                        for waiter in waiters {
                            let attempt = waiter.join().expect("no operation panics")?;
                            if attempt.is_acquired() {
                                word = "acquired";
                            }
                        }
                        Ok(word)
                    })
                }, settle);
            }

            fn several(place: &Place<'_>) {
                let pool = &open(place);
                let locks = [1, 2, 3].map(|n| AdvisoryLock::named("several").key(format!("{n} {}", place.key)));
                let all = &AdvisoryLock::all(&locks);
                place.measure("several locks: try, release", &["acquired"], || {
                    let attempt = $wait(all.try_acquire(pool))?;
                    let word = name_attempt(&attempt);
                    if let Some(guard) = attempt.acquired() {
                        $wait(guard.release())?;
                    }
                    Ok(word)
                }, settle);
                let _holder = hold_elsewhere(place, locks[1].lock_key());
                place.measure("several locks: wait (busy)", &["busy"], || {
                    Ok(name_attempt(&$wait(all.acquire_timeout(pool, place.timeout()))?))
                }, settle);
            }

            fn slots(place: &Place<'_>) {
                let pool = &open(place);
                let free = &Semaphore::named("free", 3, HOUR).key(&place.key);
                place.measure("semaphore: try, release", &["admitted"], || {
                    let admission = $wait(free.try_acquire(pool))?;
                    let word = name_admission(&admission);
                    if let Some(permit) = admission.admitted() {
                        $wait(permit.release())?;
                    }
                    Ok(word)
                }, settle);
                place.measure("semaphore: try, renew, drop", &["admitted"], || {
                    let admission = $wait(free.try_acquire(pool))?;
                    let word = name_admission(&admission);
                    if let Some(permit) = admission.admitted() {
                        $wait(permit.renew())?;
                    }
                    // The next run must find a free slot.
                    settle();
                    Ok(word)
                }, settle);
            }

            fn dropped(place: &Place<'_>) {
                let pool = &open(place);
                let free = &Semaphore::named("dropped", 3, HOUR).key(&place.key);
                $half::drop_somewhere(place, "semaphore: try, dropped", || free.try_acquire(pool));
                let full = &Semaphore::named("dropped and full", 1, HOUR).key(&place.key);
                let held = $wait(full.acquire(pool)).expect("it is free");
                $half::drop_somewhere(place, "semaphore: wait (full), dropped", || full.acquire(pool));
                let _ = held.detach();
                let limit = &RateLimit::named("dropped", PLENTY).key(&place.key);
                $half::drop_somewhere(place, "rate limit: check, dropped", || limit.check(pool));
                let throttle = &Throttle::named("dropped", Duration::from_micros(1)).key(&place.key);
                $half::drop_somewhere(place, "throttle: attempt, dropped", || throttle.attempt(pool));
                let lock = &AdvisoryLock::named("eight").key(&place.key);
                $half::drop_eight(place, pool, lock);
            }

            fn waits_for_slots(place: &Place<'_>) {
                let pool = &open(place);
                let full = &Semaphore::named("full", 1, HOUR).key(&place.key);
                let held = $wait(full.acquire(pool)).expect("it is free");
                place.measure("semaphore: try (full)", &["full"], || {
                    Ok(name_admission(&$wait(full.try_acquire(pool))?))
                }, settle);
                place.measure("semaphore: wait (full)", &["full"], || {
                    Ok(name_admission(&$wait(full.acquire_timeout(pool, place.timeout()))?))
                }, settle);
                let _ = held.detach();
            }

            fn limits(place: &Place<'_>) {
                let pool = &open(place);
                let free = &RateLimit::named("free", PLENTY).key(&place.key);
                place.measure("rate limit: check", &["allowed"], || {
                    Ok(name_check(&$wait(free.check(pool))?))
                }, settle);
                place.measure("rate limit: wait (free)", &["allowed"], || {
                    Ok(name_check(&$wait(free.acquire_timeout(pool, place.timeout()))?))
                }, settle);
                let used = &RateLimit::named("used", ONE).key(&place.key);
                let _ = $wait(used.check(pool)).expect("it is free");
                place.measure("rate limit: check (denied)", &["limited"], || {
                    Ok(name_check(&$wait(used.check(pool))?))
                }, settle);
                // The first call of a key sends three statements, each prepared first.
                let timeout = 2 * place.timeout();
                // The units become available shortly before the deadline, so either outcome is right.
                let soon = &RateLimit::named("soon", Quota::new(1, timeout)).key(&place.key);
                place.measure("rate limit: wait (at the deadline)", &["limited", "allowed"], || {
                    Ok(name_check(&$wait(soon.acquire_timeout(pool, timeout))?))
                }, settle);
                let both = [free, &RateLimit::named("both", PLENTY).key(&place.key)];
                let of_all = |check: &Check<Vec<_>>| if check.is_allowed() { "allowed" } else { "limited" };
                place.measure("rate limit: check_all", &["allowed"], || {
                    Ok(of_all(&$wait(RateLimit::check_all(&both, pool))?))
                }, settle);
                let both = [free, used];
                place.measure("rate limit: check_all (denied)", &["limited"], || {
                    Ok(of_all(&$wait(RateLimit::check_all(&both, pool))?))
                }, settle);
            }

            fn rows(place: &Place<'_>) {
                let pool = &open(place);
                let granted = Throttle::named("granted", Duration::from_micros(1)).key(&place.key);
                let of_decision = |decision: &Decision| match decision {
                    Decision::Granted(_) => "granted",
                    Decision::Denied(_) => "denied",
                };
                place.measure("throttle: attempt", &["granted"], || {
                    Ok(of_decision(&$wait(granted.attempt(pool))?))
                }, settle);
                let denied = Throttle::named("denied", HOUR).key(&place.key);
                let _ = $wait(denied.attempt(pool)).expect("it is free");
                place.measure("throttle: attempt (denied)", &["denied"], || {
                    Ok(of_decision(&$wait(denied.attempt(pool))?))
                }, settle);
                let mut n = 0;
                place.measure("once", &["first"], || {
                    n += 1;
                    $half::once(place, pool, n)
                }, settle);
                place.measure("fence: token, pass", &["ok"], || $half::fence(place, pool), settle);
            }

            fn transactions(place: &Place<'_>) {
                let pool = &open(place);
                place.measure("transaction lock", &["ok"], || $half::transaction(place, pool), settle);
                place.measure("transaction lock: wait (busy)", &["busy"], || $half::busy_transaction(place, pool), settle);
            }

            fn loops(place: &Place<'_>) {
                let pool = &open(place);
                place.measure("schedule: run_due", &["ran", "later"], || $half::run_due(place, pool), settle);
                place.measure("leader: one term", &["led"], || {
                    let led = $half::lead(place, pool);
                    settle();
                    led
                }, settle);
            }

            fn exclusion(place: &Place<'_>) {
                let pool = &open(place);
                place.measure("check_exclusion", &["ok"], || {
                    $wait(check_exclusion(pool)).map(|()| "ok")
                }, settle);
            }
        }
    };
}

fn blocking<T>(reply: T) -> T {
    reply
}

fn asynchronous<T>(reply: impl Future<Output = T>) -> T {
    workbench::block_on(reply)
}

pool!(r2d2, diesel_interlock, blocking, in_threads);
pool!(deadpool, diesel_interlock::deadpool, asynchronous, in_tasks);
pool!(bb8, diesel_interlock::bb8, asynchronous, in_tasks);

/// The operations that take closures, in the blocking half.
mod in_threads {
    use diesel::r2d2;
    use diesel_interlock::{AdvisoryLock, Done, Fence, Leader, Once, PgPool, Schedule, Stop};

    use super::*;

    /// Nothing to do: only futures can be dropped.
    pub(super) fn drop_somewhere<T>(_: &Place<'_>, _: &'static str, _: impl Fn() -> T) {}

    pub(super) fn drop_eight(_: &Place<'_>, _: &PgPool, _: &AdvisoryLock) {}

    fn get(pool: &PgPool) -> Result<r2d2::PooledConnection<r2d2::ConnectionManager<PgConnection>>> {
        pool.get().map_err(|error| Error::Pool(error.into()))
    }

    pub(super) fn transaction(place: &Place<'_>, pool: &PgPool) -> Result<&'static str> {
        let lock = AdvisoryLock::named("transaction").key(&place.key);
        let mut conn = get(pool)?;
        lock.transaction(&mut conn, |_| Ok("ok"))
    }

    pub(super) fn busy_transaction(place: &Place<'_>, pool: &PgPool) -> Result<&'static str> {
        let lock = AdvisoryLock::named("busy transaction").key(&place.key);
        let _holder = hold_elsewhere(place, lock.lock_key());
        get(pool)?.transaction(|conn| {
            Ok(name_attempt(
                &lock.acquire_xact_timeout(conn, place.timeout())?,
            ))
        })
    }

    pub(super) fn once(place: &Place<'_>, pool: &PgPool, n: u32) -> Result<&'static str> {
        let once = Once::named("once").key(format!("{} {n}", place.key));
        let mut conn = get(pool)?;
        let done = once.run(&mut conn, |_| Ok::<_, Error>("done"))?;
        Ok(if matches!(done, Done::First(_)) {
            "first"
        } else {
            "before"
        })
    }

    pub(super) fn fence(place: &Place<'_>, pool: &PgPool) -> Result<&'static str> {
        let mut guard = AdvisoryLock::named("fence").key(&place.key).acquire(pool)?;
        let token = guard.fencing_token()?;
        let fence = Fence::named("fence").key(&place.key);
        guard.conn().transaction(|conn| fence.pass(conn, token))?;
        guard.release()?;
        Ok("ok")
    }

    pub(super) fn run_due(place: &Place<'_>, pool: &PgPool) -> Result<&'static str> {
        let schedule = Schedule::named("schedule").key(&place.key);
        let next = |after| Some(after + Duration::from_millis(1));
        schedule
            .run_due(pool, next, |_| Ok::<_, Error>(()))
            .map(name_run_due)
    }

    pub(super) fn lead(place: &Place<'_>, pool: &PgPool) -> Result<&'static str> {
        let leader = Leader::named("leader", Duration::from_secs(9)).key(&place.key);
        let (stop, mut word) = (Stop::new(), "stopped");
        leader.lead(pool, &stop, |_| {
            word = "led";
            stop.stop();
        })?;
        Ok(word)
    }
}

/// The operations that take closures, in the asynchronous half.
mod in_tasks {
    use diesel_async::AsyncConnection;
    use diesel_interlock::advisory::AdvisoryLock;
    use diesel_interlock::fence::Fence;
    use diesel_interlock::leader::Leader;
    use diesel_interlock::once::Once;
    use diesel_interlock::schedule::Schedule;
    use diesel_interlock::{Async, Done};
    use tokio::time::timeout;
    use workbench::block_on;

    use super::*;

    /// Drops an operation at a random time before its end, or its result.
    pub(super) fn drop_somewhere<T, F: Future<Output = Result<T>>>(
        place: &Place<'_>,
        operation: &'static str,
        begin: impl Fn() -> F,
    ) {
        let settle = || {
            block_on(diesel_interlock::deadpool::drain(Duration::from_secs(10)));
        };
        place.measure(
            operation,
            &["ended", "dropped"],
            || {
                let limit =
                    Duration::from_millis(1) + place.round_trip.mul_f64(4.0 * fastrand::f64());
                let word = match block_on(async { timeout(limit, begin()).await }) {
                    Ok(ended) => ended.map(|_| "ended"),
                    Err(_) => Ok("dropped"),
                };
                settle();
                word
            },
            settle,
        );
    }

    /// Drops eight concurrent tries, more than the pool has connections, at random times.
    pub(super) fn drop_eight<P: Pool<Mode = Async>>(
        place: &Place<'_>,
        pool: &P,
        lock: &AdvisoryLock<P>,
    ) {
        let settle = || {
            block_on(diesel_interlock::deadpool::drain(Duration::from_secs(10)));
        };
        let run = || {
            let tasks: Vec<_> = (0..8)
                .map(|_| {
                    let (lock, pool, trips) = (lock.clone(), pool.clone(), 6.0 * fastrand::f64());
                    let limit = Duration::from_millis(1) + place.round_trip.mul_f64(trips);
                    workbench::runtime().spawn(async move {
                        let tried = timeout(limit, lock.try_acquire(&pool)).await;
                        tried.map_or(Ok(()), |tried| tried.map(drop))
                    })
                })
                .collect();
            for task in tasks {
                block_on(task).expect("no operation panics")?;
            }
            settle();
            Ok("dropped")
        };
        place.measure("lock: eight tries, dropped", &["dropped"], run, settle);
    }

    pub(super) fn transaction<P: Pool<Mode = Async>>(
        place: &Place<'_>,
        pool: &P,
    ) -> Result<&'static str> {
        let lock = AdvisoryLock::<P>::named("transaction").key(&place.key);
        block_on(async {
            let mut conn = pool.check_out(None).await?;
            lock.transaction(&mut conn, async |_| Ok("ok")).await
        })
    }

    pub(super) fn busy_transaction<P: Pool<Mode = Async>>(
        place: &Place<'_>,
        pool: &P,
    ) -> Result<&'static str> {
        let lock = AdvisoryLock::<P>::named("busy transaction").key(&place.key);
        let _holder = hold_elsewhere(place, lock.lock_key());
        block_on(async {
            let mut conn = pool.check_out(None).await?;
            let wait = async |conn: &mut diesel_async::AsyncPgConnection| {
                Ok(name_attempt(
                    &lock.acquire_xact_timeout(conn, place.timeout()).await?,
                ))
            };
            (*conn).transaction(wait).await
        })
    }

    pub(super) fn once<P: Pool<Mode = Async>>(
        place: &Place<'_>,
        pool: &P,
        n: u32,
    ) -> Result<&'static str> {
        let once = Once::<P>::named("once").key(format!("{} {n}", place.key));
        block_on(async {
            let mut conn = pool.check_out(None).await?;
            let done = once
                .run(&mut conn, async |_| Ok::<_, Error>("done"))
                .await?;
            Ok(if matches!(done, Done::First(_)) {
                "first"
            } else {
                "before"
            })
        })
    }

    pub(super) fn fence<P: Pool<Mode = Async>>(
        place: &Place<'_>,
        pool: &P,
    ) -> Result<&'static str> {
        let lock = AdvisoryLock::<P>::named("fence").key(&place.key);
        let fence = &Fence::<P>::named("fence").key(&place.key);
        block_on(async {
            let mut guard = lock.acquire(pool).await?;
            let token = guard.fencing_token().await?;
            let pass =
                async |conn: &mut diesel_async::AsyncPgConnection| fence.pass(conn, token).await;
            guard.conn().transaction(pass).await?;
            guard.release().await?;
            Ok("ok")
        })
    }

    pub(super) fn run_due<P: Pool<Mode = Async>>(
        place: &Place<'_>,
        pool: &P,
    ) -> Result<&'static str> {
        let schedule = Schedule::<P>::named("schedule").key(&place.key);
        let next = |after| Some(after + Duration::from_millis(1));
        let run = schedule.run_due(pool, next, |_| async { Ok::<_, Error>(()) });
        block_on(run).map(name_run_due)
    }

    pub(super) fn lead<P: Pool<Mode = Async>>(place: &Place<'_>, pool: &P) -> Result<&'static str> {
        let leader = Leader::<P>::named("leader", Duration::from_secs(9)).key(&place.key);
        let (led, mut is_led) = tokio::sync::mpsc::unbounded_channel();
        let lead = leader.lead(pool, |_| {
            let _ = led.send(());
            std::future::pending()
        });
        block_on(async {
            tokio::select! {
                Err(error) = lead => Err(error),
                _ = is_led.recv() => Ok("led"),
            }
        })
    }
}

/// The pools, with their default settings except sizes and timeouts.
mod pools {
    use diesel::r2d2::{ConnectionManager, Pool};
    use diesel_async::AsyncPgConnection;
    use diesel_async::pooled_connection::AsyncDieselConnectionManager;

    use super::{POOL, TIMEOUT};

    pub(super) fn r2d2(url: &str) -> diesel_interlock::PgPool {
        Pool::builder()
            .max_size(POOL)
            .min_idle(Some(0))
            .connection_timeout(TIMEOUT)
            .build_unchecked(ConnectionManager::new(url))
    }

    pub(super) fn deadpool(url: &str) -> diesel_interlock::deadpool::PgPool {
        let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
        diesel_interlock::deadpool::PgPool::builder(manager)
            .max_size(POOL as usize)
            .wait_timeout(Some(TIMEOUT))
            .create_timeout(Some(TIMEOUT))
            .runtime(deadpool::Runtime::Tokio1)
            .build()
            .expect("the settings of the pool are complete")
    }

    pub(super) fn bb8(url: &str) -> diesel_interlock::bb8::PgPool {
        let _entered = workbench::runtime().enter();
        let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
        diesel_interlock::bb8::PgPool::builder()
            .max_size(POOL)
            .connection_timeout(TIMEOUT)
            .build_unchecked(manager)
    }
}
