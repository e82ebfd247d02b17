//! What can go wrong, and what to do about it.

use diesel::result::Error as DieselError;

use crate::key::LockKey;

/// A [`Result`](std::result::Result) with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation could not be carried out.
///
/// That somebody else has the lock is not an error but an answer: [`Attempt::Busy`].
///
/// It converts into [`diesel::result::Error`], so `?` works in functions that return a
/// [`QueryResult`](diesel::QueryResult): a [`Database`](Error::Database) error becomes what it
/// was, every other is wrapped as a `QueryBuilderError` with the same message, from which
/// `Error::from` unwraps it again.
///
/// [`Attempt::Busy`]: crate::Attempt::Busy
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name of a lock or of a service is empty, or the key of a lock was made of no parts.
    #[error(
        "the name of a lock or a service must not be empty: give it a name, or the key of a lock at least one part"
    )]
    EmptyName,

    /// A part of a lock's key, or the key of a throttle, could not be formatted: its `Display` returned an
    /// error.
    #[error(
        "a part of the lock's key, or the key of the throttle, could not be formatted: its Display returned an error, \
         which must be corrected there"
    )]
    Unformatted,

    /// A session lock was asked for inside an open transaction, whose rollback it would outlive.
    ///
    /// The transaction lock is made for this: [`AdvisoryLock::acquire_xact`]. A transaction
    /// opened by `begin_test_transaction` does not count.
    ///
    /// [`AdvisoryLock::acquire_xact`]: crate::AdvisoryLock::acquire_xact
    #[error(
        "a session lock outlives the transaction that is open on this connection: \
         take it before the transaction, or use acquire_xact inside it"
    )]
    InTransaction,

    /// The pool gave a connection on which somebody had left a transaction open, with a plain SQL
    /// `BEGIN` that Diesel does not see. The connection was discarded.
    #[cfg(feature = "r2d2")]
    #[error(
        "the pool gave a connection in a transaction that somebody left open, and it was discarded: \
         try again, and look for a BEGIN without its COMMIT or ROLLBACK"
    )]
    TransactionInPool,

    /// [`AdvisoryLock::transaction`] was called inside an open transaction, whose snapshot may be
    /// older than the lock and whose end, not the closure's, would release it.
    ///
    /// [`AdvisoryLock::transaction`]: crate::AdvisoryLock::transaction
    #[error(
        "a transaction is open on this connection already: \
         call acquire_xact inside it instead of opening another"
    )]
    AlreadyInTransaction,

    /// A transaction lock was asked for outside a transaction, where PostgreSQL would release it
    /// as soon as it is granted.
    #[error(
        "a transaction lock protects nothing outside a transaction: \
         call it inside one, or use AdvisoryLock::transaction"
    )]
    NotInTransaction,

    /// A transaction lock was asked for at REPEATABLE READ, where what is read after waiting for
    /// the lock is as old as the transaction's first statement: "lock, check, insert" would insert
    /// twice.
    #[error(
        "a transaction lock does not protect a REPEATABLE READ transaction, which cannot see what \
         the previous holder committed: use READ COMMITTED or SERIALIZABLE"
    )]
    RepeatableRead,

    /// The server is a hot standby, whose advisory locks exclude nobody on the primary.
    #[error(
        "this server is a standby, whose advisory locks exclude nobody on the primary: \
         connect to the primary (target_session_attrs=read-write finds it)"
    )]
    Standby,

    /// The lock was no longer held when it was to be released: its session had ended, or somebody
    /// had unlocked it there.
    #[error(
        "the lock {key} was lost before it was released: part of the work may have run unprotected"
    )]
    LockLost {
        /// The lock.
        key: LockKey,
        /// How the end of the session showed. `None` if the session lives.
        source: Option<DieselError>,
    },

    /// Another server session answered than the one that took the lock: a pooler in transaction
    /// mode sits in between, and session locks are unsafe there.
    #[error(
        "the lock {key} was taken by the session with pid {taken_by}, but pid {answered_by} answers \
         now: session locks do not work behind a pooler in transaction mode, use \
         AdvisoryLock::transaction"
    )]
    SessionMoved {
        /// The lock.
        key: LockKey,
        /// The `pg_backend_pid()` of the session that took the lock.
        taken_by: i32,
        /// The `pg_backend_pid()` of the session that answered later.
        answered_by: i32,
    },

    /// The connections of the pool share server sessions: a pooler in transaction mode sits in
    /// between, and session locks are unsafe there.
    #[cfg(feature = "r2d2")]
    #[error(
        "the connections of this pool share server sessions, as behind a pooler in transaction mode, where session \
         locks do not work: use AdvisoryLock::transaction or a Semaphore of one slot, or connect past the pooler"
    )]
    SharedSessions,

    /// A transaction was still open on the lent connection when its lock was released, so what it
    /// wrote was not committed while the lock was held.
    ///
    /// A pooled connection is discarded, which rolls the transaction back; on a borrowed
    /// connection an aborted one is rolled back, any other is left to the caller. If the caller rolls
    /// it back, an `idle_session_timeout` of that session stays lifted.
    #[error(
        "a transaction was left open when the lock {key} was released: commit it before the guard goes"
    )]
    TransactionLeftOpen {
        /// The lock.
        key: LockKey,
    },

    /// The unlock did not surely succeed.
    ///
    /// A pooled connection is discarded, and the server frees the lock as the session ends; a
    /// borrowed one is marked as broken.
    #[error("the lock {key} could not be released on its connection, which is given up")]
    ReleaseFailed {
        /// The lock.
        key: LockKey,
        /// Why.
        source: DieselError,
    },

    /// The details of an attempt are empty: nobody could tell who took the resource.
    #[error("the details are empty: say who takes the resource, such as a host and a process id")]
    EmptyDetails,

    /// The key of a throttle is empty.
    #[error(
        "the key of a throttle is empty: leave it out, or say what the resource is throttled for"
    )]
    EmptyKey,

    /// A text holds the character NUL, which PostgreSQL's `text` cannot.
    #[error("PostgreSQL's text cannot hold the character NUL: leave it out")]
    NulCharacter,

    /// A text is longer than it may be.
    #[error("{what} may have {longest} bytes at most: shorten it, or send a hash of it")]
    TooLong {
        /// Which text.
        what: &'static str,
        /// How many bytes it may have.
        longest: usize,
    },

    /// The label of a resource is empty or longer than the 63 bytes of a PostgreSQL enum label.
    #[error("the label {label:?} must have 1 to 63 bytes")]
    BadLabel {
        /// The label.
        label: String,
    },

    /// The interval of a resource is zero, or longer than a thousand years.
    #[error("the interval of {label:?} must be longer than zero and at most a thousand years")]
    BadInterval {
        /// The resource.
        label: String,
    },

    /// The database does not know the resource.
    #[error(
        "the resource {label:?} is not in resource_control.throttled_resource: run sync at start-up, or add it in a migration"
    )]
    UnknownResource {
        /// Its label.
        label: String,
    },

    /// The schema `resource_control` is missing, or older than this crate.
    ///
    /// Inside a transaction this is an [`Error::Database`], since the server's error has aborted the
    /// transaction, and the catalogue cannot be asked what is missing.
    #[error(
        "the schema resource_control is missing or too old: call migrations::install, or run the files of migrations::write_to"
    )]
    NotInstalled,

    /// The schema `resource_control` is there without a recorded version, and is neither the article's
    /// four objects nor what the migrations make. Nothing was changed.
    #[cfg(feature = "migrations")]
    #[error(
        "the schema resource_control was not made by this crate and differs from what it makes: {}; \
         change it, or rename it out of the way",
        .differences.join("; ")
    )]
    ForeignInstallation {
        /// Each difference, in English: `table column resource_control.throttled_resource.last_locked is
        /// "timestamp without time zone NOT NULL", expected "timestamp with time zone NOT NULL"`.
        differences: Vec<String>,
    },

    /// Something of the user's depends on the schema `resource_control`, or lies in it. Nothing was
    /// dropped.
    #[cfg(feature = "migrations")]
    #[error(
        "the schema resource_control cannot be dropped before what is not this crate's, drop or move: {}",
        .objects.join(", ")
    )]
    InTheWay {
        /// Each object, with its kind and its qualified name: `table constraint tenant_fkey on
        /// public.tenant`.
        objects: Vec<String>,
    },

    /// A file or directory is where one of this crate's migrations is to be written, and differs from
    /// it. Nothing was written.
    #[cfg(feature = "migrations")]
    #[error(
        "{} differs from this crate's migration of that version: delete it, or rename it to another version",
        .path.display()
    )]
    DifferentFile {
        /// The file or directory.
        path: std::path::PathBuf,
    },

    /// A file could not be read or written.
    #[cfg(feature = "migrations")]
    #[error("{} could not be read or written", .path.display())]
    File {
        /// The file or directory.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },

    /// The role lacks a right. Inside a transaction this is an [`Error::Database`], as
    /// [`NotInstalled`](Error::NotInstalled) is.
    #[error("the role {role} lacks rights on the schema resource_control: {missing}")]
    MissingRights {
        /// The role that is connected.
        role: String,
        /// What it lacks.
        missing: &'static str,
    },

    /// The server is a standby, or the transaction is read-only.
    #[error(
        "the server or the transaction is read-only: connect to the primary (target_session_attrs=read-write finds it)"
    )]
    ReadOnly,

    /// A serialization failure inside the caller's own transaction, whose isolation level is
    /// stricter than READ COMMITTED.
    #[error(
        "a transaction stricter than READ COMMITTED cannot follow concurrent attempts: attempt outside it, or repeat it"
    )]
    StrictIsolation,

    /// A closure that is to run after the commit was given inside an open transaction.
    #[error(
        "the grant could not be committed before the work runs: call it outside a transaction, or use attempt"
    )]
    GrantInTransaction,

    /// A semaphore was told to have no slots, or more than PostgreSQL's `smallint` numbers.
    #[error("the semaphore {service:?} must have 1 to 32767 slots, not {slots}")]
    BadSlots {
        /// The service.
        service: String,
        /// How many slots it was told to have.
        slots: u32,
    },

    /// The time-out of a semaphore is zero, or longer than a thousand years.
    #[error(
        "the time-out of the semaphore {service:?} must be longer than zero and at most a thousand years"
    )]
    BadTimeout {
        /// The service.
        service: String,
    },

    /// A slot was asked for inside an open transaction, which would keep it from everyone until it
    /// ends, and would undo the claim if it is rolled back.
    ///
    /// A transaction opened by `begin_test_transaction` does not count.
    #[error(
        "a slot claimed inside an open transaction is nobody's until the commit: claim it before the transaction"
    )]
    ClaimInTransaction,

    /// The sequence that numbers the requests is behind the ids in the table, as in a copy of a database that
    /// was made by logical replication or a blue/green upgrade: neither copies sequences. Every claim fails until the
    /// sequence is set.
    #[error(
        "the sequence of resource_control.service_request is behind the ids of the table, as after a copy without it: run \
         SELECT setval('resource_control.service_request_id_seq', (SELECT max(id) FROM resource_control.service_request))"
    )]
    SequenceBehind,

    /// The request had timed out before it was released or renewed: from then on another may have
    /// had its slot.
    #[error(
        "the request {id} to {service:?} had timed out: more requests than allowed may have been in flight; give it a longer time-out, or renew it"
    )]
    TimedOut {
        /// The service.
        service: String,
        /// The id of the request, its fencing token.
        id: i64,
    },

    /// A fence was to be passed outside a transaction.
    #[error(
        "a fence protects what its own transaction writes: pass it inside that transaction, before the first write"
    )]
    FenceOutsideTransaction,

    /// A greater fencing token has passed the fence: a later holder's.
    #[error(
        "the fencing token {token} is too old for the fence {name:?}, which a greater one has passed: a later holder \
         has taken over the lock or the slot, so stop this work"
    )]
    Fenced {
        /// The fence.
        name: String,
        /// The token that was refused.
        token: i64,
    },

    /// A fencing token was asked for inside an open transaction. If that does not commit before the server
    /// crashes, the same number is given again, to a later holder.
    #[error(
        "a fencing token cannot be drawn inside an open transaction, since a crash before its commit would give it \
         again: call fencing_token before the transaction begins, or make the lock .fenced()"
    )]
    TokenInTransaction,

    /// Migrations or a sync were asked for inside a transaction, a test transaction included.
    #[error("migrations and sync commit as they go: run them outside a transaction")]
    CommitsInTransaction,

    /// The pool had no connection to give in time.
    #[cfg(feature = "r2d2")]
    ///
    /// It says what r2d2 says, such as `timed out waiting for connection`, and then why no connection
    /// could be opened, if that was the reason.
    #[error(transparent)]
    Pool(diesel::r2d2::PoolError),

    /// A migration could not be run.
    #[cfg(feature = "migrations")]
    ///
    /// It says what Diesel's migration harness says, which names the migration if that is the reason.
    #[error(transparent)]
    Migration(Box<dyn std::error::Error + Send + Sync>),

    /// The database reported an error, or could not be reached.
    ///
    /// It says what Diesel says, which is the message of the server or of libpq in the server's language.
    #[error(transparent)]
    Database(DieselError),
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

#[cfg(feature = "r2d2")]
impl From<diesel::r2d2::PoolError> for Error {
    fn from(error: diesel::r2d2::PoolError) -> Self {
        Error::Pool(error)
    }
}
