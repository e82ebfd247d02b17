//! Forwarding of bytes between two sockets.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::Ordering;

use super::frontend::{self, Messages};
use super::gate::Gate;
use super::{Shared, Socket};

/// Forwards what the client sends, and counts it first, until the client closes.
pub(super) fn requests(
    shared: &Shared,
    client: &mut Socket,
    server: &mut Socket,
) -> io::Result<()> {
    let packet = frontend::startup_packet(client)?;
    shared.gate.pass(|| server.write_all(&packet))??;

    let mut messages = Messages::default();
    forward(&shared.gate, client, |piece| {
        messages.read(piece, |kind| match kind {
            b'Q' | b'S' | b'F' => _ = shared.round_trips.fetch_add(1, Ordering::SeqCst),
            b'P' => _ = shared.parses.fetch_add(1, Ordering::SeqCst),
            _ => {}
        });
        server.write_all(piece)
    })
}

/// Forwards what the server sends until it closes, and closes the client's connection then.
pub(super) fn replies(gate: &Gate, mut server: Socket, mut client: Socket) {
    let _ = forward(gate, &mut server, |piece| client.write_all(piece));
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

/// Passes every piece that is read through the gate, and at last the end of the connection, be it an orderly one or not.
fn forward(
    gate: &Gate,
    from: &mut Socket,
    mut to: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let length = match from.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => result.unwrap_or(0),
        };
        gate.pass(|| to(&buffer[..length]))??;
        if length == 0 {
            return Ok(());
        }
    }
}
