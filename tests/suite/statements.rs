//! `docs/statements.md` has every statement that an operation sends, as it is sent.
//!
//! With `WRITE_STATEMENTS=1` the half over r2d2 writes the page anew.

use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::thread;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::LockKey;
use workbench::{Database, Exchange, RoundTrips};

use super::throttles::Resource;
use crate::half::schedule::every;
use crate::half::*;
#[cfg(feature = "tracing")]
use crate::support::log::Log;
use crate::support::{Observer, Own, Step, eventually, foreign_holder, installed, run, text};

const HOUR: Duration = Duration::from_secs(3600);
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/statements.md");
const HEAD: &str = "# The statements that are sent

A test compares this page with what passes between the crate and the server, over each pool. White space is that of this page; in
messages that are not prepared, `n` stands for a number, such as a lock's number or a session's pid. Each statement is prepared once per
connection, unless the page says otherwise. Every name is qualified, and every operator has operands of exactly its types, so nothing is
looked up by the `search_path`. Not listed: what Diesel and the pools send themselves (`SET TIME ZONE 'UTC'`, `SET CLIENT_ENCODING`,
`SELECT 1`); and after a future was dropped, in the background, the statement that gives back what it took, and a count of
`pg_prepared_statements`.

Functions of the schema `resource_control` are in
[`up.sql`](../migrations/2000-01-01-000001_resource_control/up.sql).
";

/// The section of the page, the operation, what its statements are for, and a call of it.
struct Sends<'a>(&'a str, &'a str, &'a str, &'a dyn Fn(&PgPool, &str));

#[test]
fn the_page_has_every_statement_that_is_sent() {
    let (page, seen) = with_operations(|database, operations| {
        let admin = &mut database.connect();
        let (mut page, mut section, mut seen) = (HEAD.to_owned(), "", Vec::new());
        for Sends(of, operation, purpose, work) in operations {
            let proxy = RoundTrips::recording(database);
            let pool = make_pool(&proxy.url(), 2, Duration::from_secs(20));
            work(&pool, &proxy.url());
            if *of != section {
                section = of;
                write!(page, "\n## {section}\n").unwrap();
            }
            write!(page, "\n**{operation}**: {purpose}\n").unwrap();
            let mut blocks = Vec::new();
            for exchange in proxy.exchanges() {
                if is_of_the_connection(&exchange.sql) {
                    continue;
                }
                let block = block(admin, &exchange);
                if !blocks.contains(&block) {
                    blocks.push(block);
                }
            }
            let (old, new): (Vec<_>, Vec<_>) =
                blocks.into_iter().partition(|block| seen.contains(block));
            if !old.is_empty() {
                // Sorted, because a loop and its work send concurrently.
                let number = |block| seen.iter().position(|it| it == block).unwrap() + 1;
                let mut old: Vec<_> = old.iter().map(number).collect();
                old.sort_unstable();
                let old: Vec<_> = old.iter().map(usize::to_string).collect();
                write!(page, "\nAs above: {}.\n", old.join(", ")).unwrap();
            }
            for block in new {
                seen.push(block.clone());
                write!(page, "\n```sql\n-- {}\n{block}```\n", seen.len()).unwrap();
            }
        }
        (page, seen)
    });
    if IS_ASYNC || cfg!(not(feature = "tracing")) {
        let written = std::fs::read_to_string(PAGE).unwrap();
        // diesel-async begins transactions, and reads its table of migrations, by statements of its
        // own.
        let is_of_diesel = |it: &str| it.contains("TRANSACTION") || it.contains("__diesel_schema");
        let is_unknown = |it: &&String| !written.contains(*it) && !is_of_diesel(it);
        let unknown: Vec<_> = seen.iter().filter(is_unknown).collect();
        assert!(
            unknown.is_empty(),
            "not in docs/statements.md: {unknown:#?}"
        );
    } else if std::env::var_os("WRITE_STATEMENTS").is_some() {
        std::fs::write(PAGE, page).unwrap();
    } else {
        let written = std::fs::read_to_string(PAGE).unwrap_or_default();
        let differs = page.lines().zip(written.lines()).find(|(a, b)| a != b);
        assert!(
            page == written,
            "docs/statements.md is not what is sent: {differs:?}. Look at each change, and write it \
             with WRITE_STATEMENTS=1"
        );
    }
}

