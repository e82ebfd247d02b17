//! Settings that a user may have made, which must not change any promise.

use std::time::Duration;

use diesel::connection::SimpleConnection;

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, Cluster, Database, Error, RateLimit, RoundTrips, Semaphore, Spent, Throttle,
    give_back_on, migrations, monitor, sync, sync_intervals, throttled_resources,
};
use crate::rate_limits::{API, allowed};
use crate::support::{
    Expect, Observer, assert_matches, eventually, foreign_holder, round_trips_of, setting,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("server settings");

throttled_resources! {
    enum Resource { Mail = "mail" every Duration::from_secs(1) }
}

#[derive(QueryableByName)]
struct Version {
    #[diesel(sql_type = diesel::sql_types::Integer)]
    number: i32,
}

fn version(conn: &mut PgConnection) -> i32 {
    diesel::sql_query("SELECT current_setting('server_version_num')::int / 10000 AS number")
        .get_result::<Version>(conn)
        .unwrap()
        .number
}

/// Waits for the lock while another session holds it for longer than the user's own timeouts.
fn outwait(configure: &str) {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let mut holder = foreign_holder(&database, &LOCK);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut conn = database.connect();
            conn.batch_execute(configure).unwrap();
            let guard = LOCK.acquire_on(&mut conn)?;
            guard.release()?;
            conn.transaction(|conn| LOCK.acquire_xact(conn))
        });
        while observer.waiters(LOCK.key()) == 0 {}
        // The server's own clock, well past the waiter's settings.
        holder.batch_execute("SELECT pg_sleep(0.3)").unwrap();
        holder
            .batch_execute("SELECT pg_advisory_unlock_all()")
            .unwrap();
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn a_users_statement_timeout_does_not_cut_a_wait_short() {
    outwait("SET statement_timeout = '100ms'");
}

#[test]
fn a_users_lock_timeout_does_not_cut_a_wait_short() {
    outwait("SET lock_timeout = '50ms'");
}

#[test]
fn a_users_transaction_timeout_does_not_cut_a_wait_short() {
    if version(&mut Database::new().connect()) >= 17 {
        outwait("SET transaction_timeout = '150ms'");
    }
}

#[test]
fn neither_do_they_cut_a_transaction_locks_wait_short() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let mut holder = foreign_holder(&database, &LOCK);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut conn = database.connect();
            conn.batch_execute("SET statement_timeout = '100ms'; SET lock_timeout = '50ms'")
                .unwrap();
            conn.transaction(|conn| {
                LOCK.acquire_xact(conn)?;
                let after = [
                    setting(conn, "statement_timeout"),
                    setting(conn, "lock_timeout"),
                ];
                Ok::<_, Error>(after)
            })
        });
        while observer.waiters(LOCK.key()) == 0 {}
        holder.batch_execute("SELECT pg_sleep(0.3)").unwrap();
        holder
            .batch_execute("SELECT pg_advisory_unlock_all()")
            .unwrap();
        let after = waiter.join().unwrap().unwrap();
        assert_eq!(after, ["100ms", "50ms"]);
    });
}

/// `idle_session_timeout`, of PostgreSQL 14 and later, would end the session that holds the lock.
#[test]
fn a_lock_is_not_lost_to_idle_session_timeout() {
    let database = Database::new();
    if version(&mut database.connect()) < 14 {
        return;
    }
    let mut observer = Observer::of(&database);
    for waits in [false, true] {
        let mut conn = database.connect();
        conn.batch_execute("SET idle_session_timeout = '200ms'")
            .unwrap();
        let mut guard = if waits {
            let mut holder = foreign_holder(&database, &LOCK);
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| LOCK.acquire_on(&mut conn).unwrap());
                while observer.waiters(LOCK.key()) == 0 {}
                holder
                    .batch_execute("SELECT pg_advisory_unlock_all()")
                    .unwrap();
                waiter.join().unwrap()
            })
        } else {
            LOCK.try_acquire_on(&mut conn).unwrap().expect_acquired()
        };
        let inner = LOCK.acquire_on(guard.conn()).unwrap();
        observer
            .conn()
            .batch_execute("SELECT pg_sleep(0.5)")
            .unwrap();
        assert_eq!(observer.holders(LOCK.key()), 1);
        inner.release().unwrap();
        assert_eq!(setting(guard.conn(), "idle_session_timeout"), "0");
        guard.release().unwrap();
        assert_eq!(setting(&mut conn, "idle_session_timeout"), "200ms");
    }
}

