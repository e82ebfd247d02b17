//! A statement whose reply was lost is not sent again.

use std::cell::RefCell;
use std::time::Duration;

use diesel::PgConnection;
use workbench::{Database, Fault, RoundTrips, When};

use crate::assert_matches;
use crate::half::*;
use crate::support::{IN_FLIGHT, eventually, installed, number, run};

const HOUR: Duration = Duration::from_secs(3600);
/// No unit refills while a test runs.
static LIMIT: RateLimit = RateLimit::named("cut", Quota::per_day(24).burst(1000));
static ONCE: Once = Once::named("cut");

/// A cut of the connection at one round trip of an operation.
struct Cut<'a> {
    proxy: &'a RoundTrips,
    round_trip: u64,
    when: When,
    fault: RefCell<Option<Fault>>,
}

impl Cut<'_> {
    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.fault
            .replace(Some(self.proxy.sever_at(self.round_trip, self.when)));
        let value = work();
        self.proxy.disarm();
        value
    }

    fn has_happened(&self) -> bool {
        self.fault
            .borrow()
            .as_ref()
            .is_some_and(Fault::has_happened)
    }

    /// A key unique to this cut.
    fn key(&self) -> String {
        format!("{:?} {}", self.when, self.round_trip)
    }
}

/// Repeats the work with a new pool, and cuts the connection at another round trip each time:
/// before the server gets the statement, and then before the client gets the reply. No statement is
/// prepared before. Ends when the work has fewer round trips.
fn cut_at_each(database: &Database, work: impl Fn(&Cut<'_>, &PgPool, &mut PgConnection)) {
    let proxy = RoundTrips::in_front_of(database);
    let admin = &mut database.connect();
    for round_trip in 1..50 {
        for when in [When::BeforeServer, When::BeforeReply] {
            let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
            wait(on_first(&pool, "SELECT 1")).unwrap();
            let cut = Cut {
                proxy: &proxy,
                round_trip,
                when,
                fault: RefCell::new(None),
            };
            work(&cut, &pool, admin);
            if !cut.has_happened() {
                assert!(round_trip > 2, "the connection was never cut");
                return;
            }
        }
    }
    panic!("the work has too many round trips");
}

/// The value, or `None` if the reply was lost. Any other error is a failure of the test.
#[track_caller]
fn unless_lost<T>(reply: Result<T>) -> Option<T> {
    reply
        .inspect_err(|error| assert!(error.is_unavailable(), "{error:?}"))
        .ok()
}

#[test]
fn a_claim_takes_one_slot_at_most() {
    let database = installed();
    cut_at_each(&database, |cut, pool, admin| {
        let slots = Semaphore::named("claim", 5, HOUR).key(cut.key());
        let admission = unless_lost(cut.during(|| wait(slots.try_acquire(pool))));
        let service = format!("r.service = 'claim {}'", cut.key().replace(' ', r"\ "));
        let claims =
            format!("SELECT count(*) FROM resource_control.service_request AS r WHERE {service}");
        let claims = number(admin, &format!("({claims})"));
        match admission {
            Some(admission) => {
                assert_eq!(claims, 1, "{}", cut.key());
                wait(admission.admitted().unwrap().release()).unwrap();
            }
            None => assert!(claims <= 1, "{claims} at {}", cut.key()),
        }
    });
}

#[test]
fn a_release_without_a_reply_is_repeated_and_not_reported_as_a_loss() {
    let database = installed();
    cut_at_each(&database, |cut, pool, admin| {
        let slot = Semaphore::named("release", 1, HOUR).key(cut.key());
        let permit = wait(slot.acquire(pool)).unwrap();
        let released = cut.during(|| wait(permit.release()));
        if unless_lost(released).is_some() {
            assert_eq!(number(admin, IN_FLIGHT), 0);
        }
        eventually("the slot is free", || number(admin, IN_FLIGHT) == 0);
    });
}

#[test]
fn a_renewal_without_a_reply_loses_nothing() {
    let database = installed();
    cut_at_each(&database, |cut, pool, admin| {
        let slot = Semaphore::named("renewal", 1, HOUR).key(cut.key());
        let permit = wait(slot.acquire(pool)).unwrap();
        unless_lost(cut.during(|| wait(permit.renew())));
        assert!(!permit.is_lost());
        wait(permit.release()).unwrap();
        assert_eq!(number(admin, IN_FLIGHT), 0);
    });
}

#[test]
fn a_throttle_is_granted_once_at_most() {
    let database = installed();
    cut_at_each(&database, |cut, pool, _| {
        let throttle = Throttle::named("cut", HOUR).key(cut.key());
        let first = unless_lost(cut.during(|| wait(throttle.attempt(pool))));
        // An attempt that was sent twice would deny itself.
        assert!(first.as_ref().is_none_or(Decision::is_granted), "{first:?}");
        let second = wait(throttle.attempt(pool)).unwrap();
        assert!(first.is_none() || second.is_denied());
        assert!(wait(throttle.attempt(pool)).unwrap().is_denied());
    });
}

#[test]
fn a_check_spends_once_at_most() {
    let database = installed();
    for is_durable in [false, true] {
        cut_at_each(&database, |cut, pool, _| {
            let limit = LIMIT.key(format!("{} {is_durable}", cut.key()));
            let limit = if is_durable { limit.durable() } else { limit };
            let check = unless_lost(cut.during(|| wait(limit.check(pool))));
            assert!(check.as_ref().is_none_or(Check::is_allowed), "{check:?}");
            let remaining = wait(limit.peek(pool)).unwrap().remaining;
            match check {
                Some(_) => assert_eq!(remaining, 999, "{}", cut.key()),
                None => assert!(remaining >= 999, "{remaining} at {}", cut.key()),
            }
        });
    }
}

#[test]
fn a_check_of_several_limits_spends_once_at_most_of_all_or_none() {
    let database = installed();
    cut_at_each(&database, |cut, pool, _| {
        let both = ["first", "second"].map(|which| LIMIT.key(format!("{} {which}", cut.key())));
        let check =
            unless_lost(cut.during(|| wait(RateLimit::check_all(&[&both[0], &both[1]], pool))));
        assert!(check.as_ref().is_none_or(Check::is_allowed));
        let [first, second] = both.map(|limit| wait(limit.peek(pool)).unwrap().remaining);
        assert_eq!(first, second, "{}", cut.key());
        match check {
            Some(_) => assert_eq!(first, 999, "{}", cut.key()),
            None => assert!(first >= 999, "{first} at {}", cut.key()),
        }
    });
}

#[test]
fn work_of_once_has_one_effect() {
    let database = installed();
    run(&mut database.connect(), "CREATE TABLE effect (key text)");
    cut_at_each(&database, |cut, pool, admin| {
        let once = ONCE.key(cut.key());
        let insert = format!("INSERT INTO effect VALUES ('{}')", cut.key());
        let effect = || {
            on_one(pool, |conn| {
                wait(once.run(
                    conn,
                    work!(|conn| {
                        // An error of the work's own statement, not of the crate's.
                        let inserted = reply!(execute(conn, &insert));
                        inserted.map_err(|_| Error::TimedOut)?;
                        Ok("done")
                    }),
                ))
            })
        };
        let first: Option<Done> = unless_lost(cut.during(effect));
        assert!(first.as_ref().is_none_or(Done::is_first));
        let second = effect().unwrap();
        assert!(first.is_none() || !second.is_first());
        assert_eq!(second.bytes(), b"done");
        let effects = format!("(SELECT count(*) FROM effect WHERE key = '{}')", cut.key());
        assert_eq!(number(admin, &effects), 1, "{}", cut.key());
    });
}

#[test]
fn a_lock_whose_acquisition_or_release_has_no_reply_is_free() {
    let database = installed();
    cut_at_each(&database, |cut, pool, _| {
        let lock = AdvisoryLock::named("cut").key(cut.key());
        let mut observer = crate::support::Observer::of(&database);
        // Busy if it was repeated before the server noticed that its first connection was cut.
        let tried = unless_lost(cut.during(|| wait(lock.try_acquire(pool))));
        if let Some(guard) = tried.and_then(Attempt::acquired) {
            wait(guard.release()).unwrap();
        }
        observer.assert_free(lock.lock_key());
    });
    cut_at_each(&database, |cut, pool, _| {
        let lock = AdvisoryLock::named("cut").key(cut.key());
        let mut observer = crate::support::Observer::of(&database);
        let guard = wait(lock.acquire(pool)).unwrap();
        if let Err(error) = cut.during(|| wait(guard.release())) {
            assert_matches!(error, Error::LockLost(_));
        }
        observer.assert_free(lock.lock_key());
    });
}

/// The next `begin` shows which of both.
#[test]
fn a_finish_without_a_reply_has_committed_all_or_nothing() {
    let database = installed();
    run(&mut database.connect(), "CREATE TABLE effect (key text)");
    cut_at_each(&database, |cut, pool, admin| {
        use diesel_interlock::once::Begun;
        let (once, key) = (ONCE.key(cut.key()), cut.key());
        let insert = format!("INSERT INTO effect VALUES ('{key}')");
        let effects = format!("(SELECT count(*) FROM effect WHERE key = '{key}')");
        let finished = cut.during(|| {
            let mut doing = match unless_lost(wait(once.begin(pool)))? {
                Begun::First(doing) => doing,
                // It was repeated before the server noticed that its first connection was cut.
                Begun::Busy => return None,
                Begun::Before(_) => panic!("nobody else has finished"),
            };
            wait(execute(doing.conn(), &insert)).ok()?;
            unless_lost(wait(doing.finish("first")))
        });
        if finished.is_some() {
            assert_eq!(number(admin, &effects), 1, "{key}");
        }
        // The server may not have noticed yet that the connection was cut.
        let next = loop {
            match wait(once.begin(pool)).unwrap() {
                Begun::Busy => std::thread::yield_now(),
                next => break next,
            }
        };
        match next {
            Begun::Before(bytes) => assert_eq!(bytes, b"first"),
            Begun::First(mut doing) => {
                assert!(finished.is_none(), "{key}");
                assert_eq!(number(admin, &effects), 0, "{key}");
                wait(execute(doing.conn(), &insert)).unwrap();
                wait(doing.finish("second")).unwrap();
            }
            Begun::Busy => unreachable!(),
        }
        assert_eq!(number(admin, &effects), 1, "{key}");
    });
}
