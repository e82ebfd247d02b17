//! Rate limits that decide in memory: the callers of a key, one of which takes a chunk of units.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};

use crate::clock::{block_on, explore, join, lock, pause, run_until, sleep_until, spawn};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::mode::{Async, Blocking, Mode};
use crate::pool::Pool;
use crate::sources::rate_limit::local::LocalRateLimit;
use crate::sync::Instant;
use crate::watch::MS;

const KEY: &str = "key";
const CHUNK: u32 = 3;

/// What `local.rs` imports from the module above it, over a row of the model.
pub(crate) mod rate_limit {
    use super::*;

    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Quota {
        pub(crate) units: u32,
        pub(crate) period: Duration,
        pub(crate) burst: u32,
    }

    impl Quota {
        pub(crate) const fn exact(self) -> Result<Exact> {
            Ok(Exact)
        }
    }

    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Exact;

    #[derive(Debug)]
    pub(crate) enum Check {
        Allowed(()),
        Limited(Limited),
    }

    impl Check {
        pub(crate) const fn is_allowed(&self) -> bool {
            matches!(self, Self::Allowed(()))
        }
    }

    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Limited {
        pub(crate) retry_after: Duration,
        pub(crate) state: KeyState,
    }

    #[derive(Debug, Clone, Copy)]
    pub(crate) struct KeyState {
        pub(crate) remaining: u32,
    }

    impl Limited {
        pub(crate) const fn new(state: KeyState, _: Exact, _: u32) -> Self {
            // Nothing refills.
            let retry_after = Duration::from_secs(3600);
            Self { retry_after, state }
        }
    }

    #[derive(Debug)]
    pub(crate) struct RateLimit<P> {
        pub(crate) quota: Quota,
        cost: u32,
        row: Arc<Mutex<Row>>,
        pool: PhantomData<fn(&P)>,
    }

    impl<P> Clone for RateLimit<P> {
        fn clone(&self) -> Self {
            self.cost(self.cost)
        }
    }

    impl<P> RateLimit<P> {
        pub(crate) const fn new(row: Arc<Mutex<Row>>) -> Self {
            let quota = Quota {
                units: 1,
                period: Duration::from_secs(3600),
                burst: 100,
            };
            Self {
                quota,
                cost: 1,
                row,
                pool: PhantomData,
            }
        }

        pub(crate) fn key(&self, key: &str) -> Self {
            assert_eq!(key, KEY);
            self.clone()
        }

        pub(crate) fn cost(&self, cost: u32) -> Self {
            Self {
                cost,
                row: self.row.clone(),
                ..*self
            }
        }

        pub(crate) const fn call(&self) -> Result<()> {
            Ok(())
        }

        pub(crate) const fn subject(&self) -> Subject {
            Subject
        }
    }

    impl<P: Pool> RateLimit<P> {
        pub(crate) async fn check_within(&self, _: &P, _: Option<Instant>) -> Result<Check> {
            P::Mode::run(spend(self.row.clone(), self.cost)).await
        }
    }
}

use rate_limit::{Check, Exact, KeyState, Limited, RateLimit};

/// The row of the key.
#[derive(Debug)]
pub(crate) struct Row {
    units: u32,
    spent: u32,
    network: Network,
    is_in_flight: bool,
    /// How many statements have failed.
    failed: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Network {
    Good,
    /// A third of the statements do not arrive.
    Failing,
    /// No statement arrives.
    Away,
    /// The first statement has no reply for an hour, and its caller gives up.
    Silent,
}

impl Row {
    fn new(network: Network) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            units: thread_rng().gen_range(1..12),
            spent: 0,
            network,
            is_in_flight: false,
            failed: 0,
        }))
    }
}

/// One statement, of which the callers of a key send one at a time.
struct InFlight(Arc<Mutex<Row>>);

impl InFlight {
    fn new(row: Arc<Mutex<Row>>) -> Self {
        let before = std::mem::replace(&mut lock(&row).is_in_flight, true);
        assert!(!before, "two callers take a chunk at a time");
        Self(row)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        lock(&self.0).is_in_flight = false;
    }
}

async fn spend(row: Arc<Mutex<Row>>, units: u32) -> Result<Check> {
    let _in_flight = InFlight::new(row.clone());
    let network = lock(&row).network;
    if network == Network::Silent {
        lock(&row).network = Network::Good;
        sleep_until(Instant::now() + Duration::from_secs(3600)).await;
        return Err(Error::TimedOut);
    }
    sleep_until(Instant::now() + MS / 2).await;
    let is_lost = network == Network::Failing && thread_rng().gen_range(0..3) == 0;
    if is_lost || network == Network::Away {
        lock(&row).failed += 1;
        return Err(Error::Pool("no connection"));
    }
    let check = {
        let mut row = lock(&row);
        if row.units >= units {
            row.units -= units;
            row.spent += units;
            Check::Allowed(())
        } else {
            let remaining = row.units;
            Check::Limited(Limited::new(KeyState { remaining }, Exact, 1))
        }
    };
    sleep_until(Instant::now() + MS / 2).await;
    Ok(check)
}

