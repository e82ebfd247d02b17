//! The injectors of the faults. They work at the same time, and each injects the kind that was injected least often so far.

mod copies;
mod network;
mod poolers;
mod processes;
mod second_server;
mod self_inflicted;
mod server;
mod sessions;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::event_log::EventLog;
use super::primary::Primary;
use super::workers::Workers;
use crate::chance::Chance;
use crate::fault::Fault;

/// One injector: what it acts on, and the source of its random choices.
#[derive(Debug)]
struct Injector<'a> {
    primary: &'a Primary,
    workers: &'a Workers,
    log: Arc<EventLog>,
    random: Rng,
    /// When the next one is due.
    due: Instant,
    end: Instant,
}

/// Injects faults for `duration`. Afterwards every server, pooler and worker runs again.
pub(super) fn inject(
    primary: &Primary,
    workers: &Workers,
    log: &Arc<EventLog>,
    mut random: Rng,
    duration: Duration,
) {
    let end = Instant::now() + duration;
    let mut injector = || Injector {
        primary,
        workers,
        log: Arc::clone(log),
        random: random.fork(),
        due: Instant::now(),
        end,
    };
    let injectors: [(Injector<'_>, fn(Injector<'_>)); 8] = [
        (injector(), processes::inject),
        (injector(), sessions::inject),
        (injector(), network::inject),
        (injector(), server::inject),
        (injector(), poolers::inject),
        (injector(), second_server::inject),
        (injector(), copies::inject),
        (injector(), self_inflicted::inject),
    ];
    thread::scope(|scope| {
        for (injector, inject) in injectors {
            scope.spawn(move || inject(injector));
        }
    });
}

impl Injector<'_> {
    /// Injects the scarcest of these kinds repeatedly until the time is over.
    fn scarcest_first(mut self, kinds: &[Fault], mut inflict: impl FnMut(&mut Self, Fault)) {
        while Instant::now() < self.end {
            let kind = self.log.scarcest(kinds, &mut self.random);
            inflict(&mut self, kind);
        }
    }

    /// Waits for the next turn. There is one per `each` milliseconds on average, and a late injector does not wait.
    fn await_turn(&mut self, each: u64) {
        self.due += self.random.millis(0, 2 * each);
        thread::sleep(self.due.saturating_duration_since(Instant::now()));
    }

    fn pause(&mut self, from: u64, to: u64) {
        thread::sleep(self.random.millis(from, to));
    }

    fn any_worker(&mut self) -> usize {
        let numbers: Vec<usize> = self.workers.numbers().collect();
        self.random.choice(&numbers).copied().unwrap_or_default()
    }
}
