//! Claims, completions, renewals, passing time and pruning, in any order and with any number of slots, do
//! what a model does.
//!
//! Time passes in hours, by rewriting the rows; the minutes at most that the test takes are no hour.

use std::cell::RefCell;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::functions::prune_service_requests;
use diesel_interlock::schema::resource_control::service_request;
use diesel_interlock::{Admission, Semaphore, testing};
use proptest::collection::vec;
use proptest::prelude::*;

use super::hold;
use crate::semaphores::database;

const HOUR: Duration = Duration::from_secs(3600);
const SERVICES: [&str; 2] = ["geocoder", "mailer"];

#[derive(Debug, Clone)]
enum Step {
    Claim {
        service: usize,
        slots: u32,
        hours: u32,
    },
    /// Of the requests so far, this one.
    Complete(usize),
    Renew {
        which: usize,
        hours: u32,
    },
    Pass(i64),
    Expire(usize),
    Prune {
        hours: i64,
        batch: i32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let claim = (0..2_usize, 1_u32..5, 1_u32..4);
    prop_oneof![
        8 => claim.prop_map(|(service, slots, hours)| Step::Claim { service, slots, hours }),
        4 => (0..20_usize).prop_map(Step::Complete),
        2 => (0..20_usize, 1_u32..4).prop_map(|(which, hours)| Step::Renew { which, hours }),
        3 => (1_i64..3).prop_map(Step::Pass),
        1 => (0..2_usize).prop_map(Step::Expire),
        1 => (0_i64..4, 1..5).prop_map(|(hours, batch)| Step::Prune { hours, batch }),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Completed,
    TimedOut,
}

#[derive(Debug, Clone)]
struct Request {
    id: i64,
    service: usize,
    slot: i16,
    /// In hours from the beginning.
    expires: i64,
    end: End,
    ended: i64,
}

#[derive(Default)]
struct Model {
    now: i64,
    requests: Vec<Request>,
    /// The id of the request that was made last.
    last: i64,
}

impl Model {
    fn in_flight(&self, service: usize) -> impl Iterator<Item = &Request> {
        self.requests.iter().filter(move |request| {
            request.service == service && request.end == End::Open && request.expires > self.now
        })
    }

    /// The slots that a claim may take: of those below a number that was lowered, the lowest.
    fn free(&self, service: usize, slots: u32) -> Vec<i16> {
        let slots = slots as i16;
        let taken: Vec<i16> = self.in_flight(service).map(|one| one.slot).collect();
        let missing = usize::try_from(slots).unwrap().saturating_sub(taken.len());
        let mut free: Vec<i16> = (0..slots).filter(|slot| !taken.contains(slot)).collect();
        free.truncate(missing);
        free
    }

    fn is_overdue(&self, request: &Request) -> bool {
        request.end == End::Open && request.expires <= self.now
    }

    fn end(&mut self, at: usize, end: End) {
        self.requests[at].end = end;
        self.requests[at].ended = self.now;
    }
}

#[test]
fn requests_are_those_of_a_model() {
    let database = database();
    requests_are_those_of_the_model(&mut database.connect());
}

#[test]
fn requests_are_those_of_a_model_where_the_newest_requests_are_read_first() {
    let database = database();
    let conn = &mut database.connect();
    // As in a session that noticed an old snapshot.
    conn.batch_execute("SET resource_control.old_snapshot_until = '99999999999'")
        .unwrap();
    requests_are_those_of_the_model(conn);
}

fn requests_are_those_of_the_model(conn: &mut PgConnection) {
    let conn = RefCell::new(conn);
    hold(60, vec(step(), 1..30), |steps| {
        let conn = &mut **conn.borrow_mut();
        diesel::delete(service_request::table)
            .execute(conn)
            .unwrap();
        let mut model = Model::default();
        for step in steps {
            take(conn, &mut model, step);
            assert_eq!(stored(conn), expected(&model));
        }
    });
}

/// Id, slot, completed, timed out.
type Row = (i64, i16, bool, bool);

fn stored(conn: &mut PgConnection) -> Vec<Row> {
    service_request::table
        .order(service_request::id)
        .select((
            service_request::id,
            service_request::slot,
            service_request::completed_at.is_not_null(),
            service_request::timed_out_at.is_not_null(),
        ))
        .load(conn)
        .unwrap()
}

fn expected(model: &Model) -> Vec<Row> {
    let row = |one: &Request| {
        (
            one.id,
            one.slot,
            one.end == End::Completed,
            one.end == End::TimedOut,
        )
    };
    model.requests.iter().map(row).collect()
}

fn semaphore(service: usize, slots: u32, hours: u32) -> Semaphore {
    Semaphore::named(SERVICES[service], slots, HOUR * hours)
}

fn take(conn: &mut PgConnection, model: &mut Model, step: Step) {
    match step {
        Step::Claim {
            service,
            slots,
            hours,
        } => claim(conn, model, service, slots, hours),
        Step::Complete(which) => {
            let Some(request) = model.requests.get(which).cloned() else {
                return;
            };
            let result = semaphore(request.service, 1, 1).complete_on(conn, request.id);
            let open = request.end == End::Open;
            let in_time = request.expires > model.now;
            assert_eq!(result.unwrap(), open && in_time);
            if open {
                let end = if in_time {
                    End::Completed
                } else {
                    End::TimedOut
                };
                model.end(which, end);
            }
        }
        Step::Renew { which, hours } => {
            let Some(request) = model.requests.get(which).cloned() else {
                return;
            };
            let result = semaphore(request.service, 1, hours).renew_on(conn, request.id);
            let renewed = request.end == End::Open && request.expires > model.now;
            assert_eq!(result.unwrap().is_some(), renewed);
            if renewed {
                let expires = request.expires.max(model.now + i64::from(hours));
                model.requests[which].expires = expires;
            }
        }
        Step::Pass(hours) => {
            model.now += hours;
            conn.batch_execute(&format!(
                "UPDATE resource_control.service_request SET \
                 created_at = created_at - interval '{hours} hours', \
                 expires_at = expires_at - interval '{hours} hours', \
                 completed_at = completed_at - interval '{hours} hours', \
                 timed_out_at = timed_out_at - interval '{hours} hours'"
            ))
            .unwrap();
        }
        Step::Expire(service) => {
            let expired = testing::expire(conn, &semaphore(service, 1, 1)).unwrap();
            assert_eq!(expired, model.in_flight(service).count());
            let now = model.now;
            for request in &mut model.requests {
                if request.service == service && request.end == End::Open {
                    request.expires = request.expires.min(now);
                }
            }
        }
        Step::Prune { hours, batch } => {
            let mut left = batch;
            let now = model.now;
            model.requests.retain(|request| {
                let since = if request.end == End::Open {
                    request.expires
                } else {
                    request.ended
                };
                let goes = left > 0 && now - since >= hours;
                left -= i32::from(goes);
                !goes
            });
            let age = diesel::data_types::PgInterval::from_microseconds(hours * 3_600_000_000);
            let pruned = diesel::select(prune_service_requests(age, batch)).get_result(conn);
            assert_eq!(pruned, Ok(batch - left));
            let overdue: Vec<usize> = (0..model.requests.len())
                .filter(|at| model.is_overdue(&model.requests[*at]))
                .take(usize::try_from(batch).unwrap())
                .collect();
            for at in overdue {
                model.end(at, End::TimedOut);
            }
        }
    }
}

fn claim(conn: &mut PgConnection, model: &mut Model, service: usize, slots: u32, hours: u32) {
    let free = model.free(service, slots);
    match semaphore(service, slots, hours).claim_on(conn).unwrap() {
        Admission::Admitted(claim) => {
            assert!(free.contains(&claim.slot), "{claim:?} of {free:?}");
            assert!(claim.id > model.last, "{claim:?}");
            assert_eq!(
                (claim.expires_at - claim.created_at).to_std(),
                Ok(HOUR * hours)
            );
            let overdue: Vec<usize> = (0..model.requests.len())
                .filter(|at| {
                    let request = &model.requests[*at];
                    request.service == service && model.is_overdue(request)
                })
                .collect();
            // Where a slot was free that nobody has, they may stay as they are.
            let has = |at: &usize| model.requests[*at].slot;
            let nobody_has_one = free
                .iter()
                .any(|slot| overdue.iter().all(|at| has(at) != *slot));
            let needed = !nobody_has_one || overdue.iter().any(|at| has(at) == claim.slot);
            let marked = overdue.iter().any(|at| {
                let id = model.requests[*at].id;
                stored(conn).iter().any(|row| row.0 == id && row.3)
            });
            assert!(marked || overdue.is_empty() || !needed, "{claim:?}");
            for at in overdue.into_iter().filter(|_| marked) {
                model.end(at, End::TimedOut);
            }
            model.last = claim.id;
            model.requests.push(Request {
                id: claim.id,
                service,
                slot: claim.slot,
                expires: model.now + i64::from(hours),
                end: End::Open,
                ended: 0,
            });
        }
        Admission::Full(full) => {
            assert_eq!(free, []);
            let mut expiries: Vec<i64> = model.in_flight(service).map(|one| one.expires).collect();
            expiries.sort_unstable();
            // As many as are too many, and one more.
            let next = expiries[expiries.len() - usize::try_from(slots).unwrap()];
            let next = HOUR * u32::try_from(next - model.now).unwrap();
            assert!(full.retry_after <= next && full.retry_after + HOUR > next);
        }
    }
}