/// Compares names only: each public operation is named in a title of the page.
#[test]
fn the_page_has_every_operation() {
    let (page, api) = (
        PAGE,
        concat!(env!("CARGO_MANIFEST_DIR"), "/tools/public-api.txt"),
    );
    let [page, api] = [page, api].map(|file| std::fs::read_to_string(file).unwrap());
    let titles = page.lines().filter(|line| line.starts_with("**"));
    let titles: String = titles.filter_map(|line| line.split("**").nth(1)).collect();
    let words: Vec<_> = titles
        .split(|c: char| c != '_' && !c.is_alphanumeric())
        .collect();
    let operations: Vec<_> = api
        .lines()
        .filter(|line| line.starts_with("pub fn") && line.contains("-> diesel_interlock::Reply<"))
        .filter(|line| !line.contains("::testing::"))
        .map(|line| {
            let path = line.split('(').next().unwrap();
            let path = path
                .strip_suffix('>')
                .map_or(path, |it| it.rsplit_once('<').unwrap().0);
            path.rsplit("::").next().unwrap()
        })
        .collect();
    assert!(operations.len() > 40, "{operations:?}");
    let missing: Vec<_> = (operations.iter())
        .filter(|it| !words.contains(it))
        .collect();
    assert!(missing.is_empty(), "not in docs/statements.md: {missing:?}");
}

/// Each statement finds its rows by an index, also under the generic plan that a session keeps.
#[test]
fn no_statement_reads_a_table_as_a_whole() {
    if IS_ASYNC {
        return; // the blocking half sends the same statements
    }
    with_operations(|database, operations| {
        let mut all: Vec<Exchange> = Vec::new();
        for Sends(.., work) in operations {
            let proxy = RoundTrips::recording(database);
            work(
                &make_pool(&proxy.url(), 2, Duration::from_secs(20)),
                &proxy.url(),
            );
            let new = proxy.exchanges().into_iter();
            all.extend(new.filter(|it| it.parameters.is_some() && is_ours(&it.sql)));
        }
        let conn = &mut database.connect();
        fill(conn);
        run(conn, "SET plan_cache_mode = force_generic_plan");
        let mut explained = 0;
        for Exchange {
            sql, parameters, ..
        } in &all
        {
            let kinds = parameters.as_deref().unwrap_or_default().iter();
            let kinds: Vec<_> = kinds
                .map(|kind| text(conn, &format!("format_type({kind}, NULL)")))
                .collect();
            let (declared, nulls) = match kinds.len() {
                0 => (String::new(), String::new()),
                n => (
                    format!("({})", kinds.join(", ")),
                    format!("({})", vec!["NULL"; n].join(", ")),
                ),
            };
            run(conn, &format!("PREPARE it{declared} AS {sql}"));
            let plan: Vec<Line> = diesel::sql_query(format!("EXPLAIN EXECUTE it{nulls}"))
                .load(conn)
                .unwrap();
            run(conn, "DEALLOCATE it");
            let plan: Vec<_> = plan.into_iter().map(|line| line.plan).collect();
            assert_by_index(&plan.join("\n"), sql);
            explained += 1;
        }
        assert!(explained > 20, "{explained} statements");
        // The statements inside the functions.
        let calls = "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; \
             SET auto_explain.log_nested_statements = on; SET client_min_messages = log; \
             SELECT * FROM resource_control.claim_service_request('new', 64, '1 hour'); \
             SELECT resource_control.renew_service_request('new', 1, '1 hour', 1); \
             SELECT resource_control.complete_service_request('new', 1, true, 1); \
             SELECT resource_control.pass_fence('new', 1); \
             SELECT resource_control.once_outcome('work', '7')";
        let psql = Command::new("psql")
            .args(["-qX", "-c", calls])
            .arg(database.url())
            .output();
        match psql {
            Ok(output) if output.status.success() => {
                let plans = String::from_utf8_lossy(&output.stderr);
                assert!(plans.contains("Index Scan"), "{plans}");
                assert_by_index(&plans, "the functions");
            }
            other => eprintln!("not tried without psql and auto_explain: {other:?}"),
        }
    });
}

