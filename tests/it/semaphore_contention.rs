//! Semaphores under many concurrent connections. The tests check the log in the database.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::sql_types::BigInt;

use crate::half::prelude::*;
use crate::half::{Database, Semaphore};
use crate::semaphores::{database, expire, fill, log};
use crate::support::{Expect, Observer, eventually, number};

const LEVELS: [&str; 3] = ["read committed", "repeatable read", "serializable"];
const FOUR: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));

/// Requests with the time at which they stopped counting, if they did.
const SPANS: &str = "SELECT *, LEAST(completed_at, timed_out_at, expires_at) AS ended_at \
    FROM resource_control.service_request";

/// The most requests to a service that were in flight at the same time.
fn most_at_once(conn: &mut PgConnection) -> i64 {
    number(
        conn,
        &format!(
            "WITH span AS ({SPANS}), step AS ( \
                 SELECT service, created_at AS at, 1 AS change FROM span \
                 UNION ALL SELECT service, ended_at, -1 FROM span) \
             SELECT max(count) FROM (SELECT sum(change) OVER ( \
                 PARTITION BY service ORDER BY at, change ROWS UNBOUNDED PRECEDING) AS count FROM step) AS c"
        ),
    )
}

/// Requests that got a slot before the one that had it ended.
///
/// Exact at READ COMMITTED. At a stricter level a claim does not see the holders since its snapshot, so the time that it
/// writes may be some microseconds before theirs. The test then checks the times that the holders themselves have seen.
fn shared_slots(conn: &mut PgConnection) -> i64 {
    number(
        conn,
        &format!(
            "SELECT count(*) FROM (SELECT created_at < lag(ended_at) OVER ( \
                 PARTITION BY service, slot ORDER BY created_at) AS shared FROM ({SPANS}) AS span) AS s WHERE shared"
        ),
    )
}

/// Requests with a smaller id than the one that had the slot before.
fn out_of_order(conn: &mut PgConnection) -> i64 {
    number(
        conn,
        "SELECT count(*) FROM (SELECT id < lag(id) OVER ( \
             PARTITION BY service, slot ORDER BY created_at) AS descends \
             FROM resource_control.service_request) AS s WHERE descends",
    )
}

#[track_caller]
fn assert_honoured(database: &Database, slots: i64) {
    let conn = &mut database.connect();
    assert!(most_at_once(conn) <= slots, "{}", most_at_once(conn));
    assert_eq!(shared_slots(conn), 0);
    assert_eq!(out_of_order(conn), 0);
}

/// The holders as they see themselves: from the reply to a claim until the completion is sent.
struct Holders(AtomicI64);

