//! The checks whether the histories keep the promises of the crate. They take plain data, return sentences, and use no
//! database.

mod fences;
mod locks;
mod losses;
mod lost;
mod rate_limits;
mod semaphores;
mod throttles;
mod watches;
pub(crate) mod windows;

use std::collections::{BTreeMap, BTreeSet};

pub(crate) use self::lost::Losses;
use crate::clock::Micros;
use crate::record::Record;

/// The records of the workers, and the faults of the server.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) told: Vec<Told>,
    /// The workers that connect to the server directly.
    pub(crate) direct: BTreeSet<usize>,
    /// By pid.
    pub(crate) deaths: BTreeMap<i32, Vec<Death>>,
    /// When the end of a session was requested, by pid, whether the end was observed or not.
    pub(crate) condemned: BTreeMap<i32, Vec<Micros>>,
    /// When settings were changed by a reload, and when they were changed back.
    pub(crate) reloads: Vec<Reload>,
    pub(crate) outages: Vec<Outage>,
    pub(crate) failovers: Vec<Failover>,
}

/// A record of a worker, and when it arrived, which is later than the event.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) worker: usize,
    pub(crate) record: Record,
    pub(crate) at: Micros,
}

/// A session that was ended, with a time when it certainly lived and a time when it certainly had ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Death {
    pub(crate) sent: Micros,
    pub(crate) gone: Micros,
}

/// An end of all sessions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outage {
    pub(crate) began: Micros,
    pub(crate) stopped: Micros,
}

/// A setting of the server that a reload changed for a while.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reload {
    pub(crate) setting: &'static str,
    pub(crate) began: Micros,
    pub(crate) ended: Micros,
}

/// A failover. The old primary may still have replied between the two times of its crash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failover {
    /// Results of before this time have reached the standby, even an asynchronous one.
    pub(crate) followed: Micros,
    pub(crate) began: Micros,
    pub(crate) stopped: Micros,
    pub(crate) synchronous: bool,
}

/// The records of the server.
#[derive(Debug, Default)]
pub(crate) struct Truth {
    pub(crate) sections: Vec<Section>,
    pub(crate) writes: Vec<Write>,
    pub(crate) bookings: Vec<Booking>,
    pub(crate) grants: Vec<Grant>,
    pub(crate) changes: Vec<LimitChange>,
    pub(crate) requests: Vec<Request>,
}

/// A section in which a session certainly held a session lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Section {
    pub(crate) lock: i32,
    pub(crate) exclusive: bool,
    pub(crate) pid: i32,
    pub(crate) began: Micros,
    pub(crate) ended: Micros,
    pub(crate) token: Option<i64>,
}

/// A write behind the fence of a lock. Ids are in the order of the commits, because transactions pass a fence one at a
/// time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Write {
    pub(crate) id: i64,
    pub(crate) lock: i32,
    pub(crate) token: i64,
}

/// A section in which a committed transaction certainly held a transaction lock, and the number that it gave.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Booking {
    pub(crate) lock: i32,
    pub(crate) number: i64,
    pub(crate) began: Micros,
    pub(crate) ended: Micros,
}

/// A grant of a throttle. The key is empty for a throttle without one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Grant {
    pub(crate) resource: String,
    pub(crate) key: String,
    pub(crate) at: Micros,
}

/// A change of a key of a rate limit. Ids are in the order of the changes of a key.
#[derive(Debug, Clone)]
pub(crate) struct LimitChange {
    pub(crate) id: i64,
    pub(crate) name: String,
    pub(crate) key: String,
    pub(crate) at: Micros,
    /// Whether the key was reset or pruned.
    pub(crate) deleted: bool,
}

/// A request to a service.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) id: i64,
    pub(crate) service: String,
    pub(crate) slot: i16,
    pub(crate) created: Micros,
    pub(crate) expires: Micros,
    pub(crate) completed: Option<Micros>,
}

/// The results of the checks.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) violations: Vec<String>,
    /// The losses of asynchronous failovers and their consequences, by kind.
    pub(crate) losses: Losses,
    /// The number of examined records by kind.
    pub(crate) examined: BTreeMap<&'static str, usize>,
}

/// Examines everything.
pub(crate) fn examine(history: &History, truth: &Truth) -> Findings {
    let mut findings = Findings::default();
    let lost = lost::find(history, truth, &mut findings);
    locks::examine(history, truth, &mut findings);
    losses::examine(history, &mut findings);
    watches::examine(history, &mut findings);
    fences::examine(history, truth, &mut findings);
    throttles::examine(history, truth, &lost, &mut findings);
    rate_limits::examine(history, truth, &mut findings);
    semaphores::examine(history, truth, &lost, &mut findings);
    findings
}

impl History {
    /// Whether the session that acquired the lock at `acquired` had ended before `at`.
    fn was_dead(&self, pid: i32, acquired: Micros, at: Micros) -> bool {
        let died = self.deaths.get(&pid).into_iter().flatten();
        died.into_iter()
            .any(|death| acquired < death.sent && death.gone < at)
            || self
                .outages
                .iter()
                .any(|outage| acquired < outage.began && outage.stopped < at)
    }
}

impl Findings {
    fn violation(&mut self, text: String) {
        self.violations.push(text);
    }

    fn examined(&mut self, what: &'static str, number: usize) {
        *self.examined.entry(what).or_default() += number;
    }
}
