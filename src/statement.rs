//! Statements of this crate: SQL as one writes it in psql, with its parameters.

use std::borrow::Cow;
use std::marker::PhantomData;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::pg::{Pg, PgQueryBuilder};
use diesel::query_builder::{AstPass, QueryBuilder, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::sql_types::{
    Array, BigInt, Binary, Double, Integer, Interval, Nullable, Text, Timestamptz,
};

/// A parameter. It is owned, so that a statement can be sent by a task.
#[derive(Debug, Clone)]
pub(crate) enum Bind {
    Text(String),
    Texts(Vec<String>),
    Bytes(Vec<u8>),
    BytesOrNull(Option<Vec<u8>>),
    Integer(i32),
    BigInt(i64),
    BigInts(Vec<i64>),
    Double(f64),
    Doubles(Vec<f64>),
    Interval(PgInterval),
    /// A time as the database told it.
    Timestamp(PgTimestamp),
    /// A time of the program.
    Time(DateTime<Utc>),
}

macro_rules! binds {
    ($($variant:ident($value:ty): $sql:ty,)*) => {
        $(impl From<$value> for Bind {
            fn from(value: $value) -> Self {
                Self::$variant(value)
            }
        })*

        impl Bind {
            fn push<'b>(&'b self, out: &mut AstPass<'_, 'b, Pg>) -> QueryResult<()> {
                match self {
                    $(Self::$variant(value) => out.push_bind_param::<$sql, _>(value)),*
                }
            }
        }
    };
}

binds! {
    Text(String): Text,
    Texts(Vec<String>): Array<Text>,
    Bytes(Vec<u8>): Binary,
    BytesOrNull(Option<Vec<u8>>): Nullable<Binary>,
    Integer(i32): Integer,
    BigInt(i64): BigInt,
    BigInts(Vec<i64>): Array<BigInt>,
    Double(f64): Double,
    Doubles(Vec<f64>): Array<Double>,
    Interval(PgInterval): Interval,
    Timestamp(PgTimestamp): Timestamptz,
    Time(DateTime<Utc>): Timestamptz,
}

impl From<&str> for Bind {
    fn from(value: &str) -> Self {
        Self::Text(value.into())
    }
}

/// A number that stands for a database in replies and refusals, made by [`database!`]. Two
/// databases may have the same number by chance, which costs time and no correctness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Database(pub(crate) i32);

/// The SQL of a [`Database`]: a hash of its name, and of when the server started. Only the texts of
/// waits contain it.
macro_rules! database {
    () => {
        "pg_catalog.hashname(pg_catalog.current_database()) OPERATOR(pg_catalog.#) \
         pg_catalog.hashfloat8(pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time()))"
    };
}
pub(crate) use database;

/// Whether the primary is elsewhere: this server is a standby, or is set to refuse writes, and this
/// transaction was not opened to write. A transaction that its owner opened READ ONLY on a primary
/// does not count.
macro_rules! is_elsewhere {
    () => {
        "pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'on' \
         AND (pg_catalog.pg_is_in_recovery() OR pg_catalog.current_setting(\
         'default_transaction_read_only') OPERATOR(pg_catalog.=) 'on')"
    };
}
pub(crate) use is_elsewhere;

/// Makes the commit wait for the disk, and for a synchronous standby if there is one, even where
/// the setting of the role says otherwise: what is taken must not be forgotten by a crash. The
/// expression is null, or a text.
macro_rules! keep_commit {
    () => {
        "CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') \
         THEN pg_catalog.set_config('synchronous_commit', 'on', true) END"
    };
}
pub(crate) use keep_commit;

/// The numbers of this crate's own advisory locks, which share the numbers of applications. The
/// files in `migrations` contain the same numbers, and a test compares. Add a new one to the
/// table of `docs/reference.md`, too.
macro_rules! own_lock {
    // Locked by a migration until its transaction ends.
    (install) => {
        "20000101000000"
    };
    // A seed of the hash of a throttle's name and key, whose first grant tries that lock; with the
    // next number for the key of a resource.
    (first_grant) => {
        "20000101000002"
    };
    // A seed of the hash of a service, for claims after its number of slots was lowered.
    (lowered) => {
        "20000101000003"
    };
    // A seed of the hash of a service, to which the slot is added, for a claim of that slot.
    (slot) => {
        "20000101000004"
    };
    // Locked while the sequences of fencing tokens are raised.
    (tokens) => {
        "20000101000009"
    };
}
pub(crate) use own_lock;

/// A statement whose rows have the SQL types `T`. It is prepared once per connection.
#[derive(Debug)]
pub struct Statement<T> {
    sql: Cow<'static, str>,
    binds: Vec<Bind>,
    rows: PhantomData<fn() -> T>,
}

impl<T> Statement<T> {
    pub(crate) fn new(
        sql: impl Into<Cow<'static, str>>,
        binds: impl IntoIterator<Item = Bind>,
    ) -> Self {
        Self {
            sql: sql.into(),
            binds: binds.into_iter().collect(),
            rows: PhantomData,
        }
    }

    /// The same statement in another text, which a session prepares anew.
    pub(crate) fn anew(&self) -> Self {
        self.in_text(format!("{} ", self.sql))
    }

    /// A statement with the same parameters.
    pub(crate) fn in_text(&self, sql: impl Into<Cow<'static, str>>) -> Self {
        Self::new(sql, self.binds.clone())
    }
}

impl<T> Clone for Statement<T> {
    fn clone(&self) -> Self {
        self.in_text(self.sql.clone())
    }
}

/// A statement in the form that Diesel takes. It holds a reference, because for `&Statement` Diesel
/// would compose the text from its pieces, three times per call.
pub(crate) struct Query<'s, T>(pub(crate) &'s Statement<T>);

impl<T> QueryFragment<Pg> for Query<'_, T> {
    /// The text is sent whole, with its own `$1`, `$2` …
    fn to_sql(&self, out: &mut PgQueryBuilder, _: &Pg) -> QueryResult<()> {
        out.push_sql(&self.0.sql);
        Ok(())
    }

    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.binds.iter().try_for_each(|bind| bind.push(&mut out))
    }
}

impl<T> diesel::query_builder::Query for Query<'_, T> {
    type SqlType = T;
}

/// Diesel finds a prepared statement by its text.
impl<T> QueryId for Query<'_, T> {
    type QueryId = ();
    const HAS_STATIC_QUERY_ID: bool = false;
}
