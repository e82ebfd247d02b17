//! Names of known keys.

use std::collections::HashMap;

use crate::error::Result;
use crate::key::{LockId, LockKey};

/// The names of the keys that an application knows, so that what it shows has names and not numbers.
///
/// PostgreSQL keeps the number of a lock only, and a name cannot be computed from it.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::{AdvisoryLock, LockKey, monitor};
///
/// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
///
/// let names = monitor::Names::new([NIGHTLY.key(), &LockKey::parts(["tenant", "7"])])?;
///
/// # let database = workbench::Database::new();
/// # let (pool, conn) = (database.pool(2), &mut database.connect());
/// # let _guard = NIGHTLY.acquire(&pool)?;
/// for holder in monitor::holders().load(conn)? {
///     match names.of(holder.key) {
///         Some(name) => println!("{name}: {:?}", holder.session.application_name),
///         None => println!("{}: {:?}", holder.key, holder.session.application_name),
///     }
/// #   assert_eq!(names.of(holder.key), Some("nightly report"));
/// }
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Names(HashMap<LockId, String>);

impl Names {
    /// Collects the names of the keys; those that are numbers only have none. Of two names with one
    /// number, the last stays.
    ///
    /// # Errors
    ///
    /// [`Input::EmptyName`](crate::error::Input::EmptyName).
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a LockKey>) -> Result<Self> {
        let mut names = HashMap::new();
        for key in keys {
            let id = key.id()?;
            if let Some(name) = key.name() {
                names.insert(id, name.to_owned());
            }
        }
        Ok(Self(names))
    }

    /// The name of a key, if it is a known one.
    pub fn of(&self, id: LockId) -> Option<&str> {
        self.0.get(&id).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_keys_have_their_names_and_others_none() {
        let gem = LockKey::with_advisory_lock("nightly");
        let keys = [LockKey::named("a"), gem.clone(), LockKey::bigint(7)];
        let names = Names::new(&keys).unwrap();
        assert_eq!(names.of(keys[0].id().unwrap()), Some("a"));
        assert_eq!(names.of(gem.id().unwrap()), Some("nightly"));
        assert_eq!(names.of(LockId::BigInt(7)), None);
        assert!(Names::new([&LockKey::named("")]).is_err());
        assert_eq!(Names::default().of(LockId::Pair(0, 1)), None);
    }
}
