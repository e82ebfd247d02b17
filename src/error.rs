//! Errors: what failed, why, and what to do about it.

use diesel::result::Error as DieselError;

pub use crate::input::Input;
use crate::key::LockKey;

/// A [`Result`](std::result::Result) with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
///
/// A lock that another session holds, a full semaphore, a throttle that is not due and a limited call are not errors.
/// Operations report them as [`Attempt::Busy`], [`Admission::Full`], [`Decision::Denied`] and [`Check::Limited`].
///
/// Each of four variants stands for a kind of error that is handled in one way: [`Input`](Error::Input) for an invalid argument,
/// [`Misplaced`](Error::Misplaced) for a call in the wrong kind of transaction, [`Schema`](Error::Schema) for a database that is
/// not set up, and [`Database`](Error::Database) for everything that Diesel reports.
///
/// An `Error` converts into [`diesel::result::Error`], so `?` works in functions that return a
/// [`QueryResult`](diesel::QueryResult). A `Database` error becomes the Diesel error inside. Every other error is wrapped
/// as a `QueryBuilderError` with the same message, and `Error::from` unwraps it again.
///
/// [`Attempt::Busy`]: crate::Attempt::Busy
/// [`Admission::Full`]: crate::Admission::Full
/// [`Check::Limited`]: crate::Check::Limited
/// [`Decision::Denied`]: crate::Decision::Denied
///
/// # Examples
///
/// ```
/// use diesel_interlock::{AdvisoryLock, Error, PgPool, error::Input};
///
/// fn status(error: &Error) -> u16 {
///     match error {
///         // Texts that came from a request. All other arguments come from the program.
///         Error::Input(Input::EmptyName | Input::EmptyKey | Input::NulCharacter | Input::TooLong { .. }) => 400,
///         Error::Pool(_) | Error::Database(_) => 503,
///         _ => 500,
///     }
/// }
///
/// # let pool = workbench::Database::new().pool(1);
/// let error = AdvisoryLock::named("").try_acquire(&pool).unwrap_err();
/// assert!(matches!(error, Error::Input(Input::EmptyName)));
/// assert_eq!(status(&error), 400);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is invalid, and nothing was changed. Nothing was sent either, except with
    /// [`CostAboveBurst`](Input::CostAboveBurst), which the database decides.
    #[error(transparent)]
    Input(#[from] Input),

    /// The operation does not work in the transaction that is open on the connection, or no transaction is open and the
    /// operation needs one. Nothing was changed.
    #[error(transparent)]
    Misplaced(#[from] Misplaced),

    /// The schema `resource_control` is missing, incomplete, or not usable by this role.
    #[error(transparent)]
    Schema(#[from] Schema),

    /// The pool returned a connection on which an earlier user had left a transaction open, with a plain SQL `BEGIN` that
    /// Diesel does not see. The connection was discarded.
    #[error(
        "the pool returned a connection with an open transaction, which was discarded: some code sends BEGIN without \
         COMMIT or ROLLBACK; find it, and try again"
    )]
    TransactionInPool,

    /// The server is a hot standby, whose advisory locks exclude nobody on the primary.
    #[error(
        "cannot take a lock on a standby: its advisory locks exclude nobody on the primary; connect to the primary \
         (target_session_attrs=read-write finds it)"
    )]
    Standby,

    /// The server is a standby, or the transaction is read-only.
    #[error(
        "cannot write: the server is a standby, or the transaction is read-only; connect to the primary \
         (target_session_attrs=read-write finds it)"
    )]
    ReadOnly,

    /// The lock was no longer held when it was to be released: its session had ended, or some code had unlocked it
    /// there.
    #[error(
        "the lock {key} was lost before its release: its session ended, or some code unlocked it, so part of the work may \
         have run unprotected; check that work, or protect it with a Fence"
    )]
    LockLost {
        /// The lock.
        key: LockKey,
        /// The error that revealed the end of the session. `None` if the session is alive.
        source: Option<DieselError>,
    },

    /// A different server session replied than the one that took the lock: a pooler in transaction mode is in between, and
    /// session locks are unsafe there.
    #[error(
        "the lock {key} was taken by the session with pid {taken_by}, but pid {replied_by} replied: session locks do not \
         work behind a pooler in transaction mode; use AdvisoryLock::transaction"
    )]
    SessionMoved {
        /// The lock.
        key: LockKey,
        /// The `pg_backend_pid()` of the session that took the lock.
        taken_by: i32,
        /// The `pg_backend_pid()` of the session that replied later.
        replied_by: i32,
    },

    /// The connections of the pool share server sessions: a pooler in transaction mode is in between, and session locks
    /// are unsafe there.
    #[error(
        "cannot take session locks through this pool: its connections share server sessions, as behind a pooler in \
         transaction mode; use AdvisoryLock::transaction or a Semaphore with one slot, or connect past the pooler"
    )]
    SharedSessions,

    /// A transaction was still open on the connection when its lock was released, so what it wrote was not committed while
    /// the lock was held.
    ///
    /// A pooled connection is discarded, which rolls the transaction back. On a borrowed connection an aborted transaction is
    /// rolled back, and any other is left to the caller. If the lock had lifted an `idle_session_timeout`, the release restored it
    /// inside that transaction. If the caller rolls the transaction back, the timeout is 0 again in that session.
    #[error(
        "a transaction was still open when the lock {key} was released: what it wrote was not committed under the lock; \
         commit it before the guard is released"
    )]
    TransactionLeftOpen {
        /// The lock.
        key: LockKey,
    },

    /// The unlock may not have succeeded.
    ///
    /// A pooled connection is discarded, and the server frees the lock as the session ends. A borrowed one is marked as
    /// broken.
    #[error(
        "failed to release the lock {key}: the session may still hold it; do not use this connection again"
    )]
    ReleaseFailed {
        /// The lock.
        key: LockKey,
        /// Why the unlock failed.
        source: DieselError,
    },

    /// A serialization failure inside the caller's own transaction, whose isolation level is stricter than READ
    /// COMMITTED.
    #[error(
        "a transaction stricter than READ COMMITTED met a concurrent change that its snapshot does not show: retry the \
         transaction, or make this call outside it"
    )]
    StrictIsolation,

    /// The request had timed out before it was released or renewed. Another holder may have taken its slot since then.
    #[error(
        "the request {id} to {service:?} timed out before its release or renewal: more requests than allowed may have been \
         in flight; use a longer timeout, or renew it"
    )]
    TimedOut {
        /// The service.
        service: String,
        /// The id of the request, which is its fencing token.
        id: i64,
    },

    /// Another transaction kept the key of a rate limit locked for 250 milliseconds, so the key was not reset, or not used
    /// up by `testing::use_up`. Nothing was changed.
    #[error(
        "cannot change the rate limit {name:?}: another transaction has locked the key for 250 ms; try again, and look for a \
         transaction that was left open"
    )]
    Contended {
        /// The name of the limit.
        name: String,
    },

    /// A larger fencing token, that of a later holder, has passed the fence.
    #[error(
        "the fencing token {token} is too old for the fence {name:?}: a later holder of the lock or slot has passed it; \
         stop this work"
    )]
    Fenced {
        /// The fence.
        name: String,
        /// The token that was refused.
        token: i64,
    },

    /// A file or directory exists where one of this crate's migrations is to be written, and differs from it. Nothing was
    /// written.
    #[cfg(feature = "migrations")]
    #[error(
        "cannot write a migration to {}: a file or directory with other content has that name; delete it, or rename it to \
         another version",
        .path.display()
    )]
    DifferentFile {
        /// The file or directory.
        path: std::path::PathBuf,
    },

    /// A file could not be read or written.
    #[cfg(feature = "migrations")]
    #[error("failed to read or write {}", .path.display())]
    File {
        /// The file or directory.
        path: std::path::PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },

    /// A migration failed.
    ///
    /// The message names the migration that failed, unless the migrations could not be listed. If the message does not say why, as
    /// for a constraint that is checked at the commit, `source()` does.
    #[cfg(feature = "migrations")]
    #[error(transparent)]
    Migration(Box<dyn std::error::Error + Send + Sync>),

    /// The pool had no connection in time.
    ///
    /// The message contains the pool's own. r2d2 reports `timed out waiting for connection`, followed by the reason if no
    /// connection could be opened. deadpool calls a connection a "slot".
    ///
    /// To convert the error of an asynchronous pool in your own code, use `map_err(|error| Error::Pool(error.into()))`.
    #[error(
        "no connection from the pool: {0}; check that the server is reachable and the pool is large enough"
    )]
    Pool(Box<dyn std::error::Error + Send + Sync>),

    /// An asynchronous operation was polled outside a tokio runtime, which it needs for its timers, and for the task that
    /// undoes what it took when its future is dropped. Nothing was sent. A runtime without timers is detected by catching a panic
    /// of tokio. With `panic = "abort"` that panic ends the process.
    #[cfg(feature = "async")]
    #[error(
        "cannot run an asynchronous operation outside a tokio runtime with timers: nothing could undo what it took if \
         its future were dropped; call it inside a runtime that was built with `enable_all`"
    )]
    NoRuntime,

    /// The database reported an error, or could not be reached.
    ///
    /// The message is that of Diesel: the message of the server, of libpq or of tokio-postgres, in the server's language.
    #[error(transparent)]
    Database(DieselError),
}

