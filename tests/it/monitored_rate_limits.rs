//! What operators see of rate limits, by `monitor` and by the SQL of `docs/production.md`.

use std::collections::BTreeSet;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Double, Nullable, Text, Timestamptz};
use diesel_interlock::error::{Input, Schema};
use diesel_interlock::monitor::{
    self, KeyNearLimit, QuotaSource, RateLimitOverride, RateLimitRow, keys_near_limit,
};
use diesel_interlock::schema::resource_control::{rate_limit, rate_limit_override};
use diesel_interlock::{Error, Quota, RateLimit, migrations};
use workbench::{Cluster, Database};

use crate::rate_limits::overrides::set;
use crate::rate_limits::{API, HOUR, SLOW, age, allowed, assert_about, database};
use crate::roles::{NOTHING_FOR_ALL, Role, server};
use crate::support::{eventually, number, truth};

/// Spends units of five keys, of the limit without a key, and of another limit.
fn spend(conn: &mut PgConnection) {
    for (key, units) in [(1, 3), (2, 1), (3, 5), (4, 2), (5, 4)] {
        let _ = allowed(API.key(key).cost(units).check_on(conn).unwrap());
    }
    let _ = allowed(API.cost(2).check_on(conn).unwrap());
    let other = RateLimit::named("api 2", SLOW);
    let _ = allowed(other.key(9).cost(5).check_on(conn).unwrap());
}

fn near(conn: &mut PgConnection, rows: u32) -> Vec<KeyNearLimit> {
    keys_near_limit(conn, &API, rows).unwrap()
}

fn left(near: &[KeyNearLimit]) -> Vec<(&str, u32)> {
    near.iter().map(|it| (&*it.key, it.remaining)).collect()
}

/// Each key is described as by a peek.
#[track_caller]
fn assert_as_peeked(conn: &mut PgConnection, near: &[KeyNearLimit]) {
    for near in near {
        let limit = match &*near.key {
            "" => API,
            key => API.key(key),
        };
        let state = limit.peek_on(conn).unwrap();
        assert_eq!(
            (near.remaining, near.quota),
            (state.remaining, state.quota),
            "{near:?}"
        );
        assert_about(state.full_in, near.full_in);
    }
}

#[test]
fn a_key_that_is_closed_by_hand_is_the_nearest_to_its_limit() {
    let database = database();
    let conn = &mut database.connect();
    spend(conn);
    conn.batch_execute(
        "UPDATE resource_control.rate_limit SET full_at = 'infinity' WHERE name = 'api' AND key = '2'",
    )
    .unwrap();
    assert_eq!(left(&near(conn, 2)), [("2", 0), ("3", 0)]);
    let owed: Vec<i64> = rate_limit::table
        .select(monitor::units_owed())
        .load(conn)
        .unwrap();
    assert_eq!(owed.len(), 7);
}

#[test]
fn the_keys_with_the_fewest_units_left_come_first_and_full_keys_not_at_all() {
    let database = database();
    let conn = &mut database.connect();
    assert_eq!(near(conn, 10), []);
    spend(conn);
    let all = near(conn, 10);
    let expected = [("3", 0), ("5", 1), ("1", 2), ("", 3), ("4", 3), ("2", 4)];
    // Of two keys with as many units left, the one that was used later is nearer.
    assert_eq!(left(&all)[..3], expected[..3]);
    assert_eq!(
        left(&all).into_iter().collect::<BTreeSet<_>>(),
        expected.into_iter().collect()
    );
    assert_as_peeked(conn, &all);
    assert!(
        all.iter()
            .all(|it| it.quota_source == QuotaSource::Program && it.quota == SLOW)
    );
    assert_eq!(all[0].owed, 5);
    assert_about(all[0].full_in, 5 * HOUR);
    assert_eq!(left(&near(conn, 2)), expected[..2]);
    assert_eq!(near(conn, 0), []);

    age(conn, "150 minutes");
    assert_eq!(left(&near(conn, 10)), [("3", 2), ("5", 3), ("1", 4)]);
    age(conn, "1 day");
    assert_eq!(near(conn, 10), []);
}

