//! A lock as PostgreSQL sees it: a number and a mode.

use crate::key::LockId;

/// Whether a lock excludes every other session, or only those that request it exclusively.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LockMode {
    Exclusive,
    Shared,
}

/// What a session holds or requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lock {
    pub(super) id: LockId,
    pub(super) mode: LockMode,
}
