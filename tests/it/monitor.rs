//! Who holds a lock, who waits for it, and who is in whose way.

use std::thread::{self, JoinHandle};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::dsl::{IntervalDsl, count_star};
use diesel::prelude::*;
use diesel_interlock::error::Input;
use diesel_interlock::monitor::{self, Blocked, Holder, blocking};
use diesel_interlock::{AdvisoryLock, Error, LockId, LockKey};
use workbench::{Cluster, Database};

use crate::support::{
    Observer, assert_matches, backend_pid, eventually, foreign_session_holding, foreign_try,
    setting,
};

const KEY: LockKey = LockKey::named("monitor");

fn id() -> LockId {
    KEY.id().unwrap()
}

/// A session that waits for a lock, as a client in any other language would, until it has it.
struct Waiting {
    pid: i32,
    thread: JoinHandle<()>,
}

/// Returns once it is seen waiting, with the time of its start where the server keeps that.
fn waiting(database: &Database, application: &str, function: &str, id: LockId) -> Waiting {
    let mut conn = database.connect();
    name(&mut conn, application);
    let pid = backend_pid(&mut conn);
    let statement = format!("SELECT {function}({id})");
    // Once the lock is granted, or the test is over and its database dropped.
    let thread = thread::spawn(move || drop(conn.batch_execute(&statement)));
    let look = &mut database.connect();
    let keeps_since = keeps_start_of_wait(look);
    eventually("the session waits", || {
        let waits: Vec<monitor::Waiter> = monitor::waiters()
            .filter(monitor::pid.eq(pid))
            .load(look)
            .unwrap();
        waits.len() == 1 && waits[0].waiting_since.is_some() == keeps_since
    });
    Waiting { pid, thread }
}

fn name(conn: &mut PgConnection, application: &str) {
    conn.batch_execute(&format!("SET application_name = '{application}'"))
        .unwrap();
}

/// `pg_locks.waitstart` came with PostgreSQL 14.
fn keeps_start_of_wait(conn: &mut PgConnection) -> bool {
    setting(conn, "server_version_num").parse::<u32>().unwrap() >= 140_000
}

fn holders(conn: &mut PgConnection) -> Vec<Holder> {
    monitor::holders().load(conn).unwrap()
}

#[test]
fn holders_are_shown_with_their_keys_and_sessions() {
    let database = Database::new();
    let look = &mut database.connect();
    assert_eq!(holders(look), []);
    for id in [
        LockId::BigInt(0),
        LockId::BigInt(-1),
        LockId::BigInt(i64::MIN),
        LockId::BigInt(i64::MAX),
        LockId::BigInt(1 << 32),
        id(),
        LockId::Pair(0, 0),
        LockId::Pair(0, 1),
        LockId::Pair(-1, i32::MIN),
        LockId::Pair(i32::MAX, -1),
    ] {
        let mut holder = foreign_session_holding(&database, id);
        name(&mut holder, "web-1");
        let [seen] = holders(look).try_into().unwrap();
        assert_eq!((seen.key, seen.shared), (id, false));
        let session = seen.session;
        assert_eq!(session.pid, Some(backend_pid(&mut holder)));
        assert_eq!(session.application_name.as_deref(), Some("web-1"));
        assert_eq!(
            session.usename,
            Some(setting(look, "session_authorization"))
        );
        assert_eq!(session.state.as_deref(), Some("idle"));
        assert!(session.query.is_some() && session.backend_start.is_some());
        assert_eq!(session.xact_start, None);
        drop(holder);
        eventually("the session has ended", || holders(look).is_empty());
    }
}

