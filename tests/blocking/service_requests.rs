//! The table and the stored functions of semaphores, as psql and programs in other languages use
//! them.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::BigInt;

use crate::assert_matches;
use crate::half::*;
use crate::support::{Observer, Role, eventually, installed, number, run, text, truth};

const FOUR: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));

/// Makes a wait for a row lock of another session an error.
const IMPATIENT: &str = "SET lock_timeout = '20s'";

/// The locks that the session holds, without those of a reader and that of its own virtual
/// transaction.
const MORE_THAN_A_READER_HOLDS: &str = "(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() \
    AND NOT (locktype = 'relation' AND mode = 'AccessShareLock') AND locktype <> 'virtualxid')";

/// Claims a slot of the geocoder. Returns the id, or 0 if it is full.
#[track_caller]
fn claim(conn: &mut PgConnection, slots: u32) -> i64 {
    let claim = format!(
        "(SELECT COALESCE(id, 0) FROM resource_control.claim_service_request('geocoder', {slots}, '30 s'))"
    );
    number(conn, &claim)
}

fn complete(conn: &mut PgConnection, id: i64) -> bool {
    truth(
        conn,
        &format!("resource_control.complete_service_request('geocoder', {id})"),
    )
}

fn in_flight(conn: &mut PgConnection) -> i64 {
    number(
        conn,
        "(SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NULL AND timed_out_at IS NULL)",
    )
}

#[test]
fn a_refusal_only_reads_also_beside_uncommitted_claims() {
    let database = installed();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    run(open, "BEGIN");
    for _ in 0..4 {
        assert!(claim(open, 4) > 0);
    }
    for is_committed in [false, true] {
        if is_committed {
            run(open, "COMMIT");
        }
        for slots in [4, 3, 1] {
            run(conn, IMPATIENT);
            run(conn, "BEGIN");
            let is_full = claim(conn, slots) == 0;
            assert!(is_full, "{slots}");
            // The slot of the uncommitted claim looks free, but its advisory lock is taken.
            if is_committed {
                assert!(truth(conn, "pg_current_xact_id_if_assigned() IS NULL"));
                assert_eq!(number(conn, MORE_THAN_A_READER_HOLDS), 0);
            }
            run(conn, "COMMIT");
        }
    }
}

#[test]
fn a_claim_skips_slots_of_uncommitted_claims() {
    let database = installed();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    run(conn, IMPATIENT);
    for _ in 0..8 {
        run(open, "BEGIN");
        for _ in 0..3 {
            assert!(claim(open, 4) > 0);
        }
        let mut ids = vec![claim(conn, 4)];
        assert_eq!(claim(conn, 4), 0);
        run(open, "ROLLBACK");
        ids.extend([(); 3].map(|()| claim(conn, 4)));
        assert_eq!(claim(conn, 4), 0);
        assert!(ids.into_iter().all(|id| complete(conn, id)));
    }
}

#[test]
fn one_claim_at_a_time_draws_the_id_of_a_slot_and_a_killed_claim_takes_no_slot() {
    let database = installed();
    let (gate, conn) = (&mut database.connect(), &mut database.connect());
    run(
        conn,
        "CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF NEW.details = 'slow' THEN PERFORM pg_advisory_xact_lock(1); END IF; RETURN NEW; END $$; \
         CREATE TRIGGER pause BEFORE INSERT ON resource_control.service_request FOR EACH ROW EXECUTE FUNCTION pause()",
    );
    run(gate, "SELECT pg_advisory_lock(1)");
    let mut observer = Observer::of(&database);
    let slow = Semaphore::named("geocoder", 1, Duration::from_secs(30)).details("slow");
    for is_killed in [true, false] {
        let pool = pool(&database, 1);
        std::thread::scope(|scope| {
            let claiming = scope.spawn(|| slow.try_acquire(&pool));
            eventually("the slow claim has its id and waits", || {
                observer.all_waiting() == 1
            });
            for _ in 0..3 {
                assert_eq!(claim(conn, 1), 0);
            }
            if is_killed {
                let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                            WHERE datname = current_database() AND wait_event_type = 'Lock'";
                run(conn, kill);
                let error = claiming.join().unwrap().unwrap_err();
                assert!(error.is_unavailable(), "{error}");
                eventually("the slot is free", || {
                    let id = claim(conn, 1);
                    id > 0 && complete(conn, id)
                });
            } else {
                run(gate, "SELECT pg_advisory_unlock(1)");
                let permit = claiming.join().unwrap().unwrap().admitted().unwrap();
                assert_eq!(claim(conn, 1), 0);
                permit.release().unwrap();
            }
        });
    }
}

