//! Futures that are dropped after every number of polls. No slot may remain without an owner.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::block_in_place;

use super::*;
use crate::dropping::{drops, poll_times};

/// As many tasks drop futures at the same time, over fewer connections.
const TASKS: usize = 8;
const CONNECTIONS: u32 = 4;
const CONNECTIONS_TO_CHECK: usize = CONNECTIONS as usize;

#[derive(Debug, Clone, Copy)]
enum Operation {
    Claim,
    Wait,
    Renew,
    Release,
}

/// Does the operation, and drops it after so many polls. Returns whether it was completed instead.
async fn is_completed<P: Pool>(
    operation: Operation,
    semaphore: &Semaphore,
    pool: &P,
    polls: usize,
) -> bool {
    match operation {
        Operation::Claim => match poll_times(semaphore.try_acquire(pool), polls).await {
            Some(admission) => {
                if let Admission::Admitted(permit) = admission.unwrap() {
                    permit.release().await.unwrap();
                }
                true
            }
            None => false,
        },
        Operation::Wait => {
            let wait = semaphore.acquire_timeout(pool, Duration::from_millis(30));
            match poll_times(wait, polls).await {
                Some(Ok(Admission::Admitted(permit))) => {
                    permit.release().await.unwrap();
                    true
                }
                Some(Ok(Admission::Full(_)) | Err(Error::Pool(_))) => true,
                Some(Err(error)) => panic!("{error}"),
                None => false,
            }
        }
        Operation::Renew => {
            let mut permit = semaphore.acquire(pool).await.unwrap();
            let renewed = poll_times(permit.renew(), polls).await;
            // The permit is as good as before.
            permit.release().await.unwrap();
            renewed.map(Result::unwrap).is_some()
        }
        Operation::Release => {
            let permit = semaphore.acquire(pool).await.unwrap();
            let released = poll_times(permit.release(), polls).await;
            released.map(Result::unwrap).is_some()
        }
    }
}

/// Drops as many futures, after every number of polls from none until the operation is completed, again and again.
async fn dropped<P: Pool>(operation: Operation, semaphore: Semaphore, pool: P, drops: usize) {
    let (mut polls, mut dropped) = (0, 0);
    while dropped < drops {
        if is_completed(operation, &semaphore, &pool, polls).await {
            polls = 0;
        } else {
            (polls, dropped) = (polls + 1, dropped + 1);
        }
    }
}

async fn no_slot_remains<P: Pool>(operation: Operation, database: Database, pool: P) {
    let semaphore = Semaphore::new(format!("{operation:?}"), 3, LONG);
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (semaphore, pool) = (semaphore.clone(), pool.clone());
            tokio::spawn(dropped(operation, semaphore, pool, 10 * drops() / TASKS))
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    // A request may still be on its way to the server.
    sleep(Duration::from_millis(2)).await;
    taken(&database, 0).await;
    sleep(Duration::from_millis(20)).await;
    assert_eq!(in_flight(&database), 0);
    full_strength(&database, &pool, CONNECTIONS_TO_CHECK).await;
}

async fn claims<P: Pool>(database: Database, pool: P) {
    no_slot_remains(Operation::Claim, database, pool).await;
}

async fn waits<P: Pool>(database: Database, pool: P) {
    no_slot_remains(Operation::Wait, database, pool).await;
}

async fn renewals<P: Pool>(database: Database, pool: P) {
    no_slot_remains(Operation::Renew, database, pool).await;
}

async fn releases<P: Pool>(database: Database, pool: P) {
    no_slot_remains(Operation::Release, database, pool).await;
}

over_both_pools!(a_dropped_claim_leaves_no_slot, 4, claims);
over_both_pools!(a_dropped_wait_leaves_no_slot, 4, waits);
over_both_pools!(
    a_dropped_renewal_leaves_no_slot_and_a_whole_permit,
    4,
    renewals
);
over_both_pools!(a_dropped_release_leaves_no_slot, 4, releases);

over_both_pools!(
    a_thousand_permits_that_are_dropped_at_once_leave_the_pool_to_others,
    4,
    thousand
);

