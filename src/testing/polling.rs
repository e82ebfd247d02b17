//! Polling for locks and slots that are freed a moment later.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use crate::error::Result;

/// How long an assertion polls before it panics. A session that discards its connection frees its locks, and a background
/// thread sends the release of a dropped permit, within milliseconds but not at once.
const PATIENCE: Duration = Duration::from_secs(2);

/// Polls until `find` returns nothing, and panics if it still returns something after [`PATIENCE`].
#[track_caller]
pub(super) fn assert_none<T: Debug>(expected: &str, mut find: impl FnMut() -> Result<Vec<T>>) {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = match find() {
            Ok(found) => found,
            Err(error) => panic!("cannot find out whether {expected}: {error:?}"),
        };
        if found.is_empty() {
            return;
        }
        if Instant::now() >= end {
            let found: String = found.iter().map(|one| format!("\n  {one:?}")).collect();
            panic!("expected that {expected}, but:{found}");
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
