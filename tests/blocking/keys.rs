//! The numbers of keys never change, and are those that other programs compute.
//!
//! The files in `tests/vectors` were made with these programs. The head of each file names the
//! program.

use std::collections::HashSet;
use std::time::Duration;

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};
use diesel_interlock::{
    Fence, Leader, LockKey, Once, Quota, RateLimit, Schedule, Semaphore, Throttle,
};

use crate::assert_matches;
use crate::half::{AdvisoryLock, Error, LockId};
use crate::support::installed;

const NAMES: &str = include_str!("../vectors/names.tsv");
const PARTS: &str = include_str!("../vectors/parts.tsv");
const GEM: &str = include_str!("../vectors/gem.tsv");

/// The rows of a file. Each is a function from the name of a column to its cell.
fn rows(file: &'static str) -> impl Iterator<Item = impl Fn(&str) -> &'static str> {
    let mut lines = file.lines();
    let header: Vec<&'static str> = lines.next().unwrap().split('\t').collect();
    lines
        .filter(|line| !line.starts_with('#'))
        .map(move |line| {
            let cells: Vec<&'static str> = line.split('\t').collect();
            let header = header.clone();
            move |column: &str| cells[header.iter().position(|name| *name == column).unwrap()]
        })
}

/// Decodes `hex:<UTF-8 bytes>`, or `repeat:<bytes>:<how many times>`.
fn decode(name: &str) -> String {
    let (kind, rest) = name.split_once(':').unwrap();
    let (hex, times) = match kind {
        "repeat" => rest
            .split_once(':')
            .map(|(hex, times)| (hex, times.parse().unwrap()))
            .unwrap(),
        _ => (rest, 1),
    };
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let bytes = (0..hex.len()).step_by(2).map(byte).collect();
    String::from_utf8(bytes).unwrap().repeat(times)
}

fn bigint(cell: &str) -> LockKey {
    LockKey::bigint(cell.parse().unwrap())
}

#[test]
fn names_have_the_numbers_of_python_ruby_and_node() {
    let mut count = 0;
    for row in rows(NAMES) {
        let name = decode(row("name"));
        assert_eq!(
            LockKey::from(name.clone()),
            bigint(row("fnv1a64_signed")),
            "{name:?}"
        );
        assert_eq!(LockKey::crc32(&name), bigint(row("crc32")), "{name:?}");
        assert_eq!(LockKey::times31(&name), bigint(row("times31")), "{name:?}");
        count += 1;
    }
    assert!(count >= 90, "only {count} vectors");
}

#[test]
fn parts_are_escaped_and_joined() {
    let mut count = 0;
    for row in rows(PARTS) {
        let parts: Vec<String> = row("parts")
            .split(',')
            .map(|part| decode(part.trim()))
            .collect();
        let key = LockKey::parts(&parts);
        assert_eq!(key, bigint(row("fnv1a64_signed")), "{parts:?}");
        count += 1;
    }
    assert!(count >= 30, "only {count} vectors");
}

#[test]
fn the_gem_locks_the_same_pairs() {
    let mut count = 0;
    for row in rows(GEM) {
        if row("prefix") != "unset"
            || !(row("name").starts_with("hex:") || row("name").starts_with("repeat:"))
            || row("gem_first").is_empty()
        {
            continue;
        }
        let pair = LockKey::pair(
            row("gem_first").parse().unwrap(),
            row("gem_second").parse().unwrap(),
        );
        assert_eq!(LockKey::with_advisory_lock(&decode(row("name"))), pair);
        count += 1;
    }
    assert!(count >= 40, "only {count} vectors");
}

#[test]
fn sql_has_the_same_numbers() {
    let database = installed();
    let conn = &mut database.connect();
    for row in rows(NAMES) {
        let name = decode(row("name"));
        if name.contains('\0') {
            continue; // a text of PostgreSQL cannot contain NUL
        }
        let lock_key = sql::<BigInt>("resource_control.lock_key(");
        let lock_key = lock_key.bind::<Text, _>(&name).sql(")");
        let number: i64 = diesel::select(lock_key).get_result(conn).unwrap();
        assert_eq!(LockKey::bigint(number), LockKey::from(name));
    }
}

#[test]
fn keys_are_equal_if_their_numbers_are() {
    let named = LockKey::named("223 345");
    assert_eq!(named, LockKey::parts([223, 345]));
    assert_eq!(named, LockKey::from(3755351481708176604_i64));
    let all: HashSet<LockKey> = [
        named.clone(),
        LockKey::parts(["223", "345"]),
        LockKey::from((1, 2)),
        LockKey::pair(1, 2),
    ]
    .into();
    assert_eq!(all.len(), 2);
    assert_eq!(named.id().unwrap().to_string(), "3755351481708176604");
    assert_eq!(LockKey::pair(1, -2).id().unwrap().to_string(), "1, -2");
    assert!(LockId::BigInt(i64::MAX) < LockId::Pair(i32::MIN, i32::MIN));
}

#[test]
fn a_key_under_a_name_is_that_of_its_parts() {
    let server = AdvisoryLock::named("a server");
    assert_eq!(
        *server.key("1 2").lock_key(),
        LockKey::parts(["a server", "1 2"])
    );
    assert_matches!(
        AdvisoryLock::new(LockKey::bigint(1)).key(2).lock_key().id(),
        Err(Error::Input(_))
    );
}

#[test]
fn an_empty_name_is_refused_by_every_rule() {
    let rules = [
        LockKey::named(""),
        LockKey::from(String::new()),
        LockKey::parts([""]),
        LockKey::parts::<&str>([]),
        LockKey::crc32(""),
        LockKey::times31(""),
        LockKey::with_advisory_lock(""),
    ];
    let database = workbench::Database::new();
    let pool = crate::half::pool(&database, 1);
    for key in rules {
        assert_matches!(key.id(), Err(Error::Input(_)));
        let lock = AdvisoryLock::new(key);
        assert_matches!(lock.try_acquire(&pool), Err(Error::Input(_)));
        assert_matches!(
            AdvisoryLock::all([&lock]).acquire(&pool),
            Err(Error::Input(_))
        );
    }
    for key in ["x", " "] {
        LockKey::crc32(key).id().unwrap();
        LockKey::times31(key).id().unwrap();
        LockKey::with_advisory_lock(key).id().unwrap();
    }
}

#[test]
fn a_second_key_replaces_the_first() {
    const MINUTE: Duration = Duration::from_secs(60);
    macro_rules! replaces {
        ($($handle:expr),*) => {$(
            let handle = $handle;
            let keyed = |key: &str| format!("{:?}", handle.key(key));
            assert_eq!(format!("{:?}", handle.key("1 2").key(3)), keyed("3"));
            assert_ne!(keyed("3"), keyed("4"));
        )*};
    }
    replaces!(
        AdvisoryLock::named("a server"),
        Throttle::named("mail", MINUTE),
        Semaphore::named("geocoder", 1, MINUTE),
        RateLimit::named("api", Quota::per_minute(1)),
        Fence::named("orders"),
        Leader::named("shard", MINUTE),
        Schedule::named("report"),
        Once::named("charge")
    );
}

/// A `Display` that fails.
struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Err(std::fmt::Error)
    }
}

#[test]
fn a_part_that_cannot_be_formatted_is_an_error_and_no_panic() {
    assert_matches!(LockKey::parts([Broken]).id(), Err(Error::Input(_)));
    assert_matches!(
        AdvisoryLock::named("x").key(Broken).lock_key().id(),
        Err(Error::Input(_))
    );
}
