//! The statements of a schedule. A run recognizes its row by the token, which grows with each
//! claim, and by a random number that the claim has stored.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::Queryable;
use diesel::data_types::PgTimestamp;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Timestamptz};

use super::due::Plan;
use crate::input::{interval, time, timestamp};
use crate::lease::Row;
use crate::statement::{Bind, Statement, keep_commit};

/// What a look sees. Everything but the time is null or zero if there is no row.
#[derive(Debug, Queryable)]
pub(super) struct Seen {
    pub(super) now: DateTime<Utc>,
    counted_from: Option<DateTime<Utc>>,
    /// Null is not known, and `infinity` is never.
    next_at: Option<PgTimestamp>,
    /// The last claim: its token, its number, and the tick that it took.
    pub(super) token: i64,
    pub(super) claim: Option<i64>,
    pub(super) tick: Option<DateTime<Utc>>,
    /// The runs of the tick, and how many of them have returned an error.
    pub(super) attempt: i32,
    pub(super) failed: i32,
    pub(super) started_at: Option<DateTime<Utc>>,
    /// Null if the tick is not to be run again. Otherwise the end of the lease; of a tick that was
    /// given back, when that was; of a failed tick, when it is retried.
    pub(super) expires_at: Option<DateTime<Utc>>,
    /// Whether the run has ended its tick, or has given it back.
    pub(super) is_ended: bool,
    pub(super) has_error: bool,
    pub(super) triggered_at: Option<DateTime<Utc>>,
    pub(super) is_paused: bool,
}

type SeenSql = (
    Timestamptz,
    Nullable<Timestamptz>,
    Nullable<Timestamptz>,
    BigInt,
    Nullable<BigInt>,
    Nullable<Timestamptz>,
    Integer,
    Integer,
    Nullable<Timestamptz>,
    Nullable<Timestamptz>,
    Bool,
    Bool,
    Nullable<Timestamptz>,
    Bool,
);

impl Seen {
    /// What comes next, unless there is no row.
    pub(super) fn plan(&self) -> Option<Plan> {
        Some(Plan {
            counted_from: self.counted_from?,
            next_at: self.next_at.and_then(time),
        })
    }

    /// Whether the last tick was asked for: a scheduled one is what comes next is counted from.
    pub(super) fn is_triggered(&self) -> bool {
        self.tick > self.counted_from
    }
}

pub(super) fn look(name: &str) -> Statement<SeenSql> {
    const LOOK: &str = "
        SELECT c.now, s.counted_from, s.next_at, COALESCE(s.token, 0) AS token, s.claim,
                s.tick, COALESCE(s.attempt, 0) AS attempt, COALESCE(s.failed, 0) AS failed,
                s.started_at, s.expires_at, s.ended_at IS NOT NULL AS has_ended,
                s.error IS NOT NULL AS has_failed, s.triggered_at,
                s.paused_at IS NOT NULL AS is_paused
            FROM (SELECT pg_catalog.clock_timestamp() AS now) AS c
                LEFT JOIN resource_control.schedule AS s ON s.name = $1";
    Statement::new(LOOK, [name.into()])
}

/// Sets a column to the time now, on a schedule that may be new. Returns whether it was null.
macro_rules! mark {
    ($column:literal) => {
        concat!(
            "WITH marked AS (
                INSERT INTO resource_control.schedule AS s (name, ",
            $column,
            ")
                    VALUES ($1, pg_catalog.clock_timestamp())
                    ON CONFLICT (name) DO UPDATE SET ",
            $column,
            " = EXCLUDED.",
            $column,
            "
                        WHERE s.",
            $column,
            " IS NULL RETURNING 1
            ) SELECT EXISTS (SELECT FROM marked)"
        )
    };
}

/// Pauses a schedule, which may be new. Returns whether it was not paused before.
pub(super) fn pause(name: &str) -> Statement<Bool> {
    Statement::new(mark!("paused_at"), [name.into()])
}

/// Asks for a run of a schedule, which may be new. Returns whether none was asked for yet.
pub(super) fn trigger(name: &str) -> Statement<Bool> {
    Statement::new(mark!("triggered_at"), [name.into()])
}

