//! A lease that renews itself, over a good, a slow and a failing network.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};

use crate::clock::{block_on, explore, invariant, join, lock, pause, sleep_until, spawn};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::lease::{Grant, Lease, Row};
use crate::mode::{Async, Blocking, Mode};
use crate::pool::Pool;
use crate::sql_types::Bool;
use crate::statement::Statement;
use crate::sync::Instant;
use crate::watch::MS;

const TIMEOUT: Duration = Duration::from_millis(300);
const MARGIN: Duration = Duration::from_millis(30);

/// The row on the server.
#[derive(Debug)]
struct Server {
    /// Until when the server admits nobody else.
    expires_at: Instant,
    is_ended: bool,
}

#[derive(Debug, Clone, Copy)]
enum Network {
    Good,
    /// A round trip takes up to the timeout.
    Slow,
    /// Half of the statements do not arrive, or their replies are lost.
    Failing,
}

#[derive(Debug)]
struct Wire<M> {
    server: Arc<Mutex<Server>>,
    network: Network,
    mode: PhantomData<M>,
}

impl<M> Clone for Wire<M> {
    fn clone(&self) -> Self {
        Self {
            server: self.server.clone(),
            ..*self
        }
    }
}

impl<M: Mode> Pool for Wire<M> {
    type Mode = M;

    fn send(
        &self,
        renews_for: Option<Duration>,
    ) -> impl Future<Output = Result<bool>> + Send + 'static {
        let (server, network) = (self.server.clone(), self.network);
        async move {
            let trip = match network {
                Network::Good | Network::Failing => MS,
                Network::Slow => MS * thread_rng().gen_range(1..330),
            };
            let failure = match network {
                Network::Failing => thread_rng().gen_range(0..4),
                _ => 4,
            };
            // The error comes at once, or when the network gives up.
            let gives_up = MS * [1, 40, 200][thread_rng().gen_range(0..3)];
            let there = trip.mul_f64(thread_rng().gen_range(0.1..0.9));
            if failure == 0 {
                sleep_until(Instant::now() + gives_up).await;
                return Err(Error::Pool("no connection"));
            }
            sleep_until(Instant::now() + there).await;
            let was_held = lock(&server).execute(renews_for);
            if failure == 1 {
                sleep_until(Instant::now() + gives_up).await;
                return Err(Error::TimedOut);
            }
            sleep_until(Instant::now() + (trip - there)).await;
            Ok(was_held)
        }
    }
}

impl Server {
    fn execute(&mut self, renews_for: Option<Duration>) -> bool {
        let now = Instant::now();
        let is_held = !self.is_ended && self.expires_at > now;
        match renews_for {
            _ if !is_held => {}
            Some(timeout) => self.expires_at = now + timeout,
            None => self.is_ended = true,
        }
        is_held
    }
}

fn renewal(_: &Row, timeout: Duration) -> Statement<Bool> {
    Statement {
        renews_for: Some(timeout),
        rows: PhantomData,
    }
}

fn end() -> Statement<Bool> {
    Statement {
        renews_for: None,
        rows: PhantomData,
    }
}

fn claim<M: Mode>(network: Network) -> (Arc<Lease<Wire<M>>>, Arc<Mutex<Server>>) {
    let sent = Instant::now();
    let server = Arc::new(Mutex::new(Server {
        expires_at: Instant::now() + TIMEOUT,
        is_ended: false,
    }));
    let lease = Lease::new(Grant {
        pool: Wire {
            server: server.clone(),
            network,
            mode: PhantomData,
        },
        runtime: M::Runtime::default(),
        subject: Subject,
        row: Row {
            name: "name".into(),
            token: 1,
            claim: 1,
        },
        timeout: TIMEOUT,
        renewal,
        longest: None,
        sent,
    });
    (lease, server)
}

/// Tasks that renew the lease by hand, wait for its loss, end it, and take its row away.
fn live<M: Mode>(network: Network) {
    let (lease, server) = claim::<M>(network);
    let (was_over, has_heard) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
    let (watched, of_server, heard) = (lease.clone(), server.clone(), has_heard.clone());
    let over_since = Mutex::new(None);
    invariant(move |next| {
        let is_over = watched.is_over();
        let was_over = was_over.swap(is_over, Ordering::SeqCst);
        assert!(is_over || !was_over, "it is over for good");
        if is_over {
            let since = *lock(&over_since).get_or_insert(next);
            let is_late = next.duration_since(since) > MS;
            assert!(
                !is_late || heard.load(Ordering::SeqCst),
                "a waiter for the end is woken"
            );
        } else {
            let (trusted, server) = (watched.until(), lock(&of_server));
            assert!(
                server.is_ended || trusted + MARGIN <= server.expires_at + MS / 100,
                "nobody trusts it when the server lets another in"
            );
        }
    });
    lease.renew_in_background();
    let waits = lease.clone();
    spawn(move || {
        block_on(waits.wait_until_over(None));
        assert!(waits.is_over(), "it is over");
        has_heard.store(true, Ordering::SeqCst);
    });
    if thread_rng().r#gen() {
        let (renewed, time) = (lease.clone(), MS * thread_rng().gen_range(50..400));
        spawn(move || {
            pause(time);
            let was_over = renewed.is_over();
            let renewal = block_on(renewed.renew());
            assert!(renewal.is_err() || !was_over, "what is over is not renewed");
        });
    }
    if thread_rng().r#gen() {
        let time = MS * thread_rng().gen_range(50..600);
        spawn(move || {
            pause(time);
            lock(&server).is_ended = true;
        });
    }
    let (time, begins) = (
        MS * thread_rng().gen_range(450..900),
        thread_rng().r#gen::<bool>(),
    );
    pause(time);
    let was_lost = lease.is_lost();
    if begins {
        lease.begin_end();
    } else {
        lease.end("release");
    }
    let _ = block_on(lease.send_end(end(), None, Some(Instant::now() + TIMEOUT)));
    lease.end("release");
    assert!(lease.is_over(), "what has ended is over");
    assert!(lease.is_lost() || !was_lost, "a loss stays a loss");
    // The loop of the renewals ends at once, or with the reply to its last one.
    pause(match network {
        Network::Good => 5 * MS,
        _ => 2 * TIMEOUT,
    });
    let watched_and_held = 2;
    assert_eq!(
        Arc::strong_count(&lease),
        watched_and_held,
        "nobody renews it any more"
    );
    join();
}

fn any<M: Mode>() {
    live::<M>([Network::Good, Network::Slow, Network::Failing][thread_rng().gen_range(0..3)]);
}

#[test]
fn leases_of_the_blocking_half() {
    explore(any::<Blocking>);
}

#[test]
fn leases_of_the_asynchronous_half() {
    explore(any::<Async>);
}
