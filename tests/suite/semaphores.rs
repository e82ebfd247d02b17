//! Semaphores: what is claimed, refused, completed, renewed, logged and pruned.

use std::time::Duration;

use workbench::{Database, RoundTrips};

use crate::assert_matches;
use crate::half::*;
use crate::support::{
    Observer, assert_after_drop, eventually, installed, number, run, text, truth,
};

const HOUR: Duration = Duration::from_secs(3600);
const MINUTE: Duration = Duration::from_secs(60);
const GEOCODER: Semaphore = Semaphore::named("geocoder", 2, HOUR);
const ONE: Semaphore = Semaphore::named("geocoder", 1, HOUR);

#[track_caller]
fn taken(semaphore: &Semaphore, pool: &PgPool) -> Permit {
    let admission = wait(semaphore.try_acquire(pool)).unwrap();
    admission.admitted().expect("a slot is free")
}

#[track_caller]
fn is_full(semaphore: &Semaphore, pool: &PgPool) -> bool {
    wait(semaphore.try_acquire(pool)).unwrap().is_full()
}

/// The number of requests in flight, of all services.
fn in_flight(conn: &mut diesel::PgConnection) -> i64 {
    number(
        conn,
        "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NULL AND timed_out_at IS NULL)",
    )
}

/// Lets all requests in flight expire.
fn expire(conn: &mut diesel::PgConnection) {
    run(
        conn,
        "UPDATE resource_control.service_request SET created_at = created_at - interval '1 hour', \
         expires_at = clock_timestamp() - interval '1 minute' WHERE completed_at IS NULL AND timed_out_at IS NULL",
    );
}

#[test]
fn there_are_as_many_permits_as_slots_and_they_hold_no_connection() {
    let database = installed();
    let pool = pool(&database, 1);
    let (one, two) = (taken(&GEOCODER, &pool), taken(&GEOCODER, &pool));
    assert!(two.fencing_token() > one.fencing_token());
    assert!(is_full(&GEOCODER, &pool));
    wait(one.release()).unwrap();
    let three = taken(&GEOCODER, &pool);
    assert!(three.remaining() > HOUR - MINUTE && !three.is_lost());
    drop((two, three));
    let admin = &mut database.connect();
    assert_after_drop("nothing is in flight", || in_flight(admin) == 0);
    assert_eq!(
        number(
            admin,
            "(SELECT count(completed_at) FROM resource_control.service_request)"
        ),
        3
    );
}

#[test]
fn services_and_keys_have_slots_of_their_own() {
    let database = installed();
    let pool = pool(&database, 2);
    let handles = [
        ONE,
        Semaphore::named("geocoder 7", 1, HOUR).key(8),
        ONE.key(8),
        ONE.key("7 8"),
        ONE.key(r"7\ 8"),
        ONE.key("7"),
    ];
    let permits: Vec<_> = handles.iter().map(|one| taken(one, &pool)).collect();
    for one in &handles {
        assert!(is_full(one, &pool), "{one:?}");
    }
    assert!(is_full(&ONE.key("another").key(8), &pool));
    drop(permits);
}