/// A call in the wrong kind of transaction: the kind [`Error::Misplaced`]. Nothing was changed.
///
/// A transaction that was opened by `begin_test_transaction` counts as no transaction for session locks, claims,
/// throttles and rate limits. Transaction locks and fences work in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misplaced {
    /// A session lock was requested inside an open transaction, whose rollback it would outlive. Use
    /// [`AdvisoryLock::acquire_xact`](crate::AdvisoryLock::acquire_xact) there.
    #[error(
        "cannot take a session lock inside an open transaction: a rollback would not release it; take it before the \
         transaction, or use acquire_xact inside it"
    )]
    SessionLockInTransaction,

    /// [`AdvisoryLock::transaction`](crate::AdvisoryLock::transaction) was called inside an open transaction. The snapshot of
    /// that transaction may be older than the lock, and the lock would be held until the transaction ends, not until the closure
    /// ends.
    #[error(
        "cannot open a transaction for the lock inside another: its snapshot may be older than the lock; call acquire_xact \
         in the open transaction"
    )]
    NestedTransaction,

    /// A transaction lock was requested outside a transaction, where PostgreSQL would release it at once.
    #[error(
        "cannot take a transaction lock outside a transaction: PostgreSQL would release it at once; call this inside a \
         transaction, or use AdvisoryLock::transaction"
    )]
    XactLockOutsideTransaction,

    /// A transaction lock was requested at REPEATABLE READ. What is read there after waiting for the lock is as old as the
    /// transaction's first statement, so "lock, check, insert" would insert twice.
    #[error(
        "cannot rely on a transaction lock at REPEATABLE READ: the transaction does not see what the previous holder \
         committed; use READ COMMITTED or SERIALIZABLE"
    )]
    XactLockAtRepeatableRead,

    /// A slot was requested inside an open transaction. Other instances would be blocked until the transaction ends, and a
    /// rollback would undo the claim.
    #[error(
        "cannot claim a slot inside an open transaction: other instances would be blocked until it commits; claim the slot \
         before the transaction starts"
    )]
    ClaimInTransaction,

    /// Units were checked, reserved or given back, or keys were reset or pruned, inside an open transaction. A rollback of that
    /// transaction would undo it, and every other call for the key would wait until the transaction ends.
    #[error(
        "cannot change a rate limit inside an open transaction: a rollback would undo the change, and other calls for the key \
         would wait until it ends; call this before the transaction starts"
    )]
    SpendInTransaction,

    /// [`Throttle::run_on`](crate::Throttle::run_on) was called inside an open transaction, where the grant could not be committed
    /// before the work runs.
    #[error(
        "cannot run throttled work inside an open transaction: the grant would not be committed before the work runs; call \
         this outside a transaction, or use attempt_on"
    )]
    GrantInTransaction,

    /// A fence was to be passed outside a transaction.
    #[error(
        "cannot pass a fence outside a transaction: it protects what its own transaction writes; pass it inside that \
         transaction, before the first write"
    )]
    FenceOutsideTransaction,

    /// A fencing token was requested inside an open transaction. If the server crashed before the commit, a later holder
    /// would get the same number.
    #[error(
        "cannot draw a fencing token inside an open transaction: a crash of the server before the commit would give the \
         same token again; call fencing_token before the transaction begins"
    )]
    TokenInTransaction,

    /// Migrations or a sync were requested inside a transaction. A test transaction counts here.
    #[error(
        "cannot run migrations or sync inside a transaction: they commit as they go; run them outside a transaction"
    )]
    CommitsInTransaction,
}

