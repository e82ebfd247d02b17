//! The fragile service: what the semaphores protect. It counts its callers, and is the judge.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a caller may take to say what it wants.
const ASKING: Duration = Duration::from_secs(10);

/// A server on this machine. A call is one line: `SLOTS SLOT TOKEN DEADLINE WORK SERVICE`, where
/// the deadline is in microseconds since 1970 and the work in milliseconds. The answer comes when the
/// work is done; until then the call is in flight, or until its connection is closed, as a killed
/// caller's is, or its deadline comes.
///
/// A caller names as its deadline a moment at which it surely still has its slot: its time-out after a
/// moment before it asked for the claim. So a call that comes later, because its caller was kept
/// waiting for a processor, is turned away, and any other is one of a holder within its time-out.
#[derive(Debug)]
pub(crate) struct Fragile {
    address: SocketAddr,
    register: Arc<Mutex<Register>>,
}

#[derive(Debug, Default)]
struct Register {
    in_flight: Vec<Call>,
    most: HashMap<String, usize>,
    /// The greatest token of each slot.
    newest: HashMap<(String, i16), i64>,
    turned_away: usize,
    violations: Vec<String>,
}

#[derive(Debug, Clone)]
struct Call {
    slots: usize,
    slot: i16,
    token: i64,
    deadline: SystemTime,
    work: Duration,
    service: String,
}

impl Fragile {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let register = Arc::new(Mutex::new(Register::default()));
        let shared = Arc::clone(&register);
        thread::spawn(move || {
            for caller in listener.incoming().flatten() {
                let register = Arc::clone(&shared);
                // A caller may be killed at any point: what cannot be read or written is no matter.
                thread::spawn(move || serve(&register, caller));
            }
        });
        Self { address, register }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    fn register(&self) -> MutexGuard<'_, Register> {
        self.register.lock().unwrap()
    }

    pub(crate) fn in_flight(&self, service: &str) -> usize {
        let register = self.register();
        let calls = register.in_flight.iter();
        calls.filter(|call| call.service == service).count()
    }

    /// The most calls that were in flight to one service at a time.
    pub(crate) fn most_in_flight(&self) -> usize {
        self.register().most.values().copied().max().unwrap_or(0)
    }

    /// Forgets what [`most_in_flight`](Self::most_in_flight) was.
    pub(crate) fn count_anew(&self) {
        self.register().most.clear();
    }

    pub(crate) fn turned_away(&self) -> usize {
        self.register().turned_away
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.register().violations.clone()
    }
}

fn serve(register: &Mutex<Register>, caller: TcpStream) -> Option<()> {
    caller.set_read_timeout(Some(ASKING)).ok()?;
    let mut caller = BufReader::new(caller);
    let mut line = String::new();
    caller.read_line(&mut line).ok()?;
    let call = Call::parse(&line)?;

    let limit = register.lock().unwrap().enter(&call);
    if let Some(limit) = limit {
        caller.get_ref().set_read_timeout(Some(limit)).ok()?;
        // Nothing comes: this ends when the time is over or the connection is closed.
        let _ = caller.read(&mut [0]);
        register.lock().unwrap().leave(&call);
    }
    caller.get_mut().write_all(b"done\n").ok()
}

impl Register {
    /// Answers how long the call will take, or nothing if it comes too late.
    fn enter(&mut self, call: &Call) -> Option<Duration> {
        let now = SystemTime::now();
        let left = call.deadline.duration_since(now).unwrap_or_default();
        if left.is_zero() {
            self.turned_away += 1;
            return None;
        }
        // Whoever's time is over counts no more, though its thread may not have noticed.
        self.in_flight.retain(|other| other.deadline > now);
        self.in_flight.push(call.clone());

        let others = self.in_flight.iter();
        let of_service: Vec<&Call> = others.filter(|it| it.service == call.service).collect();
        let most = self.most.entry(call.service.clone()).or_default();
        *most = of_service.len().max(*most);
        if of_service.len() > call.slots {
            self.violations.push(format!(
                "{} calls in flight as one of a client with {} slots comes: {of_service:?}",
                of_service.len(),
                call.slots
            ));
        }

        let slot = (call.service.clone(), call.slot);
        let newest = self.newest.entry(slot).or_insert(call.token);
        if call.token < *newest {
            self.violations.push(format!(
                "token {} comes after {newest}, which is of the same slot: {call:?}",
                call.token
            ));
        }
        *newest = call.token.max(*newest);
        Some(left.min(call.work))
    }

    fn leave(&mut self, call: &Call) {
        let mut calls = self.in_flight.iter();
        // No longer there if its deadline has passed; a token has one call at a time.
        if let Some(place) = calls.position(|other| other.token == call.token) {
            self.in_flight.swap_remove(place);
        }
    }
}

impl Call {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_suffix('\n')?.splitn(6, ' ');
        Some(Self {
            slots: words.next()?.parse().ok()?,
            slot: words.next()?.parse().ok()?,
            token: words.next()?.parse().ok()?,
            deadline: UNIX_EPOCH + Duration::from_micros(words.next()?.parse().ok()?),
            work: Duration::from_millis(words.next()?.parse().ok()?),
            service: words.next()?.to_owned(),
        })
    }
}

/// Calls the service, and waits until it has done its work.
pub(crate) fn call(
    address: &str,
    service: &str,
    slots: u32,
    (slot, token): (i16, i64),
    deadline: SystemTime,
    work: Duration,
) {
    let deadline = deadline.duration_since(UNIX_EPOCH).unwrap().as_micros();
    let work = work.as_millis();
    let mut stream = TcpStream::connect(address).unwrap();
    let line = format!("{slots} {slot} {token} {deadline} {work} {service}\n");
    stream.write_all(line.as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
}
