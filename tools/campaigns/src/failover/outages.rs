//! How long each failover kept the processes from working.

use super::{Round, half_of};
use crate::record::{Faults, Records};
use crate::worker::{Campaign, pool_of};

/// How long an outage may outlast its round, in microseconds.
const AFTERMATH: i64 = 6_000_000;

/// Prints, for each round and process, the longest time between two replies of the database.
pub(super) fn print(rounds: &[Round], records: &Records, faults: &Faults) {
    println!("the longest time without a reply, in seconds:");
    for round in rounds {
        let (from, to) = (round.began, round.ended + AFTERMATH);
        let outage = |number: usize| {
            let pool = pool_of(number);
            let way = half_of(number) + 1;
            let mut away = faults.away.iter();
            let was_disturbed = away.any(|away| away.0 == number && away.1 < to && away.2 > from);
            let probes = records.probes.get(&number).map_or(&[][..], Vec::as_slice);
            let pauses = probes
                .windows(2)
                .filter(|two| two[1].1 > from && two[0].1 < to);
            let longest = pauses.map(|two| two[1].1 - two[0].1).max();
            let longest = longest.map_or("?".to_owned(), |longest| {
                format!("{:.1}", longest as f64 / 1e6)
            });
            let mark = if was_disturbed { " (disturbed)" } else { "" };
            format!("{pool} on way {way} {longest}{mark}")
        };
        let outages: Vec<_> = (0..Campaign::Failover.processes()).map(outage).collect();
        println!("  {:?}: {}", round.kind, outages.join(", "));
    }
}
