//! The jobs: at most once per interval, and never twice at once.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::prelude::*;
use diesel_interlock::functions::clock_timestamp;
use diesel_interlock::{
    AdvisoryLock, Attempt, Decision, Error, LockKey, PgPool, PooledGuard, Throttle,
    ThrottledResource, throttled_resources,
};

use crate::stop::Stop;

throttled_resources! {
    /// The jobs. From the first start on, the database owns their intervals.
    pub enum Job {
        Invoices = "send invoices" every Duration::from_secs(10),
        Cleanup = "clean up" every Duration::from_secs(4),
    }
}

diesel::table! {
    job_runs (id) {
        id -> Int8,
        job -> Text,
        instance -> Text,
        started_at -> Timestamptz,
        finished_at -> Nullable<Timestamptz>,
    }
}

/// How often to ask whether a job is due, at least: its interval may be changed, and an instance that
/// runs it may die.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// Who asks, and how long a job takes.
#[derive(Debug, Clone)]
pub struct Instance {
    pub pool: PgPool,
    pub name: String,
    pub job_takes: Duration,
    pub stop: Stop,
}

impl Instance {
    /// Runs the job whenever it is due and nobody else is at it, until it is told to stop.
    pub fn schedule(&self, job: Job) {
        loop {
            let pause = self.run_if_due(job).unwrap_or_else(|error| {
                // A database that is away comes back; a job that failed is due again by its interval.
                tracing::error!(error = &error as &dyn std::error::Error, job = job.label());
                ASK_AGAIN
            });
            if self.stop.within(pause.min(ASK_AGAIN)) {
                return;
            }
        }
    }

    /// Returns how long to wait before asking again.
    ///
    /// First the lock, then the throttle, on the lock's own connection:
    ///
    /// - The other way round, a grant that finds the last run still at it would be spent for nothing:
    ///   the job would be due an interval later, though nobody ran it. The lock costs nothing to give
    ///   back.
    /// - The lock alone would let the next instance run the job again as soon as it is free; the
    ///   throttle alone would let a run that outlasts its interval overlap with the next.
    /// - `kill -9` ends the session and frees the lock at once. The throttle has been committed, so the
    ///   next run is not sooner than the interval after the grant: a job that kills its instance does
    ///   not kill all of them one after the other.
    fn run_if_due(&self, job: Job) -> Result<Duration, Error> {
        let lock = AdvisoryLock::new(LockKey::parts(["job", job.label()]));
        let Attempt::Acquired(mut guard) = lock.try_acquire(&self.pool)? else {
            return Ok(ASK_AGAIN);
        };
        match Throttle::of(job)
            .details(self.name.clone())
            .attempt_on(guard.conn())?
        {
            Decision::Denied(denial) => {
                guard.release()?;
                Ok(denial.retry_after)
            }
            Decision::Granted(grant) => {
                self.run(job, grant.granted_at, &mut guard)?;
                guard.release()?;
                Ok(Duration::ZERO)
            }
        }
    }

    /// The job itself. Whatever it writes goes over the guard's connection, so it cannot be written
    /// after the lock was lost.
    fn run(&self, job: Job, granted_at: DateTime<Utc>, guard: &mut PooledGuard) -> QueryResult<()> {
        tracing::info!(job = job.label(), instance = self.name, "begins");
        let run: i64 = diesel::insert_into(job_runs::table)
            .values((
                job_runs::job.eq(job.label()),
                job_runs::instance.eq(&self.name),
                job_runs::started_at.eq(granted_at),
            ))
            .returning(job_runs::id)
            .get_result(guard.conn())?;

        // The work. One that leaves the database asks `guard.is_held()` before what matters.
        if self.stop.within(self.job_takes) {
            tracing::info!(job = job.label(), "is given up");
            return Ok(());
        }

        diesel::update(job_runs::table.find(run))
            .set(job_runs::finished_at.eq(clock_timestamp().nullable()))
            .execute(guard.conn())?;
        tracing::info!(job = job.label(), instance = self.name, "ends");
        Ok(())
    }
}
