//! The kinds of faults.

use serde::{Deserialize, Serialize};

use crate::half::Half;

/// A fault of a worker, or of a program that it relies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Fault {
    Kill,
    Freeze,
    EndedHolder,
    EndedWaiter,
    EndedIdle,
    LateNetwork,
    LostNetwork,
    FastRestart,
    ImmediateRestart,
    AsynchronousFailover,
    SynchronousFailover,
    ReloadedIdleTimeout,
    ReloadedLockTimeout,
    KilledSessionPooler,
    KilledTransactionPooler,
    ReloadedPooler,
    PausedPooler,
    HangingServer,
    CopiedDatabase,
    FullPool,
    Panic,
    TransactionLeftOpen,
    TransactionAborted,
    StatementTimeout,
    LockTimeout,
    IdleInTransactionTimeout,
    OverstayedPermit,
    AbandonedPermit,
    LateWrite,
    CopyTo,
    CopyFrom,
    DroppedQuery,
    ShutDownRuntime,
    DroppedFuture,
    AbortedTask,
    LostSelect,
}

/// The kinds of faults, by injector.
pub(crate) const PROCESSES: [Fault; 2] = [Fault::Kill, Fault::Freeze];
pub(crate) const SESSIONS: [Fault; 3] = [Fault::EndedHolder, Fault::EndedWaiter, Fault::EndedIdle];
pub(crate) const NETWORKS: [Fault; 2] = [Fault::LateNetwork, Fault::LostNetwork];
pub(crate) const SERVERS: [Fault; 6] = [
    Fault::FastRestart,
    Fault::ImmediateRestart,
    Fault::AsynchronousFailover,
    Fault::SynchronousFailover,
    Fault::ReloadedIdleTimeout,
    Fault::ReloadedLockTimeout,
];
pub(crate) const POOLERS: [Fault; 4] = [
    Fault::KilledSessionPooler,
    Fault::KilledTransactionPooler,
    Fault::ReloadedPooler,
    Fault::PausedPooler,
];
pub(crate) const SECOND_SERVER: [Fault; 1] = [Fault::HangingServer];
pub(crate) const COPIES: [Fault; 1] = [Fault::CopiedDatabase];
/// The faults that a worker inflicts on itself when it is told to.
pub(crate) const SELF_INFLICTED: [Fault; 14] = [
    Fault::FullPool,
    Fault::Panic,
    Fault::TransactionLeftOpen,
    Fault::TransactionAborted,
    Fault::StatementTimeout,
    Fault::LockTimeout,
    Fault::IdleInTransactionTimeout,
    Fault::OverstayedPermit,
    Fault::AbandonedPermit,
    Fault::LateWrite,
    Fault::CopyTo,
    Fault::CopyFrom,
    Fault::DroppedQuery,
    Fault::ShutDownRuntime,
];
/// The faults that asynchronous workers inflict on themselves all the time.
pub(crate) const DROPS: [Fault; 3] = [Fault::DroppedFuture, Fault::AbortedTask, Fault::LostSelect];

impl Fault {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        [
            &PROCESSES[..],
            &SESSIONS,
            &NETWORKS,
            &SERVERS,
            &POOLERS,
            &SECOND_SERVER,
            &COPIES,
            &SELF_INFLICTED,
            &DROPS,
        ]
        .into_iter()
        .flatten()
        .copied()
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9 of a worker",
            Self::Freeze => "frozen worker",
            Self::EndedHolder => "ended session of a holder",
            Self::EndedWaiter => "ended session of a waiter",
            Self::EndedIdle => "ended idle session",
            Self::LateNetwork => "cut network, late delivery",
            Self::LostNetwork => "cut network, lost connections",
            Self::FastRestart => "fast restart",
            Self::ImmediateRestart => "immediate restart",
            Self::AsynchronousFailover => "asynchronous failover",
            Self::SynchronousFailover => "synchronous failover",
            Self::ReloadedIdleTimeout => "reloaded idle_session_timeout",
            Self::ReloadedLockTimeout => "reloaded lock_timeout",
            Self::KilledSessionPooler => "kill -9 of the pooler by session",
            Self::KilledTransactionPooler => "kill -9 of the pooler by transaction",
            Self::ReloadedPooler => "reloaded pooler",
            Self::PausedPooler => "paused pooler",
            Self::HangingServer => "another server that hangs",
            Self::CopiedDatabase => "copied database",
            Self::FullPool => "full pool",
            Self::Panic => "panic while holding",
            Self::TransactionLeftOpen => "transaction left open",
            Self::TransactionAborted => "transaction aborted",
            Self::StatementTimeout => "statement_timeout",
            Self::LockTimeout => "lock_timeout",
            Self::IdleInTransactionTimeout => "idle_in_transaction_session_timeout",
            Self::OverstayedPermit => "overstayed permit",
            Self::AbandonedPermit => "abandoned permit",
            Self::LateWrite => "late write of a former holder",
            Self::CopyTo => "COPY TO under a lock",
            Self::CopyFrom => "COPY FROM under a lock",
            Self::DroppedQuery => "query dropped in flight under a lock",
            Self::ShutDownRuntime => "runtime shut down",
            Self::DroppedFuture => "operation dropped at some await point",
            Self::AbortedTask => "task of an operation aborted",
            Self::LostSelect => "operation that lost a select",
        }
    }

    /// Whether the fault is a timeout that a user sets.
    pub(crate) const fn needs_impatience(self) -> bool {
        matches!(
            self,
            Self::StatementTimeout | Self::LockTimeout | Self::IdleInTransactionTimeout
        )
    }

    /// Whether the fault happens under a session lock only.
    pub(crate) const fn needs_session_locks(self) -> bool {
        matches!(
            self,
            Self::TransactionLeftOpen
                | Self::TransactionAborted
                | Self::StatementTimeout
                | Self::LockTimeout
                | Self::LateWrite
                | Self::CopyTo
                | Self::CopyFrom
                | Self::DroppedQuery
        )
    }

    /// The half whose workers alone have this fault. diesel-async has no COPY.
    pub(crate) const fn half(self) -> Option<Half> {
        match self {
            Self::CopyTo | Self::CopyFrom => Some(Half::Blocking),
            Self::DroppedQuery
            | Self::ShutDownRuntime
            | Self::DroppedFuture
            | Self::AbortedTask
            | Self::LostSelect => Some(Half::Asynchronous),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::Fault;

    #[test]
    fn each_kind_has_a_name_of_its_own() {
        let names: BTreeSet<&str> = Fault::all().map(Fault::name).collect();
        assert_eq!(names.len(), Fault::all().count());
    }
}