/// A schema `resource_control` that is missing, incomplete, or not usable by this role: the kind [`Error::Schema`].
///
/// The server's message is localised, and Diesel does not expose the SQLSTATE. So after an error of the database the crate queries
/// the catalogue for a table, a function or a privilege that the operation lacks. If nothing is missing, the error is an
/// [`Error::Database`].
///
/// Inside a transaction [`NotInstalled`](Schema::NotInstalled) and [`MissingRights`](Schema::MissingRights) are an
/// [`Error::Database`], because the server's error has aborted the transaction, and the catalogue cannot be queried.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Schema {
    /// The schema is missing, or older than this crate.
    #[error(
        "cannot find what this crate needs in the schema resource_control: it is missing or too old; call \
         migrations::install, or run the files of migrations::write_to"
    )]
    NotInstalled,

    /// The role lacks a right.
    #[error("the role {role} lacks a right that this operation needs: {missing}; grant it")]
    MissingRights {
        /// The role that is connected.
        role: String,
        /// What it lacks: `INSERT on service_request, UPDATE on service_request (grants.sql)`.
        missing: String,
        /// The error of the database. `None` if the right was found missing before anything failed.
        source: Option<DieselError>,
    },

    /// The database does not have the resource.
    #[error(
        "cannot find the resource {label:?}: it has no row in resource_control.throttled_resource; run sync at start-up, or \
         add it in a migration"
    )]
    UnknownResource {
        /// Its label.
        label: String,
    },

    /// The sequence that numbers the requests is behind the ids in the table, as in a copy of a database that was made by
    /// logical replication or a blue/green upgrade, neither of which copies sequences. Every claim fails until the
    /// sequence is set.
    #[error(
        "cannot number a request: the sequence of resource_control.service_request is behind the ids of the table, as in a \
         copy that left it out; run SELECT setval('resource_control.service_request_id_seq', (SELECT max(id) FROM \
         resource_control.service_request))"
    )]
    SequenceBehind,

    /// The schema exists without a recorded version, and is identical neither to the four objects that
    /// [`install`](crate::migrations::install) adopts nor to what the migrations create. Nothing was changed.
    #[cfg(feature = "migrations")]
    #[error(
        "cannot use the schema resource_control: it was not created by this crate and differs from what it \
         creates: {}; change the schema, or rename it",
        .differences.join("; ")
    )]
    Foreign {
        /// Each difference, in English: `table column resource_control.throttled_resource.last_locked is
        /// "timestamp without time zone NOT NULL", expected "timestamp with time zone NOT NULL"`.
        differences: Vec<String>,
    },

    /// Objects that are not this crate's depend on the schema, or are in it. Nothing was dropped.
    #[cfg(feature = "migrations")]
    #[error(
        "cannot drop the schema resource_control: these objects are not this crate's: {}; drop or move them first",
        .objects.join(", ")
    )]
    InUse {
        /// Each object, with its kind and its qualified name: `table constraint tenant_fkey on public.tenant`.
        objects: Vec<String>,
    },
}

#[cfg(feature = "r2d2")]
impl From<diesel::r2d2::PoolError> for Error {
    fn from(error: diesel::r2d2::PoolError) -> Self {
        Error::Pool(Box::new(error))
    }
}

impl From<DieselError> for Error {
    fn from(error: DieselError) -> Self {
        match error {
            DieselError::QueryBuilderError(inner) => match inner.downcast() {
                Ok(ours) => *ours,
                Err(other) => Error::Database(DieselError::QueryBuilderError(other)),
            },
            other => Error::Database(other),
        }
    }
}

impl From<Error> for DieselError {
    fn from(error: Error) -> Self {
        match error {
            Error::Database(error) => error,
            other => DieselError::QueryBuilderError(Box::new(other)),
        }
    }
}
