//! Functions of the application's own that have the names of PostgreSQL's hinder nothing.

use std::time::Duration;

use diesel_interlock::Quota;

use crate::half::*;
use crate::support::{installed, run};

const HOUR: Duration = Duration::from_secs(3600);

static REBUILD: Throttle = Throttle::named("rebuild", HOUR);
static API: RateLimit = RateLimit::named("api", Quota::per_day(1));
static ONE: Semaphore = Semaphore::named("one", 1, HOUR);

#[test]
fn an_own_clock_in_the_search_path_hinders_nothing() {
    let database = installed();
    let own = format!(
        "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '2001-01-01'::timestamptz $$;
         CREATE FUNCTION public.count(integer) RETURNS bigint LANGUAGE sql AS $$ SELECT 0::bigint $$;
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
}
