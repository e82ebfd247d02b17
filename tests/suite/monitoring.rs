//! The views of the schema, their rows, and queries that compose them.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::query_source::TableNotEqual;
use diesel_interlock::monitor::views::{advisory_lock, slot_in_flight, throttle_state};
use diesel_interlock::monitor::{
    Leadership, Lock, RateLimitState, ScheduleState, ServiceRequest, Slot, ThrottleState,
    ThrottledResource as Row, has_timed_out, is_in_flight,
};
use diesel_interlock::schema::resource_control::service_request;
use workbench::{Cluster, Database};

use crate::half::*;
use crate::support::{
    Observer, backend_pid, eventually, foreign_holder, foreign_try, install, installed, run,
};

const HOUR: Duration = Duration::from_secs(3600);

fn named(database: &Database, application: &str) -> PgConnection {
    PgConnection::establish(&database.url_with("application_name", application)).unwrap()
}

/// Waits for the lock as a client in any other language would, until the end of the test.
fn wait_in_a_thread(mut conn: PgConnection, key: &LockKey) {
    let statement = format!("SELECT pg_advisory_lock({})", key.id().unwrap());
    std::thread::spawn(move || drop(conn.batch_execute(&statement)));
}

#[test]
fn a_lock_is_shown_with_its_number_and_its_holder() {
    let database = installed();
    let admin = &mut database.connect();
    assert_eq!(Lock::all().load::<Lock>(admin), Ok(Vec::new()));
    for key in [
        LockKey::bigint(0),
        LockKey::bigint(-1),
        LockKey::bigint(i64::MIN),
        LockKey::bigint(i64::MAX),
        LockKey::bigint(1 << 32),
        LockKey::named("monitor"),
        LockKey::pair(0, 0),
        LockKey::pair(0, 1),
        LockKey::pair(-1, i32::MIN),
        LockKey::pair(i32::MAX, -1),
    ] {
        let mut holder = named(&database, "web-1");
        assert!(foreign_try(&mut holder, &key));
        let pid = backend_pid(&mut holder);
        let [seen]: [Lock; 1] = Lock::all().load(admin).unwrap().try_into().unwrap();
        let id = match (seen.number, seen.first, seen.second) {
            (Some(number), None, None) => LockId::BigInt(number),
            (None, Some(first), Some(second)) => LockId::Pair(first, second),
            other => panic!("{other:?}"),
        };
        assert_eq!(id, key.id().unwrap());
        assert_eq!(Lock::of(&key).load(admin), Ok(vec![seen.clone()]));
        assert!(seen.is_held && !seen.is_shared && seen.blocked_by.is_empty());
        assert_eq!(
            (seen.pid, seen.application_name.as_str()),
            (Some(pid), "web-1")
        );
        assert_eq!(seen.state.as_deref(), Some("idle"));
        assert_eq!((seen.transaction_since, seen.waiting_since), (None, None));
        drop(holder);
        eventually("the session has ended", || {
            Lock::all().load::<Lock>(admin).unwrap().is_empty()
        });
    }
}

#[test]
fn a_lock_of_a_prepared_transaction_is_shown_without_a_session() {
    let cluster = Cluster::builder()
        .setting("max_prepared_transactions", "1")
        .start();
    let database = cluster.database();
    let admin = &mut database.connect();
    install(admin);
    run(
        admin,
        "BEGIN; SELECT pg_advisory_xact_lock(1); PREPARE TRANSACTION 'forgotten'",
    );
    let [seen]: [Lock; 1] = Lock::all().load(admin).unwrap().try_into().unwrap();
    assert!(seen.is_held);
    assert_eq!((seen.number, seen.pid, seen.state), (Some(1), None, None));
}

