//! Schedules: each tick runs once, on whichever instance gets it.

// **While another instance runs a schedule, the others look seldom**, because the instance that
// runs takes the next tick itself.

mod due;
mod look;
mod sql;
mod tick;

use std::borrow::Cow;
use std::fmt;
#[cfg(feature = "async")]
use std::future::poll_fn;
use std::marker::PhantomData;
#[cfg(feature = "async")]
use std::pin::pin;
#[cfg(feature = "async")]
use std::task::Poll;
use std::time::Duration;

use chrono::{DateTime, Utc};

pub use self::due::{CatchUp, every};
use self::look::{Looks, Step};
use self::tick::Retry;
pub use self::tick::Tick;
#[cfg(feature = "r2d2")]
use crate::alarm::Stop;
use crate::alarm::jitter;
use crate::call::ask;
use crate::error::{Error, Result};
use crate::event::{Subject, changed};
use crate::input;
use crate::input::LONGEST;
use crate::lease::SHORTEST_KEPT;
use crate::mode::{self, Mode};
use crate::pool::{Pool, Reply, impl_debug};

/// The result of one look at a schedule.
#[must_use = "a tick may be due a moment later"]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunDue {
    /// A tick was run.
    Ran,
    /// Nothing is due, or another instance is running the tick. The value says how long to wait
    /// before the next look, if the schedule is not [triggered](Schedule::trigger) before.
    Later(Duration),
    /// The schedule is [paused](Schedule::pause).
    Paused,
    /// There are no more ticks.
    Never,
}

