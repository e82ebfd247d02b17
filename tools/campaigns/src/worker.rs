//! A worker process. It uses the crate over one of the pools, with a thread for each primitive.

use std::env;
use std::error::Error;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use diesel_interlock::schedule::{CatchUp, Schedule, every};
use diesel_interlock::{Admission, Attempt, Check, Decision, Error as LockError, Quota, Stop};

use crate::record::{Recorder, now};

const POOL: u32 = 5;

pub(crate) const SLOTS: u32 = 3;
/// Permit timeout; short, so that a campaign sees many.
pub(crate) const TIMEOUT: Duration = Campaign::All.timeout();
pub(crate) const EVERY: Duration = Duration::from_millis(50);
pub(crate) const QUOTA: Quota = Quota::new(20, Duration::from_millis(500)).burst(5);
pub(crate) const ATTEMPTS: u16 = 1000;
const CATCH_UP: CatchUp = CatchUp::All(1000);
/// How often a tick is retried whose work fails.
pub(crate) const RETRIES: u16 = 3;

/// What happens to a schedule of the campaign of schedules, besides kills, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    /// Some runs fail, and are retried.
    Failing,
    /// Some runs hang until they are too long, and some are asked for.
    Hanging,
    /// The blocking and the asynchronous half have ticks of their own, as if a deployment lasted.
    Edited,
}

impl Kind {
    pub(crate) const fn of(campaign: Campaign, job: usize) -> Self {
        match (campaign, job % 4) {
            (Campaign::Schedules, 1) => Self::Failing,
            (Campaign::Schedules, 2) => Self::Hanging,
            (Campaign::Schedules, 3) => Self::Edited,
            _ => Self::Plain,
        }
    }
}

/// Written by the work under transaction locks, fences and `Once`.
pub(crate) const TABLES: &str =
    "CREATE TABLE booking (server integer NOT NULL, round bigint NOT NULL);
    CREATE TABLE passed (id bigserial, token bigint NOT NULL);
    CREATE TABLE work (key bigint NOT NULL)";

/// All processes compete for a new key of `Once` this often, in microseconds.
const KEY_EVERY: i64 = 50_000;

/// The jobs of the processes, and the faults that they meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Campaign {
    All,
    Leaders,
    Schedules,
    Failover,
}

impl Campaign {
    const NAMES: [(&str, Self); 4] = [
        ("all", Self::All),
        ("leaders", Self::Leaders),
        ("schedules", Self::Schedules),
        ("failover", Self::Failover),
    ];

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let named = Self::NAMES.into_iter().find(|named| named.0 == name);
        Some(named?.1)
    }

    fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// Concurrent processes; they rotate through the three pools.
    pub(crate) const fn processes(self) -> usize {
        match self {
            Self::All => 9,
            Self::Leaders => 8,
            Self::Schedules => 5,
            Self::Failover => 4,
        }
    }

    /// Lease of terms and ticks: 3 s, the shortest that programs may choose. The campaign of all
    /// faults uses a shorter one, to see more terms.
    pub(crate) const fn timeout(self) -> Duration {
        match self {
            Self::All => Duration::from_millis(900),
            _ => Duration::from_secs(3),
        }
    }

    /// How long a pool waits for a connection.
    const fn connection_timeout(self) -> Duration {
        match self {
            Self::Failover => Duration::from_secs(3),
            _ => Duration::from_secs(20),
        }
    }

    pub(crate) const fn tick(self) -> Duration {
        match self {
            Self::Schedules => Duration::from_secs(1),
            _ => Duration::from_millis(200),
        }
    }

    /// Milliseconds between two faults.
    pub(crate) const fn pauses(self) -> std::ops::Range<u64> {
        match self {
            Self::All => 50..400,
            Self::Leaders => 500..3000,
            _ => 1000..5000,
        }
    }
}

/// The settings of a worker process, passed in environment variables.
pub(crate) struct Settings {
    campaign: Campaign,
    pool: String,
    url: String,
    record: String,
    seed: u64,
}