#[derive(QueryableByName)]
struct Line {
    #[diesel(sql_type = diesel::sql_types::Text, column_name = "QUERY PLAN")]
    plan: String,
}

/// Whether the crate wrote the statement, and not Diesel's query builder. A prune is left out: it
/// reads the table until its batch is full.
fn is_ours(sql: &str) -> bool {
    sql.contains("resource_control.") && !sql.contains("LIMIT") && !sql.starts_with("ALTER")
}

#[track_caller]
fn assert_by_index(plan: &str, what: &str) {
    for table in [
        "rate_limit",
        "throttle",
        "service_request",
        "once",
        "schedule",
        "fence",
    ] {
        let whole = plan.lines().find(|line| {
            let (_, after) = line.split_once("Seq Scan on ").unwrap_or_default();
            after.split([' ', '\n']).next() == Some(table)
        });
        assert!(whole.is_none(), "{what}\n{plan}");
    }
}

/// A hundred thousand rows in each table, as autovacuum leaves them. Reading a table as a whole
/// costs in proportion to its rows, and finding one by an index hardly more, so a plan by an index
/// at this size is one at every larger size.
fn fill(conn: &mut PgConnection) {
    for (table, columns, values) in [
        (
            "rate_limit (name, key, since, spent_at, full_at, unit_us, burst)",
            "'limit', n::text",
            "now(), now(), now(), 1000, 10",
        ),
        (
            "throttle (name, key, last_granted, throttle_interval)",
            "'rebuild', n::text",
            "now(), '1 hour'",
        ),
        ("once (name, key, outcome)", "'work', n::text", "'\\x00'"),
        (
            "service_request (service, slot, completed_at)",
            "'slots', 0",
            "now()",
        ),
        ("schedule (name, tick)", "n::text", "now()"),
        ("fence (name, token)", "n::text", "1"),
    ] {
        let insert = format!(
            "INSERT INTO resource_control.{table} SELECT {columns}, {values} \
             FROM generate_series(1, 100000) AS n ON CONFLICT DO NOTHING"
        );
        run(conn, &insert);
    }
    run(conn, "VACUUM ANALYZE");
}

/// Whether Diesel or the pool sends the statement when it opens or checks a connection.
fn is_of_the_connection(sql: &str) -> bool {
    sql.is_empty()
        || ["SELECT 1", "SELECT $1"].contains(&sql)
        || sql.starts_with("SET TIME ZONE")
        || sql.starts_with("SET CLIENT_ENCODING")
}

/// The parameters, the columns and the text of a statement.
fn block(admin: &mut PgConnection, exchange: &Exchange) -> String {
    let mut block = String::new();
    let mut name = |kind: &u32| text(admin, &format!("format_type({kind}, NULL)"));
    match &exchange.parameters {
        None => block += "-- sent without parameters, and not prepared\n",
        Some(kinds) if kinds.is_empty() => {}
        Some(kinds) => {
            let kinds: Vec<_> = kinds.iter().map(&mut name).collect();
            writeln!(block, "-- parameters: {}", kinds.join(", ")).unwrap();
        }
    }
    if !exchange.columns.is_empty() {
        let column = |(column, kind): &(String, u32)| format!("{column} {}", name(kind));
        let columns: Vec<_> = exchange.columns.iter().map(column).collect();
        writeln!(block, "-- columns: {}", columns.join(", ")).unwrap();
    }
    let sql = if exchange.sql.contains("DO $migration$") {
        "-- the file migrations/2000-01-01-000001_resource_control/up.sql".to_owned()
    } else if exchange.parameters.is_none() {
        without_numbers(&exchange.sql)
    } else {
        exchange.sql.clone()
    };
    block + &wrapped(&sql)
}

/// The statement with `n` in the place of the keys, durations and pids of this run.
fn without_numbers(sql: &str) -> String {
    let mut out = String::new();
    for part in sql.split_inclusive(|c: char| !c.is_ascii_digit() && c != '-') {
        let digits = part.trim_end_matches(|c: char| !c.is_ascii_digit() && c != '-');
        if digits.len() > 2 && digits != "4294967295" && digits.ends_with(|c: char| c != '-') {
            out = out + "n" + &part[digits.len()..];
        } else {
            out += part;
        }
    }
    out
}

