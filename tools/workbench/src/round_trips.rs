//! A proxy that counts round trips.

mod faults;
mod link;
mod messages;
mod transcript;

use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use self::faults::{Armed, Effect, Faults};
pub use self::faults::{Fault, When};
use self::link::{Link, Passed, Replies, Requests, Side};
pub use self::transcript::Exchange;
use crate::endpoint::Endpoint;
use crate::watcher::POLL;

/// How many pieces may be in flight in one direction of a connection before the sender has to wait.
const WINDOW: usize = 1024;

/// A socket of any family: the standard library's type for Unix sockets does to it just what a TCP socket needs, too.
type Socket = UnixStream;

/// A proxy in front of a database, which counts what clients ask on the wire, and is a network that can be slow, cut, or
/// fail at a chosen message. Connections and pools through it are those of its [`Endpoint`].
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
/// It listens on a TCP port of the loopback interface, so that TCP's own timeouts apply to its clients. What a client sends
/// with TLS passes, but is not counted. Where the server cannot be reached, as during a restart, it closes the client's
/// connection. When it drops, it closes all connections.
#[derive(Debug)]
#[must_use = "the proxy ends when the value drops"]
pub struct RoundTrips {
    shared: Arc<Shared>,
    endpoint: Endpoint,
}

/// What the threads of a proxy share.
#[derive(Debug)]
struct Shared {
    server: Mutex<(String, u16)>,
    connections: AtomicU64,
    parses: AtomicU64,
    flights: AtomicU64,
    /// Counts the round trips, too.
    faults: Faults,
    /// A round trip, and the most that chance adds to each half of it.
    delay: Mutex<(Duration, Duration)>,
    network: RwLock<Network>,
    /// The connections that may be open.
    links: Mutex<Vec<Weak<Link>>>,
    /// What all connections have sent and received, if that is kept.
    transcripts: Option<Mutex<Vec<Arc<Link>>>>,
    /// Those that are silent are kept open.
    silent: Mutex<Vec<Arc<Link>>>,
}

/// Forwarding holds a read lock of it.
#[derive(Debug)]
enum Network {
    Works,
    IsCut,
    /// The proxy was dropped.
    IsGone,
}

impl RoundTrips {
    /// Starts a proxy in front of a database or a pooler. It connects to the server whenever a client connects to it, and
    /// has no connection of its own. Its clients do without TLS.
    pub fn in_front_of(server: &Endpoint) -> Self {
        Self::start(server.clone().with("sslmode", "disable"), false)
    }

    /// The same, and keeps everything that passes, for [`exchanges`](Self::exchanges).
    pub fn recording(server: &Endpoint) -> Self {
        Self::start(server.clone().with("sslmode", "disable"), true)
    }

    /// What each connection has asked so far, one after the other, and which columns the server described in reply. Needs a
    /// proxy that is [recording](Self::recording).
    pub fn exchanges(&self) -> Vec<Exchange> {
        let links = self.shared.transcripts.as_ref();
        let links = lock(links.expect("the proxy is recording"));
        links.iter().flat_map(|link| link.exchanges()).collect()
    }

    /// The same with the server's own `sslmode`: where that requires TLS, everything passes as slowly and as long as the
    /// network lets it, but no message is counted, and none has a fault.
    pub fn in_front_of_tls(server: &Endpoint) -> Self {
        Self::start(server.clone(), false)
    }