impl Settings {
    const NAMES: [&str; 5] = [
        "FAULTS_CAMPAIGN",
        "FAULTS_POOL",
        "FAULTS_URL",
        "FAULTS_RECORD",
        "FAULTS_SEED",
    ];

    pub(crate) fn from_environment() -> Option<Self> {
        let [campaign, pool, url, record, seed] = Self::NAMES.map(|name| env::var(name).ok());
        Some(Self {
            campaign: Campaign::parse(&campaign?)?,
            pool: pool?,
            url: url?,
            record: record?,
            seed: seed?.parse().ok()?,
        })
    }

    /// The variables for the worker `number`, which determines its pool.
    pub(crate) fn environment(
        campaign: Campaign,
        number: usize,
        url: &str,
        record: &str,
        seed: u64,
    ) -> [(&'static str, String); 5] {
        let values = [
            campaign.name(),
            pool_of(number),
            url,
            record,
            &seed.to_string(),
        ];
        let mut values = values.into_iter().map(str::to_owned);
        Self::NAMES.map(|name| (name, values.next().unwrap_or_default()))
    }
}

/// The pool of the worker `number`.
pub(crate) const fn pool_of(number: usize) -> &'static str {
    ["r2d2", "deadpool", "bb8"][number % 3]
}

/// Works until standard input ends, then fails if the pool cannot open all its connections.
pub(crate) fn run(settings: &Settings) -> Result<(), Box<dyn Error>> {
    let worker = Worker {
        campaign: settings.campaign,
        job: 0,
        recorder: Arc::new(Recorder::new(&settings.record)?),
        is_over: Arc::default(),
        stop: Stop::new(),
        seed: settings.seed,
    };
    match settings.pool.as_str() {
        "r2d2" => r2d2::run(&settings.url, &worker),
        "deadpool" => deadpool::run(&settings.url, &worker),
        _ => bb8::run(&settings.url, &worker),
    }
}

#[derive(Clone)]
struct Worker {
    campaign: Campaign,
    /// The index of this thread's job.
    job: usize,
    recorder: Arc<Recorder>,
    is_over: Arc<AtomicBool>,
    stop: Stop,
    seed: u64,
}

static NUMBER: AtomicU64 = AtomicU64::new(0);

impl Worker {
    fn schedule<P: diesel_interlock::Pool>(&self) -> Schedule<P> {
        let timeout = self.campaign.timeout();
        let schedule = Schedule::named("schedule")
            .key(self.job)
            .after_crash(timeout, ATTEMPTS)
            .catch_up(CATCH_UP);
        match self.kind() {
            Kind::Failing => schedule.retry(RETRIES, Duration::from_millis(50)),
            Kind::Hanging => schedule.longest(timeout),
            Kind::Plain | Kind::Edited => schedule,
        }
    }

    const fn kind(&self) -> Kind {
        Kind::of(self.campaign, self.job)
    }

