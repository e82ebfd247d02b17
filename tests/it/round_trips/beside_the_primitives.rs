//! Tokens and fences, watching, the look for a pooler, the stored functions, and installing.

use std::time::Duration;

use diesel::data_types::PgInterval;

use super::{LOCK, takes};
use crate::half::prelude::*;
use crate::half::{
    Database, Error, Fence, RoundTrips, Sessions, functions, migrations, probe_sessions,
    silent_pool,
};
use crate::migrations::directory;
use crate::semaphores::database;
use crate::support::Expect;

#[test]
fn one_to_draw_a_token_and_one_to_pass_a_fence() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = &silent_pool(&proxy, 1);
    let mut token = 0;
    takes(3, &proxy, || {
        let mut guard = LOCK.try_acquire(pool).unwrap().expect_acquired();
        token = guard.fencing_token().unwrap();
        assert_eq!(guard.fencing_token().unwrap(), token, "it is drawn once");
    });
    let fenced = LOCK.clone().fenced();
    takes(2, &proxy, || {
        let mut guard = fenced.try_acquire(pool).unwrap().expect_acquired();
        assert!(guard.fencing_token().unwrap() > token);
    });
    let fence = Fence::named("ledger");
    pool.get()
        .unwrap()
        .transaction(|conn| {
            takes(1, &proxy, || fence.pass(conn, token).unwrap());
            takes(1, &proxy, || {
                assert!(matches!(
                    fence.pass(conn, token - 1),
                    Err(Error::Fenced { .. })
                ))
            });
            QueryResult::Ok(())
        })
        .unwrap();
}

#[test]
fn one_to_begin_to_watch() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = &silent_pool(&proxy, 1);
    let mut guard = LOCK.try_acquire(pool).unwrap().expect_acquired();
    // The only connection is the guard's, so that the questions that follow are not asked.
    takes(1, &proxy, || {
        drop(guard.watch(pool, Duration::from_secs(3600)).unwrap())
    });
}

#[test]
fn seven_to_detect_a_pooler_once_per_connection() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 2);
    let probe = || assert_eq!(probe_sessions(&pool).unwrap(), Sessions::Own);
    assert_eq!(proxy.count(probe), 7);
    assert_eq!(proxy.count(probe), 7);

    let lock = || {
        LOCK.try_acquire(&pool)
            .unwrap()
            .expect_acquired()
            .release()
            .unwrap()
    };
    // Whichever of the two connections it gets, both are known afterwards.
    lock();
    let both = (pool.get().unwrap(), pool.get().unwrap());
    drop(both);
    lock();
    lock();
    takes(2, &proxy, lock);
}

#[test]
fn one_for_each_stored_function() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let day = PgInterval::from_days(1);
    takes(1, &proxy, || {
        let pruned = diesel::select(functions::prune_service_requests(day, 10));
        assert_eq!(pruned.get_result::<i32>(conn).unwrap(), 0);
    });
    takes(1, &proxy, || {
        let pruned = diesel::select(functions::prune_throttled_keys(10));
        assert_eq!(pruned.get_result::<i32>(conn).unwrap(), 0);
    });
    takes(1, &proxy, || {
        let key = diesel::select(functions::lock_key("223 345"));
        assert_eq!(
            key.get_result::<i64>(conn).unwrap(),
            3_755_351_481_708_176_604
        );
    });
}

#[cfg(feature = "migrations")]
#[test]
fn an_installation_that_is_there_is_seen_in_two() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let install = || assert_eq!(migrations::install(conn).unwrap(), []);
    assert_eq!(proxy.count(install), 2);
}

#[cfg(feature = "migrations")]
#[test]
fn migrations_that_were_run_are_seen_in_two() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let source = directory(
        "seen",
        &[("2026-01-01-000000_users", "CREATE TABLE users (id int)")],
    );
    let mut run = || {
        migrations::run_pending(conn, source.migrations())
            .unwrap()
            .len()
    };
    assert_eq!(run(), 1);
    assert_eq!(proxy.count(|| assert_eq!(run(), 0)), 2);
}

/// Once per database, on a connection that has prepared the statements.
#[cfg(feature = "migrations")]
#[test]
fn seven_to_forget_the_files_and_27_to_uninstall_the_schema() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    let source = directory("forgotten", &[]);
    migrations::write_to(source.path()).unwrap();
    let written = migrations::run_pending(conn, source.migrations()).unwrap();
    assert_eq!(migrations::take_over(conn).unwrap(), written);
    migrations::uninstall(conn).unwrap();
    migrations::run_pending(conn, source.migrations()).unwrap();

    let mut counts = [0; 2];
    counts[0] = proxy.count(|| assert_eq!(migrations::take_over(conn).unwrap(), written));
    counts[1] =
        proxy.count(|| assert_eq!(migrations::uninstall(conn).unwrap().len(), written.len()));
    assert_eq!(counts, [7, 27]);
}
