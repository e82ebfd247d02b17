//! Attempts and passing time, in any order, have the decisions of a model.
//!
//! Time passes in hours, by rewriting the rows; the minutes at most that the test takes are no hour.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel_interlock::{Decision, DenialReason, ResourceLabel, Throttle, testing};
use proptest::collection::vec;
use proptest::prelude::*;

use super::hold;
use crate::support::{attempt, number, truth};
use crate::throttles::{age, database};

const HOUR: Duration = Duration::from_secs(3600);

/// What is throttled: the resource, or one of its keys.
type Subject = Option<u8>;

#[derive(Debug, Clone)]
enum Step {
    Attempt(Subject),
    /// By the function of the article, which returns a boolean.
    Lock,
    Pass(u32),
    Interval(u32),
    MakeDue(Subject),
    Close,
    Prune(i32),
}

fn step() -> impl Strategy<Value = Step> {
    let subject = || proptest::option::weighted(0.6, 0_u8..3);
    prop_oneof![
        8 => subject().prop_map(Step::Attempt),
        2 => Just(Step::Lock),
        5 => (1_u32..5).prop_map(Step::Pass),
        1 => (1_u32..5).prop_map(Step::Interval),
        1 => subject().prop_map(Step::MakeDue),
        1 => Just(Step::Close),
        1 => (1..4).prop_map(Step::Prune),
    ]
}

struct Taken {
    by: String,
    /// `None` if it was closed by hand.
    hours_ago: Option<u32>,
}

struct Model {
    interval: u32,
    taken: HashMap<Subject, Taken>,
}

impl Model {
    /// In how many hours it is due; `None` if it is.
    fn due_in(&self, subject: Subject) -> Option<u32> {
        match self.taken.get(&subject)?.hours_ago {
            None => Some(self.interval),
            Some(ago) => Some(self.interval - ago.min(self.interval)).filter(|hours| *hours > 0),
        }
    }

    fn take(&mut self, subject: Subject, by: String) {
        let hours_ago = Some(0);
        self.taken.insert(subject, Taken { by, hours_ago });
    }
}

#[test]
fn decisions_are_those_of_a_model() {
    let database = database();
    let conn = RefCell::new(database.connect());
    hold(60, (1_u32..5, vec(step(), 1..25)), |(interval, steps)| {
        let conn = &mut *conn.borrow_mut();
        let mut model = Model {
            interval,
            taken: HashMap::new(),
        };
        start(conn, interval);
        for (number, step) in steps.into_iter().enumerate() {
            take(conn, &mut model, step, format!("step {number}"));
        }
    });
}

fn start(conn: &mut PgConnection, interval: u32) {
    conn.batch_execute(&format!(
        "DELETE FROM resource_control.throttled_key; \
         UPDATE resource_control.throttled_resource SET throttle_interval = '{interval} hours', \
         last_locked = '-infinity', last_locker_details = ''"
    ))
    .unwrap();
}

fn throttle(subject: Subject) -> Throttle<ResourceLabel> {
    let throttle = Throttle::of(ResourceLabel("cache rebuild".into()));
    match subject {
        None => throttle,
        Some(key) => throttle.key(key),
    }
}

fn take(conn: &mut PgConnection, model: &mut Model, step: Step, by: String) {
    match step {
        Step::Attempt(subject) => attempt_both(conn, model, subject, by),
        Step::Lock => {
            let call = format!("resource_control.lock_throttled_resource('cache rebuild', '{by}')");
            let due = model.due_in(None).is_none();
            assert_eq!(truth(conn, &call), due);
            if due {
                model.take(None, by);
            }
        }
        Step::Pass(hours) => {
            age(conn, &format!("{hours} hours"));
            for taken in model.taken.values_mut() {
                taken.hours_ago = taken.hours_ago.map(|ago| ago + hours);
            }
        }
        Step::Interval(hours) => {
            model.interval = hours;
            conn.batch_execute(&format!(
                "UPDATE resource_control.throttled_resource SET throttle_interval = '{hours} hours'"
            ))
            .unwrap();
        }
        Step::MakeDue(subject) => {
            testing::make_due(conn, &throttle(subject)).unwrap();
            if let Some(hours) = model.due_in(subject) {
                let interval = model.interval;
                let taken = model.taken.get_mut(&subject).unwrap();
                taken.hours_ago = Some(taken.hours_ago.map_or(interval, |ago| ago + hours));
            }
        }
        Step::Close => {
            conn.batch_execute(
                "UPDATE resource_control.throttled_resource \
                 SET last_locked = 'infinity', last_locker_details = 'closed' \
                 WHERE resource_id = 'cache rebuild'",
            )
            .unwrap();
            let by = "closed".to_owned();
            let hours_ago = None;
            model.taken.insert(None, Taken { by, hours_ago });
        }
        Step::Prune(batch) => {
            let call = format!("resource_control.prune_throttled_keys({batch})");
            let due = (0..3).filter(|key| {
                model.taken.contains_key(&Some(*key)) && model.due_in(Some(*key)).is_none()
            });
            assert_eq!(number(conn, &call), (due.count() as i64).min(batch.into()));
            // Those that were pruned are as if never taken, and those that were not are due.
            let due = |subject: &Subject| subject.is_some() && model.due_in(*subject).is_none();
            let gone: Vec<_> = model.taken.keys().copied().filter(due).collect();
            for key in gone {
                let row = format!(
                    "(SELECT count(*) FROM resource_control.throttled_key WHERE key = '{}')",
                    key.unwrap()
                );
                if number(conn, &row) == 0 {
                    model.taken.remove(&key);
                }
            }
        }
    }
}

/// Attempts it in the database and in the model, and compares.
fn attempt_both(conn: &mut PgConnection, model: &mut Model, subject: Subject, by: String) {
    let interval = HOUR * model.interval;
    let decision = attempt(conn, &throttle(subject), by.clone());
    match (decision, model.due_in(subject)) {
        (Decision::Granted(grant), None) => {
            assert_eq!((grant.until - grant.granted_at).to_std(), Ok(interval));
            model.take(subject, by);
        }
        (Decision::Denied(denial), Some(hours)) => {
            let taken = &model.taken[&subject];
            assert_eq!(denial.reason, DenialReason::TooSoon);
            assert_eq!(denial.holder.as_deref(), Some(&*taken.by));
            let due_in = HOUR * hours;
            assert!(denial.retry_after <= due_in && denial.retry_after + HOUR > due_in);
            let (secs, nanos) = (
                denial.retry_after.as_secs(),
                denial.retry_after.subsec_nanos(),
            );
            assert_eq!(denial.retry_after_secs(), secs + u64::from(nanos > 0));
            match taken.hours_ago {
                None => assert_eq!((denial.held_since, denial.next_at), (None, None)),
                Some(_) => {
                    let between = denial.next_at.unwrap() - denial.held_since.unwrap();
                    assert_eq!(between.to_std(), Ok(interval));
                }
            }
        }
        (decision, due_in) => panic!("{decision:?}, and it is due in {due_in:?} hours"),
    }
}