    /// Ticks of one half, which differ from those of the other one if the expression was edited.
    fn ticks(
        &self,
        is_async: bool,
    ) -> impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Copy + Send + Sync + 'static {
        let period = self.campaign.tick();
        let is_moved = is_async && self.kind() == Kind::Edited;
        let offset = if is_moved { period / 2 } else { Duration::ZERO };
        let next = every(period);
        move |after| Some(next(after - offset)? + offset)
    }

    fn fails(&self) -> bool {
        self.kind() == Kind::Failing && fastrand::u8(..3) == 0
    }

    fn hangs(&self) -> bool {
        self.kind() == Kind::Hanging && fastrand::u8(..20) == 0
    }

    fn triggers(&self) -> bool {
        self.kind() == Kind::Hanging && fastrand::u8(..10) == 0
    }

    fn note_trigger(&self, triggered: Result<bool, LockError>) {
        match triggered {
            Ok(true) => self.count("triggered"),
            Ok(false) => {}
            Err(error) => self.note_error("trigger", &error),
        }
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn count(&self, what: &str) {
        self.recorder.write(&format!("count\t{what}"));
    }

    /// Counts an error that a fault may cause. Panics on any other error, which ends the campaign.
    fn note_error(&self, what: &str, error: &LockError) {
        use LockError::{Database, Fenced, KeyLocked, LockLost, PermitLost, Pool, ReleaseFailed};
        use LockError::{Standby, TimedOut};
        let is_failover = self.campaign == Campaign::Failover;
        match error {
            Standby | Fenced { .. } if is_failover => self.count_error(what, error),
            Database(_)
            | Pool(_)
            | TimedOut
            | LockLost(_)
            | PermitLost(_)
            | ReleaseFailed { .. }
            | KeyLocked(_) => self.count_error(what, error),
            error => panic!("{what}: {error:?}"),
        }
    }

    fn count_error(&self, what: &str, error: &LockError) {
        let mut what = format!("{what} failed");
        if self.campaign == Campaign::Failover && !error.is_unavailable() {
            let why: String = error.to_string().chars().take(70).collect();
            what = format!("{what}: {}", why.replace(['\t', '\n'], " "));
        }
        self.count(&what);
        thread::sleep(Duration::from_millis(5));
    }

    /// Records a token that was drawn between `since` and now.
    fn note_token(&self, name: &str, since: i64, token: i64) {
        self.recorder
            .write(&format!("token\t{name}\t{since}\t{}\t{token}", now()));
    }

    /// Records that the commit of a key of `Once` was acknowledged.
    fn note_commit(&self, key: i64) {
        self.recorder.write(&format!("once\t{key}\t{}", now()));
    }

    /// Holds a permit for a random time, or until the permit is lost.
    fn hold(&self, name: &str, token: i64, milliseconds: u64, is_lost: &(dyn Fn() -> bool + Sync)) {
        if is_lost() {
            // The reply to the claim took longer than the timeout.
            return;
        }
        let _holding = Holding::new(self, name, token, "", is_lost);
        let end = Instant::now() + Duration::from_millis(fastrand::u64(0..milliseconds));
        while Instant::now() < end && !is_lost() && !self.is_over() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn note_end(&self, id: u64, outcome: &str) {
        self.recorder
            .write(&format!("leave\t{id}\t{}\t{outcome}", now()));
    }

    fn note_grant(&self, name: &str, at: DateTime<Utc>) {
        self.recorder
            .write(&format!("grant\t{name}\t{}", at.timestamp_micros()));
    }
}

/// The same work over each pool. `$wait` gets the result of an operation; in the asynchronous half
/// it also drops some futures.
macro_rules! half {
    ($name:ident, $($handles:ident)::*, $wait:ident, $half:ident) => {
        mod $name {
            use super::*;
            use $($handles)::*::{AdvisoryLock, PgPool, RateLimit, Semaphore, Throttle};

            static SESSION: AdvisoryLock = AdvisoryLock::named("session");
            static SHARED: AdvisoryLock = AdvisoryLock::named("session").shared();
            static SLOT: Semaphore = Semaphore::named("slots", SLOTS, TIMEOUT);
            static KEPT: Semaphore = Semaphore::named("kept", 1, TIMEOUT).keep_alive();
            static THROTTLE: Throttle = Throttle::named("throttle", EVERY);
            static LIMIT: RateLimit = RateLimit::named("limit", QUOTA).durable();

            pub(super) fn run(url: &str, worker: &Worker) -> Result<(), Box<dyn Error>> {
                let pool: PgPool = pools::$name(url, worker.campaign.connection_timeout());
                let all: [(&str, fn(&PgPool, &Worker)); 12] = [
                    ("lock", lock), ("waiting lock", waiting_lock), ("booking", $half::book),
                    ("slot", slot), ("kept", kept), ("throttle", throttle), ("limit", limit),
                    ("schedule", $half::run_ticks), ("leader", $half::lead), ("exhausted pool", $half::exhaust),
                    ("once", $half::once), ("probe", probe),
                ];
                let jobs = match worker.campaign {
                    Campaign::All => all[..10].to_vec(),
                    Campaign::Leaders => all[8..10].to_vec(),
                    Campaign::Failover => all.into_iter().filter(|job| job.0 != "exhausted pool").collect(),
                    Campaign::Schedules => vec![all[7]; 50],
                };
                thread::scope(|scope| {
                    for (number, (name, job)) in jobs.into_iter().enumerate() {
                        let (pool, worker) = (&pool, Worker { job: number, ..worker.clone() });
                        scope.spawn(move || {
                            fastrand::seed(worker.seed.wrapping_add(number as u64));
                            while !worker.is_over() {
                                job(pool, &worker);
                            }
                            worker.count(name);
                        });
                    }
                    let _ = std::io::stdin().read(&mut [0]);
                    worker.is_over.store(true, Ordering::Relaxed);
                    worker.stop.stop();
                });
                $half::check_strength(&pool)
            }

            fn lock(pool: &PgPool, worker: &Worker) {
                let since = now();
                match $wait(SESSION.try_acquire(pool)) {
                    Some(Ok(Attempt::Acquired(guard))) => hold_and_release(guard, since, worker),
                    Some(Ok(Attempt::Busy)) | None => thread::sleep(Duration::from_millis(fastrand::u64(0..5))),
                    Some(Err(error)) => worker.note_error("lock", &error),
                }
                // Readers are not recorded: they only compete with the writer.
                if let Some(Ok(Attempt::Acquired(guard))) = $wait(SHARED.try_acquire(pool)) {
                    drop(guard);
                }
            }

            fn waiting_lock(pool: &PgPool, worker: &Worker) {
                let since = now();
                match $wait(SESSION.acquire_timeout(pool, Duration::from_millis(fastrand::u64(1..300)))) {
                    Some(Ok(Attempt::Acquired(guard))) => hold_and_release(guard, since, worker),
                    Some(Ok(Attempt::Busy)) | None => {}
                    Some(Err(error)) => worker.note_error("waiting lock", &error),
                }
            }

            /// Records the holding only after a confirmed release: any other holder may have lost
            /// the lock earlier, with its session.
            fn hold_and_release(mut guard: $($handles)::*::AdvisoryLockGuard, since: i64, worker: &Worker) {
                let from = now();
                if worker.campaign == Campaign::Failover {
                    match $wait(guard.fencing_token()) {
                        Some(Ok(token)) => worker.note_token("session", since, token),
                        Some(Err(error)) => return worker.note_error("token", &error),
                        None => {}
                    }
                }
                thread::sleep(Duration::from_millis(fastrand::u64(0..4)));
                let to = now();
                match fastrand::u8(..4) {
                    0 => drop(guard),
                    _ => match $wait(guard.release()) {
                        Some(Ok(())) => worker.recorder.write(&format!("lock\tsession\t{from}\t{to}")),
                        Some(Err(error)) => worker.note_error("release", &error),
                        None => {}
                    },
                }
            }

            fn slot(pool: &PgPool, worker: &Worker) {
                let since = now();
                match $wait(SLOT.acquire_timeout(pool, Duration::from_millis(fastrand::u64(1..300)))) {
                    Some(Ok(Admission::Admitted(permit))) => {
                        worker.note_token("slots", since, permit.fencing_token());
                        worker.hold("slots", permit.fencing_token(), 60, &|| permit.is_lost());
                        if fastrand::bool() {
                            if let Some(Err(error)) = $wait(permit.release()) {
                                worker.note_error("slot", &error);
                            }
                        }
                    }
                    Some(Ok(Admission::Full(_))) | None => {}
                    Some(Err(error)) => worker.note_error("slot", &error),
                }
            }

            fn kept(pool: &PgPool, worker: &Worker) {
                match $wait(KEPT.acquire_timeout(pool, Duration::from_millis(500))) {
                    Some(Ok(Admission::Admitted(permit))) if worker.campaign == Campaign::Failover => {
                        write_behind_fence(pool, worker, permit.fencing_token(), &|| permit.is_lost());
                    }
                    Some(Ok(Admission::Admitted(permit))) => {
                        worker.hold("kept", permit.fencing_token(), 3000, &|| permit.is_lost());
                    }
                    Some(Ok(Admission::Full(_))) | None => {}
                    Some(Err(error)) => worker.note_error("kept", &error),
                }
            }

            /// Writes until the permit is lost or given up, and once more, which the fence must
            /// refuse if there is a newer holder.
            fn write_behind_fence(pool: &PgPool, worker: &Worker, token: i64, is_lost: &(dyn Fn() -> bool + Sync)) {
                let holding = Holding::new(worker, "kept", token, "", is_lost);
                let end = Instant::now() + Duration::from_millis(fastrand::u64(0..3000));
                thread::scope(|scope| {
                    let writer = scope.spawn(|| while Instant::now() < end && !is_lost() && !worker.is_over() {
                        $half::pass(pool, worker, token);
                        thread::sleep(Duration::from_millis(20));
                    });
                    while !writer.is_finished() && !is_lost() {
                        thread::sleep(Duration::from_millis(1));
                    }
                    drop(holding);
                });
                $half::pass(pool, worker, token);
            }

            /// Records a round trip to the database.
            fn probe(pool: &PgPool, worker: &Worker) {
                static PROBE: Throttle = Throttle::named("probe", Duration::from_micros(1));
                let since = now();
                match $wait(PROBE.key(worker.seed).attempt(pool)) {
                    Some(Ok(_)) => worker.recorder.write(&format!("probe\t{since}\t{}", now())),
                    None => {}
                    Some(Err(error)) => worker.note_error("probe", &error),
                }
                thread::sleep(Duration::from_millis(20));
            }

            fn throttle(pool: &PgPool, worker: &Worker) {
                match $wait(THROTTLE.attempt(pool)) {
                    Some(Ok(Decision::Granted(granted))) => worker.note_grant("throttle", granted.granted_at),
                    Some(Ok(Decision::Denied(denied))) => thread::sleep(denied.retry_after.min(EVERY)),
                    None => {}
                    Some(Err(error)) => worker.note_error("throttle", &error),
                }
            }

            fn limit(pool: &PgPool, worker: &Worker) {
                match $wait(LIMIT.check(pool)) {
                    Some(Ok(Check::Allowed(spent))) => worker.note_grant("limit", spent.at()),
                    Some(Ok(Check::Limited(limited))) => thread::sleep(limited.retry_after.min(EVERY)),
                    None => {}
                    Some(Err(error)) => worker.note_error("limit", &error),
                }
            }
        }
    };
}

fn blocking<T>(reply: T) -> Option<T> {
    Some(reply)
}

/// Drops one future in eight at a random time.
fn asynchronous<T>(reply: impl Future<Output = T>) -> Option<T> {
    if fastrand::u8(..8) > 0 {
        return Some(workbench::block_on(reply));
    }
    let limit = Duration::from_micros(fastrand::u64(0..3000));
    workbench::block_on(async { tokio::time::timeout(limit, reply).await.ok() })
}

half!(r2d2, diesel_interlock, blocking, in_threads);
half!(deadpool, diesel_interlock::deadpool, asynchronous, in_tasks);
half!(bb8, diesel_interlock::bb8, asynchronous, in_tasks);

/// Something held. The drop records the end, also when a future is dropped before its end.
struct Holding<'a> {
    worker: &'a Worker,
    id: u64,
    is_lost: &'a (dyn Fn() -> bool + Sync),
    /// Unless it was lost.
    outcome: &'static str,
}

