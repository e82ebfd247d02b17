//! Settings of a user that must not change the behaviour of semaphores.

use std::time::Duration;

use chrono::TimeDelta;
use diesel::connection::SimpleConnection;
use diesel::result::DatabaseErrorKind;
use diesel::result::Error::DatabaseError;

use crate::half::prelude::*;
use crate::half::{
    Admission, Cluster, Database, Error, IS_ASYNCHRONOUS, RoundTrips, Semaphore, error::Schema,
    functions::renew_service_request, migrations,
};
use crate::semaphores::{database, expire, fill, log};
use crate::support::{Expect, assert_matches, number, round_trips_of, setting};

const TWO: Semaphore = Semaphore::named("geocoder", 2, Duration::from_secs(30));

/// Every operation of a semaphore, once.
fn works(conn: &mut PgConnection) {
    let claims = fill(&TWO, conn);
    assert_eq!(claims.len(), 2);
    assert_matches!(
        TWO.claim_on(conn).unwrap(),
        Admission::Full(full)
            if full.retry_after > Duration::from_secs(20) && full.retry_after < Duration::from_secs(31)
    );
    assert!(TWO.renew_on(conn, claims[0].id).unwrap().is_some());
    assert!(TWO.complete_on(conn, claims[0].id).unwrap());
    expire(conn, "geocoder");
    assert!(!TWO.complete_on(conn, claims[1].id).unwrap());
    let again = fill(&TWO, conn);
    assert_eq!(again.len(), 2);
    expire(conn, "geocoder");
    assert_eq!(fill(&TWO, conn).len(), 2);
    assert_eq!(
        number(conn, "resource_control.prune_service_requests('1 day', 10)"),
        0
    );
    expire(conn, "geocoder");
    assert_eq!(
        number(conn, "resource_control.prune_service_requests('0', 10)"),
        6
    );
}

#[test]
fn a_session_with_settings_of_its_own() {
    let database = database();
    for settings in [
        "SET TimeZone = 'Europe/Paris'",
        "SET TimeZone = 'Australia/Lord_Howe'; SET DateStyle = 'SQL, DMY'; SET IntervalStyle = 'iso_8601'",
        "SET default_transaction_isolation = 'serializable'; SET default_transaction_deferrable = on",
        "SET search_path = ''",
        "SET statement_timeout = '9s'; SET lock_timeout = '9s'",
        "SET plan_cache_mode = force_generic_plan; SET enable_indexscan = off; SET enable_indexonlyscan = off",
        "SET plan_cache_mode = force_custom_plan; SET jit_above_cost = 0",
        "SET row_security = off; SET standard_conforming_strings = off; SET backslash_quote = off",
        "SET extra_float_digits = -15; SET bytea_output = escape; SET client_encoding = 'LATIN1'",
        "SET default_transaction_isolation = 'repeatable read'; SET synchronous_commit = off",
        "SET plpgsql.variable_conflict = use_variable; SET plpgsql.extra_errors = 'all'",
    ] {
        let conn = &mut database.connect();
        conn.batch_execute(settings).unwrap();
        works(conn);
    }
}

/// A trap for each operator, aggregate, function and type of PostgreSQL that semaphores use.
const TRAPS: &str = r#"
CREATE SCHEMA mine;
CREATE FUNCTION mine.trap() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'a trap'; END $$;
DO $do$
DECLARE
    types CONSTANT oid[] := ARRAY['text'::regtype, 'text[]'::regtype, 'bool'::regtype, 'int2'::regtype,
        'int2[]'::regtype, 'int4'::regtype, 'int8'::regtype, 'float8'::regtype, 'numeric'::regtype,
        'timestamptz'::regtype, 'interval'::regtype];
    body CONSTANT text := 'LANGUAGE plpgsql AS $$ BEGIN RAISE ''a trap''; END $$';
    what record;
