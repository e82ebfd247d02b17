//! Keeps tests right on a slow machine: a thread, a process or the server may pause for seconds at
//! any moment.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::half::Error;

/// A lease that survives a pause of five seconds at any moment: its renewal is due after four
/// seconds, and its holder relies on it for eleven.
pub(crate) const LEASE: Duration = Duration::from_secs(12);

/// Repeats a round until it succeeds, because a pause of the machine may fail one. Only for rounds
/// that never succeed with broken code.
#[track_caller]
pub(crate) fn once_at_least(what: &str, mut succeeds: impl FnMut() -> bool) {
    assert!((0..20).any(|_| succeeds()), "in none of 20 rounds: {what}");
}

/// Repeats a round until it takes less time than `limit`, because a slower round proves nothing.
/// Returns the value of that round.
#[track_caller]
pub(crate) fn in_a_quick_round<T>(limit: Duration, mut round: impl FnMut() -> T) -> T {
    for _ in 0..100 {
        let began = Instant::now();
        let value = round();
        if began.elapsed() < limit {
            return value;
        }
    }
    panic!("no round of a hundred took less than {limit:?}")
}

/// Repeats an operation until its pool, which has a short timeout, gives it a connection in time.
#[track_caller]
pub(crate) fn patiently<T>(mut operation: impl FnMut() -> Result<T, Error>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match operation() {
            Err(Error::Pool(_)) if Instant::now() < end => {}
            outcome => return outcome.unwrap(),
        }
    }
}

/// A unique name for a round, so that no other round has its metrics and its log.
pub(crate) fn fresh(name: &str) -> &'static str {
    static ROUNDS: AtomicU32 = AtomicU32::new(0);
    let round = ROUNDS.fetch_add(1, Ordering::Relaxed);
    format!("{name}, {round}").leak()
}
