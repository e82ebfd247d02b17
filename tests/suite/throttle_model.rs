//! A property test: any sequence of attempts, calls of the function, prunes and passing hours has
//! the decisions of a model.
//!
//! Hours pass by rewriting the rows. The test itself takes less than an hour, so its own time does
//! not count.

use std::collections::HashMap;
use std::time::Duration;

use diesel::PgConnection;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::throttles::{Resource, declared};
use crate::half::{Decision, PgPool, Throttle, prune, wait};
use crate::support::{run, truth};

const HOUR: Duration = Duration::from_secs(3600);

/// Whether the throttle is a resource, and its key.
type Subject = (bool, Option<u8>);

#[derive(Debug, Clone)]
enum Step {
    Attempt(Subject),
    /// An attempt for the resource by the function `lock_throttled_resource`.
    Lock,
    Pass(u32),
    /// A new interval in hours, for the resource (`true`) or the named throttle.
    Interval(bool, u32),
    Prune,
}

fn step() -> impl Strategy<Value = Step> {
    let subject = (any::<bool>(), proptest::option::weighted(0.6, 0_u8..2));
    prop_oneof![
        8 => subject.prop_map(Step::Attempt),
        2 => Just(Step::Lock),
        5 => (1_u32..5).prop_map(Step::Pass),
        1 => (any::<bool>(), 1_u32..5).prop_map(|(of, hours)| Step::Interval(of, hours)),
        1 => Just(Step::Prune),
    ]
}

#[derive(Debug)]
struct Last {
    by: String,
    hours_ago: u32,
    /// The interval at the time of the grant.
    interval: u32,
}

struct Model {
    /// The intervals of the named throttle and of the resource.
    intervals: [u32; 2],
    last: HashMap<Subject, Last>,
}

impl Model {
    fn interval(&self, subject: Subject) -> u32 {
        self.intervals[usize::from(subject.0)]
    }

    /// In how many hours the throttle is due; 0 if it is due now.
    fn due_in(&self, subject: Subject) -> u32 {
        let interval = self.interval(subject);
        let last = self.last.get(&subject);
        last.map_or(0, |last| interval.saturating_sub(last.hours_ago))
    }

    fn grant(&mut self, subject: Subject, by: String) {
        let interval = self.interval(subject);
        let last = Last {
            by,
            hours_ago: 0,
            interval,
        };
        self.last.insert(subject, last);
    }

    /// Forgets each key that has been due for as long as its interval, which for a named throttle
    /// is that of its last grant. Returns how many it has forgotten.
    fn prune(&mut self) -> u64 {
        let before = self.last.len();
        let of_resource = self.intervals[1];
        self.last.retain(|(is_resource, key), last| {
            let interval = match is_resource {
                true => of_resource,
                false => last.interval,
            };
            (*is_resource && key.is_none()) || last.hours_ago < 2 * interval
        });
        (before - self.last.len()) as u64
    }
}

#[test]
fn decisions_are_those_of_a_model() {
    let (database, pool) = declared();
    let conn = std::cell::RefCell::new(database.connect());
    let config = Config {
        cases: 60,
        failure_persistence: None,
        ..Config::default()
    };
    let input = ([1_u32..5, 1_u32..5], vec(step(), 1..30));
    let ran = TestRunner::new(config).run(&input, |(intervals, steps)| {
        let conn = &mut *conn.borrow_mut();
        run(
            conn,
            "DELETE FROM resource_control.throttle;
            UPDATE resource_control.throttled_resource SET last_locked = '-infinity', last_locker_details = ''",
        );
        let mut model = Model {
            intervals,
            last: HashMap::new(),
        };
        set_interval(conn, intervals[1]);
        for (number, step) in steps.into_iter().enumerate() {
            take(conn, &pool, &mut model, step, format!("step {number}"));
        }
        Ok(())
    });
    if let Err(error) = ran {
        panic!("{error}");
    }
}

fn set_interval(conn: &mut PgConnection, hours: u32) {
    let set = "UPDATE resource_control.throttled_resource SET throttle_interval";
    run(conn, &format!("{set} = '{hours} hours'"));
}

fn take(conn: &mut PgConnection, pool: &PgPool, model: &mut Model, step: Step, by: String) {
    match step {
        Step::Attempt(subject) => attempt_both(pool, model, subject, by),
        Step::Lock => {
            let call = format!("resource_control.lock_throttled_resource('newsletter', '{by}')");
            let subject = (true, None);
            let is_due = model.due_in(subject) == 0;
            assert_eq!(truth(conn, &call), is_due);
            if is_due {
                model.grant(subject, by);
            }
        }
        Step::Pass(hours) => {
            run(
                conn,
                &format!(
                    "UPDATE resource_control.throttle SET last_granted = last_granted - interval '{hours} hours';
                    UPDATE resource_control.throttled_resource SET last_locked = last_locked - interval '{hours} hours'"
                ),
            );
            for last in model.last.values_mut() {
                last.hours_ago += hours;
            }
        }
        Step::Interval(is_resource, hours) => {
            model.intervals[usize::from(is_resource)] = hours;
            if is_resource {
                set_interval(conn, hours);
            }
        }
        Step::Prune => assert_eq!(wait(prune::throttles(pool)).unwrap(), model.prune()),
    }
}

/// Attempts the throttle in the database and in the model, and compares the decisions.
fn attempt_both(pool: &PgPool, model: &mut Model, subject: Subject, by: String) {
    let interval = HOUR * model.interval(subject);
    let (is_resource, key) = subject;
    let mut throttle = match is_resource {
        true => Throttle::of(Resource::Newsletter),
        false => Throttle::named("newsletter", interval),
    };
    if let Some(key) = key {
        throttle = throttle.key(key);
    }
    let decision = wait(throttle.details(by.clone()).attempt(pool)).unwrap();
    match (decision, model.due_in(subject)) {
        (Decision::Granted(granted), 0) => {
            assert_eq!(granted.due_in, interval);
            model.grant(subject, by);
        }
        (Decision::Denied(denied), hours) if hours > 0 => {
            assert_eq!(denied.last.unwrap().by, model.last[&subject].by);
            let due_in = HOUR * hours;
            assert!(denied.retry_after <= due_in && denied.retry_after + HOUR > due_in);
        }
        (decision, hours) => panic!("{decision:?} of {subject:?}, and it is due in {hours} hours"),
    }
}