#[test]
fn each_key_shows_its_own_holders_and_waiters_and_who_blocks_them() {
    let database = installed();
    let admin = &mut database.connect();
    let keys = [
        LockKey::bigint(1),
        LockKey::pair(0, 1),
        LockKey::pair(1, 0),
        LockKey::pair(-1, -1),
    ];
    let mut holders: Vec<_> = keys
        .iter()
        .map(|key| foreign_holder(&database, key))
        .collect();
    for key in &keys {
        wait_in_a_thread(named(&database, "waiter"), key);
    }
    for (key, holder) in keys.iter().zip(&mut holders) {
        let all = || Lock::of(key).order(advisory_lock::is_held.desc());
        eventually("there is a waiter with the time of its wait", || {
            let seen: Vec<Lock> = all().load(admin).unwrap();
            seen.len() == 2 && seen[1].waiting_since.is_some()
        });
        let seen: Vec<Lock> = all().load(admin).unwrap();
        let pid = backend_pid(holder);
        assert_eq!((seen[0].pid, seen[0].is_held), (Some(pid), true));
        assert_eq!((&seen[1].blocked_by, seen[1].is_held), (&vec![pid], false));
        assert!(seen[1].transaction_since.is_some());
    }
    assert_eq!(
        Lock::of(&LockKey::bigint(2)).load::<Lock>(admin),
        Ok(Vec::new())
    );
    assert_eq!(
        Lock::of(&LockKey::named("")).load::<Lock>(admin),
        Ok(Vec::new())
    );
}

#[test]
fn all_sessions_that_share_a_lock_are_shown() {
    let database = installed();
    let pool = pool(&database, 2);
    let lock = AdvisoryLock::named("shared").shared();
    let guards = [(); 2].map(|()| wait(lock.acquire(&pool)).unwrap());
    let admin = &mut database.connect();
    let shared = Lock::of(lock.lock_key()).filter(advisory_lock::is_shared);
    assert_eq!(shared.load::<Lock>(admin).unwrap().len(), 2);
    drop(guards);
    let mut observer = Observer::of(&database);
    eventually("both guards are released", || observer.all_held() == 0);
}

#[test]
fn slots_and_the_log_of_requests_are_shown() {
    let database = installed();
    let pool = pool(&database, 2);
    let geocoder = Semaphore::named("geocoder", 3, HOUR);
    let _permit = wait(geocoder.try_acquire(&pool)).unwrap();
    let ended = wait(geocoder.try_acquire(&pool))
        .unwrap()
        .admitted()
        .unwrap();
    wait(ended.release()).unwrap();
    let crashed = wait(geocoder.try_acquire(&pool))
        .unwrap()
        .admitted()
        .unwrap();
    let admin = &mut database.connect();
    let expire =
        "UPDATE resource_control.service_request SET expires_at = clock_timestamp() WHERE id =";
    run(admin, &format!("{expire} {}", crashed.fencing_token()));

    let [slot]: [Slot; 1] = Slot::all().load(admin).unwrap().try_into().unwrap();
    assert_eq!(slot.service, "geocoder");
    assert!(slot.remaining.microseconds > 0 && slot.created_at < slot.expires_at);
    let of_service = || ServiceRequest::all().filter(service_request::service.eq("geocoder"));
    let in_flight: Vec<ServiceRequest> = of_service().filter(is_in_flight()).load(admin).unwrap();
    assert_eq!(
        in_flight.iter().map(|it| it.id).collect::<Vec<_>>(),
        [slot.id]
    );
    let timed_out: Vec<ServiceRequest> = of_service().filter(has_timed_out()).load(admin).unwrap();
    assert_eq!(timed_out.len(), 1);
    assert_eq!(timed_out[0].id, crashed.fencing_token());
    assert_eq!(of_service().load::<ServiceRequest>(admin).unwrap().len(), 3);
}

#[test]
fn throttles_of_both_kinds_are_shown_with_when_they_are_due() {
    throttled_resources! {
        enum Resource { Mail = "mail" every HOUR, Import = "import" every HOUR }
    }
    let database = installed();
    let pool = pool(&database, 2);
    let _ = wait(Throttle::sync::<Resource>(&pool)).unwrap();
    for throttle in [
        Throttle::named("cache", HOUR),
        Throttle::of(Resource::Mail),
        Throttle::of(Resource::Mail).key(7),
    ] {
        let granted = wait(throttle.details("me").attempt(&pool)).unwrap();
        assert!(granted.is_granted());
    }
    let admin = &mut database.connect();
    let all = ThrottleState::all().order((throttle_state::name, throttle_state::key));
    let all: Vec<ThrottleState> = all.load(admin).unwrap();
    let seen: Vec<_> = all
        .iter()
        .map(|it| (&*it.name, &*it.key, it.is_resource, it.is_due))
        .collect();
    assert_eq!(
        seen,
        [
            ("cache", "", false, false),
            ("import", "", true, true),
            ("mail", "", true, false),
            ("mail", "7", true, false),
        ]
    );
    for row in &all {
        assert_eq!(row.throttle_interval.microseconds, 3_600_000_000);
        let due = row.last_granted.map(|at| at + HOUR);
        assert_eq!((row.due_at, due.is_none()), (due, row.is_due));
        assert_eq!(row.details, if row.is_due { "" } else { "me" });
    }
    let never: Vec<Row> = Row::all().load(admin).unwrap();
    let never = never.iter().filter(|row| row.last_locked.is_none());
    assert_eq!(never.count(), 1);
}

