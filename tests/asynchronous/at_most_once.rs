//! An operation of a table that is dropped after any number of polls has happened once or not at all, changes nothing else, and
//! leaves its connection as good as before.

use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::asynchronous::{Pool, RateLimit, Semaphore, Throttle};
use diesel_interlock::{Admission, Error, Quota, Reserve, migrations, sync, throttled_resources};
use tokio::task::block_in_place;
use workbench::Database;

use crate::dropping::{assert_full_strength, drops, poll_times};
use crate::run;
use crate::transactions::count;

throttled_resources! {
    enum Resource {
        Import = "import" every Duration::from_secs(3600),
    }
}

const HOUR: Duration = Duration::from_secs(3600);
static API: RateLimit = RateLimit::named("api", Quota::per_day(24).burst(5));

#[derive(Debug, Clone, Copy)]
enum Operation {
    Attempt,
    Claim,
    Complete,
    Renew,
    Check,
    CheckAll,
    Reserve,
    GiveBack,
    Cancel,
    Reset,
    Prune,
}

const OPERATIONS: [Operation; 11] = [
    Operation::Attempt,
    Operation::Claim,
    Operation::Complete,
    Operation::Renew,
    Operation::Check,
    Operation::CheckAll,
    Operation::Reserve,
    Operation::GiveBack,
    Operation::Cancel,
    Operation::Reset,
    Operation::Prune,
];

fn database() -> Database {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    // What the throttle grants, as nothing else tells how often it did.
    let audit = "CREATE TABLE audit (key text); \
        CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS \
            'BEGIN INSERT INTO public.audit VALUES (NEW.key); RETURN NEW; END'; \
        CREATE TRIGGER audit BEFORE INSERT OR UPDATE OF last_locked ON resource_control.throttled_key \
            FOR EACH ROW EXECUTE FUNCTION public.audit()";
    diesel::connection::SimpleConnection::batch_execute(conn, audit).unwrap();
    database
}

fn counted(observer: &mut PgConnection, rows: String) -> i64 {
    block_in_place(|| count(observer, &format!("SELECT count(*) FROM {rows}")))
}

async fn left<P: Pool>(pool: &P, limit: &RateLimit) -> u32 {
    limit.peek(pool).await.unwrap().remaining
}