#[test]
fn a_lock_whose_session_has_an_idle_session_timeout_takes_no_more_round_trips() {
    let database = Database::new();
    let plain = &mut database.connect();
    if version(plain) < 14 {
        return;
    }
    let proxy = RoundTrips::in_front_of(&database);
    let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
    conn.batch_execute("SET idle_session_timeout = '1h'")
        .unwrap();
    // The first acquisition of a process detects the timeout, and prepares the statement.
    LOCK.acquire_on(conn).unwrap().release().unwrap();
    LOCK.acquire_on(plain).unwrap().release().unwrap();
    let trips = round_trips_of(&proxy, || {
        LOCK.acquire_on(conn).unwrap().release().unwrap();
    });
    assert_eq!(trips, 2);
}

#[test]
fn a_lock_that_was_busy_leaves_idle_session_timeout_alone() {
    let database = Database::new();
    let mut conn = database.connect();
    if version(&mut conn) < 14 {
        return;
    }
    let _holder = foreign_holder(&database, &LOCK);
    conn.batch_execute("SET idle_session_timeout = '30s'")
        .unwrap();
    assert!(LOCK.try_acquire_on(&mut conn).unwrap().is_busy());
    let timeout = Duration::from_millis(5);
    assert!(
        LOCK.acquire_timeout_on(&mut conn, timeout)
            .unwrap()
            .is_busy()
    );
    assert_eq!(setting(&mut conn, "idle_session_timeout"), "30s");
}

/// The server applies a reloaded configuration to every session that has no value of its own.
#[test]
fn a_reloaded_idle_session_timeout_ends_only_a_session_without_a_value_of_its_own() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut observer = Observer::of(&database);
    if version(observer.conn()) < 14 {
        return;
    }
    let (lost, kept) = (
        AdvisoryLock::named("lost to a reload"),
        AdvisoryLock::named("kept over a reload"),
    );
    let mut conn = database.connect();
    let mut guard = lost.acquire_on(&mut conn).unwrap();
    let pinned = database.url_with("options", "-c idle_session_timeout=0");
    let mut pinned = PgConnection::establish(&pinned).unwrap();
    let mut pinned = kept.acquire_on(&mut pinned).unwrap();
    observer
        .conn()
        .batch_execute("SET idle_session_timeout = 0")
        .unwrap();
    for statement in [
        "ALTER SYSTEM SET idle_session_timeout = '200ms'",
        "SELECT pg_reload_conf()",
    ] {
        observer.conn().batch_execute(statement).unwrap();
    }
    // A session applies the configuration when it receives its next statement, once the signal has reached it.
    eventually("the session has the new configuration", || {
        setting(guard.conn(), "idle_session_timeout") == "200ms"
    });
    pinned.conn().batch_execute("SELECT 1").unwrap();
    let pid = guard.backend_pid();
    eventually("the session is ended", || !observer.is_alive(pid));
    let released = guard.release();
    assert_matches!(released, Err(Error::LockLost { .. }));
    assert!(pinned.is_held().unwrap());
    pinned.release().unwrap();
}

#[test]
fn no_search_path_time_zone_or_isolation_level_changes_anything() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    observer
        .conn()
        .batch_execute(
            "CREATE SCHEMA impostor; \
             CREATE FUNCTION impostor.pg_try_advisory_lock(bigint) RETURNS boolean \
             LANGUAGE sql AS 'SELECT true'; \
             CREATE FUNCTION impostor.pg_backend_pid() RETURNS int LANGUAGE sql AS 'SELECT 1'; \
             CREATE TABLE impostor.pg_locks (id int); \
             CREATE DOMAIN impostor.text AS int; \
             CREATE FUNCTION impostor.never(pg_catalog.text, pg_catalog.text) RETURNS boolean \
             LANGUAGE sql AS 'SELECT false'; \
             CREATE OPERATOR impostor.<> (FUNCTION = impostor.never, LEFTARG = pg_catalog.text, \
             RIGHTARG = pg_catalog.text)",
        )
        .unwrap();
    for settings in [
        "SET search_path = impostor, pg_catalog",
        "SET search_path = ''",
        "SET TimeZone = 'Europe/Paris'; SET IntervalStyle = 'sql_standard'; SET DateStyle = 'German'",
        "SET default_transaction_isolation = 'repeatable read'",
        "SET default_transaction_isolation = 'serializable'",
        "SET default_transaction_read_only = on",
        "SET standard_conforming_strings = off",
    ] {
        let mut conn = database.connect();
        conn.batch_execute(settings).unwrap();
        let mut guard = LOCK.try_acquire_on(&mut conn).unwrap().expect_acquired();
        assert_eq!(observer.holders(LOCK.key()), 1, "{settings}");
        assert!(guard.is_held().unwrap(), "{settings}");
        guard.release().unwrap();

        let holder = foreign_holder(&database, &LOCK);
        let timeout = Duration::from_millis(5);
        assert!(
            LOCK.acquire_timeout_on(&mut conn, timeout)
                .unwrap()
                .is_busy()
        );
        let busy = LOCK.transaction_timeout(&mut conn, timeout, |_| Ok::<_, Error>(()));
        assert!(busy.unwrap().is_busy(), "{settings}");
        drop(holder);
        observer.assert_free(LOCK.key());
        LOCK.transaction(&mut conn, |_| {
            assert_eq!(observer.holders(LOCK.key()), 1, "{settings}");
            Ok::<_, Error>(())
        })
        .unwrap();
        assert_eq!(observer.all_held(), 0, "{settings}");
    }
}

