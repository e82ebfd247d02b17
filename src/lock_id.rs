//! The number of a lock's key, for the queries of an application.
//!
//! It is apart from [`key`](crate::key), because its errors are those of the crate, which name keys.

use crate::error::Result;
use crate::key::{LockId, LockKey};

impl LockKey {
    /// Returns the number that PostgreSQL locks for this key.
    ///
    /// # Errors
    ///
    /// - [`Input::EmptyName`](crate::error::Input::EmptyName) if the key's name is empty or was made from no parts.
    /// - [`Input::Unformatted`](crate::error::Input::Unformatted) if the `Display` of a part returned an error.
    pub fn id(&self) -> Result<LockId> {
        Ok(self.checked()?)
    }
}
