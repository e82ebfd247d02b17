//! PostgreSQL's advisory lock functions and those of the schema `resource_control`, typed, to be
//! composed in queries of one's own.
//!
//! Each lock function exists for one `bigint` and, as `…_pair`, for two `int`; the two key spaces never meet.
//! [`LockKey::id`](crate::LockKey::id) gives the numbers of a name. They are explained in
//! [PostgreSQL's documentation][pg].
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
//! // Whoever gets the lock works on job 7 until its transaction ends.
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
//! # In a `WHERE` clause
//!
//! PostgreSQL may call a function in a `.filter()` for rows that another condition, a join or a
//! `LIMIT` then discards, and takes a lock for each of them. Choose the rows first, in a subquery
//! or a statement of its own, and lock what was chosen.
//!
//! # Session locks and pools
//!
//! What the functions without `xact` take stays with the session until it is unlocked *there*: on a
//! pooled connection use [`AdvisoryLock`](crate::AdvisoryLock), whose guard pins it. A shared lock
//! is released by the shared function only.
//!
//! [pg]: https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS

// Diesel's macro writes helper types and modules that carry no documentation of their own.
#![allow(missing_docs, unreachable_pub)]

use diesel::deserialize::{self, FromSql, Queryable};
use diesel::pg::{Pg, PgValue};
use diesel::sql_types::{BigInt, Integer, SqlType};

mod stored;

pub use self::stored::*;

/// PostgreSQL's `void`, the type of functions that answer nothing. Loads as `()`.
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
    /// Takes an exclusive session lock; waits for it.
    #[sql_name = "pg_catalog.pg_advisory_lock"]
    fn pg_advisory_lock(key: BigInt) -> Void;

    /// Takes an exclusive session lock on a pair; waits for it.
    #[sql_name = "pg_catalog.pg_advisory_lock"]
    fn pg_advisory_lock_pair(key1: Integer, key2: Integer) -> Void;

    /// Takes a shared session lock; waits for it.
    #[sql_name = "pg_catalog.pg_advisory_lock_shared"]
    fn pg_advisory_lock_shared(key: BigInt) -> Void;

    /// Takes a shared session lock on a pair; waits for it.
    #[sql_name = "pg_catalog.pg_advisory_lock_shared"]
    fn pg_advisory_lock_shared_pair(key1: Integer, key2: Integer) -> Void;

    /// Takes an exclusive session lock if it is free, and answers whether it was.
    #[sql_name = "pg_catalog.pg_try_advisory_lock"]
    fn pg_try_advisory_lock(key: BigInt) -> Bool;

    /// Takes an exclusive session lock on a pair if it is free, and answers whether it was.
    #[sql_name = "pg_catalog.pg_try_advisory_lock"]
    fn pg_try_advisory_lock_pair(key1: Integer, key2: Integer) -> Bool;

    /// Takes a shared session lock if nobody holds it exclusively, and answers whether it did.
    #[sql_name = "pg_catalog.pg_try_advisory_lock_shared"]
    fn pg_try_advisory_lock_shared(key: BigInt) -> Bool;

    /// Takes a shared session lock on a pair if nobody holds it exclusively, and answers whether it
    /// did.
    #[sql_name = "pg_catalog.pg_try_advisory_lock_shared"]
    fn pg_try_advisory_lock_shared_pair(key1: Integer, key2: Integer) -> Bool;

    /// Releases an exclusive session lock once, and answers whether this session held it.
    #[sql_name = "pg_catalog.pg_advisory_unlock"]
    fn pg_advisory_unlock(key: BigInt) -> Bool;

    /// Releases an exclusive session lock on a pair once, and answers whether this session held it.
    #[sql_name = "pg_catalog.pg_advisory_unlock"]
    fn pg_advisory_unlock_pair(key1: Integer, key2: Integer) -> Bool;

    /// Releases a shared session lock once, and answers whether this session held it.
    #[sql_name = "pg_catalog.pg_advisory_unlock_shared"]
    fn pg_advisory_unlock_shared(key: BigInt) -> Bool;

    /// Releases a shared session lock on a pair once, and answers whether this session held it.
    #[sql_name = "pg_catalog.pg_advisory_unlock_shared"]
    fn pg_advisory_unlock_shared_pair(key1: Integer, key2: Integer) -> Bool;

    /// Releases every session lock that this session holds, those of guards included.
    #[sql_name = "pg_catalog.pg_advisory_unlock_all"]
    fn pg_advisory_unlock_all() -> Void;

    /// Takes an exclusive transaction lock; waits for it.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock"]
    fn pg_advisory_xact_lock(key: BigInt) -> Void;

    /// Takes an exclusive transaction lock on a pair; waits for it.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock"]
    fn pg_advisory_xact_lock_pair(key1: Integer, key2: Integer) -> Void;

    /// Takes a shared transaction lock; waits for it.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock_shared"]
    fn pg_advisory_xact_lock_shared(key: BigInt) -> Void;

    /// Takes a shared transaction lock on a pair; waits for it.
    #[sql_name = "pg_catalog.pg_advisory_xact_lock_shared"]
    fn pg_advisory_xact_lock_shared_pair(key1: Integer, key2: Integer) -> Void;

    /// Takes an exclusive transaction lock if it is free, and answers whether it was.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock"]
    fn pg_try_advisory_xact_lock(key: BigInt) -> Bool;

    /// Takes an exclusive transaction lock on a pair if it is free, and answers whether it was.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock"]
    fn pg_try_advisory_xact_lock_pair(key1: Integer, key2: Integer) -> Bool;

    /// Takes a shared transaction lock if nobody holds it exclusively, and answers whether it did.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock_shared"]
    fn pg_try_advisory_xact_lock_shared(key: BigInt) -> Bool;

    /// Takes a shared transaction lock on a pair if nobody holds it exclusively, and answers
    /// whether it did.
    #[sql_name = "pg_catalog.pg_try_advisory_xact_lock_shared"]
    fn pg_try_advisory_xact_lock_shared_pair(key1: Integer, key2: Integer) -> Bool;

    /// Answers the process id of the server session, by which `pg_locks` and `pg_stat_activity`
    /// know it.
    #[sql_name = "pg_catalog.pg_backend_pid"]
    fn pg_backend_pid() -> Integer;

    /// Ends the server session with this process id, and answers whether it was there. One may end
    /// the sessions of one's own role.
    #[sql_name = "pg_catalog.pg_terminate_backend"]
    fn pg_terminate_backend(pid: Integer) -> Bool;

    /// Answers the server's time now; unlike `now()`, also within a transaction or a statement.
    #[sql_name = "pg_catalog.clock_timestamp"]
    fn clock_timestamp() -> Timestamptz;
}