impl<'a> Holding<'a> {
    fn new(
        worker: &'a Worker,
        name: &str,
        token: i64,
        more: &str,
        is_lost: &'a (dyn Fn() -> bool + Sync),
    ) -> Self {
        let id = NUMBER.fetch_add(1, Ordering::Relaxed);
        let line = format!("enter\t{id}\t{name}\t{}\t{token}{more}", now());
        worker.recorder.write(&line);
        Self {
            worker,
            id,
            is_lost,
            outcome: "left",
        }
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        let outcome = if (self.is_lost)() {
            "lost"
        } else {
            self.outcome
        };
        self.worker.note_end(self.id, outcome);
    }
}

fn booking() -> (String, String) {
    let (server, round) = (fastrand::u8(..3), now() / 50_000);
    let exists = format!("SELECT FROM booking WHERE server = {server} AND round = {round}");
    (
        format!("server {server}"),
        format!("INSERT INTO booking SELECT {server}, {round} WHERE NOT EXISTS ({exists})"),
    )
}

/// The operations that take closures, in the blocking half.
mod in_threads {
    use diesel::Connection;
    use diesel::connection::SimpleConnection;
    use diesel_interlock::{AdvisoryLock, Done, Fence, Leader, LockKey, Once, PgPool};

    use super::*;

