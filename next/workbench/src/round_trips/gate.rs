//! What a cut network is made of.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long [`Gate::shut`] waits for bytes that are being written.
const DRAINING: Duration = Duration::from_secs(1);

/// A gate that everything forwarded goes through.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    shut: bool,
    removed: bool,
    /// How many are in the gate.
    passing: usize,
}

impl Gate {
    /// Waits until the gate is open and does `work` inside. Fails once the gate was removed.
    pub(super) fn pass<T>(&self, work: impl FnOnce() -> T) -> io::Result<T> {
        let mut state = self.state();
        while state.shut && !state.removed {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.removed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        state.passing += 1;
        drop(state);
        let result = work();
        self.state().passing -= 1;
        self.changed.notify_all();
        Ok(result)
    }

    /// Shuts the gate, and waits for the threads that are in it, unless that takes long.
    pub(super) fn shut(&self) {
        let mut state = self.state();
        state.shut = true;
        drop(
            self.changed
                .wait_timeout_while(state, DRAINING, |state| state.passing > 0),
        );
    }

    /// Opens the gate.
    pub(super) fn open(&self) {
        self.state().shut = false;
        self.changed.notify_all();
    }

    /// Lets nobody through any more, and lets nobody wait either.
    pub(super) fn remove(&self) {
        self.state().removed = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
