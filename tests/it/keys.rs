//! Keys have the numbers that other programs compute, for ever.

use std::collections::HashSet;

use crate::half::{
    AdvisoryLock, Database, Error, LockId, LockKey, error::Input, fnv1a, migrations,
};
use crate::support::assert_matches;

const NAMES: &str = include_str!("vectors/names.tsv");
const PARTS: &str = include_str!("vectors/parts.tsv");
const GEM: &str = include_str!("vectors/gem.tsv");

/// The rows of a vector file, each as a lookup by column name.
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

fn decode(name: &str) -> String {
    let (kind, rest) = name.split_once(':').unwrap();
    let (hex, times) = match kind {
        "hex" => (rest, 1),
        "repeat" => {
            let (hex, times) = rest.split_once(':').unwrap();
            (hex, times.parse().unwrap())
        }
        _ => panic!("{name} is no text"),
    };
    let bytes = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect();
    String::from_utf8(bytes).unwrap().repeat(times)
}

/// The names that PostgreSQL's `text` can hold, and their FNV-1a keys; the long ones left out.
pub(crate) fn short_names() -> impl Iterator<Item = (String, i64)> {
    rows(NAMES)
        .map(|row| (decode(row("name")), row("fnv1a64_signed").parse().unwrap()))
        .filter(|(name, _)| !name.contains('\0') && name.len() < 1000)
}

fn bigint(cell: &str) -> LockKey {
    LockKey::bigint(cell.parse().unwrap())
}

#[test]
fn names_have_the_numbers_of_python_ruby_and_node() {
    let mut count = 0;
    for row in rows(NAMES) {
        let name = decode(row("name"));
        let fnv: i64 = row("fnv1a64_signed").parse().unwrap();
        assert_eq!(fnv1a(&name), fnv, "{name:?}");
        assert_eq!(LockKey::from(name.clone()), LockKey::bigint(fnv));
        assert_eq!(LockKey::crc32(&name), bigint(row("crc32")));
        assert_eq!(LockKey::times31(&name), bigint(row("times31")));
        assert_eq!(
            LockKey::django_pglocks_1(&name),
            bigint(row("django_pglocks_1"))
        );
        #[cfg(feature = "sha2")]
        {
            let django_pglocks_2 = bigint(row("django_pglocks_2"));
            assert_eq!(LockKey::django_pglocks_2(&name), django_pglocks_2);
            assert_eq!(LockKey::django_pglock(&name), bigint(row("django_pglock")));
        }
        count += 1;
    }
    assert!(count >= 90, "only {count} vectors");
}

#[test]
fn the_numbers_of_the_articles_hold() {
    assert_eq!(
        LockKey::parts([223, 345]).id().unwrap(),
        LockId::BigInt(3755351481708176604)
    );
    assert_eq!(fnv1a(""), -3750763034362895579);
    assert_eq!(
        migrations::LOCK.key().id().unwrap(),
        LockId::BigInt(7668513674988384022)
    );
}

#[test]
fn parts_are_joined_and_escaped() {
    let mut count = 0;
    for row in rows(PARTS) {
        let parts = row("parts").split(',').map(decode);
        let key = LockKey::parts(parts);
        assert_eq!(key.name().unwrap(), decode(row("joined")));
        assert_eq!(key, bigint(row("fnv1a64_signed")));
        count += 1;
    }
    assert!(count >= 30, "only {count} vectors");
}

#[test]
fn different_lists_of_parts_are_different_names() {
    let pieces = ["", "a", " ", "\\", "a ", " a", "\\ ", " \\", "\\\\", "  "];
    let mut lists: Vec<Vec<&str>> = vec![];
    for first in pieces {
        lists.push(vec![first]);
        for second in pieces {
            lists.push(vec![first, second]);
            for third in pieces {
                lists.push(vec![first, second, third]);
            }
        }
    }
    let names: HashSet<String> = lists
        .iter()
        .map(|parts| LockKey::parts(parts).name().unwrap().to_owned())
        .collect();
    assert_eq!(names.len(), lists.len());
}

#[test]
fn the_gems_names_have_the_gems_pairs() {
    let mut count = 0;
    for row in rows(GEM) {
        let (Ok(first), Ok(second)) = (row("gem_first").parse(), row("gem_second").parse()) else {
            continue; // the gem refuses this name
        };
        if !row("name").starts_with("hex:") && !row("name").starts_with("repeat:") {
            continue; // a number: not hashed
        }
        let name = decode(row("name"));
        let expected = LockKey::pair(first, second);
        match row("prefix") {
            "unset" => assert_eq!(LockKey::with_advisory_lock(&name), expected),
            prefix => {
                if let Ok(prefix) = decode(prefix).parse::<i32>() {
                    let key = LockKey::with_advisory_lock_prefix(&name, prefix);
                    assert_eq!(key, expected, "{name:?} with {prefix}");
                }
            }
        }
        count += 1;
    }
    assert!(count >= 90, "only {count} vectors");
}

