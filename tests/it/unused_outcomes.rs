//! The compiler warns of an outcome that nobody looks at. Where it does not, the expectation is unfulfilled, which is an error
//! here.

#![deny(unfulfilled_lint_expectations)]

use std::time::Duration;

use crate::half::{
    AdvisoryLock, Database, Quota, RateLimit, Semaphore, Throttle, migrations, sync,
    throttled_resources,
};

throttled_resources! {
    enum Resource { Import = "import" every Duration::from_secs(60) }
}

#[test]
fn each_outcome_warns_if_it_is_not_used() {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    #[expect(unused_must_use)]
    sync::<Resource>(conn).unwrap();

    let lock = AdvisoryLock::named("nightly report");
    #[expect(unused_must_use)]
    lock.try_acquire_on(conn).unwrap();
    let semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
    #[expect(unused_must_use)]
    semaphore.claim_on(conn).unwrap();
    #[expect(unused_must_use)]
    Throttle::of(Resource::Import)
        .details("web-3")
        .attempt_on(conn)
        .unwrap();
    let limit = RateLimit::named("api", Quota::per_minute(100));
    #[expect(unused_must_use)]
    limit.check_on(conn).unwrap();
    #[expect(unused_must_use)]
    RateLimit::check_all_on(conn, &[&limit]).unwrap();
    #[expect(unused_must_use)]
    limit.reserve_on(conn, Duration::ZERO).unwrap();
}
