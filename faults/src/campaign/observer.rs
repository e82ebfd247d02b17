//! The state of the server, as sessions see it that take no part in the work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, SmallInt, Text};
use diesel_interlock::{Admission, Check, Error};

use super::event_log::EventLog;
use super::primary::Primary;
use crate::check::{Booking, Grant, LimitChange, Request, Section, Truth, Write};
use crate::subjects::{BY_THE_ARTICLE, CALLS, DEPLOYED, LIMITED_KEYS, LOGIN, PAID, SEMAPHORES};

const PAUSE: Duration = Duration::from_millis(40);

/// How long the last operations may take, such as the end of a session or a deferred release.
const SETTLING: Duration = Duration::from_secs(10);

/// States that the server should never permit, which are checked above all because of failovers, and locks whose session
/// has been idle for longer than any worker holds a lock or is frozen.
const MUST_BE_EMPTY: &str = "
    SELECT format('the lock %s/%s is held by %s, %s of them exclusively', classid, objid, count(DISTINCT pid),
            count(*) FILTER (WHERE mode = 'ExclusiveLock')) AS text
        FROM pg_locks WHERE locktype = 'advisory' AND granted GROUP BY classid, objid, objsubid
        HAVING count(DISTINCT pid) > 1 AND bool_or(mode = 'ExclusiveLock')
    UNION ALL
    SELECT format('%s requests to %s are in flight', count(*), service)
        FROM resource_control.service_request
        WHERE completed_at IS NULL AND timed_out_at IS NULL AND expires_at > clock_timestamp()
        GROUP BY service HAVING count(*) > CASE service WHEN 'short' THEN 3 WHEN 'lease' THEN 1 WHEN 'by the article' THEN 1 ELSE 5 END
    UNION ALL
    SELECT format('stuck: %s (pid %s) holds the lock %s/%s and has been idle since %s', application_name, pid, classid,
            objid, state_change)
        FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE locktype = 'advisory' AND granted AND state LIKE 'idle%'
            AND state_change < clock_timestamp() - interval '15 s'";

const AT_REST: &str = "
    SELECT format('stuck: %s (pid %s, %s) holds the lock %s/%s at rest', application_name, pid, state, classid, objid) AS text
        FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted
    UNION ALL
    SELECT format('%s (pid %s) is in a transaction at rest: %s', application_name, pid, state)
        FROM pg_stat_activity
        WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND xact_start IS NOT NULL";

#[derive(QueryableByName)]
struct Line {
    #[diesel(sql_type = Text)]
    text: String,
}

/// Checks every few milliseconds while faults are injected. Returns how many checks succeeded, because servers stop and
/// start meanwhile.
pub(super) fn watch(primary: &Primary, log: &EventLog, done: &AtomicBool) -> u64 {
    let mut looked = 0;
    let mut reported = Vec::new();
    while !done.load(Ordering::Relaxed) {
        let Ok(mut conn) = PgConnection::establish(&primary.url()) else {
            thread::sleep(PAUSE);
            continue;
        };
        while let Ok(lines) = diesel::sql_query(MUST_BE_EMPTY).load::<Line>(&mut conn) {
            looked += 1;
            for Line { text } in lines {
                if !reported.contains(&text) {
                    log.violation(format!("the server: {text}"));
                    reported.push(text);
                }
            }
            if done.load(Ordering::Relaxed) {
                break;
            }
            thread::sleep(PAUSE);
        }
    }
    looked
}

/// The locks and transactions that are left when all workers rest.
pub(super) fn at_rest(primary: &Primary) -> Vec<String> {
    let mut conn = connect(primary);
    let end = Instant::now() + SETTLING;
    loop {
        let lines: Vec<Line> = diesel::sql_query(AT_REST)
            .load(&mut conn)
            .expect("the server replies");
        if lines.is_empty() || Instant::now() > end {
            return lines.into_iter().map(|line| line.text).collect();
        }
        thread::sleep(PAUSE);
    }
}

/// Claims every slot after all timeouts have passed, and returns what is missing.
pub(super) fn missing_slots(primary: &Primary) -> Vec<String> {
    let mut conn = connect(primary);
    let longest = SEMAPHORES.iter().map(|semaphore| semaphore.timeout()).max();
    thread::sleep(longest.unwrap_or_default() + Duration::from_millis(100));
    let mut missing = Vec::new();
    for semaphore in SEMAPHORES.iter().chain([&BY_THE_ARTICLE]) {
        let claimed = (0..semaphore.slots())
            .map_while(|_| match semaphore.claim_on(&mut conn) {
                Ok(Admission::Admitted(claim)) => Some(claim),
                _ => None,
            })
            .count();
        if claimed as u32 != semaphore.slots() {
            missing.push(format!(
                "only {claimed} slots of {:?} came back",
                semaphore.service()
            ));
        }
    }
    missing
}

