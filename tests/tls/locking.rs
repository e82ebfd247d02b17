//! A session lock is taken and released.

use diesel::prelude::*;
use diesel_interlock::{AdvisoryLock, bb8, deadpool};
use workbench::{Endpoint, block_on};

use crate::{database, far_away, is};

/// Asserts that the session holds its lock, and is encrypted.
#[track_caller]
fn assert_holds(observer: &mut PgConnection, pid: i32) {
    let holds = "EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid =";
    assert!(is(observer, &format!("{holds} {pid})")));
    let ssl = "(SELECT ssl FROM pg_stat_ssl WHERE pid =";
    assert!(is(observer, &format!("{ssl} {pid})")));
}

/// Asserts that nobody holds a lock in the database.
#[track_caller]
fn assert_free(observer: &mut PgConnection) {
    let free = "NOT EXISTS (SELECT FROM pg_locks JOIN pg_database ON database = pg_database.oid
        WHERE locktype = 'advisory' AND datname = current_database())";
    assert!(is(observer, free));
}

fn take_and_release(server: &Endpoint, observer: &mut PgConnection) {
    let (lock, pool) = (AdvisoryLock::named("r2d2"), server.pool(2));
    let guard = lock.try_acquire(&pool).unwrap().acquired().unwrap();
    assert_holds(observer, guard.backend_pid());
    assert!(lock.try_acquire(&pool).unwrap().is_busy());
    guard.release().unwrap();
    assert_free(observer);

    block_on(async {
        let (lock, pool) = (
            deadpool::AdvisoryLock::named("deadpool"),
            server.deadpool(2),
        );
        let guard = lock.try_acquire(&pool).await.unwrap().acquired().unwrap();
        assert_holds(observer, guard.backend_pid());
        assert!(lock.try_acquire(&pool).await.unwrap().is_busy());
        guard.release().await.unwrap();
        assert_free(observer);

        let (lock, pool) = (bb8::AdvisoryLock::named("bb8"), server.bb8(2));
        let guard = lock.try_acquire(&pool).await.unwrap().acquired().unwrap();
        assert_holds(observer, guard.backend_pid());
        assert!(lock.try_acquire(&pool).await.unwrap().is_busy());
        guard.release().await.unwrap();
        assert_free(observer);
    });
}

#[test]
fn a_session_lock_is_taken_and_released_over_tls() {
    let database = database();
    take_and_release(database.tls(), &mut database.connect());
}

#[test]
fn a_session_lock_is_taken_and_released_over_a_slow_network_with_tls() {
    let database = database();
    let proxy = far_away(database.tls());
    take_and_release(&proxy, &mut database.connect());
    assert_eq!(proxy.connections(), 6);
}

#[test]
fn the_certificate_is_verified() {
    let database = database();
    let verified = Endpoint::new(&database.tls().url_with("sslmode", "verify-full"));
    take_and_release(&verified, &mut database.connect());
}
