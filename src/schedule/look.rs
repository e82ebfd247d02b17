//! One look at a schedule: what the row says, and the claim of the tick that is due.
//!
//! What a look does, in this order; each line presumes that those above it do not apply:
//!
//! | the row | the look |
//! |---|---|
//! | there is none | registers the schedule, counted from now |
//! | begun, not ended, and has this loop's number: an orphan | gives the tick back |
//! | what comes next differs from the loop's own ticks | stores that, as in `due.rs`, and goes on |
//! | a run holds it | leaves, and looks again seldom |
//! | the last run has crashed or was given back, and has attempts left | runs the tick again |
//! | the last run has failed and is retried, under `All` | runs the tick again, or waits for that |
//! | triggered | runs the tick of that moment |
//! | paused | leaves |
//! | a scheduled tick is due | runs it, or passes it over |
//! | the last run has failed, and its retry is due | runs the tick again |
//! | anything else | leaves, until the next tick or the retry |
//!
//! A pause holds what is to be run again, too, unless it was triggered. What it holds is replaced
//! by a triggered tick, except under `All`, as a scheduled tick replaces a retry.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::due::{Amendment, CatchUp, Due, Observer, Plan};
use super::sql::{self, End, Seen, Take, What};
use super::tick::{Run, Tick};
use super::{RunDue, Schedule};
use crate::call::ask;
use crate::error::{Error, Result};
use crate::event::Trouble;
use crate::instance;
use crate::lease::{Row, claim_number};
use crate::mode::Mode;
use crate::pool::Pool;
use crate::statement::Statement;

/// How often others look while an instance runs a tick: after an eighth of the time that the run
/// has lasted, within these bounds. It goes on to the next tick by itself, but it may also give its
/// tick back. If it dies, its lease expires, and they look then.
const WHILE_IT_RUNS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// What a look found.
pub(super) enum Step<P: Pool> {
    Run(Run<P>, Tick<P>),
    Over(RunDue),
}

/// What a loop remembers from look to look.
#[derive(Debug)]
pub(super) struct Looks {
    /// How long each statement of a look waits for a connection.
    patience: Option<Duration>,
    /// The random number of this loop's claims. A row with this number that is begun and has not
    /// ended is an orphan: the reply to its claim was lost, so its run never began. Renewed
    /// whenever a claim was delivered or an orphan given back, because from then on such a row is
    /// no orphan.
    number: i64,
    /// When the loop first looked, by the database's clock.
    since: Option<DateTime<Utc>>,
    /// Whether it has not yet compared its own next tick with that of the row.
    is_new: bool,
    trouble: Trouble,
}

fn after(patience: Option<Duration>) -> Option<Instant> {
    patience.map(|patience| Instant::now() + patience)
}

impl Looks {
    pub(super) fn of_a_loop(patience: Option<Duration>) -> Self {
        Self {
            patience,
            number: claim_number(),
            since: None,
            is_new: true,
            trouble: Trouble::default(),
        }
    }

    /// For a single look, which returns its error.
    pub(super) fn once() -> Self {
        Self {
            trouble: Trouble::returned(),
            ..Self::of_a_loop(None)
        }
    }
}

impl<P: Pool> Schedule<P> {
    /// Looks at the row, and claims the tick that is due. Reports an error of the look; how a run
    /// ends is reported when it ends.
    pub(super) async fn step(
        &self,
        pool: &P,
        looks: &mut Looks,
        next: &(impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync),
    ) -> Result<Step<P>> {
        let step = self.step_unreported(pool, looks, next).await;
        match &step {
            Ok(_) => looks.trouble.end(),
            Err(error) => looks.trouble.report(self.subject(), "run", error),
        }
        step
    }

    async fn step_unreported(
        &self,
        pool: &P,
        looks: &mut Looks,
        next: &(impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync),
    ) -> Result<Step<P>> {
        let name = self.checked_name()?;
        let soon = looks.patience;
        let look = sql::look(&name);
        let (seen, _): (Seen, _) = self.in_time(ask(pool, after(soon), &look)).await?;
        let now = seen.now;
        let observer = Observer {
            next,
            since: *looks.since.get_or_insert(now),
            is_new: looks.is_new,
            catch_up: self.catch_up,
        };
        let Some(mut plan) = seen.plan() else {
            let plan = Plan::from_now(next, now).map_err(|error| self.name_it(error))?;
            let is_new = self.change(pool, soon, sql::register(&name, plan)).await?;
            looks.is_new &= !is_new;
            return Ok(if is_new {
                leave(plan.next_at, now)
            } else {
                again()
            });
        };
        let is_begun = seen.expires_at.is_some() && !seen.is_ended;
        if is_begun && seen.claim == Some(looks.number) {
            // Give the orphan back, as if its run had not begun. Sending this a second time changes
            // nothing.
            let orphan = Row {
                name: name.as_str().into(),
                token: seen.token,
                claim: looks.number,
            };
            self.change(pool, soon, End::GiveBack.of(&orphan)).await?;
            looks.number = claim_number();
            return Ok(again());
        }
        let amendment = plan
            .amend(&observer, now)
            .map_err(|error| self.name_it(error))?;
        if let Some(amendment) = amendment {
            let (Amendment::Sooner(own) | Amendment::Edited(own)) = amendment;
            let amend = sql::amend(&name, (seen.token, plan), own);
            if !self.change(pool, soon, amend).await? {
                return Ok(again());
            }
            if matches!(amendment, Amendment::Edited(_)) {
                self.subject().event("run", "edited").emit();
            }
            plan = own;
        }
        looks.is_new = false;
        let what = match self.decide(&seen, plan, &observer)? {
            Decision::Take(what) => what,
            Decision::PassOver(then) => {
                let amend = sql::amend(&name, (seen.token, plan), then);
                let is_stored = self.change(pool, soon, amend).await?;
                return Ok(if is_stored {
                    leave(then.next_at, now)
                } else {
                    again()
                });
            }
            Decision::Leave(over) => return Ok(Step::Over(over)),
        };
        let take = Take {
            name: &name,
            runner: match &*self.details {
                "" => instance::name(),
                details => details,
            },
            lease: self.lease,
            seen: seen.token,
            number: looks.number,
            what,
        };
        let claimed = self
            .in_time(Run::claim(self, pool, after(soon), take))
            .await?;
        let Some((run, tick)) = claimed else {
            // Another instance was faster.
            return Ok(again());
        };
        looks.number = claim_number();
        // Otherwise the reply came after the end of the lease, and the drop gives the tick back.
        if run.begin() {
            Ok(Step::Run(run, tick))
        } else {
            Err(Error::TimedOut)
        }
    }

