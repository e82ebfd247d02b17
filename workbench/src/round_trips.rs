//! A proxy that counts round trips.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::thread;

use crate::endpoint::Endpoint;
use crate::watcher::POLL;

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
#[must_use = "the proxy ends when the value drops"]
pub struct RoundTrips {
    shared: Arc<Shared>,
    endpoint: Endpoint,
}

/// What the threads of a proxy share.
#[derive(Debug)]
struct Shared {
    server: (String, u16),
    round_trips: AtomicU64,
    parses: AtomicU64,
    network: RwLock<Network>,
    /// The connections that may be open.
    links: Mutex<Vec<Weak<Link>>>,
}

/// Forwarding holds a read lock of it.
#[derive(Debug)]
enum Network {
    Works,
    IsCut,
    /// The proxy has ended.
    IsGone,
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
    pub fn in_front_of(server: &Endpoint) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .expect("the loopback interface has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let endpoint = server.clone().with("sslmode", "disable");
        let endpoint = endpoint.with_address("127.0.0.1", address.port());
        let shared = Arc::new(Shared {
            server: server.address(),
            round_trips: AtomicU64::new(0),
            parses: AtomicU64::new(0),
            network: RwLock::new(Network::Works),
            links: Mutex::default(),
        });
        let acceptor = Arc::clone(&shared);
        thread::spawn(move || acceptor.accept(&listener));
        Self { shared, endpoint }
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
        self.shared.set(Network::IsCut);
    }

    /// Ends a [`cut`](Self::cut). What was sent meanwhile arrives now, as over a network that lost no connection.
    pub fn restore(&self) {
        self.shared.set(Network::Works);
    }

    /// Closes all connections, as a server does that crashes. New ones may be made.
    pub fn sever(&self) {
        for link in self.shared.links().drain(..) {
            if let Some(link) = link.upgrade() {
                link.close();
            }
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
        // Twice, because what is being written keeps the network as it is, and clients may connect until it is gone.
        self.sever();
        self.shared.set(Network::IsGone);
        self.sever();
        // The acceptor looks whether it should go on after each connection.
        let _ = TcpStream::connect(self.endpoint.address());
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming() {
            if matches!(*self.network(), Network::IsGone) {
                break;
            }
            match client.and_then(socket) {
                Ok(client) => {
                    let shared = Arc::clone(self);
                    // An error is the end of a connection: both sides see the end of theirs.
                    thread::spawn(move || shared.serve(client));
                }
                // Such as too many open files, which pass.
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// Connects to the server and forwards both ways until the connection ends.
    fn serve(self: Arc<Self>, client: Socket) -> io::Result<()> {
        let link = self.pass(|| self.link(client))?;
        let replies = (Arc::clone(&self), Arc::clone(&link));
        thread::spawn(move || {
            let (shared, link) = replies;
            let _ = shared.forward(&link.server, &link.client, |_| ());
            link.close();
        });
        // The packet that opens a connection has no type.
        let (head, body) = (vec![0], 0);
        let mut messages = Messages { head, body };
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

    fn link(&self, client: Socket) -> io::Result<Arc<Link>> {
        let (host, port) = &self.server;
        let server = if host.starts_with('/') {
            UnixStream::connect(format!("{host}/.s.PGSQL.{port}"))?
        } else {
            socket(TcpStream::connect((host.as_str(), *port))?)?
        };
        let link = Arc::new(Link { client, server });
        let mut links = self.links();
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(&link));
        Ok(link)
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
            self.pass(|| {
                look(&buffer[..length]);
                to.write_all(&buffer[..length])
            })?;
            if length == 0 {
                return Ok(());
            }
        }
    }

    /// Does `work` as soon as the network works.
    fn pass<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        loop {
            let network = self.network();
            match *network {
                Network::Works => return work(),
                Network::IsCut => {}
                Network::IsGone => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
            drop(network);
            thread::sleep(POLL);
        }
    }

    fn network(&self) -> RwLockReadGuard<'_, Network> {
        self.network.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, network: Network) {
        let now = self.network.write();
        *now.unwrap_or_else(PoisonError::into_inner) = network;
    }

    fn links(&self) -> MutexGuard<'_, Vec<Weak<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    fn close(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

/// A TCP connection that sends every piece at once instead of collecting small ones.
fn socket(stream: TcpStream) -> io::Result<Socket> {
    stream.set_nodelay(true)?;
    Ok(OwnedFd::from(stream).into())
}

/// Finds the messages in what a client sends, in pieces of any length.
struct Messages {
    /// The part of a message's head that has been seen: its type and its length.
    head: Vec<u8>,
    /// How much of the message's body is still to come.
    body: usize,
}

impl Messages {
    /// Calls `on_message` with the type of each message whose head ends in this piece.
    fn read(&mut self, piece: &[u8], mut on_message: impl FnMut(u8)) {
        for &byte in piece {
            if self.body > 0 {
                self.body -= 1;
                continue;
            }
            self.head.push(byte);
            if let &[kind, a, b, c, d] = self.head.as_slice() {
                on_message(kind);
                // The length counts itself.
                self.body = (u32::from_be_bytes([a, b, c, d]) as usize).saturating_sub(4);
                self.head.clear();
            }
        }
    }
}