/// Runs each tick of a schedule once, on whichever instance gets it, and never two at a time.
///
/// A tick is a point in time, not the firing of a timer. You pass a function `next` that returns
/// the first tick after a time: use any cron crate, or [`every`] for a fixed period. The result of
/// `next` must depend on its argument alone. The database's clock decides what is due. Ticks are
/// whole microseconds.
///
/// The first look at a new schedule counts from now, so no tick of the past runs. A look is one
/// round trip to the table `resource_control.schedule`, and a second one if it changes what comes
/// next. A run takes two more, and one for each renewal of its lease, every third of the lease.
///
/// **A crash does not lose a tick.** A run holds a lease that renews itself. If its process dies,
/// the lease expires and another instance runs the same tick again, with the next
/// [attempt](Tick::attempt). A tick runs at most three times ([`after_crash`](Self::after_crash)
/// changes that). A panic counts as a crash. An `Err` of the work is stored, and the tick is run
/// again only with [`retry`](Self::retry). [`longest`](Self::longest) ends a run that hangs.
///
/// **An edited `next`** counts from when its first instance looked, so no time runs that was not in
/// force. While two versions run side by side, the ticks of both run.
///
/// A process that was suspended for longer than its lease may continue while the next run is under
/// way. [`Tick::is_lost`] reports this to the work, and a [`Fence`](crate::Fence) with
/// [`Tick::fencing_token`] protects data from it.
///
/// ```no_run
/// use std::time::Duration;
///
/// use diesel_interlock::schedule::every;
/// use diesel_interlock::{Error, PgPool, Schedule, Stop};
///
/// static REPORT: Schedule = Schedule::named("hourly report");
///
/// fn run(pool: &PgPool, stop: &Stop) -> Result<(), Error> {
///     REPORT.run(pool, stop, every(Duration::from_secs(3600)), |tick| {
///         println!("the report of {}, attempt {}", tick.at(), tick.attempt());
///         Ok::<_, Error>(())
///     })
/// }
/// ```
///
/// # Errors
///
/// [`Error::Input`] for an invalid name or key, a lease under 3 seconds or over 1,000 years, zero
/// attempts, a retry of no times or without a pause, a longest run that is shorter than the lease,
/// or a `next` that does not advance; [`Error::NotInstalled`]; [`Error::PermitLost`] if
/// the lease was lost while the work ran; [`Error::Pool`], [`Error::Standby`],
/// [`Error::Database`], and [`Error::TimedOut`] if a claim, or with deadpool and bb8 any look, has
/// no reply within a lease. `run` does not return the last five: it tries again.
#[must_use = "a schedule does nothing until it is run"]
#[derive(Clone)]
pub struct Schedule<P: Pool> {
    name: &'static str,
    key: Option<String>,
    details: Cow<'static, str>,
    lease: Duration,
    attempts: i32,
    catch_up: CatchUp,
    retry: Option<Retry>,
    longest: Option<Duration>,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> Schedule<P> {
    /// Makes a schedule with this name. If the process of a run dies, the tick is run again after
    /// 30 seconds, and three times at most.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            key: None,
            details: Cow::Borrowed(""),
            lease: Duration::from_secs(30),
            attempts: 3,
            catch_up: CatchUp::Latest,
            retry: None,
            longest: None,
            pool: PhantomData,
        }
    }

    /// Returns the schedule of one thing, such as a tenant. A second call replaces the first key.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            key: Some(input::show(key)),
            ..self.clone()
        }
    }

    /// Returns the schedule with a text that names this instance in the view `schedule_state`. The
    /// default is the host and the pid of the program.
    pub fn details(&self, details: impl Into<String>) -> Self {
        Self {
            details: Cow::Owned(details.into()),
            ..self.clone()
        }
    }

    /// Sets what happens to missed ticks. By default, one run of the latest stands for all of them.
    pub const fn catch_up(mut self, catch_up: CatchUp) -> Self {
        self.catch_up = catch_up;
        self
    }

    /// Sets the lease of a run, and how many times a tick may run in all.
    ///
    /// If the process of a run dies, the tick is run again when the lease has expired. The number
    /// of attempts is limited because a tick that kills its process would otherwise kill one
    /// process after another. The lease must be at least 3 seconds.
    pub const fn after_crash(mut self, lease: Duration, attempts: u16) -> Self {
        self.lease = lease;
        self.attempts = attempts as i32;
        self
    }

    /// Runs a tick again whose work returned `Err`: `times` times at most, the first time after
    /// `pause`, which doubles from retry to retry, up to a day.
    ///
    /// A retry is the next [attempt](Tick::attempt) of the same tick, on any instance whose handle
    /// has `retry`. Under [`CatchUp::Latest`] and [`CatchUp::Skip`], the next tick replaces a retry
    /// that is still to come, if it is due sooner; under [`CatchUp::All`] it waits for the retry.
    /// Crashes are counted apart, by [`after_crash`](Self::after_crash).
    pub const fn retry(mut self, times: u16, pause: Duration) -> Self {
        self.retry = Some(Retry { times, pause });
        self
    }

    /// Limits how long a run may take. A run that takes longer has lost its lease, and counts as a
    /// crash, so the tick is run again.
    ///
    /// In the asynchronous half the future of the work is dropped, and the tick is free at once.
    /// In the blocking half [`Tick::is_lost`] returns `true`, and the tick is free when the work
    /// has returned, or else when the lease has expired. Work that does not ask goes on beside the
    /// next run. The limit must be at least the lease.
    pub const fn longest(mut self, limit: Duration) -> Self {
        self.longest = Some(limit);
        self
    }

    /// Pauses the schedule on all instances. Returns whether it was not paused before.
    ///
    /// No scheduled tick is taken until the schedule is [resumed](Self::resume); a run that has
    /// begun runs to its end, and [`trigger`](Self::trigger) still works. A schedule that never ran
    /// can be paused, too. One round trip: an `INSERT … ON CONFLICT DO UPDATE`.
    pub fn pause<'a>(&'a self, pool: &'a P) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let pause = async {
                let (was_running, _) = ask(pool, None, &sql::pause(&self.checked_name()?)).await?;
                Ok(was_running)
            };
            self.subject().observe_as("pause", changed, pause).await
        })
    }

    /// Resumes a paused schedule. Returns whether it was paused.
    ///
    /// The instances see this within five seconds. Ticks that were missed are treated as set by
    /// [`catch_up`](Self::catch_up). One round trip: an `UPDATE`.
    pub fn resume<'a>(&'a self, pool: &'a P) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let resume = async {
                let (was_paused, _) = ask(pool, None, &sql::resume(&self.checked_name()?)).await?;
                Ok(was_paused)
            };
            self.subject().observe_as("resume", changed, resume).await
        })
    }

    /// Asks for one run now, also while the schedule is paused. Returns whether none was asked for
    /// that has not begun yet.
    ///
    /// An instance that runs the schedule sees this within a minute, or when the present run has
    /// ended. The tick of the run is the time of this call, and the scheduled ticks stay as they
    /// are. If the run crashes, it is run again as any other. Under [`CatchUp::All`], it begins
    /// after a tick that is to be run again. A schedule that never ran can be triggered, too. One
    /// round trip: an `INSERT … ON CONFLICT DO UPDATE`.
    pub fn trigger<'a>(&'a self, pool: &'a P) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let trigger = async {
                let (is_new, _) = ask(pool, None, &sql::trigger(&self.checked_name()?)).await?;
                Ok(is_new)
            };
            self.subject()
                .observe_as("trigger", triggered, trigger)
                .await
        })
    }

    pub(crate) fn checked_name(&self) -> Result<String> {
        input::name(self.name)?;
        input::text(&self.details)?;
        if self.lease < SHORTEST_KEPT || self.lease > LONGEST {
            return Err(Error::input(
                "the lease of a schedule must be between 3 seconds and 1,000 years",
            ));
        }
        if self.attempts < 1 {
            return Err(Error::input("a tick must have at least one attempt"));
        }
        if matches!(
            self.catch_up,
            CatchUp::All(0) | CatchUp::Skip(Duration::ZERO)
        ) {
            return Err(Error::input(
                "`catch_up` of a schedule must let a tick run: `All` of at least 1, or `Skip` of \
                 more than zero",
            ));
        }
        if let Some(Retry { times, pause }) = self.retry {
            if times == 0 {
                return Err(Error::input("`retry` of a schedule must be at least once"));
            }
            input::check_duration(
                pause,
                LONGEST,
                "the pause before a retry must be between a microsecond and 1,000 years",
            )?;
        }
        if self.longest.is_some_and(|limit| limit < self.lease) {
            return Err(Error::input(
                "the longest run of a schedule must not be shorter than its lease",
            ));
        }
        let name = match &self.key {
            None => self.name.to_owned(),
            Some(key) => input::with_key(&[self.name], key),
        };
        input::name(&name)?;
        Ok(name)
    }

    const fn subject(&self) -> Subject {
        Subject {
            primitive: "schedule",
            name: self.name,
        }
    }
}

