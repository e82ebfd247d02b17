//! The semaphore: so many requests at a time, and a crashed holder's slot comes back.

mod service;

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::monitor::{ServiceRequest, Slot, is_in_flight};
use diesel_interlock::schema::resource_control::service_request;
use diesel_interlock::{Admission, Semaphore};
use workbench::Database;

use self::service::{Service, call};
use crate::instance::{Instance, Process, READY};
use crate::observer::eventually;
use crate::screen::{bad, good, note, say, title};

pub(crate) const ROLE: &str = "worker";

/// Where a worker finds the address of the service.
const SERVICE: &str = "TOUR_SERVICE";

pub(crate) const SLOTS: u32 = 4;

const TIMEOUT: Duration = Duration::from_secs(2);

static GEOCODER: Semaphore = Semaphore::named("geocoder", SLOTS, TIMEOUT);

/// What each worker does: one call whenever it likes, then as many as the service wants, with a slot.
pub(crate) fn work(worker: &Instance) -> Result<(), Box<dyn Error>> {
    let pool = worker.pool()?;
    let service = env::var(SERVICE)?;
    worker.say(READY)?;
    worker.wait()?;
    call(&service, &worker.name)?;
    worker.say("called")?;
    worker.wait()?;

    let semaphore = GEOCODER.details(&worker.name);
    loop {
        let Admission::Admitted(permit) =
            semaphore.acquire_timeout(&pool, Duration::from_secs(10))?
        else {
            return Err("no slot within ten seconds".into());
        };
        let more = call(&service, &worker.name)?;
        permit.release()?;
        if !more {
            return Ok(());
        }
    }
}

pub(crate) fn twelve_workers_share_four_slots(database: &Database) -> Result<(), Box<dyn Error>> {
    title("5. Twelve processes call a service that copes with four calls at a time");
    let service = Service::start()?;
    let mut workers = start_workers(database, &service)?;

    say("Each calls it whenever it likes");
    for worker in &mut workers {
        worker.go_on()?;
    }
    for worker in &mut workers {
        worker.expect("called");
    }
    let crowd = service.most_in_flight();
    assert!(crowd > SLOTS, "{crowd} are too few to show it");
    bad(format!("the service counts {crowd} calls at once"));

    say("Each has a slot while it calls: GEOCODER.acquire_timeout(&pool, ten_seconds)?");
    note("GEOCODER: Semaphore::named(\"geocoder\", 4, Duration::from_secs(2))");
    let before = service.served();
    for worker in &mut workers {
        worker.go_on()?;
    }
    let served = eventually("the workers have called", || {
        let served = service.served() - before;
        Ok::<_, Infallible>((served >= 48).then_some(served))
    })?;
    assert_most_in_flight(&service);
    good(format!(
        "the service counts 4 calls at once at most, in {served} calls"
    ));

    say("One is killed while it has a slot");
    let conn = &mut database.connect();
    let lost = kill_one_that_has_a_slot(conn, &service, &mut workers)?;
    let served_before = service.served();
    let next = eventually("the slot is taken again", || next_in_slot(conn, &lost))?;
    let meanwhile = service.served() - served_before;
    let after = (next.created_at - lost.created_at).to_std()?;
    assert!(after >= TIMEOUT, "the slot was given away early");
    assert!(next.id > lost.id, "fencing tokens ascend");
    assert!(meanwhile > 0, "the other slots were in use");
    note(format!(
        "meanwhile the service serves {meanwhile} calls, with the other three slots"
    ));
    good(format!(
        "slot {} is back {:.2} s after it was taken: {} has it, with token {}",
        next.slot,
        after.as_secs_f64(),
        next.details,
        next.id
    ));

    service.close();
    for worker in workers {
        worker.end()?;
    }
    assert_most_in_flight(&service);
    assert_eq!(Slot::all().load(conn)?, []);
    good("never more than 4 calls at once; the other eleven end, and 4 slots are free");
    Ok(())
}

fn start_workers(database: &Database, service: &Service) -> Result<Vec<Process>, Box<dyn Error>> {
    let address = service.address().to_string();
    let mut workers = Vec::new();
    for number in 1..=12 {
        let name = format!("worker-{number}");
        let variables = [(SERVICE, address.as_str())];
        workers.push(Process::launch(ROLE, &name, database, &variables)?);
    }
    for worker in &mut workers {
        worker.expect(READY);
    }
    Ok(workers)
}

/// Returns the request of the worker that was killed, which is still in flight.
fn kill_one_that_has_a_slot(
    conn: &mut PgConnection,
    service: &Service,
    workers: &mut Vec<Process>,
) -> Result<ServiceRequest, Box<dyn Error>> {
    service.let_one_hang();
    let name = eventually("a call hangs", || Ok::<_, Infallible>(service.who_hangs()))?;
    let number = workers.iter().position(|worker| worker.name == name);
    let victim = workers.remove(number.ok_or("nobody is called so")?);
    let pid = victim.pid();
    victim.kill()?;

    let request = service_request::table
        .filter(is_in_flight())
        .filter(service_request::details.eq(&name))
        .select(ServiceRequest::as_select())
        .get_result(conn)?;
    note(format!(
        "kill -9 {pid}: {name} had slot {}, with the fencing token {}",
        request.slot, request.id
    ));
    Ok(request)
}

/// The request that has the slot after this one.
fn next_in_slot(
    conn: &mut PgConnection,
    lost: &ServiceRequest,
) -> QueryResult<Option<ServiceRequest>> {
    service_request::table
        .filter(service_request::service.eq(&lost.service))
        .filter(service_request::slot.eq(lost.slot))
        .filter(service_request::created_at.gt(lost.created_at))
        .order(service_request::created_at)
        .select(ServiceRequest::as_select())
        .first(conn)
        .optional()
}

fn assert_most_in_flight(service: &Service) {
    let most = service.most_in_flight();
    assert_eq!(most, SLOTS, "calls at once");
}