BEGIN
    FOR what IN
        SELECT 'operator_' || oid AS trap, oprname, oprleft::regtype AS l, oprright::regtype AS r, oprresult::regtype AS result
        FROM pg_operator
        WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprleft = ANY (types) AND oprright = ANY (types)
    LOOP
        EXECUTE format('CREATE FUNCTION mine.%s(%s, %s) RETURNS %s %s', what.trap, what.l, what.r, what.result, body);
        EXECUTE format('CREATE OPERATOR mine.%s (FUNCTION = mine.%s, LEFTARG = %s, RIGHTARG = %s)',
            what.oprname, what.trap, what.l, what.r);
    END LOOP;
    FOR what IN
        SELECT proname, oidvectortypes(proargtypes) AS arguments, prorettype::regtype AS result
        FROM pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace AND prorettype = ANY (types)
            AND types @> proargtypes::oid[] AND prokind IN ('f', 'a') AND NOT proretset AND proargmodes IS NULL
    LOOP
        EXECUTE format('CREATE FUNCTION mine.%I(%s) RETURNS %s %s', what.proname, what.arguments, what.result, body);
    END LOOP;
    -- PostgreSQL's own take whatever array.
    EXECUTE 'CREATE FUNCTION mine.array_agg(smallint) RETURNS smallint[] ' || body;
    EXECUTE 'CREATE FUNCTION mine.cardinality(smallint[]) RETURNS integer ' || body;
    FOR what IN SELECT typname, oid::regtype AS type FROM pg_type WHERE oid = ANY (types) AND typname !~ '^_' LOOP
        EXECUTE format('CREATE DOMAIN mine.%I AS %s CHECK (mine.trap())', what.typname, what.type);
    END LOOP;
END $do$;
CREATE TABLE mine.service_request (LIKE resource_control.service_request);
"#;

#[test]
fn what_shadows_the_catalogue_is_not_called() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(TRAPS).unwrap();
    let shadowed = &mut database.connect();
    shadowed
        .batch_execute(
            "CREATE TEMPORARY TABLE service_request (); SET search_path = pg_temp, mine, pg_catalog",
        )
        .unwrap();
    let assert_trapped = |shadowed: &mut PgConnection| {
        for trap in ["1 + 1", "min(1)", "clock_timestamp()", "'1'::text"] {
            let caught = shadowed.batch_execute(&format!("SELECT {trap}"));
            assert!(caught.unwrap_err().to_string().contains("a trap"), "{trap}");
        }
    };
    assert_trapped(shadowed);

    let claim = TWO.claim_on(shadowed).unwrap().expect_acquired();
    assert!(TWO.renew_on(shadowed, claim.id).unwrap().is_some());
    assert!(TWO.complete_on(shadowed, claim.id).unwrap());
    assert!(!TWO.complete_on(shadowed, claim.id).unwrap());
    fill(&TWO, conn);
    assert!(TWO.claim_on(shadowed).unwrap().is_full());
    // With overdue requests, and with more slots before.
    expire(conn, "geocoder");
    let [first, second] = &fill(&TWO, shadowed)[..] else {
        panic!("two slots")
    };
    assert!(TWO.complete_on(shadowed, first.id).unwrap());
    let one = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    assert!(one.claim_on(shadowed).unwrap().is_full());
    expire(conn, "geocoder");
    assert!(!TWO.complete_on(shadowed, second.id).unwrap());
    assert!(one.claim_on(shadowed).unwrap().admitted().is_some());
    for bad in [
        "'', 1, '1 s', ''",
        "'a', 0, '1 s', ''",
        "'a', 1, '0', ''",
        "'a', 1, '1 s', NULL",
    ] {
        let claim = format!("SELECT * FROM resource_control.claim_service_request({bad})");
        let refused = shadowed.batch_execute(&claim).unwrap_err().to_string();
        assert!(refused.contains(" must "), "{bad}: {refused}");
    }
    // An interval that must be converted.
    let claim =
        "SELECT * FROM resource_control.claim_service_request('daily', 1, '1 mon 1 day', '')";
    shadowed.batch_execute(claim).unwrap();
    assert_eq!(log(conn).len(), 7);
    let elapsed = "SELECT resource_control.elapsed('1 mon 1 day 00:00:01')";
    shadowed.batch_execute(elapsed).unwrap();
    assert_trapped(shadowed);
}

