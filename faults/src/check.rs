//! The invariants.
//!
//! | What | Never |
//! |---|---|
//! | a session lock | two holders at once whose releases were confirmed |
//! | a transaction lock | a server booked twice in a round |
//! | permits | more than N believed in at once |
//! | a kept permit, a leader, a schedule | two believed in at once |
//! | a schedule | a tick that did not run |
//! | a throttle | two grants closer than the interval |
//! | a rate limit | more than burst + N in a period |
//! | the database, in the end | a lock, an open transaction, a slot with two holders or with tokens out of order |

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use workbench::Database;

use crate::record::{Held, Records};
use crate::worker::{EVERY, QUOTA, SLOTS, TICK};

type Checked = Result<(), Box<dyn Error>>;

pub(crate) fn all(records: &Records, database: &Database) -> Checked {
    for (name, held) in &records.locks {
        println!("{name}: {} confirmed holdings", held.len());
        at_most(1, name, held)?;
    }
    for (name, held) in &records.believed {
        println!("{name}: {} holdings", held.len());
        at_most(if name == "slots" { SLOTS as usize } else { 1 }, name, held)?;
    }
    grants(records)?;
    ticks(records)?;
    in_database(database)?;
    let mut counts: Vec<_> = records.counts.iter().collect();
    counts.sort();
    println!("{counts:?}\nno invariant was broken");
    Ok(())
}

/// No more than so many at any moment.
fn at_most(n: usize, name: &str, held: &[Held]) -> Checked {
    let mut changes: Vec<(i64, i32)> = held
        .iter()
        .filter(|held| held.to > held.from)
        .flat_map(|held| [(held.from, 1), (held.to, -1)])
        .collect();
    changes.sort_unstable();
    let mut now = 0;
    for (at, change) in changes {
        now += change;
        if now > n as i32 {
            return Err(format!("{name}: {now} at once, at {at}").into());
        }
    }
    if held.is_empty() {
        return Err(format!("{name}: nothing was held").into());
    }
    Ok(())
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
                    if granted > (QUOTA.n + QUOTA.burst) as usize {
                        return Err(format!("{granted} units in a period").into());
                    }
                }
            }
        }
    }
    Ok(())
}

fn ticks(records: &Records) -> Checked {
    let mut runs = records.runs.clone();
    runs.sort_by_key(|run| run.held.from);
    let held: Vec<_> = runs.iter().map(|run| run.held).collect();
    at_most(1, "schedule", &held)?;
    let mut ticks: Vec<i64> = runs.iter().map(|run| run.tick).collect();
    if !ticks.is_sorted() {
        return Err("a tick ran after a later one".into());
    }
    ticks.dedup();
    let tick = TICK.as_micros() as i64;
    if let Some(gap) = ticks.windows(2).find(|pair| pair[1] - pair[0] != tick) {
        return Err(format!("no run between the ticks {gap:?}").into());
    }
    for pair in runs.windows(2).filter(|pair| pair[0].tick == pair[1].tick) {
        if pair[1].attempt < pair[0].attempt {
            return Err(format!(
                "{}: the attempts of a tick must not fall: {pair:?}",
                pair[0].name
            )
            .into());
        }
    }
    let done = runs.iter().filter(|run| run.is_done).count();
    println!(
        "schedule: {} ticks, {} runs, {done} done",
        ticks.len(),
        runs.len()
    );
    Ok(())
}

fn in_database(database: &Database) -> Checked {
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
            // Sessions of processes that have just ended.
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
