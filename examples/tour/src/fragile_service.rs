//! The semaphore: four calls at a time, and a crashed holder's slot comes back.

use std::error::Error;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::Semaphore;
use diesel_interlock::monitor::{ServiceRequest, Slot};
use diesel_interlock::schema::resource_control::service_request;
use workbench::Database;

use crate::instance::{Instance, Process};
use crate::look::eventually;

pub(crate) const WORKER: &str = "worker";
pub(crate) const CRASHES: &str = "worker that crashes";

const TIMEOUT: Duration = Duration::from_secs(2);

static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, TIMEOUT);

/// The work of each worker: first uncoordinated calls, then calls with a slot, until it is stopped.
pub(crate) fn work(worker: &Instance) -> Result<(), Box<dyn Error>> {
    let (pool, slots) = (worker.pool()?, GEOCODER.details(&worker.name));
    call(&worker.extra)?;
    println!("called");
    worker.wait()?;
    let is_over = Arc::new(AtomicBool::new(false));
    let ends = is_over.clone();
    thread::spawn(move || {
        let _ = io::stdin().read_line(&mut String::new());
        ends.store(true, Ordering::SeqCst);
    });
    while !is_over.load(Ordering::SeqCst) {
        let permit = slots.acquire(&pool)?;
        call(&worker.extra)?;
        permit.release()?;
    }
    Ok(())
}

/// Calls the service, which replies after 50 ms.
fn call(service: &str) -> io::Result<()> {
    let mut service = TcpStream::connect(service)?;
    thread::sleep(Duration::from_millis(50));
    service.shutdown(Shutdown::Write)?;
    service.read_to_end(&mut Vec::new()).map(drop)
}

/// Holds a slot until the process is killed.
pub(crate) fn crash(worker: &Instance) -> Result<(), Box<dyn Error>> {
    let permit = GEOCODER.details(&worker.name).acquire(&worker.pool()?)?;
    println!("{}", permit.fencing_token());
    Ok(worker.wait()?)
}

/// A service that counts its calls. Its threads end with the process.
#[derive(Default)]
struct Service {
    at_once: AtomicUsize,
    most: AtomicUsize,
    served: AtomicUsize,
}

impl Service {
    fn start() -> io::Result<(Arc<Self>, SocketAddr)> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let (service, address) = (Arc::<Self>::default(), listener.local_addr()?);
        let counts = service.clone();
        thread::spawn(move || {
            for mut caller in listener.incoming().flatten() {
                let counts = counts.clone();
                thread::spawn(move || {
                    let at_once = counts.at_once.fetch_add(1, Ordering::SeqCst) + 1;
                    counts.most.fetch_max(at_once, Ordering::SeqCst);
                    let _ = caller.read_to_end(&mut Vec::new());
                    counts.at_once.fetch_sub(1, Ordering::SeqCst);
                    counts.served.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        Ok((service, address))
    }

    fn served(&self) -> usize {
        self.served.load(Ordering::SeqCst)
    }
}

pub(crate) fn twelve_workers_share_four_slots(database: &Database) -> Result<(), Box<dyn Error>> {
    println!("\n5. Twelve processes call a service that copes with four calls at a time");
    let (service, address) = Service::start()?;
    let address = address.to_string();
    let names = (1..=12).map(|number| format!("worker-{number}"));
    let mut workers = Process::start(WORKER, names, database, &address)?;

    println!("\n  Each calls it whenever it likes");
    for worker in &mut workers {
        worker.go_on()?;
    }
    for worker in &mut workers {
        assert_eq!(worker.read_line()?, "called");
    }
    let crowd = service.most.swap(0, Ordering::SeqCst);
    assert!(crowd > 4, "{crowd} are too few to show it");
    println!("    ✗ the service counts {crowd} calls at once");

    println!("\n  Each has a slot while it calls: GEOCODER.acquire(&pool)?");
    println!("    · GEOCODER: Semaphore::named(\"geocoder\", 4, Duration::from_secs(2))");
    let before = service.served();
    for worker in &mut workers {
        worker.go_on()?;
    }
    let served = eventually("the workers have called", || {
        let served = service.served() - before;
        Ok((served >= 48).then_some(served))
    })?;
    assert_eq!(service.most.load(Ordering::SeqCst), 4);
    println!("    ✓ the service counts 4 calls at once at most, in {served} calls");

    println!("\n  A thirteenth is killed while it has a slot");
    let conn = &mut database.connect();
    let mut victim = Process::start(CRASHES, ["worker-13".to_owned()], database, "")?.remove(0);
    victim.go_on()?;
    let token: i64 = victim.read_line()?.parse()?;
    let pid = victim.process.id();
    drop(victim); // kill -9
    let lost = service_request::table
        .find(token)
        .select(ServiceRequest::as_select())
        .first(conn)?;
    println!(
        "    · kill -9 {pid}: worker-13 had slot {}, with the fencing token {token}",
        lost.slot
    );
    let before = service.served();
    let next = eventually("the slot is taken again", || {
        let next = ServiceRequest::all()
            .filter(service_request::slot.eq(lost.slot))
            .filter(service_request::id.gt(lost.id))
            .order(service_request::id);
        Ok(next.first::<ServiceRequest>(conn).optional()?)
    })?;
    let meanwhile = service.served() - before;
    let after = (next.created_at - lost.created_at).to_std()?;
    assert!(after >= TIMEOUT, "the slot was given away early");
    assert!(meanwhile > 0, "the other slots were in use");
    println!("    · meanwhile the service serves {meanwhile} calls, with the other three slots");
    println!(
        "    ✓ slot {} is back {:.2} s after it was taken: {} has it, with token {}",
        next.slot,
        after.as_secs_f64(),
        next.details,
        next.id
    );

    for worker in &mut workers {
        worker.go_on()?;
    }
    for worker in workers {
        worker.end()?;
    }
    assert_eq!(service.most.load(Ordering::SeqCst), 4);
    assert_eq!(Slot::all().load(conn)?, []);
    println!("    ✓ never more than 4 calls at once; all workers end, and 4 slots are free");
    Ok(())
}
