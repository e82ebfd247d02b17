//! Functions, types and relations in `public` that have the names of PostgreSQL's own are not used.

use std::time::Duration;

use diesel_interlock::Quota;
use workbench::Database;

use super::throttles::{Resource, declared};
use crate::half::schedule::every;
use crate::half::*;
use crate::support::{foreign_holder, number, once_at_least, run};

const HOUR: Duration = Duration::from_secs(3600);

static REBUILD: Throttle = Throttle::named("rebuild", HOUR);
static API: RateLimit = RateLimit::named("api", Quota::per_day(1));
static ONE: Semaphore = Semaphore::named("one", 1, HOUR);

#[test]
fn functions_and_types_of_the_application_in_the_search_path_are_not_used() {
    let (database, _) = declared();
    let own = format!(
        "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '2001-01-01'::timestamptz $$;
         CREATE FUNCTION public.count(integer) RETURNS bigint LANGUAGE sql AS $$ SELECT 0::bigint $$;
         CREATE DOMAIN public.text AS pg_catalog.text CHECK (false);
         ALTER DATABASE {} SET search_path = public, pg_catalog",
        database.name()
    );
    run(&mut database.connect(), &own);
    let pool = pool(&database, 1);
    for is_first in [true, false] {
        assert_eq!(wait(REBUILD.attempt(&pool)).unwrap().is_granted(), is_first);
        assert_eq!(wait(API.check(&pool)).unwrap().is_allowed(), is_first);
    }
    let permit = wait(ONE.try_acquire(&pool)).unwrap().admitted().unwrap();
    assert!(wait(ONE.try_acquire(&pool)).unwrap().is_full());
    wait(permit.release()).unwrap();
    let import = Throttle::of(Resource::Import);
    assert!(wait(import.attempt(&pool)).unwrap().is_granted());
    assert!(!wait(import.attempt(&pool)).unwrap().is_granted());
    // A busy lock, in a session and in a transaction.
    let lock = AdvisoryLock::named("busy");
    let holder = foreign_holder(&database, lock.lock_key());
    let moment = Duration::from_secs(1);
    assert_waits_in_vain(&lock, &pool, moment);
    on_one(&pool, |conn| {
        begin(conn);
        let waited = wait(lock.acquire_xact_timeout(conn, moment)).unwrap();
        assert!(!waited.is_acquired());
        end(conn);
    });
    drop(holder);
}

/// There is a trap with the name of each of PostgreSQL's functions, types and relations.
/// `operators.rs` has the traps for operators. It does not put `public` before `pg_catalog`,
/// because there operators are the affair of the caller.
#[test]
fn no_function_and_no_type_is_looked_up_by_the_search_path() {
    static LEADS: Leader = Leader::named("leads", HOUR);
    static REPORT: Schedule = Schedule::named("report").after_crash(HOUR, 3);

    let (database, pool) = declared();
    let holder = foreign_holder(&database, AdvisoryLock::named("busy").lock_key());
    drop(pool);
    database.set_traps(false);
    let pool = pool_of_two(&database);
    for is_first in [true, false] {
        assert_eq!(wait(REBUILD.attempt(&pool)).unwrap().is_granted(), is_first);
        let key = REBUILD.key("key");
        assert_eq!(wait(key.attempt(&pool)).unwrap().is_granted(), is_first);
        let import = Throttle::of(Resource::Import);
        assert_eq!(wait(import.attempt(&pool)).unwrap().is_granted(), is_first);
        let key = Throttle::of(Resource::Import).key("key");
        assert_eq!(wait(key.attempt(&pool)).unwrap().is_granted(), is_first);
    }
    let synced = wait(Throttle::sync::<Resource>(&pool)).unwrap();
    assert!(synced.added.is_empty());
    wait(prune::throttles(&pool)).unwrap();
    assert!(wait(API.check(&pool)).unwrap().is_allowed());
    assert!(!wait(API.check(&pool)).unwrap().is_allowed());
    wait(API.reset(&pool)).unwrap();
    wait(prune::rate_limits(&pool)).unwrap();
    let permit = wait(ONE.try_acquire(&pool)).unwrap().admitted().unwrap();
    assert!(wait(ONE.try_acquire(&pool)).unwrap().is_full());
    wait(permit.release()).unwrap();
    wait(prune::requests(&pool, HOUR)).unwrap();
    assert!(wait(LEADS.current(&pool)).unwrap().is_none());
    on_one(&pool, |conn| {
        begin(conn);
        wait(Fence::named("fence").pass(conn, 1)).unwrap();
        end(conn);
    });
    for attempts in 0..2 {
        let looked = REPORT.run_due(&pool, every(HOUR), work!(|_tick| { Ok::<_, Error>(()) }));
        let _ = wait(looked).unwrap();
        let conn = &mut database.connect();
        assert_eq!(
            number(conn, "(SELECT attempt FROM resource_control.schedule)"),
            attempts
        );
        run(
            conn,
            "UPDATE resource_control.schedule SET counted_from = counted_from - interval '2 hours', next_at = next_at - interval '2 hours'",
        );
    }
    assert!(wait(REPORT.pause(&pool)).unwrap());
    assert!(wait(REPORT.resume(&pool)).unwrap());
    // One lock and several: acquired, examined, awaited and released.
    let moment = Duration::from_secs(1);
    let (free, busy) = (AdvisoryLock::named("free"), AdvisoryLock::named("busy"));
    let mut guard = wait(free.acquire(&pool)).unwrap();
    assert!(wait(guard.is_held()).unwrap());
    wait(guard.fencing_token()).unwrap();
    wait(guard.release()).unwrap();
    assert_waits_in_vain(&busy, &pool, moment);
    let both = AdvisoryLock::all([&free, &free.key(1)]);
    let mut guard = wait(both.acquire(&pool)).unwrap();
    wait(guard.fencing_token()).unwrap();
    wait(guard.release()).unwrap();
    let one_busy = AdvisoryLock::all([&free, &busy]);
    assert_waits_in_vain(&one_busy, &pool, moment);
    on_one(&pool, |conn| {
        begin(conn);
        assert!(wait(free.try_acquire_xact(conn)).unwrap().is_acquired());
        assert!(
            !wait(busy.acquire_xact_timeout(conn, moment))
                .unwrap()
                .is_acquired()
        );
        end(conn);
    });
    wait(check_exclusion(&pool)).unwrap();
    wait(migrations::install(&pool)).unwrap();
    assert_eq!(database.sprung_traps(), 0);
    drop(holder);
}

/// On a slow machine no try has a reply in time, so rounds are repeated.
#[track_caller]
fn assert_waits_in_vain(lock: &AdvisoryLock, pool: &PgPool, moment: Duration) {
    once_at_least("the lock is busy", || {
        match wait(lock.acquire_timeout(pool, moment)) {
            Ok(attempt) => {
                assert!(attempt.is_busy());
                true
            }
            Err(error) => {
                assert!(matches!(error, Error::TimedOut), "{error}");
                false
            }
        }
    });
}

/// The migrations, which create their own objects.
#[test]
fn an_installation_uses_no_object_of_another_role() {
    let database = Database::new();
    database.set_traps(true);
    wait(migrations::install(&pool(&database, 1))).unwrap();
    wait(migrations::check(&pool(&database, 1))).unwrap();
    assert_eq!(database.sprung_traps(), 0);
}

fn pool_of_two(database: &Database) -> PgPool {
    pool(database, 2)
}
