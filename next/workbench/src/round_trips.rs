//! A proxy that counts round trips.

mod forward;
mod frontend;
mod gate;

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
/// configure it is. A message is counted before the server gets it, so it is counted once its reply has arrived.
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
/// It listens on a TCP port of the loopback interface, so that TCP's own timeouts apply to its clients, and speaks no
/// TLS. Where the server cannot be reached, as during a restart, it closes the client's connection. When it drops, it
/// closes all connections.
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
    connections: Mutex<Connections>,
}

/// The sockets that are open, in order to shut them down.
#[derive(Debug, Default)]
struct Connections {
    closed: bool,
    next: u64,
    sockets: HashMap<u64, [Socket; 2]>,
}

impl RoundTrips {
    /// Starts a proxy in front of a database or a pooler. It connects to the server whenever a client connects to it, and
    /// has no connection of its own.
    #[must_use = "the proxy ends when the value drops"]
    pub fn in_front_of(server: &Endpoint) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .expect("the loopback interface has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let shared = Arc::new(Shared {
            server: server.address(),
            round_trips: AtomicU64::new(0),
            parses: AtomicU64::new(0),
            gate: Gate::default(),
            connections: Mutex::default(),
        });
        let acceptor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.accept(&listener)
        });
        Self {
            shared,
            endpoint: server
                .with_address("127.0.0.1", address.port())
                .with("sslmode", "disable"),
            port: address.port(),
            acceptor: Some(acceptor),
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
        self.shared.sever();
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
        self.shared.connections().closed = true;
        self.shared.sever();
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
            if self.connections().closed {
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
    fn serve(self: Arc<Self>, mut client: Socket) -> io::Result<()> {
        self.gate.pass(|| ())?;
        let (host, port) = &self.server;
        let mut server = if host.starts_with('/') {
            UnixStream::connect(format!("{host}/.s.PGSQL.{port}"))?
        } else {
            socket(TcpStream::connect((host.as_str(), *port))?)?
        };
        let id = self.register([client.try_clone()?, server.try_clone()?])?;
        let replies = thread::spawn({
            let (shared, server, client) =
                (Arc::clone(&self), server.try_clone()?, client.try_clone()?);
            move || forward::replies(&shared.gate, server, client)
        });
        let _ = forward::requests(&self, &mut client, &mut server);
        // The server replies to what it has received, and closes.
        let _ = server.shutdown(Shutdown::Write);
        let _ = replies.join();
        self.connections().sockets.remove(&id);
        Ok(())
    }

    /// Remembers the sockets of a connection, unless the proxy has ended.
    fn register(&self, sockets: [Socket; 2]) -> io::Result<u64> {
        let mut connections = self.connections();
        if connections.closed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let id = connections.next;
        connections.next += 1;
        connections.sockets.insert(id, sockets);
        Ok(id)
    }

    fn sever(&self) {
        for socket in self
            .connections()
            .sockets
            .drain()
            .flat_map(|(_, both)| both)
        {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A TCP connection that sends every piece at once instead of collecting small ones.
fn socket(stream: TcpStream) -> io::Result<Socket> {
    stream.set_nodelay(true)?;
    Ok(OwnedFd::from(stream).into())
}
