//! Claims of a semaphore's slots, and refusals when none is free.

use std::ffi::CString;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{Permit, PgPool, Semaphore};

use crate::Bench;
use crate::harness::{Contender, compare, median, threads};
use crate::libpq::{Prepared, Session};
use crate::report::{Goal, NO_GOAL, Report, at_least};
use crate::server::BenchDatabase;

const OURS: &str = "ours, r2d2";
const ARTICLE: &str = "the article's statements";
const BARE: &str = "bare insert and update by key";

const SLOTS: u32 = 64;
const TIMEOUT: Duration = Duration::from_secs(3600);
/// How long a check may take that something happens at all.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    create_articles_table(&mut database.session());
    verify(&database);
    for number in [1, 8, 32] {
        start_with_a_log(&mut database.session());
        report.scenario("semaphore of 64 slots, claim and release", number);
        let rates = compare(
            bench.options.plan(),
            vec![
                ours(OURS, &database, number),
                claimants(ARTICLE, number, |_| Article::new(&database, SLOTS)),
                claimants(BARE, number, |thread| Bare::new(&database, thread)),
            ],
        );
        let goal = at_once(number, at_least(3.0).aiming_at(5.0));
        report.ratio(&rates, OURS, ARTICLE, goal);
        report.ratio(&rates, OURS, BARE, at_least(0.6).aiming_at(0.85));
    }
    for number in [1, 8, 32] {
        start_with_a_log(&mut database.session());
        let _permits = fill(&database);
        report.scenario("semaphore of 64 slots, refusal", number);
        let rates = compare(
            bench.options.plan(),
            vec![refusals(OURS, &database, number), {
                threads(ARTICLE, number, |_| {
                    let mut article = Article::new(&database, SLOTS);
                    move || assert!(!article.claim(), "every slot is taken")
                })
            }],
        );
        let goal = at_once(number, at_least(10.0));
        report.ratio(&rates, OURS, ARTICLE, goal);
    }
    for number in [2, 32] {
        as_many_slots(bench, report, number);
    }
}

/// Each thread has one slot at most, so no claim needs to be refused.
fn as_many_slots(bench: &Bench, report: &mut Report, number: usize) {
    let database = bench.server.database();
    let pool = database.pool(number);
    let semaphore = Semaphore::named("geocoder", number as u32, TIMEOUT);
    report.scenario("semaphore, as many slots as threads", number);
    let end = Instant::now() + Duration::from_secs(if bench.options.quick { 1 } else { 6 });
    let (claims, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..number {
            scope.spawn(|| {
                while Instant::now() < end {
                    claims.fetch_add(1, Ordering::Relaxed);
                    match semaphore.try_acquire(&pool).unwrap().admitted() {
                        Some(permit) => permit.release().unwrap(),
                        None => drop(refused.fetch_add(1, Ordering::Relaxed)),
                    }
                }
            });
        }
    });
    report.figure("claims", "claims", claims.into_inner() as f64);
    report.figure("of which refused", "claims", refused.into_inner() as f64);
}

/// The article's claims lock the table: the goals are about what that does to many.
fn at_once(number: usize, goal: Goal) -> Goal {
    if number > 1 { goal } else { NO_GOAL }
}

pub(crate) fn semaphore() -> Semaphore {
    Semaphore::named("geocoder", SLOTS, TIMEOUT)
}