#[test]
fn the_override_of_the_key_counts_else_that_of_the_name() {
    let database = database();
    let conn = &mut database.connect();
    spend(conn);
    // Written before the overrides, so the rows have the quota of the program.
    set(conn, "api", Some("2"), "1, '1 month', 1");
    set(conn, "api", Some("3"), "20, '2 hours', 9");
    set(conn, "api", Some(""), "30, '1 day', 2");
    set(conn, "api 2", None, "1, '1 hour', 1");
    let some = near(conn, 10);
    assert_eq!(left(&some[..2]), [("", 0), ("2", 0)]);
    assert_eq!(left(&some).last(), Some(&("3", 4)));
    assert_as_peeked(conn, &some);
    let source = |near: &[KeyNearLimit], key: &str| {
        near.iter()
            .find(|it| it.key == key)
            .map(|it| it.quota_source)
    };
    assert_eq!(source(&some, "3"), Some(QuotaSource::Key));
    assert_eq!(source(&some, ""), Some(QuotaSource::Key));
    assert_eq!(source(&some, "1"), Some(QuotaSource::Program));
    assert_about(some[1].full_in, 30 * 24 * HOUR);

    set(conn, "api", None, "10, '1 day', 4");
    let all = near(conn, 10);
    assert_as_peeked(conn, &all);
    assert_eq!(source(&all, "1"), Some(QuotaSource::Name));
    assert_eq!(source(&all, "3"), Some(QuotaSource::Key));
    let one = all.iter().find(|it| it.key == "1").unwrap();
    assert_eq!(
        (one.remaining, one.owed, one.quota),
        (1, 3, Quota::per_day(10).burst(4))
    );
    // The burst was lowered below what is owed.
    let five = all.iter().find(|it| it.key == "5").unwrap();
    assert_eq!((five.remaining, five.owed), (0, 4));

    // Rows that were written under an override that is gone.
    let _ = allowed(API.key("3").cost(4).check_on(conn).unwrap());
    conn.batch_execute("DELETE FROM resource_control.rate_limit_override")
        .unwrap();
    let after = near(conn, 10);
    assert_eq!((&*after[0].key, after[0].owed), ("3", 9));
    assert_as_peeked(conn, &after);
}

#[test]
fn reservations_owe_more_than_the_burst_and_a_hot_key_is_one_key() {
    let database = database();
    let conn = &mut database.connect();
    spend(conn);
    for _ in 0..2 {
        let reserved = API.key(1).cost(5).reserve_on(conn, 24 * HOUR).unwrap();
        let _ = reserved.reserved().unwrap();
    }
    let first = near(conn, 1);
    assert_eq!((&*first[0].key, first[0].remaining), ("1", 0));
    assert_eq!(first[0].owed, 13);

    let hot = RateLimit::named("hot", Quota::per_day(1_000_000).burst(1000));
    for _ in 0..450 {
        let _ = allowed(hot.key("k").check_on(conn).unwrap());
    }
    assert_eq!(
        number(
            conn,
            "(SELECT count(*) FROM resource_control.rate_limit WHERE name = 'hot')"
        ),
        2
    );
    let rows = keys_near_limit(conn, &hot, 10).unwrap();
    assert_eq!((rows.len(), &*rows[0].key), (1, "k"));
}

#[test]
fn overrides_are_listed_by_name_and_that_of_the_whole_name_first() {
    let database = database();
    let conn = &mut database.connect();
    for (name, key) in [
        ("b", Some("1")),
        ("a", Some("2")),
        ("a", None),
        ("a", Some("!")),
    ] {
        set(conn, name, key, "10, '1 month 1 day', 3");
    }
    let all: Vec<RateLimitOverride> = monitor::overrides().load(conn).unwrap();
    let keys: Vec<_> = all
        .iter()
        .map(|it| (&*it.name, it.key.as_deref()))
        .collect();
    assert_eq!(
        keys,
        [
            ("a", None),
            ("a", Some("!")),
            ("a", Some("2")),
            ("b", Some("1"))
        ]
    );
    let quota = Quota::per(10, 31 * 24 * HOUR).burst(3);
    assert!(all.iter().all(|it| it.quota() == quota));
    let of_b = monitor::overrides().filter(rate_limit_override::name.eq("b"));
    assert_eq!(of_b.load::<RateLimitOverride>(conn).unwrap().len(), 1);
    // It is the quota that is in force.
    let b = RateLimit::named("b", SLOW).key(1);
    assert_eq!(b.peek_on(conn).unwrap().quota, quota);
}

#[test]
fn the_keys_of_all_limits_that_owe_most_come_first() {
    let database = database();
    let conn = &mut database.connect();
    spend(conn);
    let fast = RateLimit::named("fast", Quota::per_second(1_000_000).burst(u32::MAX));
    let _ = allowed(fast.cost(u32::MAX).check_on(conn).unwrap());
    let most: Vec<(RateLimitRow, i64)> = monitor::spent_keys()
        .limit(3)
        .select((RateLimitRow::as_select(), monitor::units_owed()))
        .load(conn)
        .unwrap();
    let names: Vec<_> = most.iter().map(|(row, _)| &*row.name).collect();
    assert_eq!(names[0], "fast");
    assert_eq!(most[1].1, 5);
    assert_eq!(most[2].1, 5);
    assert!(most[0].1 > 1_000_000_000);
}

