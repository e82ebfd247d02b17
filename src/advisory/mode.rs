//! Exclusive or shared, and PostgreSQL's names for it.

/// Whether a lock excludes everybody, or only those who want it exclusively.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LockMode {
    Exclusive,
    Shared,
}

impl LockMode {
    pub(super) const fn lock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_advisory_lock",
            LockMode::Shared => "pg_advisory_lock_shared",
        }
    }

    pub(super) const fn try_lock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_try_advisory_lock",
            LockMode::Shared => "pg_try_advisory_lock_shared",
        }
    }

    /// A shared lock stays held if it is released with the exclusive function.
    pub(super) const fn unlock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_advisory_unlock",
            LockMode::Shared => "pg_advisory_unlock_shared",
        }
    }

    pub(super) const fn xact_lock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_advisory_xact_lock",
            LockMode::Shared => "pg_advisory_xact_lock_shared",
        }
    }

    pub(super) const fn try_xact_lock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_try_advisory_xact_lock",
            LockMode::Shared => "pg_try_advisory_xact_lock_shared",
        }
    }

    /// As `pg_locks.mode` shows it.
    pub(super) const fn pg_locks_mode(self) -> &'static str {
        match self {
            LockMode::Exclusive => "ExclusiveLock",
            LockMode::Shared => "ShareLock",
        }
    }
}