    pub(super) fn book(pool: &PgPool, worker: &Worker) {
        let (server, insert) = booking();
        let Ok(mut conn) = pool.get() else { return };
        let lock = AdvisoryLock::new(LockKey::from(server));
        let booked: Result<(), LockError> =
            lock.transaction(&mut conn, |conn| Ok(conn.batch_execute(&insert)?));
        if let Err(error) = booked {
            worker.note_error("booking", &error);
        }
    }

    pub(super) fn once(pool: &PgPool, worker: &Worker) {
        let Ok(mut conn) = pool.get() else { return };
        let key = now() / KEY_EVERY;
        let once = Once::named("once").key(key);
        let done: Result<Done, LockError> = once.run(&mut conn, |conn| {
            conn.batch_execute(&format!("INSERT INTO work VALUES ({key})"))?;
            Ok(Vec::new())
        });
        match done {
            Ok(done) if done.is_first() => worker.note_commit(key),
            Ok(_) => {}
            Err(error) => worker.note_error("once", &error),
        }
        drop(conn);
        thread::sleep(Duration::from_millis(fastrand::u64(0..30)));
    }

    pub(super) fn pass(pool: &PgPool, worker: &Worker, token: i64) {
        static FENCE: Fence = Fence::named("fence");
        let Ok(mut conn) = pool.get() else { return };
        let passed: Result<(), LockError> = conn.transaction(|conn| {
            FENCE.pass(conn, token)?;
            Ok(conn.batch_execute(&format!("INSERT INTO passed (token) VALUES ({token})"))?)
        });
        if let Err(error) = passed {
            worker.note_error("fence", &error);
        }
    }