#[cfg(feature = "r2d2")]
impl<M> Schedule<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Looks once, and runs the tick that is due, unless another instance is running it.
    ///
    /// If `work` returns an error, its text is stored.
    pub fn run_due<E: fmt::Display>(
        &self,
        pool: &diesel::r2d2::Pool<M>,
        next: impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync,
        work: impl FnOnce(&Tick<diesel::r2d2::Pool<M>>) -> Result<(), E>,
    ) -> Result<RunDue> {
        self.look_blocking(pool, &mut Looks::once(), &next, work)
    }

    /// Runs each tick that this instance gets, until it is stopped or there are no more ticks.
    ///
    /// A stop lets the present run end. Call [`Stop::stop`] on a clone when SIGTERM arrives.
    pub fn run<E: fmt::Display>(
        &self,
        pool: &diesel::r2d2::Pool<M>,
        stop: &Stop,
        next: impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync,
        mut work: impl FnMut(&Tick<diesel::r2d2::Pool<M>>) -> Result<(), E>,
    ) -> Result<()> {
        let mut looks = Looks::of_a_loop(Some(mode::PATIENCE_OF_A_LOOP));
        while !stop.is_stopped() {
            let look = self.look_blocking(pool, &mut looks, &next, &mut work);
            match pause_after(look)? {
                Some(rest) => {
                    crate::session::run_ready(mode::pause_until_stop::<mode::Blocking>(stop, rest))
                }
                None => break,
            }
        }
        Ok(())
    }

    fn look_blocking<E: fmt::Display>(
        &self,
        pool: &diesel::r2d2::Pool<M>,
        looks: &mut Looks,
        next: &(impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync),
        work: impl FnOnce(&Tick<diesel::r2d2::Pool<M>>) -> Result<(), E>,
    ) -> Result<RunDue> {
        use crate::session::run_ready;
        match run_ready(self.step(pool, looks, next))? {
            Step::Over(look) => Ok(look),
            Step::Run(mut run, tick) => {
                run.is_working = true;
                let error = work(&tick).err().map(|error| error.to_string());
                run.is_working = false;
                run_ready(run.finish(error)).map(|()| RunDue::Ran)
            }
        }
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = mode::Async>> Schedule<P> {
    /// Looks once, and runs the tick that is due, unless another instance is running it.
    ///
    /// If `work` returns an error, its text is stored.
    ///
    /// If this future is dropped, the tick is given back at once: another instance runs it, as the
    /// same attempt. If the lease is lost, the future of `work` is dropped.
    pub fn run_due<'a, E, F>(
        &'a self,
        pool: &'a P,
        next: impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Send + Sync + 'a,
        work: impl FnOnce(Tick<P>) -> F + Send + 'a,
    ) -> Reply<'a, P, RunDue>
    where
        E: fmt::Display + Send + 'a,
        F: Future<Output = Result<(), E>> + Send + 'a,
    {
        P::Mode::drive(async move { self.look(pool, &mut Looks::once(), next, work).await })
    }

    /// Runs each tick that this instance gets, until there are no more ticks.
    ///
    /// Drop the future to stop.
    pub fn run<'a, E, F>(
        &'a self,
        pool: &'a P,
        next: impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Send + Sync + 'a,
        mut work: impl FnMut(Tick<P>) -> F + Send + 'a,
    ) -> Reply<'a, P, ()>
    where
        E: fmt::Display + Send + 'a,
        F: Future<Output = Result<(), E>> + Send + 'a,
    {
        P::Mode::drive(async move {
            let mut looks = Looks::of_a_loop(None);
            loop {
                let look = self.look(pool, &mut looks, &next, &mut work);
                match pause_after(look.await)? {
                    Some(rest) => mode::pause::<P::Mode>(rest).await,
                    None => return Ok(()),
                }
            }
        })
    }

    async fn look<E: fmt::Display, F: Future<Output = Result<(), E>>>(
        &self,
        pool: &P,
        looks: &mut Looks,
        next: impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Sync,
        work: impl FnOnce(Tick<P>) -> F,
    ) -> Result<RunDue> {
        match self.step(pool, looks, &next).await? {
            Step::Over(look) => Ok(look),
            Step::Run(mut run, tick) => {
                // The flag is set only while this work is being polled. So a drop during a panic
                // can tell whether this work panicked or another future of the same task.
                run.is_working = true;
                let mut work = pin!(work(tick));
                run.is_working = false;
                let lease = run.lease();
                let mut lost = pin!(lease.wait_until_over(None));
                let ended = poll_fn(|context| {
                    if lost.as_mut().poll(context).is_ready() {
                        return Poll::Ready(None);
                    }
                    run.is_working = true;
                    let polled = work.as_mut().poll(context);
                    run.is_working = false;
                    polled.map(Some)
                })
                .await;
                match ended {
                    None => Err(run.lose().await),
                    Some(ended) => {
                        let error = ended.err().map(|error| error.to_string());
                        run.finish(error).await.map(|()| RunDue::Ran)
                    }
                }
            }
        }
    }
}

