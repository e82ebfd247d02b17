//! The helpers for tests, on an asynchronous connection.

use std::fmt::Debug;
use std::future::Future;
use std::panic::Location;

use diesel_async::AsyncPgConnection;

use super::expiry::{send_expire, send_make_due};
use super::held::{find_anything, find_held, nobody_holds};
use super::in_flight::{find_in_flight, find_in_flight_to, none_in_flight_to};
use super::polling::{NoneLeft, PAUSE};
use crate::advisory::AdvisoryLock;
use crate::error::Result;
use crate::monitor::{self, Holder, ServiceRequest};
use crate::rate_limit::{self, RateLimit};
use crate::semaphore::Semaphore;
use crate::session::Asynchronous;
use crate::throttle::{Throttle, ThrottledResource};

/// Makes a throttle due, as if its interval had just passed. As `make_due` of the blocking half.
///
/// # Errors
///
/// As in the blocking half.
pub async fn make_due<R: ThrottledResource + Sync>(
    conn: &mut AsyncPgConnection,
    throttle: &(impl AsRef<Throttle<R>> + Sync),
) -> Result<()> {
    send_make_due(&mut Asynchronous::lent(conn), throttle.as_ref()).await
}

/// Lets every request in flight to the service time out now. Returns the number of these requests. As `expire` of the
/// blocking half.
///
/// # Errors
///
/// As in the blocking half.
pub async fn expire(
    conn: &mut AsyncPgConnection,
    semaphore: &(impl AsRef<Semaphore> + Sync),
) -> Result<usize> {
    send_expire(&mut Asynchronous::lent(conn), semaphore.as_ref()).await
}

/// Spends all units of a key that are left. The next check of it is limited. As `use_up` of the blocking half.
///
/// # Errors
///
/// As in the blocking half.
pub async fn use_up(
    conn: &mut AsyncPgConnection,
    limit: &(impl AsRef<RateLimit> + Sync),
) -> Result<()> {
    rate_limit::use_up(&mut Asynchronous::lent(conn), limit.as_ref()).await
}

/// Lists the advisory locks that are held in this database, by any session. As `held_locks` of the blocking half.
///
/// # Errors
///
/// As in the blocking half.
pub async fn held_locks(conn: &mut AsyncPgConnection) -> Result<Vec<Holder>> {
    find_held(&mut Asynchronous::lent(conn)).await
}

/// Lists the requests to services that are in flight in this database, of every process. As `requests_in_flight` of the
/// blocking half.
///
/// # Errors
///
/// As in the blocking half.
pub async fn requests_in_flight(conn: &mut AsyncPgConnection) -> Result<Vec<ServiceRequest>> {
    find_in_flight(&mut Asynchronous::lent(conn)).await
}

/// Panics if an advisory lock is held in this database, or a request to a service is in flight. As `assert_nothing_held` of
/// the blocking half: it polls for up to two seconds.
///
/// # Panics
///
/// If a lock is held, a request is in flight, or a query fails.
#[track_caller]
pub fn assert_nothing_held(conn: &mut AsyncPgConnection) -> impl Future<Output = ()> + Send {
    let caller = Location::caller();
    async move {
        let session = &mut Asynchronous::lent(conn);
        let none_left = NoneLeft::that("nothing is held".to_owned());
        while !holds(&none_left, find_anything(session).await, caller) {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Panics if any session of this database holds the lock. As `assert_not_held` of the blocking half: it polls for up to two
/// seconds.
///
/// # Panics
///
/// If the lock is held, or the query fails.
#[track_caller]
pub fn assert_not_held(
    conn: &mut AsyncPgConnection,
    lock: &(impl AsRef<AdvisoryLock> + Sync),
) -> impl Future<Output = ()> + Send {
    let (caller, lock) = (Location::caller(), lock.as_ref().clone());
    async move {
        let session = &mut Asynchronous::lent(conn);
        let none_left = NoneLeft::that(nobody_holds(session, &lock));
        while !holds(
            &none_left,
            monitor::find_holders(session, lock.key()).await,
            caller,
        ) {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Panics if a request to the service is in flight. As `assert_none_in_flight` of the blocking half: it polls for up to two
/// seconds.
///
/// # Panics
///
/// If a request is in flight, the service is refused, or the query fails.
#[track_caller]
pub fn assert_none_in_flight(
    conn: &mut AsyncPgConnection,
    semaphore: &(impl AsRef<Semaphore> + Sync),
) -> impl Future<Output = ()> + Send {
    let (caller, semaphore) = (Location::caller(), semaphore.as_ref().clone());
    async move {
        let session = &mut Asynchronous::lent(conn);
        let none_left = NoneLeft::that(none_in_flight_to(session, &semaphore));
        while !holds(
            &none_left,
            find_in_flight_to(session, &semaphore).await,
            caller,
        ) {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Panics with the place where the assertion was made, because a future panics where it is awaited.
fn holds<T: Debug>(
    none_left: &NoneLeft,
    found: Result<Vec<T>>,
    caller: &'static Location<'static>,
) -> bool {
    match none_left.holds(found) {
        Ok(holds) => holds,
        Err(message) => panic!("{message}\nasserted at {caller}"),
    }
}
