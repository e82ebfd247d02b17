//! Functions of the application's own that have the names of PostgreSQL's hinder nothing.

use std::time::Duration;

use diesel_interlock::Quota;

use super::throttles::{Resource, declared};
use crate::half::*;
use crate::support::{foreign_holder, run};

const HOUR: Duration = Duration::from_secs(3600);

static REBUILD: Throttle = Throttle::named("rebuild", HOUR);
static API: RateLimit = RateLimit::named("api", Quota::per_day(1));
static ONE: Semaphore = Semaphore::named("one", 1, HOUR);

#[test]
fn own_functions_and_types_in_the_search_path_hinder_nothing() {
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
    // Busy, in a session and in a transaction.
    let lock = AdvisoryLock::named("busy");
    let holder = foreign_holder(&database, lock.lock_key());
    let moment = Duration::from_secs(1);
    assert!(wait(lock.acquire_timeout(&pool, moment)).unwrap().is_busy());
    on_one(&pool, |conn| {
        begin(conn);
        let waited = wait(lock.acquire_xact_timeout(conn, moment)).unwrap();
        assert!(!waited.is_acquired());
        end(conn);
    });
    drop(holder);
}