#[test]
fn limits_leaders_and_schedules_are_shown() {
    let database = installed();
    let pool = pool(&database, 2);
    let limit = RateLimit::named("api", Quota::per_day(24).burst(4))
        .key("a")
        .cost(3);
    assert!(wait(limit.check(&pool)).unwrap().is_allowed());
    let admin = &mut database.connect();
    let [key]: [RateLimitState; 1] = RateLimitState::all()
        .load(admin)
        .unwrap()
        .try_into()
        .unwrap();
    assert_eq!(
        (&*key.name, &*key.key, key.burst, key.remaining),
        ("api", "a", 4, 1)
    );
    assert!((0.7..=0.75).contains(&key.used) && key.spent_at < key.full_at);

    run(
        admin,
        r"SELECT resource_control.claim_service_request('leader a\ b\\c', 1, '1 h', 'web-1')",
    );
    let [leader]: [Leadership; 1] = Leadership::all().load(admin).unwrap().try_into().unwrap();
    assert_eq!((&*leader.name, &*leader.holder), (r"a b\c", "web-1"));
    assert!(leader.since < leader.until);

    let row = "INSERT INTO resource_control.schedule (name, tick, attempt, token, started_at, expires_at, ended_at, error) VALUES";
    let (now, later, before) = ("now()", "now() + interval '1 h'", "now() - interval '1 s'");
    for (state, rest) in [
        ("new", "0, 0, NULL, NULL, NULL, NULL".to_owned()),
        ("running", format!("1, 1, {now}, {later}, NULL, NULL")),
        ("done", format!("1, 1, {now}, NULL, {now}, NULL")),
        ("failed", format!("1, 1, {now}, NULL, {now}, 'no'")),
        ("crashed", format!("1, 1, {before}, {before}, NULL, NULL")),
        (
            "given back",
            format!("1, 1, {before}, {before}, {now}, NULL"),
        ),
    ] {
        let tick = if state == "new" { "NULL" } else { "now()" };
        run(admin, &format!("{row} ('{state}', {tick}, {rest})"));
    }
    let schedules: Vec<ScheduleState> = ScheduleState::all().load(admin).unwrap();
    assert_eq!(schedules.len(), 6);
    for schedule in schedules {
        assert_eq!(schedule.name, schedule.state);
        assert_eq!(schedule.tick.is_none(), schedule.state == "new");
    }
}

diesel::table! {
    deployment (pid) {
        pid -> Integer,
        version -> Text,
    }
}

impl TableNotEqual<deployment::table> for advisory_lock::table {}
impl TableNotEqual<advisory_lock::table> for deployment::table {}

#[test]
fn views_are_filtered_grouped_and_joined_as_tables_are() {
    let database = installed();
    let admin = &mut database.connect();
    let keys = [1, 2, 3].map(LockKey::bigint);
    let mut holders = keys.each_ref().map(|key| foreign_holder(&database, key));
    let pid = backend_pid(&mut holders[0]);
    run(
        admin,
        &format!("CREATE TABLE deployment AS SELECT {pid} AS pid, 'v2' AS version"),
    );

    let joined: Vec<(Option<i64>, String)> = advisory_lock::table
        .inner_join(deployment::table.on(deployment::pid.nullable().eq(advisory_lock::pid)))
        .select((advisory_lock::number, deployment::version))
        .load(admin)
        .unwrap();
    assert_eq!(joined, [(Some(1), "v2".to_owned())]);

    let held: i64 = Lock::all()
        .filter(advisory_lock::is_held.and(advisory_lock::number.gt(1)))
        .count()
        .get_result(admin)
        .unwrap();
    assert_eq!(held, 2);

    run(
        admin,
        "SELECT resource_control.claim_service_request('a', 4, '1 h') FROM generate_series(1, 3)",
    );
    let by_service: Vec<(String, i64)> = slot_in_flight::table
        .group_by(slot_in_flight::service)
        .select((slot_in_flight::service, diesel::dsl::count_star()))
        .load(admin)
        .unwrap();
    assert_eq!(by_service, [("a".to_owned(), 3)]);
}
