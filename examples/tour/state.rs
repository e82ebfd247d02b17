//! The monitor: who holds, who waits, what is in flight and what is due.

use std::error::Error;
use std::time::Duration;

use diesel::dsl::IntervalDsl;
use diesel::prelude::*;
use diesel_interlock::functions::clock_timestamp;
use diesel_interlock::monitor::{
    self, Names, QuotaSource, ServiceRequest, ThrottledResourceRow, Timestamp, blocking,
};
use diesel_interlock::schema::resource_control::{
    rate_limit_override, service_request, throttled_resource,
};
use diesel_interlock::{Admission, AdvisoryLock, LockKey, Quota, RateLimit, Semaphore};
use workbench::Database;

use crate::NIGHTLY;
use crate::fragile_service::SLOTS;
use crate::instance::{Instance, Process, READY};
use crate::observer::eventually;
use crate::screen::{good, heading, row, say, title};

pub(crate) const REPORTS: &str = "writes the nightly report";
pub(crate) const BOOKS: &str = "books a server";

static GEOCODER: Semaphore = Semaphore::named("geocoder", SLOTS, Duration::from_secs(30));

static API: RateLimit = RateLimit::named("api", Quota::per_hour(60).burst(20));

fn booking() -> AdvisoryLock {
    AdvisoryLock::new(LockKey::parts(["server", "223", "345"]))
}

/// Has the session lock, and a slot of the service.
pub(crate) fn report(instance: &Instance) -> Result<(), Box<dyn Error>> {
    let pool = instance.pool()?;
    let permit = GEOCODER.details(instance.name.clone()).try_acquire(&pool)?;
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
    let claim = GEOCODER.details(instance.name.clone()).claim_on(conn)?;
    let Admission::Admitted(claim) = claim else {
        return Err("the service is in use".into());
    };
    instance.say(READY)?;
    booking().transaction(conn, |_| {
        instance.say("has it")?;
        instance.wait()?;
        Ok::<_, Box<dyn Error>>(())
    })?;
    assert!(GEOCODER.complete_on(conn, claim.id)?);
    Ok(())
}

pub(crate) fn what_goes_on(database: &Database) -> Result<(), Box<dyn Error>> {
    title("7. What goes on, in three instances: the queries of monitor");
    let conn = &mut database.connect();
    let mut first = Process::start(REPORTS, "web-1", database)?;
    let mut second = Process::start(BOOKS, "web-2", database)?;
    second.expect("has it");
    let mut third = Process::start(BOOKS, "web-3", database)?;
    eventually("web-3 waits", || {
        let waiters = monitor::waiters_of(conn, booking().key())?;
        let long = |waiter: &monitor::Waiter| {
            waiter
                .waited
                .is_none_or(|waited| waited > Duration::from_millis(300))
        };
        Ok::<_, diesel_interlock::Error>(waiters.iter().any(long).then_some(()))
    })?;

    locks(conn)?;
    requests(conn)?;
    throttles(conn)?;
    rate_limits(conn)?;

    first.go_on()?;
    second.go_on()?;
    third.expect("has it");
    third.go_on()?;
    for instance in [first, second, third] {
        instance.end()?;
    }
    assert_eq!(monitor::holders().load(conn)?, []);
    assert_eq!(monitor::waiters().load(conn)?, []);
    let slots = monitor::slots(conn, GEOCODER.service(), SLOTS)?;
    assert_eq!(slots.in_flight, 0);
    Ok(())
}

/// Numbers are all that PostgreSQL keeps of a lock; those who know the names can give them.
fn locks(conn: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    const WIDTHS: [usize; 4] = [16, 10, 6, 0];
    let booking = booking();
    let names = Names::new([NIGHTLY.key(), booking.key()])?;

    say("Locks: monitor::holders(), monitor::blocked()");
    heading(WIDTHS, ["lock", "by", "pid", ""]);
    let holders = monitor::holders()
        .order(monitor::application_name)
        .load(conn)?;
    let mut held = Vec::new();
    for holder in &holders {
        let lock = names.of(holder.key).ok_or("every lock has a name")?;
        let by = holder.session.application_name.as_deref().unwrap_or("?");
        let pid = holder.session.pid.ok_or("a session holds it")?;
        row(WIDTHS, [&lock, &by, &pid, &"holds it"]);
        held.push((lock, by));
    }
    assert_eq!(
        held,
        [("nightly report", "web-1"), ("server 223 345", "web-2")]
    );

    let blocked = monitor::blocked().order(blocking::blocked_pid).load(conn)?;
    let mut waits = Vec::new();
    for wait in &blocked {
        let lock = names.of(wait.key).ok_or("every lock has a name")?;
        let by = wait.blocked_application_name.as_deref().unwrap_or("?");
        let holder = wait.blocking_application_name.as_deref().unwrap_or("?");
        let how_long = match wait.waited {
            Some(waited) => format!("has waited {:.2} s for {holder}", waited.as_secs_f64()),
            None => format!("waits for {holder}"), // before PostgreSQL 14
        };
        row(WIDTHS, [&lock, &by, &wait.blocked_pid, &how_long]);
        waits.push((lock, by, holder));
    }
    assert_eq!(waits, [("server 223 345", "web-3", "web-2")]);
    Ok(())
}

