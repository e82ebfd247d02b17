//! How much work a campaign must have done: one in which almost nothing was granted would break no
//! invariant.

use std::error::Error;
use std::time::Duration;

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use workbench::Endpoint;

use crate::record::Records;
use crate::worker::Campaign;

impl Campaign {
    /// How many there must be of each kind of work in a minute: about a tenth of what a machine of
    /// two cores did that was busy with other things, too.
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

/// Fails with the kinds of work that were done too rarely in the time in which work was possible.
pub(crate) fn check(
    campaign: Campaign,
    records: &Records,
    database: &Endpoint,
    time: Duration,
) -> Result<(), Box<dyn Error>> {
    let done = campaign
        .minimum()
        .iter()
        .map(|(kind, _)| number(kind, records, database));
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

/// The kinds of work of which there is too little, given how many there are of each kind in the
/// order of `minimum`.
fn too_few(campaign: Campaign, done: &[usize], time: Duration) -> Vec<String> {
    let minutes = time.as_secs_f64() / 60.0;
    let kinds = campaign.minimum().iter().zip(done);
    kinds
        .filter_map(|((kind, in_a_minute), done)| {
            // However short the campaign is, there is some of each.
            let minimum = (*in_a_minute as f64 * minutes).ceil().max(1.0) as usize;
            (*done < minimum).then(|| format!("{kind}: {done} instead of {minimum}"))
        })
        .collect()
}

fn number(kind: &str, records: &Records, database: &Endpoint) -> Result<usize, Box<dyn Error>> {
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
        kind => return Err(format!("what is {kind:?}?").into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_campaign_in_which_one_kind_of_work_was_hardly_done_fails_and_names_it() {
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
    fn a_campaign_without_any_work_fails_however_short_it_was() {
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
