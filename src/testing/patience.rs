//! Looking again, where what ends does not end at once.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use crate::error::Result;

/// A session that discards its connection frees its locks, and a thread delivers what a dropped permit
/// could not: within milliseconds, but not at once.
const PATIENCE: Duration = Duration::from_secs(2);

/// Looks until nothing is seen, and panics if something still is after two seconds.
#[track_caller]
pub(super) fn assert_none<T: Debug>(expected: &str, mut look: impl FnMut() -> Result<Vec<T>>) {
    let end = Instant::now() + PATIENCE;
    loop {
        let seen = match look() {
            Ok(seen) => seen,
            Err(error) => panic!("cannot look whether {expected}: {error:?}"),
        };
        if seen.is_empty() {
            return;
        }
        if Instant::now() >= end {
            let seen: String = seen.iter().map(|one| format!("\n  {one:?}")).collect();
            panic!("expected that {expected}, but:{seen}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::assert_none;

    #[test]
    fn what_goes_away_soon_is_waited_for() {
        let mut left = vec![1, 2, 3];
        assert_none("nothing is left", || {
            left.pop();
            Ok(left.clone())
        });
    }
}