impl Holders {
    #[track_caller]
    fn enter(&self, slots: i64) {
        let held = self.0.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(held <= slots, "{held} holders");
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Sixteen clients claim and end requests as fast as they can for some time, while another session
/// observes. If they are forgetful, every eighth request is left to its timeout.
fn hammer(database: &Database, setting: &str, semaphore: &Semaphore, forgetful: bool) {
    const CLIENTS: usize = 16;
    let slots = i64::from(semaphore.slots());
    let holders = Holders(AtomicI64::new(0));
    let (start, running) = (Barrier::new(CLIENTS), AtomicUsize::new(CLIENTS));
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (holders, start, running) = (&holders, &start, &running);
            scope.spawn(move || {
                let conn = &mut with_setting(database, setting);
                start.wait();
                let end = Instant::now() + Duration::from_secs(1);
                for turn in client.. {
                    if Instant::now() > end {
                        break;
                    }
                    let Some(claim) = semaphore.claim_on(conn).unwrap().admitted() else {
                        continue;
                    };
                    if !forgetful {
                        holders.enter(slots);
                    }
                    if turn % 3 == 0 {
                        semaphore.renew_on(conn, claim.id).unwrap();
                    }
                    if !forgetful {
                        holders.leave();
                        assert!(semaphore.complete_on(conn, claim.id).unwrap());
                    } else if turn % 8 != 0 {
                        semaphore.complete_on(conn, claim.id).unwrap();
                    }
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        let conn = &mut database.connect();
        // Ends the loop if a client fails.
        let end = Instant::now() + Duration::from_secs(60);
        while running.load(Ordering::SeqCst) > 0 && Instant::now() < end {
            let in_flight = number(
                conn,
                &format!(
                    "SELECT count(*) FROM resource_control.service_request WHERE service = '{}' \
                     AND completed_at IS NULL AND timed_out_at IS NULL AND expires_at > clock_timestamp()",
                    semaphore.service()
                ),
            );
            assert!(in_flight <= slots, "{in_flight} in flight");
        }
    });
}

fn with_setting(database: &Database, setting: &str) -> PgConnection {
    let mut conn = database.connect();
    conn.batch_execute(&format!("SET {setting}")).unwrap();
    conn
}

fn isolation(level: &str) -> String {
    format!("default_transaction_isolation = '{level}'")
}

#[test]
fn never_more_than_the_slots_at_any_isolation_level() {
    for level in LEVELS {
        let (database, setting) = (database(), isolation(level));
        hammer(&database, &setting, &FOUR, false);
        let brief = Semaphore::named("forgotten", 4, Duration::from_millis(40));
        hammer(&database, &setting, &brief, true);
        let conn = &mut database.connect();
        if level == "read committed" {
            assert_honoured(&database, 4);
            assert_eq!(most_at_once(conn), 4);
        }
        assert_eq!(out_of_order(conn), 0);
        let log = log(conn);
        assert!(log.len() > 20, "{level}: {}", log.len());
        assert!(log.iter().any(|request| request.timed_out_at.is_some()));
    }
}

/// As claims do in sessions that have noticed an old snapshot.
#[test]
fn never_more_than_the_slots_where_the_newest_requests_are_read_first() {
    let database = database();
    let setting = "resource_control.old_snapshot_until = '99999999999'";
    hammer(&database, setting, &FOUR, false);
    let brief = Semaphore::named("forgotten", 4, Duration::from_millis(40));
    hammer(&database, setting, &brief, true);
    assert_honoured(&database, 4);
    assert_eq!(most_at_once(&mut database.connect()), 4);
}

#[test]
fn of_one_slot_the_tokens_ascend_from_each_holder_to_the_next() {
    let database = database();
    let one = Semaphore::named("lease", 1, Duration::from_secs(30));
    let start = Barrier::new(32);
    // In the order in which the holders themselves see it.
    let tokens = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let conn = &mut database.connect();
                start.wait();
                let end = Instant::now() + Duration::from_secs(2);
                while Instant::now() < end {
                    if let Some(claim) = one.claim_on(conn).unwrap().admitted() {
                        tokens
                            .try_lock()
                            .expect("nobody else holds it")
                            .push(claim.id);
                        assert!(one.complete_on(conn, claim.id).unwrap());
                    }
                }
            });
        }
    });
    let tokens = tokens.into_inner().unwrap();
    assert!(tokens.is_sorted());
    assert!(tokens.len() > 10, "{} holders", tokens.len());
    assert_honoured(&database, 1);
}

