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
/// An `Error` converts into [`diesel::result::Error`], so `?` works in functions that return a
/// `QueryResult`, and it converts back. On the way, an error that is not Diesel's own is wrapped in
/// Diesel's `QueryBuilderError`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name, a key, a number or a duration is out of bounds. Nothing was sent.
    #[error("{0}")]
    Input(Cow<'static, str>),

    /// The pool gave no connection.
    #[error(
        "the pool gave no connection: check that the database is up and the pool is large enough; \
         where you hold a guard, use its `conn()`, not another connection"
    )]
    Pool(#[source] Box<dyn std::error::Error + Send + Sync>),

    /// A statement failed.
    #[error(transparent)]
    Database(DieselError),

    /// The database gave no reply in time, or an asynchronous pool no connection.
    #[error(
        "the database gave no reply in time: check that it is up, that its network works, and that \
         the pool is large enough"
    )]
    TimedOut,

    /// The operation was polled outside a tokio runtime, in one without timers, or in one that has
    /// ended. It needs a runtime for its timers, and to finish after a drop.
    ///
    /// Pauses that return no `Result`, such as `wait_for_loss` and `drain`, panic there, as tokio's
    /// own timers do.
    #[error(
        "not inside a running tokio runtime with timers: await the operation in a task, or in the \
         `block_on`, of a runtime that is built with `enable_all`"
    )]
    NoRuntime,

    /// The server is a hot standby, whose locks exclude nobody on the primary; or it refuses to
    /// write, for example after a switchover. An operation on a pool has discarded the connection
    /// and was tried once more on another one. An operation on the caller's connection was tried
    /// once, and the pool of that connection closes it.
    #[error(
        "the server is a standby or refuses to write: its locks exclude nobody on the primary; \
         connect to the primary, for example with target_session_attrs=read-write"
    )]
    Standby,

    /// The pool gave a connection inside a transaction that plain SQL had left open. The connection
    /// was discarded, which rolls the transaction back.
    #[error(
        "the pool gave a connection inside an open transaction, which was rolled back: some code \
         sends BEGIN without COMMIT or ROLLBACK"
    )]
    DirtyConnection,

    /// A session lock, or an operation with its own transaction, was called inside a transaction. A
    /// failed statement in the transaction would prevent the release of the session lock. An
    /// operation with its own transaction has also aborted the outer one, if plain SQL had opened
    /// it.
    #[error(
        "neither a session lock nor an operation with its own transaction works inside a \
         transaction: call it outside the transaction, or use `acquire_xact`"
    )]
    InsideTransaction,

    /// The work has ended its own transaction by plain SQL, and with the transaction its lock.
    /// [`Once`](crate::Once) has not marked the work as done.
    #[error(
        "the work has ended its transaction, and so its lock, by plain SQL such as ROLLBACK or \
         COMMIT, and is not marked as done: leave the end to `run` or `transaction`, and return an \
         `Err` to roll back"
    )]
    TransactionEnded,

    /// The key was used before for another request: its
    /// [fingerprint](crate::once::Once::fingerprint) was another one. Reply 422, for example.
    #[error(
        "a key of \"{0}\" was used before for another request: each request needs a key of its own"
    )]
    OtherRequest(&'static str),

    /// A transaction lock or a fence was used outside a transaction, where it would protect
    /// nothing.
    #[error(
        "outside a transaction this would protect nothing: open one, or use \
         `AdvisoryLock::transaction`"
    )]
    OutsideTransaction,

    /// A transaction lock was used at REPEATABLE READ, where the snapshot may be older than what
    /// the last holder wrote.
    #[error(
        "a transaction lock protects nothing at REPEATABLE READ, whose snapshot may be older than \
         what its last holder wrote: use READ COMMITTED, or `AdvisoryLock::transaction`, which does"
    )]
    RepeatableRead,

    /// The lock was no longer held when it was released: its session had ended, or other code had
    /// unlocked it in that session.
    #[error(
        "the lock {0} was lost before its release, and part of the work may have run at the same \
         time as another holder's"
    )]
    LockLost(String),

    /// The reply came from another server session than the one that took the lock: a pooler in
    /// transaction mode is in between.
    #[error(
        "the lock {key} was taken by the server session {pid}, which may still hold it, but \
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

    /// A transaction was still open when the lock was released. It was rolled back, so nothing of
    /// it was committed.
    #[error(
        "a transaction was still open when the lock {0} was released, and was rolled back: commit \
         it before the release"
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
        "the permit or lease of \"{0}\" had expired, and part of the work may have run at the same \
         time as another holder's"
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

    /// Other transactions that spend units of the same key have kept it locked for a quarter of a
    /// second: one that does not end, or many in a row.
    #[error(
        "other transactions keep the same key of the rate limit \"{0}\" locked: one that has not \
         ended (after a check inside a transaction, end the transaction soon), one whose commit \
         waits for a synchronous standby that may be away, or many in a row on a busy key"
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

    /// The schema `resource_control` is recorded as installed, but lacks something.
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

    /// The database is a copy of another one, and its tokens have not been separated from those of
    /// that one, so fencing tokens would repeat. The owner of the schema installs once.
    #[error(
        "this database is a copy of another one, and fencing tokens would repeat: run \
         `migrations::install` as the role {owner}, before the program starts"
    )]
    #[non_exhaustive]
    CopiedSchema {
        /// The owner of the schema.
        owner: String,
    },

    /// One of this crate's migrations failed, and left nothing behind.
    #[error("the migration {version} of resource_control failed: {cause}")]
    #[non_exhaustive]
    Migration {
        /// The version of the migration.
        version: &'static str,
        /// What the database said.
        cause: DieselError,
    },

    /// An application's own migration failed.
    #[error("a migration of the application failed: {}", with_causes(&**.0))]
    ApplicationMigration(Box<dyn std::error::Error + Send + Sync>),

    /// Two of an application's migrations have the same version, so Diesel would run only one of
    /// them.
    #[error(
        "the migrations {0} and {1} have the same version, and only one of them would run: rename \
         one"
    )]
    EqualVersions(String, String),

    /// The encoding of the database is not UTF-8. Names and keys need an encoding that has every
    /// character.
    #[error(
        "the encoding of the database is {0}, and names and keys need UTF8: create the database \
         with ENCODING UTF8"
    )]
    Encoding(String),
}

