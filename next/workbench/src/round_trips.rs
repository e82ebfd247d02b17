//! A proxy that counts round trips.

mod gate;

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use self::gate::Gate;
use crate::endpoint::Endpoint;

/// A socket of any family: the standard library's type for Unix sockets does to it just what a TCP socket needs, too.
type Socket = UnixStream;

/// A proxy in front of a database, which counts what clients ask on the wire and can cut the network. Connections and
/// pools through it are those of its [`Endpoint`].
///
/// A round trip is a message after which a client waits for the server to be ready again: `Query` of the simple
/// protocol, `Sync` of the extended protocol, `FunctionCall`. Opening a connection is none, but what Diesel sends to
/// configure it is; the last of that, diesel-async may send a moment later. A message is counted before the server gets
/// it, so it is counted once its reply has arrived.
///
/// ```
/// use diesel::connection::SimpleConnection;
/// use workbench::{Database, RoundTrips};
///
/// let database = Database::new();
/// let proxy = RoundTrips::in_front_of(&database);
/// let mut conn = proxy.connect();
/// assert_eq!(proxy.count(|| conn.batch_execute("SELECT 1; SELECT 2").unwrap()), 1);
/// ```
///
/// It listens on a TCP port of the loopback interface, so that TCP's own timeouts apply to its clients, and knows no
/// encryption. Where the server cannot be reached, as during a restart, it closes the client's connection. When it
/// drops, it closes all connections.
#[derive(Debug)]
pub struct RoundTrips {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    port: u16,
    acceptor: Option<JoinHandle<()>>,
}

/// What the threads of a proxy share.
#[derive(Debug)]
struct Shared {
    server: (String, u16),
    round_trips: AtomicU64,
    parses: AtomicU64,
    gate: Gate,
    /// The connections that may be open; `None` when the proxy has ended.
    links: Mutex<Option<Vec<Weak<Link>>>>,
}

/// A client's connection and the one to the server that is made for it.
#[derive(Debug)]
struct Link {
    client: Socket,
    server: Socket,
}

impl RoundTrips {
    /// Starts a proxy in front of a database or a pooler. It connects to the server whenever a client connects to it, and
    /// has no connection of its own.
    #[must_use = "the proxy ends when the value drops"]
    pub fn in_front_of(server: &Endpoint) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .expect("the loopback interface has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let endpoint = server.with_address("127.0.0.1", address.port());
        let shared = Arc::new(Shared {
            server: server.address(),
            round_trips: AtomicU64::new(0),
            parses: AtomicU64::new(0),
            gate: Gate::default(),
            links: Mutex::new(Some(Vec::new())),
        });
        let acceptor = Arc::clone(&shared);
        Self {
            shared,
            endpoint: endpoint.with("sslmode", "disable"),
            port: address.port(),
            acceptor: Some(thread::spawn(move || acceptor.accept(&listener))),
        }
    }

    /// How many round trips all connections through the proxy have made so far.
    pub fn round_trips(&self) -> u64 {
        self.shared.round_trips.load(Ordering::SeqCst)
    }

    /// How many statements were sent to be prepared so far, including those without a name, which a client prepares for
    /// one execution. A cached prepared statement adds none.
    pub fn parses(&self) -> u64 {
        self.shared.parses.load(Ordering::SeqCst)
    }

    /// How many round trips were made while `work` ran, by whichever connection.
    pub fn count(&self, work: impl FnOnce()) -> u64 {
        let before = self.round_trips();
        work();
        self.round_trips() - before
    }

    /// Cuts the network: from now on nothing passes in either direction, neither bytes nor the end of a connection, while
    /// all sockets stay open. A new connection hangs, too.
    pub fn cut(&self) {
        self.shared.gate.shut();
    }

    /// Ends a [`cut`](Self::cut). What was sent meanwhile arrives now, as over a network that lost no connection.
    pub fn restore(&self) {
        self.shared.gate.open();
    }

    /// Closes all connections, as a server does that crashes. New ones may be made.
    pub fn sever(&self) {
        if let Some(links) = self.shared.links().as_mut() {
            close(links.drain(..));
        }
    }
}