/// Attempts every throttle after its interval has passed, and returns the denials.
pub(super) fn closed_throttles(primary: &Primary) -> Vec<String> {
    use diesel_interlock::{Decision, DeclaredResources, Throttle};
    let mut conn = connect(primary);
    crate::subjects::Resource::ALL
        .iter()
        .filter_map(|resource| {
            thread::sleep(resource.interval());
            match Throttle::of(*resource)
                .details("the observer")
                .attempt_on(&mut conn)
            {
                Ok(Decision::Granted(_)) => None,
                other => Some(format!("{resource:?} is due, and returns {other:?}")),
            }
        })
        .collect()
}

/// Spends the burst of every key of a rate limit once it is full again, and returns what is limited nevertheless.
pub(super) fn closed_rate_limits(primary: &Primary) -> Vec<String> {
    let mut conn = connect(primary);
    let mut closed = Vec::new();
    for limit in [&CALLS, &PAID, &LOGIN, &DEPLOYED[0]] {
        for key in LIMITED_KEYS {
            let limit = limit.key(key);
            let state = limit.peek_on(&mut conn).expect("the server replies");
            thread::sleep(state.full_in);
            let check = limit.cost(state.quota.burst).check_on(&mut conn);
            if !matches!(check, Ok(Check::Allowed(_))) {
                closed.push(format!(
                    "rate limit {:?} {key:?} was full again after {:?}, and returns {check:?}",
                    limit.name(),
                    state.full_in
                ));
            }
        }
    }
    closed
}

/// Reads the records of the server.
pub(super) fn truth(primary: &Primary) -> QueryResult<Truth> {
    let mut conn = connect(primary);
    let sections: Vec<SectionRow> =
        diesel::sql_query("SELECT lock, exclusive, pid, began, ended, token FROM faults.section")
            .load(&mut conn)?;
    let writes: Vec<WriteRow> =
        diesel::sql_query("SELECT id, lock, token FROM faults.fenced_write").load(&mut conn)?;
    let bookings: Vec<BookingRow> =
        diesel::sql_query("SELECT lock, number, began, ended FROM faults.booking")
            .load(&mut conn)?;
    let grants: Vec<GrantRow> =
        diesel::sql_query("SELECT resource, key, at FROM faults.granted").load(&mut conn)?;
    let changes: Vec<ChangeRow> =
        diesel::sql_query("SELECT id, name, key, at, deleted FROM faults.limit_change")
            .load(&mut conn)?;
    let requests: Vec<RequestRow> = diesel::sql_query(
        "SELECT id, service, slot, faults.micros(created_at) AS created, \
         faults.micros(expires_at) AS expires, faults.micros(completed_at) AS completed \
         FROM resource_control.service_request",
    )
    .load(&mut conn)?;
    Ok(Truth {
        sections: sections.into_iter().map(Section::from).collect(),
        writes: writes.into_iter().map(Write::from).collect(),
        bookings: bookings.into_iter().map(Booking::from).collect(),
        grants: grants.into_iter().map(Grant::from).collect(),
        changes: changes.into_iter().map(LimitChange::from).collect(),
        requests: requests.into_iter().map(Request::from).collect(),
    })
}

fn connect(primary: &Primary) -> PgConnection {
    PgConnection::establish(&primary.url()).expect("the server runs")
}

/// Installs the schema of the crate and the tables of the campaign.
pub(super) fn install(primary: &Primary) -> Result<(), Error> {
    use diesel::connection::SimpleConnection;
    let mut conn = connect(primary);
    diesel_interlock::migrations::install(&mut conn)?;
    let _ = diesel_interlock::sync::<crate::subjects::Resource>(&mut conn)?;
    conn.batch_execute(include_str!("../setup.sql"))?;
    Ok(())
}

/// Declares a row of a query and its conversion into a plain value.
macro_rules! rows {
    ($($row:ident => $value:ident { $($field:ident: $sql:ty => $rust:ty),* $(,)? })*) => {$(
        #[derive(QueryableByName)]
        struct $row {
            $(#[diesel(sql_type = $sql)] $field: $rust,)*
        }

        impl From<$row> for $value {
            fn from(row: $row) -> Self {
                Self { $($field: row.$field,)* }
            }
        }
    )*};
}

rows! {
    SectionRow => Section {
        lock: Integer => i32, exclusive: Bool => bool, pid: Integer => i32, began: BigInt => i64, ended: BigInt => i64,
        token: Nullable<BigInt> => Option<i64>,
    }
    WriteRow => Write { id: BigInt => i64, lock: Integer => i32, token: BigInt => i64 }
    BookingRow => Booking { lock: Integer => i32, number: BigInt => i64, began: BigInt => i64, ended: BigInt => i64 }
    GrantRow => Grant { resource: Text => String, key: Text => String, at: BigInt => i64 }
    ChangeRow => LimitChange {
        id: BigInt => i64, name: Text => String, key: Text => String, at: BigInt => i64, deleted: Bool => bool,
    }
    RequestRow => Request {
        id: BigInt => i64, service: Text => String, slot: SmallInt => i16, created: BigInt => i64,
        expires: BigInt => i64, completed: Nullable<BigInt> => Option<i64>,
    }
}
