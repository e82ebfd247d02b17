//! The messages of PostgreSQL's protocol on the wire.

/// Finds the messages of one side in pieces of any length.
#[derive(Debug)]
pub(super) struct Messages {
    /// The part of a message's head that has been seen.
    head: Vec<u8>,
    /// How long a head is.
    length_of_head: usize,
    /// How much of the message's body is still to come.
    body: usize,
}

/// A part of what one side sends.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part<'a> {
    /// The head of a message, as soon as it is complete.
    Head(Kind, &'a [u8]),
    /// More of the body of that message.
    Body(&'a [u8]),
}

/// What a message is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// What a client sends first, and whether that asks for encryption.
    Opening { asks: bool },
    /// Any other, by its type.
    Typed(u8),
}

impl Messages {
    /// The messages of a client that has just connected: the next one is an opening.
    pub(super) fn opening() -> Self {
        Self {
            length_of_head: 8,
            ..Self::typed()
        }
    }

    /// The messages of a server, or of a client after its opening.
    pub(super) fn typed() -> Self {
        Self {
            head: Vec::new(),
            length_of_head: 5,
            body: 0,
        }
    }

    /// Whether nothing has been seen of an opening that comes next.
    pub(super) fn are_to_open(&self) -> bool {
        self.length_of_head == 8 && self.head.is_empty()
    }

    /// Takes the next part off a piece.
    pub(super) fn next<'a, 'p: 'a>(&'a mut self, piece: &mut &'p [u8]) -> Option<Part<'a>> {
        if self.body > 0 {
            let body = take(piece, self.body)?;
            self.body -= body.len();
            return Some(Part::Body(body));
        }
        // The part that was given last.
        if self.head.len() == self.length_of_head {
            if !self.asks_for_encryption() {
                self.length_of_head = 5;
            }
            self.head.clear();
        }
        while self.head.len() < self.length_of_head {
            let missing = self.length_of_head - self.head.len();
            self.head.extend_from_slice(take(piece, missing)?);
        }
        let (kind, length, seen) = match *self.head.as_slice() {
            [a, b, c, d, ..] if self.length_of_head == 8 => {
                let asks = self.asks_for_encryption();
                (Kind::Opening { asks }, [a, b, c, d], 8)
            }
            [kind, a, b, c, d] => (Kind::Typed(kind), [a, b, c, d], 4),
            _ => unreachable!("a head is complete"),
        };
        // The length counts itself.
        self.body = (u32::from_be_bytes(length) as usize).saturating_sub(seen);
        Some(Part::Head(kind, &self.head))
    }

    /// Whether the head is that of an `SSLRequest` or of a `GSSENCRequest`. The server replies with a single byte, and if
    /// that is a refusal, the client sends another opening.
    fn asks_for_encryption(&self) -> bool {
        matches!(
            self.head.as_slice(),
            [.., 4, 210, 22, 47 | 48] if self.length_of_head == 8
        )
    }
}

/// Takes up to `at_most` bytes off a piece, unless it is empty.
fn take<'a>(piece: &mut &'a [u8], at_most: usize) -> Option<&'a [u8]> {
    let (taken, rest) = piece.split_at(at_most.min(piece.len()));
    *piece = rest;
    Some(taken).filter(|taken| !taken.is_empty())
}