fn requests(conn: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    const WIDTHS: [usize; 4] = [16, 10, 6, 0];
    let service = GEOCODER.service();

    say("Requests: monitor::in_flight(), timed_out(), slots(conn, \"geocoder\", 4)");
    heading(WIDTHS, ["service", "by", "slot", ""]);
    let in_flight: Vec<(ServiceRequest, Timestamp)> = service_request::table
        .filter(monitor::in_flight())
        .order(service_request::details)
        .select((ServiceRequest::as_select(), clock_timestamp()))
        .load(conn)?;
    for (request, now) in &in_flight {
        let now = now.at().ok_or("the server's clock is finite")?;
        let age = (now - request.created_at).to_std().unwrap_or_default();
        let how_long = format!("in flight for {:.2} s", age.as_secs_f64());
        row(
            WIDTHS,
            [&request.service, &request.details, &request.slot, &how_long],
        );
    }
    let by = in_flight.iter().map(|(request, _)| &request.details);
    assert!(by.eq(["web-1", "web-2", "web-3"]));

    let timed_out: Vec<ServiceRequest> = service_request::table
        .filter(monitor::of_service(service))
        .filter(monitor::timed_out())
        .select(ServiceRequest::as_select())
        .load(conn)?;
    let [lost] = &timed_out[..] else {
        panic!("one worker was killed, and {timed_out:?} timed out");
    };
    row(
        WIDTHS,
        [
            &lost.service,
            &lost.details,
            &lost.slot,
            &"timed out: it was killed",
        ],
    );

    let slots = monitor::slots(conn, service, SLOTS)?;
    let [free] = slots.free[..] else {
        panic!("{:?} are free", slots.free);
    };
    assert_eq!((slots.in_flight, slots.claimable()), (3, 1));
    let next = slots.next_expiry.and_then(Timestamp::at);
    let next = next.ok_or("a request expires")?.format("%H:%M:%S");
    good(format!(
        "1 slot of 4 is free, slot {free}; another one at {next} at the latest"
    ));
    Ok(())
}

fn throttles(conn: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    const WIDTHS: [usize; 3] = [16, 18, 0];

    say("Throttles: monitor::next_free_at(), and who took it last");
    heading(WIDTHS, ["throttle", "last taken by", "due"]);
    let rows: Vec<(ThrottledResourceRow, Timestamp)> = throttled_resource::table
        .order(monitor::next_free_at().desc())
        .select((ThrottledResourceRow::as_select(), monitor::next_free_at()))
        .load(conn)?;
    for (throttle, next_free_at) in &rows {
        let by = match throttle.last_locker_details.as_str() {
            "" => "nobody",
            details => details,
        };
        let due = match next_free_at.at() {
            Some(time) => format!("at {}", time.format("%H:%M:%S")),
            None => "now".to_owned(),
        };
        row(WIDTHS, [&throttle.resource_id.0, &by, &due]);
    }
    let labels = rows.iter().map(|(row, _)| row.resource_id.0.as_str());
    assert!(labels.eq(["newsletter", "cache rebuild"]));
    assert!(rows[0].0.last_locker_details.starts_with("cron on web-"));
    assert_eq!(rows[1].1, Timestamp::NegInfinity);
    Ok(())
}

/// The program knows its quota; an operator may have raised that of a customer.
fn rate_limits(conn: &mut PgConnection) -> Result<(), Box<dyn Error>> {
    const WIDTHS: [usize; 4] = [16, 10, 10, 0];

    say("Rate limits: monitor::keys_near_limit(conn, &API, 10)");
    diesel::insert_into(rate_limit_override::table)
        .values((
            rate_limit_override::name.eq(API.name()),
            rate_limit_override::key.eq("acme"),
            rate_limit_override::n.eq(600),
            rate_limit_override::period.eq(1.hour()),
            rate_limit_override::burst.eq(200),
        ))
        .execute(conn)?;
    for (customer, units) in [("acme", 20), ("initech", 17), ("hooli", 2)] {
        assert!(API.key(customer).cost(units).check_on(conn)?.is_allowed());
    }
    heading(WIDTHS, ["limit", "of", "left", ""]);
    let near = monitor::keys_near_limit(conn, &API, 10)?;
    for near in &near {
        let left = format!("{} of {}", near.remaining, near.quota.burst);
        let quota = match near.quota_source {
            QuotaSource::Program => "",
            QuotaSource::Key | QuotaSource::Name => "by an override",
        };
        row(WIDTHS, [&API.name(), &near.key, &left, &quota]);
    }
    let left: Vec<_> = near
        .iter()
        .map(|near| (near.key.as_str(), near.remaining))
        .collect();
    assert_eq!(left, [("initech", 3), ("hooli", 18), ("acme", 180)]);
    Ok(())
}