#[test]
fn bad_input_is_an_error_before_anything_is_sent() {
    let database = Database::new(); // without the schema
    let pool = pool(&database, 1);
    let named = |name| Semaphore::named(name, 1, HOUR);
    let long: &'static str = "x".repeat(1001).leak();
    let bad = [
        named(""),
        named("").key(7),
        named("a\0b"),
        named(long),
        named("leader dispatcher"),
        named("leader").key("dispatcher"),
        ONE.key(""),
        ONE.key("a\0b"),
        ONE.key(long),
        ONE.details(long),
        ONE.details("a\0b"),
        Semaphore::named("x", 0, HOUR),
        Semaphore::named("x", 1001, HOUR),
        Semaphore::named("x", u32::MAX, HOUR),
        Semaphore::named("x", 1, Duration::ZERO),
        Semaphore::named("x", 1, Duration::from_nanos(999)),
        Semaphore::named("x", 1, Duration::MAX),
        Semaphore::named("x", 1, Duration::from_millis(299)).keep_alive(),
    ];
    for semaphore in &bad {
        assert_matches!(wait(semaphore.try_acquire(&pool)), Err(Error::Input(_)));
        assert_matches!(wait(semaphore.acquire(&pool)), Err(Error::Input(_)));
        let waited = semaphore.acquire_timeout(&pool, Duration::from_secs(9));
        assert_matches!(wait(waited), Err(Error::Input(_)));
    }
    for semaphore in &bad[..7] {
        assert_matches!(wait(semaphore.complete(&pool, 1)), Err(Error::Input(_)));
        assert_matches!(wait(semaphore.renew(&pool, 1)), Err(Error::Input(_)));
    }
    assert_matches!(
        wait(prune::requests(&pool, Duration::MAX)),
        Err(Error::Input(_))
    );
    assert_matches!(wait(ONE.try_acquire(&pool)), Err(Error::NotInstalled));
    assert_matches!(wait(ONE.complete(&pool, 1)), Err(Error::NotInstalled));
}

#[test]
fn the_largest_and_smallest_valid_inputs_are_accepted() {
    let database = installed();
    let pool = pool(&database, 1);
    let longest: &'static str = "x".repeat(1000).leak();
    let thousand_years = Duration::from_secs(1000 * 360 * 24 * 60 * 60);
    for semaphore in [
        Semaphore::named(longest, 1000, thousand_years).details(longest),
        Semaphore::named("leader", 1, HOUR),
        Semaphore::named("leaders", 1, HOUR).key(7),
    ] {
        wait(taken(&semaphore, &pool).release()).unwrap();
    }
    // A permit of a microsecond has expired when the reply arrives: it is lost, but the claim is no
    // error.
    let soon = Semaphore::named("soon", 1, Duration::from_micros(1));
    assert!(taken(&soon, &pool).is_lost());
}

#[test]
fn a_full_semaphore_says_when_the_first_permit_expires() {
    let database = installed();
    let pool = pool(&database, 1);
    let _one = taken(&GEOCODER, &pool);
    let _two = taken(&Semaphore::named("geocoder", 2, 10 * MINUTE), &pool);
    let full = wait(GEOCODER.try_acquire(&pool)).unwrap().full().unwrap();
    assert!(full.retry_after > 9 * MINUTE && full.retry_after < 10 * MINUTE);
    assert!((540..=600).contains(&full.retry_after_secs()));
}

#[test]
fn a_claim_costs_one_round_trip_and_so_do_its_refusal_renewal_and_release() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    // Opens the connection, and prepares its check and the statements.
    for _ in 0..2 {
        let permit = taken(&ONE, &pool);
        assert!(is_full(&ONE, &pool));
        wait(permit.renew()).unwrap();
        wait(permit.release()).unwrap();
    }
    let of_the_check = proxy.count(|| wait(on_first(&pool, "SELECT 1")).unwrap()) - 1;
    let trips = |work: &mut dyn FnMut()| proxy.count(work) - of_the_check;
    let mut permit = None;
    assert_eq!(trips(&mut || permit = Some(taken(&ONE, &pool))), 1);
    let permit = permit.unwrap();
    assert_eq!(trips(&mut || assert!(is_full(&ONE, &pool))), 1);
    assert_eq!(trips(&mut || wait(permit.renew()).unwrap()), 1);
    let mut permit = Some(permit);
    assert_eq!(
        trips(&mut || wait(permit.take().unwrap().release()).unwrap()),
        1
    );
}