    /// What a look does, once what comes next is settled.
    fn decide<N: Fn(DateTime<Utc>) -> Option<DateTime<Utc>>>(
        &self,
        seen: &Seen,
        plan: Plan,
        observer: &Observer<N>,
    ) -> Result<Decision> {
        let now = seen.now;
        let until = seen
            .expires_at
            .filter(|until| *until > now && !seen.is_ended);
        if let Some(expires_at) = until {
            let lasted = seen
                .started_at
                .map_or(Duration::ZERO, |at| between(at, now));
            let [shortest, longest] = WHILE_IT_RUNS;
            let rest = (lasted / 8).clamp(shortest, longest);
            let rest = rest.min(between(now, expires_at));
            return Ok(Decision::Leave(RunDue::Later(rest)));
        }
        let is_too_old = seen
            .tick
            .is_none_or(|tick| self.catch_up.is_over(tick, now));
        let has_failed = seen.is_ended && seen.has_error;
        let may_repeat = if has_failed {
            self.retry
                .and_then(|retry| retry.after(seen.failed))
                .is_some()
        } else {
            seen.attempt - seen.failed < self.attempts
        };
        // When the last tick is to be run again.
        let repeat_at = seen.expires_at.filter(|_| may_repeat && !is_too_old);
        let is_held = seen.is_paused && !seen.is_triggered();
        let comes_first = matches!(self.catch_up, CatchUp::All(_));
        match repeat_at {
            Some(at) if at <= now && !is_held && (comes_first || !has_failed) => {
                return Ok(Decision::Take(What::Again));
            }
            Some(_) if comes_first && is_held => return Ok(Decision::Leave(RunDue::Paused)),
            Some(at) if comes_first => return Ok(Decision::Leave(later(at, now))),
            _ => {}
        }
        if let Some(at) = seen.triggered_at {
            return Ok(Decision::Take(What::Triggered(at)));
        }
        if seen.is_paused {
            return Ok(Decision::Leave(RunDue::Paused));
        }
        let due = plan.due(observer, now);
        let next_at = match due.map_err(|error| self.name_it(error))? {
            Due::Tick { at, missed, then } => {
                let seen = plan.next_at;
                return Ok(Decision::Take(What::Scheduled {
                    at,
                    missed,
                    seen,
                    then,
                }));
            }
            Due::PassedOver(then) => return Ok(Decision::PassOver(then)),
            Due::Later(next_at) => next_at,
        };
        Ok(match repeat_at {
            Some(at) if at <= now => Decision::Take(What::Again),
            Some(at) => Decision::Leave(later(next_at.map_or(at, |next_at| next_at.min(at)), now)),
            None => Decision::Leave(next_at.map_or(RunDue::Never, |next_at| later(next_at, now))),
        })
    }

    /// Sends a statement that returns whether it has changed the row.
    async fn change(
        &self,
        pool: &P,
        patience: Option<Duration>,
        statement: Statement<diesel::sql_types::Bool>,
    ) -> Result<bool> {
        let (is_changed, _) = self.in_time(ask(pool, after(patience), &statement)).await?;
        Ok(is_changed)
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

/// What a look does.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Take(What),
    /// Nothing runs, and this comes next.
    PassOver(Plan),
    Leave(RunDue),
}

fn between(from: DateTime<Utc>, to: DateTime<Utc>) -> Duration {
    (to - from).to_std().unwrap_or_default()
}

fn later(at: DateTime<Utc>, now: DateTime<Utc>) -> RunDue {
    RunDue::Later(between(now, at))
}

fn leave<P: Pool>(next_at: Option<DateTime<Utc>>, now: DateTime<Utc>) -> Step<P> {
    Step::Over(next_at.map_or(RunDue::Never, |next_at| later(next_at, now)))
}

/// The row has changed since the look, or is about to.
fn again<P: Pool>() -> Step<P> {
    Step::Over(RunDue::Later(Duration::from_millis(1)))
}