/// How long one thing takes, in microseconds: the median of fifty.
pub(crate) fn time_of(mut once: impl FnMut()) -> f64 {
    let times: Vec<f64> = (0..50)
        .map(|_| {
            let sent = Instant::now();
            once();
            sent.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    median(&times)
}

pub(crate) fn claim_and_release(pool: &PgPool, semaphore: &Semaphore) {
    let permit = semaphore.try_acquire(pool).unwrap().admitted();
    permit.expect("a slot is free").release().unwrap();
}

pub(crate) fn be_refused(pool: &PgPool, semaphore: &Semaphore) {
    let busy = semaphore.try_acquire(pool).unwrap().is_full();
    assert!(busy, "every slot is taken");
}

/// What the same session's rows cost without a semaphore.
pub(crate) fn bare_time(session: Session) -> f64 {
    let mut bare = Bare::over(session, 0);
    time_of(|| {
        bare.claim();
        bare.release();
    })
}

/// Our side of the comparison, also for other scenarios.
pub(crate) fn ours(name: &str, database: &BenchDatabase, number: usize) -> Box<dyn Contender> {
    ours_of(name, &database.pool(number), number)
}

pub(crate) fn ours_of(name: &str, pool: &PgPool, number: usize) -> Box<dyn Contender> {
    claimants(name, number, |_| Ours::new(pool, semaphore()))
}

pub(crate) fn refusals(name: &str, database: &BenchDatabase, number: usize) -> Box<dyn Contender> {
    let pool = database.pool(number);
    threads(name, number, |_| {
        let (pool, semaphore) = (pool.clone(), semaphore());
        move || {
            assert!(
                semaphore.try_acquire(&pool).unwrap().is_full(),
                "every slot is taken"
            )
        }
    })
}

/// Takes every slot, of the article's table as well if it is there. Ours are free when the permits go.
fn fill(database: &BenchDatabase) -> Vec<Permit> {
    let permits = fill_ours(database);
    let mut article = Article::new(database, SLOTS);
    for _ in 0..SLOTS {
        assert!(article.claim());
    }
    permits
}

pub(crate) fn fill_ours(database: &BenchDatabase) -> Vec<Permit> {
    let pool = database.pool(1);
    let claim = |_| {
        semaphore()
            .try_acquire(&pool)
            .unwrap()
            .admitted()
            .expect("a slot is free")
    };
    (0..SLOTS).map(claim).collect()
}

/// Somebody who claims a slot and releases it.
trait Claimant: Send {
    /// Returns whether a slot was free.
    fn claim(&mut self) -> bool;
    fn release(&mut self);
}

fn claimants<C: Claimant + 'static>(
    name: &str,
    number: usize,
    make: impl Fn(usize) -> C,
) -> Box<dyn Contender> {
    threads(name, number, |thread| {
        let mut claimant = make(thread);
        move || {
            assert!(claimant.claim(), "a slot is free");
            claimant.release();
        }
    })
}

struct Ours {
    pool: PgPool,
    semaphore: Semaphore,
    permit: Option<Permit>,
}

impl Ours {
    fn new(pool: &PgPool, semaphore: Semaphore) -> Self {
        Self {
            pool: pool.clone(),
            semaphore,
            permit: None,
        }
    }
}

impl Claimant for Ours {
    fn claim(&mut self) -> bool {
        self.permit = self.semaphore.try_acquire(&self.pool).unwrap().admitted();
        self.permit.is_some()
    }

    fn release(&mut self) {
        self.permit.take().unwrap().release().unwrap();
    }
}

/// The statements that article 004's code runs: as Django sends them, each as text, in a round trip of its own.
struct Article {
    session: Session,
    claim: [CString; 3],
    claimed: Option<(String, String, String)>,
}

const TABLE: &str = "\"shop_servicerequest\"";

fn create_articles_table(session: &mut Session) {
    session.query(&format!(
        "CREATE TABLE {TABLE} (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, created_at timestamptz NOT NULL, \
         completed_at timestamptz, timed_out_at timestamptz, slot smallint NOT NULL CHECK (slot >= 0)); \
         CREATE UNIQUE INDEX one_per_slot ON {TABLE} (slot) WHERE completed_at IS NULL AND timed_out_at IS NULL"
    ));
}

impl Article {
    fn new(database: &BenchDatabase, slots: u32) -> Self {
        let statement = |text: String| CString::new(text).unwrap();
        Self {
            session: database.session(),
            claim: [
                statement(format!(
                    "UPDATE {TABLE} SET \"timed_out_at\" = now() WHERE {TABLE}.\"created_at\" < now() - '{} seconds'::interval \
                     AND {TABLE}.\"completed_at\" IS NULL AND {TABLE}.\"timed_out_at\" IS NULL",
                    TIMEOUT.as_secs()
                )),
                statement(format!("LOCK TABLE {TABLE} IN SHARE ROW EXCLUSIVE MODE")),
                statement(format!(
                    "INSERT INTO {TABLE} (created_at, slot) SELECT now(), coalesce(min(slot), 0) \
                     FROM generate_series(0, {}) slot WHERE NOT EXISTS (SELECT * FROM {TABLE} WHERE {TABLE}.slot = slot.slot \
                     AND completed_at IS NULL AND timed_out_at IS NULL) ON CONFLICT DO NOTHING RETURNING *",
                    slots - 1
                )),
            ],
            claimed: None,
        }
    }
}

impl Claimant for Article {
    fn claim(&mut self) -> bool {
        let [overdue, lock, insert] = &self.claim;
        self.session.query_c(overdue);
        self.session.query_c(c"BEGIN");
        self.session.query_c(lock);
        let row = self.session.query_c(insert);
        self.claimed = (row.rows() > 0).then(|| (row.text(0), row.text(1), row.text(4)));
        // The exception that says so leaves the transaction by a rollback.
        self.session.query_c(if self.claimed.is_some() {
            c"COMMIT"
        } else {
            c"ROLLBACK"
        });
        self.claimed.is_some()
    }

    /// An object's `save` writes every column.
    fn release(&mut self) {
        let (id, created_at, slot) = self.claimed.take().unwrap();
        let saved = self.session.query(&format!(
            "UPDATE {TABLE} SET \"created_at\" = '{created_at}'::timestamptz, \"completed_at\" = now(), \
             \"timed_out_at\" = NULL, \"slot\" = {slot} WHERE {TABLE}.\"id\" = {id}"
        ));
        assert_eq!(saved.changed(), 1);
    }
}

/// What any table of requests costs: a row that is inserted and, later, updated, each prepared and committed. It takes
/// no notice of how many are in flight.
struct Bare {
    session: Session,
    insert: Prepared,
    update: Prepared,
    slot: usize,
    id: i64,
}

impl Bare {
    fn new(database: &BenchDatabase, slot: usize) -> Self {
        Self::over(database.session(), slot)
    }

    fn over(mut session: Session, slot: usize) -> Self {
        Self {
            insert: session.prepare(
                "insert",
                "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, details) \
                 VALUES ('bare', $1::bigint, now(), now() + '1 hour', '') RETURNING id",
            ),
            update: session.prepare(
                "update",
                "UPDATE resource_control.service_request SET completed_at = now() WHERE id = $1",
            ),
            session,
            slot,
            id: 0,
        }
    }
}

impl Claimant for Bare {
    fn claim(&mut self) -> bool {
        self.id = self
            .session
            .run(&self.insert, &[self.slot as i64])
            .bigint(0);
        true
    }

    fn release(&mut self) {
        assert_eq!(self.session.run(&self.update, &[self.id]).changed(), 1);
    }
}

/// Empties both tables but for the same log of finished requests, so that the planner knows them.
fn start_with_a_log(session: &mut Session) {
    const FINISHED: u32 = 10_000;
    session.query(&format!(
        "TRUNCATE {TABLE}, resource_control.service_request; \
         INSERT INTO {TABLE} (created_at, completed_at, slot) \
         SELECT now() - '1 day'::interval, now() - '1 day'::interval, n % {SLOTS} FROM generate_series(1, {FINISHED}) n; \
         {}",
        finished_requests(FINISHED)
    ));
    session.query("VACUUM ANALYZE resource_control.service_request");
    session.query(&format!("VACUUM ANALYZE {TABLE}"));
}

/// Inserts so many requests to the geocoder that have ended.
pub(crate) fn finished_requests(number: u32) -> String {
    format!(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, completed_at) \
         SELECT 'geocoder', n % {SLOTS}, moment, moment + '1 hour', moment + '1 second' \
         FROM generate_series(1, {number}) n, LATERAL (SELECT now() - '30 days'::interval + n * '200 milliseconds'::interval) \
         AS m (moment)"
    )
}

