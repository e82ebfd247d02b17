//! What holds whatever is put in: tried with random input, and against models of a few lines.
//!
//! `PROPTEST_CASES=10000 scripts/test properties::` tries more of it.

mod input;
mod keys;
mod semaphores;
mod throttles;
mod wire;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Fails with the smallest input found that makes `property` panic.
fn hold<S: Strategy>(cases: u32, input: S, property: impl Fn(S::Value)) {
    let mut config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    let run = TestRunner::new(config).run(&input, |value| {
        property(value);
        Ok(())
    });
    if let Err(error) = run {
        panic!("{error}");
    }
}

/// Any text: mostly short, with more of what means something to somebody, at times longer than is taken.
fn text() -> impl Strategy<Value = String> {
    let character = prop_oneof![
        4 => any::<char>(),
        4 => proptest::char::range(' ', '~'),
        2 => proptest::sample::select(vec!['\\', ' ', '\'', '"', '%', '$', '\t', '\n', 'ü', '\u{10ffff}']),
        1 => Just('\0'),
    ];
    prop_oneof![
        12 => vec(character.clone(), 0..16).prop_map(String::from_iter),
        1 => (character, 0_usize..1100).prop_map(|(one, times)| one.to_string().repeat(times)),
        1 => Just(String::new()),
    ]
}
