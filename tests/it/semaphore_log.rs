//! The log of requests: how it is pruned, and that it stays fast as it grows.

use std::time::Duration;

use diesel::connection::SimpleConnection;

use crate::half::Semaphore;
use crate::half::prelude::*;
use crate::semaphores::{claim_in_sql, database, expire, log};
use crate::support::{Expect, number};

const GEOCODER: Semaphore = Semaphore::named("geocoder", 2, Duration::from_secs(30));

/// Inserts requests that were claimed and ended in the past.
fn ended(conn: &mut PgConnection, count: i32, ago: &str) {
    diesel::sql_query(format!(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, completed_at) \
         SELECT 'geocoder', 0, now() - interval '{ago}', now() - interval '{ago}' + '30 s', now() - interval '{ago}' \
         FROM generate_series(1, {count})"
    ))
    .execute(conn)
    .unwrap();
}

fn prune(conn: &mut PgConnection, older_than: &str, batch: i32) -> i64 {
    number(
        conn,
        &format!("resource_control.prune_service_requests('{older_than}', {batch})"),
    )
}

fn count(conn: &mut PgConnection) -> i64 {
    number(
        conn,
        "SELECT count(*) FROM resource_control.service_request",
    )
}

#[test]
fn what_ended_long_ago_is_pruned_the_oldest_first() {
    let database = database();
    let conn = &mut database.connect();
    ended(conn, 5, "3 days");
    ended(conn, 5, "2 days");
    ended(conn, 5, "1 hour");
    let all = log(conn);
    assert_eq!(prune(conn, "4 days", 100), 0);
    assert_eq!(prune(conn, "1 day", 3), 3);
    assert_eq!(log(conn), all[3..]);
    assert_eq!(prune(conn, "1 day", 1), 1);
    assert_eq!(prune(conn, "1 day", 100), 6);
    assert_eq!(log(conn), all[10..]);
    assert_eq!(prune(conn, "1 day", 100), 0);
    assert_eq!(prune(conn, "0", 2_147_483_647), 5);
}

#[test]
fn what_is_in_flight_or_ended_lately_is_kept() {
    let database = database();
    let conn = &mut database.connect();
    ended(conn, 4, "3 days");
    // Claimed long ago, and: in flight; ended an hour ago; marked an hour ago; ended late, after it was
    // marked.
    conn.batch_execute(
        "INSERT INTO resource_control.service_request \
             (service, slot, created_at, expires_at, completed_at, timed_out_at) VALUES \
             ('a', 0, now() - interval '3 days', now() + interval '1 hour', NULL, NULL), \
             ('a', 1, now() - interval '3 days', now() + interval '1 hour', now() - interval '1 hour', NULL), \
             ('a', 2, now() - interval '3 days', now() - interval '2 days', NULL, now() - interval '1 hour'), \
             ('a', 3, now() - interval '3 days', now() - interval '2 days', now() - interval '1 hour', now() - interval '2 days'), \
             ('a', 4, now() - interval '3 days', now() - interval '1 hour', NULL, NULL)",
    )
    .unwrap();
    ended(conn, 4, "2 days");
    assert_eq!(prune(conn, "1 day", 100), 8);
    let left = log(conn);
    assert_eq!(left.len(), 5);
    assert!(left.iter().all(|request| request.service == "a"));

    // Only the pruning marked it.
    assert!(left[4].timed_out_at.is_some());
    conn.batch_execute(
        "UPDATE resource_control.service_request SET expires_at = now() - interval '2 days', timed_out_at = NULL \
         WHERE slot = 4",
    )
        .unwrap();
    assert_eq!(prune(conn, "1 day", 100), 1);
    assert!(log(conn).iter().all(|request| request.slot != 4));
}

#[test]
fn the_log_is_as_old_as_the_ends_of_its_requests() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "INSERT INTO resource_control.service_request \
             (service, slot, created_at, expires_at, completed_at) \
         VALUES ('geocoder', 0, now() - interval '2 hours', now() + interval '2 hours', now() - interval '1 hour'), \
             ('geocoder', 1, now() - interval '2 hours', now() - interval '1 hour', now())",
    )
    .unwrap();
    let pruned = "resource_control.prune_service_requests('30 minutes', 10)";
    assert_eq!(number(conn, pruned), 1);
    assert_eq!(log(conn)[0].slot, 1);
}

