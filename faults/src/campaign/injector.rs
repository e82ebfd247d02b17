//! The faults that are inflicted from outside, four kinds of them at a time.

mod network;
mod processes;
mod server;
mod sessions;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::crew::Crew;
use super::ledger::Ledger;
use super::site::Site;
use crate::random::Random;

/// What an injector needs.
#[derive(Debug)]
struct Means<'a> {
    site: &'a Site,
    crew: &'a Crew,
    ledger: Arc<Ledger>,
    random: Random,
    end: Instant,
}

/// Injects faults for a while. Afterwards everything runs again.
pub(super) fn inject(
    site: &Site,
    crew: &Crew,
    ledger: &Arc<Ledger>,
    mut random: Random,
    duration: Duration,
) {
    let end = Instant::now() + duration;
    let mut means = || Means {
        site,
        crew,
        ledger: Arc::clone(ledger),
        random: random.fork(),
        end,
    };
    let injectors: [(Means<'_>, fn(Means<'_>)); 4] = [
        (means(), processes::inject),
        (means(), sessions::inject),
        (means(), network::inject),
        (means(), server::inject),
    ];
    thread::scope(|scope| {
        for (means, inject) in injectors {
            scope.spawn(move || inject(means));
        }
    });
}

impl Means<'_> {
    /// All kinds equally often, in an order that nobody knows, until the time is up.
    fn rounds<K: Copy>(mut self, kinds: &[K], mut inflict: impl FnMut(&mut Self, K)) {
        'rounds: loop {
            for kind in self.random.shuffled(kinds) {
                if Instant::now() >= self.end {
                    break 'rounds;
                }
                inflict(&mut self, kind);
            }
        }
    }

    fn pause(&mut self, from: u64, to: u64) {
        thread::sleep(self.random.millis(from, to));
    }

    fn any_worker(&mut self) -> usize {
        let numbers: Vec<usize> = self.crew.numbers().collect();
        self.random.pick(&numbers).copied().unwrap_or_default()
    }
}