/// The text with other white space: clauses on lines of their own, indented by their parentheses.
fn wrapped(sql: &str) -> String {
    const CLAUSES: [&str; 10] = [
        "FROM",
        "WHERE",
        "UNION",
        "RETURNING",
        "LEFT",
        "JOIN",
        "ORDER",
        "WHEN",
        "BEGIN",
        "SELECT",
    ];
    let (mut out, mut line, mut depth, mut is_quoted) = (String::new(), String::new(), 0, false);
    let mut is_complete = false;
    for word in sql.split_whitespace() {
        let is_long = line.len() + word.len() > 100;
        let is_clause = CLAUSES.contains(&word) && line.trim().len() > 30;
        if !is_quoted && (is_long || is_clause || is_complete) {
            out = out + line.trim_end() + "\n";
            line = "  ".repeat(depth + 1);
        }
        line = line + word + " ";
        is_quoted ^= word.matches('\'').count() % 2 == 1;
        depth = (depth + word.matches('(').count()).saturating_sub(word.matches(')').count());
        is_complete = depth == 0 && word.ends_with(',') || word.ends_with(';');
    }
    out + line.trim_end() + "\n"
}

/// Calls `then` with a database and all operations.
fn with_operations<T>(then: impl FnOnce(&Database, &[Sends<'_>]) -> T) -> T {
    static LOCK: AdvisoryLock = AdvisoryLock::named("lock");
    static BUSY: AdvisoryLock = AdvisoryLock::named("busy");
    static LIMIT: RateLimit = RateLimit::named("limit", Quota::per_day(4));
    static SLOTS: Semaphore = Semaphore::named("slots", 2, HOUR);
    static LEADS: Leader = Leader::named("leads", HOUR);
    static REPORT: Schedule = Schedule::named("report").after_crash(HOUR, 3);
    static CHARGE: Once = Once::named("charge");
    const OWN: Own = Own(&[(
        "2026-01-01-000000_users",
        Step::Sql("CREATE TABLE users (id int)"),
    )]);

    let database = installed();
    let _busy = foreign_holder(&database, BUSY.lock_key());
    // Runs `waits` while another session holds the lock, and frees the lock once it is awaited.
    let contended = |lock: &AdvisoryLock, waits: &(dyn Fn() + Sync)| {
        let holder = foreign_holder(&database, lock.lock_key());
        thread::scope(|scope| {
            let waiter = scope.spawn(waits);
            let mut observer = Observer::of(&database);
            eventually("the lock is awaited", || {
                observer.waiters(lock.lock_key()) == 1
            });
            drop(holder);
            waiter.join().unwrap();
        });
    };
    let several = || AdvisoryLock::all([&LOCK.key(1), &LOCK.key(2).shared()]);
    let pair = || AdvisoryLock::new(LockKey::pair(1, -2)).shared();
    let owned = |sql: &str| run(&mut database.connect(), sql);
    let taken = |lock: AdvisoryLock, pool: &PgPool| {
        let guard = wait(lock.try_acquire(pool)).unwrap().acquired().unwrap();
        wait(guard.release()).unwrap();
    };
    let attempts = |throttle: Throttle, pool: &PgPool| {
        assert!(wait(throttle.attempt(pool)).unwrap().is_granted());
        assert!(wait(throttle.attempt(pool)).unwrap().is_denied());
    };
    let waits = |pool: &PgPool, _: &str| {
        contended(&LOCK, &|| {
            wait(wait(LOCK.acquire(pool)).unwrap().release()).unwrap();
        });
    };
    #[cfg(feature = "tracing")]
    let waits_long = |pool: &PgPool, _: &str| {
        const NAME: &str = "statements of a long wait";
        static LONG: AdvisoryLock = AdvisoryLock::named(NAME);
        // The log is that of all tests of this process, and several of them run this.
        static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _alone = ALONE.lock();
        let log = Log::of(NAME);
        let warnings = log.long_waits().len();
        let holder = foreign_holder(&database, LONG.lock_key());
        thread::scope(|scope| {
            let waiter = scope.spawn(|| drop(wait(LONG.acquire(pool)).unwrap()));
            eventually("the wait is logged", || log.long_waits().len() > warnings);
            drop(holder);
            waiter.join().unwrap();
        });
    };
    let panics = |pool: &PgPool, _: &str| {
        let worked = catch_unwind(AssertUnwindSafe(|| {
            on_one(pool, |conn| {
                let done: Result<()> =
                    wait(LOCK.with_on(conn, work!(|_conn| panic!("the work fails"))));
                done.unwrap();
            });
        }));
        assert!(worked.is_err());
    };
    let waits_in_transaction = |pool: &PgPool, _: &str| {
        for timeout in [None, Some(HOUR)] {
            contended(&LOCK, &|| {
                on_one(pool, |conn| {
                    begin(conn);
                    match timeout {
                        None => wait(LOCK.acquire_xact(conn)).unwrap(),
                        Some(timeout) => {
                            let waited = wait(LOCK.acquire_xact_timeout(conn, timeout));
                            assert!(waited.unwrap().is_acquired());
                        }
                    }
                    end(conn);
                });
            });
        }
    };
    let runs = |pool: &PgPool, fails: bool| {
        let look = wait(REPORT.run_due(
            pool,
            every(HOUR),
            work!(|_tick| if fails { Err(Error::TimedOut) } else { Ok(()) }),
        ));
        let _ = look.unwrap();
        owned(
            "UPDATE resource_control.schedule SET counted_from = counted_from - interval '2 hours', \
             next_at = next_at - interval '2 hours'",
        );
    };
    let in_transaction = |pool: &PgPool, work: &dyn Fn(&mut Conn)| {
        on_one(pool, |conn| {
            begin(conn);
            work(conn);
            end(conn);
        });
    };
    then(
        &database,
        &[
            Sends(
                "Session locks",
                "`try_acquire`, `release`",
                "takes the lock if it is free, and releases it on the session that took it. A shared lock calls the functions `…_shared`, and a pair passes its two halves",
                &|pool, _| {
                    taken(LOCK.clone(), pool);
                    taken(pair(), pool);
                },
            ),
            Sends(
                "Session locks",
                "`acquire`, `acquire_timeout`",
                "tries, waits on the server in slices of 200 ms, and reads whether the lock was granted",
                &waits,
            ),
            #[cfg(feature = "tracing")]
            Sends(
                "Session locks",
                "a wait of more than five seconds",
                "asks once, for the warning in the log, which session holds the lock",
                &waits_long,
            ),
            Sends(
                "Session locks",
                "`is_held`, `fencing_token`",
                "looks for the lock among those of this session, and draws a token if it is there",
                &|pool, _| {
                    let mut guard = wait(LOCK.acquire(pool)).unwrap();
                    assert!(wait(guard.is_held()).unwrap());
                    wait(guard.fencing_token()).unwrap();
                    wait(guard.release()).unwrap();
                },
            ),
            Sends(
                "Session locks",
                "`with_on`",
                "releases on the caller's connection; after a panic, in a message that is not waited for",
                &panics,
            ),
            Sends(
                "Session locks",
                "`all([…])`",
                "takes several locks in their order, up to the first that is busy, and then gives back what it took",
                &|pool, _| {
                    let mut guard = wait(several().acquire(pool)).unwrap();
                    assert!(wait(guard.is_held()).unwrap());
                    wait(guard.fencing_token()).unwrap();
                    wait(guard.release()).unwrap();
                    let all = AdvisoryLock::all([&LOCK, &BUSY]);
                    assert!(wait(all.try_acquire(pool)).unwrap().is_busy());
                },
            ),
            Sends(
                "Transaction locks",
                "`try_acquire_xact`",
                "takes the lock until the transaction ends, if it is free",
                &|pool, _| {
                    in_transaction(pool, &|conn| {
                        assert!(wait(LOCK.try_acquire_xact(conn)).unwrap().is_acquired());
                        assert!(wait(BUSY.try_acquire_xact(conn)).unwrap().is_busy());
                    });
                },
            ),
            Sends(
                "Transaction locks",
                "`acquire_xact`, `acquire_xact_timeout`",
                "tries, and then waits on the server, without or with a limit",
                &waits_in_transaction,
            ),
            Sends(
                "Transaction locks",
                "`transaction`",
                "opens the transaction, takes the lock and commits",
                &|pool, _| {
                    on_one(pool, |conn| {
                        let done: Result<()> = wait(LOCK.transaction(conn, work!(|_conn| Ok(()))));
                        done.unwrap();
                    });
                },
            ),
            Sends(
                "Transaction locks",
                "`all([…])`",
                "takes several locks until the transaction ends; a savepoint gives back those before a busy one",
                &|pool, _| {
                    in_transaction(pool, &|conn| {
                        assert!(
                            wait(several().try_acquire_xact(conn))
                                .unwrap()
                                .is_acquired()
                        );
                    });
                },
            ),
            Sends(
                "Throttles",
                "`named(…).attempt`",
                "updates the row of the name and key if it is due and not locked; the second statement is for the first attempt of a key",
                &|pool, _| attempts(Throttle::named("rebuild", HOUR), pool),
            ),
            Sends(
                "Throttles",
                "`sync`",
                "adds declared resources: the label first, in a transaction of its own",
                &|pool, _| {
                    let synced = wait(Throttle::sync::<Resource>(pool)).unwrap();
                    assert_eq!(synced.added.len(), 2);
                },
            ),
            Sends(
                "Throttles",
                "`sync_intervals`",
                "changes intervals that differ",
                &|pool, _| {
                    owned(
                        "UPDATE resource_control.throttled_resource SET throttle_interval = interval '1 day'",
                    );
                    let synced = wait(Throttle::sync_intervals::<Resource>(pool)).unwrap();
                    assert_eq!(synced.different.len(), 2);
                },
            ),
            Sends(
                "Throttles",
                "`of(Resource).attempt`, `attempt_on`",
                "the same for a resource, whose interval is in the database",
                &|pool, _| attempts(Throttle::of(Resource::Import), pool),
            ),
            Sends(
                "Throttles",
                "`of(Resource).key(…).attempt`",
                "the same for a key of a resource",
                &|pool, _| attempts(Throttle::of(Resource::Import).key("key"), pool),
            ),
            Sends(
                "Throttles",
                "`prune::throttles`",
                "deletes a batch of keys that have long been due",
                &|pool, _| {
                    wait(prune::throttles(pool)).unwrap();
                },
            ),
            Sends(
                "Rate limits",
                "`check`",
                "spends the units if they are available; the second statement inserts the row of a key, or converts what the key owes to a changed quota, and then the first one is sent again",
                &|pool, _| {
                    assert!(wait(LIMIT.check(pool)).unwrap().is_allowed());
                    assert!(wait(LIMIT.cost(4).check(pool)).unwrap().is_limited());
                },
            ),
            Sends(
                "Rate limits",
                "`durable().check`",
                "the same, and the commit waits for the disk",
                &|pool, _| {
                    assert!(
                        wait(LIMIT.key("durable").durable().check(pool))
                            .unwrap()
                            .is_allowed()
                    );
                },
            ),
            Sends(
                "Rate limits",
                "`check_on`",
                "the same in the caller's transaction, whose settings stay as they are",
                &|pool, _| {
                    on_one(pool, |conn| {
                        assert!(wait(LIMIT.key("on").check_on(conn)).unwrap().is_allowed());
                    });
                },
            ),
            Sends(
                "Rate limits",
                "`acquire_timeout`",
                "the same; a refusal also tells the database, because a process queues its waiters for each database",
                &|pool, _| {
                    assert!(
                        wait(LIMIT.key("waits").acquire_timeout(pool, HOUR))
                            .unwrap()
                            .is_allowed()
                    );
                },
            ),
            Sends(
                "Rate limits",
                "`check_all`, `peek`",
                "reads in how long each key is full; to spend, a check of each key follows in one transaction",
                &|pool, _| {
                    let _ = wait(LIMIT.peek(pool)).unwrap();
                },
            ),
            Sends(
                "Rate limits",
                "`refund`",
                "gives units back, less those that have refilled since",
                &|pool, _| {
                    let spent = wait(LIMIT.key("back").check(pool))
                        .unwrap()
                        .allowed()
                        .unwrap();
                    wait(LIMIT.key("back").refund(pool, &spent, 1)).unwrap();
                },
            ),
            Sends(
                "Rate limits",
                "`reset`",
                "makes the key full",
                &|pool, _| {
                    wait(LIMIT.reset(pool)).unwrap();
                },
            ),
            Sends(
                "Rate limits",
                "a key in use",
                "after a wait of 250 ms, locks the row in a transaction, unless another one still has it",
                &|pool, _| {
                    let locked = LIMIT.key("locked");
                    assert!(wait(locked.check(pool)).unwrap().is_allowed());
                    let mut other = database.connect();
                    run(
                        &mut other,
                        "BEGIN; UPDATE resource_control.rate_limit SET burst = burst",
                    );
                    assert!(wait(locked.check(pool)).is_err());
                },
            ),
            Sends(
                "Rate limits",
                "`prune::rate_limits`",
                "deletes a batch of keys that are full",
                &|pool, _| {
                    wait(prune::rate_limits(pool)).unwrap();
                },
            ),
            Sends(
                "Semaphores",
                "`try_acquire`, `renew`, `release`",
                "claims a slot, extends it, and completes the request",
                &|pool, _| {
                    let permit = wait(SLOTS.try_acquire(pool)).unwrap().admitted().unwrap();
                    wait(permit.renew()).unwrap();
                    wait(permit.release()).unwrap();
                },
            ),
            Sends(
                "Semaphores",
                "`acquire`",
                "claims a slot; a refusal also tells the database",
                &|pool, _| {
                    wait(wait(SLOTS.acquire(pool)).unwrap().release()).unwrap();
                },
            ),
            Sends(
                "Semaphores",
                "`semaphore.renew`, `semaphore.complete`",
                "the same for a request of another process, by its id",
                &|pool, _| {
                    let id = wait(SLOTS.acquire(pool)).unwrap().detach();
                    assert!(wait(SLOTS.renew(pool, id)).unwrap());
                    assert!(wait(SLOTS.complete(pool, id)).unwrap());
                },
            ),
            Sends(
                "Semaphores",
                "`prune::requests`",
                "deletes a batch of old requests",
                &|pool, _| {
                    wait(prune::requests(pool, Duration::ZERO)).unwrap();
                },
            ),
            Sends(
                "Leaders",
                "`lead`, `current`",
                "claims the only slot of the election, renews it, and completes the request at the end; reads who leads",
                &|pool, _| {
                    while_it_leads(
                        &LEADS,
                        pool,
                        |_| {},
                        || {
                            eventually("the instance leads", || {
                                wait(LEADS.current(pool)).unwrap().is_some()
                            });
                        },
                    );
                },
            ),
            Sends(
                "Schedules",
                "`run`, `run_due`",
                "looks, stores a new schedule, claims the tick that is due, and stores how its run ended",
                &|pool, _| {
                    for fails in [false, true, false] {
                        runs(pool, fails);
                    }
                },
            ),
            Sends(
                "Schedules",
                "`pause`, `resume`, `trigger`",
                "sets or clears a column",
                &|pool, _| {
                    assert!(wait(REPORT.pause(pool)).unwrap());
                    assert!(wait(REPORT.resume(pool)).unwrap());
                    assert!(wait(REPORT.trigger(pool)).unwrap());
                },
            ),
            Sends(
                "Once",
                "`run`",
                "takes a transaction lock and reads the outcome; the first run stores one",
                &|pool, _| {
                    for _ in 0..2 {
                        on_one(pool, |conn| {
                            let done =
                                wait(CHARGE.run(conn, work!(|_conn| Ok::<_, Error>("done"))));
                            assert!(done.is_ok());
                        });
                    }
                },
            ),
            Sends(
                "Once",
                "`try_run`",
                "the same without a wait",
                &|pool, _| {
                    on_one(pool, |conn| {
                        let key = CHARGE.key(1);
                        let tried = key.try_run(conn, work!(|_conn| Ok::<_, Error>("done")));
                        assert!(wait(tried).unwrap().is_acquired());
                    });
                },
            ),
            Sends(
                "Once",
                "`begin`, `finish`",
                "the same on a connection of the pool",
                &|pool, _| {
                    let Begun::First(doing) = wait(CHARGE.key(2).begin(pool)).unwrap() else {
                        panic!("the key has an outcome already");
                    };
                    wait(doing.finish("done")).unwrap();
                },
            ),
            Sends(
                "Once",
                "`begin`, `roll_back`",
                "ends the transaction without an outcome",
                &|pool, _| {
                    let Begun::First(doing) = wait(CHARGE.key(3).begin(pool)).unwrap() else {
                        panic!("the key has an outcome already");
                    };
                    wait(doing.roll_back());
                },
            ),
            Sends(
                "Once",
                "`prune::once`",
                "deletes a batch of old outcomes",
                &|pool, _| {
                    wait(prune::once(pool, Duration::ZERO)).unwrap();
                },
            ),
            Sends(
                "Fences",
                "`pass`",
                "stores the token unless a larger one has passed",
                &|pool, _| {
                    in_transaction(pool, &|conn| {
                        wait(Fence::named("fence").pass(conn, 2)).unwrap();
                    });
                },
            ),
            Sends(
                "Schema",
                "`migrations::install`",
                "finds out what is there, runs the files that are missing, tells a copy of the database, and asks two connections whether session locks exclude",
                &|pool, _| {
                    owned("DROP SCHEMA resource_control CASCADE");
                    wait(migrations::install(pool)).unwrap();
                },
            ),
            Sends(
                "Schema",
                "`migrations::check`",
                "compares what is recorded and what is there with what this release needs",
                &|pool, _| {
                    wait(migrations::check(pool)).unwrap();
                },
            ),
            Sends(
                "Schema",
                "`migrations::restart_tokens`",
                "begins a new range of tokens, above all that exist",
                &|pool, _| wait(migrations::restart_tokens(pool)).unwrap(),
            ),
            Sends(
                "Schema",
                "`migrations::run_pending`",
                "runs the application's own migrations under a session lock; Diesel reads and writes its table of migrations",
                &|_, url| {
                    assert_eq!(run_pending(url, OWN).unwrap().len(), 1);
                },
            ),
            Sends(
                "Schema",
                "`check_exclusion`",
                "asks two connections in turn which session they have, and tries one lock in a transaction of each",
                &|pool, _| {
                    wait(check_exclusion(pool)).unwrap();
                },
            ),
            Sends(
                "Rows for Diesel",
                "`monitor`",
                "what Diesel makes of the queries of `monitor`, to which an application adds filters",
                &|_, url| {
                    let conn = &mut PgConnection::establish(url).unwrap();
                    monitor::Lock::all().load::<monitor::Lock>(conn).unwrap();
                    monitor::Lock::of(LOCK.lock_key())
                        .load::<monitor::Lock>(conn)
                        .unwrap();
                    monitor::Slot::all().load::<monitor::Slot>(conn).unwrap();
                    monitor::ThrottleState::all()
                        .load::<monitor::ThrottleState>(conn)
                        .unwrap();
                    monitor::RateLimitState::all()
                        .load::<monitor::RateLimitState>(conn)
                        .unwrap();
                    monitor::Leadership::all()
                        .load::<monitor::Leadership>(conn)
                        .unwrap();
                    monitor::ScheduleState::all()
                        .load::<monitor::ScheduleState>(conn)
                        .unwrap();
                    monitor::ThrottledResource::all()
                        .load::<monitor::ThrottledResource>(conn)
                        .unwrap();
                    let flight = monitor::ServiceRequest::all().filter(monitor::is_in_flight());
                    flight.load::<monitor::ServiceRequest>(conn).unwrap();
                    let out = monitor::ServiceRequest::all().filter(monitor::has_timed_out());
                    out.load::<monitor::ServiceRequest>(conn).unwrap();
                },
            ),
            Sends(
                "Errors",
                "a missing schema",
                "finds out whether the schema is missing, after an error of unknown kind",
                &|pool, _| {
                    owned("ALTER SCHEMA resource_control RENAME TO elsewhere");
                    let error = wait(Throttle::named("missing", HOUR).attempt(pool));
                    owned("ALTER SCHEMA elsewhere RENAME TO resource_control");
                    assert!(matches!(error, Err(Error::NotInstalled)));
                },
            ),
        ],
    )
}
