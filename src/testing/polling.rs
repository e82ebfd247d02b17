//! Polling for locks and slots that are freed a moment later.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use crate::error::Result;

/// How long an assertion polls before it panics. A session that discards its connection frees its locks, and a background
/// thread sends the release of a dropped permit, within milliseconds but not at once.
const PATIENCE: Duration = Duration::from_secs(2);

/// The pause between two polls.
pub(super) const PAUSE: Duration = Duration::from_millis(10);

/// An assertion that nothing is left, or will be soon.
pub(super) struct NoneLeft {
    expected: String,
    end: Instant,
}

impl NoneLeft {
    pub(super) fn that(expected: String) -> Self {
        let end = Instant::now() + PATIENCE;
        Self { expected, end }
    }

    /// Returns whether nothing was found, or the message of the panic if something is still found after [`PATIENCE`].
    pub(super) fn holds<T: Debug>(&self, found: Result<Vec<T>>) -> Result<bool, String> {
        let expected = &self.expected;
        match found {
            Ok(found) if found.is_empty() => Ok(true),
            Ok(_) if Instant::now() < self.end => Ok(false),
            Ok(found) => {
                let found: String = found.iter().map(|one| format!("\n  {one:?}")).collect();
                Err(format!("expected that {expected}, but:{found}"))
            }
            Err(error) => Err(format!("cannot find out whether {expected}: {error:?}")),
        }
    }
}

/// Polls until `find` returns nothing, and panics if it still returns something after [`PATIENCE`].
#[track_caller]
#[cfg(feature = "postgres")]
pub(super) fn assert_none<T: Debug>(expected: &str, mut find: impl FnMut() -> Result<Vec<T>>) {
    let none_left = NoneLeft::that(expected.to_owned());
    loop {
        match none_left.holds(find()) {
            Ok(true) => return,
            Ok(false) => std::thread::sleep(PAUSE),
            Err(message) => panic!("{message}"),
        }
    }
}

#[cfg(all(test, feature = "postgres"))]
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
