//! The invariants.
//!
//! | What | Never |
//! |---|---|
//! | a session lock | two holders at once, both with a confirmed release |
//! | a transaction lock | a server booked twice in a round |
//! | permits | more than N trusted at once |
//! | a kept permit, a leader, a schedule | two trusted at once; a token not larger than its predecessor's |
//! | a schedule | a tick that did not run; a second run of a tick that neither crashed nor was given back nor was retried; a failed tick that was not retried; a time that is no tick, unless it was triggered; a wrong attempt |
//! | a throttle | two grants closer than the interval |
//! | a rate limit | more than burst + N in a period |
//! | each kind of work | fewer than `minimum.rs` demands |
//! | the database, at the end | a lock, an open transaction, a slot with two holders or with tokens out of order |
//!
//! A suspended process (SIGSTOP) cannot notice a loss in time, so its overlaps are counted, and are
//! no failure. All times are by the clock of this machine, where the database runs, too.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use workbench::{Database, Endpoint};

use crate::minimum;
use crate::record::{End, Held, Records, Run};
use crate::worker::{Campaign, EVERY, Kind, QUOTA, RETRIES, SLOTS};

type Checked = Result<(), Box<dyn Error>>;

pub(crate) fn all(
    campaign: Campaign,
    records: &Records,
    database: &Database,
    length: Duration,
) -> Checked {
    for (name, held) in &records.locks {
        println!("{name}: {} confirmed holdings", held.len());
        at_most(1, name, held)?;
    }
    for (name, held) in &records.believed {
        println!("{name}: {} holdings", held.len());
        if name == "slots" {
            at_most(SLOTS as usize, name, held)?;
        } else {
            at_most(1, name, held)?;
            tokens(name, held)?;
            ends(name, held);
        }
    }
    grants(records)?;
    ticks(campaign, records)?;
    in_database(database)?;
    let mut counts: Vec<_> = records.counts.iter().collect();
    counts.sort();
    println!("{counts:?}\nno invariant was broken");
    minimum::check(campaign, records, database, length)
}

/// Fails if more than `n` were held at any moment. Processes that were suspended do not count.
fn at_most(n: usize, name: &str, held: &[Held]) -> Checked {
    if let Some(at) = too_many(n, held.iter().filter(|held| !held.was_stopped)).first() {
        return Err(format!("{name}: more than {n} at once, at {at}").into());
    }
    let excused = too_many(n, held.iter()).len();
    if excused > 0 {
        println!("{name}: {excused} overlaps with one whose process was stopped");
    }
    Ok(())
}

/// The times at which a holding began while `n` others were held already.
pub(crate) fn too_many<'a>(n: usize, held: impl Iterator<Item = &'a Held>) -> Vec<i64> {
    let mut changes: Vec<(i64, i32)> = held
        .filter(|held| held.to > held.from)
        .flat_map(|held| [(held.from, 1), (held.to, -1)])
        .collect();
    changes.sort_unstable();
    let mut now = 0;
    changes.retain(|(_, change)| {
        now += change;
        *change > 0 && now > n as i32
    });
    changes.into_iter().map(|(at, _)| at).collect()
}

/// Sorted by their beginning, without those of processes that were suspended.
fn in_order(held: &[Held]) -> Vec<Held> {
    let mut held: Vec<_> = held
        .iter()
        .filter(|held| !held.was_stopped)
        .copied()
        .collect();
    held.sort_by_key(|held| held.from);
    held
}

fn tokens(name: &str, held: &[Held]) -> Checked {
    match in_order(held)
        .windows(2)
        .find(|two| two[0].token >= two[1].token)
    {
        Some(two) => Err(format!("{name}: the tokens do not grow: {two:?}").into()),
        None => Ok(()),
    }
}

