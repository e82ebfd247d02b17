//! Leader election: one instance leads at a time.

// **In the asynchronous half, `Leader` and `Schedule` pass an owned `Term` or `Tick` to the work.**
// On stable Rust the future of an `AsyncFnMut(&Term)` cannot be bounded by `Send`, so
// `tokio::spawn` would refuse it.

use std::borrow::Cow;
#[cfg(feature = "async")]
use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::result::Error as DieselError;
use diesel::sql_types::{BigInt, Text, Timestamptz};

use crate::alarm::{Alarm, Stop, jitter};
use crate::call::ask;
use crate::error::{Error, Result};
use crate::event::{Outcome, Trouble};
use crate::lease::Lease;
use crate::mode::{self, Mode};
use crate::monitor::Leadership;
use crate::pool::{Pool, Reply, impl_debug};
use crate::semaphore::{Admission, Permit, Semaphore};
use crate::statement::Statement;
use crate::{input, instance};

/// Elects one leader among all instances that use the database.
///
/// **What it does not guarantee.** A process that was suspended believes in its term until it
/// looks, and what it sent before may arrive later. A future is dropped only where it yields. So
/// check [`Term::is_leader`] before each step of the work, and protect data that must never see an
/// old leader by a [`Fence`](crate::Fence) with [`Term::fencing_token`]. Apart from that, no two
/// instances lead at the same time.
///
/// The callback *is* the leadership: it is called each time this instance wins an election. When
/// the callback returns, the instance resigns, rests for half a lease, and then stands for election
/// again.
///
/// A leader renews its term every third of the lease, and each candidate tries as often. Each
/// renewal and each try is one round trip to a [semaphore](crate::semaphore::Semaphore) of one
/// slot. After a resignation, another instance leads within half a lease; after a crash, within a
/// lease and a moment. A leader that cannot renew its term gives it up before the database lets
/// another leader in.
///
/// ```no_run
/// use std::time::Duration;
///
/// use diesel_interlock::{Error, Leader, PgPool, Stop};
///
/// static DISPATCHER: Leader = Leader::named("dispatcher", Duration::from_secs(15));
///
/// fn dispatch(pool: &PgPool, stop: &Stop) -> Result<(), Error> {
///     DISPATCHER.lead(pool, stop, |term| {
///         while term.is_leader() {
///             // one step of the work, and then:
///             term.pause(Duration::from_secs(1));
///         }
///     })
/// }
/// ```
///
/// # Errors
///
/// [`Error::Input`] for an invalid name or key, or a lease under 3 seconds or over 1,000 years, and
/// [`Error::NotInstalled`]. `lead` does not return errors of the database or the pool: it reports
/// them as events and tries again.
#[must_use = "nobody leads until `lead` is called"]
#[derive(Clone)]
pub struct Leader<P: Pool> {
    election: &'static str,
    key: Option<String>,
    lease: Duration,
    details: Cow<'static, str>,
    pool: PhantomData<fn(&P)>,
}

/// A term of leadership, which ends when the callback returns.
pub struct Term<P: Pool> {
    lease: Arc<Lease<P>>,
    stop: Stop,
}

impl<P: Pool> Leader<P> {
    /// Makes an election with this name. A leader that has crashed keeps its term for `lease`,
    /// which must be at least 3 seconds.
    pub const fn named(election: &'static str, lease: Duration) -> Self {
        Self {
            election,
            key: None,
            lease,
            details: Cow::Borrowed(""),
            pool: PhantomData,
        }
    }

