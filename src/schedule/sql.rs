//! The statements of a schedule. A run is known by its token, which grows with each claim.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::sql_types::{BigInt, Integer, Nullable, Timestamptz};

use crate::statement::{Bind, Statement};
use crate::time::interval;

/// The time, and the tick that was taken last, its attempt, its token, and its lease, which is null once it has ended.
pub(super) type Seen = (
    DateTime<Utc>,
    Option<DateTime<Utc>>,
    Option<i32>,
    Option<i64>,
    Option<DateTime<Utc>>,
);

type SeenSql = (
    Timestamptz,
    Nullable<Timestamptz>,
    Nullable<Integer>,
    Nullable<BigInt>,
    Nullable<Timestamptz>,
);

pub(super) fn look(name: &str) -> Statement<SeenSql> {
    const LOOK: &str = "SELECT c.now, s.tick, s.attempt, s.token, s.expires_at FROM (SELECT pg_catalog.clock_timestamp() AS now) AS c
        LEFT JOIN resource_control.schedule AS s ON s.name = $1";
    Statement::new(LOOK, [name.into()])
}

/// How many schedules were new.
pub(super) fn register(name: &str) -> Statement<BigInt> {
    const REGISTER: &str = "WITH new AS (
            INSERT INTO resource_control.schedule (name, tick) VALUES ($1, pg_catalog.clock_timestamp()) ON CONFLICT DO NOTHING RETURNING 1
        ) SELECT pg_catalog.count(*) FROM new";
    Statement::new(REGISTER, [name.into()])
}

/// The attempt, the token and the missed ticks of a run, or null if another instance has taken a tick since that with this token, or
/// has ended this one.
pub(super) type Claim = Statement<(Nullable<Integer>, Nullable<BigInt>, Nullable<Integer>)>;

pub(super) fn claim(
    name: &str,
    runner: &str,
    lease: Duration,
    tick: DateTime<Utc>,
    missed: u32,
    token: i64,
) -> Claim {
    const CLAIM: &str = "WITH claimed AS (
            UPDATE resource_control.schedule AS s SET tick = n.tick, token = s.token + 1, runner = COALESCE(NULLIF($1, ''),
                    pg_catalog.concat_ws(' ', NULLIF(pg_catalog.btrim(pg_catalog.current_setting('application_name')), ''), 'pid', pg_catalog.pg_backend_pid())),
                    attempt = CASE WHEN s.tick = n.tick THEN s.attempt + 1 ELSE 1 END,
                    missed = CASE WHEN s.tick = n.tick THEN s.missed ELSE n.missed END,
                    started_at = pg_catalog.clock_timestamp(), expires_at = pg_catalog.clock_timestamp() + $2, ended_at = NULL, error = NULL
                FROM (SELECT $3 AS tick, $4 AS missed) AS n
                WHERE s.name = $5 AND s.token = $6 AND n.tick <= pg_catalog.clock_timestamp()
                    AND (s.expires_at <= pg_catalog.clock_timestamp() OR s.expires_at IS NULL AND s.tick < n.tick)
                RETURNING s.attempt, s.token, s.missed
        ) SELECT pg_catalog.max(attempt), pg_catalog.max(token), pg_catalog.max(missed) FROM claimed";
    let binds = [
        runner.into(),
        interval(lease).into(),
        tick.into(),
        (missed as i32).into(),
        name.into(),
        token.into(),
    ];
    Statement::new(CLAIM, binds)
}

/// Changes the row of a run. How many rows: none if it is not the last run any more.
macro_rules! update {
    ($set:literal, $and:literal) => {
        concat!(
            "WITH run AS (
                UPDATE resource_control.schedule AS s SET ",
            $set,
            "
                    WHERE s.name = $2 AND s.token = $3",
            $and,
            " RETURNING 1
            ) SELECT pg_catalog.count(*) FROM run"
        )
    };
}

/// What a run does with its row.
#[derive(Debug, Clone)]
pub(super) enum Update {
    Renew(Duration),
    Finish(Option<String>),
    /// As if the process had died and the lease expired.
    Crash(&'static str),
    /// As if this run had not begun.
    GiveBack,
}

impl Update {
    pub(super) fn of(self, name: &str, token: i64) -> Statement<BigInt> {
        const RENEW: &str = update!(
            "expires_at = pg_catalog.clock_timestamp() + $1",
            " AND s.expires_at > pg_catalog.clock_timestamp()"
        );
        // Also a second time, if the reply to the first was lost.
        const FINISH: &str = update!(
            "expires_at = NULL, ended_at = pg_catalog.clock_timestamp(), error = NULLIF($1, '')",
            ""
        );
        const CRASH: &str = update!(
            "expires_at = pg_catalog.clock_timestamp(), error = $1",
            " AND s.expires_at IS NOT NULL"
        );
        const GIVE_BACK: &str = update!(
            "expires_at = pg_catalog.clock_timestamp(), ended_at = pg_catalog.clock_timestamp(), attempt = s.attempt - $1",
            " AND s.expires_at IS NOT NULL"
        );
        let (sql, value): (_, Bind) = match self {
            Self::Renew(lease) => (RENEW, interval(lease).into()),
            Self::Finish(error) => (FINISH, error.unwrap_or_default().into()),
            Self::Crash(why) => (CRASH, why.into()),
            Self::GiveBack => (GIVE_BACK, 1_i32.into()),
        };
        Statement::new(sql, [value, name.into(), token.into()])
    }
}
