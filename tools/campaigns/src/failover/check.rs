//! The invariants of failovers.
//!
//! A round of Patroni loses commits if replication is asynchronous, except a switchover, and has
//! two primaries if a Patroni hangs: see `patroni.rs`.
//!
//! | What | Never, over all rounds | Never, except commits that a round of lost commits has forgotten |
//! |---|---|---|
//! | tokens of locks, permits, leaders and schedules | repeated, or smaller than one that was drawn before | |
//! | a kept permit, a leader, a schedule | two holders once those of the old primary must have noticed the loss | two holders |
//! | a session lock | two holders with one primary | |
//! | slots | | more than N |
//! | a schedule | a tick that did not run | the same attempt of a tick again, after it was done |
//! | `Once` | a key that was done twice in the database | done twice, or acknowledged and not there |
//! | a throttle, a durable limit | | granted too early |
//! | a fence | a smaller token after a larger one | |
//! | pools | away for longer than a few seconds after the switch | |
//! | each kind of work | fewer than `minimum.rs` demands | |
//!
//! Where two primaries live and the commits of the old one are lost, tokens of the old primary may
//! be smaller than those of the new one. They never repeat. A suspended process cannot notice a loss
//! in time, so its overlaps are counted, and are no failure.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::error::Error;
use std::time::Duration;

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use workbench::Endpoint;

use super::{Round, half_of, outages};
use crate::check::{ends, in_database, too_many};
use crate::minimum;
use crate::record::{End, Faults, Held, Records};
use crate::worker::{Campaign, EVERY, QUOTA, SLOTS, TIMEOUT};

/// How late a thread of a busy machine may record that it has noticed a loss.
const MARGIN: i64 = 50_000;
/// How far the standby may lag: commits older than this at the beginning of a round are not lost.
const LAG: i64 = 1_000_000;
/// How soon after the switch every process must have reached the new primary.
const RECOVERY: i64 = 6_000_000;

const LONGEST: Duration = Campaign::Failover.timeout();

struct Checker<'a> {
    rounds: &'a [Round],
    violations: Vec<String>,
    /// Violations that are excused by a lost commit or by two primaries.
    excused: BTreeMap<String, usize>,
}

pub(super) fn all(
    rounds: &[Round],
    records: &Records,
    faults: &Faults,
    database: &Endpoint,
    length: Duration,
) -> Result<(), Box<dyn Error>> {
    let mut checker = Checker {
        rounds,
        violations: Vec::new(),
        excused: BTreeMap::new(),
    };
    checker.tokens(records);
    checker.holders(records);
    checker.ticks(records);
    checker.grants(records);
    checker.once(records, database)?;
    checker.pools(records, faults);
    outages::print(rounds, records, faults);
    if let Err(error) = in_database(database) {
        checker.violations.push(error.to_string());
    }
    // No work is possible while there is no primary.
    let outages: f64 = rounds.iter().map(Round::seconds).sum();
    let time = length.saturating_sub(Duration::from_secs_f64(outages));
    if let Err(error) = minimum::check(Campaign::Failover, records, database, time) {
        checker.violations.push(error.to_string());
    }
    let counts: BTreeMap<_, _> = records.counts.iter().collect();
    for (what, count) in counts {
        println!("{count:6} × {what}");
    }
    println!("excused: {:?}", checker.excused);
    if checker.violations.is_empty() {
        println!(
            "{} rounds, and no invariant was broken: {rounds:?}",
            rounds.len()
        );
        return Ok(());
    }
    let number = checker.violations.len();
    for violation in checker.violations.iter().take(30) {
        println!("VIOLATION {violation}");
    }
    Err(format!("{number} violations in {rounds:?}").into())
}

