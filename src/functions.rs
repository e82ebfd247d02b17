//! Typed SQL functions for the queries of an application: PostgreSQL's advisory lock functions, and those of the schema
//! `resource_control`.
//!
//! Each lock function exists for one `bigint` and, as `…_pair`, for two `int`. The two key spaces are separate.
//! [`LockKey::id`](crate::LockKey::id) returns the number of a name. [PostgreSQL's documentation][pg] explains the functions.
//!
//! ```
//! use diesel::prelude::*;
//! use diesel_interlock::functions::pg_try_advisory_xact_lock;
//!
//! # diesel::table! { jobs (id) { id -> BigInt, done -> Bool } }
//! # let database = workbench::Database::new();
//! # let conn = &mut database.connect();
//! # diesel::sql_query("CREATE TABLE jobs (id bigint, done bool)").execute(conn)?;
//! # diesel::sql_query("INSERT INTO jobs VALUES (7, false)").execute(conn)?;
//! // The session that gets the lock works on job 7 until its transaction ends.
//! conn.transaction(|conn| {
//!     let mine: bool = diesel::select(pg_try_advisory_xact_lock(7_i64)).get_result(conn)?;
//!     if mine {
//!         diesel::update(jobs::table.find(7)).set(jobs::done.eq(true)).execute(conn)?;
//!     }
//!     QueryResult::Ok(())
//! })?;
//! # Ok::<(), diesel::result::Error>(())
//! ```
//!
//! # Lock functions in a `WHERE` clause
//!
//! Do not call a lock function in a `.filter()`, because PostgreSQL may call it for rows that another condition, a join or a
//! `LIMIT` then discards, and takes a lock for each of them. Select the rows first, in a subquery or a separate statement,
//! and then lock them.
//!
//! # Session locks and pools
//!
//! A lock that a function without `xact` takes belongs to the session until that session unlocks it. On a pooled connection
//! use [`AdvisoryLock`](crate::AdvisoryLock), because its guard keeps the connection. Only the shared function releases a
//! shared lock.
//!
//! [pg]: https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS

// Diesel's macro writes helper types and modules without documentation.
#![allow(missing_docs, unreachable_pub)]

use diesel::deserialize::{self, FromSql, Queryable};
use diesel::pg::{Pg, PgValue};
use diesel::sql_types::{BigInt, Integer, SqlType};

mod stored;

pub use self::stored::*;

/// PostgreSQL's `void`, the type of functions that return nothing. Loads as `()`.
#[derive(Debug, Clone, Copy, Default, diesel::query_builder::QueryId, SqlType)]
#[diesel(postgres_type(oid = 2278, array_oid = 0))]
pub struct Void;

impl FromSql<Void, Pg> for () {
    fn from_sql(_: PgValue<'_>) -> deserialize::Result<Self> {
        Ok(())
    }
}

impl Queryable<Void, Pg> for () {
    type Row = ();

    fn build((): ()) -> deserialize::Result<Self> {
        Ok(())
    }
}

