//! A throttle is granted at most once per interval.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use diesel_interlock::throttle::{Denied, Synced};
use workbench::Database;

use crate::assert_matches;
use crate::half::{
    Decision, Error, PgPool, Throttle, execute, migrations, on_one, pool, prune,
    throttled_resources, wait,
};
use crate::support::{HAS_WRITTEN_NOTHING, Observer, eventually, installed, run, text, truth};

const HOUR: Duration = Duration::from_secs(3600);

static REBUILD: Throttle = Throttle::named("rebuild", HOUR);

throttled_resources! {
    pub(crate) enum Resource {
        Newsletter = "newsletter" every HOUR,
        Import = "it's an import" every Duration::from_secs(60),
    }
}

pub(crate) fn declared() -> (Database, PgPool) {
    let database = installed();
    let pool = pool(&database, 2);
    let synced = wait(Throttle::sync::<Resource>(&pool)).unwrap();
    assert_eq!(synced.added, ["newsletter", "it's an import"]);
    (database, pool)
}

fn is_granted(throttle: &Throttle, pool: &PgPool) -> bool {
    wait(throttle.attempt(pool)).unwrap().is_granted()
}

fn denied(throttle: &Throttle, pool: &PgPool) -> Denied {
    wait(throttle.attempt(pool))
        .unwrap()
        .denied()
        .expect("the attempt is denied")
}

/// Moves the last grant of every throttle that many seconds into the past.
pub(crate) fn rewind(database: &Database, seconds: u32) {
    run(
        &mut database.connect(),
        &format!(
            "UPDATE resource_control.throttle SET last_granted = last_granted - interval '{seconds} s';
             UPDATE resource_control.throttled_resource SET last_locked = last_locked - interval '{seconds} s'"
        ),
    );
}

#[test]
fn a_throttle_is_granted_once_per_interval() {
    let database = installed();
    let pool = pool(&database, 1);
    let Decision::Granted(granted) = wait(REBUILD.attempt(&pool)).unwrap() else {
        panic!("the first attempt was denied")
    };
    assert_eq!(granted.due_in, HOUR);
    let refused = denied(&REBUILD, &pool);
    assert!(refused.retry_after > Duration::from_secs(3500) && refused.retry_after < HOUR);
    assert!((3500..=3600).contains(&refused.retry_after_secs()));
    assert_eq!(refused.last.unwrap().at, granted.granted_at);

    rewind(&database, 3540);
    assert!(denied(&REBUILD, &pool).retry_after <= Duration::from_secs(60));
    rewind(&database, 60);
    assert!(is_granted(&REBUILD, &pool));
    assert!(!is_granted(&REBUILD, &pool));
}

#[test]
fn each_key_is_a_throttle_of_its_own() {
    let database = installed();
    let pool = pool(&database, 1);
    for key in ["", "a", "b c", "b\\ c", "ü", "'"] {
        assert!(is_granted(&REBUILD.key(key), &pool), "{key}");
        assert!(!is_granted(&REBUILD.key(key), &pool), "{key}");
    }
    assert!(is_granted(
        &Throttle::named("another", HOUR).key("a"),
        &pool
    ));
}

#[test]
fn a_resource_is_granted_by_the_interval_of_the_database() {
    let (database, pool) = declared();
    let newsletter = Throttle::of(Resource::Newsletter).details("web-1");
    assert!(is_granted(&newsletter, &pool));
    assert_eq!(denied(&newsletter, &pool).last.unwrap().by, "web-1");
    run(
        &mut database.connect(),
        "UPDATE resource_control.throttled_resource SET throttle_interval = '1 microsecond'",
    );
    assert!(is_granted(&newsletter, &pool));
    assert!(
        is_granted(&Throttle::of(Resource::Import), &pool),
        "the other resource is granted, too"
    );
}

#[test]
fn keys_of_a_resource_are_no_named_throttles() {
    let (database, pool) = declared();
    let import = Throttle::of(Resource::Import);
    assert!(is_granted(&import.key(7), &pool));
    assert!(!is_granted(&import.key(7), &pool));
    assert!(is_granted(&import.key(8), &pool));
    assert!(is_granted(&import, &pool), "the resource without a key");
    assert!(is_granted(
        &Throttle::named("it's an import", HOUR).key(7),
        &pool
    ));
    rewind(&database, 60);
    assert!(is_granted(&import.key(7), &pool));
    run(
        &mut database.connect(),
        "UPDATE resource_control.throttled_resource SET throttle_interval = '1 day'",
    );
    rewind(&database, 23 * 3600);
    assert!(!is_granted(&import.key(7), &pool));
}