/// The names of the functions' parameters and variables, which a user may have used as well.
#[test]
fn columns_of_the_users_own_change_nothing() {
    let database = database();
    let conn = &mut database.connect();
    for name in [
        "slots",
        "timeout",
        "fault",
        "taken",
        "simple",
        "candidate",
        "contended",
        "attempt",
        "decided_at",
        "next_expiry",
        "live",
        "overdue",
        "lowered",
        "free",
        "first",
        "nth",
        "following",
        "step",
        "waited",
        "highest",
        "read_at",
        "missing",
        "is_overdue",
        "entries",
        "old_snapshot_until",
        "snapshot_is_old",
        "violated",
        "marked",
        "user_lock_timeout",
        "admitted",
        "renewed",
        "older_than",
        "batch",
        "before",
        "now",
        "pruned",
        "deleted",
        "last",
        "old",
        "young",
        "look",
        "claim",
        "prune",
        "lock_free_slot",
        "admit_service_request",
    ] {
        let add = format!("ALTER TABLE resource_control.service_request ADD {name} uuid");
        conn.batch_execute(&add).unwrap();
    }
    works(conn);
    // With more slots before.
    fill(&TWO, conn);
    let one = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    assert!(one.claim_on(conn).unwrap().is_full());
    expire(conn, "geocoder");
    assert!(one.claim_on(conn).unwrap().admitted().is_some());
}

/// A slot is free, so the semaphore is not full.
#[test]
fn a_constraint_of_the_users_own_that_a_claim_breaks_is_an_error() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "CREATE UNIQUE INDEX one_per_host ON resource_control.service_request (service, details) \
         WHERE completed_at IS NULL AND timed_out_at IS NULL",
    )
    .unwrap();
    let many = Semaphore::named("geocoder", 1000, Duration::from_secs(30));
    let claim = many.claim_on(conn).unwrap().expect_acquired();
    let broken = many.claim_on(conn);
    assert!(
        matches!(
            &broken,
            Err(Error::Database(DatabaseError(DatabaseErrorKind::UniqueViolation, information)))
                if information.constraint_name() == Some("one_per_host")
        ),
        "{broken:?}"
    );
    let tries = "(SELECT last_value FROM resource_control.service_request_id_seq)";
    assert!(number(conn, tries) <= claim.id + 10);
    assert!(
        many.details("web-4")
            .claim_on(conn)
            .unwrap()
            .admitted()
            .is_some()
    );
}

#[test]
fn a_server_that_speaks_german() {
    let cluster = Cluster::builder().german().start();
    let database = cluster.database();
    migrations::install(&mut database.connect()).unwrap();
    let conn = &mut database.connect();
    works(conn);
    conn.batch_execute("SET default_transaction_read_only = on")
        .unwrap();
    let refused = TWO.claim_on(conn);
    assert_matches!(refused, Err(Error::ReadOnly));
    let bare: Database = cluster.database();
    let refused = TWO.claim_on(&mut bare.connect());
    assert_matches!(refused, Err(Error::Schema(Schema::NotInstalled)));
}

/// A time zone that changes its clocks today.
#[test]
fn a_day_is_24_hours_in_every_time_zone() {
    let database = database();
    let conn = &mut database.connect();
    // The clocks go forward by an hour half a day from now.
    let change = number(
        conn,
        "extract(doy FROM now() AT TIME ZONE 'UTC' + interval '12 hours')",
    );
    let hour = number(
        conn,
        "extract(hour FROM now() AT TIME ZONE 'UTC' + interval '12 hours')",
    );
    // Julian days without leap days: J60 is always the first of March.
    let julian = number(
        conn,
        &format!(
            "SELECT {change} - (extract(doy FROM make_date(extract(year FROM now())::int, 12, 31)) = 366 AND {change} > 60)::int"
        ),
    );
    let back = if julian > 300 { 100 } else { julian + 60 };
    conn.batch_execute(&format!(
        "SET TimeZone = 'AAA0BBB-1,J{julian}/{hour},J{back}/0'"
    ))
    .unwrap();
    let day = number(
        conn,
        "extract(epoch FROM (now() + interval '1 day') - now())",
    );
    assert_eq!(day, 23 * 3600, "the clocks change within the day");
    for level in ["READ COMMITTED", "REPEATABLE READ"] {
        for (timeout, hours) in [("1 day", 24), ("1 month", 720), ("1 year", 8640)] {
            conn.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}"))
                .unwrap();
            let expiry = format!(
                "SELECT extract(epoch FROM expires_at - created_at) \
                 FROM resource_control.claim_service_request('{timeout}', 2, '{timeout}')"
            );
            assert_eq!(number(conn, &expiry), hours * 3600, "{timeout}");
            conn.batch_execute("COMMIT").unwrap();
        }
    }
    let day = diesel::data_types::PgInterval::from_days(1);
    let id = log(conn)[0].id;
    diesel::sql_query(
        "UPDATE resource_control.service_request SET expires_at = clock_timestamp() + '1 min'",
    )
    .execute(conn)
    .unwrap();
    let now = chrono::Utc::now();
    let renewed: Option<chrono::DateTime<chrono::Utc>> =
        diesel::select(renew_service_request(id, day))
            .get_result(conn)
            .unwrap();
    let length = renewed.unwrap() - now;
    assert!(length > TimeDelta::minutes(24 * 60 - 10), "{length}");
}

