//! Fences.

use diesel_interlock::{Result, asynchronous};

use super::{PgConnection, block_on};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub(crate) struct Fence(asynchronous::Fence);

impl Fence {
    pub(crate) const fn named(name: &'static str) -> Self {
        Self(asynchronous::Fence::named(name))
    }

    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self(asynchronous::Fence::new(name))
    }

    pub(crate) fn name(&self) -> &str {
        self.0.name()
    }

    pub(crate) fn pass(&self, conn: &mut PgConnection, token: i64) -> Result<()> {
        block_on(self.0.pass(&mut conn.0, token))
    }
}