/// Lets sixteen of each want four slots.
fn verify(database: &BenchDatabase) {
    let pool = database.pool(16);
    let few = || Semaphore::named("few", 4, TIMEOUT);
    admits_four(OURS, database, "resource_control.service_request", |_| {
        Ours::new(&pool, few())
    });
    admits_four(ARTICLE, database, TABLE, |_| Article::new(database, 4));

    let mut session = database.session();
    let mut bare = Bare::new(database, 0);
    bare.claim();
    let in_flight = "SELECT (count(*) FILTER (WHERE completed_at IS NULL))::text \
                     FROM resource_control.service_request WHERE service = 'bare'";
    assert_eq!(
        session.query(in_flight).text(0),
        "1",
        "{BARE}: the row is there"
    );
    bare.release();
    assert_eq!(
        session.query(in_flight).text(0),
        "0",
        "{BARE}: the row is updated"
    );
}

fn admits_four<C: Claimant>(
    name: &str,
    database: &BenchDatabase,
    table: &str,
    make: impl Fn(usize) -> C,
) {
    let mut five: Vec<_> = (0..5).map(&make).collect();
    for claimant in &mut five[..4] {
        assert!(claimant.claim(), "{name}: four are admitted");
    }
    assert!(!five[4].claim(), "{name}: a fifth is not");
    five[0].release();
    assert!(five[4].claim(), "{name}: it is after a release");
    five[1..].iter_mut().for_each(Claimant::release);
    drop(five);

    let (inside, most, claims) = (
        &AtomicUsize::new(0),
        &AtomicUsize::new(0),
        &AtomicUsize::new(5),
    );
    let claimants: Vec<_> = (0..16).map(&make).collect();
    let began = Instant::now();
    thread::scope(|scope| {
        for mut claimant in claimants {
            scope.spawn(move || {
                let mut claimed = 0;
                while claimed < 5 {
                    if claimant.claim() {
                        most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        // Stays until another is inside as well, because two that only might meet do not on a busy
                        // machine.
                        while most.load(Ordering::SeqCst) < 2 {
                            assert!(
                                began.elapsed() < PATIENCE,
                                "{name}: nobody is admitted beside the first"
                            );
                            thread::yield_now();
                        }
                        thread::sleep(Duration::from_millis(1));
                        inside.fetch_sub(1, Ordering::SeqCst);
                        claimant.release();
                        claimed += 1;
                        claims.fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
        }
    });
    let most = most.load(Ordering::SeqCst);
    assert!(
        (2..=4).contains(&most),
        "{name}: {most} were in flight at once"
    );
    let count = format!("SELECT count(*)::text FROM {table} WHERE completed_at IS NOT NULL");
    let rows = database.session().query(&count).text(0);
    assert_eq!(
        rows,
        claims.load(Ordering::SeqCst).to_string(),
        "{name}: a row for each claim"
    );
}
