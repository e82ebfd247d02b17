//! The error of all operations: what failed, why, and what to do about it.

use std::borrow::Cow;

use diesel::result::{DatabaseErrorKind, Error as DieselError};

/// A [`Result`](std::result::Result) with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
///
/// A lock that another session holds, a full semaphore, a throttle that is not due and a limited
/// call are not errors, but outcomes: [`Attempt`](crate::Attempt), [`Admission`](crate::Admission),
/// [`Decision`](crate::Decision), [`Check`](crate::Check).
///
/// It converts into [`diesel::result::Error`], so `?` works in functions that return a
/// `QueryResult`, and back again: what was not Diesel's own error travels as its
/// `QueryBuilderError`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name, a key, a number or a duration is out of bounds. Nothing was sent.
    #[error("{0}")]
    Input(Cow<'static, str>),

    /// The pool gave no connection.
    #[error(
        "the pool gave no connection: is the database up, is the pool large enough, and does the \
         caller hold a guard whose `conn()` it could use?"
    )]
    Pool(#[source] Box<dyn std::error::Error + Send + Sync>),

    /// A statement failed.
    #[error(transparent)]
    Database(DieselError),

    /// The database gave no reply in time.
    #[error("the database gave no reply in time: is it up, and its network?")]
    TimedOut,

    /// The operation was polled outside a runtime of tokio, which it needs for its timers and for
    /// what its drop leaves.
    #[error(
        "not inside a runtime of tokio: await the operation in a task, or in `block_on` of a \
         runtime"
    )]
    NoRuntime,

    /// The server is a hot standby, whose locks exclude nobody on the primary, or it refuses to
    /// write, as after a switchover. An operation over a pool has discarded the connection and was
    /// tried once more on another one. On the caller's connection it was tried once, and the
    /// connection's pool closes it.
    #[error(
        "the server is a standby or refuses to write: its locks exclude nobody on the primary; \
         connect to the primary, which target_session_attrs=read-write finds"
    )]
    Standby,

    /// The pool gave a connection inside a transaction that plain SQL had left open. It was
    /// discarded, which rolls back.
    #[error(
        "the pool gave a connection inside an open transaction, which was rolled back: some code \
         sends BEGIN without COMMIT or ROLLBACK"
    )]
    DirtyConnection,

    /// A session lock was to be taken inside a transaction, in which a failed statement would
    /// prevent its release, or an operation with a transaction of its own was to be run inside
    /// another one. The latter aborts one that plain SQL had opened.
    #[error(
        "neither a session lock nor an operation with its own transaction works inside a \
         transaction: call it outside, or use `acquire_xact`"
    )]
    InsideTransaction,

    /// The work has ended by plain SQL the transaction that it runs in, and with it the lock.
    /// [`Once`](crate::Once) has not marked it as done.
    #[error(
        "the work has ended its transaction by plain SQL such as ROLLBACK or COMMIT, and so its \
         lock, and is not marked as done: leave the end to `run` or `transaction`, which roll back \
         after an error"
    )]
    TransactionEnded,

    /// A transaction lock was to be taken, or a fence to be passed, outside a transaction.
    #[error(
        "outside a transaction this would protect nothing: open one, or use \
         `AdvisoryLock::transaction`"
    )]
    OutsideTransaction,

    /// A transaction lock was to be taken at REPEATABLE READ, whose snapshot may be older than what
    /// the last holder wrote.
    #[error(
        "a transaction lock protects nothing at REPEATABLE READ, whose snapshot may be older than \
         what its last holder wrote: use READ COMMITTED, or `AdvisoryLock::transaction`, which does"
    )]
    RepeatableRead,

    /// The lock was no longer held when it was released: its session had ended, or other code had
    /// unlocked it there.
    #[error(
        "the lock {0} was lost before its release, and part of the work may have run beside \
         another holder"
    )]
    LockLost(String),

    /// Another server session replied than the one that took the lock: a pooler in transaction mode
    /// is in between.
    #[error(
        "the lock {key} was taken by the server session {pid}, which may still hold it, and \
         another session replied: session locks do not work behind a pooler in transaction mode; \
         use `AdvisoryLock::transaction`, or a semaphore of one slot. To free the lock, let the \
         pooler close that session (RECONNECT in PgBouncer's console), or, once it is idle, run \
         SELECT pg_terminate_backend({pid})"
    )]
    #[non_exhaustive]
    SessionMoved {
        /// The lock: its name and its number.
        key: String,
        /// The `pg_backend_pid()` of the session that took it.
        pid: i32,
    },

    /// Session locks of this pool exclude nobody: a pooler in transaction mode is in between, or
    /// the server has no advisory locks.
    #[error("session locks exclude nobody on this pool: {0}")]
    NotExclusive(&'static str),

    /// A transaction was still open when the lock was released, so nothing of it was committed
    /// under the lock. It was rolled back with its session.
    #[error(
        "a transaction was still open when the lock {0} was released, and was rolled back: commit \
         it before"
    )]
    TransactionLeftOpen(String),

    /// The unlock failed. The session was ended instead, which frees the lock.
    #[error(
        "the release of the lock {key} failed, and its session was ended instead, which frees the \
         lock"
    )]
    #[non_exhaustive]
    ReleaseFailed {
        /// The lock: its name and its number.
        key: String,
        /// What the database said.
        source: DieselError,
    },

    /// The permit or lease had expired before it was released or renewed, so its slot may have had
    /// another holder.
    #[error(
        "the permit of \"{0}\" had expired, and part of the work may have run beside another holder"
    )]
    PermitLost(String),

    /// A later holder has passed the fence. Roll the transaction back.
    #[error(
        "the fence \"{name}\" was passed with a larger token than {token}: a later holder is at \
         work; roll back"
    )]
    #[non_exhaustive]
    Fenced {
        /// The name of the fence.
        name: String,
        /// The token that was refused.
        token: i64,
    },

    /// Another transaction has spent units of the same key and has not ended for a quarter of a
    /// second.
    #[error(
        "another transaction has checked the rate limit \"{0}\" for the same key, and has not \
         ended: end a transaction soon after a check inside it; or its commit waits for a \
         synchronous standby, which may be away"
    )]
    KeyLocked(&'static str),

    /// The resource is not in the table `throttled_resource`.
    #[error(
        "the resource \"{0}\" has no row in resource_control.throttled_resource: run `sync`, or \
         insert it"
    )]
    NotDeclared(&'static str),

    /// The schema `resource_control` is not in this database.
    #[error(
        "the schema resource_control is not installed in this database: run `migrations::install`"
    )]
    NotInstalled,

    /// The schema `resource_control` says that it is installed, and lacks something.
    #[error(
        "the schema resource_control lacks {}: to create what is missing and lose nothing, run \
         DELETE FROM resource_control.installed_migration WHERE version IN ('{}') and install \
         again",
        missing.join(", "), versions.join("', '")
    )]
    #[non_exhaustive]
    Incomplete {
        /// The missing tables, types, views and functions.
        missing: Vec<String>,
        /// The versions of the migrations that create them.
        versions: Vec<&'static str>,
    },

    /// One of this crate's migrations failed, and left nothing behind.
    #[error("the migration {version} of resource_control failed: {cause}")]
    #[non_exhaustive]
    Migration {
        /// Its version.
        version: &'static str,
        /// What the database said.
        cause: DieselError,
    },

    /// An application's own migration failed.
    #[error("a migration of the application failed: {}", with_causes(&**.0))]
    ApplicationMigration(Box<dyn std::error::Error + Send + Sync>),

    /// Two of an application's migrations have the same version, of which Diesel would run only
    /// one.
    #[error(
        "the migrations {0} and {1} have the same version, and only one of them would run: rename \
         one"
    )]
    EqualVersions(String, String),

    /// Names and keys need a database that stores every character.
    #[error(
        "the encoding of the database is {0}, and names and keys need UTF8: create the database \
         with ENCODING UTF8"
    )]
    Encoding(String),
}

