//! The helpers for an application's own tests.
#![cfg(feature = "testing")]

use std::time::Duration;

use diesel_interlock::schedule::RunDue;
use diesel_interlock::testing::{self, depose, expire, make_due, make_tick_due, use_up};
use workbench::Database;

use crate::assert_matches;
use crate::half::*;
use crate::support::{eventually, hourly, installed, number, run};

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_database_is_a_copy_of_the_template_and_goes_with_its_value() {
    let (server, template) = (Database::new(), Database::new());
    wait(migrations::install(&pool(&template, 1))).unwrap();
    run(
        &mut template.connect(),
        "CREATE TABLE users AS SELECT 7 AS id",
    );
    end_all(&mut server.connect(), &template);
    let maintenance = pool(&server, 2);
    let copies = [(); 2].map(|()| {
        wait(testing::Database::from_template(
            &maintenance,
            template.name(),
        ))
        .unwrap()
    });
    for copy in &copies {
        let pool = make_pool(&copy.url(&template.url()), 1, Duration::from_secs(20));
        let throttle = Throttle::named("t", HOUR);
        assert!(wait(throttle.attempt(&pool)).unwrap().is_granted());
    }
    let names = copies.each_ref().map(|copy| copy.name().to_owned());
    assert_ne!(names[0], names[1]);
    drop(copies);
    let look = &mut server.connect();
    eventually("they are gone, although pools were connected", || {
        number(
            look,
            &format!(
                "(SELECT count(*) FROM pg_database WHERE datname IN ('{}', '{}'))",
                names[0], names[1]
            ),
        ) == 0
    });
}

#[test]
fn a_copy_has_tokens_of_its_own_once_its_program_has_installed() {
    let (server, template) = (Database::new(), Database::new());
    let of_template = pool(&template, 1);
    wait(migrations::install(&of_template)).unwrap();
    let token_of = |pool: &PgPool| {
        let mut guard = wait(AdvisoryLock::named("t").acquire(pool)).unwrap();
        let token = wait(guard.fencing_token()).unwrap();
        wait(guard.release()).unwrap();
        token
    };
    let largest = token_of(&of_template);
    drop(of_template);
    end_all(&mut server.connect(), &template);
    let maintenance = pool(&server, 1);
    let copy = testing::Database::from_template(&maintenance, template.name());
    let copy = wait(copy).unwrap();
    let pool = make_pool(&copy.url(&template.url()), 1, Duration::from_secs(20));
    assert_matches!(
        wait(migrations::check(&pool)),
        Err(Error::CopiedSchema { .. })
    );
    wait(migrations::install(&pool)).unwrap();
    wait(migrations::check(&pool)).unwrap();
    assert!(token_of(&pool) > largest + (1 << 40));
}

/// Nobody may be connected to a template.
fn end_all(conn: &mut diesel::PgConnection, template: &Database) {
    eventually("nobody is connected", || {
        let name = template.name();
        number(
            conn,
            &format!(
                "(SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{name}')"
            ),
        ) == 0
    });
}

#[test]
fn what_a_killed_test_has_left_is_dropped_after_an_hour() {
    let server = Database::new();
    let conn = &mut server.connect();
    let names = [
        "interlock_copy_1000000000_0123456789abcdef",
        "interlock_copy_9999999999_0123456789abcdef",
    ];
    for name in names {
        run(conn, &format!("DROP DATABASE IF EXISTS {name}"));
        run(conn, &format!("CREATE DATABASE {name}"));
    }
    let maintenance = pool(&server, 1);
    let copy = testing::Database::from_template(&maintenance, "template0");
    let _copy = wait(copy).unwrap();
    let count = |conn: &mut _, name| {
        number(
            conn,
            &format!("(SELECT count(*) FROM pg_database WHERE datname = '{name}')"),
        )
    };
    assert_eq!(names.map(|name| count(conn, name)), [0, 1]);
    run(conn, &format!("DROP DATABASE {}", names[1]));
}