    fn start(server: Endpoint, is_recording: bool) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .expect("the loopback interface has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let shared = Arc::new(Shared {
            server: Mutex::new(server.address()),
            connections: AtomicU64::new(0),
            parses: AtomicU64::new(0),
            flights: AtomicU64::new(0),
            faults: Faults::default(),
            delay: Mutex::default(),
            network: RwLock::new(Network::Works),
            links: Mutex::default(),
            transcripts: is_recording.then(Mutex::default),
            silent: Mutex::default(),
        });
        let endpoint = server.with_address("127.0.0.1", address.port());
        let acceptor = Arc::clone(&shared);
        thread::spawn(move || acceptor.accept(&listener));
        Self { shared, endpoint }
    }

    /// How many round trips all connections through the proxy have made so far.
    pub fn round_trips(&self) -> u64 {
        self.shared.faults.messages()
    }

    /// How many flights of messages clients have sent so far: messages are of one flight if no reply has passed between them.
    /// Where the network is [slow](Self::set_delay), these are what a client sends without waiting for a reply.
    pub fn flights(&self) -> u64 {
        self.shared.flights.load(Ordering::SeqCst)
    }

    /// How many connections clients have opened so far, including those that only cancel a statement.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
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

    /// Makes the network slow: whatever is sent from now on arrives half of `round_trip` later, and up to `jitter` later than
    /// that, by chance. Nothing overtakes what was sent before it, and all of it may be under way at the same time. Opening
    /// a connection takes a round trip more than what is sent on it, as TCP's does.
    pub fn set_delay(&self, round_trip: Duration, jitter: Duration) {
        *lock(&self.shared.delay) = (round_trip, jitter);
    }

    /// Closes a connection, towards both sides, at the `n`-th round trip from now on, on whichever connection that is: 1 is
    /// the next one. It happens once.
    ///
    /// A reply that is lost is lost when the server is ready again, so the statement has run and is committed. A `COPY FROM
    /// STDIN` is not, because its client never gets the reply that asks for the data.
    pub fn sever_at(&self, n: u64, when: When) -> Fault {
        self.shared.faults.arm(n, when, Effect::IsClosed)
    }

    /// As [`sever_at`](Self::sever_at), but the connection falls silent: nothing passes any more in either direction,
    /// neither bytes nor the end of the connection, while both sockets stay open, until the proxy [severs](Self::sever) all
    /// connections or drops. Other connections work on.
    pub fn silence_at(&self, n: u64, when: When) -> Fault {
        self.shared.faults.arm(n, when, Effect::IsSilent)
    }

    /// Cancels the faults that have not happened.
    pub fn disarm(&self) {
        self.shared.faults.disarm();
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

    /// Routes new connections to the same database of another server, as after a failover. Open connections stay where they
    /// are until they are [severed](Self::sever).
    pub fn switch_to(&self, server: &Endpoint) {
        *lock(&self.shared.server) = server.address();
    }

    /// Closes all connections, as a crashing server would. New ones can be opened.
    pub fn sever(&self) {
        for link in lock(&self.shared.links).drain(..) {
            if let Some(link) = link.upgrade() {
                link.close();
            }
        }
        lock(&self.shared.silent).clear();
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
                    self.connections.fetch_add(1, Ordering::SeqCst);
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
        thread::sleep(self.one_way() + self.one_way());
        let link = self.pass(|| self.link(client))?;
        let replies = (Arc::clone(&self), Arc::clone(&link));
        thread::spawn(move || {
            let (shared, link) = replies;
            let mut replies = Replies::new();
            shared.forward(&link, Side::Server, Side::Client, |piece| {
                replies.pass(piece, &link)
            });
        });
        let mut requests = Requests::new();
        self.forward(&link, Side::Client, Side::Server, |piece| {
            requests.pass(piece, &link, &self)
        });
        Ok(())
    }

    fn link(&self, client: Socket) -> io::Result<Arc<Link>> {
        let (host, port) = lock(&self.server).clone();
        let server = if host.starts_with('/') {
            UnixStream::connect(format!("{host}/.s.PGSQL.{port}"))?
        } else {
            socket(TcpStream::connect((host.as_str(), port))?)?
        };
        let link = Arc::new(Link::new(client, server));
        let mut links = lock(&self.links);
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(&link));
        if let Some(transcripts) = &self.transcripts {
            lock(transcripts).push(Arc::clone(&link));
        }
        Ok(link)
    }

    /// Passes what arrives through the gate, and at last the end of the connection.
    fn forward(
        self: &Arc<Self>,
        link: &Arc<Link>,
        from: Side,
        to: Side,
        mut look: impl FnMut(&[u8]) -> Passed,
    ) {
        for piece in self.arriving(link, from) {
            let passed = self.pass(|| {
                if link.is_silent() {
                    return Ok(());
                }
                if link.begins_flight(from) {
                    self.flights.fetch_add(1, Ordering::SeqCst);
                }
                let (bytes, armed) = look(&piece);
                if self.transcripts.is_some() {
                    link.record(from, &bytes);
                }
                link.socket(to).write_all(&bytes)?;
                armed.map_or(Ok(()), |armed| self.fail(link, &armed))
            });
            if passed.is_err() {
                break;
            }
        }
        link.end(to);
    }

    /// What one side sends, up to the end of the connection. A thread of its own reads it, so that all of it is under way at
    /// the same time.
    fn arriving(self: &Arc<Self>, link: &Arc<Link>, from: Side) -> impl Iterator<Item = Vec<u8>> {
        let (sender, pieces) = sync_channel(WINDOW);
        let (shared, link) = (Arc::clone(self), Arc::clone(link));
        thread::spawn(move || {
            let mut due = Instant::now();
            loop {
                let piece = link.read(from);
                let is_last = piece.is_empty();
                // Nothing overtakes what was sent before it.
                due = due.max(Instant::now() + shared.one_way());
                if sender.send((due, piece)).is_err() || is_last {
                    break;
                }
            }
        });
        pieces.into_iter().map(|(due, piece)| {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            piece
        })
    }

    /// How long it takes what is sent now to arrive.
    fn one_way(&self) -> Duration {
        let (round_trip, jitter) = *lock(&self.delay);
        round_trip / 2 + jitter.mul_f64(fastrand::f64())
    }

    /// Lets a fault happen.
    fn fail(&self, link: &Arc<Link>, armed: &Armed) -> io::Result<()> {
        armed.fault.happens();
        match armed.effect {
            Effect::IsSilent => {
                link.fall_silent();
                lock(&self.silent).push(Arc::clone(link));
                Ok(())
            }
            Effect::IsClosed => {
                link.close();
                Err(io::ErrorKind::ConnectionAborted.into())
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
}

/// A TCP connection that sends every piece at once instead of collecting small ones.
fn socket(stream: TcpStream) -> io::Result<Socket> {
    stream.set_nodelay(true)?;
    Ok(OwnedFd::from(stream).into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