#[derive(Debug)]
struct Unused<M>(PhantomData<M>);

impl<M> Clone for Unused<M> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<M: Mode> Pool for Unused<M> {
    type Mode = M;

    fn send(&self, _: Option<Duration>) -> impl Future<Output = Result<bool>> + Send + 'static {
        std::future::ready(Err(Error::Pool("it has no lease")))
    }
}

/// What became of the calls.
#[derive(Debug, Default)]
struct Calls {
    allowed: u32,
    failed: u32,
    dropped: u32,
}

/// Calls of five tasks. The first one may begin before the others.
fn crowd<M: Mode>(
    row: &Arc<Mutex<Row>>,
    calls: impl Fn(&LocalRateLimit<Unused<M>>, bool) -> Option<Result<bool>> + Copy + Send + 'static,
) -> (LocalRateLimit<Unused<M>>, Calls) {
    let local = RateLimit::new(row.clone()).local(Unused(PhantomData), CHUNK);
    let all = Arc::new(Mutex::new(Calls::default()));
    for number in 0..5 {
        let (local, all) = (local.clone(), all.clone());
        let begin = MS / 4 * number.min(1) * thread_rng().gen_range(1..8);
        spawn(move || {
            pause(begin);
            for round in 0..2 {
                let call = calls(&local, number + round == 0);
                let mut all = lock(&all);
                match call {
                    Some(Ok(is_allowed)) => all.allowed += u32::from(is_allowed),
                    Some(Err(_)) => all.failed += 1,
                    None => all.dropped += 1,
                }
            }
        });
    }
    join();
    let calls = std::mem::take(&mut *lock(&all));
    (local, calls)
}

/// Fails unless all units that were taken from the row were granted, are in memory, or went to a call that was dropped.
fn assert_all_are_there(row: &Mutex<Row>, calls: &Calls, mut is_allowed: impl FnMut() -> bool) {
    {
        let mut row = lock(row);
        (row.units, row.network) = (0, Network::Good);
    }
    let mut in_memory = 0;
    while is_allowed() {
        in_memory += 1;
    }
    let (spent, granted) = (lock(row).spent, calls.allowed + in_memory);
    assert!(granted <= spent, "{granted} of {spent} units");
    let lost = spent - granted;
    assert!(lost <= calls.dropped, "{lost} units are lost: {calls:?}");
}

fn explore_chunks(network: Network) {
    explore(move || {
        let row = Row::new(network);
        let (began, is_silent) = (Instant::now(), network == Network::Silent);
        if thread_rng().r#gen() && !is_silent {
            let (local, calls) = crowd::<Blocking>(&row, |local, _| {
                Some(local.check(KEY).map(|check| check.is_allowed()))
            });
            assert_all_are_there(&row, &calls, || local.check(KEY).unwrap().is_allowed());
            assert!(calls.failed == 0 || lock(&row).failed > 0);
            assert!(calls.failed >= lock(&row).failed);
        } else {
            // Some are dropped at any poll.
            let (local, calls) = crowd::<Async>(&row, move |local, is_first| {
                let gives_up = is_first && is_silent || thread_rng().r#gen();
                let polls = if gives_up {
                    thread_rng().gen_range(1..4)
                } else {
                    u32::MAX
                };
                let end = gives_up.then(|| Instant::now() + 5 * MS);
                let check = run_until(local.check(KEY), polls, end);
                check.map(|check| check.map(|check| check.is_allowed()))
            });
            assert_all_are_there(&row, &calls, || {
                block_on(local.check(KEY)).unwrap().is_allowed()
            });
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(5), "it took {took:?}");
    });
}

#[test]
fn chunks_of_a_good_network() {
    explore_chunks(Network::Good);
}

#[test]
fn chunks_of_which_some_fail() {
    explore_chunks(Network::Failing);
}

#[test]
fn chunks_of_a_server_that_is_silent_at_first() {
    explore_chunks(Network::Silent);
}

fn assert_one_asks_for_all<M: Mode>(
    fails: impl Fn(&LocalRateLimit<Unused<M>>) -> bool + Copy + Send + Sync + 'static,
) {
    explore(move || {
        let row = Row::new(Network::Away);
        let local = RateLimit::new(row.clone()).local(Unused(PhantomData), CHUNK);
        // Time stands still until all of them wait.
        for _ in 0..4 {
            let local = local.clone();
            spawn(move || assert!(fails(&local)));
        }
        join();
        assert_eq!(lock(&row).failed, 1);
    });
}

#[test]
fn chunks_of_a_database_that_is_away() {
    assert_one_asks_for_all::<Blocking>(|local| local.check(KEY).is_err());
    assert_one_asks_for_all::<Async>(|local| block_on(local.check(KEY)).is_err());
}
