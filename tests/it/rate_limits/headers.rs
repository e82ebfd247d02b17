//! The header fields of responses.

use std::time::Duration;

use crate::half::{Check, Database, Headers, Quota, RateLimit};
use proptest::prelude::*;
use sfv::{BareItem, Item, List, ListEntry, Parser};

use super::{allowed, database, limited};

const MINUTE: RateLimit = RateLimit::named("api", Quota::per_minute(100).burst(20));

#[test]
fn the_example_of_the_documentation() {
    let database = database();
    let conn = &mut database.connect();
    let headers = allowed(MINUTE.cost(3).check_on(conn).unwrap()).headers();
    assert_eq!(headers.policy, r#""api";q=20;w=12"#);
    assert_eq!(headers.limit, r#""api";r=17;t=11"#);
    assert_eq!(headers.retry_after, None);
    let _ = allowed(MINUTE.cost(17).check_on(conn).unwrap());
    let headers = limited(MINUTE.check_on(conn).unwrap()).headers();
    assert_eq!(headers.policy, r#""api";q=20;w=12"#);
    assert_eq!(headers.limit, r#""api";r=0;t=1"#);
    assert_eq!(headers.retry_after.as_deref(), Some("1"));
    let fields: Vec<_> = headers.fields().collect();
    assert_eq!(fields[0], ("RateLimit-Policy", r#""api";q=20;w=12"#));
    assert_eq!(fields[2], ("Retry-After", "1"));
}

#[test]
fn several_limits_are_joined() {
    let database = database();
    let conn = &mut database.connect();
    let day = RateLimit::named("day", Quota::per_day(24).burst(5));
    let all = RateLimit::check_all_on(conn, &[&MINUTE, &day]).unwrap();
    let headers = all.headers().unwrap();
    assert_eq!(headers.policy, r#""api";q=20;w=12, "day";q=5;w=18000"#);
    assert_eq!(headers.limit, r#""api";r=19;t=12, "day";r=4;t=14400"#);
    let limited = RateLimit::check_all_on(conn, &[&MINUTE, &day.cost(5)]).unwrap();
    let headers = limited.headers().unwrap();
    assert_eq!(headers.limit, r#""day";r=3;t=3600"#.replace("r=3", "r=1"));
    assert_eq!(headers.retry_after.as_deref(), Some("3600"));
    assert_eq!(Headers::joined([]), None);
}

#[test]
fn a_name_is_a_string_and_a_partition_key_bytes() {
    let database = database();
    let conn = &mut database.connect();
    let odd = RateLimit::named("a\"b\\c é\n%", Quota::per_second(10));
    let headers = allowed(odd.key("secret").check_on(conn).unwrap()).headers();
    assert_eq!(headers.policy, r#""a\"b\\c %C3%A9%0A%";q=10;w=1"#);
    let fast = RateLimit::named("fast", Quota::per_second(10).burst(9));
    let shown = fast.partition_key("customer 7").key(7);
    let headers = allowed(shown.check_on(conn).unwrap()).headers();
    assert_eq!(headers.policy, r#""fast";q=9;pk=:Y3VzdG9tZXIgNw==:"#);
    assert_eq!(headers.limit, r#""fast";r=8;t=1;pk=:Y3VzdG9tZXIgNw==:"#);
}

fn items(text: &str) -> Vec<Item> {
    let list: List = Parser::new(text).parse().unwrap();
    list.into_iter()
        .map(|entry| match entry {
            ListEntry::Item(item) => item,
            ListEntry::InnerList(list) => panic!("{list:?}"),
        })
        .collect()
}

fn integer(item: &Item, name: &str) -> Option<i64> {
    match item.params.get(name)? {
        BareItem::Integer(number) => Some((*number).into()),
        other => panic!("{other:?}"),
    }
}

/// The fields of a check hold what they promise.
fn assert_consistent(check: &Check, quota: Quota, name: &str, key: &[u8]) {
    let headers = check.headers();
    let (policies, limits) = (items(&headers.policy), items(&headers.limit));
    assert_eq!((policies.len(), limits.len()), (1, 1));
    for item in [&policies[0], &limits[0]] {
        let told = item.bare_item.as_string().unwrap().as_str().to_owned();
        if name.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
            assert_eq!(told, name);
        }
        match item.params.get("pk").unwrap() {
            BareItem::ByteSequence(bytes) => assert_eq!(bytes, key),
            other => panic!("{other:?}"),
        }
    }
    let (n, period) = (u128::from(quota.n), quota.period.as_micros());
    let q = integer(&policies[0], "q").unwrap() as u128;
    assert_eq!(q, quota.burst.into());
    match integer(&policies[0], "w") {
        Some(w) => assert!(w as u128 * 1_000_000 * n >= q * period),
        None => assert!(q * period < n * 1_000_000),
    }
    let r = integer(&limits[0], "r").unwrap() as u128;
    let t = integer(&limits[0], "t").unwrap() as u128;
    assert!(r <= q && t >= 1);
    // The quota earns `r` within `t`.
    assert!(r * period <= t * 1_000_000 * n, "{r} in {t} s of {quota:?}");
    match check {
        Check::Allowed(spent) => {
            assert_eq!(r, spent.remaining.into());
            assert_eq!(headers.retry_after, None);
        }
        Check::Limited(limited) => {
            assert!(r <= limited.remaining.into());
            let after = limited.retry_after_secs().map(|it| it.to_string());
            assert_eq!(headers.retry_after, after);
            assert!(after.is_none_or(|after| after == t.to_string()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_field_parses_and_never_invites_more_than_the_rate(
        n in 1..5000_u32,
        period_ms in 1..100_000_000_u64,
        burst in 1..5000_u32,
        costs in prop::collection::vec(1..6000_u32, 1..5),
        name in "[ -~]{1,20}|\\PC{1,5}",
        key in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        thread_local! {
            static DATABASE: Database = database();
        }
        DATABASE.with(|database| {
            let conn = &mut database.connect();
            let quota = Quota::per(n, Duration::from_millis(period_ms)).burst(burst);
            let limit = RateLimit::new(name.clone(), quota).partition_key(&key);
            for cost in costs {
                let check = limit.cost(cost.min(burst)).check_on(conn).unwrap();
                assert_consistent(&check, quota, &name, &key);
            }
            limit.reset_on(conn).unwrap();
        });
    }
}