#[test]
fn an_overdue_request_that_is_being_ended_keeps_its_slot_and_no_other() {
    let database = installed();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    run(conn, IMPATIENT);
    let late = claim(conn, 4);
    run(
        conn,
        "UPDATE resource_control.service_request SET expires_at = clock_timestamp()",
    );
    run(
        open,
        "BEGIN; SELECT FROM resource_control.service_request FOR UPDATE",
    );
    for _ in 0..3 {
        assert!(claim(conn, 4) > 0);
    }
    assert_eq!(claim(conn, 4), 0);
    run(open, "COMMIT");
    assert!(claim(conn, 4) > 0);
    let marked = format!(
        "(SELECT timed_out_at IS NOT NULL FROM resource_control.service_request WHERE id = {late})"
    );
    assert!(truth(conn, &marked));
}

/// Before its renewal is committed, the request looks overdue to everybody else.
#[test]
fn a_request_that_is_being_renewed_is_not_taken_over() {
    let database = installed();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    let id = claim(conn, 1);
    let renew = format!("resource_control.renew_service_request('geocoder', {id}, '30 s')");
    let mut is_renewed = false;
    while !is_renewed {
        run(
            conn,
            "UPDATE resource_control.service_request SET expires_at = clock_timestamp() + '200 ms'",
        );
        run(open, "ROLLBACK; BEGIN");
        is_renewed = truth(open, &renew); // on a slow machine the request may have expired
    }
    let is_overdue =
        "(SELECT expires_at < clock_timestamp() FROM resource_control.service_request)";
    eventually("the request looks overdue", || truth(conn, is_overdue));
    assert_eq!(claim(conn, 1), 0);
    run(open, "COMMIT");
    assert_eq!(claim(conn, 1), 0);
    assert!(complete(conn, id));
}

/// The completion reads the clock after its wait for the renewing transaction, and not before.
#[test]
fn a_completion_that_has_waited_for_a_renewal_is_in_time() {
    let database = installed();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    let id = claim(conn, 1);
    run(open, "BEGIN");
    let renew = format!("resource_control.renew_service_request('geocoder', {id}, '30 s')");
    assert!(truth(open, &renew));
    std::thread::scope(|scope| {
        let completes = scope.spawn(|| complete(&mut database.connect(), id));
        let mut observer = Observer::of(&database);
        eventually("the completion waits for the row", || {
            observer.all_waiting() == 1
        });
        run(
            open,
            "CREATE TABLE renewed AS SELECT clock_timestamp() AS at; COMMIT",
        );
        assert!(completes.join().unwrap());
    });
    let is_later = "(SELECT r.completed_at > at AND r.timed_out_at IS NULL \
         FROM resource_control.service_request AS r, renewed)";
    assert!(truth(conn, is_later));
}

#[test]
fn a_lowered_number_of_slots_holds_at_once() {
    let database = installed();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    let ids = [(); 8].map(|()| claim(conn, 8));
    for id in &ids[..5] {
        assert!(complete(conn, *id));
        assert_eq!(
            claim(conn, 3),
            0,
            "no claim before fewer than three requests are in flight"
        );
    }
    assert!(complete(conn, ids[5]));
    // One claim at a time counts the requests, and the others are refused until that claim commits.
    run(open, "BEGIN");
    assert!(claim(open, 3) > 0);
    assert_eq!(claim(conn, 3), 0);
    run(open, "COMMIT");
    assert_eq!(claim(conn, 3), 0);
    assert_eq!(in_flight(conn), 3);
}