#[test]
fn a_statement_timeout_that_ends_a_claim_leaves_nothing_behind() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    open.batch_execute(
        "BEGIN; LOCK TABLE resource_control.service_request IN SHARE ROW EXCLUSIVE MODE",
    )
    .unwrap();
    conn.batch_execute("SET statement_timeout = '100ms'")
        .unwrap();
    let ended = TWO.claim_on(conn);
    assert_matches!(ended, Err(Error::Database(_)));
    open.batch_execute("COMMIT").unwrap();
    conn.batch_execute("SET statement_timeout = 0").unwrap();
    assert_eq!(log(conn), []);
    assert_eq!(fill(&TWO, conn).len(), 2);
}

/// Neither logical replication nor a blue/green upgrade copies a sequence.
#[test]
fn a_sequence_that_was_not_copied_is_an_error_that_says_how_to_set_it() {
    let database = database();
    let conn = &mut database.connect();
    for claim in fill(&TWO, conn) {
        assert!(TWO.complete_on(conn, claim.id).unwrap());
    }
    // In sessions that have noticed an old snapshot, too.
    let errors = ["99999999999", ""].map(|old_snapshot_until| {
        conn.batch_execute(&format!(
            "ALTER SEQUENCE resource_control.service_request_id_seq RESTART; \
             SET resource_control.old_snapshot_until = '{old_snapshot_until}'"
        ))
        .unwrap();
        let error = TWO.claim_on(conn).unwrap_err();
        assert_matches!(error, Error::Schema(Schema::SequenceBehind));
        let drawn = "(SELECT last_value FROM resource_control.service_request_id_seq)";
        assert_eq!(number(conn, drawn), 1);
        error
    });
    let claim = "SELECT resource_control.claim_service_request('geocoder', 2, '30 s')";
    let Err(DatabaseError(DatabaseErrorKind::UniqueViolation, information)) =
        diesel::sql_query(claim).execute(conn)
    else {
        panic!("the second id is there, too");
    };
    // Both messages contain this statement.
    let statement = information.hint().unwrap();
    assert!(
        errors[0].to_string().contains(statement),
        "{}, {statement}",
        errors[0]
    );
    conn.batch_execute(statement).unwrap();
    assert_eq!(TWO.claim_on(conn).unwrap().expect_acquired().id, 3);
}

/// The outcome in a transaction of that level, while other sessions run `meanwhile`.
fn in_older_transaction<T>(
    conn: &mut PgConnection,
    level: &str,
    meanwhile: impl FnOnce(),
    call: impl FnOnce(&mut PgConnection) -> Result<T, Error>,
) -> Result<T, Error> {
    let transaction = conn.build_transaction();
    let mut transaction = match level {
        "repeatable read" => transaction.repeatable_read(),
        _ => transaction.serializable(),
    };
    transaction.run(|conn| {
        number(conn, "SELECT 1");
        meanwhile();
        call(conn)
    })
}