    pub(super) fn lead(pool: &PgPool, worker: &Worker) {
        let leader = Leader::named("leader", worker.campaign.timeout());
        let led = leader.lead(pool, &worker.stop, |term| {
            let is_lost = || !term.is_leader() && !worker.stop.is_stopped();
            let _holding = Holding::new(worker, "leader", term.fencing_token(), "", &is_lost);
            let length = worker.campaign.timeout().mul_f64(fastrand::f64() * 3.0);
            let end = Instant::now() + length;
            while term.is_leader() && Instant::now() < end {
                thread::sleep(Duration::from_millis(1));
            }
        });
        led.expect("a loop survives any outage");
    }

    pub(super) fn run_ticks(pool: &PgPool, worker: &Worker) {
        let schedule = worker.schedule::<PgPool>();
        let name = format!("schedule {}", worker.job);
        let ran = schedule.run(pool, &worker.stop, worker.ticks(false), |tick| {
            let more = format!("\t{}\t{}", tick.at().timestamp_micros(), tick.attempt());
            let is_lost = || tick.is_lost();
            let mut holding = Holding::new(worker, &name, tick.fencing_token(), &more, &is_lost);
            if worker.triggers() {
                worker.note_trigger(schedule.trigger(pool));
            }
            let hangs = worker.hangs();
            let end = Instant::now() + Duration::from_millis(fastrand::u64(0..50));
            while !tick.is_lost() && (hangs || Instant::now() < end) {
                thread::sleep(Duration::from_millis(1));
            }
            holding.outcome = if worker.fails() { "failed" } else { "done" };
            if holding.outcome == "failed" {
                Err("no luck")
            } else {
                Ok(())
            }
        });
        ran.expect("a loop survives any outage");
    }

