//! In transaction mode, everything but session locks works, although each statement may run on
//! another session.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use diesel::PgConnection;
use diesel::connection::{Connection, SimpleConnection};
use diesel::r2d2::{self, CustomizeConnection, ManageConnection, Pool};
use diesel_interlock::rate_limit::RateLimit;
use diesel_interlock::schedule::{RunDue, every};
use diesel_interlock::{Error, Once, Quota, migrations};
use workbench::{Database, PgBouncer, PoolMode};

use crate::{NoStatementCache, connect, number, pool};

const HOUR: Duration = Duration::from_secs(3600);
/// Timeout of a permit, which is renewed every four seconds.
const TIMEOUT: Duration = Duration::from_secs(12);
const RENEWED: &str = "(SELECT count(*) FROM resource_control.service_request
    WHERE service = 'import' AND expires_at > created_at + interval '13 s')";

/// Uses each primitive of a half from eight threads, over a pool of four connections and a pooler
/// with two sessions.
macro_rules! everything_but_session_locks {
    ($($half:ident)::+, $database:expr, $pool:expr, $wait:path, $work:expr, $once:expr) => {{
        use $($half)::+::{RateLimit, Schedule, Semaphore, Throttle};
        static REBUILD: Throttle = Throttle::named("rebuild", HOUR);
        static API: RateLimit = RateLimit::named("api", Quota::per_day(5));
        static GEOCODER: Semaphore = Semaphore::named("geocoder", 2, HOUR);
        static IMPORT: Semaphore = Semaphore::named("import", 1, TIMEOUT).keep_alive();
        static CLEAN: Schedule = Schedule::named("clean");

        let pool = $pool;
        $wait(migrations::install(&pool)).unwrap();
        let [granted, allowed, inside] = [(); 3].map(|()| AtomicUsize::new(0));
        let kept = $wait(IMPORT.try_acquire(&pool)).unwrap().admitted().unwrap();
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let decision = $wait(REBUILD.attempt(&pool)).unwrap();
                        granted.fetch_add(usize::from(decision.is_granted()), Ordering::SeqCst);
                        let check = $wait(API.key(7).check(&pool)).unwrap();
                        allowed.fetch_add(usize::from(check.is_allowed()), Ordering::SeqCst);
                        let permit = $wait(GEOCODER.acquire(&pool)).unwrap();
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < 2);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        $wait(permit.release()).unwrap();
                        assert!($wait(IMPORT.try_acquire(&pool)).unwrap().is_full());
                    }
                });
            }
        });
        assert_eq!(granted.into_inner(), 1);
        assert_eq!(allowed.into_inner(), 5);
        let look = || $wait(CLEAN.run_due(&pool, every(Duration::from_micros(1)), $work)).unwrap();
        assert!(matches!(look(), RunDue::Later(_)), "a first look registers the schedule");
        assert_eq!(look(), RunDue::Ran);
        assert!($once(&pool).unwrap().is_first());
        assert!(!$once(&pool).unwrap().is_first());
        let observer = &mut $database.connect();
        while number(observer, RENEWED) == 0 {
            assert!(!$wait(kept.wait_for_loss(Duration::from_millis(10))));
        }
        $wait(kept.release()).unwrap();
        assert!($wait(IMPORT.try_acquire(&pool)).unwrap().is_admitted());
    }};
}

#[test]
fn in_transaction_mode_the_blocking_half_works() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    everything_but_session_locks!(
        diesel_interlock,
        database,
        pool(&pooler, 4),
        std::convert::identity,
        |_| Ok::<_, Error>(()),
        |pool: &diesel_interlock::PgPool| {
            let conn = &mut pool.get().unwrap();
            Once::named("charge").run(conn, |_| Ok::<_, Error>("charged"))
        }
    );
}

/// diesel-async always prepares its statements, so the pooler must support them.
#[cfg(feature = "deadpool")]
#[test]
fn in_transaction_mode_the_asynchronous_half_works() {
    if !crate::follows_prepared_statements() {
        return;
    }
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    everything_but_session_locks!(
        diesel_interlock::deadpool,
        database,
        pooler.deadpool(4),
        workbench::block_on,
        |_| async { Ok::<_, Error>(()) },
        |pool: &diesel_interlock::deadpool::PgPool| workbench::block_on(async {
            let conn = &mut pool.get().await.unwrap();
            let once = diesel_interlock::deadpool::Once::named("charge");
            once.run(conn, async |_| Ok::<_, Error>("charged")).await
        })
    );
}