/// The longest pause between two looks of a loop, because the row may change unexpectedly: by
/// [`Schedule::trigger`], or by a loop with another `next`, for example during a deployment.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The word for whether a run was asked for, or was asked for before.
const fn triggered(is_new: &bool) -> &'static str {
    if *is_new { "triggered" } else { "unchanged" }
}

/// How long a loop pauses before its next look. `None` if the loop is over.
fn pause_after(look: Result<RunDue>) -> Result<Option<Duration>> {
    match look {
        Ok(RunDue::Ran) => Ok(Some(Duration::ZERO)),
        // A random addition, so that instances do not look all at once.
        Ok(RunDue::Later(rest)) => Ok(Some(
            rest.min(LONGEST_PAUSE) + Duration::from_micros(fastrand::u64(0..10_000)),
        )),
        Ok(RunDue::Paused) => Ok(Some(jitter(Duration::from_secs(3)))),
        Ok(RunDue::Never) => Ok(None),
        // The error was reported already.
        Err(error) if error.may_pass() || matches!(error, Error::PermitLost(_)) => {
            Ok(Some(jitter(Duration::from_secs(1))))
        }
        Err(error) => Err(error),
    }
}

impl_debug!(
    Schedule | this | name = this.name,
    key = this.key,
    lease = this.lease,
    attempts = this.attempts,
    catch_up = this.catch_up
);
