//! One connection through the proxy.

use std::io::{self, Read};
use std::mem;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::faults::{Armed, When};
use super::messages::{Kind, Messages, Part};
use super::transcript::{self, Exchange};
use super::{Shared, Socket};

/// A client's connection, and the connection to the server that was opened for it.
#[derive(Debug)]
pub(super) struct Link {
    client: Socket,
    server: Socket,
    state: Mutex<State>,
    /// What the client and the server have sent, if that is kept.
    transcript: Mutex<[Vec<u8>; 2]>,
}

/// Who is at one end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Server,
}

/// State that both directions of a link share.
#[derive(Debug, Default)]
struct State {
    is_encrypted: bool,
    /// The client has asked for encryption, and the server replies with a single byte.
    is_asked: bool,
    /// Nothing passes any more, not even the end of a connection.
    is_silent: bool,
    /// The client has sent something since the server last has.
    is_awaited: bool,
    /// How many messages that end with the server being ready were forwarded.
    requests: u64,
    /// The fault that swallows the reply to the last of them. Nothing is forwarded after that one.
    lost: Option<Armed>,
}

/// What passes of a piece, and the fault that happens then.
pub(super) type Passed = (Vec<u8>, Option<Armed>);

impl Link {
    pub(super) fn new(client: Socket, server: Socket) -> Self {
        Self {
            client,
            server,
            state: Mutex::default(),
            transcript: Mutex::default(),
        }
    }

    pub(super) fn record(&self, from: Side, bytes: &[u8]) {
        self.transcript()[usize::from(from == Side::Server)].extend_from_slice(bytes);
    }

    pub(super) fn exchanges(&self) -> Vec<Exchange> {
        let [requests, replies] = &*self.transcript();
        transcript::exchanges(requests, replies)
    }

    fn transcript(&self) -> MutexGuard<'_, [Vec<u8>; 2]> {
        self.transcript
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn socket(&self, side: Side) -> &Socket {
        match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }

    /// Reads what one side has sent. Returns nothing at the end of the connection, or after an error.
    pub(super) fn read(&self, from: Side) -> Vec<u8> {
        let mut buffer = vec![0; 16 * 1024];
        let length = loop {
            match self.socket(from).read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.unwrap_or(0),
            }
        };
        buffer.truncate(length);
        buffer
    }

    /// Tells one side that the other has closed its connection. A server still replies to what it has received, then closes.
    pub(super) fn end(&self, to: Side) {
        if !self.is_silent() {
            match to {
                Side::Client => self.close(),
                Side::Server => _ = self.server.shutdown(Shutdown::Write),
            }
        }
    }

    pub(super) fn close(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }

    pub(super) fn fall_silent(&self) {
        self.state().is_silent = true;
    }

    /// Notes that something of this side passes. Returns whether it is the first of the client since a reply.
    pub(super) fn begins_flight(&self, from: Side) -> bool {
        let is_request = from == Side::Client;
        !mem::replace(&mut self.state().is_awaited, is_request) && is_request
    }

    pub(super) fn is_silent(&self) -> bool {
        self.state().is_silent
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the body of a message goes.
#[derive(Debug)]
enum Goal {
    Through,
    Held,
    Nowhere,
}

/// The messages of a client.
#[derive(Debug)]
pub(super) struct Requests {
    messages: Messages,
    goal: Goal,
    /// Messages of the extended protocol, held until the `Sync` after them: the server might already commit when it gets
    /// one of them, and a fault before the server must prevent that.
    held: Vec<u8>,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self {
            messages: Messages::opening(),
            goal: Goal::Through,
            held: Vec::new(),
        }
    }

    /// Counts the messages in a piece, and finds the one at which the connection fails.
    pub(super) fn pass(&mut self, mut piece: &[u8], link: &Link, shared: &Shared) -> Passed {
        let mut state = link.state();
        // A client may also begin with TLS without asking.
        state.is_encrypted |= self.messages.are_to_open() && piece.first() == Some(&22);
        if state.is_encrypted {
            return (piece.to_vec(), None);
        }
        let mut through = Vec::new();
        while let Some(part) = self.messages.next(&mut piece) {
            let bytes = match part {
                Part::Body(bytes) => bytes,
                Part::Head(kind, bytes) => {
                    if state.lost.is_some() {
                        self.goal = Goal::Nowhere;
                        continue;
                    }
                    self.goal = Goal::Through;
                    match kind {
                        Kind::Opening { asks } => state.is_asked = asks,
                        Kind::Typed(b'Q' | b'S' | b'F') => {
                            let armed = shared.faults.count();
                            if armed
                                .as_ref()
                                .is_some_and(|armed| armed.when == When::BeforeServer)
                            {
                                return (through, armed);
                            }
                            state.requests += 1;
                            state.lost = armed;
                        }
                        Kind::Typed(b'P' | b'B' | b'D' | b'E' | b'C') => self.goal = Goal::Held,
                        Kind::Typed(_) => {}
                    }
                    if let Kind::Typed(b'P') = kind {
                        shared.parses.fetch_add(1, Ordering::SeqCst);
                    }
                    bytes
                }
            };
            match self.goal {
                Goal::Held => self.held.extend_from_slice(bytes),
                Goal::Nowhere => {}
                Goal::Through => {
                    through.append(&mut self.held);
                    through.extend_from_slice(bytes);
                }
            }
        }
        (through, None)
    }
}

/// The messages of the server.
#[derive(Debug)]
pub(super) struct Replies {
    messages: Messages,
    /// Whether the client gets the message that is being read.
    passes: bool,
    /// How often the server was ready for the next request.
    ready: u64,
}

impl Replies {
    pub(super) fn new() -> Self {
        Self {
            messages: Messages::typed(),
            passes: true,
            ready: 0,
        }
    }

    /// Finds the reply that a fault swallows.
    pub(super) fn pass(&mut self, mut piece: &[u8], link: &Link) -> Passed {
        let mut state = link.state();
        let mut through = Vec::new();
        if mem::take(&mut state.is_asked) {
            match piece {
                [b'S' | b'G', ..] => state.is_encrypted = true,
                [b'N', rest @ ..] => {
                    through.push(b'N');
                    piece = rest;
                }
                // Nothing, or an error message.
                _ => {}
            }
        }
        if state.is_encrypted {
            return (piece.to_vec(), None);
        }
        while let Some(part) = self.messages.next(&mut piece) {
            let bytes = match part {
                Part::Body(bytes) => bytes,
                Part::Head(kind, bytes) => {
                    // The server is ready once before the first request.
                    let is_lost = state.lost.is_some() && self.ready >= state.requests;
                    if let Kind::Typed(b'Z') = kind {
                        self.ready += 1;
                        if is_lost {
                            return (through, state.lost.clone());
                        }
                    }
                    self.passes = !is_lost;
                    bytes
                }
            };
            if self.passes {
                through.extend_from_slice(bytes);
            }
        }
        (through, None)
    }
}