    /// Nobody else gets a connection, for longer than a timeout, sometimes.
    pub(super) fn exhaust(pool: &PgPool, worker: &Worker) {
        thread::sleep(Duration::from_millis(fastrand::u64(0..10_000)));
        let _all: Vec<_> = (0..POOL).map_while(|_| pool.get().ok()).collect();
        thread::sleep(worker.campaign.timeout().mul_f64(fastrand::f64() * 1.3));
    }

    pub(super) fn check_strength(pool: &PgPool) -> Result<(), Box<dyn Error>> {
        let mut all: Vec<_> = (0..POOL).map(|_| pool.get()).collect::<Result<_, _>>()?;
        Ok(all
            .iter_mut()
            .try_for_each(|conn| conn.batch_execute("SELECT 1"))?)
    }
}

/// The operations that take closures, in the asynchronous half.
mod in_tasks {
    use diesel_async::{AsyncConnection, SimpleAsyncConnection};
    use diesel_interlock::advisory::AdvisoryLock;
    use diesel_interlock::fence::Fence;
    use diesel_interlock::leader::Leader;
    use diesel_interlock::once::{Done, Once};
    use diesel_interlock::{Async, LockKey, Pool};
    use tokio::time::{sleep, timeout};

    use super::*;

    pub(super) fn book<P: Pool<Mode = Async>>(pool: &P, worker: &Worker) {
        let (server, insert) = booking();
        let lock = AdvisoryLock::<P>::new(LockKey::from(server));
        let booked = asynchronous(async {
            let mut conn = pool.check_out(None).await?;
            lock.transaction(&mut conn, async |conn| {
                Ok::<_, LockError>(conn.batch_execute(&insert).await?)
            })
            .await
        });
        if let Some(Err(error)) = booked {
            worker.note_error("booking", &error);
        }
    }

    pub(super) fn once<P: Pool<Mode = Async>>(pool: &P, worker: &Worker) {
        let key = now() / KEY_EVERY;
        let once = Once::<P>::named("once").key(key);
        let done: Option<Result<Done, LockError>> = asynchronous(async {
            let mut conn = pool.check_out(None).await?;
            once.run(&mut conn, async |conn| {
                conn.batch_execute(&format!("INSERT INTO work VALUES ({key})"))
                    .await?;
                Ok(Vec::new())
            })
            .await
        });
        match done {
            Some(Ok(done)) if done.is_first() => worker.note_commit(key),
            Some(Err(error)) => worker.note_error("once", &error),
            _ => {}
        }
        thread::sleep(Duration::from_millis(fastrand::u64(0..30)));
    }

    pub(super) fn pass<P: Pool<Mode = Async>>(pool: &P, worker: &Worker, token: i64) {
        let fence = &Fence::<P>::named("fence");
        let passed: Result<(), LockError> = workbench::block_on(async {
            let mut conn = pool.check_out(None).await?;
            conn.transaction(async |conn| {
                fence.pass(conn, token).await?;
                let insert = format!("INSERT INTO passed (token) VALUES ({token})");
                Ok(conn.batch_execute(&insert).await?)
            })
            .await
        });
        if let Err(error) = passed {
            worker.note_error("fence", &error);
        }
    }