/// Drops an operation about this key after so many polls. Then looks for what it did: over the same pool of one connection, so that
/// the server comes to the look after it has come to the operation. Returns whether the operation was completed instead.
async fn is_completed<P: Pool>(
    operation: Operation,
    key: usize,
    pool: &P,
    polls: usize,
    observer: &mut PgConnection,
) -> bool {
    let limit = API.key(key);
    let service = Semaphore::new(format!("service {key}"), 1, HOUR);
    let requests = format!("resource_control.service_request WHERE service = 'service {key}'");
    match operation {
        Operation::Attempt => {
            let import = Throttle::of(Resource::Import).key(key).details("web-3");
            let first = poll_times(import.attempt(pool), polls).await;
            let second = import.attempt(pool).await.unwrap();
            let is_first = first
                .as_ref()
                .is_some_and(|first| !first.as_ref().unwrap().is_denied());
            assert!(!is_first || second.is_denied());
            assert!(import.attempt(pool).await.unwrap().is_denied());
            assert_eq!(counted(observer, format!("audit WHERE key = '{key}'")), 1);
            first.is_some()
        }
        Operation::Claim => {
            let mut conn = pool.check_out().await.unwrap();
            let first = poll_times(service.claim_on(&mut conn), polls).await;
            let _ = service.claim_on(&mut conn).await.unwrap();
            assert_eq!(counted(observer, requests), 1);
            first.map(Result::unwrap).is_some()
        }
        Operation::Complete => {
            let mut conn = pool.check_out().await.unwrap();
            let Admission::Admitted(claim) = service.claim_on(&mut conn).await.unwrap() else {
                panic!("the slot of another key");
            };
            let first = poll_times(service.complete_on(&mut conn, claim.id), polls).await;
            let second = service.complete_on(&mut conn, claim.id).await.unwrap();
            if let Some(first) = &first {
                assert_eq!((*first.as_ref().unwrap(), second), (true, false));
            }
            assert_eq!(
                counted(observer, format!("{requests} AND completed_at IS NOT NULL")),
                1
            );
            first.is_some()
        }
        Operation::Renew => {
            let mut conn = pool.check_out().await.unwrap();
            let Admission::Admitted(claim) = service.claim_on(&mut conn).await.unwrap() else {
                panic!("the slot of another key");
            };
            let first = poll_times(service.renew_on(&mut conn, claim.id), polls).await;
            let renewed = service.renew_on(&mut conn, claim.id).await.unwrap();
            assert!(renewed.unwrap() > claim.expires_at);
            assert_eq!(
                counted(observer, format!("{requests} AND completed_at IS NULL")),
                1
            );
            first.map(Result::unwrap).is_some()
        }
        Operation::Check => {
            let first = poll_times(limit.check(pool), polls).await;
            let left = left(pool, &limit).await;
            assert!(left == 4 || left == 5 && first.is_none(), "{left}");
            first.map(Result::unwrap).is_some()
        }
        Operation::CheckAll => {
            let other = API.key(format_args!("other {key}"));
            let first = poll_times(RateLimit::check_all(pool, &[&limit, &other]), polls).await;
            let both = (left(pool, &limit).await, left(pool, &other).await);
            assert!(
                both == (4, 4) || both == (5, 5) && first.is_none(),
                "{both:?}"
            );
            first.map(Result::unwrap).is_some()
        }
        Operation::Reserve => {
            let first = poll_times(limit.reserve(pool, HOUR), polls).await;
            let left = left(pool, &limit).await;
            assert!(left == 4 || left == 5 && first.is_none(), "{left}");
            first.map(Result::unwrap).is_some()
        }
        Operation::GiveBack => {
            let spent = limit.cost(3).check(pool).await.unwrap().allowed().unwrap();
            let first = poll_times(RateLimit::give_back(pool, &spent, 2), polls).await;
            let now = left(pool, &limit).await;
            assert!(now == 4 || now == 2 && first.is_none(), "{now}");
            // One unit is left of the three, if the dropped call is taken to have happened.
            let more = RateLimit::give_back(pool, &spent, 2).await;
            assert!(matches!(more, Ok(2) | Err(Error::Input(_))), "{more:?}");
            assert!(left(pool, &limit).await <= 4);
            first.map(Result::unwrap).is_some()
        }
        Operation::Cancel => {
            assert!(limit.cost(5).check(pool).await.unwrap().is_allowed());
            let Reserve::Reserved(reservation) = limit.reserve(pool, 2 * HOUR).await.unwrap()
            else {
                panic!("it may wait for two hours");
            };
            let first = poll_times(RateLimit::cancel(pool, reservation), polls).await;
            let full_in = limit.peek(pool).await.unwrap().full_in;
            let is_given_back = full_in <= 5 * HOUR;
            assert!(
                is_given_back || full_in <= 6 * HOUR && first.is_none(),
                "{full_in:?}"
            );
            first.map(Result::unwrap).is_some()
        }
        Operation::Reset => {
            assert!(limit.cost(3).check(pool).await.unwrap().is_allowed());
            let first = poll_times(limit.reset(pool), polls).await;
            let left = left(pool, &limit).await;
            assert!(left == 5 || left == 2 && first.is_none(), "{left}");
            first.map(Result::unwrap).is_some()
        }
        Operation::Prune => {
            assert!(limit.cost(3).check(pool).await.unwrap().is_allowed());
            let first = poll_times(RateLimit::prune(pool), polls).await;
            assert_eq!(left(pool, &limit).await, 2);
            first.map(Result::unwrap).is_some()
        }
    }
}

async fn each_happens_at_most_once<P: Pool>(database: Database, pool: P) {
    let observer = &mut block_in_place(|| database.connect());
    let mut keys = 0..;
    for operation in OPERATIONS {
        let (mut polls, mut dropped, mut completed) = (0, 0, 0);
        while dropped < drops() {
            let key = keys.next().unwrap();
            if is_completed(operation, key, &pool, polls, observer).await {
                (polls, completed) = (0, completed + 1);
            } else {
                (polls, dropped) = (polls + 1, dropped + 1);
            }
            assert!(polls < 100, "{operation:?}");
        }
        assert!(completed > 0, "{operation:?}");
        assert_full_strength(&pool, 1).await;
    }
}

#[test]
fn each_operation_happens_at_most_once_over_deadpool() {
    let database = database();
    let pool = database.deadpool(1);
    run(each_happens_at_most_once(database, pool));
}

#[test]
fn each_operation_happens_at_most_once_over_bb8() {
    run(async {
        let database = block_in_place(database);
        let pool = database.bb8(1);
        each_happens_at_most_once(database, pool).await;
    });
}