#[test]
fn of_overdue_slots_each_is_taken_over_once() {
    let database = database();
    let conn = &mut database.connect();
    for round in 0..30 {
        conn.batch_execute("TRUNCATE resource_control.service_request")
            .unwrap();
        fill(&FOUR, conn);
        expire(conn, "geocoder");
        let start = Barrier::new(12);
        let claimed = AtomicI64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    start.wait();
                    if FOUR.claim_on(conn).unwrap().admitted().is_some() {
                        claimed.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        // A claim waits for the marks of another one for a quarter second at most, so a stalled machine may refuse some.
        let mut claimed = claimed.into_inner();
        assert!((1..=4).contains(&claimed), "{claimed} in round {round}");
        while FOUR.claim_on(conn).unwrap().admitted().is_some() {
            claimed += 1;
        }
        assert_eq!(claimed, 4, "round {round}");
        let log = log(conn);
        assert_eq!(log.len(), 8);
        assert!(
            log[..4]
                .iter()
                .all(|request| request.timed_out_at.is_some())
        );
        assert_eq!(Observer::of(&database).all_held(), 0);
        assert_eq!(out_of_order(conn), 0);
    }
}

#[test]
fn a_lowered_number_holds_for_new_claims_while_older_ones_end() {
    for level in LEVELS {
        let database = database();
        let conn = &mut database.connect();
        let eight = Semaphore::named("geocoder", 8, Duration::from_secs(30)).details("eight");
        let four = FOUR.details("four");
        let mut older = fill(&eight, conn);
        // The lowest slots end first, so the slots above N stay taken the longest.
        older.sort_by_key(|claim| std::cmp::Reverse(claim.slot));
        let holders = Holders(AtomicI64::new(8));
        let (start, claimed) = (Barrier::new(9), AtomicUsize::new(0));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let conn = &mut with_setting(&database, &isolation(level));
                    start.wait();
                    // Ends the loop if the others fail.
                    let end = Instant::now() + Duration::from_secs(60);
                    while !done.load(Ordering::SeqCst) && Instant::now() < end {
                        if let Some(claim) = four.claim_on(conn).unwrap().admitted() {
                            holders.enter(4);
                            assert!(claim.slot < 4);
                            claimed.fetch_add(1, Ordering::SeqCst);
                            holders.leave();
                            assert!(four.complete_on(conn, claim.id).unwrap());
                        }
                    }
                });
            }
            start.wait();
            while let Some(claim) = older.pop() {
                holders.leave();
                assert!(eight.complete_on(conn, claim.id).unwrap());
                // Some claims later, unless there is no room for another yet.
                if older.len() < 4 {
                    let until = claimed.load(Ordering::SeqCst) + 100;
                    eventually("some are claimed", || {
                        claimed.load(Ordering::SeqCst) > until
                    });
                }
            }
            done.store(true, Ordering::SeqCst);
        });
        if level == "read committed" {
            // How many requests were in flight when each of the new ones was claimed, itself included.
            let most = number(
                conn,
                &format!(
                    "WITH span AS ({SPANS}) SELECT max((SELECT count(*) FROM span AS s \
                         WHERE s.created_at <= c.created_at AND s.ended_at > c.created_at)) \
                     FROM span AS c WHERE c.details = 'four'"
                ),
            );
            assert_eq!(most, 4);
            assert_eq!(shared_slots(conn), 0);
        }
        assert_eq!(out_of_order(conn), 0);
        assert_eq!(fill(&eight, conn).len(), 8, "raised again");
    }
}

#[test]
fn while_instances_disagree_the_larger_number_holds() {
    let database = database();
    let timeout = Duration::from_millis(40);
    let semaphores = [3, 8, 5].map(|slots| Semaphore::named("geocoder", slots, timeout));
    let start = Barrier::new(12);
    std::thread::scope(|scope| {
        for client in 0..12 {
            let semaphore = &semaphores[client % 3];
            let (database, start) = (&database, &start);
            scope.spawn(move || {
                let conn = &mut database.connect();
                start.wait();
                let end = Instant::now() + Duration::from_secs(1);
                for turn in 0.. {
                    if Instant::now() > end {
                        break;
                    }
                    let claim = semaphore.claim_on(conn).unwrap().admitted();
                    if let Some(claim) = claim.filter(|_| turn % 4 != 0) {
                        semaphore.complete_on(conn, claim.id).unwrap();
                    }
                }
            });
        }
    });
    assert_honoured(&database, 8);
}

/// The statements of article 004. It also ends overdue requests of other clients, by the expiry in their
/// rows. (Its `now()` is older than its lock, so its claims would seem to
/// overlap those before them; here they tell the time at which they hold it.)
struct Article(PgConnection);

#[derive(QueryableByName)]
struct Slot {
    #[diesel(sql_type = BigInt)]
    id: i64,
}

