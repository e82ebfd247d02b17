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
        let is_closed = |state: &mut State| state.shut && !state.removed;
        let state = self.changed.wait_while(self.state(), is_closed);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.removed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        state.passing += 1;
        drop(state);
        let result = work();
        self.change(|state| state.passing -= 1);
        Ok(result)
    }

    /// Shuts the gate, and waits for the threads that are in it, unless that takes long.
    pub(super) fn shut(&self) {
        let mut state = self.state();
        state.shut = true;
        let is_used = |state: &mut State| state.passing > 0;
        drop(self.changed.wait_timeout_while(state, DRAINING, is_used));
    }

    /// Opens the gate.
    pub(super) fn open(&self) {
        self.change(|state| state.shut = false);
    }

    /// Lets nobody through any more, and lets nobody wait either.
    pub(super) fn remove(&self) {
        self.change(|state| state.removed = true);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
