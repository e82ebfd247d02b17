//! A service that counts who is in a call with it: a line from the caller with its name, and after a
//! while a line back.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How long a call takes.
const CALL: Duration = Duration::from_millis(50);

/// A service on an address of its own. Its threads end with the process.
pub(crate) struct Service {
    address: SocketAddr,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Default)]
struct Counts {
    in_flight: u32,
    most: u32,
    served: usize,
    next_hangs: bool,
    hanging: Option<String>,
    closed: bool,
}

impl Service {
    pub(crate) fn start() -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let service = Self {
            address: listener.local_addr()?,
            counts: Arc::default(),
        };
        let counts = Arc::clone(&service.counts);
        thread::spawn(move || {
            for caller in listener.incoming().flatten() {
                let counts = Arc::clone(&counts);
                // A caller that was killed is no concern of the service.
                thread::spawn(move || serve(caller, &counts).ok());
            }
        });
        Ok(service)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many calls were in flight at most since it was asked last.
    pub(crate) fn most_in_flight(&self) -> u32 {
        let mut counts = lock(&self.counts);
        let in_flight = counts.in_flight;
        std::mem::replace(&mut counts.most, in_flight)
    }

    pub(crate) fn served(&self) -> usize {
        lock(&self.counts).served
    }

    /// Lets the next call hang until its caller gives up.
    pub(crate) fn let_one_hang(&self) {
        lock(&self.counts).next_hangs = true;
    }

    /// Whose call hangs.
    pub(crate) fn who_hangs(&self) -> Option<String> {
        lock(&self.counts).hanging.clone()
    }

    /// Tells every caller from now on that there is nothing more to do.
    pub(crate) fn close(&self) {
        lock(&self.counts).closed = true;
    }
}

fn serve(caller: TcpStream, counts: &Mutex<Counts>) -> io::Result<()> {
    let mut caller = BufReader::new(caller);
    let mut name = String::new();
    caller.read_line(&mut name)?;
    let hangs = {
        let mut counts = lock(counts);
        counts.in_flight += 1;
        counts.most = counts.most.max(counts.in_flight);
        let hangs = std::mem::take(&mut counts.next_hangs);
        if hangs {
            counts.hanging = Some(name.trim_end().to_owned());
        }
        hangs
    };
    if hangs {
        let _ = caller.read(&mut [0]); // until the connection ends with its process
    } else {
        thread::sleep(CALL);
    }
    let reply = {
        let mut counts = lock(counts);
        counts.in_flight -= 1;
        counts.served += usize::from(!hangs);
        if counts.closed { "no more\n" } else { "more\n" }
    };
    caller.get_mut().write_all(reply.as_bytes())
}

/// Calls the service, and returns whether it wants to be called again.
pub(crate) fn call(address: &str, name: &str) -> io::Result<bool> {
    let mut service = BufReader::new(TcpStream::connect(address)?);
    service
        .get_mut()
        .write_all(format!("{name}\n").as_bytes())?;
    let mut reply = String::new();
    service.read_line(&mut reply)?;
    match reply.as_str() {
        "more\n" => Ok(true),
        "no more\n" => Ok(false),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}
