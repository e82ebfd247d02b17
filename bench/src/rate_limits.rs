//! Checks of rate limits, allowed and limited, in the database and in the process.

use std::num::NonZeroU32;
use std::time::{SystemTime, UNIX_EPOCH};

use diesel::prelude::*;
use diesel::sql_types::Double;
use diesel_interlock::{LocalRateLimit, Quota, RateLimit};
use governor::{Quota as GovernorQuota, RateLimiter};

use crate::Bench;
use crate::harness::{Contender, compare, threads};
use crate::libpq::Session;
use crate::pgbench::Pgbench;
use crate::report::{NO_GOAL, Report, at_least};
use crate::runlimit::Runlimit;
use crate::server::BenchDatabase;

const PLENTY: u32 = 4_000_000_000;
/// Allows everything that can be asked of a server.
static ALLOWED: RateLimit = RateLimit::named("allowed", Quota::per_second(PLENTY));
/// Allows one call.
static LIMITED: RateLimit = RateLimit::named("limited", Quota::per_day(1));
/// Allows everything, and its chunks of a second last long enough to be handed out in the process.
static IN_CHUNKS: RateLimit =
    RateLimit::named("in chunks", Quota::per_second(CHUNK).burst(10 * CHUNK));
const CHUNK: u32 = 100_000_000;

const OURS: &str = "ours";
const PGBENCH: &str = "pgbench -M prepared, same call";
const UPDATE: &str = "UPDATE by key, libpq, synchronous_commit = off";
const UPSERT: &str = "upsert, libpq, waits for the disk";
const BY_HAND: &str = "SELECT and upsert by hand, Diesel";
const SELECT_1: &str = "SELECT 1, libpq";
const RUNLIMIT: &str = "runlimit-postgres";
const REDIS: &str = "Redis, script";
const FRESH: &str = "ours, new tables";
const OLD_SNAPSHOT: &str = "ours, after 100,000 checks under an old snapshot";
const MANY_KEYS: &str = "ours, a million keys";
const LOCAL: &str = "ours, local";
const LOCAL_LIMITED: &str = "ours, local, limited";
const GOVERNOR: &str = "governor";

/// Each variable becomes a parameter.
const CALL: &str = "SELECT resource_control.spend_rate_limit(:name, :key, :n, :period, :burst, :cost, :max_wait, :async, \
                    :allowance, :increase);\n";

const TABLES: &str = "
    CREATE TABLE public.counted (key text PRIMARY KEY, spent bigint NOT NULL, full_at timestamptz NOT NULL)
        WITH (fillfactor = 50);
    CREATE TABLE public.bucket (key text PRIMARY KEY, tokens double precision NOT NULL, filled_at double precision NOT NULL)
        WITH (fillfactor = 50);
    INSERT INTO public.counted SELECT 'hot', 0, now();
";

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    database.session().query(TABLES);
    let conn = &mut database.connect();
    assert!(LIMITED.key("hot").check_on(conn).unwrap().is_allowed());
    for clients in [1, 8] {
        allowed(bench, &database, report, clients);
        limited(bench, &database, report, clients);
    }
    flat(bench, report);
    local(bench, &database, report);
}

fn allowed(bench: &Bench, database: &BenchDatabase, report: &mut Report, clients: usize) {
    report.scenario("rate limit, one key, allowed", clients);
    let contenders = vec![
        ours(OURS, database, clients, &ALLOWED),
        Box::new(pgbench(bench, database, clients, &ALLOWED)),
        libpq(
            UPDATE,
            database,
            clients,
            "SET synchronous_commit = off",
            "UPDATE public.counted SET spent = spent + 1, full_at = clock_timestamp() WHERE key = 'hot'",
        ),
        libpq(
            UPSERT,
            database,
            clients,
            "SET synchronous_commit = on",
            "INSERT INTO public.counted VALUES ('hot', 1, clock_timestamp()) ON CONFLICT (key) DO UPDATE \
             SET spent = counted.spent + 1, full_at = clock_timestamp()",
        ),
        by_hand(database, clients),
        Box::new(Runlimit::new(RUNLIMIT, database, clients, 1_000_000_000)),
        redis(bench, clients, i64::from(PLENTY)),
    ];
    let rates = compare(bench.options.plan_of_long_turns(), contenders);
    report.ratio(&rates, OURS, UPDATE, at_least(0.8));
    let is_far_ahead = if clients == 1 {
        at_least(20.0)
    } else {
        NO_GOAL
    };
    report.ratio(&rates, OURS, UPSERT, is_far_ahead);
    report.ratio(&rates, OURS, BY_HAND, at_least(1.0));
    report.ratio(&rates, OURS, RUNLIMIT, at_least(1.0));
    report.ratio(&rates, OURS, PGBENCH, NO_GOAL);
    report.ratio(&rates, OURS, REDIS, NO_GOAL);
}

