//! The page for whoever is on duty: who holds what and who waits, which slots are taken, what is due
//! when.

use std::collections::BTreeMap;
use std::time::Duration;

use askama::Template;
use chrono::{DateTime, Utc};
use diesel::prelude::*;
use diesel_interlock::functions::clock_timestamp;
use diesel_interlock::monitor::{
    self, Names, ServiceRequest, Session, ThrottledResourceRow, Timestamp,
};
use diesel_interlock::schema::resource_control::{service_request, throttled_resource};
use diesel_interlock::{LockId, LockKey, migrations};

use crate::app::App;
use crate::error::AppError;
use crate::schema::{report_runs, servers};
use crate::{geocoder, reports, reservations};

/// What the page shows, all of it by the server's clock.
#[derive(Debug, Template)]
#[template(path = "locks.html")]
pub struct Locks<'a> {
    instance: &'a str,
    now: DateTime<Utc>,
    locks: Vec<Lock>,
    services: Vec<Service>,
    throttles: Vec<Throttled>,
}

/// A lock that is held or waited for.
#[derive(Debug, Default)]
struct Lock {
    name: String,
    holders: Vec<Party>,
    waiters: Vec<Party>,
}

/// A session that holds a lock, or waits for it.
#[derive(Debug)]
struct Party {
    who: String,
    pid: Option<i32>,
    from: Option<String>,
    how_long: Option<String>,
}

/// The slots of a service, and who makes the calls that are in flight.
#[derive(Debug)]
struct Service {
    name: String,
    slots: Vec<Option<Call>>,
    in_flight: usize,
}

#[derive(Debug, Clone)]
struct Call {
    who: String,
    since: String,
    ends: String,
}

/// A throttled resource.
#[derive(Debug)]
struct Throttled {
    name: String,
    interval: String,
    taken_by: String,
    /// How long until it is due; nothing if it is due.
    due_in: Option<String>,
}

/// Writes the page.
pub fn page(app: &App) -> Result<String, AppError> {
    let conn = &mut *app.pool.get()?;
    let now: DateTime<Utc> = diesel::select(clock_timestamp()).get_result(conn)?;
    let page = Locks {
        instance: &app.config.instance,
        now,
        locks: locks(conn, now)?,
        services: services(conn, now)?,
        throttles: throttles(conn, now)?,
    };
    Ok(page.render()?)
}

fn locks(conn: &mut PgConnection, now: DateTime<Utc>) -> Result<Vec<Lock>, AppError> {
    let holders: Vec<(monitor::Holder, Option<DateTime<Utc>>)> = monitor::holders()
        .left_join(report_runs::table.on(reports::of_this_session()))
        .select((
            monitor::Holder::as_select(),
            report_runs::started_at.nullable(),
        ))
        .load(conn)?;
    let waiters: Vec<monitor::Waiter> = monitor::waiters()
        .order(monitor::waiting_since)
        .load(conn)?;
    let names = names(conn)?;
    let report = reports::NIGHTLY.key().id()?;

    let mut locks = BTreeMap::new();
    for (holder, started_at) in holders {
        // The run tells since when its session has this lock, not any other.
        let since = started_at.filter(|_| holder.key == report);
        let party = Party::new(
            holder.session,
            since.and_then(|since| (now - since).to_std().ok()),
        );
        lock(&mut locks, &names, holder.key).holders.push(party);
    }
    for waiter in waiters {
        let party = Party::new(waiter.session, waiter.waited);
        lock(&mut locks, &names, waiter.key).waiters.push(party);
    }
    Ok(locks.into_values().collect())
}

/// PostgreSQL knows the numbers of locks only; this is every name that this application locks.
fn names(conn: &mut PgConnection) -> Result<Names, AppError> {
    let servers: Vec<(i32, i32)> = servers::table.load(conn)?;
    let servers = servers
        .into_iter()
        .map(|(datacenter, server)| reservations::lock(datacenter, server));
    let others = [reports::NIGHTLY.key(), migrations::LOCK.key()].map(LockKey::clone);
    Ok(Names::new(&servers.chain(others).collect::<Vec<_>>())?)
}

fn lock<'a>(locks: &'a mut BTreeMap<String, Lock>, names: &Names, id: LockId) -> &'a mut Lock {
    let name = names
        .of(id)
        .map_or_else(|| format!("lock {id}"), ToOwned::to_owned);
    locks.entry(name.clone()).or_insert_with(|| Lock {
        name,
        ..Lock::default()
    })
}

impl Party {
    fn new(session: Session, how_long: Option<Duration>) -> Self {
        let who = session.application_name.filter(|name| !name.is_empty());
        Self {
            who: who.unwrap_or_else(|| "somebody without a name".to_owned()),
            pid: session.pid,
            from: session.client_hostname.or(session.client_addr),
            how_long: how_long.map(in_words),
        }
    }
}

fn services(conn: &mut PgConnection, now: DateTime<Utc>) -> Result<Vec<Service>, AppError> {
    let requests: Vec<ServiceRequest> = service_request::table
        .filter(monitor::in_flight())
        .order(service_request::slot)
        .select(ServiceRequest::as_select())
        .load(conn)?;
    // A service that nobody calls is shown as well, with all its slots free.
    let mut services =
        BTreeMap::from([(geocoder::SERVICE.to_owned(), vec![None; geocoder::SLOTS])]);
    for request in requests {
        let slots = services.entry(request.service).or_default();
        let slot = usize::try_from(request.slot).unwrap_or_default();
        if slots.len() <= slot {
            slots.resize(slot + 1, None);
        }
        slots[slot] = Some(Call {
            who: request.details,
            since: in_words((now - request.created_at).to_std().unwrap_or_default()),
            ends: until(request.expires_at, now).unwrap_or_else(|| "now".to_owned()),
        });
    }
    let services = services.into_iter().map(|(name, slots)| Service {
        name,
        in_flight: slots.iter().flatten().count(),
        slots,
    });
    Ok(services.collect())
}

fn throttles(conn: &mut PgConnection, now: DateTime<Utc>) -> Result<Vec<Throttled>, AppError> {
    let resources: Vec<(ThrottledResourceRow, Timestamp)> = throttled_resource::table
        .order(throttled_resource::resource_id)
        .select((ThrottledResourceRow::as_select(), monitor::next_free_at()))
        .load(conn)?;
    let throttles = resources.into_iter().map(|(row, next)| Throttled {
        name: row.resource_id.0,
        interval: in_words(row.throttle_interval),
        taken_by: row.last_locker_details,
        due_in: until(next, now),
    });
    Ok(throttles.collect())
}

/// How long until then; nothing if it is over.
fn until(then: Timestamp, now: DateTime<Utc>) -> Option<String> {
    match then {
        Timestamp::NegInfinity => None,
        Timestamp::At(then) => (then - now).to_std().ok().map(in_words),
        Timestamp::Infinity => Some("never".to_owned()),
    }
}

/// As one says it: `4.2 s`, `3 min`, `2 h`.
fn in_words(duration: Duration) -> String {
    match duration.as_secs() {
        0..10 => format!("{:.1} s", duration.as_secs_f64()),
        seconds @ 10..100 => format!("{seconds} s"),
        seconds @ 100..6000 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}