/// Prints how holdings ended, and how long it took until the next one began.
pub(crate) fn ends(name: &str, held: &[Held]) {
    for end in [End::Done, End::Left, End::Lost, End::Killed] {
        let held = in_order(held);
        let mut gaps: Vec<_> = held
            .windows(2)
            .filter(|two| two[0].end == end)
            .map(|two| (two[1].from - two[0].to) / 1000)
            .collect();
        gaps.sort_unstable();
        if let (Some(median), Some(longest)) = (gaps.get(gaps.len() / 2), gaps.last()) {
            let number = gaps.len();
            println!(
                "{name}: {number} × {end:?}, the next one after {median} ms (median), {longest} ms at most"
            );
        }
    }
}

fn grants(records: &Records) -> Checked {
    for (name, grants) in &records.grants {
        let mut grants = grants.clone();
        grants.sort_unstable();
        println!("{name}: {} grants", grants.len());
        match name.as_str() {
            "throttle" => {
                let closest = grants.windows(2).map(|pair| pair[1] - pair[0]).min();
                if closest.is_none_or(|closest| closest < EVERY.as_micros() as i64) {
                    return Err(format!("two grants of a throttle are {closest:?} µs apart").into());
                }
            }
            _ => {
                let mut first = 0;
                for (last, at) in grants.iter().enumerate() {
                    while at - grants[first] > QUOTA.period.as_micros() as i64 {
                        first += 1;
                    }
                    let granted = last - first + 1;
                    if granted > (QUOTA.units + QUOTA.burst) as usize {
                        return Err(format!("{granted} units in a period").into());
                    }
                }
            }
        }
    }
    Ok(())
}

fn ticks(campaign: Campaign, records: &Records) -> Checked {
    let mut schedules: BTreeMap<&str, Vec<&Run>> = BTreeMap::new();
    for run in &records.runs {
        schedules.entry(&run.name).or_default().push(run);
    }
    let (mut number, mut again, mut triggered, mut retried) = (0, 0, 0, 0);
    let (mut passed_over, mut expected) = (0, 0);
    for (name, runs) in &mut schedules {
        runs.sort_by_key(|run| run.held.token);
        let held: Vec<_> = runs.iter().map(|run| run.held).collect();
        at_most(1, name, &held)?;
        tokens(name, &held)?;
        let tick = campaign.tick().as_micros() as i64;
        let job = name.rsplit(' ').next().unwrap_or_default().parse()?;
        let kind = Kind::of(campaign, job);
        // Where both halves have ticks of their own, one of them may pass over ticks of the other after a
        // crash, when several are due.
        let apart = if kind == Kind::Edited { tick / 2 } else { tick };
        let (ticks, others): (BTreeSet<i64>, BTreeSet<i64>) = runs
            .iter()
            .map(|run| run.tick)
            .partition(|at| at % apart == 0);
        if kind != Kind::Hanging && !others.is_empty() {
            return Err(format!("{name}: {others:?} were never in force").into());
        }
        triggered += others.len();
        for (earlier, later) in ticks.iter().zip(ticks.iter().skip(1)) {
            if kind == Kind::Edited {
                passed_over += (later - earlier) / apart - 1;
                expected += (later - earlier) / apart;
            } else if later - earlier != tick {
                return Err(
                    format!("{name}: no run between the ticks {earlier} and {later}").into(),
                );
            }
        }
        if kind == Kind::Failing {
            retried += retries(name, runs)?;
        }
        for two in runs.windows(2) {
            follows(campaign, kind, two[0], two[1])
                .map_err(|why| format!("{name}: {why}: {two:?}"))?;
        }
        number += ticks.len() + others.len();
        again += runs.len() - ticks.len() - others.len();
    }
    let of = |end| {
        let ended = records.runs.iter().filter(|run| run.held.end == end);
        ended.count()
    };
    if number > 0 {
        println!(
            "{} schedules: {number} ticks, {again} runs again; {} done, {} given back, {} lost, {} killed",
            schedules.len(),
            of(End::Done),
            of(End::Left),
            of(End::Lost),
            of(End::Killed),
        );
    }
    if campaign == Campaign::Schedules {
        let asked = records.counts.get("triggered").copied().unwrap_or_default();
        println!(
            "{} runs failed, and {retried} were retried; {triggered} ticks of {asked} that were asked for; \
             with two expressions {passed_over} ticks of {expected} had no instance, or were passed over",
            of(End::Failed)
        );
        // The last one of each schedule may be on its way, and a process may be killed before it counts.
        if triggered == 0 || retried == 0 || (asked as usize) > triggered + schedules.len() {
            return Err("runs that were asked for, or retries, are missing".into());
        }
    }
    Ok(())
}

