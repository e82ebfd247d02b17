//! Calls to a server that does not reply.

use std::process::Command;
use std::time::Duration;

use diesel_interlock::Pool;
use tokio::runtime::Builder;
use tokio::time::timeout;
use workbench::{Cluster, Endpoint, RoundTrips, When};

use crate::assert_matches;
use crate::half::schedule::every;
use crate::half::{
    AdvisoryLock, Error, Leader, PgPool, Quota, RateLimit, Schedule, Semaphore, Throttle, block_on,
    drain, make_pool, on_all, wait,
};
use crate::support::{IN_FLIGHT, Observer, alone, eventually, install, installed, number};

const HOUR: Duration = Duration::from_secs(3600);
/// Much longer than the two seconds that a drop waits for its reply.
const SOON: Duration = Duration::from_secs(30);

/// Drops a call as soon as `happens` is true. The call must not end before.
async fn dropped_when<T>(call: impl Future<Output = T>, happens: impl Fn() -> bool) {
    let happened = async {
        while !happens() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        _ = call => panic!("the call had a reply"),
        () = happened => {}
    }
}

/// A pool that does not check its connections, so that only the calls send statements.
fn unchecked(server: &Endpoint) -> PgPool {
    let _entered = workbench::runtime().enter();
    crate::pool::unchecked(server, 1)
}

#[test]
fn a_dropped_call_to_a_silent_server_frees_its_place_in_the_pool() {
    static SLOTS: Semaphore = Semaphore::named("silent", 10, HOUR);
    static THROTTLE: Throttle = Throttle::named("silent", HOUR);
    static LIMIT: RateLimit = RateLimit::named("silent", Quota::per_second(100));
    static LOCK: AdvisoryLock = AdvisoryLock::named("silent");
    let database = &installed();
    std::thread::scope(|scope| {
        macro_rules! dropped {
            (|$pool:ident| $call:expr) => {
                for round_trip in 1..3 {
                    for when in [When::BeforeServer, When::BeforeReply] {
                        scope.spawn(move || {
                            let proxy = RoundTrips::in_front_of(database);
                            let $pool = unchecked(&proxy);
                            block_on(async {
                                on_all(&$pool, "SELECT 1").await.unwrap();
                                let fault = proxy.silence_at(round_trip, when);
                                let happens = || fault.has_happened();
                                let dropped = dropped_when(async { $call.await }, happens);
                                timeout(SOON, dropped).await.expect("the statement is sent");
                                let next = timeout(SOON, $pool.check_out(None));
                                drop(next.await.expect("the pool has a connection").unwrap());
                            });
                        });
                    }
                }
            };
        }
        dropped!(|pool| SLOTS.try_acquire(&pool));
        dropped!(|pool| SLOTS.key(1).keep_alive().acquire(&pool));
        dropped!(|pool| SLOTS.complete(&pool, 7));
        dropped!(|pool| THROTTLE.attempt(&pool));
        dropped!(|pool| LIMIT.check(&pool));
        dropped!(|pool| RateLimit::check_all(&[&LIMIT, &LIMIT.key(1)], &pool));
        dropped!(|pool| LOCK.try_acquire(&pool));
    });
}

/// The statement by which the pool checks a connection has no reply.
#[test]
fn a_dropped_check_out_from_a_silent_server_frees_its_place_in_the_pool() {
    if !crate::pool::ENDS_DROPPED_CHECKS {
        return; // bb8 checks the same connection again, each time for as long as a check-out may take
    }
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(5));
    let lock = AdvisoryLock::named("silent");
    block_on(async {
        on_all(&pool, "SELECT 1").await.unwrap();
        let fault = proxy.silence_at(1, When::BeforeServer);
        let happens = || fault.has_happened();
        let dropped = dropped_when(lock.try_acquire(&pool), happens);
        timeout(SOON, dropped).await.expect("the statement is sent");
        let lent = async {
            while let Err(error) = lock.try_acquire(&pool).await {
                assert_matches!(error, Error::Pool(_));
            }
        };
        timeout(SOON, lent)
            .await
            .expect("the pool has a connection");
    });
}

/// Stops a process of the server until the value is dropped.
struct Stopped(i32);

impl Stopped {
    fn new(pid: i32) -> Self {
        signal("-STOP", pid);
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal("-CONT", self.0);
    }
}

fn signal(name: &str, pid: i32) {
    let status = Command::new("kill").args([name, &pid.to_string()]).status();
    assert!(status.unwrap().success());
}

