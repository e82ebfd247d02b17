//! The injectors of the faults. They work at the same time, and each injects the kind that was injected least often so far.

mod copies;
mod mishaps;
mod neighbour;
mod network;
mod poolers;
mod processes;
mod server;
mod sessions;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::crew::Crew;
use super::ledger::Ledger;
use super::site::Site;
use crate::chance::Chance;
use crate::fault::Fault;

/// The means of an injector.
#[derive(Debug)]
struct Means<'a> {
    site: &'a Site,
    crew: &'a Crew,
    ledger: Arc<Ledger>,
    random: Rng,
    /// When the next one is due.
    due: Instant,
    end: Instant,
}

/// Injects faults for `duration`. Afterwards every server, pooler and worker runs again.
pub(super) fn inject(
    site: &Site,
    crew: &Crew,
    ledger: &Arc<Ledger>,
    mut random: Rng,
    duration: Duration,
) {
    let end = Instant::now() + duration;
    let mut means = || Means {
        site,
        crew,
        ledger: Arc::clone(ledger),
        random: random.fork(),
        due: Instant::now(),
        end,
    };
    let injectors: [(Means<'_>, fn(Means<'_>)); 8] = [
        (means(), processes::inject),
        (means(), sessions::inject),
        (means(), network::inject),
        (means(), server::inject),
        (means(), poolers::inject),
        (means(), neighbour::inject),
        (means(), copies::inject),
        (means(), mishaps::inject),
    ];
    thread::scope(|scope| {
        for (means, inject) in injectors {
            scope.spawn(move || inject(means));
        }
    });
}

impl Means<'_> {
    /// Injects the scarcest of these kinds repeatedly until the time is over.
    fn scarcest_first(mut self, kinds: &[Fault], mut inflict: impl FnMut(&mut Self, Fault)) {
        while Instant::now() < self.end {
            let kind = self.ledger.scarcest(kinds, &mut self.random);
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
        let numbers: Vec<usize> = self.crew.numbers().collect();
        self.random.choice(&numbers).copied().unwrap_or_default()
    }
}
