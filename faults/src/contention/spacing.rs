//! The checks of the distance between the grants of a throttle, by the database clock.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::prelude::*;
use diesel::sql_types::{Nullable, Text, Timestamptz};
use diesel_interlock::DeclaredResources;

use super::report::Report;

#[derive(Debug, QueryableByName)]
struct Granted {
    #[diesel(sql_type = Timestamptz)]
    at: DateTime<Utc>,
    /// When the trigger recorded it.
    #[diesel(sql_type = Timestamptz)]
    noted: DateTime<Utc>,
    #[diesel(sql_type = Nullable<Text>)]
    key: Option<String>,
}

/// Checks the recorded grants, and returns how many keys they have. A key that is due is attempted after `wait` on
/// average.
pub(super) fn check(
    report: &mut Report,
    conn: &mut PgConnection,
    resource: impl DeclaredResources,
    wait: Duration,
    until: DateTime<Utc>,
) -> usize {
    let grants: Vec<Granted> = diesel::sql_query("SELECT * FROM contention.granted ORDER BY at")
        .load(conn)
        .unwrap();
    let (noted, given) = (grants.len(), report.claims);
    report.check(noted == given, || {
        format!("clients were given {given} grants, and {noted} are recorded")
    });
    for grant in &grants {
        report.check(grant.at <= grant.noted, || {
            format!("the time of a grant is in the future: {grant:?}")
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
    // A machine that is too busy to attempt each key several times per interval shows nothing.
    let is_slow = wait > resource.interval() / 4;
    report.check(is_slow || made >= expected, || {
        format!(
            "only {made} grants were given, and {expected} would be four fifths of the possible"
        )
    });
    report.grants_of_possible = Some((made, possible));
    by_key.len()
}

/// How many grants fit into a time that begins with the first of them.
fn possible_grants(time: TimeDelta, interval: Duration) -> usize {
    let time = time.to_std().unwrap_or_default();
    (time.as_micros() / interval.as_micros()) as usize + 1
}