impl Deref for RoundTrips {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

impl Drop for RoundTrips {
    fn drop(&mut self) {
        let links = self.shared.links().take();
        close(links.into_iter().flatten());
        self.shared.gate.remove();
        // The acceptor looks whether it should go on after each connection.
        let woken = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok();
        if let Some(acceptor) = self.acceptor.take().filter(|_| woken) {
            let _ = acceptor.join();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming() {
            if self.links().is_none() {
                break;
            }
            match client.and_then(socket) {
                Ok(client) => {
                    let shared = Arc::clone(self);
                    // An error is the end of a connection: both sides see the end of theirs.
                    thread::spawn(move || shared.serve(client));
                }
                // Such as too many open files, which pass.
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Connects to the server and forwards both ways until the connection ends.
    fn serve(self: Arc<Self>, client: Socket) -> io::Result<()> {
        self.gate.pass(|| ())?;
        let (host, port) = &self.server;
        let server = if host.starts_with('/') {
            UnixStream::connect(format!("{host}/.s.PGSQL.{port}"))?
        } else {
            socket(TcpStream::connect((host.as_str(), *port))?)?
        };
        let link = Arc::new(Link { client, server });
        match self.links().as_mut() {
            Some(links) => {
                links.retain(|link| link.strong_count() > 0);
                links.push(Arc::downgrade(&link));
            }
            None => return Ok(()),
        }

        let replies = (Arc::clone(&self), Arc::clone(&link));
        thread::spawn(move || {
            let (shared, link) = replies;
            let _ = shared.forward(&link.server, &link.client, |_| ());
            let _ = link.client.shutdown(Shutdown::Both);
            let _ = link.server.shutdown(Shutdown::Both);
        });
        let mut messages = Messages::default();
        let _ = self.forward(&link.client, &link.server, |piece| {
            messages.read(piece, |kind| match kind {
                b'Q' | b'S' | b'F' => _ = self.round_trips.fetch_add(1, Ordering::SeqCst),
                b'P' => _ = self.parses.fetch_add(1, Ordering::SeqCst),
                _ => {}
            });
        });
        // The server replies to what it has received, and closes.
        link.server.shutdown(Shutdown::Write)
    }

    /// Passes every piece through the gate, and at last the end of the connection, be it an orderly one or not.
    fn forward(
        &self,
        mut from: &Socket,
        mut to: &Socket,
        mut look: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let length = match from.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result.unwrap_or(0),
            };
            self.gate.pass(|| {
                look(&buffer[..length]);
                to.write_all(&buffer[..length])
            })??;
            if length == 0 {
                return Ok(());
            }
        }
    }

    fn links(&self) -> MutexGuard<'_, Option<Vec<Weak<Link>>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn close(links: impl Iterator<Item = Weak<Link>>) {
    for link in links.filter_map(|link| link.upgrade()) {
        let _ = link.client.shutdown(Shutdown::Both);
        let _ = link.server.shutdown(Shutdown::Both);
    }
}

/// A TCP connection that sends every piece at once instead of collecting small ones.
fn socket(stream: TcpStream) -> io::Result<Socket> {
    stream.set_nodelay(true)?;
    Ok(OwnedFd::from(stream).into())
}

/// Finds the messages in what a client sends, in pieces of any length.
#[derive(Debug)]
struct Messages {
    /// The part of a message's head that has been seen: its type and its length.
    head: Vec<u8>,
    /// How much of the message's body is still to come.
    body: usize,
}

impl Default for Messages {
    fn default() -> Self {
        // The packet that opens a connection has no type.
        Self {
            head: vec![0],
            body: 0,
        }
    }
}

impl Messages {
    /// Calls `on_message` with the type of each message whose head ends in this piece.
    fn read(&mut self, mut piece: &[u8], mut on_message: impl FnMut(u8)) {
        loop {
            let skipped = self.body.min(piece.len());
            self.body -= skipped;
            piece = &piece[skipped..];

            let taken = (5 - self.head.len()).min(piece.len());
            self.head.extend_from_slice(&piece[..taken]);
            piece = &piece[taken..];
            let &[kind, a, b, c, d] = self.head.as_slice() else {
                return;
            };
            on_message(kind);
            // The length counts itself.
            self.body = (u32::from_be_bytes([a, b, c, d]) as usize).saturating_sub(4);
            self.head.clear();
        }
    }
}