#[test]
fn it_reads_without_a_transaction_id_or_a_wait_for_one_who_writes() {
    let database = database();
    let (conn, writer) = (&mut database.connect(), &mut database.connect());
    spend(conn);
    set(conn, "api", None, "10, '1 day', 5");
    writer
        .batch_execute(
            "BEGIN; SELECT FROM resource_control.rate_limit FOR UPDATE; \
             SELECT FROM resource_control.rate_limit_override FOR UPDATE",
        )
        .unwrap();
    conn.batch_execute("SET lock_timeout = '1ms'; SET default_transaction_read_only = on")
        .unwrap();
    conn.begin_test_transaction().unwrap();
    assert_eq!(near(conn, 10).len(), 6);
    assert!(truth(conn, "pg_current_xact_id_if_assigned() IS NULL"));
    let locks = "(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() \
                 AND (mode LIKE 'Row%' OR mode LIKE '%Exclusive%') AND locktype <> 'virtualxid')";
    assert_eq!(number(conn, locks), 0);
}

#[test]
fn a_standby_shows_the_same() {
    let primary = Cluster::start();
    let database = primary.database();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    spend(conn);
    set(conn, "api", Some("1"), "10, '1 day', 4");
    let standby = primary.standby();
    let replica = &mut PgConnection::establish(&standby.url(database.name())).unwrap();
    let expected = left(&near(conn, 10)).len();
    eventually("it is replayed", || near(replica, 10).len() == expected);
    assert_eq!(left(&near(replica, 10)), left(&near(conn, 10)));
    assert_eq!(
        monitor::overrides().load::<RateLimitOverride>(replica),
        monitor::overrides().load::<RateLimitOverride>(conn)
    );
    for sql in dashboards() {
        replica.batch_execute(sql).unwrap();
    }
}

#[test]
fn bad_input_and_a_missing_schema_are_told() {
    let empty = Database::new();
    let conn = &mut empty.connect();
    assert!(matches!(
        keys_near_limit(conn, &API, 1),
        Err(Error::Schema(Schema::NotInstalled))
    ));
    let database = database();
    let conn = &mut database.connect();
    let bad = |name: &'static str, quota| RateLimit::named(name, quota);
    assert!(matches!(
        keys_near_limit(conn, &bad("", SLOW), 1),
        Err(Error::Input(Input::EmptyName))
    ));
    for quota in [
        Quota::per_day(0),
        Quota::per_day(1).burst(0),
        Quota::per(1, Duration::ZERO),
        Quota::per(u32::MAX, Duration::MAX),
    ] {
        assert!(matches!(
            keys_near_limit(conn, &bad("api", quota), 1),
            Err(Error::Input(Input::BadQuota { .. }))
        ));
    }
    // A key and a cost are not used.
    spend(conn);
    let with_key = API.key("\0").cost(0);
    assert_eq!(keys_near_limit(conn, &with_key, u32::MAX).unwrap().len(), 6);
}

#[cfg(feature = "testing")]
#[test]
fn a_test_sees_the_keys_of_its_own_prefix() {
    let database = database();
    let conn = &mut database.connect();
    spend(conn);
    let prefix = diesel_interlock::testing::key_prefix("monitored-");
    assert_eq!(near(conn, 10), []);
    let _ = allowed(API.key(1).cost(4).check_on(conn).unwrap());
    assert_eq!(left(&near(conn, 10)), [("1", 1)]);
    drop(prefix);
    assert_eq!(near(conn, 10).len(), 6);
}

const PAGE: &str = include_str!("../../docs/production.md");