#[test]
fn a_dropped_call_to_a_session_that_hangs_frees_its_place_in_the_pool() {
    let cluster = Cluster::start();
    let database = cluster.database();
    install(&mut database.connect());
    let pool = unchecked(&database);
    let slot = Semaphore::named("hangs", 1, HOUR);
    let pid = {
        let mut guard = wait(AdvisoryLock::named("hangs").acquire(&pool)).unwrap();
        assert!(wait(guard.is_held()).unwrap());
        let pid = guard.backend_pid();
        wait(guard.release()).unwrap();
        pid
    };
    let admin = &mut database.connect();
    let stopped = Stopped::new(pid);
    block_on(async {
        let claim = slot.try_acquire(&pool);
        assert!(timeout(Duration::from_millis(100), claim).await.is_err());
        // The next claim uses another session.
        let permit = timeout(SOON, slot.acquire(&pool)).await.unwrap().unwrap();
        permit.release().await.unwrap();
    });
    drop(stopped);
    eventually("the hanging session has ended", || {
        !Observer::of(&database).is_alive(pid)
    });
    eventually("nothing is in flight", || number(admin, IN_FLIGHT) == 0);
}

#[test]
fn a_release_in_another_runtime_than_the_claim_returns() {
    let database = installed();
    let slot = Semaphore::named("elsewhere", 1, HOUR);
    let admin = &mut database.connect();
    for is_kept in [false, true] {
        let slot = if is_kept {
            slot.clone().keep_alive()
        } else {
            slot.clone()
        };
        let runtimes =
            [(); 2].map(|()| Builder::new_current_thread().enable_all().build().unwrap());
        let [first, second] = runtimes;
        let permit = first.block_on(async {
            let pool = crate::pool::make(&database.url(), 1, Duration::from_secs(20));
            slot.acquire(&pool).await.unwrap()
        });
        drop(first);
        second.block_on(async {
            let release = timeout(SOON, permit.release());
            release.await.expect("the release returns").unwrap();
        });
        eventually("the slot is free", || number(admin, IN_FLIGHT) == 0);
    }
}

#[test]
fn a_permit_of_a_silent_server_is_drained_when_it_has_expired() {
    let test = "a_permit_of_a_silent_server_is_drained_when_it_has_expired";
    alone(&format!("asynchronous::silence::{test}"), || {
        let database = installed();
        let proxy = RoundTrips::in_front_of(&database);
        let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
        let slot = Semaphore::named("drained", 1, Duration::from_secs(3));
        let permit = wait(slot.acquire(&pool)).unwrap();
        proxy.cut();
        drop(permit);
        assert!(wait(drain(Duration::from_secs(60))));
    });
}

#[test]
#[cfg(feature = "testing")] // whose leases may be short
fn a_loop_goes_on_over_another_connection_if_its_server_is_silent() {
    const LEASE: Duration = Duration::from_millis(600);
    let database = &installed();
    std::thread::scope(|scope| {
        for round_trip in 1..8 {
            for when in [When::BeforeServer, When::BeforeReply] {
                scope.spawn(move || {
                    let proxy = RoundTrips::in_front_of(database);
                    let (first, second) = (unchecked(&proxy), unchecked(&proxy));
                    block_on(async {
                        on_all(&first, "SELECT 1").await.unwrap();
                        let key = format!("{round_trip} {when:?}");
                        let leader = Leader::named("silent", LEASE).key(&key);
                        let (led, leads) = tokio::sync::oneshot::channel();
                        let mut led = Some(led);
                        proxy.silence_at(round_trip, when);
                        let lead = leader.lead(&first, |_| {
                            led.take().map(|led| led.send(()));
                            std::future::pending()
                        });
                        let leads = timeout(SOON, leads);
                        tokio::select! {
                            _ = lead => panic!("the election has ended"),
                            leads = leads => leads.expect("the instance leads").unwrap(),
                        }
                        proxy.disarm();

                        on_all(&second, "SELECT 1").await.unwrap();
                        let schedule = Schedule::named("silent").key(&key).after_crash(LEASE, 3);
                        let (ran, runs) = tokio::sync::oneshot::channel();
                        let mut ran = Some(ran);
                        proxy.silence_at(round_trip, when);
                        let run = schedule.run(&second, every(Duration::from_millis(10)), |_| {
                            ran.take().map(|ran| ran.send(()));
                            async { Ok::<_, Error>(()) }
                        });
                        let runs = timeout(SOON, runs);
                        tokio::select! {
                            _ = run => panic!("the loop has ended"),
                            runs = runs => runs.expect("the schedule runs").unwrap(),
                        }
                    });
                });
            }
        }
    });
}
