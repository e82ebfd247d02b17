//! One look at a schedule: what the row says, and the claim of the tick that is due.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use super::due::{self, Due};
use super::sql::{self, End, Take};
use super::tick::{Run, Tick};
use super::unanswered::Unanswered;
use super::{RunDue, Schedule};
use crate::call::ask;
use crate::error::{Error, Result};
use crate::event::Trouble;
use crate::instance;
use crate::lease::Row;
use crate::mode::Mode;
use crate::pool::Pool;

/// The longest pause between two looks: another instance may use another `next`, for example during
/// a deployment, so the row may change unexpectedly.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The longest pause between two looks while another instance runs a tick.
const WHILE_IT_RUNS: TimeDelta = TimeDelta::seconds(1);

/// What a look found.
pub(super) enum Step<P: Pool> {
    Run(Run<P>, Tick<P>),
    Over(RunDue),
}

impl<P: Pool> Schedule<P> {
    /// Looks at the row, and claims the tick that is due. Reports an error of the look; how a run
    /// ends is reported when it ends.
    pub(super) async fn step(
        &self,
        pool: &P,
        limit: Option<Duration>,
        unanswered: &mut Unanswered,
        trouble: &mut Trouble,
        next: &(impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync),
    ) -> Result<Step<P>> {
        let step = self.step_unreported(pool, limit, unanswered, next).await;
        match &step {
            Ok(_) => trouble.end(),
            Err(error) => trouble.report(self.subject(), "run", error),
        }
        step
    }

    async fn step_unreported(
        &self,
        pool: &P,
        limit: Option<Duration>,
        unanswered: &mut Unanswered,
        next: &(impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync),
    ) -> Result<Step<P>> {
        let name = self.checked_name()?;
        let (seen, _): (sql::Seen, _) = self.in_time(ask(pool, limit, &sql::look(&name))).await?;
        let (now, Some(last), Some(attempt), Some(token), claim, expires_at, is_paused) = seen
        else {
            let (_, _): (i64, _) = self
                .in_time(ask(pool, limit, &sql::register(&name)))
                .await?;
            return Ok(Step::Over(RunDue::Later(Duration::ZERO)));
        };
        if unanswered.is_orphan(token, claim) {
            // The last claim is this loop's own, and its reply was lost. Give it back, as if the
            // run had not begun. Sending this a second time changes nothing.
            let orphan = Row {
                name: name.as_str().into(),
                token,
                claim: claim.unwrap_or_default(),
            };
            let give_back = End::GiveBack.of(&orphan);
            let (_, _): (bool, _) = self.in_time(ask(pool, limit, &give_back)).await?;
            unanswered.strike_off(claim);
            return Ok(Step::Over(RunDue::Later(Duration::ZERO)));
        }
        if is_paused {
            return Ok(Step::Over(RunDue::Paused));
        }
        let later = |time: DateTime<Utc>| {
            let rest = (time - now).to_std().unwrap_or_default();
            Ok(Step::Over(RunDue::Later(rest.min(LONGEST_PAUSE))))
        };
        let first = due::following(next, last).map_err(|error| self.name_it(error))?;
        if let Some(expires_at) = expires_at.filter(|expires_at| *expires_at > now) {
            // Another instance runs a tick, and goes on to the next one by itself when it has
            // ended. But it may also die, or give its tick back, so look again soon.
            let due = first.filter(|first| *first > now).unwrap_or(expires_at);
            return later(due.min(expires_at).min(now + WHILE_IT_RUNS));
        }
        let is_to_be_repeated =
            expires_at.is_some() && attempt < self.attempts && !self.catch_up.is_over(last, now);
        let (tick, missed) = match first {
            // The run of the last tick has crashed, or gave the tick back. The row already has the
            // number of ticks that were missed before it.
            _ if is_to_be_repeated => (last, 0),
            None => return Ok(Step::Over(RunDue::Never)),
            Some(first) if first > now => return later(first),
            Some(first) => match self
                .catch_up
                .due(next, first, now)
                .map_err(|error| self.name_it(error))?
            {
                Due::Tick(tick, missed) => (tick, missed),
                Due::Later(Some(tick)) => return later(tick),
                Due::Later(None) => return Ok(Step::Over(RunDue::Never)),
            },
        };
        let number = unanswered.begin(token);
        let take = Take {
            name: &name,
            runner: match &*self.details {
                "" => instance::name(),
                details => details,
            },
            lease: self.lease,
            tick,
            missed,
            seen: token,
            number,
        };
        let claimed = self
            .in_time(Run::claim(self.subject(), pool, limit, take))
            .await;
        match &claimed {
            Ok(claimed) => unanswered.note_answer(number, claimed.is_some()),
            Err(_) => unanswered.note_no_reply(number),
        }
        Ok(match claimed? {
            Some((run, tick)) if !tick.is_lost() => Step::Run(run, tick),
            // Another instance was faster, or the reply came after the end of the lease. The drop
            // of the run then gives the tick back.
            _ => Step::Over(RunDue::Later(Duration::from_millis(1))),
        })
    }

    /// Awaits a reply for at most a lease, because a server that never replies must not end the
    /// loop.
    async fn in_time<T: Send>(&self, reply: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let deadline = Instant::now().checked_add(self.lease);
        let reply = P::Mode::within(deadline, reply).await;
        reply.unwrap_or(Err(Error::TimedOut))
    }

    /// Adds the name of the schedule to the message of an invalid input.
    fn name_it(&self, error: Error) -> Error {
        match error {
            Error::Input(message) => {
                Error::input(format!("the schedule {:?}: {message}", self.name))
            }
            error => error,
        }
    }
}