    /// Returns the election for one thing, such as a shard. A second call replaces the first key.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            key: Some(input::show(key)),
            ..self.clone()
        }
    }

    /// Returns the election with a text that names this candidate in the view `leader`. The default
    /// is the host and the pid of the program.
    pub fn details(&self, details: impl Into<String>) -> Self {
        Self {
            details: Cow::Owned(details.into()),
            ..self.clone()
        }
    }

    /// Reads who leads, for example for a status page. `None` while nobody leads. One round trip.
    ///
    /// The result has the [details](Self::details) of the leader, since when it leads, when its
    /// term ends unless it is renewed, and the fencing token.
    pub fn current<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Option<Leadership>> {
        const CURRENT: &str = "SELECT s.id, s.details, s.created_at, s.expires_at
            FROM resource_control.service_request AS s WHERE s.service::pg_catalog.text = $1
                AND s.slot::smallint = 0 AND s.completed_at IS NULL AND s.timed_out_at IS NULL
                AND s.expires_at::pg_catalog.timestamptz > pg_catalog.clock_timestamp()";
        type Columns = (BigInt, Text, Timestamptz, Timestamptz);
        P::Mode::drive(async move {
            let service = self.semaphore().service()?;
            let current = Statement::<Columns>::new(CURRENT, [(&*service).into()]);
            let (fencing_token, holder, since, until) = match ask(pool, None, &current).await {
                Ok((row, _)) => row,
                Err(Error::Database(DieselError::NotFound)) => return Ok(None),
                Err(error) => return Err(error),
            };
            let name = match &self.key {
                None => self.election.to_owned(),
                Some(key) => format!("{} {key}", self.election),
            };
            Ok(Some(Leadership {
                name,
                holder,
                since,
                until,
                fencing_token,
            }))
        })
    }

    /// The semaphore of one slot behind the election. Its service starts with the word `leader`, so
    /// that no other semaphore can have it.
    pub(crate) fn semaphore(&self) -> Semaphore<P> {
        let name = ["leader", self.election];
        let service = match &self.key {
            None => input::join(name),
            Some(key) => input::with_key(&name, key),
        };
        Semaphore::of_election(
            self.election,
            service,
            self.lease,
            match &*self.details {
                "" => Cow::Borrowed(instance::name()),
                _ => self.details.clone(),
            },
        )
    }

    /// Stands for the election until this instance wins. `None` if it was stopped.
    async fn campaign(&self, pool: &P, stop: &Stop) -> Result<Option<(Permit<P>, Term<P>)>> {
        let semaphore = self.semaphore();
        let campaign = self.stand(&semaphore, pool, stop);
        semaphore.subject().observe_wait("lead", campaign).await
    }

    async fn stand(
        &self,
        semaphore: &Semaphore<P>,
        pool: &P,
        stop: &Stop,
    ) -> Result<Option<(Permit<P>, Term<P>)>> {
        let mut trouble = Trouble::default();
        while !stop.is_stopped() {
            let longest = jitter(self.lease / 3);
            // A deadline, because a server that never replies must not end the campaign.
            let deadline = Instant::now().checked_add(self.lease);
            let claimed = P::Mode::within(
                deadline,
                semaphore.claim(pool, Some(Instant::now() + mode::PATIENCE_OF_A_LOOP)),
            )
            .await;
            let claimed = match claimed {
                Some(Ok(Admission::Admitted(permit))) if !permit.lease().begin() => {
                    Err(Error::TimedOut)
                }
                Some(claimed) => claimed,
                None => Err(Error::TimedOut),
            };
            if claimed.is_ok() {
                trouble.end();
            }
            let pause = match claimed {
                Ok(Admission::Admitted(permit)) => {
                    let term = Term {
                        lease: permit.lease().clone(),
                        stop: stop.clone(),
                    };
                    return Ok(Some((permit, term)));
                }
                // Try when the term expires: otherwise a crash would be noticed up to a third of a
                // lease later.
                Ok(Admission::Full(full)) => {
                    longest.min(full.retry_after + Duration::from_millis(fastrand::u64(1..10)))
                }
                Err(error) if error.may_pass() => {
                    trouble.report(semaphore.subject(), "lead", &error);
                    longest
                }
                Err(error) => return Err(error),
            };
            mode::pause_until_stop::<P::Mode>(stop, pause).await;
        }
        Ok(None)
    }

    /// Rests after a term that the callback has ended, for longer than others pause between two
    /// tries, so that another instance can lead.
    async fn rest(&self, stop: &Stop) {
        mode::pause_until_stop::<P::Mode>(stop, self.lease / 2).await;
    }
}

impl<P: Pool> Outcome for Option<(Permit<P>, Term<P>)> {
    fn word(&self) -> &'static str {
        match self {
            Some(_) => "elected",
            None => "stopped",
        }
    }
}