#[test]
fn a_server_out_of_lock_memory_is_an_error_and_leaves_nothing_held() {
    let cluster = Cluster::builder()
        .setting("max_locks_per_transaction", "10")
        .setting("max_connections", "10")
        .start();
    let database = cluster.database();
    let pool = database.pool(1);
    drop(pool.get().unwrap()); // connecting needs locks as well
    let mut greedy = database.connect();
    let fill = "SELECT pg_advisory_lock(g) FROM generate_series(1, 100000) g";
    assert!(greedy.batch_execute(fill).is_err());

    let refused = LOCK.try_acquire(&pool);
    assert_matches!(refused, Err(Error::Database(_)));
    drop(greedy);
    eventually("there is room again", || pool.get().is_ok());
    let mut observer = Observer::of(&database);
    observer.assert_free(LOCK.key());
    LOCK.try_acquire(&pool)
        .unwrap()
        .expect_acquired()
        .release()
        .unwrap();
}

/// What each operation returns where all tables are locked.
fn timed_out(conn: &mut PgConnection, claim: i64, spent: &Spent) -> Vec<Error> {
    let geocoder = Semaphore::named("geocoder", 2, Duration::from_secs(30));
    let mail = Throttle::of(Resource::Mail);
    let results = [
        migrations::install(conn).map(drop),
        sync::<Resource>(conn).map(drop),
        sync_intervals::<Resource>(conn).map(drop),
        mail.details("me").attempt_on(conn).map(drop),
        mail.key(7).details("me").attempt_on(conn).map(drop),
        geocoder.claim_on(conn).map(drop),
        geocoder.renew_on(conn, claim).map(drop),
        geocoder.complete_on(conn, claim).map(drop),
        API.check_on(conn).map(drop),
        RateLimit::check_all_on(conn, &[&API]).map(drop),
        give_back_on(conn, spent, 1).map(drop),
        API.peek_on(conn).map(drop),
        API.reset_on(conn).map(drop),
        RateLimit::prune_on(conn).map(drop),
        monitor::slots(conn, "geocoder", 2).map(drop),
    ];
    results.into_iter().filter_map(Result::err).collect()
}

#[cfg(feature = "testing")]
fn timed_out_in_tests(conn: &mut PgConnection) -> Vec<Error> {
    use crate::half::testing;

    let geocoder = Semaphore::named("geocoder", 2, Duration::from_secs(30));
    let mail = Throttle::of(Resource::Mail);
    let results = [
        testing::make_due(conn, &mail),
        testing::make_due(conn, &mail.key(7)),
        testing::expire(conn, &geocoder).map(drop),
        testing::use_up(conn, &API),
        testing::held_locks(conn).map(drop),
        testing::requests_in_flight(conn).map(drop),
    ];
    results.into_iter().filter_map(Result::err).collect()
}

#[test]
fn a_lock_timeout_is_never_taken_for_a_missing_schema() {
    let database = Database::new();
    let (conn, locking) = (&mut database.connect(), &mut database.connect());
    migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    let geocoder = Semaphore::named("geocoder", 2, Duration::from_secs(30));
    let claim = geocoder.claim_on(conn).unwrap().expect_acquired().id;
    let spent = allowed(API.check_on(conn).unwrap());
    locking
        .batch_execute(
            "SELECT pg_advisory_lock(1);
             BEGIN;
             DO $$
             DECLARE name text;
             BEGIN
                FOR name IN SELECT relname FROM pg_class
                    WHERE relnamespace = 'resource_control'::regnamespace AND relkind = 'r'
                LOOP
                    EXECUTE format('LOCK TABLE resource_control.%I', name);
                END LOOP;
             END $$",
        )
        .unwrap();
    conn.batch_execute("SET lock_timeout = '20ms'").unwrap();
    #[allow(unused_mut)] // it is not extended without `testing`
    let mut errors = timed_out(conn, claim, &spent);
    assert!(errors.len() > 10, "{errors:?}");
    #[cfg(feature = "testing")]
    errors.extend(timed_out_in_tests(conn));
    for error in errors {
        assert!(!matches!(error, Error::Schema(_)), "{error:?}");
    }
}