#[test]
fn urls_of_copies_keep_everything_but_the_database() {
    let server = Database::new();
    let maintenance = pool(&server, 1);
    let copy = testing::Database::from_template(&maintenance, "template0");
    let copy = wait(copy).unwrap();
    let name = copy.name();
    for (other, expected) in [
        (
            "postgres://me:pw@host:5433/app",
            format!("postgres://me:pw@host:5433/{name}"),
        ),
        ("postgres://host", format!("postgres://host/{name}")),
        (
            "postgres:///app?host=/run/pg",
            format!("postgres:///{name}?host=/run/pg"),
        ),
    ] {
        assert_eq!(copy.url(other), expected);
    }
}

#[test]
fn a_throttle_is_made_due() {
    throttled_resources! {
        enum Resource { Mail = "mail" every HOUR }
    }
    let database = installed();
    let pool = pool(&database, 2);
    let _ = wait(Throttle::sync::<Resource>(&pool)).unwrap();
    let throttles = [
        Throttle::named("t", HOUR),
        Throttle::named("t", HOUR).key(7),
        Throttle::named("mail", HOUR),
        Throttle::of(Resource::Mail),
        Throttle::of(Resource::Mail).key(7),
    ];
    let is_granted = |throttle: &Throttle| wait(throttle.attempt(&pool)).unwrap().is_granted();
    for throttle in &throttles {
        assert!(is_granted(throttle) && !is_granted(throttle));
    }
    for throttle in &throttles {
        wait(make_due(throttle, &pool)).unwrap();
        assert!(is_granted(throttle));
        assert!(
            throttles.iter().all(|throttle| !is_granted(throttle)),
            "the others are not due"
        );
    }
    // One that was never granted is due as it is.
    wait(make_due(&Throttle::named("other", HOUR), &pool)).unwrap();
}

#[test]
fn permits_expire() {
    let database = installed();
    let pool = pool(&database, 2);
    let geocoder = Semaphore::named("geocoder", 1, HOUR);
    let other = Semaphore::named("other", 1, HOUR);
    let permit = wait(geocoder.try_acquire(&pool))
        .unwrap()
        .admitted()
        .unwrap();
    let _other = wait(other.try_acquire(&pool)).unwrap();
    assert!(wait(geocoder.try_acquire(&pool)).unwrap().is_full());
    assert_eq!(wait(expire(&geocoder, &pool)).unwrap(), 1);
    let next = wait(geocoder.try_acquire(&pool)).unwrap();
    assert!(next.is_admitted());
    assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
    assert!(wait(other.try_acquire(&pool)).unwrap().is_full());
}

#[test]
fn a_limit_is_used_up() {
    let database = installed();
    let pool = pool(&database, 2);
    let api = RateLimit::named("api", Quota::per_day(24).burst(7));
    let used = api.key("used");
    for limit in [&used, &used] {
        wait(use_up(limit, &pool)).unwrap();
        assert!(wait(limit.check(&pool)).unwrap().is_limited());
    }
    assert!(wait(api.key("other").check(&pool)).unwrap().is_allowed());
}

#[test]
fn a_leader_is_deposed() {
    let database = installed();
    let pool = pool(&database, 2);
    let leader = Leader::named("dispatcher", HOUR);
    assert!(!wait(depose(&leader, &pool)).unwrap());
    let conn = &mut database.connect();
    run(
        conn,
        "SELECT resource_control.claim_service_request('leader dispatcher', 1, '1 h')",
    );
    assert!(wait(depose(&leader, &pool)).unwrap());
    assert_eq!(
        number(conn, "(SELECT count(*) FROM resource_control.leader)"),
        0
    );
}

#[test]
fn a_tick_is_made_due() {
    let database = installed();
    let pool = pool(&database, 2);
    let report = Schedule::named("report");
    assert!(!wait(make_tick_due(&report, &pool, HOUR)).unwrap());
    let look = || wait(report.run_due(&pool, hourly, work!(|_tick| Ok::<_, Error>(())))).unwrap();
    assert_matches!(look(), RunDue::Later(_));
    assert!(wait(make_tick_due(&report, &pool, HOUR)).unwrap());
    assert_eq!(look(), RunDue::Ran);
    assert_matches!(look(), RunDue::Later(_));
}
