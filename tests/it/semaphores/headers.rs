//! The header fields of a response to a client that found every slot taken.

use std::time::Duration;

use sfv::{BareItem, Item, List, ListEntry, Parser};

use super::{database, fill};
use crate::half::Semaphore;

/// The one item of a list.
fn item(text: &str) -> Item {
    let list: List = Parser::new(text).parse().unwrap();
    match <[ListEntry; 1]>::try_from(list) {
        Ok([ListEntry::Item(item)]) => item,
        other => panic!("{other:?}"),
    }
}

fn integer(item: &Item, name: &str) -> i64 {
    match item.params.get(name) {
        Some(BareItem::Integer(number)) => (*number).into(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_full_semaphore_tells_its_slots_and_when_the_first_request_expires() {
    let database = database();
    let conn = &mut database.connect();
    for (name, told, slots, timeout) in [
        ("geocoder", "geocoder", 4, 900),
        ("one", "one", 1, 3600),
        (r#"a "b" \c"#, r#"a "b" \c"#, 2, 600),
        ("Straße\n", "Stra%C3%9Fe%0A", 3, 86_400),
    ] {
        let semaphore = Semaphore::new(name, slots, Duration::from_secs(timeout));
        let claims = fill(&semaphore, conn);
        assert_eq!(claims.len(), slots as usize);
        let full = semaphore.claim_on(conn).unwrap().full().unwrap();
        let headers = full.headers();

        let (policy, limit) = (item(&headers.policy), item(&headers.limit));
        for item in [&policy, &limit] {
            let name = item.bare_item.as_string().unwrap();
            assert_eq!(name.as_str(), told);
        }
        assert_eq!(integer(&policy, "q"), i64::from(slots));
        let unit = policy.params.get("qu").and_then(BareItem::as_string);
        assert_eq!(unit.unwrap().as_str(), "concurrent-requests");
        assert_eq!(policy.params.len(), 2);

        assert_eq!(integer(&limit, "r"), 0);
        let seconds = full.retry_after_secs();
        assert!((1..=timeout).contains(&seconds), "{seconds}");
        assert_eq!(integer(&limit, "t"), seconds as i64);
        assert_eq!(limit.params.len(), 2);
        let fields: Vec<_> = headers.fields().collect();
        let seconds = seconds.to_string();
        assert_eq!(
            fields,
            [
                ("RateLimit-Policy", &*headers.policy),
                ("RateLimit", &*headers.limit),
                ("Retry-After", &*seconds),
            ]
        );
    }
}
