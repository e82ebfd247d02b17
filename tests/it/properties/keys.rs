//! Keys are the numbers that straightforward implementations compute.

use std::cell::RefCell;
use std::collections::HashMap;

use diesel::prelude::*;
use diesel_interlock::error::Input;
use diesel_interlock::functions::lock_key;
use diesel_interlock::monitor::Names;
use diesel_interlock::{AdvisoryLock, Error, LockId, LockKey, fnv1a, migrations};
use proptest::collection::vec;
use proptest::prelude::*;
use workbench::Database;

use super::{hold, text};
use crate::support::{Expect, Observer};

#[test]
fn hashes_are_those_of_straightforward_implementations() {
    hold(500, (text(), any::<i32>()), |(name, prefix)| {
        let id = |key: LockKey| key.number_or_empty();
        let crc = crc32(name.as_bytes());
        assert_eq!(fnv1a(&name), fnv(name.as_bytes()));
        assert_eq!(
            id(LockKey::from(&*name)),
            Some(LockId::BigInt(fnv(name.as_bytes()))).filter(|_| !name.is_empty())
        );
        if !name.is_empty() {
            assert_eq!(
                id(LockKey::crc32(&name)),
                Some(LockId::BigInt(i64::from(crc)))
            );
            assert_eq!(
                id(LockKey::django_pglocks_1(&name)),
                Some(LockId::BigInt(i64::from(crc as i32)))
            );
            assert_eq!(
                id(LockKey::times31(&name)),
                Some(LockId::BigInt(times31(&name)))
            );
            assert_eq!(
                id(LockKey::with_advisory_lock_prefix(&name, prefix)),
                Some(LockId::Pair((crc & 0x7fff_ffff) as i32, prefix & i32::MAX))
            );
        }
    });
}

trait NumberOrEmpty {
    /// `None` for the empty name.
    fn number_or_empty(&self) -> Option<LockId>;
}

impl NumberOrEmpty for LockKey {
    fn number_or_empty(&self) -> Option<LockId> {
        match self.id() {
            Ok(id) => Some(id),
            Err(Error::Input(Input::EmptyName)) => None,
            Err(error) => panic!("{error:?}"),
        }
    }
}

fn fnv(bytes: &[u8]) -> i64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step) as i64
}

/// Bit by bit, as the polynomial is written.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 }
        })
    })
}

/// `hash = (hash << 5) - hash + unit | 0`, with numbers that are large enough.
fn times31(name: &str) -> i64 {
    name.encode_utf16().fold(0, |hash: i64, unit| {
        i64::from(((hash << 5) - hash + i64::from(unit)) as i32)
    })
}

/// The parts of a name that was made of them.
fn parts_of(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = name.chars();
    while let Some(character) = characters.next() {
        match character {
            ' ' => parts.push(String::new()),
            '\\' => parts.last_mut().unwrap().extend(characters.next()),
            other => parts.last_mut().unwrap().push(other),
        }
    }
    parts
}

#[test]
fn parts_can_be_told_from_the_name() {
    hold(500, vec(text(), 1..5), |parts| {
        let key = LockKey::parts(&parts);
        assert_eq!(parts_of(key.name().unwrap()), parts);
        assert_eq!(key, LockKey::from(key.name().unwrap()));
    });
}

#[test]
fn keys_are_equal_if_their_numbers_are() {
    let key = prop_oneof![
        any::<i64>().prop_map(LockKey::from),
        any::<(i32, i32)>().prop_map(LockKey::from),
        (-2_i64..3).prop_map(LockKey::bigint),
        (-1..2, -1..2).prop_map(LockKey::from),
        text().prop_map(LockKey::from),
        text().prop_map(|name| LockKey::bigint(fnv1a(&name))),
    ];
    hold(500, (key.clone(), key), |(one, two)| {
        if let (Ok(first), Ok(second)) = (one.id(), two.id()) {
            assert_eq!(one == two, first == second);
            let mut names = HashMap::from([(one.clone(), 1)]);
            assert_eq!(names.insert(two.clone(), 2).is_some(), one == two);
            match first {
                LockId::BigInt(number) => assert_eq!(LockKey::bigint(number), one),
                LockId::Pair(a, b) => assert_eq!(LockKey::pair(a, b), one),
            }
        }
    });
}

#[test]
fn any_name_is_shown_with_its_number() {
    hold(500, text(), |name| {
        let key = LockKey::from(&*name);
        let (shown, number) = (key.to_string(), fnv1a(&name));
        assert!(shown.ends_with(&format!(" ({number})")), "{shown}");
        assert_eq!(format!("{key:?}"), format!("LockKey({shown})"));
        assert!(!shown.contains(char::is_control), "{shown:?}");
        assert_eq!(
            shown.contains('…'),
            name.contains('…') || name.chars().count() > 80
        );
        match Names::new([&key]) {
            Ok(names) => assert_eq!(names.of(LockId::BigInt(number)), Some(&*name)),
            Err(error) => assert!(name.is_empty(), "{error:?}"),
        }
    });
}

#[test]
fn the_stored_function_has_the_same_numbers() {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let conn = RefCell::new(database.connect());
    hold(100, text(), |name| {
        let name = name.replace('\0', "");
        let number: i64 = diesel::select(lock_key(&name))
            .get_result(&mut *conn.borrow_mut())
            .unwrap();
        assert_eq!(number, fnv1a(&name));
    });
}

#[test]
fn any_key_is_locked_as_itself() {
    let database = Database::new();
    let (conn, observer) = (
        RefCell::new(database.connect()),
        RefCell::new(Observer::of(&database)),
    );
    let key = prop_oneof![
        any::<i64>().prop_map(LockKey::from),
        any::<(i32, i32)>().prop_map(LockKey::from),
        text().prop_map(LockKey::from),
    ];
    hold(50, (key, any::<bool>()), |(key, shared)| {
        let (conn, observer) = (&mut *conn.borrow_mut(), &mut *observer.borrow_mut());
        let lock = AdvisoryLock::new(key.clone());
        let lock = if shared { lock.shared() } else { lock };
        match lock.try_acquire_on(conn) {
            Ok(attempt) => {
                let mut guard = attempt.expect_acquired();
                assert!(guard.is_held().unwrap());
                assert_eq!((observer.holders(&key), observer.all_held()), (1, 1));
                guard.release().unwrap();
            }
            Err(Error::Input(Input::EmptyName)) => assert_eq!(key.name(), Some("")),
            Err(error) => panic!("{error:?}"),
        }
        assert_eq!(observer.all_held(), 0);
    });
}