impl Error {
    /// Whether the database cannot be reached at the moment, or the pool is exhausted: a service
    /// then replies 503, and tries again later. Everything else is a mistake in the program or its
    /// set-up.
    ///
    /// A server that refuses to write is unavailable, also where it refuses a statement of the
    /// application's own. One whose session ends under it has no such kind on diesel-async.
    pub const fn is_unavailable(&self) -> bool {
        use DatabaseErrorKind::{ClosedConnection, ReadOnlyTransaction, UnableToSendCommand};
        matches!(
            self,
            Self::Pool(_)
                | Self::TimedOut
                | Self::Standby
                | Self::KeyLocked(_)
                | Self::Database(DieselError::DatabaseError(
                    ClosedConnection | UnableToSendCommand | ReadOnlyTransaction,
                    _
                ))
        )
    }
}

impl Error {
    /// A mistake of the caller's.
    pub(crate) fn input(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Input(message.into())
    }

    /// Whether a loop that runs for as long as its program tries again: the database is away, or
    /// refuses at the moment.
    pub(crate) const fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Pool(_)
                | Self::TimedOut
                | Self::Standby
                | Self::Database(_)
                | Self::DirtyConnection
        )
    }
}

impl From<DieselError> for Error {
    fn from(error: DieselError) -> Self {
        match error {
            DieselError::QueryBuilderError(inner) => match inner.downcast::<Self>() {
                Ok(own) => *own,
                Err(other) => Self::Database(DieselError::QueryBuilderError(other)),
            },
            error => Self::Database(error),
        }
    }
}

impl From<Error> for DieselError {
    fn from(error: Error) -> Self {
        match error {
            Error::Database(error) => error,
            other => Self::QueryBuilderError(Box::new(other)),
        }
    }
}

/// The message of an error, and those of its causes that it does not repeat.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = error.source();
    }
    message
}
