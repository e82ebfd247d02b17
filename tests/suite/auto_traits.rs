//! What may be sent to other threads and shared with them. The compiler checks it.

use std::time::Duration;

use diesel_interlock::rate_limit::Spent;

use crate::half::{
    Admission, AdvisoryLock, AdvisoryLockGuard, Attempt, Check, Decision, Done, Error, Fence, Full,
    Leader, LocalCheck, LocalRateLimit, LockKey, Once, Permit, Quota, RateLimit, Schedule,
    Semaphore, Stop, Term, Throttle, Tick,
};

fn is_shared<T: Send + Sync + 'static>() {}

fn is_sent<T: Send + 'static>() {}

#[test]
fn types_without_a_connection_can_be_shared_between_threads() {
    is_shared::<AdvisoryLock>();
    is_shared::<Fence>();
    is_shared::<Leader>();
    is_shared::<LocalRateLimit>();
    is_shared::<Once>();
    is_shared::<RateLimit>();
    is_shared::<Schedule>();
    is_shared::<Semaphore>();
    is_shared::<Throttle>();
    is_shared::<Permit>();
    is_shared::<Term>();
    is_shared::<Tick>();
    is_shared::<Stop>();
    is_shared::<LockKey>();
    is_shared::<Quota>();
    is_shared::<(Attempt<()>, Admission<()>, Full, Decision)>();
    is_shared::<(Check, Check<Vec<Spent>>, LocalCheck, Done, Error)>();
}

#[test]
fn guards_can_be_sent_to_other_threads() {
    is_sent::<AdvisoryLockGuard>();
    is_sent::<Attempt<AdvisoryLockGuard>>();
    is_sent::<Admission<Permit>>();
}

#[test]
fn outcomes_can_be_compared_and_cloned() {
    fn is_value<T: std::fmt::Debug + Clone + PartialEq + Eq>() {}
    is_value::<Attempt<()>>();
    is_value::<Admission<()>>();
    is_value::<Decision>();
    is_value::<Check>();
    is_value::<Check<Vec<Spent>>>();
    is_value::<LocalCheck>();
    is_value::<Done>();
    is_value::<crate::half::schedule::RunDue>();
    let quota = Quota::new(100, Duration::from_secs(60)).burst(20);
    assert_eq!(quota.to_string(), "100 per 60s, 20 at once");
    assert_eq!(LockKey::from("nightly"), LockKey::named("nightly"));
}
