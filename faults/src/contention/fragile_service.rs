//! The fragile service that the semaphores protect. It counts its callers and reports every call too many.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// How long a caller may take to send its call.
const ASKING: Duration = Duration::from_secs(10);

/// A server on this machine. A call is one line of JSON, a [`Call`]. The server replies when the work is done. Until then
/// the call is in flight, unless its connection is closed before, as that of a killed caller is, or its deadline passes.
///
/// The deadline of a call is a moment at which its caller still has its slot for certain: the caller adds its timeout to
/// a moment before it sent the claim. The server turns away a call that arrives after its deadline, because its caller
/// had to wait for a processor. Every other call is one of a holder within its timeout.
#[derive(Debug)]
pub(super) struct Fragile {
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

/// A call to the service.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Call {
    /// How many calls the caller allows at a time.
    slots: usize,
    slot: i16,
    token: i64,
    /// In microseconds since 1970.
    deadline: u64,
    /// How long the work takes, in milliseconds.
    work: u64,
    service: String,
}

impl Fragile {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let register = Arc::new(Mutex::new(Register::default()));
        let shared = Arc::clone(&register);
        thread::spawn(move || {
            for caller in listener.incoming().flatten() {
                let register = Arc::clone(&shared);
                // A caller may be killed at any point, so failed reads and writes are ignored.
                thread::spawn(move || serve(&register, caller));
            }
        });
        Self { address, register }
    }

    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    fn register(&self) -> MutexGuard<'_, Register> {
        self.register.lock().unwrap()
    }

    pub(super) fn in_flight(&self, service: &str) -> usize {
        let register = self.register();
        let calls = register.in_flight.iter();
        calls.filter(|call| call.service == service).count()
    }

    /// The most calls that were in flight to one service at a time.
    pub(super) fn most_in_flight(&self) -> usize {
        self.register().most.values().copied().max().unwrap_or(0)
    }

    /// Resets [`most_in_flight`](Self::most_in_flight).
    pub(super) fn reset_most_in_flight(&self) {
        self.register().most.clear();
    }

    pub(super) fn turned_away(&self) -> usize {
        self.register().turned_away
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.register().violations.clone()
    }
}

fn serve(register: &Mutex<Register>, caller: TcpStream) -> Option<()> {
    caller.set_read_timeout(Some(ASKING)).ok()?;
    let mut caller = BufReader::new(caller);
    let mut line = String::new();
    caller.read_line(&mut line).ok()?;
    let call: Call = serde_json::from_str(&line).ok()?;

    let limit = register.lock().unwrap().enter(&call);
    if let Some(limit) = limit {
        caller.get_ref().set_read_timeout(Some(limit)).ok()?;
        // The caller sends no more, so the read ends when the time is over or the connection is closed.
        let _ = caller.read(&mut [0]);
        register.lock().unwrap().leave(&call);
    }
    caller.get_mut().write_all(b"done\n").ok()
}

impl Register {
    /// Returns how long the call will take, or `None` if it comes too late.
    fn enter(&mut self, call: &Call) -> Option<Duration> {
        let now = SystemTime::now();
        let left = call.deadline().duration_since(now).unwrap_or_default();
        if left.is_zero() {
            self.turned_away += 1;
            return None;
        }
        // A call whose deadline has passed no longer counts, even if its thread has not noticed yet.
        self.in_flight.retain(|other| other.deadline() > now);
        self.in_flight.push(call.clone());

        let others = self.in_flight.iter();
        let of_service: Vec<&Call> = others.filter(|it| it.service == call.service).collect();
        let most = self.most.entry(call.service.clone()).or_default();
        *most = of_service.len().max(*most);
        if of_service.len() > call.slots {
            self.violations.push(format!(
                "{} calls are in flight when one arrives whose client allows {}: {of_service:?}",
                of_service.len(),
                call.slots
            ));
        }

        let slot = (call.service.clone(), call.slot);
        let newest = self.newest.entry(slot).or_insert(call.token);
        if call.token < *newest {
            self.violations.push(format!(
                "token {} arrives after {newest}, which has the same slot: {call:?}",
                call.token
            ));
        }
        *newest = call.token.max(*newest);
        Some(left.min(Duration::from_millis(call.work)))
    }

    fn leave(&mut self, call: &Call) {
        let mut calls = self.in_flight.iter();
        // The call is absent if its deadline has passed. A token has one call at a time.
        if let Some(place) = calls.position(|other| other.token == call.token) {
            self.in_flight.swap_remove(place);
        }
    }
}

impl Call {
    fn deadline(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_micros(self.deadline)
    }
}

/// Calls the service, and waits until it has done its work.
pub(super) fn call(
    address: &str,
    service: &str,
    slots: u32,
    (slot, token): (i16, i64),
    deadline: SystemTime,
    work: Duration,
) {
    let since_1970 = deadline.duration_since(UNIX_EPOCH).unwrap_or_default();
    let call = Call {
        slots: slots as usize,
        slot,
        token,
        deadline: since_1970.as_micros() as u64,
        work: work.as_millis() as u64,
        service: service.to_owned(),
    };
    let line = serde_json::to_string(&call).expect("a call is JSON") + "\n";
    let mut stream = TcpStream::connect(address).expect("the service runs");
    stream
        .write_all(line.as_bytes())
        .expect("the service reads");
    let mut reply = String::new();
    BufReader::new(stream)
        .read_line(&mut reply)
        .expect("the service replies");
}