/// A policy holds the claim up in its first look at the requests.
#[test]
fn a_claim_after_a_lowered_number_counts_requests_that_came_after_its_first_look() {
    let database = installed();
    let conn = &mut database.connect();
    let role = Role::new(&database);
    run(
        conn,
        &format!(
            "GRANT USAGE ON SCHEMA resource_control TO {name};
             GRANT ALL ON ALL TABLES IN SCHEMA resource_control TO {name};
             GRANT ALL ON ALL SEQUENCES IN SCHEMA resource_control TO {name};
             CREATE FUNCTION gate() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
                PERFORM pg_advisory_xact_lock_shared(1);
                RETURN true; END $$;
             CREATE POLICY gate ON resource_control.service_request USING (gate());
             ALTER TABLE resource_control.service_request ENABLE ROW LEVEL SECURITY;
             INSERT INTO resource_control.service_request (service, slot)
                VALUES ('geocoder', 0), ('geocoder', 3)",
            name = role.name()
        ),
    );
    let mut observer = Observer::of(&database);
    let claimed = std::thread::scope(|scope| {
        let mut holder = database.connect();
        run(&mut holder, "SELECT pg_advisory_lock(1)");
        let claiming = scope.spawn(|| claim(&mut role.connect(), 3));
        eventually("the claim looks", || observer.all_waiting() == 1);
        run(
            conn,
            "INSERT INTO resource_control.service_request (service, slot) VALUES ('geocoder', 1)",
        );
        drop(holder);
        claiming.join().unwrap()
    });
    assert_eq!((claimed, in_flight(conn)), (0, 3));
    let ended = "UPDATE resource_control.service_request SET completed_at = now() WHERE slot = 0";
    run(conn, ended);
    assert!(claim(&mut role.connect(), 3) > 0);
}

#[test]
fn the_present_time_decides_and_not_the_start_of_the_transaction() {
    let database = installed();
    let conn = &mut database.connect();
    run(conn, "BEGIN");
    let began = "(SELECT created_at > now() AND expires_at - created_at = '30 s' FROM resource_control.service_request)";
    eventually("the transaction is older", || {
        truth(conn, "clock_timestamp() > now() + '1 ms'")
    });
    assert!(claim(conn, 1) > 0);
    assert!(truth(conn, began));
    run(conn, "ROLLBACK");
}

#[test]
fn a_claim_in_a_transaction_with_an_older_snapshot_is_an_error() {
    let database = installed();
    let conn = &mut database.connect();
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        run(conn, &format!("BEGIN ISOLATION LEVEL {level}"));
        let claimed = conn
            .batch_execute("SELECT resource_control.claim_service_request('geocoder', 1, '30 s')");
        assert_matches!(
            claimed,
            Err(DieselError::DatabaseError(
                DatabaseErrorKind::CheckViolation,
                _
            ))
        );
        run(conn, "ROLLBACK");
    }
}

#[test]
fn the_functions_refuse_bad_input_themselves() {
    let database = installed();
    let conn = &mut database.connect();
    for call in [
        "claim_service_request(NULL, 1, '1 s')",
        "claim_service_request('', 1, '1 s')",
        "claim_service_request(repeat('ü', 501), 1, '1 s')",
        "claim_service_request('s', NULL, '1 s')",
        "claim_service_request('s', 0, '1 s')",
        "claim_service_request('s', 1001, '1 s')",
        "claim_service_request('s', 1, NULL)",
        "claim_service_request('s', 1, '0')",
        "claim_service_request('s', 1, '-1 s')",
        "claim_service_request('s', 1, '1000 years 1 us')",
        "claim_service_request('s', 1, '1 s', NULL)",
        "renew_service_request('s', 1, '0')",
        "renew_service_request('s', 1, '178000000 years')",
        "prune_service_requests('-1 s', 1)",
        "prune_service_requests('1 s', 0)",
    ] {
        let called = conn.batch_execute(&format!("SELECT resource_control.{call}"));
        let Err(DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, report)) = called
        else {
            panic!("{call}: {called:?}")
        };
        let constraint = report.constraint_name().unwrap_or_default();
        assert!(
            constraint.starts_with("diesel_interlock_bad_"),
            "{call}: {constraint}"
        );
    }
    assert_eq!(
        number(
            conn,
            "(SELECT count(*) FROM resource_control.service_request)"
        ),
        0
    );
}

#[test]
fn the_table_refuses_impossible_requests() {
    let database = installed();
    let conn = &mut database.connect();
    for (row, is_kept) in [
        ("(service, slot) VALUES ('geocoder', 0)", true),
        ("(service, slot) VALUES ('geocoder', 0)", false),
        ("(service, slot) VALUES ('', 0)", false),
        ("(service, slot) VALUES (repeat('x', 1001), 0)", false),
        ("(service, slot) VALUES ('geocoder', -1)", false),
        (
            "(service, slot, expires_at) VALUES ('geocoder', 1, 'infinity')",
            false,
        ),
        // The id is the fencing token, so clients must not choose it.
        ("(id, service, slot) VALUES (7, 'geocoder', 2)", false),
    ] {
        let insert = format!("INSERT INTO resource_control.service_request {row}");
        assert_eq!(conn.batch_execute(&insert).is_ok(), is_kept, "{row}");
    }
}