/// The SQL below a heading of the page.
fn sql_below(heading: &str) -> Vec<&'static str> {
    let (_, section) = PAGE.split_once(&format!("\n# {heading}\n")).unwrap();
    let section = section.split("\n# ").next().unwrap();
    section
        .split("```sql\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

/// The queries of the page for dashboards: the keys near their limits, and the overrides.
fn dashboards() -> [&'static str; 2] {
    let queries = sql_below("Dashboards");
    queries.try_into().unwrap()
}

#[derive(QueryableByName)]
struct KeyPanel {
    #[diesel(sql_type = Text)]
    limit: String,
    #[diesel(sql_type = Text)]
    key: String,
    #[diesel(sql_type = Nullable<BigInt>)]
    left: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    burst: Option<i64>,
    #[diesel(sql_type = Timestamptz, column_name = "full again")]
    full_again: DateTime<Utc>,
    #[diesel(sql_type = Nullable<BigInt>)]
    n: Option<i64>,
    #[diesel(sql_type = Nullable<Double>, column_name = "period in seconds")]
    period: Option<f64>,
    #[diesel(sql_type = Text, column_name = "quota of")]
    quota_of: String,
}

#[derive(QueryableByName)]
struct OverridePanel {
    #[diesel(sql_type = Text)]
    limit: String,
    #[diesel(sql_type = Nullable<Text>)]
    key: Option<String>,
    #[diesel(sql_type = BigInt)]
    n: i64,
    #[diesel(sql_type = Double, column_name = "period in seconds")]
    period: f64,
    #[diesel(sql_type = BigInt)]
    burst: i64,
}

#[test]
fn the_dashboards_of_the_page_show_what_the_monitor_shows() {
    // The quota that the page declares for its example.
    let api = RateLimit::named("api", Quota::per_minute(100).burst(20));
    let database = database();
    let conn = &mut database.connect();
    // So slow that nothing comes back meanwhile.
    set(conn, "api", None, "100, '100 days', 20");
    set(conn, "api", Some("3"), "20, '1 month', 8");
    for (key, units) in [(1, 15), (2, 20), (3, 7)] {
        let _ = allowed(api.key(key).cost(units).check_on(conn).unwrap());
    }
    let undeclared = RateLimit::named("undeclared", SLOW);
    let _ = allowed(undeclared.cost(5).check_on(conn).unwrap());

    let [keys, overrides] = dashboards();
    for panel in [keys, overrides] {
        assert!(!panel.contains('$'), "a macro of Grafana: {panel}");
    }
    let rows: Vec<KeyPanel> = diesel::sql_query(keys).load(conn).unwrap();
    let near = keys_near_limit(conn, &api, 10).unwrap();
    assert_eq!(near.len(), 3);
    for near in near {
        let row = rows.iter().find(|it| it.key == near.key).unwrap();
        assert_eq!(row.limit, "api");
        assert_eq!(row.left, Some(near.remaining.into()));
        assert_eq!(row.burst, Some(near.quota.burst.into()));
        assert_eq!(row.n, Some(near.quota.n.into()));
        assert_eq!(row.period, Some(near.quota.period.as_secs_f64()));
        let source = match near.quota_source {
            QuotaSource::Program => "program",
            QuotaSource::Name => "name",
            QuotaSource::Key => "key",
        };
        assert_eq!(row.quota_of, source);
        let full_in = row.full_again - Utc::now();
        assert_about(full_in.to_std().unwrap(), near.full_in + HOUR / 120);
    }
    let order: Vec<_> = rows.iter().map(|it| &*it.key).collect();
    assert_eq!(order, ["2", "3", "1", ""]);
    let unknown = &rows[3];
    assert_eq!(
        (&*unknown.limit, &*unknown.quota_of),
        ("undeclared", "unknown")
    );
    assert_eq!((unknown.left, unknown.burst, unknown.n), (None, None, None));

    let rows: Vec<OverridePanel> = diesel::sql_query(overrides).load(conn).unwrap();
    let listed: Vec<RateLimitOverride> = monitor::overrides().load(conn).unwrap();
    assert_eq!((rows.len(), listed.len()), (2, 2));
    for (row, listed) in rows.iter().zip(&listed) {
        assert_eq!((&row.limit, &row.key), (&listed.name, &listed.key));
        assert_eq!((row.n, row.burst), (listed.n, listed.burst));
        assert_eq!(row.period, listed.period.as_secs_f64());
    }
}

#[test]
fn a_role_with_the_grants_of_the_page_sees_them_and_changes_nothing() {
    let database = server().database();
    let role = Role::new(&database);
    let owner = &mut database.connect();
    owner.batch_execute(NOTHING_FOR_ALL).unwrap();
    migrations::install(owner).unwrap();
    spend(owner);
    let conn = &mut role.connect();
    assert!(matches!(
        keys_near_limit(conn, &API, 10),
        Err(Error::Schema(Schema::MissingRights { .. }))
    ));
    let [grants] = sql_below("Schema and rights").try_into().unwrap();
    owner
        .batch_execute(&grants.replace("grafana", role.name()))
        .unwrap();
    assert_eq!(near(conn, 10).len(), 6);
    for sql in dashboards() {
        conn.batch_execute(sql).unwrap();
    }
    assert!(API.check_on(conn).is_err());
    assert!(
        conn.batch_execute("DELETE FROM resource_control.rate_limit_override")
            .is_err()
    );
}