#[test]
fn a_request_can_be_completed_and_renewed_by_its_id_in_its_own_service_only() {
    let database = installed();
    let pool = pool(&database, 2);
    let id = taken(&ONE, &pool).detach();
    let other = Semaphore::named("router", 1, HOUR);
    assert!(!wait(other.renew(&pool, id)).unwrap());
    assert!(!wait(other.complete(&pool, id)).unwrap());
    assert!(is_full(&ONE, &pool));
    let admin = &mut database.connect();
    run(
        admin,
        "UPDATE resource_control.service_request SET expires_at = clock_timestamp() + interval '10 min'",
    );
    assert!(wait(ONE.renew(&pool, id)).unwrap());
    assert!(truth(
        admin,
        "(SELECT expires_at > clock_timestamp() + interval '50 min' FROM resource_control.service_request)"
    ));
    // A renewal never shortens.
    let short = Semaphore::named("geocoder", 1, Duration::from_secs(1));
    assert!(wait(short.renew(&pool, id)).unwrap());
    assert!(truth(
        admin,
        "(SELECT expires_at > clock_timestamp() + interval '50 min' FROM resource_control.service_request)"
    ));
    assert!(wait(ONE.complete(&pool, id)).unwrap());
    assert!(!wait(ONE.complete(&pool, id)).unwrap());
    assert!(!wait(ONE.renew(&pool, id)).unwrap());
    assert!(!wait(ONE.complete(&pool, -1)).unwrap());
    assert!(!is_full(&ONE, &pool));
}

#[test]
fn an_expired_permit_is_lost_and_does_not_affect_the_next_holder() {
    let database = installed();
    let pool = pool(&database, 2);
    let admin = &mut database.connect();
    for end in 0..3 {
        let late = taken(&ONE, &pool);
        expire(admin);
        let next = taken(&ONE, &pool);
        assert!(next.fencing_token() > late.fencing_token());
        match end {
            0 => assert_matches!(wait(late.release()), Err(Error::PermitLost(_))),
            1 => {
                assert_matches!(wait(late.renew()), Err(Error::PermitLost(_)));
                assert!(late.is_lost() && wait(late.wait_for_loss(HOUR)));
                wait(late.lost());
                drop(late);
            }
            _ => assert!(!wait(ONE.complete(&pool, late.detach())).unwrap()),
        }
        assert!(is_full(&ONE, &pool));
        wait(next.release()).unwrap();
    }
    eventually("nothing is in flight", || in_flight(admin) == 0);
    let timed_out = "(SELECT count(timed_out_at) FROM resource_control.service_request)";
    assert_eq!(number(admin, timed_out), 3);
}

#[test]
fn an_expired_request_has_ended_before_anybody_claims_its_slot() {
    let database = installed();
    let pool = pool(&database, 1);
    let admin = &mut database.connect();
    let permit = taken(&ONE, &pool);
    expire(admin);
    assert!(!wait(ONE.renew(&pool, permit.fencing_token())).unwrap());
    assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
    assert!(truth(
        admin,
        "(SELECT timed_out_at IS NOT NULL FROM resource_control.service_request)"
    ));
}

#[test]
fn the_log_contains_each_claim() {
    let database = installed();
    let pool = pool(&database, 1);
    let _permit = taken(&GEOCODER.key("Main St").details("web-3 pid 811"), &pool);
    let row = "(SELECT service || ' | ' || details || ' | ' || (slot IN (0, 1)) || ' | ' || (expires_at - created_at) \
               FROM resource_control.service_request)";
    assert_eq!(
        text(&mut database.connect(), row),
        r"geocoder Main\ St | web-3 pid 811 | true | 01:00:00"
    );
}

#[test]
fn old_requests_are_pruned_and_requests_in_flight_never() {
    let database = installed();
    let pool = pool(&database, 2);
    let admin = &mut database.connect();
    run(
        admin,
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, completed_at) \
         SELECT 'old', 0, now() - interval '31 days', now() - interval '31 days', now() - interval '31 days' \
         FROM generate_series(1, 10001)",
    );
    let (_held, done) = (taken(&GEOCODER, &pool), taken(&GEOCODER, &pool));
    wait(done.release()).unwrap();
    let month = Duration::from_secs(30 * 24 * 60 * 60);
    assert_eq!(wait(prune::requests(&pool, month)).unwrap(), 10_001);
    assert_eq!(wait(prune::requests(&pool, month)).unwrap(), 0);
    assert_eq!(
        number(
            admin,
            "(SELECT count(*) FROM resource_control.service_request)"
        ),
        2
    );
    assert_eq!(wait(prune::requests(&pool, Duration::ZERO)).unwrap(), 1);
    assert_eq!(in_flight(admin), 1);
}