impl Checker<'_> {
    fn excuse(&mut self, what: &str) {
        *self.excused.entry(what.to_owned()).or_default() += 1;
    }

    /// Whether a commit at this time may be lost.
    fn may_be_lost(&self, at: i64) -> bool {
        let mut rounds = self.rounds.iter();
        rounds.any(|round| {
            round.kind.loses_commits() && (round.began - LAG..round.ended).contains(&at)
        })
    }

    /// Whether two primaries drew tokens at this time, and those of the old one are lost.
    fn may_be_out_of_order(&self, since: i64, until: i64) -> bool {
        let mut rounds = self.rounds.iter();
        rounds.any(|round| {
            let is_lost = round.kind.loses_commits() && round.kind.has_two_primaries();
            is_lost && since < round.ended && until > round.began
        })
    }

    /// Each token is larger than all tokens that were known before it was requested.
    fn tokens(&mut self, records: &Records) {
        let mut tokens = records.tokens.clone();
        // A token is drawn shortly before its holding is recorded. If the process was suspended in
        // between, the record is late, and the time of the draw is unknown.
        let drawn = |held: &Held| match held.was_stopped {
            true => (i64::MIN, i64::MAX, held.token),
            false => (held.from, held.from + 500_000, held.token),
        };
        for (name, held) in &records.believed {
            if name != "slots" {
                tokens.insert(name.clone(), held.iter().map(drawn).collect());
            }
        }
        for run in &records.runs {
            let tokens = tokens.entry(run.name.clone()).or_default();
            tokens.push(drawn(&run.held));
        }
        for (name, drawn) in &mut tokens {
            println!("{name}: {} tokens", drawn.len());
            let mut seen = HashSet::new();
            for (_, until, token) in &*drawn {
                if !seen.insert(token) {
                    let what = format!("{name}: the token {token} repeats, at {until}");
                    self.violations.push(what);
                }
            }
            let mut known = drawn.clone();
            known.sort_by_key(|(_, until, _)| *until);
            drawn.sort_unstable();
            let (mut known, mut largest) = (known.into_iter().peekable(), 0);
            for (since, until, token) in &*drawn {
                while let Some(known) = known.next_if(|known| known.1 <= *since) {
                    largest = largest.max(known.2);
                }
                if *token > largest {
                    continue;
                }
                if self.may_be_out_of_order(*since, *until) {
                    self.excuse("a token after a larger one, of two primaries");
                } else {
                    let what = format!("{name}: the token {token} after {largest}, at {until}");
                    self.violations.push(what);
                }
            }
        }
    }

    fn holders(&mut self, records: &Records) {
        for (name, held) in &records.believed {
            println!("{name}: {} holdings", held.len());
            if name == "slots" {
                let trusted = held.iter().filter(|held| !held.was_stopped);
                for at in too_many(SLOTS as usize, trusted) {
                    // A holder whose commit was lost may go on until its timeout.
                    let timeout = TIMEOUT.as_micros() as i64;
                    if self.may_be_lost(at) || self.may_be_lost(at - timeout) {
                        self.excuse("more than N slots");
                    } else {
                        let what = format!("{name}: more than {SLOTS} at once, at {at}");
                        self.violations.push(what);
                    }
                }
                continue;
            }
            let timeout = if name == "kept" { TIMEOUT } else { LONGEST };
            self.one_at_a_time(name, held, timeout);
            ends(name, held);
        }
        let mut schedules: BTreeMap<&str, Vec<Held>> = BTreeMap::new();
        for run in &records.runs {
            schedules.entry(&run.name).or_default().push(run.held);
        }
        for (name, held) in schedules {
            self.one_at_a_time(name, &held, LONGEST);
        }
        for (name, held) in &records.locks {
            println!("{name}: {} confirmed holdings", held.len());
            // The client took both times while it held the lock, so there is no margin.
            for (from, to) in overlaps(held, 0) {
                let mut rounds = self.rounds.iter();
                let two_primaries = rounds.any(|round| {
                    round.kind.has_two_primaries() && (round.began..round.ended).contains(&from)
                });
                if two_primaries {
                    self.excuse("two holders of a session lock, of two primaries");
                } else {
                    let what = format!("{name}: two holders from {from} to {to}");
                    self.violations.push(what);
                }
            }
        }
    }

    /// After lost commits there may be two, until the former one must have noticed.
    fn one_at_a_time(&mut self, name: &str, held: &[Held], timeout: Duration) {
        let trusted: Vec<_> = held
            .iter()
            .filter(|held| !held.was_stopped)
            .copied()
            .collect();
        let of_stopped = overlaps(held, MARGIN).len() - overlaps(&trusted, MARGIN).len();
        if of_stopped > 0 {
            let what = format!("{name}: two, and a process was stopped");
            *self.excused.entry(what).or_default() += of_stopped;
        }
        for (from, to) in overlaps(&trusted, MARGIN) {
            let mut rounds = self.rounds.iter();
            let is_excused = rounds.any(|round| {
                let end = round.ended + timeout.as_micros() as i64;
                round.kind.loses_commits() && from > round.began && to < end
            });
            if is_excused {
                let longest = self.excused.entry(format!("ms of two of {name}"));
                let longest = longest.or_default();
                *longest = (*longest).max(((to - from) / 1000) as usize);
            } else {
                let milliseconds = (to - from) / 1000;
                let what = format!("{name}: two for {milliseconds} ms, from {from} to {to}");
                self.violations.push(what);
            }
        }
    }

    fn ticks(&mut self, records: &Records) {
        let mut schedules: BTreeMap<(&str, i64), Vec<_>> = BTreeMap::new();
        for run in &records.runs {
            let runs = schedules.entry((&run.name, run.tick)).or_default();
            runs.push(run);
        }
        let ticks: BTreeSet<_> = schedules.keys().copied().collect();
        let every = Campaign::Failover.tick().as_micros() as i64;
        for (earlier, later) in ticks.iter().zip(ticks.iter().skip(1)) {
            if earlier.0 == later.0 && later.1 != earlier.1 + every {
                let what = format!("no run between the ticks {earlier:?} and {later:?}");
                self.violations.push(what);
            }
        }
        let mut again = 0;
        for ((name, tick), runs) in &mut schedules {
            runs.sort_by_key(|run| run.held.from);
            again += runs.len() - 1;
            for two in runs.windows(2) {
                let (first, second) = (two[0], two[1]);
                if first.held.end != End::Done || second.attempt > first.attempt {
                    continue;
                }
                if self.may_be_lost(first.held.from) {
                    self.excuse("a tick again");
                } else {
                    let what = format!("{name}: the tick {tick} was done and ran again: {two:?}");
                    self.violations.push(what);
                }
            }
        }
        println!("{} ticks, {again} runs again", schedules.len());
    }

    fn grants(&mut self, records: &Records) {
        for (name, grants) in &records.grants {
            println!("{name}: {} grants", grants.len());
            let mut grants = grants.clone();
            grants.retain(|at| !self.may_be_lost(*at));
            grants.sort_unstable();
            // More than `number` grants within `length` are too many.
            let (number, length) = match name.as_str() {
                "throttle" => (1, EVERY),
                _ => ((QUOTA.units + QUOTA.burst) as usize, QUOTA.period),
            };
            for some in grants.windows(number + 1) {
                if some[number] - some[0] < length.as_micros() as i64 {
                    let what = format!("{name}: more than {number} from {} on", some[0]);
                    self.violations.push(what);
                }
            }
        }
    }

    fn once(&mut self, records: &Records, database: &Endpoint) -> Result<(), Box<dyn Error>> {
        let conn = &mut database.connect();
        let stored: HashSet<i64> = diesel::select(sql::<diesel::sql_types::Array<BigInt>>(
            "(SELECT coalesce(array_agg(key), '{}') FROM work)",
        ))
        .get_result::<Vec<i64>>(conn)?
        .into_iter()
        .collect();
        println!("once: {} keys", records.once.len());
        let mut done: Vec<_> = records.once.clone();
        done.sort_unstable();
        for two in done.windows(2).filter(|two| two[0].0 == two[1].0) {
            if self.may_be_lost(two[0].1) {
                self.excuse("a key of Once again");
            } else {
                let what = format!(
                    "once: {} was done at {} and {}",
                    two[0].0, two[0].1, two[1].1
                );
                self.violations.push(what);
            }
        }
        for (key, at) in done {
            if stored.contains(&key) {
            } else if self.may_be_lost(at) {
                self.excuse("an acknowledged commit was lost");
            } else {
                let what = format!("once: {key} was acknowledged at {at} and is lost");
                self.violations.push(what);
            }
        }
        for (what, query) in [
            (
                "keys are stored twice",
                "(SELECT key FROM work GROUP BY key HAVING count(*) > 1) AS twice",
            ),
            (
                "stale tokens have passed the fence",
                "(SELECT token < lag(token) OVER (ORDER BY id) AS is_stale FROM passed) AS passed
                    WHERE is_stale",
            ),
        ] {
            let query = format!("(SELECT count(*) FROM {query})");
            let found: i64 = diesel::select(sql::<BigInt>(&query)).get_result(conn)?;
            if found > 0 {
                self.violations.push(format!("{found} {what}"));
            }
        }
        let query = "(SELECT count(*) FROM passed)";
        let passed: i64 = diesel::select(sql::<BigInt>(query)).get_result(conn)?;
        println!("fence: {passed} writes");
        Ok(())
    }

    /// Checks how soon after the switch each process got a reply from the new primary.
    fn pools(&mut self, records: &Records, faults: &Faults) {
        for round in self.rounds {
            let mut back = Vec::new();
            for number in 0..Campaign::Failover.processes() {
                let switched = round.switched[half_of(number)];
                // A process with a fault of its own at that time may come back later.
                let mut back_at = switched;
                for (_, from, to) in faults.away.iter().filter(|away| away.0 == number) {
                    if *from < back_at + RECOVERY && *to > back_at {
                        back_at = *to;
                    }
                }
                let switched = back_at;
                let probes = records.probes.get(&number).map_or(&[][..], Vec::as_slice);
                let reply = probes.iter().find(|probe| probe.0 >= switched);
                match reply.map(|probe| probe.1 - switched) {
                    Some(after) if after < RECOVERY => back.push(after / 1000),
                    after => {
                        let what = format!("process {number} was back after {after:?} µs");
                        self.violations.push(format!("{:?}: {what}", round.kind));
                    }
                }
            }
            println!("{:?}: pools were back after {back:?} ms", round.kind);
        }
    }
}

/// The times at which two were held for longer than `margin`.
fn overlaps(held: &[Held], margin: i64) -> Vec<(i64, i64)> {
    let mut held = held.to_vec();
    held.sort_by_key(|held| held.from);
    let mut latest = i64::MIN;
    let mut found = Vec::new();
    for held in held {
        let end = latest.min(held.to);
        if end > held.from + margin {
            found.push((held.from, end));
        }
        latest = latest.max(held.to);
    }
    found
}
