//! Inserting declared resources into the database.

use std::time::Duration;

use diesel::data_types::PgInterval;

use super::resource::DeclaredResources;
use super::{Throttle, sql};
use crate::call::ask;
use crate::error::{Error, Result};
use crate::input;
use crate::input::{LONGEST, microseconds};
use crate::mode::Mode;
use crate::pool::{Pool, Reply};

/// What [`Throttle::sync`] inserted, and which intervals differ.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use = "`sync` leaves the intervals in `different` as they are in the database"]
#[non_exhaustive]
pub struct Synced {
    /// The labels that this call inserted.
    pub added: Vec<&'static str>,
    /// The resources whose interval in the database differs from the declared one.
    pub different: Vec<Difference>,
}

/// A resource whose interval in the database differs from the declared one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The label of the resource.
    pub label: &'static str,
    /// The interval that the program declares.
    pub declared: Duration,
    /// The interval that this call found in the database.
    pub in_database: Duration,
}

impl<P: Pool> Throttle<P> {
    /// Inserts the declared resources that the database lacks. Any number of instances may call
    /// this when they start.
    ///
    /// The intervals of existing resources stay as they are, because the database owns them. One
    /// round trip per resource, and two more for a new one. Only the owner of the type
    /// `throttled_resource_enum` can add a new resource.
    pub fn sync<R: DeclaredResources>(pool: &P) -> Reply<'_, P, Synced> {
        P::Mode::drive(synchronize::<P>(pool, read_declared::<R>(), false))
    }

    /// Inserts as [`sync`](Self::sync) does, and sets the intervals that differ to the declared
    /// ones.
    pub fn sync_intervals<R: DeclaredResources>(pool: &P) -> Reply<'_, P, Synced> {
        P::Mode::drive(synchronize::<P>(pool, read_declared::<R>(), true))
    }
}

fn read_declared<R: DeclaredResources>() -> Result<Vec<(&'static str, i64)>> {
    let one = |resource: &R| {
        let label = resource.label();
        if !(1..=63).contains(&label.len()) || label.contains('\0') {
            return Err(Error::input(
                "the label of a resource must have 1 to 63 bytes, and no NUL",
            ));
        }
        let every = input::check_duration(
            resource.interval(),
            LONGEST,
            "the interval of a resource must be between a microsecond and 1,000 years",
        )?;
        Ok((label, every))
    };
    R::ALL.iter().map(one).collect()
}

async fn synchronize<P: Pool>(
    pool: &P,
    declared: Result<Vec<(&'static str, i64)>>,
    changes: bool,
) -> Result<Synced> {
    let mut synced = Synced::default();
    for (label, declared) in declared? {
        let every = PgInterval::from_microseconds(declared);
        let ((is_label, in_database), _): ((bool, Option<i64>), _) =
            ask(pool, None, &sql::find(label)).await?;
        match in_database {
            None => {
                let (inserted, _): (i64, _) =
                    ask(pool, None, &sql::insert(label, every, is_label)).await?;
                if inserted > 0 {
                    synced.added.push(label);
                }
            }
            Some(in_database) if in_database != declared => {
                if changes {
                    let (_, _): (i64, _) = ask(pool, None, &sql::change(label, every)).await?;
                }
                synced.different.push(Difference {
                    label,
                    declared: microseconds(declared),
                    in_database: microseconds(in_database),
                });
            }
            Some(_) => {}
        }
    }
    Ok(synced)
}
