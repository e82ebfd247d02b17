//! Ticks and their runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::Schedule;
use super::sql::{self, Claimed, End, Take};
use crate::call::ask_detached;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::lease::{self, Lease, Row};
use crate::mode::{self, Mode, PATIENCE};
use crate::pool::{Pool, impl_debug};

/// How many characters of an error are stored.
const STORED: usize = 1000;
/// Up to which the pause before a retry doubles.
const LONGEST_DOUBLED: Duration = Duration::from_secs(24 * 60 * 60);
/// The pause between two tries to store how a run ended.
const PAUSE: Duration = Duration::from_millis(100);

/// A tick that is being run, as the work sees it.
pub struct Tick<P: Pool> {
    at: DateTime<Utc>,
    attempt: i32,
    missed: u32,
    lease: Arc<Lease<P>>,
}

/// The run of a tick. If it is dropped before it has ended, another instance runs the tick: as the
/// same attempt, or, when the lease would have ended, as the next one if the work panicked.
pub(super) struct Run<P: Pool> {
    lease: Arc<Lease<P>>,
    /// How many runs of the tick have failed before this one.
    failed: i32,
    retry: Option<Retry>,
    is_over: bool,
    /// Whether the work is being called or polled just now. A drop at that moment means that the
    /// work panics.
    pub(super) is_working: bool,
}

/// How often a failed tick is run again, and after which pause.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retry {
    pub(super) times: u16,
    pub(super) pause: Duration,
}

impl Retry {
    /// The pause after so many failed runs of a tick: it doubles up to a day. `None` if that was
    /// the last run.
    pub(super) fn after(self, failed: i32) -> Option<Duration> {
        if failed > i32::from(self.times) {
            return None;
        }
        let doublings = failed.saturating_sub(1).clamp(0, 31) as u32;
        let pause = self.pause.saturating_mul(1 << doublings);
        Some(pause.min(self.pause.max(LONGEST_DOUBLED)))
    }
}

impl<P: Pool> Run<P> {
    /// Claims a tick, unless another instance was faster.
    pub(super) async fn claim(
        schedule: &Schedule<P>,
        pool: &P,
        deadline: Option<Instant>,
        take: Take<'_>,
    ) -> Result<Option<(Self, Tick<P>)>> {
        let (runtime, pool_of_run, name) = (P::Mode::runtime()?, pool.clone(), take.name.into());
        let (timeout, number, subject) = (take.lease, take.number, schedule.subject());
        let (retry, longest) = (schedule.retry, schedule.longest);
        let reply = move |claimed: Claimed, sent| {
            let (Some(at), Some(attempt), Some(failed), Some(missed), Some(token)) = claimed else {
                return None;
            };
            let lease = Lease::new(lease::Grant {
                pool: pool_of_run,
                runtime,
                subject,
                row: Row {
                    name,
                    token,
                    claim: number,
                },
                timeout,
                renewal: sql::renew,
                longest: longest.map(|limit| (limit, sql::overrun as lease::Renewal)),
                sent,
            });
            lease.renew_in_background();
            let tick = Tick {
                at,
                attempt,
                missed: missed.unsigned_abs(),
                lease: lease.clone(),
            };
            let run = Self {
                lease,
                failed,
                retry,
                is_over: false,
                is_working: false,
            };
            Some((run, tick))
        };
        ask_detached(pool, deadline, take.claim(), reply).await
    }

    /// Stores how the run ended. If the database is away for longer than the lease, the tick is run
    /// again.
    ///
    /// If the work has learnt that the lease is lost, no end is stored, because the work may have
    /// stopped halfway for that reason.
    pub(super) async fn finish(mut self, error: Option<String>) -> Result<()> {
        if self.lease.was_heard() {
            return Err(self.lose().await);
        }
        let (outcome, end) = match error {
            None => ("done", End::Done),
            Some(error) => {
                let failed = self.failed + 1;
                let pause = self.retry.and_then(|retry| retry.after(failed));
                let outcome = if pause.is_some() { "retried" } else { "failed" };
                (outcome, End::Failed(clip(&error), failed, pause))
            }
        };
        // The work is done, so from now on a drop must not give the tick back.
        self.is_over = true;
        self.lease.begin_end();
        let lease = self.lease.clone();
        let finished = P::Mode::run_detached(&self.lease.grant.runtime, None, async move {
            let give_up = Instant::now() + lease.grant.timeout;
            loop {
                let finish = end.clone().of(&lease.grant.row);
                let deadline = Some(Instant::now() + PATIENCE.max(lease.grant.timeout / 3));
                let finished = lease.send_end(finish, deadline, deadline).await;
                // Give up at some time: an end that the database refuses must not block the
                // schedule for ever.
                let is_too_late = lease.is_over() || give_up <= Instant::now();
                if matches!(finished, Ok(()) | Err(Error::PermitLost(_))) || is_too_late {
                    lease.end("run");
                    return finished;
                }
                mode::pause::<P::Mode>(PAUSE).await;
            }
        })
        .await;
        let outcome = if finished.is_ok() { outcome } else { "lost" };
        self.report(outcome, finished.as_ref().err());
        finished
    }