#[test]
fn a_year_of_the_log_is_twelve_times_thirty_days() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "INSERT INTO resource_control.service_request \
             (service, slot, created_at, expires_at, completed_at) \
         SELECT 'geocoder', 0, ended, ended, ended \
         FROM (SELECT now() - days * interval '24 hours' AS ended FROM (VALUES (358), (362)) AS old (days)) AS old",
    )
    .unwrap();
    let pruned = "resource_control.prune_service_requests('12 months', 10)";
    assert_eq!(number(conn, pruned), 1);
}

#[test]
fn what_is_locked_is_skipped() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    ended(conn, 6, "2 days");
    let all = log(conn);
    open.batch_execute(&format!(
        "BEGIN; SELECT FROM resource_control.service_request WHERE id IN ({}, {}) FOR KEY SHARE",
        all[0].id, all[3].id
    ))
    .unwrap();
    conn.batch_execute("SET lock_timeout = '2s'").unwrap();
    assert_eq!(prune(conn, "1 day", 3), 3);
    assert_eq!(prune(conn, "1 day", 100), 1);
    assert_eq!(log(conn), [all[0].clone(), all[3].clone()]);
    open.batch_execute("COMMIT").unwrap();
    assert_eq!(prune(conn, "1 day", 100), 2);
}

/// The clock was wrong for some time.
#[test]
fn a_request_from_the_future_is_not_in_the_way() {
    let database = database();
    let conn = &mut database.connect();
    ended(conn, 1, "-1000 days");
    ended(conn, 3, "2 days");
    assert_eq!(prune(conn, "1 day", 2), 2);
    assert_eq!(prune(conn, "1 day", 100), 1);
    assert_eq!(count(conn), 1);
}

#[test]
fn a_large_batch_is_pruned_piece_by_piece() {
    let database = database();
    let conn = &mut database.connect();
    ended(conn, 1500, "3 days");
    let claim = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    conn.batch_execute(
        "UPDATE resource_control.service_request SET created_at = now() - interval '3 days' \
         WHERE completed_at IS NULL",
    )
    .unwrap();
    ended(conn, 2500, "2 days");
    ended(conn, 2000, "1 hour");
    assert_eq!(prune(conn, "1 day", 3500), 3500);
    assert_eq!(prune(conn, "1 day", 100_000), 500);
    assert_eq!(count(conn), 2001);
    assert!(GEOCODER.complete_on(conn, claim.id).unwrap());
}

#[test]
fn pruning_does_not_read_what_is_too_young() {
    let database = database();
    let conn = &mut database.connect();
    ended(conn, 100, "2 days");
    ended(conn, 50_000, "1 hour");
    conn.batch_execute("BEGIN").unwrap();
    assert_eq!(prune(conn, "1 day", 10_000), 100);
    let fetched = number(
        conn,
        "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'service_request'",
    );
    assert!(fetched < 5_000, "{fetched} rows read");
    conn.batch_execute("COMMIT").unwrap();
}

/// A plan that was made for a tiny table must stay fast after the table has grown.
#[test]
fn no_call_reads_the_whole_table_once_it_has_grown() {
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    let admit = |conn: &mut PgConnection, slots: i32| {
        let call =
            format!("resource_control.admit_service_request('geocoder', {slots}, '30 s', '')");
        number(conn, &format!("SELECT count(id) FROM {call}")) == 1
    };
    let all_calls = |conn: &mut PgConnection| {
        // One of them is overdue, so that the claim also marks. The inner function is called first, because its plans
        // would otherwise be made with the settings of the outer function.
        assert!(admit(conn, 2));
        expire(conn, "geocoder");
        assert!(admit(conn, 1));
        assert!(admit(conn, 2));
        assert!(!admit(conn, 1));
        assert!(!claim_in_sql(conn, "geocoder", 2));
        let newest = "(SELECT max(id) FROM resource_control.service_request)";
        for call in [
            format!("resource_control.renew_service_request({newest}, '30 s')"),
            format!("resource_control.complete_service_request({newest})"),
            format!("resource_control.complete_service_request({newest})"),
        ] {
            number(conn, &format!("SELECT count({call})"));
        }
        assert_eq!(prune(conn, "5 days", 100), 0);
    };
    // A table that is known to have one page is read completely. Such a plan is generic after five executions.
    all_calls(conn);
    conn.batch_execute("ANALYZE resource_control.service_request")
        .unwrap();
    for _ in 0..10 {
        all_calls(conn);
    }
    ended(other, 300_000, "1 hour");
    // The setting affects the statements above. The functions have their plans already.
    conn.batch_execute("BEGIN; SET LOCAL enable_seqscan = off")
        .unwrap();
    // The count may include earlier reads.
    let scans = "SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'service_request'";
    let rows =
        "SELECT idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'service_request'";
    let before = [number(conn, scans), number(conn, rows)];
    all_calls(conn);
    let [scans, fetched] = [
        number(conn, scans) - before[0],
        number(conn, rows) - before[1],
    ];
    conn.batch_execute("COMMIT").unwrap();
    assert_eq!(scans, 0);
    assert!(fetched < 5_000, "{fetched} rows read");
}

