//! Random histories of a schedule whose expression is edited: loops of two versions start and stop,
//! everything is down meanwhile, runs last. Uses no database and no clock.
//!
//! Whatever happens, a run is of a time that was in force, ticks grow, and under `All` each tick of
//! a loop that is up runs, as do the ticks of a time when everything was down and the same version
//! came back. Under `Latest`, a later run stands for a missed tick. It is presumed that each loop
//! looks between two claims: a loop that is slower than the ticks of the other version may miss its
//! own.

use std::collections::BTreeSet;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::{Amendment, CatchUp, Due, Observer, Plan};

const HISTORIES: u64 = 20_000;

fn time(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(seconds, 0).unwrap()
}

/// A version of the program: its ticks are the multiples of a period, plus an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    period: i64,
    offset: i64,
}

impl Version {
    fn next(self, after: i64) -> i64 {
        ((after - self.offset).div_euclid(self.period) + 1) * self.period + self.offset
    }

    fn has(self, tick: i64) -> bool {
        (tick - self.offset) % self.period == 0
    }

    fn next_time(self) -> impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> {
        move |after| Some(time(self.next(after.timestamp())))
    }
}

/// Two versions whose ticks are all different, or those of one are among those of the other, as
/// hourly and daily: otherwise the row may look as if it were of the other one.
fn versions(random: &mut fastrand::Rng) -> [Version; 2] {
    loop {
        let [one, other] = [(); 2].map(|()| {
            let period = random.i64(2..=30);
            let offset = random.i64(0..period);
            Version { period, offset }
        });
        let is_among =
            |one: Version, other: Version| one.period % other.period == 0 && other.has(one.offset);
        let are_different = (0..one.period * other.period).all(|t| !(one.has(t) && other.has(t)));
        if one != other && (are_different || is_among(one, other) || is_among(other, one)) {
            return [one, other];
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Loop {
    version: usize,
    since: i64,
    is_new: bool,
    /// When it had last looked and nothing was due.
    settled: i64,
}

/// When a loop was up.
#[derive(Debug)]
struct Up {
    version: usize,
    from: i64,
    to: i64,
    settled: i64,
}

struct History {
    random: fastrand::Rng,
    catch_up: CatchUp,
    versions: [Version; 2],
    now: i64,
    row: Option<Plan>,
    runs_until: i64,
    loops: Vec<Loop>,
    were_up: Vec<Up>,
    /// Since when everything is down, and which version was up before.
    down: Option<(i64, usize)>,
    /// Times when everything was down and one version was there before and after, of which is the
    /// tick that then came next; and the last one, of which something may still be due.
    gaps: Vec<(usize, i64, i64)>,
    gap: Option<(usize, i64, i64)>,
    /// Each run: its tick, and the version that ran it.
    runs: Vec<(i64, usize)>,
}

impl History {
    fn new(seed: u64, catch_up: CatchUp) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        Self {
            catch_up,
            versions: versions(&mut random),
            now: 1000,
            row: None,
            runs_until: 0,
            loops: Vec::new(),
            were_up: Vec::new(),
            down: None,
            gaps: Vec::new(),
            gap: None,
            runs: Vec::new(),
            random,
        }
    }

    fn start(&mut self, version: usize) {
        self.loops.push(Loop {
            version,
            since: self.now,
            is_new: true,
            settled: self.now,
        });
        // Of what is still due, the other version may take one tick alone and go on from there.
        self.gap = self.gap.filter(|(of, ..)| *of == version);
        if let Some((from, before)) = self.down.take() {
            let is_next = |plan: Plan| {
                let next = self.versions[version].next(plan.counted_from.timestamp());
                plan.next_at == Some(time(next))
            };
            if before == version && self.row.is_some_and(is_next) {
                self.gap = Some((version, from, self.now));
            }
        }
    }

    fn stop(&mut self, index: usize) {
        let stopped = self.loops.swap_remove(index);
        self.were_up.push(Up {
            version: stopped.version,
            from: stopped.since,
            to: self.now,
            settled: stopped.settled,
        });
        if self.loops.is_empty() {
            self.gap = None;
            self.down = Some((self.now, stopped.version));
        }
    }

    /// One look of a loop. Returns whether it has changed the row.
    fn look(&mut self, index: usize, may_claim: bool) -> bool {
        let of = self.loops[index];
        let now = time(self.now);
        let observer = Observer {
            next: self.versions[of.version].next_time(),
            since: time(of.since),
            is_new: of.is_new,
            catch_up: self.catch_up,
        };
        self.loops[index].is_new = false;
        let Some(mut plan) = self.row else {
            self.row = Some(Plan::from_now(&observer.next, now).unwrap());
            return true;
        };
        let mut has_changed = false;
        if let Some(Amendment::Sooner(own) | Amendment::Edited(own)) =
            plan.amend(&observer, now).unwrap()
        {
            plan = own;
            has_changed = true;
        }
        if may_claim && self.runs_until <= self.now {
            match plan.due(&observer, now).unwrap() {
                Due::Later(_) => {}
                Due::PassedOver(then) => (plan, has_changed) = (then, true),
                Due::Tick { at, then, .. } => {
                    assert!(at > plan.counted_from && then.counted_from == at);
                    self.runs.push((at.timestamp(), of.version));
                    // Most runs are short, and some last for many ticks.
                    self.runs_until = self.now
                        + match self.random.u8(..) {
                            0..8 => self.random.i64(0..100),
                            8..40 => self.random.i64(0..10),
                            _ => 0,
                        };
                    (plan, has_changed) = (then, true);
                }
            }
        }
        self.row = Some(plan);
        has_changed
    }

    /// All loops look, in any order, until none has anything to do.
    fn settle(&mut self) {
        let mut is_settled = false;
        while !is_settled {
            is_settled = true;
            let mut order: Vec<usize> = (0..self.loops.len()).collect();
            self.random.shuffle(&mut order);
            for index in order {
                let runs = self.runs.len();
                is_settled &= !self.look(index, true);
                if self.runs.len() > runs {
                    for other in 0..self.loops.len() {
                        self.look(other, false);
                    }
                }
            }
        }
        if self.runs_until <= self.now {
            for of in &mut self.loops {
                of.settled = self.now;
            }
            self.gaps.extend(self.gap.take());
        }
    }

    fn pass(mut self) -> Self {
        let steps = self.random.usize(5..60);
        for _ in 0..steps {
            match self.random.u8(..) {
                0..30 if self.loops.len() < 4 => {
                    let version = self.random.usize(0..2);
                    self.start(version);
                }
                30..45 if !self.loops.is_empty() => {
                    let index = self.random.usize(0..self.loops.len());
                    self.stop(index);
                }
                45..55 => {
                    while !self.loops.is_empty() {
                        self.stop(0);
                    }
                    self.now += self.random.i64(0..100);
                }
                _ => {}
            }
            self.settle();
            // Nobody sleeps through a tick that the row shows.
            let mut until = self.now + self.random.i64(1..20);
            while self.now < until && !self.loops.is_empty() {
                let next_at = self.row.and_then(|plan| plan.next_at);
                let wake = next_at.map_or(until, |next_at| next_at.timestamp());
                let ends = Some(self.runs_until).filter(|ends| *ends > self.now);
                let next = [Some(wake).filter(|wake| *wake > self.now), ends]
                    .into_iter()
                    .flatten()
                    .min();
                self.now = next.unwrap_or(until).min(until);
                self.settle();
            }
            until = until.max(self.now);
            self.now = until;
        }
        self.now = self.now.max(self.runs_until);
        self.settle();
        while !self.loops.is_empty() {
            self.stop(0);
        }
        self
    }

    /// Whether this version was up at this time.
    fn was_up(&self, version: usize, at: i64) -> bool {
        let mut up = self.were_up.iter();
        up.any(|up| up.version == version && up.from <= at && at <= up.to)
    }

    /// What is wrong with this history.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let ticks: BTreeSet<i64> = self.runs.iter().map(|(tick, _)| *tick).collect();
        if !self.runs.windows(2).all(|two| two[0].0 < two[1].0) {
            faults.push("ticks do not grow".to_owned());
        }
        let mut left = [0, 0];
        for &(tick, by) in &self.runs {
            let of = [0, 1].into_iter().filter(|&version: &usize| {
                let mut up = self.were_up.iter().filter(|up| up.version == version);
                self.versions[version].has(tick) && up.any(|up| up.from < tick)
            });
            let of: Vec<usize> = of.collect();
            // What was missed when everything was down, and what a version has missed itself.
            let is_down = !(self.was_up(0, tick) || self.was_up(1, tick));
            let is_in_force =
                |&&version: &&usize| is_down || version == by || self.was_up(version, tick);
            match of.first() {
                _ if of.iter().any(|version| is_in_force(&version)) => {}
                // Of a version that is gone, one tick may still come each time.
                Some(&version) => left[version] += 1,
                None => faults.push(format!("{tick} was never in force")),
            }
        }
        for (version, left) in left.into_iter().enumerate() {
            let ends = self.were_up.iter().filter(|up| up.version == version);
            if left > ends.count() {
                faults.push(format!(
                    "{left} ticks of version {version} when it was gone"
                ));
            }
        }
        let periods = self
            .were_up
            .iter()
            .map(|up| (up.version, up.from, up.settled))
            .chain(self.gaps.iter().copied());
        for (version, from, to) in periods {
            let version = self.versions[version];
            let mut tick = version.next(from);
            while tick <= to {
                let has_run = match self.catch_up {
                    CatchUp::All(_) => ticks.contains(&tick),
                    CatchUp::Latest => ticks.range(tick..).next().is_some(),
                    CatchUp::Skip(_) => true,
                };
                if !has_run {
                    faults.push(format!("{tick} of {version:?} was lost"));
                }
                tick = version.next(tick);
            }
        }
        faults
    }
}

#[test]
fn no_history_runs_a_time_that_was_never_in_force_or_loses_one_that_was() {
    let mut runs = 0;
    for seed in 0..HISTORIES {
        let catch_up = match seed % 4 {
            0 => CatchUp::Latest,
            1 => CatchUp::Skip(Duration::from_secs(seed % 17)),
            _ => CatchUp::All(1000),
        };
        let history = History::new(seed, catch_up).pass();
        let faults = history.faults();
        assert!(
            faults.is_empty(),
            "seed {seed}, {catch_up:?}, {:?}: {faults:?}\n{:?}\n{:?}",
            history.versions,
            history.were_up,
            history.runs
        );
        runs += history.runs.len();
    }
    assert!(runs > 20 * HISTORIES as usize, "{runs} runs");
}