#[test]
fn the_condition_of_a_key_is_met_by_that_key_alone() {
    let database = Database::new();
    let look = &mut database.connect();
    let keys = [
        LockKey::bigint(1),
        LockKey::pair(0, 1),
        LockKey::pair(1, 0),
        LockKey::bigint(-1),
        LockKey::pair(-1, -1),
        KEY,
    ];
    let mut session = database.connect();
    for key in &keys {
        assert!(foreign_try(&mut session, key.id().unwrap()));
    }
    let _waiters = keys
        .each_ref()
        .map(|key| waiting(&database, "web-1", "pg_advisory_lock", key.id().unwrap()));
    for key in &keys {
        let [holder] = monitor::holders_of(look, key).unwrap().try_into().unwrap();
        let [waiter] = monitor::waiters_of(look, key).unwrap().try_into().unwrap();
        assert_eq!(Ok(holder.key), key.id().map_err(drop));
        assert_eq!(waiter.key, holder.key);
        let blocked: Vec<Blocked> = monitor::blocked()
            .filter(monitor::blocked_on(key).unwrap())
            .load(look)
            .unwrap();
        assert_eq!(blocked.len(), 1);
        assert_eq!(blocked[0].key, holder.key);
    }
    assert_eq!(monitor::holders_of(look, &LockKey::bigint(2)).unwrap(), []);
    let empty = LockKey::named("");
    assert_matches!(
        monitor::holders_of(look, &empty),
        Err(Error::Input(Input::EmptyName))
    );
    assert_matches!(
        monitor::waiters_of(look, &empty),
        Err(Error::Input(Input::EmptyName))
    );
    assert_matches!(
        monitor::blocked_on(&empty).err(),
        Some(Error::Input(Input::EmptyName))
    );
}

#[test]
fn each_sharer_is_a_holder_and_a_lock_taken_twice_has_one_holder() {
    let database = Database::new();
    let pool = database.pool(2);
    let look = &mut database.connect();
    let lock = AdvisoryLock::new(KEY).shared();
    let (mut one, two) = (lock.acquire(&pool).unwrap(), lock.acquire(&pool).unwrap());
    let _again = lock.acquire_on(one.conn()).unwrap();
    let held = monitor::holders_of(look, &KEY).unwrap();
    assert_eq!(held.len(), 2);
    assert!(held.iter().all(|holder| holder.shared));
    assert!(
        held.iter()
            .any(|holder| holder.session.pid == Some(two.backend_pid()))
    );
}

#[test]
fn waiters_are_found_by_their_application_with_how_long_they_wait() {
    fn stuck(conn: &mut PgConnection) -> QueryResult<Vec<monitor::Waiter>> {
        monitor::waiters()
            .filter(monitor::application_name.like("web-%"))
            .load(conn)
    }

    let database = Database::new();
    let look = &mut database.connect();
    let holder = foreign_session_holding(&database, id());
    assert_eq!(stuck(look), Ok(vec![]));
    let web = waiting(&database, "web-1", "pg_advisory_lock_shared", id());
    let batch = waiting(&database, "batch", "pg_advisory_lock", id());

    let [first] = stuck(look).unwrap().try_into().unwrap();
    assert_eq!((first.key, first.shared), (id(), true));
    assert_eq!(first.session.pid, Some(web.pid));
    assert_eq!(first.session.state.as_deref(), Some("active"));
    assert!(
        first
            .session
            .query
            .unwrap()
            .contains("pg_advisory_lock_shared")
    );
    assert!(first.session.xact_start.is_some());
    let [second] = stuck(look).unwrap().try_into().unwrap();
    if keeps_start_of_wait(look) {
        assert!(second.waiting_since == first.waiting_since && first.waiting_since.is_some());
        assert!(second.waited.unwrap() > first.waited.unwrap());
        assert!(first.waited.unwrap() < Duration::from_secs(10));
    } else {
        assert_eq!((first.waiting_since, first.waited), (None, None));
        assert_eq!((second.waiting_since, second.waited), (None, None));
    }
    assert_eq!(holders(look).len(), 1, "who waits is no holder");

    drop(holder);
    for waiting in [web, batch] {
        waiting.thread.join().unwrap();
    }
}

