//! How far apart the grants of a throttle were, by the database's clock.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::prelude::*;
use diesel::sql_types::{Nullable, Text, Timestamptz};
use diesel_interlock::DeclaredResources;

use crate::report::Report;

#[derive(Debug, QueryableByName)]
struct Granted {
    #[diesel(sql_type = Timestamptz)]
    at: DateTime<Utc>,
    /// When the trigger was at it.
    #[diesel(sql_type = Timestamptz)]
    noted: DateTime<Utc>,
    #[diesel(sql_type = Nullable<Text>)]
    key: Option<String>,
}

/// Checks the account of the grants, and answers how many keys there are in it. When one is due, its
/// next attempt comes after `wait` on average.
pub(crate) fn check(
    report: &mut Report,
    conn: &mut PgConnection,
    resource: impl DeclaredResources,
    wait: Duration,
    until: DateTime<Utc>,
) -> usize {
    let grants: Vec<Granted> = diesel::sql_query("SELECT * FROM hammer.granted ORDER BY at")
        .load(conn)
        .unwrap();
    let (noted, answered) = (grants.len(), report.claims);
    report.check(noted == answered, || {
        format!("{answered} grants were answered, and {noted} committed")
    });
    for grant in &grants {
        report.check(grant.at <= grant.noted, || {
            format!("a time that had not come: {grant:?}")
        });
    }

    let mut by_key = BTreeMap::<_, Vec<&Granted>>::new();
    for grant in &grants {
        by_key.entry(&grant.key).or_default().push(grant);
    }
    let interval = TimeDelta::from_std(resource.interval()).unwrap();
    let (mut possible, mut expected) = (0, 0);
    for grants in by_key.values() {
        for pair in grants.windows(2) {
            report.check(pair[1].at - pair[0].at >= interval, || {
                format!("closer than {:?}: {pair:#?}", resource.interval())
            });
        }
        let time = until - grants[0].at;
        possible += possible_grants(time, resource.interval());
        expected += possible_grants(time, (resource.interval() + wait).mul_f64(1.25));
    }
    let made = grants.iter().filter(|grant| grant.at <= until).count();
    // A machine too busy to attempt each key some times per interval shows nothing.
    let is_slow = wait > resource.interval() / 4;
    report.check(is_slow || made >= expected, || {
        format!("only {made} grants: at four fifths of what is possible, {expected}")
    });
    report.grants_of_possible = Some((made, possible));
    by_key.len()
}

/// How many grants there is time for after a first one, and that one.
fn possible_grants(time: TimeDelta, interval: Duration) -> usize {
    let time = time.to_std().unwrap_or_default();
    (time.as_micros() / interval.as_micros()) as usize + 1
}