async fn thousand<P: Pool>(database: Database, pool: P) {
    let many = Semaphore::named("thousand", 1000, LONG);
    let mut permits = Vec::new();
    for _ in 0..1000 {
        permits.push(permit(&many, &pool).await);
    }
    drop(permits);
    let mut longest = Duration::ZERO;
    for _ in 0..20 {
        let begun = Instant::now();
        let mut conn = pool.check_out().await.unwrap();
        conn.batch_execute("SELECT 1").await.unwrap();
        longest = longest.max(begun.elapsed());
    }
    taken(&database, 0).await;
    assert!(longest < Duration::from_secs(20), "{longest:?}");
    full_strength(&database, &pool, CONNECTIONS_TO_CHECK).await;
}

over_both_pools!(
    permits_that_are_dropped_while_no_connection_is_idle_are_released_later,
    1,
    later
);

async fn later<P: Pool>(database: Database, pool: P) {
    let many = Semaphore::named("later", 40, LONG);
    let mut permits = Vec::new();
    for _ in 0..40 {
        permits.push(permit(&many, &pool).await);
    }
    let only = pool.check_out().await.unwrap();
    drop(permits);
    sleep(Duration::from_millis(300)).await;
    assert_eq!(in_flight(&database), 40);
    // Even if no connection is ever idle for long.
    drop(only);
    let end = Instant::now() + Duration::from_secs(20);
    while block_in_place(|| in_flight(&database)) > 0 {
        assert!(Instant::now() < end);
        let only = pool.check_out().await.unwrap();
        sleep(Duration::from_millis(5)).await;
        drop(only);
    }
}

/// Over deadpool only: bb8 may serve one user again and again while others wait.
#[test]
fn a_server_that_hangs_delays_no_release_through_another_pool() {
    run(async {
        let hanging = database();
        let database = database();
        let pool = database.deadpool(1);
        let network = RoundTrips::in_front_of(&hanging);
        let other = network.deadpool(4);
        let many = Semaphore::named("many", 8, LONG);
        let mut permits = Vec::new();
        for _ in 0..8 {
            permits.push(permit(&many, &other).await);
        }
        let held = permit(&many, &pool).await;
        network.cut();
        drop(permits);
        // The pool never has an idle connection, so the release must wait for one.
        let is_over = Arc::new(AtomicBool::new(false));
        let users = (0..4).map(|_| {
            let (pool, is_over) = (pool.clone(), Arc::clone(&is_over));
            tokio::spawn(async move {
                while !is_over.load(Ordering::SeqCst) {
                    let mut conn = pool.check_out().await.unwrap();
                    conn.batch_execute("SELECT pg_sleep(0.005)").await.unwrap();
                }
            })
        });
        let users: Vec<_> = users.collect();
        sleep(Duration::from_millis(100)).await;
        drop(held);
        taken(&database, 0).await;
        is_over.store(true, Ordering::SeqCst);
        for user in users {
            user.await.unwrap();
        }
        network.restore();
    });
}

over_both_pools!(a_waiter_that_loses_a_race_leaves_no_slot, 4, races);

async fn races<P: Pool>(database: Database, pool: P) {
    let semaphore = Semaphore::named("races", 2, LONG);
    let tasks: Vec<_> = (0..16_u64)
        .map(|task| {
            let (semaphore, pool) = (semaphore.clone(), pool.clone());
            tokio::spawn(async move {
                for round in 0..40 {
                    // Not the same pause for each, and none that any step of a claim always takes.
                    let pause = Duration::from_micros((task * 977 + round * 373) % 4000);
                    tokio::select! {
                        permit = semaphore.acquire(&pool) => {
                            let mut permit = permit.unwrap();
                            tokio::select! {
                                renewed = permit.renew() => drop(renewed.unwrap()),
                                () = sleep(pause) => {}
                            }
                            let release = tokio::spawn(permit.release());
                            if round % 3 == 0 {
                                release.abort();
                            }
                            if let Ok(released) = release.await {
                                released.unwrap();
                            }
                        }
                        () = sleep(pause) => {}
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    sleep(Duration::from_millis(2)).await;
    taken(&database, 0).await;
    full_strength(&database, &pool, CONNECTIONS_TO_CHECK).await;
}