impl Error {
    /// Returns whether a name, a key, a number or a duration is out of bounds.
    ///
    /// Where a client chooses a key, reply 400 to such an error.
    pub const fn is_input(&self) -> bool {
        matches!(self, Self::Input(_))
    }

    /// Returns whether the database cannot be reached at the moment, or the pool is exhausted.
    ///
    /// Reply 503 to such an error, and retry later. Every other error is a mistake in the program
    /// or its set-up, or says that something was lost.
    ///
    /// A server that refuses to write is unavailable, too, even if it refuses a statement of your
    /// own. If a session ends under a statement of your own, diesel-async has no kind for the
    /// error, so it is not recognized here.
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
    /// Copies an error that [is unavailable](Self::is_unavailable), for others who have waited for
    /// the same reply. `None` for every other error.
    pub(crate) fn copy_unavailable(&self) -> Option<Self> {
        Some(match self {
            Self::Pool(cause) => Self::Pool(cause.to_string().into()),
            Self::TimedOut => Self::TimedOut,
            Self::Standby => Self::Standby,
            Self::KeyLocked(name) => Self::KeyLocked(name),
            Self::Database(DieselError::DatabaseError(kind, report)) if self.is_unavailable() => {
                let message = report.message().to_owned();
                DieselError::DatabaseError(*kind, Box::new(message)).into()
            }
            _ => return None,
        })
    }

    /// Makes the error for an invalid argument.
    pub(crate) fn input(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Input(message.into())
    }

    /// Whether a loop retries after this error: the database is away, or refuses at the moment.
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

/// The message of an error, and the messages of its causes that it does not repeat.
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