#[diesel::declare_sql_function]
extern "SQL" {
    /// Takes an exclusive session lock. Waits for it.
    #[sql_name = "pg_catalog.pg_advisory_lock"]
    fn pg_advisory_lock(key: BigInt) -> Void;

    /// Takes an exclusive session lock on a pair. Waits for it.
    #[sql_name = "pg_catalog.pg_advisory_lock"]
    fn pg_advisory_lock_pair(key1: Integer, key2: Integer) -> Void;

    /// Takes a shared session lock. Waits for it.
    #[sql_name = "pg_catalog.pg_advisory_lock_shared"]
    fn pg_advisory_lock_shared(key: BigInt) -> Void;

    /// Takes a shared session lock on a pair. Waits for it.
    #[sql_name = "pg_catalog.pg_advisory_lock_shared"]
    fn pg_advisory_lock_shared_pair(key1: Integer, key2: Integer) -> Void;

    /// Takes an exclusive session lock if it is free. Returns whether it was.
    #[sql_name = "pg_catalog.pg_try_advisory_lock"]
    fn pg_try_advisory_lock(key: BigInt) -> Bool;

    /// Takes an exclusive session lock on a pair if it is free. Returns whether it was.
    #[sql_name = "pg_catalog.pg_try_advisory_lock"]
    fn pg_try_advisory_lock_pair(key1: Integer, key2: Integer) -> Bool;

    /// Takes a shared session lock if no session holds it exclusively. Returns whether it did.
    #[sql_name = "pg_catalog.pg_try_advisory_lock_shared"]
    fn pg_try_advisory_lock_shared(key: BigInt) -> Bool;

    /// Takes a shared session lock on a pair if no session holds it exclusively. Returns whether it
    /// did.
    #[sql_name = "pg_catalog.pg_try_advisory_lock_shared"]
    fn pg_try_advisory_lock_shared_pair(key1: Integer, key2: Integer) -> Bool;

    /// Releases an exclusive session lock once. Returns whether this session held it.
    #[sql_name = "pg_catalog.pg_advisory_unlock"]
    fn pg_advisory_unlock(key: BigInt) -> Bool;

    /// Releases an exclusive session lock on a pair once. Returns whether this session held it.
    #[sql_name = "pg_catalog.pg_advisory_unlock"]
    fn pg_advisory_unlock_pair(key1: Integer, key2: Integer) -> Bool;

    /// Releases a shared session lock once. Returns whether this session held it.
    #[sql_name = "pg_catalog.pg_advisory_unlock_shared"]
    fn pg_advisory_unlock_shared(key: BigInt) -> Bool;

    /// Releases a shared session lock on a pair once. Returns whether this session held it.
    #[sql_name = "pg_catalog.pg_advisory_unlock_shared"]
    fn pg_advisory_unlock_shared_pair(key1: Integer, key2: Integer) -> Bool;

    /// Releases every session lock that this session holds, those of guards included.
    #[sql_name = "pg_catalog.pg_advisory_unlock_all"]
    fn pg_advisory_unlock_all() -> Void;

    /// Takes an exclusive transaction lock. Waits for it.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock"]
    fn pg_advisory_xact_lock(key: BigInt) -> Void;

    /// Takes an exclusive transaction lock on a pair. Waits for it.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock"]
    fn pg_advisory_xact_lock_pair(key1: Integer, key2: Integer) -> Void;

    /// Takes a shared transaction lock. Waits for it.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock_shared"]
    fn pg_advisory_xact_lock_shared(key: BigInt) -> Void;

    /// Takes a shared transaction lock on a pair. Waits for it.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock_shared"]
    fn pg_advisory_xact_lock_shared_pair(key1: Integer, key2: Integer) -> Void;

    /// Takes an exclusive transaction lock if it is free. Returns whether it was.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock"]
    fn pg_try_advisory_xact_lock(key: BigInt) -> Bool;

    /// Takes an exclusive transaction lock on a pair if it is free. Returns whether it was.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock"]
    fn pg_try_advisory_xact_lock_pair(key1: Integer, key2: Integer) -> Bool;

    /// Takes a shared transaction lock if no session holds it exclusively. Returns whether it did.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock_shared"]
    fn pg_try_advisory_xact_lock_shared(key: BigInt) -> Bool;

    /// Takes a shared transaction lock on a pair if no session holds it exclusively.
    /// Returns whether it did.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock_shared"]
    fn pg_try_advisory_xact_lock_shared_pair(key1: Integer, key2: Integer) -> Bool;

    /// Returns the process id of the server session, as in `pg_locks` and `pg_stat_activity`.
    #[sql_name = "pg_catalog.pg_backend_pid"]
    fn pg_backend_pid() -> Integer;

    /// Ends the server session with this process id. Returns whether it existed. A role may end its own sessions.
    #[sql_name = "pg_catalog.pg_terminate_backend"]
    fn pg_terminate_backend(pid: Integer) -> Bool;

    /// Returns the server's current time. Unlike `now()`, it advances within a transaction and within a statement.
    #[sql_name = "pg_catalog.clock_timestamp"]
    fn clock_timestamp() -> Timestamptz;
}