    pub(super) fn lead<P: Pool<Mode = Async>>(pool: &P, worker: &Worker) {
        let leader = Leader::<P>::named("leader", worker.campaign.timeout());
        let lead = leader.lead(pool, |term| async move {
            let is_lost = || !term.is_leader();
            let _holding = Holding::new(worker, "leader", term.fencing_token(), "", &is_lost);
            let length = worker.campaign.timeout().mul_f64(fastrand::f64() * 3.0);
            let end = Instant::now() + length;
            while term.is_leader() && Instant::now() < end {
                sleep(Duration::from_millis(1)).await;
            }
        });
        let limit = worker.campaign.timeout().mul_f64(fastrand::f64() * 4.0);
        if let Ok(Err(error)) = workbench::block_on(async { timeout(limit, lead).await }) {
            panic!("a loop survives any outage: {error}");
        }
    }

    pub(super) fn run_ticks<P: Pool<Mode = Async>>(pool: &P, worker: &Worker) {
        let schedule = &worker.schedule::<P>();
        let name = &format!("schedule {}", worker.job);
        let run = schedule.run(pool, worker.ticks(true), |tick| async move {
            let more = format!("\t{}\t{}", tick.at().timestamp_micros(), tick.attempt());
            let is_lost = || tick.is_lost();
            let mut holding = Holding::new(worker, name, tick.fencing_token(), &more, &is_lost);
            if worker.triggers() {
                worker.note_trigger(schedule.trigger(pool).await);
            }
            if worker.hangs() {
                std::future::pending::<()>().await;
            }
            sleep(Duration::from_millis(fastrand::u64(0..50))).await;
            holding.outcome = if worker.fails() { "failed" } else { "done" };
            if holding.outcome == "failed" {
                Err("no luck")
            } else {
                Ok(())
            }
        });
        let limit = worker.campaign.timeout().mul_f64(fastrand::f64() * 4.0);
        if let Ok(Err(error)) = workbench::block_on(async { timeout(limit, run).await }) {
            panic!("a loop survives any outage: {error}");
        }
    }

    /// Nobody else gets a connection, for longer than a timeout, sometimes.
    pub(super) fn exhaust<P: Pool<Mode = Async>>(pool: &P, worker: &Worker) {
        workbench::block_on(async {
            sleep(Duration::from_millis(fastrand::u64(0..10_000))).await;
            let mut all = Vec::new();
            for _ in 0..POOL {
                all.push(pool.check_out(None).await);
            }
            sleep(worker.campaign.timeout().mul_f64(fastrand::f64() * 1.3)).await;
        });
    }

    pub(super) fn check_strength<P: Pool<Mode = Async>>(pool: &P) -> Result<(), Box<dyn Error>> {
        workbench::block_on(async {
            let mut all = Vec::new();
            for _ in 0..POOL {
                all.push(pool.check_out(None).await?);
            }
            for conn in &mut all {
                conn.batch_execute("SELECT 1").await?;
            }
            Ok(())
        })
    }
}

mod pools {
    use diesel::r2d2::{ConnectionManager, Pool};
    use diesel_async::AsyncPgConnection;
    use diesel_async::pooled_connection::AsyncDieselConnectionManager;

    use super::{Duration, POOL};

    pub(super) fn r2d2(url: &str, connection_timeout: Duration) -> diesel_interlock::PgPool {
        Pool::builder()
            .max_size(POOL)
            .min_idle(Some(0))
            .connection_timeout(connection_timeout)
            .build_unchecked(ConnectionManager::new(url))
    }

    pub(super) fn deadpool(
        url: &str,
        connection_timeout: Duration,
    ) -> diesel_interlock::deadpool::PgPool {
        let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
        diesel_interlock::deadpool::PgPool::builder(manager)
            .max_size(POOL as usize)
            .wait_timeout(Some(connection_timeout))
            .create_timeout(Some(connection_timeout))
            .recycle_timeout(Some(connection_timeout))
            .runtime(deadpool::Runtime::Tokio1)
            .build()
            .expect("the settings of the pool are complete")
    }

    pub(super) fn bb8(url: &str, connection_timeout: Duration) -> diesel_interlock::bb8::PgPool {
        let _holding = workbench::runtime().enter();
        let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
        diesel_interlock::bb8::PgPool::builder()
            .max_size(POOL)
            .connection_timeout(connection_timeout)
            .build_unchecked(manager)
    }
}