/// The index of requests in flight looks cheap because it is small, but it keeps entries of ended requests until VACUUM
/// removes them.
#[test]
fn an_id_is_not_looked_for_among_those_in_flight() {
    let database = database();
    let conn = &mut database.connect();
    ended(conn, 10_000, "1 hour");
    // No request is in flight, as at night.
    conn.batch_execute("VACUUM ANALYZE resource_control.service_request")
        .unwrap();
    let claims = [(); 2].map(|()| GEOCODER.claim_on(conn).unwrap().expect_acquired());
    conn.batch_execute("BEGIN").unwrap();
    let scans = "pg_stat_get_xact_numscans('resource_control.service_request_in_flight'::regclass)";
    let before = number(conn, scans);
    for claim in &claims {
        assert!(GEOCODER.renew_on(conn, claim.id).unwrap().is_some());
        assert!(GEOCODER.complete_on(conn, claim.id).unwrap());
        assert!(!GEOCODER.complete_on(conn, claim.id).unwrap());
    }
    assert_eq!(number(conn, scans), before);
    conn.batch_execute("COMMIT").unwrap();
}

/// The number of entries that the call read from the index of requests in flight, dead entries included.
fn entries(conn: &mut PgConnection, call: &mut dyn FnMut(&mut PgConnection)) -> i64 {
    let read =
        "pg_stat_get_xact_tuples_returned('resource_control.service_request_in_flight'::regclass)";
    conn.batch_execute("BEGIN").unwrap();
    let before = number(conn, read);
    call(conn);
    let after = number(conn, read);
    conn.batch_execute("COMMIT").unwrap();
    after - before
}

/// Is refused in a statement that has taken long already, so that the claim counts what it reads, on a fast machine, too.
fn refuse_slowly(conn: &mut PgConnection) {
    conn.batch_execute(
        "DO $$ BEGIN \
             PERFORM pg_sleep(0.001); \
             IF EXISTS (SELECT FROM resource_control.claim_service_request('geocoder', 16, '1 h')) THEN \
                 RAISE 'a slot was free'; \
             END IF; \
         END $$",
    )
    .unwrap();
}