#[test]
fn names_are_equal_if_their_bytes_are() {
    let database = installed();
    let conn = &mut database.connect();
    run(
        conn,
        "CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
    );
    let mut claims = |name: &str| {
        let claim = format!(
            "(SELECT count(id) FROM resource_control.claim_service_request('{name}'::text COLLATE any_case, 1, '30 s'))"
        );
        number(conn, &claim)
    };
    assert_eq!(
        [claims("geo"), claims("GEO"), claims("geo"), claims("GEO")],
        [1, 1, 0, 0]
    );
}

#[test]
fn locked_or_young_requests_are_not_pruned() {
    let database = installed();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    run(
        conn,
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, completed_at) \
         SELECT 'old', 0, now() - days * interval '1 day', now() - days * interval '1 day', now() - days * interval '1 day' \
         FROM unnest(ARRAY[50, 40, 31, 29]) AS days",
    );
    run(
        open,
        "BEGIN; SELECT FROM resource_control.service_request WHERE id = 2 FOR UPDATE",
    );
    run(conn, IMPATIENT);
    let prune = "resource_control.prune_service_requests('30 days', 10000)";
    assert_eq!(number(conn, prune), 2);
    run(open, "COMMIT");
    assert_eq!([number(conn, prune), number(conn, prune)], [1, 0]);
    assert_eq!(
        text(
            conn,
            "(SELECT string_agg(id::text, ' ') FROM resource_control.service_request)"
        ),
        "4"
    );
}

/// A client that follows the article's own steps.
struct Article(PgConnection);

#[derive(QueryableByName)]
struct Id {
    #[diesel(sql_type = BigInt)]
    id: i64,
}

impl Article {
    fn claim(&mut self) -> Option<i64> {
        run(
            &mut self.0,
            "UPDATE resource_control.service_request SET timed_out_at = now() \
             WHERE service = 'geocoder' AND expires_at < now() AND completed_at IS NULL AND timed_out_at IS NULL",
        );
        self.0
            .transaction(|conn| {
                conn.batch_execute("LOCK TABLE resource_control.service_request IN SHARE ROW EXCLUSIVE MODE")?;
                diesel::sql_query(
                    "INSERT INTO resource_control.service_request (service, created_at, expires_at, slot) \
                     SELECT 'geocoder', clock_timestamp(), clock_timestamp() + '40 ms', coalesce(min(slot), 0) \
                     FROM generate_series(0, 3) slot WHERE NOT EXISTS ( \
                         SELECT * FROM resource_control.service_request AS r \
                         WHERE r.service = 'geocoder' AND r.slot = slot.slot \
                         AND completed_at IS NULL AND timed_out_at IS NULL) \
                     ON CONFLICT DO NOTHING RETURNING id",
                )
                .get_result::<Id>(conn)
                .optional()
            })
            .unwrap()
            .map(|row| row.id)
    }

    /// Ends the request, unless it has timed out meanwhile.
    fn release(&mut self, id: i64) {
        let save = format!(
            "UPDATE resource_control.service_request SET timed_out_at = NULL, completed_at = LEAST(now(), expires_at) \
             WHERE id = {id}"
        );
        run(&mut self.0, &save);
    }
}

#[test]
fn clients_that_follow_the_article_share_the_slots() {
    let database = installed();
    let four = FOUR.details("ours");
    let (pool, start) = (pool(&database, 4), Barrier::new(8));
    // How often the clients of each kind had a slot.
    let claims = [(); 2].map(|()| AtomicU64::new(0));
    std::thread::scope(|scope| {
        for client in 0..8 {
            let (database, pool, four, start) = (&database, &pool, &four, &start);
            let (claims, own) = (&claims, &claims[client % 2]);
            scope.spawn(move || {
                let mut article = Article(database.connect());
                start.wait();
                eventually("the clients of each kind had a slot often", || {
                    for _ in 0..10 {
                        let is_admitted = if client % 2 == 0 {
                            let claimed = article.claim();
                            // One client in eight crashes.
                            let released = claimed.filter(|_| fastrand::u8(0..8) > 0);
                            released.into_iter().for_each(|id| article.release(id));
                            claimed.is_some()
                        } else {
                            let permit = four.try_acquire(pool).unwrap().admitted();
                            permit.map(|permit| permit.release().unwrap()).is_some()
                        };
                        own.fetch_add(u64::from(is_admitted), Ordering::SeqCst);
                    }
                    claims.iter().all(|it| it.load(Ordering::SeqCst) >= 100)
                });
            });
        }
    });
    let admin = &mut database.connect();
    let shared = "(SELECT count(*) FROM (
        SELECT created_at < lag(LEAST(completed_at, timed_out_at, expires_at)) OVER slot AS is_shared
            FROM resource_control.service_request WINDOW slot AS (PARTITION BY slot ORDER BY created_at)) AS r WHERE is_shared)";
    assert_eq!(number(admin, shared), 0);
    assert!(
        number(
            admin,
            "(SELECT max(slot) FROM resource_control.service_request)"
        ) <= 3
    );
    for whose in ["ours", ""] {
        let claims = format!(
            "(SELECT count(*) FROM resource_control.service_request WHERE details = '{whose}')"
        );
        assert!(number(admin, &claims) >= 100, "{whose:?}");
    }
}