fn limited(bench: &Bench, database: &BenchDatabase, report: &mut Report, clients: usize) {
    report.scenario("rate limit, one key, limited", clients);
    let contenders = vec![
        ours(OURS, database, clients, &LIMITED),
        Box::new(pgbench(bench, database, clients, &LIMITED)),
        libpq(SELECT_1, database, clients, "SELECT 1", "SELECT 1"),
        Box::new(Runlimit::new(RUNLIMIT, database, clients, 1)),
        redis(bench, clients, 1),
    ];
    let rates = compare(bench.options.plan_of_long_turns(), contenders);
    report.ratio(&rates, OURS, PGBENCH, at_least(0.85));
    report.ratio(&rates, OURS, SELECT_1, NO_GOAL);
    report.ratio(&rates, OURS, RUNLIMIT, at_least(1.0));
    report.ratio(&rates, OURS, REDIS, NO_GOAL);
}

/// What becomes of an allowed check where old versions of its row must be kept, and among many keys.
fn flat(bench: &Bench, report: &mut Report) {
    report.scenario("rate limit, allowed, as tables grow", 1);
    let updates = if bench.options.quick { 5_000 } else { 100_000 };
    let keys = if bench.options.quick {
        20_000
    } else {
        1_000_000
    };
    let [fresh, snapshot, many] = [(); 3].map(|()| bench.server.database());
    let mut reader = snapshot.session();
    reader.query(
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM resource_control.rate_limit",
    );
    let conn = &mut snapshot.connect();
    let hot = ALLOWED.key("hot");
    for _ in 0..updates {
        assert!(hot.check_on(conn).unwrap().is_allowed());
    }
    many.session().query(&format!(
        "INSERT INTO resource_control.rate_limit \
         SELECT 'allowed', number::text, 1, 1, now(), now(), now(), {PLENTY}, 1000000 \
         FROM generate_series(1, {keys}) AS number"
    ));
    many.session()
        .query("VACUUM ANALYZE resource_control.rate_limit");
    let contenders = vec![
        ours(FRESH, &fresh, 1, &ALLOWED),
        ours(OLD_SNAPSHOT, &snapshot, 1, &ALLOWED),
        threads(MANY_KEYS, 1, |_| {
            let mut conn = many.connect();
            move || {
                let limit = ALLOWED.key(fastrand::u32(1..=keys));
                assert!(limit.check_on(&mut conn).unwrap().is_allowed());
            }
        }),
    ];
    let rates = compare(bench.options.plan(), contenders);
    report.ratio(&rates, OLD_SNAPSHOT, FRESH, at_least(0.85));
    report.ratio(&rates, MANY_KEYS, FRESH, at_least(0.85));
    reader.query("COMMIT");
}

/// Checks that need no round trip, most of the time.
fn local(bench: &Bench, database: &BenchDatabase, report: &mut Report) {
    report.scenario("rate limit, in the process", 1);
    let pool = database.pool(1);
    let in_chunks = IN_CHUNKS.local(&pool, CHUNK).unwrap();
    let limited = LIMITED.local(&pool, 1).unwrap();
    let each_second = NonZeroU32::new(PLENTY).expect("it is not zero");
    let governor = RateLimiter::keyed(GovernorQuota::per_second(each_second));
    let contenders = vec![
        locally(LOCAL, in_chunks, true),
        locally(LOCAL_LIMITED, limited, false),
        hundred(GOVERNOR, move || {
            assert!(governor.check_key(&"hot").is_ok());
        }),
    ];
    let rates = compare(bench.options.plan(), contenders);
    report.ratio(&rates, LOCAL, GOVERNOR, NO_GOAL);
    // The harness counts hundreds.
    report.figure(LOCAL, "million/s", rates.median(LOCAL) / 1e4);
    report.figure(
        LOCAL_LIMITED,
        "million/s",
        rates.median(LOCAL_LIMITED) / 1e4,
    );
}

fn locally(name: &str, limit: LocalRateLimit, is_allowed: bool) -> Box<dyn Contender> {
    hundred(name, move || {
        assert_eq!(limit.check("hot", 1).unwrap().is_allowed(), is_allowed);
    })
}

/// An operation that takes less time than the clock of the harness: a hundred at a time.
fn hundred(name: &str, operation: impl Fn() + Send + 'static) -> Box<dyn Contender> {
    let mut operation = Some(operation);
    threads(name, 1, |_| {
        let operation = operation.take().expect("there is one thread");
        move || (0..100).for_each(|_| operation())
    })
}