#[test]
fn equality_is_by_number() {
    static NAMED: AdvisoryLock = AdvisoryLock::named("223 345");
    assert_eq!(NAMED.key(), &LockKey::bigint(3755351481708176604));
    assert_eq!(LockKey::named("a"), LockKey::from("a"));
    assert_eq!(LockKey::from(5_i64), LockKey::bigint(5));
    assert_eq!(LockKey::from((5, 6)), LockKey::pair(5, 6));
    assert_ne!(LockKey::pair(0, 5), LockKey::bigint(5));
    assert_ne!(LockKey::named("a"), LockKey::named("b"));
    let set: HashSet<_> = [
        LockKey::named("223 345"),
        LockKey::bigint(3755351481708176604),
    ]
    .into();
    assert_eq!(set.len(), 1);
}

#[test]
fn a_key_shows_its_name_and_its_number() {
    let named = LockKey::named("nightly report");
    assert_eq!(
        named.to_string(),
        "\"nightly report\" (6597228812378105932)"
    );
    assert_eq!(
        format!("{named:?}"),
        "LockKey(\"nightly report\" (6597228812378105932))"
    );
    assert_eq!(LockKey::pair(1, -2).to_string(), "(1, -2)");
    assert_eq!(LockKey::bigint(-7).to_string(), "-7");
    let long = LockKey::from("é".repeat(1_000_000)).to_string();
    assert!(long.len() < 300, "{long}");
    assert!(long.contains('…'));
    assert_eq!(
        LockKey::named("a\0\n").to_string(),
        format!("\"a\\0\\n\" ({})", fnv1a("a\0\n"))
    );
}

#[test]
fn an_empty_name_is_an_error_in_every_form() {
    for key in [
        LockKey::named(""),
        LockKey::from(String::new()),
        LockKey::parts([""]),
        LockKey::parts([0; 0]),
        LockKey::crc32(""),
        LockKey::times31(""),
        LockKey::with_advisory_lock(""),
        LockKey::django_pglocks_1(""),
        #[cfg(feature = "sha2")]
        LockKey::django_pglocks_2(""),
        #[cfg(feature = "sha2")]
        LockKey::django_pglock(""),
    ] {
        assert!(
            matches!(key.id(), Err(Error::Input(Input::EmptyName))),
            "{key}"
        );
    }
    assert!(LockKey::parts([" "]).id().is_ok());
    assert!(LockKey::named("\0").id().is_ok());
}

#[test]
fn keys_spread_in_a_hash_map() {
    let hasher = std::hash::RandomState::new();
    let hash = |key: LockKey| std::hash::BuildHasher::hash_one(&hasher, key);
    let hashes: HashSet<u64> = (0..100).map(LockKey::bigint).map(hash).collect();
    assert_eq!(hashes.len(), 100);
}

#[test]
fn a_number_is_that_of_a_bigint_and_never_of_a_pair() {
    assert_eq!(LockId::BigInt(-7).as_bigint(), Some(-7));
    assert_eq!(LockId::Pair(0, -7).as_bigint(), None);
}

/// Its `Display` fails, at which `to_string` panics.
pub(crate) struct Unprintable;

impl std::fmt::Display for Unprintable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("half")?;
        Err(std::fmt::Error)
    }
}

#[test]
fn a_part_that_cannot_be_formatted_is_an_error_of_the_first_operation() {
    let key = LockKey::parts([Unprintable]);
    assert!(
        matches!(key.id(), Err(Error::Input(Input::Unformatted))),
        "{key}"
    );
    assert_eq!(key.to_string(), "\"\" (not formatted)");
    assert_ne!(key, LockKey::named(""));
    assert_ne!(key, LockKey::named("half"));
    let parts: [&dyn std::fmt::Display; 3] = [&"tenant", &Unprintable, &7];
    let key = LockKey::parts(parts);
    assert_eq!(key.to_string(), "\"tenant \" (not formatted)");

    let database = Database::new();
    let conn = &mut database.connect();
    let lock = AdvisoryLock::new(key);
    let refused = lock.try_acquire_on(conn).map(drop);
    assert_matches!(refused, Err(Error::Input(Input::Unformatted)));
}