#[test]
fn the_longest_waiter_comes_first() {
    let database = Database::new();
    let look = &mut database.connect();
    let _holder = foreign_session_holding(&database, id());
    let waiters = ["web-1", "web-2", "web-3"]
        .map(|application| waiting(&database, application, "pg_advisory_lock", id()));
    let mut seen: Vec<_> = monitor::waiters_of(look, &KEY)
        .unwrap()
        .into_iter()
        .map(|waiter| waiter.session.pid.unwrap())
        .collect();
    let mut expected = waiters.map(|waiter| waiter.pid);
    if !keeps_start_of_wait(look) {
        seen.sort_unstable();
        expected.sort_unstable();
    }
    assert_eq!(seen, expected);
}

#[test]
fn a_wait_through_a_guard_is_seen() {
    let database = Database::new();
    let pool = database.pool(2);
    let look = &mut database.connect();
    let lock = AdvisoryLock::new(KEY);
    let holder = lock.acquire(&pool).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| lock.acquire(&pool).map(drop));
        eventually("the guard's wait is seen", || {
            !monitor::waiters_of(look, &KEY).unwrap().is_empty()
        });
        holder.release().unwrap();
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn a_waiter_is_blocked_by_holders_and_by_waiters_ahead_of_it() {
    let database = Database::new();
    let look = &mut database.connect();
    let mut holder = database.connect();
    name(&mut holder, "nightly");
    holder
        .batch_execute(&format!(
            "BEGIN; SELECT pg_advisory_xact_lock_shared({})",
            id()
        ))
        .unwrap();
    let exclusive = waiting(&database, "web-1", "pg_advisory_lock", id());
    let shared = waiting(&database, "web-2", "pg_advisory_lock_shared", id());

    let blocked: Vec<Blocked> = monitor::blocked()
        .order(blocking::blocked_application_name)
        .load(look)
        .unwrap();
    let [one, two] = blocked.try_into().unwrap();
    assert_eq!(one.blocked_pid, exclusive.pid);
    assert_eq!(one.blocking_pid, Some(backend_pid(&mut holder)));
    assert_eq!(one.blocking_application_name.as_deref(), Some("nightly"));
    assert_eq!(one.blocking_state.as_deref(), Some("idle in transaction"));
    assert!(one.blocking_xact_start.is_some());
    assert_eq!(two.blocked_pid, shared.pid);
    assert_eq!(two.blocking_pid, Some(exclusive.pid));
    assert_eq!(two.blocking_state.as_deref(), Some("active"));
    for row in [one, two] {
        assert_eq!(row.key, id());
        assert_eq!(row.waited.is_some(), keeps_start_of_wait(look));
        assert_eq!(row.waiting_since.is_some(), keeps_start_of_wait(look));
    }

    holder.batch_execute("COMMIT").unwrap();
    exclusive.thread.join().unwrap();
    shared.thread.join().unwrap();
    assert_eq!(monitor::blocked().load::<Blocked>(look), Ok(vec![]));
}

#[test]
fn a_prepared_transaction_holds_without_a_session() {
    let cluster = Cluster::builder()
        .setting("max_prepared_transactions", "2")
        .start();
    let database = cluster.database();
    let look = &mut database.connect();
    database
        .connect()
        .batch_execute(&format!(
            "BEGIN; SELECT pg_advisory_xact_lock({}); PREPARE TRANSACTION 'two'",
            id()
        ))
        .unwrap();
    let waiter = waiting(&database, "web-1", "pg_advisory_lock", id());
    let [holder] = monitor::holders_of(look, &KEY).unwrap().try_into().unwrap();
    assert_eq!((holder.key, holder.session.pid), (id(), None));
    assert_eq!(holder.session.application_name, None);
    let [blocked] = monitor::blocked()
        .load::<Blocked>(look)
        .unwrap()
        .try_into()
        .unwrap();
    assert_eq!(
        (blocked.blocked_pid, blocked.blocking_pid),
        (waiter.pid, None)
    );
    look.batch_execute("ROLLBACK PREPARED 'two'").unwrap();
    waiter.thread.join().unwrap();
}

