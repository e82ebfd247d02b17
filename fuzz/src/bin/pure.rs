//! What takes a text or a number without a server: no panic, and what is promised of it.

#![no_main]

use std::collections::HashSet;
use std::time::Duration;

use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::deserialize::Queryable;
use diesel::pg::Pg;
use diesel::sql_types::Interval;
use diesel_interlock::monitor::{Elapsed, Names, Timestamp};
use diesel_interlock::{
    AdvisoryLock, Fence, LockId, LockKey, ResourceLabel, Semaphore, Throttle, fnv1a, testing,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    names(&text);
    if let Some((numbers, rest)) = data.split_first_chunk::<16>() {
        times(numbers, rest);
    }
});

fn names(text: &str) {
    let key = LockKey::from(text);
    assert_eq!(key.id().is_err(), text.is_empty());
    assert!(key.to_string().ends_with(&format!(" ({})", fnv1a(text))));
    assert!(!format!("{key:?}").contains('\0'));
    let parts: Vec<_> = text.split('\n').collect();
    let joined = LockKey::parts(&parts);
    // Of all lists of as many parts, this one alone has the name.
    let again: Vec<_> = text.split('\n').rev().collect();
    assert_eq!(joined == LockKey::parts(&again), parts == again);
    assert_eq!(joined, LockKey::from(joined.name().unwrap()));

    let foreign = [
        LockKey::crc32(text),
        LockKey::times31(text),
        LockKey::with_advisory_lock(text),
        LockKey::django_pglocks_1(text),
    ];
    for key in &foreign {
        match key.id() {
            Ok(LockId::BigInt(number)) => {
                assert!(i32::try_from(number).is_ok() || u32::try_from(number).is_ok());
            }
            Ok(LockId::Pair(hash, 0)) => assert!(hash >= 0),
            Ok(pair) => panic!("{pair}"),
            Err(_) => assert!(text.is_empty()),
        }
    }
    assert!(foreign.iter().collect::<HashSet<_>>().len() <= 4);
    if !text.is_empty() {
        assert!(Names::new(&foreign).unwrap().of(foreign[2].id().unwrap()) == Some(text));
    }

    let prefix = testing::key_prefix(text);
    assert_eq!(testing::prefixed("name"), format!("{text} name"));
    assert_eq!(testing::prefixed(""), "");
    assert_eq!(LockKey::named("name"), LockKey::bigint(fnv1a(&format!("{text} name"))));
    drop(prefix);

    let shown = (
        AdvisoryLock::new(key),
        Semaphore::new(text, 1, Duration::MAX).details(text.to_owned()),
        Throttle::of(ResourceLabel(text.into())).key(text),
        Fence::new(text),
    );
    assert!(!format!("{shown:?}").is_empty());
}

fn times(numbers: &[u8; 16], rest: &[u8]) {
    let (first, second) = numbers.split_at(8);
    let microseconds = i64::from_be_bytes(first.try_into().unwrap());
    let days = i32::from_be_bytes(second[..4].try_into().unwrap());
    let months = i32::from_be_bytes(second[4..].try_into().unwrap());
    let Elapsed(elapsed): Elapsed =
        Queryable::<Interval, Pg>::build(PgInterval::new(microseconds, days, months)).unwrap();
    assert!(elapsed <= Duration::from_micros(i64::MAX as u64));
    let time = Timestamp::from(PgTimestamp(microseconds));
    assert!(!format!("{time:?} {:?}", time.at()).is_empty());
    let _ = LockKey::parts(rest).id();
}