impl<P: Pool> Term<P> {
    /// Returns whether this instance still leads: its term was renewed in time, and it was not
    /// stopped. No round trip.
    pub fn is_leader(&self) -> bool {
        !self.lease.is_lost() && !self.lease.is_over() && !self.stop.is_stopped()
    }

    /// Returns a number that is larger than those of all earlier terms. Pass it to a
    /// [`Fence`](crate::Fence).
    pub fn fencing_token(&self) -> i64 {
        self.lease.grant.row.token
    }

    /// Returns whether the term is lost: another instance may be about to lead. Once lost, it stays
    /// lost. No round trip.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Waits until the term is lost, for at most `timeout`, and returns whether it is lost. No
    /// round trip.
    pub fn wait_for_loss(&self, timeout: Duration) -> <P::Mode as Mode>::Reply<'_, bool> {
        P::Mode::drive(self.lease.wait_for_loss(timeout))
    }

    /// Waits until the term is lost. Never returns while the term is renewed in time. No round
    /// trip.
    pub fn lost(&self) -> <P::Mode as Mode>::Reply<'_, ()> {
        P::Mode::drive(self.lease.lost())
    }

    /// Pauses for `pause`, and returns whether this instance still leads afterwards. Returns early
    /// if the term is lost or stopped. No round trip.
    pub fn pause(&self, pause: Duration) -> <P::Mode as Mode>::Reply<'_, bool> {
        P::Mode::drive(async move {
            let due = Instant::now().checked_add(pause);
            let until = self.lease.until();
            let alarm = Arc::new(Alarm::new(due.map_or(until, |due| due.min(until))));
            let _of_stop = self.stop.sleepers().join_with(alarm.clone());
            let _of_loss = self.lease.sleepers.join_with(alarm.clone());
            // The term may be renewed during the pause, so its end is read anew.
            while self.is_leader() && due.is_none_or(|due| due > Instant::now()) {
                P::Mode::sleep(&alarm, None).await;
                let until = self.lease.until();
                alarm.set(due.map_or(until, |due| due.min(until)));
            }
            self.is_leader()
        })
    }
}

#[cfg(feature = "r2d2")]
impl<M> Leader<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Stands for the election, and calls `work` each time this instance wins.
    ///
    /// Returns after a stop, once the instance has resigned. To stop it, call [`Stop::stop`] on a
    /// clone when SIGTERM arrives.
    ///
    /// `work` must return when [`is_leader`](Term::is_leader) returns `false`, because a thread
    /// cannot be stopped from outside.
    pub fn lead(
        &self,
        pool: &diesel::r2d2::Pool<M>,
        stop: &Stop,
        mut work: impl FnMut(&Term<diesel::r2d2::Pool<M>>),
    ) -> Result<()> {
        use crate::session::run_ready;
        while let Some((permit, term)) = run_ready(self.campaign(pool, stop))? {
            work(&term);
            run_ready(permit.release_soon());
            run_ready(self.rest(stop));
        }
        Ok(())
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = mode::Async>> Leader<P> {
    /// Stands for the election, and calls `work` each time this instance wins. Never returns `Ok`.
    ///
    /// To stop, drop the future; the instance then resigns.
    ///
    /// If the term is lost, the future of `work` is dropped before another instance leads.
    pub fn lead<'a, F>(
        &'a self,
        pool: &'a P,
        mut work: impl FnMut(Term<P>) -> F + Send + 'a,
    ) -> Reply<'a, P, Infallible>
    where
        F: Future<Output = ()> + Send + 'a,
    {
        P::Mode::drive(async move {
            let stop = Stop::new();
            loop {
                let Some((permit, term)) = self.campaign(pool, &stop).await? else {
                    unreachable!("nobody stops it")
                };
                mode::select(permit.lost(), work(term)).await;
                permit.release_soon().await;
                self.rest(&stop).await;
            }
        })
    }
}

impl_debug!(
    Leader | this | election = this.election,
    key = this.key,
    lease = this.lease
);

impl_debug!(Term | this | fencing_token = this.fencing_token());