/// Counts the retries of a schedule, whose runs are in order. Each failed tick runs again, unless it
/// has failed too often.
fn retries(name: &str, runs: &[&Run]) -> Result<usize, Box<dyn Error>> {
    let mut ticks: BTreeMap<i64, Vec<&Run>> = BTreeMap::new();
    for run in runs {
        ticks.entry(run.tick).or_default().push(run);
    }
    // The last tick may be about to be run again.
    ticks.pop_last();
    let mut retried = 0;
    for runs in ticks.values() {
        let failed = || runs.iter().filter(|run| run.held.end == End::Failed);
        // A process may be killed before it has stored that its run has failed.
        let stored = failed().filter(|run| !run.was_killed).count();
        let is_over = match runs.last().map(|run| run.held.end) {
            Some(End::Failed) => failed().count() > usize::from(RETRIES),
            end => end == Some(End::Done),
        };
        if !is_over || stored > usize::from(RETRIES) + 1 {
            return Err(format!("{name}: wrongly retried: {runs:?}").into());
        }
        retried += failed().count()
            - usize::from(runs.last().is_some_and(|run| run.held.end == End::Failed));
    }
    Ok(retried)
}

/// Fails if `next` must not follow `run`. A gap in the tokens is a run that was killed before it
/// wrote its first line.
fn follows(campaign: Campaign, kind: Kind, run: &Run, next: &Run) -> Result<(), &'static str> {
    let between = next.held.token - run.held.token - 1;
    let attempts = i64::from(next.attempt - run.attempt);
    // A triggered run comes before missed ticks.
    if next.tick < run.tick && kind != Kind::Hanging {
        return Err("an earlier tick ran later");
    }
    if next.tick != run.tick {
        let is_right = next.attempt >= 1 && i64::from(next.attempt) <= 1 + between;
        return if is_right {
            Ok(())
        } else {
            Err("the attempt of a new tick is wrong")
        };
    }
    let is_right = match run.held.end {
        // The end was not stored, so it counts as a crash.
        End::Done | End::Failed | End::Killed => attempts >= 1,
        End::Left | End::Lost => attempts >= 0,
    };
    if !is_right || attempts > 1 + between {
        return Err("the attempt of a repeated tick is wrong");
    }
    if campaign == Campaign::Schedules && run.held.end == End::Done && !run.was_killed {
        return Err("a tick that was done ran again");
    }
    Ok(())
}

pub(crate) fn in_database(database: &Endpoint) -> Checked {
    let conn = &mut database.connect();
    let mut count = |what: &str, from: &str| -> Checked {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let query = format!("(SELECT count(*) FROM {from})");
            let found: i64 = diesel::select(sql::<BigInt>(&query)).get_result(conn)?;
            if found == 0 {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("{found} {what}").into());
            }
            // Sessions of processes that have just ended may need a moment.
            thread::sleep(Duration::from_millis(50));
        }
    };
    count(
        "advisory locks are held",
        "pg_locks WHERE locktype = 'advisory'",
    )?;
    count(
        "transactions are open",
        "pg_stat_activity WHERE state LIKE 'idle in transaction%'",
    )?;
    count(
        "servers were booked twice",
        "(SELECT server FROM booking GROUP BY server, round HAVING count(*) > 1) AS twice",
    )?;
    count(
        "slots had two holders, or tokens out of order",
        "(SELECT r.created_at < lag(COALESCE(r.completed_at, r.timed_out_at, r.expires_at))
                OVER (PARTITION BY r.service, r.slot ORDER BY r.id) AS is_early
            FROM resource_control.service_request AS r) AS slots WHERE slots.is_early",
    )
}
