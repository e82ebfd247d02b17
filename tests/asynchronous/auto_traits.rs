//! The futures of all operations can be spawned. The compiler checks this, and the test sends
//! nothing.

use std::time::Duration;

use diesel_async::AsyncPgConnection;

use crate::half::{
    AdvisoryLock, AdvisoryLockGuard, Attempt, Error, Fence, Leader, Once, Permit, PgPool, Quota,
    RateLimit, Schedule, Semaphore, Throttle, check_exclusion, drain, migrations, schedule,
};

fn is_spawned<F: Future + Send>(_: F) {}

fn locks(lock: &AdvisoryLock, pool: &PgPool, conn: &mut AsyncPgConnection) {
    const SECOND: Duration = Duration::from_secs(1);
    is_spawned(lock.try_acquire(pool));
    is_spawned(lock.acquire(pool));
    is_spawned(lock.acquire_timeout(pool, SECOND));
    is_spawned(lock.with(pool, async |_| Ok::<_, Error>(())));
    is_spawned(lock.with_on(conn, async |_| Ok::<_, Error>(())));
    is_spawned(lock.try_with_on(conn, async |_| Ok::<_, Error>(())));
    is_spawned(lock.try_acquire_xact(conn));
    is_spawned(lock.acquire_xact(conn));
    is_spawned(lock.acquire_xact_timeout(conn, SECOND));
    is_spawned(lock.transaction(conn, async |_| Ok::<_, Error>(())));
}

fn guards(mut guard: AdvisoryLockGuard, attempt: Attempt<AdvisoryLockGuard>, permit: Permit) {
    is_spawned(guard.is_held());
    is_spawned(guard.fencing_token());
    is_spawned(guard.release());
    is_spawned(attempt.run(async |_| Ok::<_, Error>(())));
    is_spawned(permit.wait_for_loss(Duration::from_secs(1)));
    is_spawned(permit.lost());
    is_spawned(permit.renew());
    is_spawned(permit.run(async |_| Ok::<_, Error>(())));
}

fn rows(pool: &PgPool, conn: &mut AsyncPgConnection) {
    const SECOND: Duration = Duration::from_secs(1);
    let semaphore = Semaphore::named("a", 1, SECOND);
    is_spawned(semaphore.try_acquire(pool));
    is_spawned(semaphore.acquire_timeout(pool, SECOND));
    is_spawned(semaphore.with(pool, async |_| Ok::<_, Error>(())));
    is_spawned(semaphore.complete(pool, 1));
    let throttle = Throttle::named("a", SECOND);
    is_spawned(throttle.attempt(pool));
    is_spawned(throttle.attempt_on(conn));
    is_spawned(throttle.run(pool, async || Ok::<_, Error>(())));
    let limit = RateLimit::named("a", Quota::per_second(1));
    is_spawned(limit.check(pool));
    is_spawned(limit.check_on(conn));
    is_spawned(limit.acquire_timeout(pool, SECOND));
    is_spawned(RateLimit::check_all(&[&limit], pool));
    is_spawned(limit.local(pool.clone(), 1).check("a"));
    is_spawned(Once::named("a").run(conn, async |_| Ok::<_, Error>("")));
    is_spawned(Once::named("a").try_run(conn, async |_| Ok::<_, Error>("")));
    is_spawned(Fence::named("a").pass(conn, 1));
    is_spawned(Leader::named("a", SECOND).lead(pool, |_| async {}));
    is_spawned(Leader::named("a", SECOND).current(pool));
    let (report, work) = (Schedule::named("a"), |_| async { Ok::<_, Error>(()) });
    is_spawned(report.run_due(pool, schedule::every(SECOND), work));
    is_spawned(report.run(pool, schedule::every(SECOND), work));
    is_spawned(report.pause(pool));
    is_spawned(migrations::install(pool));
    is_spawned(check_exclusion(pool));
    is_spawned(drain(SECOND));
}

#[test]
fn the_futures_of_operations_can_be_spawned() {
    // The functions above compile.
    let _: fn(&AdvisoryLock, &PgPool, &mut AsyncPgConnection) = locks;
    let _: fn(AdvisoryLockGuard, Attempt<AdvisoryLockGuard>, Permit) = guards;
    let _: fn(&PgPool, &mut AsyncPgConnection) = rows;
}
