//! Forwarding of bytes between two sockets.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use super::Shared;
use super::frontend::{self, Messages};
use super::gate::Gate;
use crate::database::Address;

/// One end of a connection.
#[derive(Debug)]
pub(super) enum Socket {
    /// Over TCP.
    Tcp(TcpStream),
    /// Over a Unix socket.
    Unix(UnixStream),
}

impl Socket {
    pub(super) fn connect(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(host, port) => TcpStream::connect((host.as_str(), *port)).map(Self::Tcp),
            Address::Unix(path) => UnixStream::connect(path).map(Self::Unix),
        }
    }

    pub(super) fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Tcp(socket) => socket.try_clone().map(Self::Tcp),
            Self::Unix(socket) => socket.try_clone().map(Self::Unix),
        }
    }

    /// Ends one direction or both. A socket whose other end is gone has ended already.
    pub(super) fn shut_down(&self, how: Shutdown) {
        let _ = match self {
            Self::Tcp(socket) => socket.shutdown(how),
            Self::Unix(socket) => socket.shutdown(how),
        };
    }

    /// Sends every piece at once instead of collecting small ones.
    fn send_at_once(&self) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => socket.set_nodelay(true),
            Self::Unix(_) => Ok(()),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.read(buffer),
            Self::Unix(socket) => socket.read(buffer),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.write(bytes),
            Self::Unix(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Forwards what the client sends, and counts it first, until the client closes.
pub(super) fn requests(
    shared: &Shared,
    client: &mut Socket,
    server: &mut Socket,
) -> io::Result<()> {
    server.send_at_once()?;
    let packet = frontend::startup_packet(client)?;
    shared.gate.pass(|| server.write_all(&packet))??;

    let mut messages = Messages::default();
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let length = read(client, &mut buffer);
        shared.gate.pass(|| {
            messages.read(&buffer[..length], |kind| match kind {
                b'Q' | b'S' | b'F' => _ = shared.round_trips.fetch_add(1, Ordering::SeqCst),
                b'P' => _ = shared.parses.fetch_add(1, Ordering::SeqCst),
                _ => {}
            });
            server.write_all(&buffer[..length])
        })??;
        if length == 0 {
            return Ok(());
        }
    }
}

/// Forwards what the server sends until it closes, and closes the client's connection then.
pub(super) fn replies(gate: &Gate, mut server: Socket, mut client: Socket) {
    let mut forward = || -> io::Result<()> {
        client.send_at_once()?;
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let length = read(&mut server, &mut buffer);
            gate.pass(|| client.write_all(&buffer[..length]))??;
            if length == 0 {
                return Ok(());
            }
        }
    };
    let _ = forward();
    client.shut_down(Shutdown::Both);
    server.shut_down(Shutdown::Both);
}

/// Reads some bytes, or none at the end of the connection, be it an orderly one or not: both have
/// to pass the gate.
fn read(socket: &mut Socket, buffer: &mut [u8]) -> usize {
    loop {
        match socket.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.unwrap_or(0),
        }
    }
}
