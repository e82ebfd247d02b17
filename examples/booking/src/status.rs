//! What the database shows: who holds what and who waits, which slots are taken, what timed out, what is
//! due when.
//!
//! The modules `blocking` and `asynchronous` read with the queries of this one. [`Status::of`] makes of it what the pages show,
//! without a connection and without a clock.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::dsl::{self, AsSelect, auto_type};
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel_interlock::monitor::{
    self, Holder, Names, ServiceRequest, Session, ThrottledResourceRow, Timestamp, Waiter,
};
use diesel_interlock::schema::resource_control::{service_request, throttled_resource};
use diesel_interlock::{LockId, migrations};
use serde::{Serialize, Serializer};

use crate::error::AppError;
use crate::schema::report_runs;
use crate::{geocoder, reports, reservations};

/// How many of the requests that timed out are shown: the latest.
const TIMED_OUT: i64 = 5;

/// What the pages show, all of it by the server's clock.
#[derive(Debug, Serialize)]
pub struct Status {
    pub instance: String,
    pub now: DateTime<Utc>,
    pub locks: Vec<Lock>,
    pub services: Vec<Service>,
    pub timed_out: Vec<TimedOut>,
    pub throttles: Vec<Throttled>,
}

/// A lock that is held or waited for.
#[derive(Debug, Serialize)]
pub struct Lock {
    pub name: String,
    pub holders: Vec<Party>,
    pub waiters: Vec<Party>,
}

/// A session that holds a lock, or waits for it.
#[derive(Debug, Serialize)]
pub struct Party {
    pub who: String,
    pub session: Option<i32>,
    pub from: Option<String>,
    pub for_secs: Option<Span>,
}

/// The slots of a service, and who makes the calls that are in flight.
#[derive(Debug, Serialize)]
pub struct Service {
    pub name: String,
    pub slots: Vec<Option<Call>>,
    pub in_flight: usize,
}

/// A request in flight.
#[derive(Debug, Clone, Serialize)]
pub struct Call {
    pub who: String,
    pub for_secs: Span,
    pub expires_in_secs: Until,
}

/// A request whose holder did not release it in time.
#[derive(Debug, Serialize)]
pub struct TimedOut {
    pub service: String,
    pub slot: i16,
    pub who: String,
    pub secs_ago: Span,
}

/// A throttled resource.
#[derive(Debug, Serialize)]
pub struct Throttled {
    pub name: String,
    pub every_secs: Span,
    /// Empty if nobody ever took it.
    pub taken_by: String,
    pub free_in_secs: Until,
}

/// A time span: in seconds as JSON, in words as text.
#[derive(Debug, Clone, Copy)]
pub struct Span(pub(crate) Duration);

/// How long until something is: 0 and above as JSON, and null for never.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    Now,
    In(Span),
    Never,
}

/// What was read.
#[derive(Debug)]
pub struct Seen {
    pub(crate) now: DateTime<Utc>,
    pub(crate) holders: Vec<(Holder, Option<DateTime<Utc>>)>,
    pub(crate) waiters: Vec<Waiter>,
    pub(crate) in_flight: Vec<ServiceRequest>,
    pub(crate) timed_out: Vec<ServiceRequest>,
    pub(crate) resources: Vec<(ThrottledResourceRow, Timestamp)>,
    pub(crate) servers: Vec<(i32, i32)>,
}

/// Who holds locks, with the start of the report that the session writes, if it does.
#[auto_type]
pub(crate) fn holders() -> _ {
    let selection: (AsSelect<Holder, Pg>, dsl::Nullable<report_runs::started_at>) =
        (Holder::as_select(), report_runs::started_at.nullable());
    monitor::holders()
        .left_join(report_runs::table.on(reports::of_this_session()))
        .select(selection)
}

/// Who waits, longest first.
#[auto_type]
pub(crate) fn waiters() -> _ {
    monitor::waiters().order(monitor::waiting_since)
}

#[auto_type]
pub(crate) fn in_flight() -> _ {
    let selection: AsSelect<ServiceRequest, Pg> = ServiceRequest::as_select();
    service_request::table
        .filter(monitor::in_flight())
        .order(service_request::slot)
        .select(selection)
}

#[auto_type]
pub(crate) fn timed_out() -> _ {
    let selection: AsSelect<ServiceRequest, Pg> = ServiceRequest::as_select();
    let most: i64 = TIMED_OUT;
    service_request::table
        .filter(monitor::timed_out())
        .order(service_request::expires_at.desc())
        .limit(most)
        .select(selection)
}

#[auto_type]
pub(crate) fn resources() -> _ {
    let selection: (AsSelect<ThrottledResourceRow, Pg>, monitor::next_free_at) =
        (ThrottledResourceRow::as_select(), monitor::next_free_at());
    throttled_resource::table
        .order(throttled_resource::resource_id)
        .select(selection)
}

