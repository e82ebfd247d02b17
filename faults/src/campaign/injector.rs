//! What inflicts the faults: some at a time, and of each sort always the kind that there was least of.

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

/// What an injector needs.
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

/// Injects faults for a while. Afterwards everything runs again.
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
    /// Inflicts the scarcest of these kinds, again and again, until the time is up.
    fn scarcest_first(mut self, kinds: &[Fault], mut inflict: impl FnMut(&mut Self, Fault)) {
        while Instant::now() < self.end {
            let kind = self.ledger.scarcest(kinds, &mut self.random);
            inflict(&mut self, kind);
        }
    }

    /// Waits for the next turn, of which there is one in so many milliseconds on the average. Who is late does not wait.
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
