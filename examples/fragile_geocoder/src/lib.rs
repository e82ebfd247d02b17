//! A service as in "Implementing a semaphore with Django and Postgres": it does not handle concurrency
//! well, and cannot be fixed. With more than four calls in flight it replies with 500, and
//! counts a violation.
//!
//! It speaks as much HTTP/1.1 as its callers need, one call per connection:
//!
//! ```text
//! GET /geocode?q=…    200 {"lat": 52.5, "lon": 13.4}, or 500; a question that begins with "slow" takes longer
//! GET /stats          200 {"calls": 200, "in_flight": 0, "most": 4, "violations": 0}
//! ```

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How many calls it can handle at a time.
pub const CAPACITY: u32 = 4;

/// How much longer a slow call takes than another.
pub const SLOWNESS: u32 = 12;

/// A running service. It runs until the process ends.
#[derive(Debug, Clone)]
pub struct FragileGeocoder {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    takes: Duration,
    stats: Stats,
}

/// What the service has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// How many calls there were.
    pub calls: u32,
    /// How many there are now.
    pub in_flight: u32,
    /// How many there were at a time, at most.
    pub most: u32,
    /// How many found the service full, and got a 500.
    pub violations: u32,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            r#"{{"calls": {}, "in_flight": {}, "most": {}, "violations": {}}}"#,
            self.calls, self.in_flight, self.most, self.violations
        )
    }
}

impl FragileGeocoder {
    /// Starts the service, which takes that long for each call.
    ///
    /// # Errors
    ///
    /// If it cannot listen there.
    pub fn start(listen: impl ToSocketAddrs, takes: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind(listen)?;
        let state = State {
            takes,
            stats: Stats::default(),
        };
        let geocoder = Self {
            address: listener.local_addr()?,
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                changed: Condvar::new(),
            }),
        };
        let shared = Arc::clone(&geocoder.shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.reply(&stream));
            }
        });
        Ok(geocoder)
    }

    /// Where it listens, as a URL without a path.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What it has seen so far.
    pub fn stats(&self) -> Stats {
        self.shared.state().stats
    }

    /// How long a call takes from now on, those in flight included.
    pub fn takes(&self, duration: Duration) {
        self.shared.state().takes = duration;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A caller that hangs up is not noticed, which is how such services are.
    fn reply(&self, stream: &TcpStream) {
        let Some(target) = request_target(stream) else {
            return;
        };
        let (status, body) = match target.split('?').next() {
            Some("/geocode") => self.geocode(&target),
            Some("/stats") => ("200 OK", self.state().stats.to_string()),
            _ => ("404 Not Found", "{}".to_owned()),
        };
        let mut stream = stream;
        let _ = write!(
            stream,
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
             connection: close\r\n\r\n{body}",
            body.len()
        );
    }

    fn geocode(&self, target: &str) -> (&'static str, String) {
        let began = Instant::now();
        let mut state = self.state();
        state.stats.calls += 1;
        state.stats.in_flight += 1;
        state.stats.most = state.stats.most.max(state.stats.in_flight);
        let broken = state.stats.in_flight > CAPACITY;
        if broken {
            state.stats.violations += 1;
        }
        let slowness = if target.contains("q=slow") {
            SLOWNESS
        } else {
            1
        };
        while let Some(rest) = (state.takes * slowness).checked_sub(began.elapsed()) {
            if rest.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        // Before the caller has its reply, which lets the next one in.
        state.stats.in_flight -= 1;
        if broken {
            return ("500 Internal Server Error", "{}".to_owned());
        }
        ("200 OK", place(target))
    }
}

/// Reads the head of a request, and returns its target.
fn request_target(stream: &TcpStream) -> Option<String> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let target = lines.next()?.split(' ').nth(1)?.to_owned();
    lines.find(String::is_empty)?;
    Some(target)
}

/// Somewhere on earth, the same for the same question.
fn place(target: &str) -> String {
    let mut hasher = DefaultHasher::new();
    target.hash(&mut hasher);
    let hash = hasher.finish();
    let lat = (hash % 180_000) as f64 / 1000.0 - 90.0;
    let lon = (hash / 180_000 % 360_000) as f64 / 1000.0 - 180.0;
    format!(r#"{{"lat": {lat:.3}, "lon": {lon:.3}}}"#)
}
