//! What goes on, in three instances: the views of the database, through Diesel.

use std::error::Error;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::monitor::views::{
    advisory_lock, rate_limit_state, slot_in_flight, throttle_state,
};
use diesel_interlock::monitor::{KeyOfLimit, Lock, Slot, ThrottleState};
use diesel_interlock::{Admission, AdvisoryLock, Error as LockError, Quota, RateLimit, Semaphore};
use workbench::Database;

use crate::NIGHTLY;
use crate::fragile_service::SLOTS;
use crate::instance::{Instance, Process, READY};
use crate::observer::eventually;
use crate::screen::{heading, row, say, title};

pub(crate) const REPORTS: &str = "writes the nightly report";
pub(crate) const BOOKS: &str = "books a server";

static GEOCODER: Semaphore = Semaphore::named("geocoder", SLOTS, Duration::from_secs(30));
static API: RateLimit = RateLimit::named("api", Quota::per_hour(60).burst(20));
static SERVER: AdvisoryLock = AdvisoryLock::named("server");

/// Has the session lock, and a slot of the service.
pub(crate) fn report(instance: &Instance) -> Result<(), Box<dyn Error>> {
    let pool = instance.pool()?;
    let permit = GEOCODER.details(&instance.name).try_acquire(&pool)?;
    let guard = NIGHTLY.acquire(&pool)?;
    instance.say(READY)?;
    instance.wait()?;
    guard.release()?;
    let Admission::Admitted(permit) = permit else {
        return Err("the service is in use".into());
    };
    Ok(permit.release()?)
}

/// Has the transaction lock, or waits for its holder.
pub(crate) fn book(instance: &Instance) -> Result<(), Box<dyn Error>> {
    let conn = &mut instance.connect()?;
    instance.say(READY)?;
    SERVER.key(345).transaction(conn, |_| {
        instance.say("has it")?;
        instance.wait()?;
        Ok::<_, Box<dyn Error>>(())
    })
}

pub(crate) fn what_goes_on(database: &Database) -> Result<(), Box<dyn Error>> {
    title("7. What goes on, in three instances: the views, through the types of monitor");
    let conn = &mut database.connect();
    let mut first = Process::start(REPORTS, "web-1", database)?;
    let mut second = Process::start(BOOKS, "web-2", database)?;
    second.expect("has it");
    let mut third = Process::start(BOOKS, "web-3", database)?;
    eventually("web-3 waits", || {
        let of_server = Lock::of(SERVER.key(345).lock_key());
        let waiters = of_server
            .filter(advisory_lock::is_held.eq(false))
            .load(conn)?;
        Ok::<_, LockError>((!waiters.is_empty()).then_some(()))
    })?;

    locks(conn)?;
    slots(conn)?;
    throttles(conn)?;
    rate_limits(database, conn)?;

    first.go_on()?;
    second.go_on()?;
    third.expect("has it");
    third.go_on()?;
    for instance in [first, second, third] {
        instance.end()?;
    }
    assert_eq!(Lock::all().load(conn)?, []);
    assert_eq!(Slot::all().load(conn)?, []);
    Ok(())
}

fn locks(conn: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    const WIDTHS: [usize; 4] = [22, 8, 8, 0];
    say("Locks: Lock::all(), of the view advisory_lock");
    heading(WIDTHS, ["number", "by", "pid", ""]);
    let locks = Lock::all()
        .order((
            advisory_lock::is_held.desc(),
            advisory_lock::application_name,
        ))
        .load(conn)?;
    for lock in &locks {
        let number = lock.number.ok_or("every lock has a name")?;
        let what = if lock.is_held {
            "holds it".to_owned()
        } else {
            format!("waits for pid {:?}", lock.blocked_by)
        };
        row(WIDTHS, [&number, &lock.application_name, &lock.pid, &what]);
    }
    let who: Vec<_> = locks
        .iter()
        .map(|lock| (lock.application_name.as_str(), lock.is_held))
        .collect();
    assert_eq!(who, [("web-1", true), ("web-2", true), ("web-3", false)]);
    assert_eq!(locks[2].blocked_by, [locks[1].pid]);
    Ok(())
}

fn slots(conn: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    const WIDTHS: [usize; 4] = [22, 8, 8, 0];
    say("Semaphores: Slot::all(), of the view slot_in_flight");
    heading(WIDTHS, ["service", "by", "slot", ""]);
    let slots = Slot::all().order(slot_in_flight::id).load(conn)?;
    for slot in &slots {
        let until = format!("until {}", slot.expires_at.format("%H:%M:%S"));
        row(WIDTHS, [&slot.service, &slot.details, &slot.slot, &until]);
    }
    assert!(slots.iter().map(|slot| slot.details.as_str()).eq(["web-1"]));
    Ok(())
}

fn throttles(conn: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    const WIDTHS: [usize; 3] = [22, 18, 0];
    say("Throttles: ThrottleState::all(), of the view throttle_state");
    heading(WIDTHS, ["throttle", "last granted to", "due"]);
    let throttles = ThrottleState::all()
        .order(throttle_state::name.desc())
        .load(conn)?;
    for throttle in &throttles {
        let by = if throttle.details.is_empty() {
            "nobody"
        } else {
            &throttle.details
        };
        let due = throttle.due_at.map_or("now".to_owned(), |at| {
            format!("at {}", at.format("%H:%M:%S"))
        });
        row(WIDTHS, [&throttle.name, &by, &due]);
    }
    let due: Vec<_> = throttles
        .iter()
        .map(|throttle| (throttle.name.as_str(), throttle.is_due))
        .collect();
    assert_eq!(due, [("newsletter", false), ("cache rebuild", true)]);
    Ok(())
}

fn rate_limits(database: &Database, conn: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    const WIDTHS: [usize; 3] = [22, 18, 0];
    say("Rate limits: KeyOfLimit::all(), of the view rate_limit_state");
    let pool = database.pool(1);
    for (customer, units) in [("acme", 20), ("initech", 17), ("hooli", 2)] {
        assert!(API.key(customer).cost(units).check(&pool)?.is_allowed());
    }
    heading(WIDTHS, ["limit", "of", "left"]);
    let keys = KeyOfLimit::all()
        .filter(rate_limit_state::name.eq("api"))
        .order(rate_limit_state::used.desc())
        .load(conn)?;
    for key in &keys {
        row(
            WIDTHS,
            [
                &key.name,
                &key.key,
                &format!("{} of {}", key.remaining, key.burst),
            ],
        );
    }
    let left: Vec<_> = keys
        .iter()
        .map(|key| (key.key.as_str(), key.remaining))
        .collect();
    assert_eq!(left, [("acme", 0), ("initech", 3), ("hooli", 18)]);
    Ok(())
}
