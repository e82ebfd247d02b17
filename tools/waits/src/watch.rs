//! Counts waiters and statements on the server, and checks for how long there are none.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::clock::{self, lock};
use crate::sync::Instant;

pub(crate) const MS: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
struct Counts {
    /// Waiters that were refused and have not ended.
    waiting: usize,
    /// Statements in flight or on the server.
    sent: usize,
    /// Since when there are waiters, but no statements.
    idle_since: Option<Instant>,
    /// When something was released in this process that no waiter has tried to get yet.
    owed_since: Option<Instant>,
}

/// Watches the waiters of one queue.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watch(Arc<Mutex<Counts>>);

impl Watch {
    /// Fails if no waiter sends a statement for longer than `longest`, or for longer than `patience`
    /// after a release in this process.
    pub(crate) fn new(longest: Duration, patience: Duration) -> Self {
        let watch = Self::default();
        let watched = watch.clone();
        clock::invariant(move |next| {
            let (idle_since, owed_since) = {
                let counts = lock(&watched.0);
                (counts.idle_since, counts.owed_since)
            };
            if let Some(since) = idle_since {
                let idle = next.duration_since(since);
                assert!(idle <= longest, "those who wait send nothing for {idle:?}");
                let owed = owed_since.map_or(Duration::ZERO, |since| next.duration_since(since));
                assert!(
                    owed <= patience,
                    "released here, and nobody tries for {owed:?}"
                );
            }
        });
        watch
    }

    fn change(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = lock(&self.0);
        change(&mut counts);
        let is_idle = counts.waiting > 0 && counts.sent == 0;
        counts.idle_since = is_idle.then(|| counts.idle_since.unwrap_or_else(Instant::now));
        counts.owed_since = counts.owed_since.filter(|_| counts.waiting > 0);
    }

    /// Counts a waiter, until the drop.
    pub(crate) fn wait(&self) -> Waiting {
        self.change(|counts| counts.waiting += 1);
        Waiting(self.clone())
    }

    /// Counts a statement, until the drop.
    pub(crate) fn send(&self) -> Sent {
        self.change(|counts| {
            counts.sent += 1;
            counts.owed_since = None;
        });
        Sent(self.clone())
    }

    /// Notes a release in this process, whose waiters were woken.
    pub(crate) fn owe(&self) {
        self.change(|counts| counts.owed_since = counts.owed_since.or(Some(Instant::now())));
    }

    /// Notes that the release went to a waiter on the server.
    pub(crate) fn settle(&self) {
        self.change(|counts| counts.owed_since = None);
    }
}

#[derive(Debug)]
pub(crate) struct Waiting(Watch);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.change(|counts| counts.waiting -= 1);
    }
}

#[derive(Debug)]
pub(crate) struct Sent(Watch);

impl Drop for Sent {
    fn drop(&mut self) {
        self.0.change(|counts| counts.sent -= 1);
    }
}