#[test]
fn a_denial_writes_nothing() {
    let (_database, pool) = declared();
    for throttle in [
        REBUILD.clone(),
        Throttle::of(Resource::Newsletter),
        Throttle::of(Resource::Import).key(1),
    ] {
        assert!(is_granted(&throttle, &pool));
        on_one(&pool, |conn| {
            wait(execute(conn, "BEGIN")).unwrap();
            assert!(wait(throttle.attempt_on(conn)).unwrap().is_denied());
            wait(execute(conn, HAS_WRITTEN_NOTHING)).unwrap();
            wait(execute(conn, "ROLLBACK")).unwrap();
        });
    }
}

#[test]
fn of_many_concurrent_attempts_one_is_granted() {
    let (database, _) = declared();
    for throttle in [
        REBUILD.key("new"),
        Throttle::of(Resource::Newsletter),
        Throttle::of(Resource::Import).key("new"),
    ] {
        for round in 0..3 {
            let barrier = Barrier::new(8);
            let granted = thread::scope(|scope| {
                let attempts: Vec<_> = (0..8)
                    .map(|_| {
                        scope.spawn(|| {
                            let pool = pool(&database, 1);
                            barrier.wait();
                            is_granted(&throttle, &pool)
                        })
                    })
                    .collect();
                attempts
                    .into_iter()
                    .map(|attempt| attempt.join().unwrap())
                    .filter(|it| *it)
                    .count()
            });
            assert_eq!(granted, 1, "round {round} of {throttle:?}");
            rewind(&database, 4000);
        }
    }
}

#[test]
fn an_attempt_is_denied_at_once_while_another_transaction_takes_the_throttle() {
    let (database, pool) = declared();
    for (throttle, sql) in [
        (
            Throttle::of(Resource::Newsletter),
            "UPDATE resource_control.throttled_resource SET last_locked = clock_timestamp(), last_locker_details = 'x'",
        ),
        (
            REBUILD.clone(),
            "UPDATE resource_control.throttle SET last_granted = clock_timestamp()",
        ),
    ] {
        assert!(is_granted(&throttle, &pool));
        rewind(&database, 4000);
        let taking = &mut database.connect();
        run(taking, &format!("BEGIN; {sql}"));
        let refused = denied(&throttle, &pool);
        assert_eq!(refused.last, None);
        assert!(refused.retry_after <= Duration::from_secs(1));
        run(taking, "ROLLBACK");
        assert!(
            is_granted(&throttle, &pool),
            "the throttle is due after a rollback"
        );
    }
}

#[test]
fn a_first_attempt_in_another_transaction_denies_at_once() {
    let database = installed();
    let (pool, other) = (pool(&database, 1), pool(&database, 1));
    let key = REBUILD.key("first");
    on_one(&other, |conn| {
        wait(execute(conn, "BEGIN")).unwrap();
        assert!(wait(key.attempt_on(conn)).unwrap().is_granted());
        assert_eq!(denied(&key, &pool).last, None);
        wait(execute(conn, "ROLLBACK")).unwrap();
    });
    assert!(is_granted(&key, &pool));
}

#[test]
fn an_attempt_on_a_connection_counts_when_its_transaction_commits() {
    let database = installed();
    let pool = pool(&database, 2);
    on_one(&pool, |conn| {
        wait(execute(conn, "BEGIN")).unwrap();
        assert!(wait(REBUILD.attempt_on(conn)).unwrap().is_granted());
        wait(execute(conn, "COMMIT")).unwrap();
    });
    assert!(!is_granted(&REBUILD, &pool));
}

#[test]
fn run_spends_the_interval_also_if_the_work_fails() {
    let database = installed();
    let pool = pool(&database, 1);
    let failed: Result<Decision<()>, Error> =
        wait(REBUILD.run(&pool, work!(|| Err(Error::TimedOut))));
    assert_matches!(failed, Err(Error::TimedOut));
    let denied = wait(REBUILD.run(&pool, work!(|| Ok::<_, Error>(7))));
    assert!(denied.unwrap().is_denied());
    rewind(&database, 3600);
    let ran = wait(REBUILD.run(&pool, work!(|| Ok::<_, Error>(7))));
    assert_eq!(ran.unwrap().granted(), Some(7));
}

