//! Threads of this crate, started when they are first needed.

use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::sync::{Mutex, PoisonError};

/// A thread that works on what it is sent, and waits for more for as long as the process lives.
#[derive(Debug)]
pub(crate) struct Background<T> {
    name: &'static str,
    run: fn(&Receiver<T>),
    sender: Mutex<Option<Sender<T>>>,
}

impl<T: Send + 'static> Background<T> {
    pub(crate) const fn new(name: &'static str, run: fn(&Receiver<T>)) -> Self {
        Self {
            name,
            run,
            sender: Mutex::new(None),
        }
    }

    /// Sends the thread something to do, and starts it if there is none. Where no thread can be
    /// started, what was sent is dropped.
    pub(crate) fn send(&self, item: T) {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let item = match &*sender {
            Some(running) => match running.send(item) {
                Ok(()) => return,
                Err(SendError(item)) => item,
            },
            None => item,
        };
        let (new, receiver) = channel();
        let run = self.run;
        let started = std::thread::Builder::new()
            .name(self.name.into())
            .spawn(move || run(&receiver));
        if started.is_ok() && new.send(item).is_ok() {
            *sender = Some(new);
        }
    }
}