#[test]
fn an_outcome_that_is_not_used_is_a_warning() {
    let database = installed();
    let pool = pool(&database, 2);
    #[expect(unused_must_use)]
    FOUR.try_acquire(&pool).unwrap();
    #[expect(unused_must_use)]
    FOUR.acquire(&pool).unwrap();
    #[expect(unused_must_use)]
    FOUR.acquire_timeout(&pool, Duration::from_secs(60))
        .unwrap();
    #[expect(unused_must_use)]
    FOUR.key(7);
    eventually("all slots are free", || {
        in_flight(&mut database.connect()) == 0
    });
}

/// Without an error, the caller would believe that the request has ended, while its slot stays
/// taken.
#[test]
fn a_snapshot_that_is_older_than_the_request_is_an_error() {
    let database = installed();
    let (conn, old) = (&mut database.connect(), &mut database.connect());
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for operation in [
            "complete_service_request('geocoder', {id})",
            "complete_service_request('geocoder', {id}, true)",
            "renew_service_request('geocoder', {id}, '1 hour')",
        ] {
            // The first statement of the transaction takes the snapshot, not BEGIN.
            run(
                old,
                &format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM pg_class"),
            );
            let id = claim(conn, 4);
            let operation = operation.replace("{id}", &id.to_string());
            let refused = old.batch_execute(&format!("SELECT resource_control.{operation}"));
            assert_matches!(
                refused,
                Err(DieselError::DatabaseError(
                    DatabaseErrorKind::CheckViolation,
                    _
                ))
            );
            run(old, "ROLLBACK");
            // With a snapshot that shows the request, the operation succeeds.
            run(old, &format!("BEGIN ISOLATION LEVEL {level}"));
            assert!(truth(old, &format!("resource_control.{operation}")));
            run(old, "COMMIT");
            complete(conn, id);
            assert_eq!(in_flight(conn), 0);
        }
    }
}

#[test]
fn a_request_is_identified_by_its_claim_if_one_is_given_and_by_its_id_otherwise() {
    let database = installed();
    let conn = &mut database.connect();
    let claim =
        "(SELECT id FROM resource_control.claim_service_request('geocoder', 4, '30 s', '', 42))";
    let row = "(SELECT concat_ws(' ', expires_at, completed_at, timed_out_at) FROM resource_control.service_request ORDER BY id DESC LIMIT 1)";
    let id = number(conn, claim);
    let before = text(conn, row);
    for wrong in [41, 0, -42] {
        for operation in [
            format!("complete_service_request('geocoder', {id}, true, {wrong})"),
            format!("complete_service_request('geocoder', {id}, false, {wrong})"),
            format!("renew_service_request('geocoder', {id}, '1 hour', {wrong})"),
        ] {
            assert!(!truth(conn, &format!("resource_control.{operation}")));
        }
    }
    assert_eq!(text(conn, row), before);
    let right = [
        format!("renew_service_request('geocoder', {id}, '1 hour', 42)"),
        format!("renew_service_request('geocoder', {id}, '2 hours')"),
        format!("renew_service_request('geocoder', {id}, '3 hours', NULL)"),
        format!("complete_service_request('geocoder', {id}, true, 42)"),
    ];
    for operation in right {
        assert!(truth(conn, &format!("resource_control.{operation}")));
    }
    assert_eq!(in_flight(conn), 0);
    let id = number(conn, claim);
    assert!(complete(conn, id), "without a claim, the id suffices");

    // The row of a client that sends no claim has none.
    let id = self::claim(conn, 4);
    assert!(!truth(
        conn,
        &format!("resource_control.complete_service_request('geocoder', {id}, false, 42)")
    ));
    assert!(complete(conn, id));
}