    pub(super) fn begin(&self) -> bool {
        self.lease.begin()
    }

    #[cfg(feature = "async")]
    pub(super) fn lease(&self) -> Arc<Lease<P>> {
        self.lease.clone()
    }

    /// Ends a run that lost its lease, whose work has stopped. Another instance may be running the
    /// tick already; after a run that was too long, the tick is free now.
    pub(super) async fn lose(&mut self) -> Error {
        self.is_over = true;
        self.lease.end("run");
        let longest = self.lease.grant.longest;
        if let Some((limit, _)) = longest.filter(|_| self.lease.has_overrun()) {
            let lease = self.lease.clone();
            let free = End::CrashAndFree(sql::too_long(limit)).of(&lease.grant.row);
            let freed = P::Mode::run_detached(&self.lease.grant.runtime, None, async move {
                let deadline = Some(Instant::now() + PATIENCE);
                lease.send_end(free, deadline, deadline).await
            });
            // Otherwise the lease expires.
            drop(freed.await);
        }
        let error = self.lease.loss();
        self.report("lost", Some(&error));
        error
    }

    fn report(&self, outcome: &'static str, error: Option<&Error>) {
        self.lease.report(|subject, since| {
            let took = since.elapsed();
            Event {
                took,
                held: Some(took),
                error,
                is_returned: false,
                ..subject.event("run", outcome)
            }
            .emit();
        });
    }
}

/// Shortens an error for the row. An empty text is replaced, because it would read as success.
fn clip(error: &str) -> String {
    let stored: String = error.chars().filter(|c| *c != '\0').take(STORED).collect();
    if stored.is_empty() {
        "the work failed with an empty message".to_owned()
    } else {
        stored
    }
}

impl<P: Pool> Drop for Run<P> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let (outcome, update) = if self.is_working {
            ("crashed", End::Crash("the work panicked".to_owned()))
        } else {
            ("given back", End::GiveBack)
        };
        self.lease.end("run");
        self.report(outcome, None);
        let (lease, update) = (self.lease.clone(), update.of(&self.lease.grant.row));
        P::Mode::finish_later(&self.lease.grant.runtime, async move {
            // If this fails or has no reply by the deadline, the lease expires.
            let deadline = Instant::now().checked_add(lease.grant.timeout);
            drop(lease.send_end(update, deadline, deadline).await);
        });
    }
}

impl<P: Pool> Tick<P> {
    /// Returns the time for which the tick was scheduled, or when its run was
    /// [asked for](super::Schedule::trigger).
    pub const fn at(&self) -> DateTime<Utc> {
        self.at
    }

    /// Returns which run of this tick this is: 1, or more if earlier runs have crashed or have
    /// failed.
    pub const fn attempt(&self) -> i32 {
        self.attempt
    }

    /// Returns how many ticks before this one were missed and will not run. Counts at most 1,000.
    pub const fn missed(&self) -> u32 {
        self.missed
    }

    /// Returns a number that is larger than those of all earlier runs of the schedule. Pass it to a
    /// [`Fence`](crate::Fence).
    pub fn fencing_token(&self) -> i64 {
        self.lease.grant.row.token
    }

    /// Returns whether the lease is lost, so that the work must stop now. No round trip.
    ///
    /// The lease is lost if it could not be renewed in time, or if the run takes longer than
    /// [`longest`](super::Schedule::longest). Another instance may be about to run the tick.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Waits until the lease is lost, for at most `timeout`, and returns whether it is lost. No
    /// round trip.
    pub fn wait_for_loss(&self, timeout: Duration) -> <P::Mode as Mode>::Reply<'_, bool> {
        P::Mode::drive(self.lease.wait_for_loss(timeout))
    }

    /// Waits until the lease is lost. Never returns while it is renewed in time. No round trip.
    pub fn lost(&self) -> <P::Mode as Mode>::Reply<'_, ()> {
        P::Mode::drive(self.lease.lost())
    }
}

impl_debug!(
    Tick | this | at = this.at,
    attempt = this.attempt,
    fencing_token = this.fencing_token()
);
