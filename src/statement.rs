//! Statements of this crate: SQL as one writes it in psql, with its parameters.

use std::borrow::Cow;
use std::marker::PhantomData;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::pg::Pg;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Binary, Double, Integer, Interval, Text, Timestamptz};

/// A parameter. It is owned, so that a statement can be sent by a task.
#[derive(Debug)]
pub(crate) enum Bind {
    Text(String),
    Texts(Vec<String>),
    Bytes(Vec<u8>),
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

/// Tells databases apart, in 20 bits: a hash of the name, and of when the server started.
macro_rules! database {
    () => {
        "((pg_catalog.hashname(pg_catalog.current_database()) \
         OPERATOR(pg_catalog.#) \
         pg_catalog.hashfloat8(pg_catalog.date_part('epoch', \
         pg_catalog.pg_postmaster_start_time()))) \
         OPERATOR(pg_catalog.&) 1048575)"
    };
}
pub(crate) use database;

/// Lets the transaction wait for the disk, and for a standby if there is a synchronous one, also where the role's setting says
/// otherwise: what is taken must not be forgotten by a crash. Null, or a text.
macro_rules! keep_commit {
    () => {
        "CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') \
         THEN pg_catalog.set_config('synchronous_commit', 'on', true) END"
    };
}
pub(crate) use keep_commit;

/// A statement whose rows have the SQL types `T`. It is prepared once per connection.
#[derive(Debug)]
pub(crate) struct Statement<T> {
    sql: Cow<'static, str>,
    binds: Vec<Bind>,
    rows: PhantomData<fn() -> T>,
}

impl<T> Statement<T> {
    /// `$1`, `$2` … first appear in this order, may appear again, and `$` appears nowhere else.
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
}

impl<T> QueryFragment<Pg> for Statement<T> {
    /// Diesel numbers the parameters in the order in which they are pushed. One that appears again is text.
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        let mut pieces = self.sql.split('$');
        out.push_sql(pieces.next().unwrap_or_default());
        let mut binds = self.binds.iter().zip(1_usize..).peekable();
        for piece in pieces {
            let end = piece
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(piece.len());
            let (number, rest) = piece.split_at(end);
            match binds.next_if(|(_, next)| number.parse() == Ok(*next)) {
                Some((bind, _)) => bind.push(&mut out)?,
                None => {
                    out.push_sql("$");
                    out.push_sql(number);
                }
            }
            out.push_sql(rest);
        }
        debug_assert!(binds.next().is_none(), "binds out of order: {}", self.sql);
        Ok(())
    }
}

impl<T> Query for Statement<T> {
    type SqlType = T;
}

/// Diesel finds a prepared statement by its text.
impl<T> QueryId for Statement<T> {
    type QueryId = ();
    const HAS_STATIC_QUERY_ID: bool = false;
}