/// Resumes a schedule, and returns whether it was paused.
pub(super) fn resume(name: &str) -> Statement<Bool> {
    const RESUME: &str = "WITH resumed AS (
            UPDATE resource_control.schedule AS s SET paused_at = NULL
                WHERE s.name OPERATOR(pg_catalog.=) $1 AND s.paused_at IS NOT NULL RETURNING 1
        ) SELECT EXISTS (SELECT FROM resumed)";
    Statement::new(RESUME, [name.into()])
}

/// Stores a new schedule with what comes next. Returns whether it was new.
pub(super) fn register(name: &str, plan: Plan) -> Statement<Bool> {
    const REGISTER: &str = "WITH new AS (
            INSERT INTO resource_control.schedule (name, counted_from, next_at)
                VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING 1
        ) SELECT EXISTS (SELECT FROM new)";
    let binds = [
        name.into(),
        plan.counted_from.into(),
        timestamp(plan.next_at).into(),
    ];
    Statement::new(REGISTER, binds)
}

/// Stores what comes next, unless another loop has changed that, or has claimed a tick, since the
/// look. Returns whether it is stored.
pub(super) fn amend(name: &str, seen: (i64, Plan), plan: Plan) -> Statement<Bool> {
    const AMEND: &str = "WITH amended AS (
            UPDATE resource_control.schedule AS s SET counted_from = $4, next_at = $5
                WHERE s.name = $1 AND s.token = $2 AND COALESCE(s.next_at, 'infinity') = $3
                RETURNING 1
        ) SELECT EXISTS (SELECT FROM amended)";
    let (token, seen) = seen;
    let binds = [
        name.into(),
        token.into(),
        timestamp(seen.next_at).into(),
        plan.counted_from.into(),
        timestamp(plan.next_at).into(),
    ];
    Statement::new(AMEND, binds)
}

/// The tick, the attempt, how many of the attempts have failed, the missed ticks, and the token of
/// the run. All are null if the claim is refused: since the look, another instance has claimed a
/// tick or has changed what comes next, the last run has ended, or the schedule was paused.
pub(super) type Claim = Statement<(
    Nullable<Timestamptz>,
    Nullable<Integer>,
    Nullable<Integer>,
    Nullable<Integer>,
    Nullable<BigInt>,
)>;
pub(super) type Claimed = (
    Option<DateTime<Utc>>,
    Option<i32>,
    Option<i32>,
    Option<i32>,
    Option<i64>,
);

/// What a claim takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// The last tick again: its run has crashed, was given back, or has failed and is retried.
    Again,
    /// The tick that was asked for at this moment.
    Triggered(DateTime<Utc>),
    /// A scheduled tick.
    Scheduled {
        at: DateTime<Utc>,
        missed: u32,
        /// `next_at` as the look has seen it.
        seen: Option<DateTime<Utc>>,
        then: Plan,
    },
}

/// A claim, and which token its look has seen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Take<'a> {
    pub(super) name: &'a str,
    pub(super) runner: &'a str,
    pub(super) lease: Duration,
    pub(super) seen: i64,
    pub(super) number: i64,
    pub(super) what: What,
}

/// A claim that sets the columns of its kind, under the condition of its kind.
macro_rules! claim {
    ($set:literal, $and:literal) => {
        concat!(
            "WITH claimed AS (
                UPDATE resource_control.schedule AS s SET ",
            $set,
            ",
                    token = resource_control.next_token('resource_control.fencing_token'),
                    claim = $3, runner = $4, started_at = pg_catalog.clock_timestamp(),
                    expires_at = pg_catalog.clock_timestamp() + $5, ended_at = NULL, error = NULL
                WHERE s.name = $1 AND s.token = $2
                    AND ",
            $and,
            "
                RETURNING s.tick, s.attempt, s.failed, s.missed, s.token, ",
            keep_commit!(),
            "
            ) SELECT pg_catalog.max(tick), pg_catalog.max(attempt), pg_catalog.max(failed),
                    pg_catalog.max(missed), pg_catalog.max(token)
                FROM claimed"
        )
    };
}