/// A request that the snapshot does not show has not ended. A request that it shows in flight may have ended.
#[test]
fn in_a_transaction_older_than_the_claim_every_call_is_a_serialization_failure() {
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    for level in ["repeatable read", "serializable"] {
        let mut claimed = None;
        let completed = in_older_transaction(
            conn,
            level,
            || claimed = TWO.claim_on(other).unwrap().admitted(),
            |conn| {
                let id = last_id(conn);
                TWO.complete_on(conn, id)
            },
        );
        assert_matches!(completed, Err(Error::StrictIsolation));
        let claim = claimed.expect("two slots are free");
        let mut claimed = None;
        let renewed = in_older_transaction(
            conn,
            level,
            || claimed = TWO.claim_on(other).unwrap().admitted(),
            |conn| {
                let id = last_id(conn);
                TWO.renew_on(conn, id)
            },
        );
        assert_matches!(renewed, Err(Error::StrictIsolation));
        assert!(claimed.is_some());

        // The semaphore was full, and is not any more.
        let refused = in_older_transaction(
            conn,
            level,
            || assert!(TWO.complete_on(other, claim.id).unwrap()),
            |conn| {
                diesel::sql_query(
                    "SELECT resource_control.claim_service_request('geocoder', 2, '30 s')",
                )
                .execute(conn)
                .map_err(Error::from)
            },
        );
        assert!(
            matches!(
                refused,
                Err(Error::Database(DatabaseError(
                    DatabaseErrorKind::SerializationFailure,
                    _
                )))
            ),
            "{refused:?}"
        );
        conn.batch_execute("TRUNCATE resource_control.service_request")
            .unwrap();
    }
}

/// A sequence shows values that no snapshot shows.
fn last_id(conn: &mut PgConnection) -> i64 {
    number(
        conn,
        "SELECT last_value FROM resource_control.service_request_id_seq",
    )
}

/// A request that the snapshot shows as ended has ended, even in an old snapshot.
#[test]
fn in_a_strict_transaction_an_ended_request_is_told_from_one_that_it_cannot_see() {
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    let claim = TWO.claim_on(conn).unwrap().expect_acquired();
    assert!(TWO.complete_on(conn, claim.id).unwrap());
    let mut claimed = None;
    let known = in_older_transaction(
        conn,
        "repeatable read",
        || claimed = TWO.claim_on(other).unwrap().admitted(),
        |conn| {
            Ok((
                TWO.complete_on(conn, claim.id)?,
                TWO.renew_on(conn, claim.id)?,
            ))
        },
    );
    assert_eq!(known.unwrap(), (false, None));
    assert!(claimed.is_some());
}

/// A request that the snapshot shows as ended stays ended. Everything else that it shows may be outdated, so the call is
/// retried.
#[test]
fn at_a_stricter_default_level_an_end_is_known_at_once_and_a_refusal_is_asked_for_again() {
    let database = database();
    for level in ["repeatable read", "serializable"] {
        let proxy = RoundTrips::in_front_of(&database);
        let conn = &mut PgConnection::establish(&proxy.url()).unwrap();
        conn.batch_execute(&format!("SET default_transaction_isolation = '{level}'"))
            .unwrap();
        let claims = fill(&TWO, conn);
        assert_eq!(claims.len(), 2);
        // Prepares the statements.
        assert!(TWO.complete_on(conn, claims[0].id).unwrap());
        assert!(TWO.renew_on(conn, claims[1].id).unwrap().is_some());
        let trips = round_trips_of(&proxy, || {
            assert!(!TWO.complete_on(conn, claims[0].id).unwrap());
            assert_eq!(TWO.renew_on(conn, claims[0].id).unwrap(), None);
        });
        assert_eq!(trips, 2);

        let one = Semaphore::named("geocoder", 1, Duration::from_secs(30));
        let trips = round_trips_of(&proxy, || {
            assert!(!TWO.complete_on(conn, claims[0].id + 1_000_000).unwrap());
            assert_matches!(one.claim_on(conn).unwrap(), Admission::Full(_));
        });
        // Each statement is retried once, in a transaction. The asynchronous half looks for an open transaction after an error.
        let looks = if IS_ASYNCHRONOUS { 3 } else { 0 };
        assert!((8..=8 + looks).contains(&trips), "{trips}");
        assert!(TWO.complete_on(conn, claims[1].id).unwrap());
    }
}

/// A user's value only makes the session assume that the read takes long.
#[test]
fn the_setting_that_a_session_remembers_an_old_snapshot_by_may_be_anything() {
    let database = database();
    let conn = &mut database.connect();
    for value in ["", "no number", "0", "99999999999", "-1", "NaN"] {
        conn.batch_execute(&format!(
            "SET resource_control.old_snapshot_until = '{value}'"
        ))
        .unwrap();
        works(conn);
        assert_eq!(setting(conn, "resource_control.old_snapshot_until"), value);
    }
}