#[test]
fn a_role_that_may_not_read_statistics_sees_only_what_it_may_know() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let look = &mut database.connect();
    look.batch_execute(
        "CREATE ROLE app; CREATE ROLE watcher IN ROLE pg_read_all_stats; SET ROLE app",
    )
    .unwrap();
    let mut holder = foreign_session_holding(&database, id());
    name(&mut holder, "nightly");
    let pid = backend_pid(&mut holder);
    let waiter = waiting(&database, "web-1", "pg_advisory_lock", id());

    let [seen] = monitor::holders_of(look, &KEY).unwrap().try_into().unwrap();
    let session = seen.session;
    assert_eq!(session.pid, Some(pid));
    assert_eq!(session.application_name.as_deref(), Some("nightly"));
    assert!(session.usename.is_some());
    assert_eq!((session.query, session.state), (None, None));
    assert_eq!((session.backend_start, session.xact_start), (None, None));
    assert_eq!((session.client_addr, session.client_hostname), (None, None));
    let [seen] = monitor::waiters_of(look, &KEY).unwrap().try_into().unwrap();
    assert_eq!(
        (seen.session.pid, seen.session.query),
        (Some(waiter.pid), None)
    );
    assert_eq!(seen.waited.is_some(), keeps_start_of_wait(look));
    let [blocked] = monitor::blocked()
        .load::<Blocked>(look)
        .unwrap()
        .try_into()
        .unwrap();
    assert_eq!(blocked.blocking_pid, Some(pid));
    assert_eq!(
        (blocked.blocking_state, blocked.blocking_xact_start),
        (None, None)
    );

    look.batch_execute("SET ROLE watcher").unwrap();
    let [seen] = monitor::holders_of(look, &KEY).unwrap().try_into().unwrap();
    assert!(seen.session.query.is_some() && seen.session.backend_start.is_some());
}

#[test]
fn locks_of_other_databases_and_other_kinds_of_locks_are_not_shown() {
    let (database, other) = (Database::new(), Database::new());
    let look = &mut database.connect();
    let _elsewhere = foreign_session_holding(&other, id());
    let _waiter = waiting(&other, "web-1", "pg_advisory_lock", id());
    let mut table = database.connect();
    table
        .batch_execute("CREATE TABLE t (); BEGIN; LOCK TABLE t")
        .unwrap();
    assert_eq!(holders(look), []);
    assert_eq!(monitor::waiters().load::<monitor::Waiter>(look), Ok(vec![]));
    assert_eq!(monitor::blocked().load::<Blocked>(look), Ok(vec![]));
    assert_eq!(holders(&mut other.connect()).len(), 1);
}

