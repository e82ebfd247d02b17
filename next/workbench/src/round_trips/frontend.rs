//! The messages that a client sends.

use std::io::{self, Read, Write};

/// The code of a request for TLS, which comes in place of a protocol version.
const SSL_REQUEST: u32 = 80_877_103;

/// The code of a request for encryption by GSSAPI.
const GSS_ENCRYPTION_REQUEST: u32 = 80_877_104;

/// The longest packet that may open a connection, as in PostgreSQL.
const LONGEST_STARTUP_PACKET: u32 = 10_000;

/// Reads the packet that opens a connection, or that requests a cancellation. Refuses encryption as a server does that
/// has none.
pub(super) fn startup_packet(client: &mut (impl Read + Write)) -> io::Result<Vec<u8>> {
    loop {
        let mut head = [0; 8];
        client.read_exact(&mut head)?;
        let (length, code) = (be32(&head[..4]), be32(&head[4..]));
        if !(8..=LONGEST_STARTUP_PACKET).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut packet = head.to_vec();
        packet.resize(length as usize, 0);
        client.read_exact(&mut packet[8..])?;
        if !matches!(code, SSL_REQUEST | GSS_ENCRYPTION_REQUEST) {
            return Ok(packet);
        }
        client.write_all(b"N")?;
    }
}

/// Finds the messages in what a client sends after its startup packet, in pieces of any length.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// The part of a message's head that has been seen: its type and its length.
    head: Vec<u8>,
    /// How much of the message's body is still to come.
    body: usize,
}

impl Messages {
    /// Calls `on_message` with the type of each message whose head ends in this piece.
    pub(super) fn read(&mut self, mut piece: &[u8], mut on_message: impl FnMut(u8)) {
        loop {
            let skipped = self.body.min(piece.len());
            self.body -= skipped;
            piece = &piece[skipped..];

            let taken = (5 - self.head.len()).min(piece.len());
            self.head.extend_from_slice(&piece[..taken]);
            piece = &piece[taken..];
            if self.head.len() < 5 {
                return;
            }
            on_message(self.head[0]);
            // The length counts itself.
            self.body = (be32(&self.head[1..]) as usize).saturating_sub(4);
            self.head.clear();
        }
    }
}

fn be32(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .fold(0, |value, &byte| value << 8 | u32::from(byte))
}