#[test]
fn other_clients_share_the_resource() {
    let (database, pool) = declared();
    let conn = &mut database.connect();
    let attempt = "resource_control.lock_throttled_resource('newsletter', 'psql')";
    assert!(truth(conn, attempt));
    assert!(!truth(conn, attempt));
    assert_eq!(
        denied(&Throttle::of(Resource::Newsletter), &pool)
            .last
            .unwrap()
            .by,
        "psql"
    );
    rewind(&database, 3600);
    assert!(is_granted(&Throttle::of(Resource::Newsletter), &pool));
    assert!(!truth(conn, attempt));
}

/// The psql session of the article "Throttling with PostgreSQL", whose table this is.
#[test]
fn the_articles_session_has_the_articles_replies() {
    let database = installed();
    let (first, second) = (&mut database.connect(), &mut database.connect());
    run(
        first,
        "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'Expensive Cache Rebuild #1'",
    );
    run(
        first,
        "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) VALUES ('Expensive Cache Rebuild #1', '15 seconds')",
    );
    let lock = |details: &str| {
        format!(
            "resource_control.lock_throttled_resource('Expensive Cache Rebuild #1', '{details}')"
        )
    };
    assert!(truth(first, &lock("apphost 1 pid 1234")));
    assert!(!truth(first, &lock("apphost 1 pid 5435")));
    let details = "(SELECT last_locker_details FROM resource_control.throttled_resource)";
    assert_eq!(text(first, details), "apphost 1 pid 1234");
    rewind(&database, 16);
    run(first, "BEGIN");
    assert!(truth(first, &lock("apphost 2 pid 543")));
    assert!(!truth(second, &lock("concurrent caller")));
    run(first, "COMMIT");
    assert!(!truth(second, &lock("concurrent caller")));
    let never = "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) VALUES ('Expensive Cache Rebuild #1', '0')";
    assert!(diesel::connection::SimpleConnection::batch_execute(second, never).is_err());
}

#[test]
fn sync_inserts_new_resources_and_reports_intervals_that_differ() {
    let (database, pool) = declared();
    assert_eq!(
        wait(Throttle::sync::<Resource>(&pool)).unwrap(),
        Synced::default()
    );
    run(
        &mut database.connect(),
        "UPDATE resource_control.throttled_resource SET throttle_interval = '1 day' WHERE resource_id = 'newsletter'",
    );
    let different = wait(Throttle::sync::<Resource>(&pool)).unwrap().different;
    assert_eq!(different[0].label, "newsletter");
    assert_eq!(
        (different[0].declared, different[0].in_database),
        (HOUR, 24 * HOUR)
    );
    let changed = wait(Throttle::sync_intervals::<Resource>(&pool)).unwrap();
    assert_eq!(changed.different, different);
    assert_eq!(
        wait(Throttle::sync::<Resource>(&pool)).unwrap(),
        Synced::default()
    );
}

#[test]
fn many_instances_may_sync_at_once() {
    let database = installed();
    let barrier = Barrier::new(6);
    let added: usize = thread::scope(|scope| {
        let syncs: Vec<_> = (0..6)
            .map(|_| {
                scope.spawn(|| {
                    let pool = pool(&database, 1);
                    barrier.wait();
                    wait(Throttle::sync::<Resource>(&pool)).unwrap().added.len()
                })
            })
            .collect();
        syncs.into_iter().map(|sync| sync.join().unwrap()).sum()
    });
    assert_eq!(added, 2);
}

#[test]
fn a_resource_that_was_not_declared_is_an_error() {
    let database = installed();
    let pool = pool(&database, 1);
    for throttle in [
        Throttle::of(Resource::Newsletter),
        Throttle::of(Resource::Newsletter).key(1),
    ] {
        assert_matches!(
            wait(throttle.attempt(&pool)),
            Err(Error::NotDeclared("newsletter"))
        );
        run(
            &mut database.connect(),
            "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE IF NOT EXISTS 'newsletter'",
        );
        assert_matches!(
            wait(throttle.attempt(&pool)),
            Err(Error::NotDeclared("newsletter"))
        );
    }
}