impl Status {
    /// Sorts what was seen for the reader.
    pub fn of(instance: &str, seen: Seen) -> Result<Self, AppError> {
        let now = seen.now;
        Ok(Self {
            instance: instance.to_owned(),
            now,
            locks: locks(seen.holders, seen.waiters, &names(&seen.servers)?, now)?,
            services: services(seen.in_flight, now),
            timed_out: seen
                .timed_out
                .into_iter()
                .map(|request| TimedOut::new(request, now))
                .collect(),
            throttles: seen
                .resources
                .into_iter()
                .map(|(row, next)| Throttled {
                    name: row.resource_id.0,
                    every_secs: Span(row.throttle_interval),
                    taken_by: row.last_locker_details,
                    free_in_secs: Until::new(next, now),
                })
                .collect(),
        })
    }
}

fn locks(
    holders: Vec<(Holder, Option<DateTime<Utc>>)>,
    waiters: Vec<Waiter>,
    names: &Names,
    now: DateTime<Utc>,
) -> Result<Vec<Lock>, AppError> {
    let report = reports::LOCK.id()?;
    let mut locks = BTreeMap::new();
    for (holder, started_at) in holders {
        // The run tells since when its session has this lock, not any other.
        let since = started_at.filter(|_| holder.key == report);
        let party = Party::new(holder.session, since.map(|since| Span::between(since, now)));
        lock(&mut locks, names, holder.key).holders.push(party);
    }
    for waiter in waiters {
        let party = Party::new(waiter.session, waiter.waited.map(Span));
        lock(&mut locks, names, waiter.key).waiters.push(party);
    }
    Ok(locks.into_values().collect())
}

/// Every name that this application locks. PostgreSQL knows the numbers of locks only.
fn names(servers: &[(i32, i32)]) -> Result<Names, AppError> {
    let servers = servers
        .iter()
        .map(|(datacenter, server)| reservations::lock(*datacenter, *server));
    let others = [reports::LOCK, migrations::LOCK.key().clone()];
    Ok(Names::new(&servers.chain(others).collect::<Vec<_>>())?)
}

fn lock<'a>(locks: &'a mut BTreeMap<String, Lock>, names: &Names, id: LockId) -> &'a mut Lock {
    let name = names
        .of(id)
        .map_or_else(|| format!("lock {id}"), ToOwned::to_owned);
    locks.entry(name.clone()).or_insert_with(|| Lock {
        name,
        holders: Vec::new(),
        waiters: Vec::new(),
    })
}

impl Party {
    fn new(session: Session, for_secs: Option<Span>) -> Self {
        let who = session.application_name.filter(|name| !name.is_empty());
        Self {
            who: who.unwrap_or_else(|| "somebody without a name".to_owned()),
            session: session.pid,
            from: session.client_hostname.or(session.client_addr),
            for_secs,
        }
    }
}

fn services(in_flight: Vec<ServiceRequest>, now: DateTime<Utc>) -> Vec<Service> {
    // A service that nobody calls is shown as well, with all its slots free.
    let mut services =
        BTreeMap::from([(geocoder::SERVICE.to_owned(), vec![None; geocoder::SLOTS])]);
    for request in in_flight {
        let slots = services.entry(request.service).or_default();
        let slot = usize::try_from(request.slot).unwrap_or_default();
        if slots.len() <= slot {
            slots.resize(slot + 1, None);
        }
        slots[slot] = Some(Call {
            who: request.details,
            for_secs: Span::between(request.created_at, now),
            expires_in_secs: Until::new(request.expires_at, now),
        });
    }
    let services = services.into_iter().map(|(name, slots)| Service {
        name,
        in_flight: slots.iter().flatten().count(),
        slots,
    });
    services.collect()
}

impl TimedOut {
    fn new(request: ServiceRequest, now: DateTime<Utc>) -> Self {
        Self {
            service: request.service,
            slot: request.slot,
            who: request.details,
            secs_ago: Span::between(request.expires_at.at().unwrap_or(now), now),
        }
    }
}

impl Span {
    fn between(from: DateTime<Utc>, to: DateTime<Utc>) -> Self {
        Self((to - from).to_std().unwrap_or_default())
    }
}

impl Until {
    fn new(then: Timestamp, now: DateTime<Utc>) -> Self {
        match then {
            Timestamp::At(then) if then > now => Self::In(Span::between(now, then)),
            Timestamp::At(_) | Timestamp::NegInfinity => Self::Now,
            Timestamp::Infinity => Self::Never,
        }
    }

    /// Whether it is so now.
    pub fn is_now(&self) -> bool {
        matches!(self, Self::Now)
    }
}

/// As one says it: `4.2 s`, `3 min`, `2 h`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            0..10 => write!(f, "{:.1} s", self.0.as_secs_f64()),
            seconds @ 10..100 => write!(f, "{seconds} s"),
            seconds @ 100..6000 => write!(f, "{} min", seconds / 60),
            seconds => write!(f, "{} h", seconds / 3600),
        }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0.as_secs_f64())
    }
}

/// To follow "free" or "expires".
impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Now => f.write_str("now"),
            Self::In(span) => write!(f, "in {span}"),
            Self::Never => f.write_str("never"),
        }
    }
}

impl Serialize for Until {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Now => serializer.serialize_f64(0.0),
            Self::In(span) => span.serialize(serializer),
            Self::Never => serializer.serialize_none(),
        }
    }
}
