//! A longer network: a proxy that hands everything on a little later.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Listens on a port of the loopback interface, in front of a Unix socket, until the program ends, and returns the port.
/// A round trip takes that much longer.
pub(crate) fn in_front_of(socket: PathBuf, round_trip: Duration) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .expect("the loopback interface has a free port");
    let port = listener
        .local_addr()
        .expect("a listener has an address")
        .port();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            // The ends of connections are no news.
            let _ = forward(client, &socket, round_trip / 2);
        }
    });
    port
}

fn forward(client: TcpStream, socket: &PathBuf, delay: Duration) -> io::Result<()> {
    client.set_nodelay(true)?;
    let server = UnixStream::connect(socket)?;
    one_way(client.try_clone()?, server.try_clone()?, delay);
    one_way(server, client, delay);
    Ok(())
}

/// What is read is written after the delay, however much is on its way. The end is handed on as well.
fn one_way(
    mut from: impl Read + Send + 'static,
    mut to: impl Write + HangUp + Send + 'static,
    delay: Duration,
) {
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut buffer = [0; 16 * 1024];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if sender
                .send((Instant::now() + delay, buffer[..length].to_vec()))
                .is_err()
            {
                break;
            }
        }
    });
    thread::spawn(move || {
        for (due, bytes) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        to.hang_up();
    });
}

trait HangUp {
    fn hang_up(&self);
}

impl HangUp for TcpStream {
    fn hang_up(&self) {
        let _ = self.shutdown(std::net::Shutdown::Both);
    }
}

impl HangUp for UnixStream {
    fn hang_up(&self) {
        let _ = self.shutdown(std::net::Shutdown::Both);
    }
}