#[test]
fn bad_input_is_refused_before_anything_is_sent() {
    let database = Database::new(); // without the schema
    let pool = pool(&database, 1);
    let long = "x".repeat(1001);
    for throttle in [
        Throttle::named("", HOUR),
        Throttle::named("nul \0", HOUR),
        Throttle::named("zero", Duration::ZERO),
        Throttle::named("nanosecond", Duration::from_nanos(1)),
        Throttle::named("for ever", Duration::MAX),
        REBUILD.key(&long),
        REBUILD.key("nul \0"),
        REBUILD.details(long.clone()),
        REBUILD.details("nul \0"),
    ] {
        assert_matches!(wait(throttle.attempt(&pool)), Err(Error::Input(_)));
    }
    assert_matches!(wait(REBUILD.attempt(&pool)), Err(Error::NotInstalled));
    wait(migrations::install(&pool)).unwrap();
    assert!(is_granted(
        &Throttle::named("short", Duration::from_micros(1)),
        &pool
    ));
    assert!(is_granted(
        &Throttle::named("long", Duration::from_secs(900 * 365 * 86_400)),
        &pool
    ));
}

#[test]
fn keys_that_have_long_been_due_are_pruned() {
    let database = installed();
    let pool = pool(&database, 1);
    for key in 0..10 {
        assert!(is_granted(&REBUILD.key(key), &pool));
    }
    rewind(&database, 3600);
    assert_eq!(wait(prune::throttles(&pool)).unwrap(), 0);
    assert!(is_granted(&REBUILD.key(0), &pool));
    rewind(&database, 3600);
    assert_eq!(wait(prune::throttles(&pool)).unwrap(), 9);
    assert!(is_granted(&REBUILD.key(1), &pool));
}

#[test]
fn a_throttle_works_at_every_isolation_level_and_in_every_time_zone() {
    for settings in [
        "default_transaction_isolation = 'repeatable read'",
        "default_transaction_isolation = serializable",
        "timezone = 'Europe/Berlin'",
        "search_path = ''",
        "intervalstyle = sql_standard",
    ] {
        let database = installed();
        let name = database.name();
        run(
            &mut database.connect(),
            &format!("ALTER DATABASE {name} SET {settings}"),
        );
        let barrier = Barrier::new(4);
        let granted = thread::scope(|scope| {
            let attempts: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let pool = pool(&database, 1);
                        barrier.wait();
                        (0..20).filter(|_| is_granted(&REBUILD, &pool)).count()
                    })
                })
                .collect();
            attempts
                .into_iter()
                .map(|attempt| attempt.join().unwrap())
                .sum::<usize>()
        });
        assert_eq!(granted, 1, "{settings}");
    }
}

/// Compares the times of all grants under contention, by the database's clock.
#[test]
fn grants_are_never_closer_than_the_interval() {
    let database = installed();
    let every = Duration::from_millis(20);
    let throttle = Throttle::named("spacing", every);
    let barrier = Barrier::new(6);
    let mut grants: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|_| {
                scope.spawn(|| {
                    let pool = pool(&database, 1);
                    barrier.wait();
                    let mut grants = Vec::new();
                    for _ in 0..300 {
                        if let Decision::Granted(granted) = wait(throttle.attempt(&pool)).unwrap() {
                            grants.push(granted.granted_at);
                        }
                    }
                    grants
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    grants.sort();
    assert!(grants.len() > 1);
    for pair in grants.windows(2) {
        assert!((pair[1] - pair[0]).to_std().unwrap() >= every);
    }
}

#[test]
fn a_transaction_that_was_left_open_on_a_pooled_connection_is_an_error() {
    if crate::half::IS_ASYNC {
        return; // diesel-async does not notice a transaction of plain SQL
    }
    let database = installed();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| wait(execute(conn, "BEGIN")).unwrap());
    assert_matches!(wait(REBUILD.attempt(&pool)), Err(Error::DirtyConnection));
    let mut observer = Observer::of(&database);
    eventually("the session has ended", || observer.in_transaction() == 0);
    assert!(is_granted(&REBUILD, &pool));
}