/// The entries of all requests that have ended since are dead, but cannot be removed.
#[test]
fn under_an_old_snapshot_a_session_reads_all_that_ended_once_in_ten_seconds() {
    let database = database();
    let (conn, old) = (&mut database.connect(), &mut database.connect());
    let slots = 16;
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM resource_control.service_request")
        .unwrap();
    for _ in 0..200 {
        conn.batch_execute(
            "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
                 SELECT 'geocoder', slot, now(), now() + interval '1 hour' FROM generate_series(0, 15) AS slot; \
             UPDATE resource_control.service_request SET completed_at = now() \
                 WHERE id > (SELECT max(id) - 16 FROM resource_control.service_request)",
        )
        .unwrap();
    }
    let semaphore = Semaphore::named("geocoder", slots, Duration::from_secs(3600));
    let mut claims: Vec<_> = (0..slots)
        .map(|_| semaphore.claim_on(conn).unwrap().expect_acquired())
        .collect();
    claims.sort_by_key(|claim| claim.slot);
    conn.batch_execute("RESET resource_control.old_snapshot_until")
        .unwrap();
    let mut refuse = |conn: &mut PgConnection| assert!(!claim_in_sql(conn, "geocoder", 16));
    let first = entries(conn, &mut refuse_slowly);
    assert!(first > 3_200, "{first}");
    let next = entries(conn, &mut refuse);
    // The newest requests hold all slots.
    assert!(next < 10, "{next}");
    // For longer than ten seconds, because this test may take as long.
    conn.batch_execute("SET resource_control.old_snapshot_until = '99999999999'")
        .unwrap();
    // Or they have ended in a slot that is free.
    for end in [
        "completed_at = now()",
        "expires_at = now(), timed_out_at = now()",
    ] {
        conn.batch_execute(&format!(
            "UPDATE resource_control.service_request SET {end} WHERE completed_at IS NULL AND timed_out_at IS NULL AND slot = 5"
        ))
        .unwrap();
        let claim = entries(conn, &mut |conn| {
            assert!(claim_in_sql(conn, "geocoder", 16))
        });
        assert!(claim < 10, "{claim}");
    }
    conn.batch_execute(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
         SELECT 'mailer', slot, now(), now() + interval '1 hour' FROM generate_series(0, 99) AS slot",
    )
    .unwrap();
    // The newest requests are of another service. The claim reads some entries for each slot, not all.
    let next = entries(conn, &mut refuse);
    assert!((16..100).contains(&next), "{next}");
    assert!(semaphore.complete_on(conn, claims[3].id).unwrap());
    // One of 15 slots is free, and 15 requests are in flight.
    assert!(!claim_in_sql(conn, "geocoder", 15));
    // One of 16 slots is free. After a guess or a search has found it, claims on the full semaphore are fast again.
    assert_eq!(
        semaphore.claim_on(conn).unwrap().expect_acquired().slot,
        claims[3].slot
    );
    let next = entries(conn, &mut refuse);
    assert!(next < 100, "{next}");
    // Fourteen slots have been held since long before the newest requests.
    conn.batch_execute(
        "UPDATE resource_control.service_request SET completed_at = now() WHERE completed_at IS NULL AND slot < 2; \
         INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, completed_at) \
             SELECT 'geocoder', n % 2, now(), now(), now() FROM generate_series(1, 80) AS n",
    )
    .unwrap();
    for _ in 0..10 {
        let claim = entries(conn, &mut |conn| {
            assert!(claim_in_sql(conn, "geocoder", 16))
        });
        conn.batch_execute(
            "UPDATE resource_control.service_request SET completed_at = now() WHERE completed_at IS NULL AND slot < 2",
        )
        .unwrap();
        // The insertion reads the entries of one slot twice, and a search would read those of both.
        assert!(claim < 500, "{claim}");
    }
    for _ in 0..2 {
        assert!(claim_in_sql(conn, "geocoder", 16));
    }
    // The requests above are pruned, but the snapshot keeps their entries.
    let pruned =
        "pg_stat_get_xact_tuples_returned('resource_control.service_request_pkey'::regclass)";
    conn.batch_execute(
        "DELETE FROM resource_control.service_request WHERE completed_at IS NOT NULL OR service = 'mailer'; BEGIN",
    )
    .unwrap();
    let before = number(conn, pruned);
    refuse(conn);
    let read = number(conn, pruned) - before;
    conn.batch_execute("COMMIT").unwrap();
    assert!(read < 1_000, "{read}");
    // The newest requests hold all slots but one.
    conn.batch_execute(
        "UPDATE resource_control.service_request SET completed_at = now() WHERE slot <> 7 AND completed_at IS NULL; \
         INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, completed_at) \
             SELECT 'mailer', 0, now(), now(), now() FROM generate_series(1, 60)",
    )
    .unwrap();
    for _ in 1..slots {
        assert!(claim_in_sql(conn, "geocoder", 16));
    }
    let next = entries(conn, &mut refuse);
    assert!((1..6).contains(&next), "{next}");
    // A request above N is seen, and an overdue request is not counted.
    let fewer = |conn: &mut PgConnection| {
        entries(conn, &mut |conn| {
            assert!(!claim_in_sql(conn, "geocoder", 15));
        })
    };
    fewer(conn);
    expire(conn, "geocoder");
    assert!(claim_in_sql(conn, "geocoder", 16));
    old.batch_execute("COMMIT").unwrap();
}