impl Take<'_> {
    pub(super) fn claim(self) -> Claim {
        const AGAIN: &str = claim!(
            "attempt = s.attempt + 1",
            "(s.paused_at IS NULL OR s.tick > s.counted_from)
                    AND s.expires_at <= pg_catalog.clock_timestamp()"
        );
        const TRIGGERED: &str = claim!(
            "tick = s.triggered_at, triggered_at = NULL, attempt = 1, failed = 0, missed = 0",
            "s.triggered_at = $6 AND (s.ended_at IS NOT NULL
                        OR COALESCE(s.expires_at, '-infinity') <= pg_catalog.clock_timestamp())"
        );
        const SCHEDULED: &str = claim!(
            "tick = $6, attempt = 1, failed = 0, missed = $7, counted_from = $6, next_at = $8",
            "s.paused_at IS NULL AND s.next_at = $9 AND s.counted_from < $6
                    AND $6 <= pg_catalog.clock_timestamp() AND (s.ended_at IS NOT NULL
                        OR COALESCE(s.expires_at, '-infinity') <= pg_catalog.clock_timestamp())"
        );
        let mut binds: Vec<Bind> = vec![
            self.name.into(),
            self.seen.into(),
            self.number.into(),
            self.runner.into(),
            interval(self.lease).into(),
        ];
        let sql = match self.what {
            What::Again => AGAIN,
            What::Triggered(at) => {
                binds.push(at.into());
                TRIGGERED
            }
            What::Scheduled {
                at,
                missed,
                seen,
                then,
            } => {
                binds.extend([
                    at.into(),
                    (missed as i32).into(),
                    timestamp(then.next_at).into(),
                    timestamp(seen).into(),
                ]);
                SCHEDULED
            }
        };
        Statement::new(sql, binds)
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

fn update(sql: &'static str, row: &Row, values: impl IntoIterator<Item = Bind>) -> Statement<Bool> {
    let row = [(&*row.name).into(), row.token.into(), row.claim.into()];
    Statement::new(sql, row.into_iter().chain(values))
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
    update(RENEW, row, [interval(lease).into()])
}

/// What is stored of a run that was longer than its limit, while its work may go on: another
/// instance runs the tick when the lease has expired.
pub(super) fn overrun(row: &Row, limit: Duration) -> Statement<Bool> {
    End::Crash(too_long(limit)).of(row)
}

/// Why a run has crashed that was longer than its limit.
pub(super) fn too_long(limit: Duration) -> String {
    format!("the run took longer than {limit:?}")
}

/// How a run ends its tick.
#[derive(Debug, Clone)]
pub(super) enum End {
    Done,
    /// How many attempts have failed, and the pause before a retry, if there is one.
    Failed(String, i32, Option<Duration>),
    /// As if the process had died: another instance runs the tick when the lease has expired.
    Crash(String),
    /// As `Crash`, but the work is known to have stopped, so the lease expires now.
    CrashAndFree(String),
    /// As if this run had not begun.
    GiveBack,
}

impl End {
    /// Returns the statement for this end. Each may be sent again if its reply was lost.
    pub(super) fn of(self, row: &Row) -> Statement<Bool> {
        const DONE: &str = update!(
            "expires_at = NULL, ended_at = pg_catalog.clock_timestamp(), error = NULL",
            ""
        );
        const FAILED: &str = update!(
            "expires_at = NULL, ended_at = pg_catalog.clock_timestamp(), error = $4, failed = $5",
            ""
        );
        const RETRIED: &str = update!(
            "expires_at = pg_catalog.clock_timestamp() + $6,
                        ended_at = pg_catalog.clock_timestamp(), error = $4, failed = $5",
            ""
        );
        const CRASH: &str = update!(
            "error = $4",
            " AND s.expires_at IS NOT NULL AND s.ended_at IS NULL"
        );
        const CRASH_AND_FREE: &str = update!(
            "expires_at = pg_catalog.clock_timestamp(), error = $4",
            " AND s.expires_at IS NOT NULL AND s.ended_at IS NULL"
        );
        const GIVE_BACK: &str = update!(
            "expires_at = pg_catalog.clock_timestamp(), ended_at = pg_catalog.clock_timestamp(), \
             attempt = s.attempt - 1",
            " AND s.expires_at IS NOT NULL AND s.ended_at IS NULL"
        );
        match self {
            Self::Done => update(DONE, row, []),
            Self::Failed(error, failed, None) => update(FAILED, row, [error.into(), failed.into()]),
            Self::Failed(error, failed, Some(pause)) => {
                let values = [error.into(), failed.into(), interval(pause).into()];
                update(RETRIED, row, values)
            }
            Self::Crash(why) => update(CRASH, row, [why.into()]),
            Self::CrashAndFree(why) => update(CRASH_AND_FREE, row, [why.into()]),
            Self::GiveBack => update(GIVE_BACK, row, []),
        }
    }
}
