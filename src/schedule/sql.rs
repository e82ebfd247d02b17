//! The statements of a schedule. A run recognizes its row by the token, which grows with each
//! claim, and by a random number that the claim has stored.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Timestamptz};

use crate::input::interval;
use crate::lease::Row;
use crate::statement::{Bind, Statement, keep_commit};

/// The time now; the tick that was taken last, its attempt, its token and the number of its claim;
/// the end of its lease, which is null once the run has ended; and whether the schedule is paused.
pub(super) type Seen = (
    DateTime<Utc>,
    Option<DateTime<Utc>>,
    Option<i32>,
    Option<i64>,
    Option<i64>,
    Option<DateTime<Utc>>,
    bool,
);

type SeenSql = (
    Timestamptz,
    Nullable<Timestamptz>,
    Nullable<Integer>,
    Nullable<BigInt>,
    Nullable<BigInt>,
    Nullable<Timestamptz>,
    Bool,
);

pub(super) fn look(name: &str) -> Statement<SeenSql> {
    const LOOK: &str = "
        SELECT c.now, s.tick, s.attempt, s.token, s.claim, s.expires_at, s.paused_at IS NOT NULL
            FROM (SELECT pg_catalog.clock_timestamp() AS now) AS c
                LEFT JOIN resource_control.schedule AS s ON s.name = $1";
    Statement::new(LOOK, [name.into()])
}

/// Pauses a schedule, which may be new. Returns whether it was not paused before.
pub(super) fn pause(name: &str) -> Statement<Bool> {
    const PAUSE: &str = "WITH paused AS (
            INSERT INTO resource_control.schedule AS s (name, tick, paused_at)
                VALUES ($1, pg_catalog.clock_timestamp(), pg_catalog.clock_timestamp())
                ON CONFLICT (name) DO UPDATE SET paused_at = EXCLUDED.paused_at
                    WHERE s.paused_at IS NULL RETURNING 1
        ) SELECT EXISTS (SELECT FROM paused)";
    Statement::new(PAUSE, [name.into()])
}

/// Resumes a schedule, and returns whether it was paused.
pub(super) fn resume(name: &str) -> Statement<Bool> {
    const RESUME: &str = "WITH resumed AS (
            UPDATE resource_control.schedule AS s SET paused_at = NULL
                WHERE s.name OPERATOR(pg_catalog.=) $1 AND s.paused_at IS NOT NULL RETURNING 1
        ) SELECT EXISTS (SELECT FROM resumed)";
    Statement::new(RESUME, [name.into()])
}

/// Stores a new schedule with the time now. Returns 0 if it exists.
pub(super) fn register(name: &str) -> Statement<BigInt> {
    const REGISTER: &str = "WITH new AS (
            INSERT INTO resource_control.schedule (name, tick)
                VALUES ($1, pg_catalog.clock_timestamp()) ON CONFLICT DO NOTHING RETURNING 1
        ) SELECT pg_catalog.count(*) FROM new";
    Statement::new(REGISTER, [name.into()])
}

/// The attempt, the token and the missed ticks of the run. All are null if the claim is refused:
/// since the look, another instance has taken a tick or has ended this one, or the schedule was
/// paused.
pub(super) type Claim = Statement<(Nullable<Integer>, Nullable<BigInt>, Nullable<Integer>)>;
pub(super) type Claimed = (Option<i32>, Option<i64>, Option<i32>);

/// What a claim takes, and which token its look has seen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Take<'a> {
    pub(super) name: &'a str,
    pub(super) runner: &'a str,
    pub(super) lease: Duration,
    pub(super) tick: DateTime<Utc>,
    pub(super) missed: u32,
    pub(super) seen: i64,
    pub(super) number: i64,
}

impl Take<'_> {
    pub(super) fn claim(self) -> Claim {
        const CLAIM: &str = concat!(
            "WITH claimed AS (
            UPDATE resource_control.schedule AS s SET tick = $3,
                    token = resource_control.next_token('resource_control.fencing_token'),
                    claim = $7, runner = $5,
                    attempt = CASE WHEN s.tick = $3 THEN s.attempt + 1 ELSE 1 END,
                    missed = CASE WHEN s.tick = $3 THEN s.missed ELSE $4 END,
                    started_at = pg_catalog.clock_timestamp(),
                    expires_at = pg_catalog.clock_timestamp() + $6, ended_at = NULL, error = NULL
                WHERE s.name = $1 AND s.token = $2 AND s.paused_at IS NULL
                    AND $3 <= pg_catalog.clock_timestamp()
                    AND (s.expires_at <= pg_catalog.clock_timestamp()
                        OR s.expires_at IS NULL AND s.tick < $3)
                RETURNING s.attempt, s.token, s.missed, ",
            keep_commit!(),
            "
        ) SELECT pg_catalog.max(attempt), pg_catalog.max(token), pg_catalog.max(missed)
            FROM claimed"
        );
        let binds = [
            self.name.into(),
            self.seen.into(),
            self.tick.into(),
            (self.missed as i32).into(),
            self.runner.into(),
            interval(self.lease).into(),
            self.number.into(),
        ];
        Statement::new(CLAIM, binds)
    }
}

/// Changes the row of a run. Returns whether the row still belongs to this run.
macro_rules! update {
    ($set:literal, $and:expr) => {
        concat!(
            "WITH run AS (
                UPDATE resource_control.schedule AS s SET ",
            $set,
            "
                    WHERE s.name = $1 AND s.token = $2 AND s.claim = $3",
            $and,
            " RETURNING 1
            ) SELECT EXISTS (SELECT FROM run)"
        )
    };
}

fn update(sql: &'static str, row: &Row, value: Option<Bind>) -> Statement<Bool> {
    let row = [(&*row.name).into(), row.token.into(), row.claim.into()];
    Statement::new(sql, row.into_iter().chain(value))
}

pub(super) fn renew(row: &Row, lease: Duration) -> Statement<Bool> {
    const RENEW: &str = update!(
        "expires_at = pg_catalog.clock_timestamp() + $4",
        concat!(
            " AND s.expires_at > pg_catalog.clock_timestamp() AND ",
            keep_commit!(),
            " IS DISTINCT FROM ''"
        )
    );
    update(RENEW, row, Some(interval(lease).into()))
}

/// How a run ends its tick.
#[derive(Debug, Clone)]
pub(super) enum End {
    Finish(Option<String>),
    /// As if the process had died, and its lease had expired.
    Crash(&'static str),
    /// As if this run had not begun.
    GiveBack,
}

impl End {
    /// Returns the statement for this end. Each may be sent again if its reply was lost.
    pub(super) fn of(self, row: &Row) -> Statement<Bool> {
        const FINISH: &str = update!(
            "expires_at = NULL, ended_at = pg_catalog.clock_timestamp(), error = NULLIF($4, '')",
            ""
        );
        const CRASH: &str = update!(
            "expires_at = pg_catalog.clock_timestamp(), error = $4",
            " AND s.expires_at IS NOT NULL AND s.ended_at IS NULL"
        );
        const GIVE_BACK: &str = update!(
            "expires_at = pg_catalog.clock_timestamp(), ended_at = pg_catalog.clock_timestamp(), \
             attempt = s.attempt - 1",
            " AND s.expires_at IS NOT NULL AND s.ended_at IS NULL"
        );
        match self {
            Self::Finish(error) => update(FINISH, row, Some(error.unwrap_or_default().into())),
            Self::Crash(why) => update(CRASH, row, Some(why.into())),
            Self::GiveBack => update(GIVE_BACK, row, None),
        }
    }
}
