//! A proxy that counts round trips.

mod forward;
mod frontend;
mod gate;

use std::collections::HashMap;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use self::forward::Socket;
use self::gate::Gate;
use crate::database::{Address, ConnectionString, Database};

/// A proxy in front of a database, which counts what clients ask on the wire and can swallow the
/// network.
///
/// A round trip is a message after which a client waits for the server to be ready again: `Query`
/// of the simple protocol, `Sync` of the extended protocol, `FunctionCall`. Opening a connection is
/// none, but what Diesel sends to configure it is. A message is counted before the server gets it,
/// so it is counted once its reply has arrived.
///
/// ```
/// use diesel::connection::SimpleConnection;
/// use diesel::prelude::*;
/// use workbench::{Database, RoundTrips};
///
/// let database = Database::new();
/// let proxy = RoundTrips::in_front_of(&database);
/// let mut conn = PgConnection::establish(&proxy.url()).unwrap();
/// assert_eq!(proxy.count(|| conn.batch_execute("SELECT 1; SELECT 2").unwrap()), 1);
/// ```
///
/// It listens on a TCP port of the loopback interface, so that TCP's own timeouts apply to its
/// clients, and speaks no TLS: its [`url`](Self::url) says `sslmode=disable`. When it drops, it
/// closes its connections.
#[derive(Debug)]
pub struct RoundTrips {
    shared: Arc<Shared>,
    url: ConnectionString,
    port: u16,
    acceptor: Option<JoinHandle<()>>,
}

/// What the threads of a proxy share.
#[derive(Debug)]
struct Shared {
    server: Address,
    /// Whether it says so when the server cannot be reached.
    complains: bool,
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
    sockets: HashMap<u64, Vec<Socket>>,
}

impl RoundTrips {
    /// Starts a proxy in front of a database. It needs no connection of its own, and connects to
    /// the server whenever a client connects to it.
    #[must_use = "the proxy ends when the value drops"]
    pub fn in_front_of(database: &Database) -> Self {
        Self::listen(database.connection_string(), true)
    }

    /// Starts a proxy in front of the server of a URL. Where that cannot be reached, as during a restart,
    /// the proxy closes the client's connection without a word.
    #[must_use = "the proxy ends when the value drops"]
    pub fn in_front_of_url(url: &str) -> Self {
        Self::listen(&ConnectionString::new(url), false)
    }

    fn listen(target: &ConnectionString, complains: bool) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .expect("the loopback interface has a free port");
        let port = listener
            .local_addr()
            .expect("a listener has an address")
            .port();
        let shared = Arc::new(Shared {
            server: target.address(),
            complains,
            round_trips: AtomicU64::new(0),
            parses: AtomicU64::new(0),
            gate: Gate::default(),
            connections: Mutex::default(),
        });
        let acceptor = spawn("proxy", {
            let shared = Arc::clone(&shared);
            move || shared.accept(&listener)
        });
        let url = target
            .with_address(&Ipv4Addr::LOCALHOST.to_string(), port)
            .with("sslmode", "disable")
            .with("gssencmode", "disable");
        Self {
            shared,
            url,
            port,
            acceptor: Some(acceptor),
        }
    }

    /// The connection string that leads through the proxy.
    pub fn url(&self) -> String {
        self.url.to_string()
    }

    /// How many round trips all connections through the proxy have made so far.
    pub fn round_trips(&self) -> u64 {
        self.shared.round_trips.load(Ordering::SeqCst)
    }

    /// How many statements were sent to be prepared so far, including those without a name, which a
    /// client prepares for one execution. A cached prepared statement adds none.
    pub fn parses(&self) -> u64 {
        self.shared.parses.load(Ordering::SeqCst)
    }

    /// How many round trips were made while `work` ran, by whichever connection.
    pub fn count(&self, work: impl FnOnce()) -> u64 {
        let before = self.round_trips();
        work();
        self.round_trips() - before
    }

    /// Swallows the network: from now on nothing passes in either direction, neither bytes nor the
    /// end of a connection, while all sockets stay open. A new connection hangs too.
    pub fn cut(&self) {
        self.shared.gate.shut();
    }

    /// Ends a [`cut`](Self::cut). What was sent meanwhile arrives now, as over a network that lost
    /// no connection.
    pub fn restore(&self) {
        self.shared.gate.open();
    }

    /// Closes all connections, as a server does that crashes. New ones may be made.
    pub fn sever(&self) {
        self.shared.sever();
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
            match client {
                Ok(client) => {
                    let shared = Arc::clone(self);
                    spawn("proxy: client", move || shared.serve(Socket::Tcp(client)));
                }
                // Such as too many open files, which pass.
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn serve(self: Arc<Self>, client: Socket) {
        let Some(id) = client
            .try_clone()
            .ok()
            .and_then(|client| self.register(client))
        else {
            return;
        };
        // Errors are the ends of connections: both sides see the end of theirs.
        let _ = self.forward(id, client);
        self.connections().sockets.remove(&id);
    }

    /// Connects to the server and forwards both ways until the connection ends.
    fn forward(self: &Arc<Self>, id: u64, mut client: Socket) -> std::io::Result<()> {
        self.gate.pass(|| ())?;
        let mut server = Socket::connect(&self.server).inspect_err(|error| {
            if self.complains {
                eprintln!(
                    "the proxy cannot reach the server at {:?}: {error}",
                    self.server
                );
            }
            client.shut_down(Shutdown::Both);
        })?;
        self.keep(id, server.try_clone()?);

        let replies = spawn("proxy: server", {
            let (shared, server, client) =
                (Arc::clone(self), server.try_clone()?, client.try_clone()?);
            move || forward::replies(&shared.gate, server, client)
        });
        let _ = forward::requests(self, &mut client, &mut server);
        // The server replies to what it has received, and closes.
        server.shut_down(Shutdown::Write);
        let _ = replies.join();
        Ok(())
    }

    /// Remembers the first socket of a connection, unless the proxy has ended.
    fn register(&self, socket: Socket) -> Option<u64> {
        let mut connections = self.connections();
        if connections.closed {
            return None;
        }
        let id = connections.next;
        connections.next += 1;
        connections.sockets.insert(id, vec![socket]);
        Some(id)
    }

    /// Remembers the second socket of a connection, or shuts it down if the connection was severed
    /// meanwhile.
    fn keep(&self, id: u64, socket: Socket) {
        match self.connections().sockets.get_mut(&id) {
            Some(sockets) => sockets.push(socket),
            None => socket.shut_down(Shutdown::Both),
        }
    }

    fn sever(&self) {
        for socket in self
            .connections()
            .sockets
            .drain()
            .flat_map(|(_, sockets)| sockets)
        {
            socket.shut_down(Shutdown::Both);
        }
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .expect("a thread can be started")
}