#[test]
fn a_session_that_is_slow_for_another_reason_reads_all_requests_in_flight() {
    let database = database();
    let conn = &mut database.connect();
    for _ in 0..16 {
        assert!(claim_in_sql(conn, "geocoder", 16));
    }
    // Beginning with the transaction, the server counts what all of them read.
    conn.batch_execute("BEGIN").unwrap();
    for _ in 0..200 {
        refuse_slowly(conn);
    }
    let noticed = "(current_setting('resource_control.old_snapshot_until', true) <> '')::int";
    assert_eq!(number(conn, &format!("COALESCE({noticed}, 0)")), 0);
    conn.batch_execute("COMMIT").unwrap();
}

/// All the requests of one slot would be in the way of each other.
#[test]
fn under_an_old_snapshot_claims_are_spread_over_the_slots() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute("SET resource_control.old_snapshot_until = '99999999999'")
        .unwrap();
    let semaphore = Semaphore::named("geocoder", 16, Duration::from_secs(3600));
    for _ in 0..1_600 {
        let claim = semaphore.claim_on(conn).unwrap().expect_acquired();
        assert!(semaphore.complete_on(conn, claim.id).unwrap());
    }
    let fewest = number(
        conn,
        "(SELECT min(count) FROM (SELECT count(*) FROM resource_control.service_request GROUP BY slot) AS slots)",
    );
    let slots = number(
        conn,
        "(SELECT count(DISTINCT slot) FROM resource_control.service_request)",
    );
    assert_eq!(slots, 16);
    // A hundred each on average.
    assert!(fewest > 30, "{fewest}");
}

#[test]
fn of_very_many_slots_a_claim_looks_at_a_few() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
         SELECT 'geocoder', slot, now(), now() + interval '1 hour' FROM generate_series(0, 9999) AS slot; \
         ANALYZE resource_control.service_request",
    )
    .unwrap();
    let all = Semaphore::named("geocoder", 32_767, Duration::from_secs(3600));
    let mut reads: Vec<i64> = (0..30)
        .map(|_| {
            entries(conn, &mut |conn| {
                assert!(claim_in_sql(conn, "geocoder", 32_767));
            })
        })
        .collect();
    // One claim in a hundred guesses four slots that are taken.
    reads.sort();
    assert!(reads[20] < 50, "{reads:?}");

    // Nearly all slots are taken. The claim finds the slot that was released last.
    conn.batch_execute(
        "TRUNCATE resource_control.service_request; \
         INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
         SELECT 'geocoder', slot, now(), now() + interval '1 hour' FROM generate_series(0, 32765) AS slot",
    )
    .unwrap();
    for _ in 0..3 {
        let claim = all.claim_on(conn).unwrap().expect_acquired();
        assert_eq!(claim.slot, 32_766);
        assert!(all.complete_on(conn, claim.id).unwrap());
    }
    let read = entries(conn, &mut |conn| {
        assert!(claim_in_sql(conn, "geocoder", 32_767));
    });
    assert!(read < 50, "{read}");
    assert!(!claim_in_sql(conn, "geocoder", 32_767));
}

#[test]
fn a_lowered_number_of_very_many_slots_holds_for_new_claims_at_once() {
    let database = database();
    let conn = &mut database.connect();
    let fewer = Semaphore::named("geocoder", 300, Duration::from_secs(3600));
    conn.batch_execute(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
         SELECT 'geocoder', slot, now(), now() + interval '1 hour' FROM generate_series(300, 599) AS slot",
    )
    .unwrap();
    assert!(fewer.claim_on(conn).unwrap().is_full());

    // The slot that was released last is above N.
    conn.batch_execute(
        "TRUNCATE resource_control.service_request; \
         INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
         SELECT 'geocoder', slot, now(), now() + interval '1 hour' FROM generate_series(0, 299) AS slot WHERE slot <> 5; \
         INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, completed_at) \
         VALUES ('geocoder', 400, now(), now() + interval '1 hour', now())",
    )
    .unwrap();
    assert_eq!(fewer.claim_on(conn).unwrap().expect_acquired().slot, 5);
    assert!(fewer.claim_on(conn).unwrap().is_full());
}