impl Article {
    fn claim(&mut self) -> Option<i64> {
        diesel::sql_query(
            "UPDATE resource_control.service_request SET timed_out_at = now() \
             WHERE service = 'geocoder' AND expires_at < now() \
             AND completed_at IS NULL AND timed_out_at IS NULL",
        )
        .execute(&mut self.0)
        .unwrap();
        self.0
            .transaction(|conn| {
                conn.batch_execute(
                    "LOCK TABLE resource_control.service_request IN SHARE ROW EXCLUSIVE MODE",
                )?;
                diesel::sql_query(
                    "INSERT INTO resource_control.service_request (service, created_at, expires_at, slot) \
                     SELECT 'geocoder', clock_timestamp(), clock_timestamp() + '40 ms', coalesce(min(slot), 0) \
                     FROM generate_series(0, 3) slot WHERE NOT EXISTS ( \
                         SELECT * FROM resource_control.service_request AS r \
                         WHERE r.service = 'geocoder' AND r.slot = slot.slot \
                         AND completed_at IS NULL AND timed_out_at IS NULL) \
                     ON CONFLICT DO NOTHING RETURNING id",
                )
                .get_result::<Slot>(conn)
                .optional()
            })
            .unwrap()
            .map(|slot| slot.id)
    }

    /// `save()`: whatever has become of it meanwhile.
    fn release(&mut self, id: i64) {
        diesel::sql_query(format!(
            "UPDATE resource_control.service_request \
             SET service = service, slot = slot, created_at = created_at, expires_at = expires_at, \
                 timed_out_at = NULL, completed_at = LEAST(now(), expires_at) WHERE id = {id}"
        ))
        .execute(&mut self.0)
        .unwrap();
    }
}

#[test]
fn a_client_that_follows_the_article_and_ours_share_the_slots() {
    let database = database();
    let four = Semaphore::named("geocoder", 4, Duration::from_millis(40)).details("ours");
    let start = Barrier::new(12);
    std::thread::scope(|scope| {
        for client in 0..12 {
            let (database, start, four) = (&database, &start, &four);
            scope.spawn(move || {
                let mut article = Article(database.connect());
                let conn = &mut database.connect();
                start.wait();
                let end = Instant::now() + Duration::from_secs(2);
                for turn in client.. {
                    if Instant::now() > end {
                        break;
                    }
                    if client % 2 == 0 {
                        let claim = article.claim();
                        if let Some(id) = claim.filter(|_| turn % 8 != 0) {
                            article.release(id);
                        }
                    } else {
                        let claim = four.claim_on(conn).unwrap().admitted();
                        if let Some(claim) = claim.filter(|_| turn % 8 != 1) {
                            four.complete_on(conn, claim.id).unwrap();
                        }
                    }
                }
            });
        }
    });
    assert_honoured(&database, 4);
    let conn = &mut database.connect();
    for whose in ["ours", ""] {
        let claims = format!(
            "SELECT count(*) FROM resource_control.service_request WHERE details = '{whose}'"
        );
        assert!(number(conn, &claims) > 4, "{whose:?}");
    }
}

#[test]
fn permits_of_many_threads_share_a_small_pool() {
    let database = database();
    let pool = database.pool(2);
    let in_flight = AtomicI64::new(0);
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (pool, in_flight, start) = (&pool, &in_flight, &start);
            scope.spawn(move || {
                start.wait();
                for turn in 0..20 {
                    let permit = FOUR
                        .acquire_timeout(pool, Duration::from_secs(60))
                        .unwrap()
                        .expect_acquired();
                    let others = in_flight.fetch_add(1, Ordering::SeqCst);
                    assert!(others < 4, "{others}");
                    in_flight.fetch_sub(1, Ordering::SeqCst);
                    if (thread + turn) % 2 == 0 {
                        permit.release().unwrap();
                    }
                }
            });
        }
    });
    eventually("all are released", || {
        log(&mut database.connect())
            .iter()
            .all(|request| !request.is_unmarked())
    });
    assert_honoured(&database, 4);
}