#[test]
fn work_that_is_begun_keeps_its_session_until_it_is_finished_or_dropped() {
    use diesel_interlock::once::Begun;
    static CHARGE: Once = Once::named("charge");
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    let pool = pool(&pooler, 4);
    migrations::install(&pool).unwrap();
    let observer = &mut database.connect();
    observer
        .batch_execute("CREATE TABLE effect (key int)")
        .unwrap();
    for key in 0..20 {
        let once = CHARGE.key(key);
        let begin = || match once.begin(&pool).unwrap() {
            Begun::First(mut doing) => {
                let insert = format!("INSERT INTO effect VALUES ({key})");
                doing.conn().batch_execute(&insert).unwrap();
                doing
            }
            _ => panic!("nobody else begins"),
        };
        drop(begin());
        let doing = begin();
        turn_sessions_of_one(&pooler);
        assert!(matches!(once.begin(&pool).unwrap(), Begun::Busy));
        doing.finish("charged").unwrap();
        assert!(matches!(once.begin(&pool).unwrap(), Begun::Before(bytes) if bytes == b"charged"));
    }
    assert_eq!(number(observer, "(SELECT count(*) FROM effect)"), 20);
}

/// Lets another client use the free session, so that the pooler would lend that one next.
fn turn_sessions_of_one(pooler: &workbench::Endpoint) {
    pooler.connect().batch_execute("BEGIN; COMMIT").unwrap();
}

/// A manager that does not notice that a connection is marked as broken.
#[derive(Debug)]
struct Unnoticing(String);

impl ManageConnection for Unnoticing {
    type Connection = PgConnection;
    type Error = r2d2::Error;

    fn connect(&self) -> Result<PgConnection, r2d2::Error> {
        let mut conn = PgConnection::establish(&self.0).map_err(r2d2::Error::ConnectionError)?;
        CustomizeConnection::<_, r2d2::Error>::on_acquire(&NoStatementCache, &mut conn)?;
        Ok(conn)
    }

    fn is_valid(&self, conn: &mut PgConnection) -> Result<(), r2d2::Error> {
        conn.batch_execute("SELECT 1")
            .map_err(r2d2::Error::QueryError)
    }

    fn has_broken(&self, _: &mut PgConnection) -> bool {
        false
    }
}

/// The crate ends the session of a discarded connection by a statement over that connection. Behind
/// the pooler, this must end the session that serves the statement, and not a session of another
/// client.
#[test]
fn a_discarded_connection_of_a_manager_that_does_not_notice_ends_the_session_of_no_other_client() {
    const LIMIT: RateLimit<Pool<Unnoticing>> = RateLimit::named("api", Quota::per_day(1000));
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 3);
    migrations::install(&pool(&pooler, 4)).unwrap();
    let builder = Pool::builder().max_size(2).test_on_check_out(true);
    let unnoticing = builder.build(Unnoticing(pooler.url())).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let others = [(); 4].map(|()| {
            scope.spawn(|| {
                let conn = &mut connect(&pooler);
                let mut transactions = 0;
                while !is_over.load(Ordering::SeqCst) {
                    conn.batch_execute("BEGIN; SELECT 1; COMMIT").unwrap();
                    conn.batch_execute("BEGIN").unwrap();
                    assert_eq!(number(conn, "1::bigint"), 1);
                    conn.batch_execute("COMMIT").unwrap();
                    transactions += 1;
                }
                transactions
            })
        });
        for _ in 0..30 {
            unnoticing.get().unwrap().batch_execute("BEGIN").unwrap();
            let checked = LIMIT.check(&unnoticing);
            assert!(
                matches!(checked, Err(Error::DirtyConnection)),
                "{checked:?}"
            );
            assert!(LIMIT.check(&unnoticing).unwrap().is_allowed());
        }
        is_over.store(true, Ordering::SeqCst);
        for other in others {
            assert!(
                other.join().unwrap() > 0,
                "no statement of another client has failed"
            );
        }
    });
}
