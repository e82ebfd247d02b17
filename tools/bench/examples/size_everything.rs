//! A program with every primitive, and its operations that other programs use most.

use std::error::Error;
use std::thread;
use std::time::Duration;

use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::schedule::every;
use diesel_interlock::{
    AdvisoryLock, Fence, Leader, Once, Quota, RateLimit, Schedule, Semaphore, Stop, Throttle,
    drain, migrations, monitor, prune,
};

type Done = Result<(), diesel_interlock::Error>;

const MINUTE: Duration = Duration::from_secs(60);
static LOCK: AdvisoryLock = AdvisoryLock::named("lock");
static THROTTLE: Throttle = Throttle::named("throttle", MINUTE);
static LIMIT: RateLimit = RateLimit::named("limit", Quota::per_minute(100));
static SLOTS: Semaphore = Semaphore::named("slots", 4, MINUTE).keep_alive();
static ONCE: Once = Once::named("once");
static LEADER: Leader = Leader::named("leader", MINUTE);
static SCHEDULE: Schedule = Schedule::named("schedule");

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let pool = Pool::new(ConnectionManager::<PgConnection>::new(url))?;
    migrations::install(&pool)?;

    let mut guard = LOCK.acquire_timeout(&pool, MINUTE)?.acquired();
    if let Some(guard) = &mut guard {
        diesel::sql_query("SELECT 1").execute(guard.conn())?;
    }
    drop(guard);
    AdvisoryLock::all([&LOCK.key(1), &LOCK.key(2)]).with(&pool, |_| Done::Ok(()))?;
    LOCK.transaction(&mut *pool.get()?, |conn| {
        Fence::named("fence").pass(conn, 1)
    })?;
    let _ = THROTTLE.attempt(&pool)?;
    let _ = LIMIT.key("customer").check(&pool)?;
    let _ = LIMIT.acquire_timeout(&pool, MINUTE)?;
    let _ = LIMIT.local(pool.clone(), 10).check("customer")?;
    SLOTS.with(&pool, |_| Done::Ok(()))?;
    SLOTS.acquire(&pool)?.release()?;
    let done = ONCE.run(&mut *pool.get()?, |_| {
        Ok::<_, diesel_interlock::Error>("done")
    })?;
    println!("{}", done.is_first());

    let stop = Stop::new();
    thread::scope(|scope| {
        let leader = scope.spawn(|| LEADER.lead(&pool, &stop, |term| while term.pause(MINUTE) {}));
        let schedule = scope.spawn(|| SCHEDULE.run(&pool, &stop, every(MINUTE), |_| Done::Ok(())));
        thread::sleep(MINUTE);
        stop.stop();
        leader.join().map_err(|_| "the leader has panicked")??;
        schedule.join().map_err(|_| "the schedule has panicked")??;
        Ok::<_, Box<dyn Error>>(())
    })?;
    let locks: Vec<monitor::Lock> = monitor::Lock::all().load(&mut pool.get()?)?;
    println!("{} locks", locks.len());
    prune::requests(&pool, MINUTE)?;
    println!("{}", drain(MINUTE));
    Ok(())
}
