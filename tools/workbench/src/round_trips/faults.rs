//! Faults at a chosen message.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where in a round trip a connection fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Neither the message nor what belongs to it, such as the statement before a `Sync`, reaches the server.
    BeforeServer,
    /// The server has executed the message, and its reply is lost.
    BeforeReply,
}

/// A fault that is armed in a [`RoundTrips`](crate::RoundTrips). It happens once, or never.
#[derive(Clone, Debug)]
pub struct Fault(Arc<AtomicBool>);

impl Fault {
    /// Whether it has happened: it has as soon as the client can see it.
    pub fn has_happened(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    pub(super) fn happens(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// What a fault does to the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    IsClosed,
    IsSilent,
}

/// A fault that is still to come.
#[derive(Clone, Debug)]
pub(super) struct Armed {
    /// The number of its message.
    message: u64,
    pub(super) when: When,
    pub(super) effect: Effect,
    pub(super) fault: Fault,
}

/// Numbers the messages, and has the faults at future ones.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<(u64, Vec<Armed>)>);

impl Faults {
    /// How many messages were counted so far.
    pub(super) fn messages(&self) -> u64 {
        self.lock().0
    }

    /// Counts a message, and returns the fault that happens at it.
    pub(super) fn count(&self) -> Option<Armed> {
        let (messages, armed) = &mut *self.lock();
        *messages += 1;
        let due = armed.iter().position(|armed| armed.message == *messages);
        due.map(|due| armed.swap_remove(due))
    }

    /// Sets a fault at the `n`-th message from now on.
    pub(super) fn arm(&self, n: u64, when: When, effect: Effect) -> Fault {
        assert!(n > 0, "the next message is number 1");
        let (messages, armed) = &mut *self.lock();
        let message = *messages + n;
        let is_free = armed.iter().all(|armed| armed.message != message);
        assert!(is_free, "that message has a fault already");
        let fault = Fault(Arc::default());
        armed.push(Armed {
            message,
            when,
            effect,
            fault: fault.clone(),
        });
        fault
    }

    /// Forgets the faults whose messages have not come.
    pub(super) fn disarm(&self) {
        self.lock().1.clear();
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Vec<Armed>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