#[test]
fn queries_are_extended_boxed_grouped_and_nested() {
    let database = Database::new();
    let look = &mut database.connect();
    let _one = foreign_session_holding(&database, LockId::BigInt(7));
    let mut two = foreign_session_holding(&database, LockId::Pair(1, 2));
    name(&mut two, "web-2");
    let _three = waiting(&database, "web-3", "pg_advisory_lock", LockId::Pair(1, 2));

    let mut boxed = monitor::holders().into_boxed();
    for part in ["web-%", "%-2"] {
        boxed = boxed.filter(monitor::application_name.like(part));
    }
    let [holder] = boxed.load(look).unwrap().try_into().unwrap();
    assert_eq!(holder.key, LockId::Pair(1, 2));

    let newest: Option<(LockId, Option<i32>)> = monitor::holders()
        .filter(
            monitor::of_key(&LockKey::bigint(7))
                .unwrap()
                .or(monitor::key1.eq(1)),
        )
        .order((monitor::backend_start.desc(), monitor::pid))
        .limit(1)
        .select((LockId::as_select(), monitor::key2))
        .first(look)
        .optional()
        .unwrap();
    assert_eq!(newest, Some((LockId::Pair(1, 2), Some(2))));

    let per_application: Vec<(Option<String>, i64)> = monitor::holders()
        .group_by(monitor::application_name)
        .select((monitor::application_name, count_star()))
        .order(monitor::application_name)
        .load(look)
        .unwrap();
    assert_eq!(per_application.len(), 2);
    assert_eq!(monitor::holders().count().get_result(look), Ok(2));
    let wanted = monitor::waiters().select(monitor::key1);
    assert_eq!(wanted.load(look), Ok(vec![Some(1)]));
    let held_and_wanted = monitor::AdvisoryLocks.filter(monitor::key1.eq(1));
    assert_eq!(held_and_wanted.count().get_result(look), Ok(2));
    let long: Vec<Blocked> = monitor::blocked()
        .filter(blocking::waited.gt(1.hour()))
        .into_boxed()
        .load(look)
        .unwrap();
    assert_eq!(long, []);
}

#[test]
fn the_users_own_objects_of_the_same_names_and_odd_settings_change_nothing() {
    let database = Database::new();
    let look = &mut database.connect();
    look.batch_execute(
        "CREATE SCHEMA shadow;
         CREATE TABLE shadow.pg_locks (); CREATE TABLE shadow.pg_stat_activity ();
         CREATE TABLE shadow.pg_database (); CREATE DOMAIN shadow.text AS int;
         CREATE DOMAIN shadow.timestamptz AS int;
         CREATE FUNCTION shadow.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz';
         CREATE FUNCTION shadow.to_jsonb(anyelement) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
         CREATE FUNCTION shadow.host(inet) RETURNS text LANGUAGE sql AS 'SELECT NULL::text';
         CREATE FUNCTION shadow.current_database() RETURNS name LANGUAGE sql AS 'SELECT NULL::name';
         CREATE FUNCTION shadow.pg_blocking_pids(int) RETURNS int[] LANGUAGE sql AS 'SELECT NULL::int[]';
         CREATE FUNCTION shadow.unnest(anyarray) RETURNS SETOF anyelement LANGUAGE sql AS 'SELECT NULL WHERE false';
         SET search_path = shadow, public, pg_catalog;
         SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'German, DMY'; SET IntervalStyle = sql_standard;
         SET default_transaction_isolation = serializable; SET default_transaction_read_only = on",
    )
    .unwrap();
    let _holder = foreign_session_holding(&database, id());
    let waiter = waiting(&database, "web-1", "pg_advisory_lock", id());
    let plain = &mut database.connect();
    for _ in 0..2 {
        let [odd] = monitor::waiters_of(look, &KEY).unwrap().try_into().unwrap();
        let [even] = monitor::waiters_of(plain, &KEY)
            .unwrap()
            .try_into()
            .unwrap();
        assert_eq!(odd.session.pid, Some(waiter.pid));
        assert_eq!(odd.waiting_since, even.waiting_since);
        assert!(odd.waited <= even.waited);
        assert_eq!(monitor::holders_of(look, &KEY).unwrap().len(), 1);
        assert_eq!(monitor::blocked().load::<Blocked>(look).unwrap().len(), 1);
        look.batch_execute("SET TimeZone = '<odd>-05:41'").unwrap();
    }
}

#[test]
fn the_holders_own_connection_may_be_queried_inside_a_transaction() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let pool = database.pool(1);
    let mut guard = AdvisoryLock::new(KEY).acquire(&pool).unwrap();
    let seen = guard
        .conn()
        .transaction(|conn| monitor::holders_of(conn, &KEY))
        .unwrap();
    assert_eq!(seen.len(), 1);
    assert_eq!(observer.all_held(), 1);
    guard.release().unwrap();
}