/// Checks of so many threads, each on a connection of its own.
fn ours(
    name: &str,
    database: &BenchDatabase,
    clients: usize,
    limit: &'static RateLimit,
) -> Box<dyn Contender> {
    let is_allowed = std::ptr::eq(limit, &raw const ALLOWED);
    threads(name, clients, |_| {
        let mut conn = database.connect();
        move || {
            let check = limit.key("hot").check_on(&mut conn).unwrap();
            assert_eq!(check.is_allowed(), is_allowed);
        }
    })
}

/// The call of a check, as the crate sends it.
fn pgbench(
    bench: &Bench,
    database: &BenchDatabase,
    clients: usize,
    limit: &'static RateLimit,
) -> Pgbench {
    let (name, n, period) = if std::ptr::eq(limit, &raw const ALLOWED) {
        ("allowed", PLENTY, 1_000_000_i64)
    } else {
        ("limited", 1, 86_400_000_000)
    };
    // The largest debt that allows a call of cost 1, and what the call adds to it, in microseconds.
    let allowance = i64::from(n - 1) * period / i64::from(n);
    let increase = (period as u64).div_ceil(u64::from(n));
    Pgbench::new(PGBENCH, &bench.server, database, clients, CALL)
        .variable("name", name)
        .variable("key", "hot")
        .variable("n", &n.to_string())
        .variable("period", &period.to_string())
        .variable("burst", &n.to_string())
        .variable("cost", "1")
        .variable("max_wait", "0")
        .variable("async", "true")
        .variable("allowance", &format!("{allowance}us"))
        .variable("increase", &format!("{increase}us"))
}

/// A prepared statement on so many connections.
fn libpq(
    name: &str,
    database: &BenchDatabase,
    clients: usize,
    setting: &str,
    statement: &str,
) -> Box<dyn Contender> {
    threads(name, clients, |_| {
        let mut session: Session = database.session();
        session.query(setting);
        let prepared = session.prepare("statement", statement);
        move || drop(session.run(&prepared, &[]))
    })
}

#[derive(QueryableByName)]
struct Bucket {
    #[diesel(sql_type = Double)]
    tokens: f64,
    #[diesel(sql_type = Double)]
    filled_at: f64,
}

/// A token bucket as applications write it: by the application's clock, read and then written.
fn by_hand(database: &BenchDatabase, clients: usize) -> Box<dyn Contender> {
    threads(BY_HAND, clients, |_| {
        let mut conn = database.connect();
        move || {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            let now = now.as_secs_f64();
            let read = "SELECT tokens, filled_at FROM public.bucket WHERE key = 'hot'";
            let bucket: Option<Bucket> = diesel::sql_query(read)
                .get_result(&mut conn)
                .optional()
                .unwrap();
            let (rate, burst) = (1e9, 1e9);
            let tokens = bucket.map_or(burst, |it| {
                (it.tokens + (now - it.filled_at) * rate).clamp(1.0, burst)
            });
            diesel::sql_query(
                "INSERT INTO public.bucket VALUES ('hot', $1, $2) ON CONFLICT (key) DO UPDATE \
                 SET tokens = EXCLUDED.tokens, filled_at = EXCLUDED.filled_at",
            )
            .bind::<Double, _>(tokens - 1.0)
            .bind::<Double, _>(now)
            .execute(&mut conn)
            .unwrap();
        }
    })
}

/// The same decision in Redis, by its clock, with what a client is told.
fn redis(bench: &Bench, clients: usize, n: i64) -> Box<dyn Contender> {
    let (key, period_us) = if n == 1 {
        ("limited", 86_400_000_000_i64)
    } else {
        ("allowed", 1_000_000)
    };
    threads(REDIS, clients, |_| {
        let script = redis::Script::new(
            "local time = redis.call('time')
             local now = time[1] * 1000000 + time[2]
             local n, period = tonumber(ARGV[1]), tonumber(ARGV[2])
             local full = math.max(now, tonumber(redis.call('get', KEYS[1]) or '0'))
             if full - now > (n - 1) * period / n then return {0, full - now} end
             full = full + math.ceil(period / n)
             redis.call('set', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1)
             return {1, full - now}",
        );
        let mut connection = bench.redis.connect();
        move || {
            let decided: (i64, i64) = script
                .key(key)
                .arg(n)
                .arg(period_us)
                .invoke(&mut connection)
                .unwrap();
            assert!(decided.0 == 1 || n == 1);
        }
    })
}