#[test]
fn a_stricter_default_isolation_level_changes_nothing() {
    for level in ["repeatable read", "serializable"] {
        let database = installed();
        run(
            &mut database.connect(),
            &format!(
                "ALTER DATABASE {} SET default_transaction_isolation = '{level}'",
                database.name()
            ),
        );
        let pool = pool(&database, 2);
        for _ in 0..3 {
            let permit = taken(&ONE, &pool);
            assert!(is_full(&ONE, &pool));
            wait(permit.renew()).unwrap();
            wait(permit.release()).unwrap();
        }
        assert!(wait(prune::requests(&pool, Duration::ZERO)).unwrap() > 0);
    }
}

#[test]
fn settings_of_the_session_change_nothing() {
    let database = installed();
    run(
        &mut database.connect(),
        "CREATE SCHEMA mine; \
         CREATE TABLE mine.service_request (service text); \
         CREATE FUNCTION mine.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '2000-01-01'::timestamptz $$; \
         CREATE FUNCTION mine.less(timestamptz, timestamptz) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$; \
         CREATE OPERATOR mine.<= (FUNCTION = mine.less, LEFTARG = timestamptz, RIGHTARG = timestamptz)",
    );
    let setting = format!(
        "ALTER DATABASE {} SET search_path = mine, pg_catalog; ALTER DATABASE {} SET timezone = 'America/St_Johns'; \
         ALTER DATABASE {} SET intervalstyle = 'sql_standard'; ALTER DATABASE {} SET datestyle = 'German'",
        database.name(),
        database.name(),
        database.name(),
        database.name()
    );
    run(&mut database.connect(), &setting);
    let pool = pool(&database, 2);
    let permit = taken(&ONE, &pool);
    let full = wait(ONE.try_acquire(&pool)).unwrap().full().unwrap();
    assert!(full.retry_after > HOUR - MINUTE);
    wait(permit.renew()).unwrap();
    wait(permit.release()).unwrap();
}

#[test]
fn a_claim_that_is_cancelled_leaves_nothing_behind() {
    let database = installed();
    let pool = pool(&database, 1);
    let (open, mut observer) = (&mut database.connect(), Observer::of(&database));
    run(open, "BEGIN; LOCK TABLE resource_control.service_request");
    std::thread::scope(|scope| {
        let claim = scope.spawn(|| wait(ONE.try_acquire(&pool)));
        eventually("the claim waits for the table", || {
            observer.all_waiting() == 1
        });
        run(
            observer.conn(),
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND wait_event_type = 'Lock'",
        );
        assert_matches!(claim.join().unwrap(), Err(Error::Database(_)));
    });
    run(open, "COMMIT");
    wait(taken(&ONE, &pool).release()).unwrap();
}

#[test]
fn a_pooled_session_that_has_ended_is_an_error_or_replaced_and_nothing_leaks() {
    let database = installed();
    let pool = unchecked_pool(&database, 2);
    let admin = &mut database.connect();
    for _ in 0..5 {
        // The other session of the pool may have ended, too, so a claim may fail once more.
        let permit = loop {
            match wait(ONE.try_acquire(&pool)) {
                Ok(admission) => break admission.admitted().unwrap(),
                Err(error) => assert!(error.is_unavailable(), "{error}"),
            }
        };
        run(
            admin,
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity \
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
        if let Err(error) = wait(permit.release()) {
            assert!(error.is_unavailable(), "{error}");
        }
        eventually("the release follows", || in_flight(admin) == 0);
    }
}
