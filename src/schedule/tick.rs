//! A run of a tick.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::sql::{Claim, Update};
use crate::call::{ask, ask_surely};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::mode::{self, Mode};
use crate::pool::{Pool, Reply};
use crate::semaphore::{Trust, keep};

/// How much of an error is stored, in characters.
const STORED: usize = 1000;
/// Between two tries to store how a run ended.
const PAUSE: Duration = Duration::from_millis(100);

/// A tick that runs.
pub struct Tick<P: Pool> {
    at: DateTime<Utc>,
    attempt: i32,
    missed: u32,
    token: i64,
    trust: Arc<Trust>,
    pool: PhantomData<fn(&P)>,
}

/// The run of a tick, and its lease. If it is dropped before it has ended, another instance runs the tick: as the same attempt, or as
/// the next one after a panic.
pub(super) struct Running<P: Pool> {
    run: Run<P>,
    trust: Arc<Trust>,
    is_over: bool,
}

/// What updates its row.
struct Run<P: Pool> {
    pool: P,
    runtime: <P::Mode as Mode>::Runtime,
    name: Arc<str>,
    token: i64,
}

impl<P: Pool> Running<P> {
    /// Takes a tick, unless another instance was faster.
    pub(super) async fn claim(
        subject: Subject,
        name: String,
        lease: Duration,
        pool: &P,
        claim: Claim,
        at: DateTime<Utc>,
    ) -> Result<Option<(Self, Tick<P>)>> {
        let (runtime, pool_of_run, name) =
            (P::Mode::runtime()?, pool.clone(), Arc::<str>::from(name));
        let reply = move |claimed: (Option<i32>, Option<i64>, Option<i32>), sent| {
            let (Some(attempt), Some(token), Some(missed)) = claimed else {
                return None;
            };
            let run = Run {
                pool: pool_of_run,
                runtime,
                name,
                token,
            };
            let trust = Arc::new(Trust::new(subject, sent, lease));
            let renewed = run.clone();
            let renew = move |limit| renewed.clone().update(Update::Renew(lease), limit);
            P::Mode::beside(&run.runtime, keep::<P::Mode, _>(trust.clone(), renew));
            let tick = Tick {
                at,
                attempt,
                missed: missed.unsigned_abs(),
                token,
                trust: trust.clone(),
                pool: PhantomData,
            };
            let running = Self {
                run,
                trust,
                is_over: false,
            };
            Some((running, tick))
        };
        ask_surely(pool, None, claim, reply).await
    }

    /// Stores how it ended. If the database is away for longer than the lease, the tick is run again.
    pub(super) async fn finish(mut self, error: Option<String>) -> Result<()> {
        let outcome = if error.is_some() { "failed" } else { "done" };
        let stored = error.map(|error| {
            error
                .chars()
                .filter(|c| *c != '\0')
                .take(STORED)
                .collect::<String>()
        });
        // The work is done: what is dropped from now on must not give the tick back.
        self.is_over = true;
        self.trust.ends();
        let (run, trust, began) = (self.run.clone(), self.trust.clone(), Instant::now());
        let finished = P::Mode::surely(&self.run.runtime, None, async move {
            loop {
                let finish = Update::Finish(stored.clone());
                let finished = run.clone().update(finish, None).await;
                // An end that the database refuses must not keep the schedule for ever.
                let is_too_late = trust.is_over() || began.elapsed() > trust.timeout;
                if finished.is_ok() || is_too_late {
                    trust.end();
                    return finished;
                }
                mode::pause::<P::Mode>(PAUSE).await;
            }
        })
        .await;
        match finished {
            Ok(Some(_)) => {
                self.tell(outcome, None);
                Ok(())
            }
            Ok(None) => Err(self.lost_lease()),
            Err(error) => {
                self.tell("lost", Some(&error));
                Err(error)
            }
        }
    }

    #[cfg(feature = "async")]
    pub(super) async fn lost(&self) {
        self.trust.lost::<P::Mode>(None).await;
    }

    /// The lease was lost while it ran, so another instance may run the tick already.
    #[cfg(feature = "async")]
    pub(super) fn crashed(mut self) -> Error {
        self.is_over = true;
        self.trust.end();
        self.lost_lease()
    }

    fn lost_lease(&self) -> Error {
        let error = Error::PermitLost(self.run.name.to_string());
        self.tell("lost", Some(&error));
        error
    }

    fn tell(&self, outcome: &'static str, error: Option<&Error>) {
        self.trust.tell(|subject, since| {
            let took = since.elapsed();
            subject.event("run", outcome, took, Some(took), error);
        });
    }
}

impl<P: Pool> Drop for Running<P> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        self.trust.end();
        let update = if std::thread::panicking() {
            self.tell("crashed", None);
            Update::Crash("panicked")
        } else {
            self.tell("given back", None);
            Update::GiveBack
        };
        let (run, lease) = (self.run.clone(), self.trust.timeout);
        P::Mode::leave(&self.run.runtime, async move {
            // If it fails or has no reply by then, the lease expires.
            let deadline = Instant::now().checked_add(lease);
            let _ = P::Mode::within(deadline, run.update(update, None)).await;
        });
    }
}

impl<P: Pool> Tick<P> {
    /// Returns the time that the schedule asked for.
    pub const fn at(&self) -> DateTime<Utc> {
        self.at
    }

    /// Returns which run of this tick it is: 1, and more if earlier ones have crashed.
    pub const fn attempt(&self) -> i32 {
        self.attempt
    }

    /// Returns how many ticks before this one were missed and are not run. At most 1,000 are counted.
    pub const fn missed(&self) -> u32 {
        self.missed
    }

    /// Returns a number that is larger than those of all earlier runs of the schedule, for a [`Fence`](crate::Fence).
    pub const fn token(&self) -> i64 {
        self.token
    }

    /// Returns whether the lease could not be renewed in time, so that another instance may be about to run the tick: the work must
    /// stop now. No round trip.
    pub fn is_lost(&self) -> bool {
        self.trust.is_lost()
    }

    /// Waits until the lease is lost, for at most `timeout`. Returns whether it is.
    pub fn wait_for_loss(&self, timeout: Duration) -> Reply<'_, P, bool> {
        P::Mode::drive(async move {
            let deadline = Instant::now().checked_add(timeout);
            self.trust.lost::<P::Mode>(deadline).await;
            self.is_lost()
        })
    }
}

impl<P: Pool> Run<P> {
    /// Returns when it was sent, if this still is the last run.
    async fn update(self, update: Update, limit: Option<Duration>) -> Result<Option<Instant>> {
        let update = update.of(&self.name, self.token);
        let (count, sent): (i64, _) = ask(&self.pool, limit, [update]).await?;
        Ok((count > 0).then_some(sent))
    }
}

impl<P: Pool> Clone for Run<P> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            runtime: self.runtime.clone(),
            name: self.name.clone(),
            ..*self
        }
    }
}

impl<P: Pool> fmt::Debug for Tick<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tick")
            .field("at", &self.at)
            .field("attempt", &self.attempt)
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}
