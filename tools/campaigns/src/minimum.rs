//! The least work that a campaign must have done. Without a minimum, a campaign in which almost
//! nothing was granted would pass: it breaks no invariant.

use std::error::Error;
use std::time::Duration;

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use workbench::Endpoint;

use crate::record::Records;
use crate::worker::Campaign;

impl Campaign {
    /// The minimum per minute of each kind of work: about a tenth of what a busy machine with two
    /// cores did.
    const fn minimum(self) -> &'static [(&'static str, u64)] {
        match self {
            Self::All => &[
                ("session", 100),
                ("bookings", 100),
                ("slots", 150),
                ("kept", 6),
                ("leader", 6),
                ("schedules", 60),
                ("throttle", 100),
                ("limit", 200),
            ],
            Self::Leaders => &[("leader", 6)],
            Self::Schedules => &[("schedules", 600)],
            Self::Failover => &[
                ("session", 200),
                ("tokens", 300),
                ("bookings", 100),
                ("slots", 100),
                ("kept", 6),
                ("leader", 4),
                ("schedules", 60),
                ("throttle", 120),
                ("limit", 250),
                ("once", 120),
                ("fenced writes", 150),
                ("probes", 500),
            ],
        }
    }
}

/// Fails, naming the kinds, if there was too little of a kind of work in `time`, during which work
/// was possible.
pub(crate) fn check(
    campaign: Campaign,
    records: &Records,
    database: &Endpoint,
    time: Duration,
) -> Result<(), Box<dyn Error>> {
    let done = campaign
        .minimum()
        .iter()
        .map(|(kind, _)| count(kind, records, database));
    let done: Vec<usize> = done.collect::<Result<_, _>>()?;
    println!(
        "work done: {:?}",
        campaign
            .minimum()
            .iter()
            .map(|(kind, _)| kind)
            .zip(&done)
            .collect::<Vec<_>>()
    );
    let too_few = too_few(campaign, &done, time);
    if too_few.is_empty() {
        return Ok(());
    }
    Err(format!("too little work was done: {}", too_few.join(", ")).into())
}

/// The kinds of work below their minimum. `done` has the count of each kind, in the order of
/// `minimum`.
fn too_few(campaign: Campaign, done: &[usize], time: Duration) -> Vec<String> {
    let minutes = time.as_secs_f64() / 60.0;
    let kinds = campaign.minimum().iter().zip(done);
    kinds
        .filter_map(|((kind, in_a_minute), done)| {
            // Even the shortest campaign must have done each kind once.
            let minimum = (*in_a_minute as f64 * minutes).ceil().max(1.0) as usize;
            (*done < minimum).then(|| format!("{kind}: {done} instead of {minimum}"))
        })
        .collect()
}

fn count(kind: &str, records: &Records, database: &Endpoint) -> Result<usize, Box<dyn Error>> {
    let rows = |table: &str| -> QueryResult<usize> {
        let query = format!("(SELECT count(*) FROM {table})");
        let rows: i64 =
            diesel::select(sql::<BigInt>(&query)).get_result(&mut database.connect())?;
        Ok(rows as usize)
    };
    Ok(match kind {
        "session" => records.locks.get(kind).map_or(0, Vec::len),
        "slots" | "kept" | "leader" => records.believed.get(kind).map_or(0, Vec::len),
        "throttle" | "limit" => records.grants.get(kind).map_or(0, Vec::len),
        "schedules" => records.runs.len(),
        "tokens" => records.tokens.values().map(Vec::len).sum(),
        "once" => records.once.len(),
        "probes" => records.probes.values().map(Vec::len).sum(),
        "bookings" => rows("booking")?,
        "fenced writes" => rows("passed")?,
        kind => return Err(format!("unknown kind of work: {kind:?}").into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_of_one_kind_of_work_fails_the_campaign_and_is_named() {
        let minute = Duration::from_secs(60);
        let enough: Vec<_> = Campaign::All
            .minimum()
            .iter()
            .map(|kind| kind.1 as usize)
            .collect();
        assert!(too_few(Campaign::All, &enough, minute).is_empty());
        let mut less = enough;
        less[1] -= 1;
        assert_eq!(
            too_few(Campaign::All, &less, minute),
            ["bookings: 99 instead of 100"]
        );
    }

    #[test]
    fn a_campaign_without_any_work_fails_even_if_it_was_short() {
        for campaign in [
            Campaign::All,
            Campaign::Leaders,
            Campaign::Schedules,
            Campaign::Failover,
        ] {
            let none = vec![0; campaign.minimum().len()];
            let too_few = too_few(campaign, &none, Duration::ZERO);
            assert!(!too_few.is_empty() && too_few.len() == none.len());
        }
    }
}
