//! `testing`: the helpers for an application's own tests.
#![cfg(feature = "testing")]

use std::process::{Command, Stdio};
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::schedule::RunDue;
use diesel_interlock::testing::{self, depose, expire, make_due, make_tick_due, use_up};
use workbench::Database;

use crate::assert_matches;
use crate::half::*;
use crate::support::{eventually, hourly, installed, number, run, text, truth};

const HOUR: Duration = Duration::from_secs(3600);

/// A copy of the template. The process that makes the template installs the schema into it, and
/// records that in a table.
fn copy_of(server: &Database, maintenance: &PgPool, template: &str) -> testing::Database<PgPool> {
    wait(testing::Database::<PgPool>::from_template(
        maintenance,
        template,
        work!(|name| {
            let url = server.url_with("dbname", name);
            let pool = make_pool(&url, 1, Duration::from_secs(20));
            if name == template {
                reply!(migrations::install(&pool))?;
                let own = "CREATE TABLE IF NOT EXISTS opened (); INSERT INTO opened DEFAULT VALUES";
                reply!(on_first(&pool, own))?;
            }
            Ok::<_, Error>(pool)
        }),
    ))
    .unwrap()
}

/// The number of databases of this name: 0 or 1.
fn count(conn: &mut PgConnection, name: &str) -> i64 {
    number(
        conn,
        &format!("(SELECT count(*) FROM pg_database WHERE datname = '{name}')"),
    )
}

/// A template that is dropped with the value.
struct Template<'a>(&'a Database, String);

impl<'a> Template<'a> {
    fn of(server: &'a Database) -> Self {
        Self(server, format!("{} template", server.name()))
    }
}

impl Drop for Template<'_> {
    fn drop(&mut self) {
        let drop = format!("DROP DATABASE IF EXISTS \"{}\"", self.1);
        run(&mut self.0.connect(), &drop);
    }
}

#[test]
fn a_database_is_a_copy_of_the_template_and_is_dropped_with_its_value() {
    let server = Database::new();
    let template = Template::of(&server);
    let maintenance = pool(&server, 2);
    let copies = [(); 2].map(|()| copy_of(&server, &maintenance, &template.1));
    let throttle = Throttle::named("t", HOUR);
    for copy in &copies {
        assert!(wait(throttle.attempt(copy.pool())).unwrap().is_granted());
    }
    let names = copies.each_ref().map(|copy| copy.name().to_owned());
    assert_ne!(names[0], names[1]);
    drop(copies);
    let admin = &mut server.connect();
    for name in names {
        eventually(
            "the database is dropped, although a pool was connected",
            || count(admin, &name) == 0,
        );
    }
    assert_eq!(count(admin, &template.1), 1);
}

/// The environment variable by which the next test passes the database to its child processes.
const MAINTENANCE: &str = "INTERLOCK_TEST_MAINTENANCE";

#[test]
fn one_of_eight_processes_makes_databases() {
    let Ok(url) = std::env::var(MAINTENANCE) else {
        return; // runs only in a child process of the next test
    };
    let (name, template) = url.split_once(' ').unwrap();
    let server = Database::new();
    let maintenance = make_pool(&server.url_with("dbname", name), 1, Duration::from_secs(60));
    for _ in 0..3 {
        let copy = copy_of(&server, &maintenance, template);
        let permit = wait(Semaphore::named("geocoder", 1, HOUR).try_acquire(copy.pool()));
        assert!(permit.unwrap().is_admitted());
    }
}

#[test]
fn eight_processes_make_one_template_and_copy_it() {
    let server = Database::new();
    let template = Template::of(&server);
    let test = module_path!().split_once("::").unwrap().1;
    let test = format!("{test}::one_of_eight_processes_makes_databases");
    let variable = format!("{} {}", server.name(), template.1);
    let processes: Vec<_> = (0..8)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", &test])
                .env(MAINTENANCE, &variable)
                .env("DATABASE_URL", server.url())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("1 passed"), "{text}");
    }
    let mut conn = PgConnection::establish(&server.url_with("dbname", &template.1)).unwrap();
    assert_eq!(number(&mut conn, "(SELECT count(*) FROM opened)"), 24);
}

#[test]
fn a_copy_waits_until_nobody_is_connected_to_the_template() {
    let server = Database::new();
    let template = Template::of(&server);
    let maintenance = pool(&server, 2);
    let _made = copy_of(&server, &maintenance, &template.1);
    let url = server.url_with("dbname", &template.1);
    let mut connected = PgConnection::establish(&url).unwrap();
    let observer = &mut server.connect();
    std::thread::scope(|scope| {
        let copying = scope.spawn(|| copy_of(&server, &maintenance, &template.1));
        eventually("the copy waits", || {
            truth(
                observer,
                "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                 AND query LIKE '%a.backend_type = ''client backend''%' AND pid <> pg_backend_pid())",
            )
        });
        assert!(!copying.is_finished());
        run(&mut connected, "SELECT");
        drop(connected);
        drop(copying.join().unwrap());
    });
}

#[test]
fn a_copy_has_tokens_of_its_own_without_an_installation() {
    let server = Database::new();
    let template = Template::of(&server);
    let token_of = |pool: &PgPool| {
        let mut guard = wait(AdvisoryLock::named("t").acquire(pool)).unwrap();
        let token = wait(guard.fencing_token()).unwrap();
        wait(guard.release()).unwrap();
        token
    };
    let maintenance = pool(&server, 1);
    drop(copy_of(&server, &maintenance, &template.1));
    let of_template = make_pool(
        &server.url_with("dbname", &template.1),
        1,
        Duration::from_secs(20),
    );
    let largest = token_of(&of_template);
    drop(of_template);
    let copy = copy_of(&server, &maintenance, &template.1);
    wait(migrations::check(copy.pool())).unwrap();
    assert!(token_of(copy.pool()) > largest + (1 << 40));
}

#[test]
fn databases_that_a_killed_test_has_left_are_dropped_after_an_hour() {
    let server = Database::new();
    let template = Template::of(&server);
    let conn = &mut server.connect();
    let recent = text(conn, "(extract(epoch FROM now())::bigint - 600)");
    let names = ["1000000000", &recent, "9999999999"]
        .map(|made_at| format!("interlock_copy_{made_at}_0123456789abcdef"));
    for name in &names {
        run(conn, &format!("DROP DATABASE IF EXISTS {name}"));
        run(conn, &format!("CREATE DATABASE {name}"));
    }
    let maintenance = pool(&server, 1);
    let _copy = copy_of(&server, &maintenance, &template.1);
    assert_eq!(names.each_ref().map(|name| count(conn, name)), [0, 1, 1]);
    for name in &names[1..] {
        run(conn, &format!("DROP DATABASE {name}"));
    }
}

#[test]
fn an_error_of_open_leaves_no_database() {
    let server = Database::new();
    let template = Template::of(&server);
    let maintenance = pool(&server, 1);
    let made = copy_of(&server, &maintenance, &template.1);
    let mut name_of_copy = None;
    let failed = wait(testing::Database::<PgPool>::from_template(
        &maintenance,
        &template.1,
        work!(|name| {
            if name == template.1 {
                let url = server.url_with("dbname", name);
                return Ok(make_pool(&url, 1, Duration::from_secs(20)));
            }
            name_of_copy = Some(name.to_owned());
            Err(Error::TimedOut)
        }),
    ));
    assert_matches!(failed, Err(Error::TimedOut));
    let admin = &mut server.connect();
    let name = name_of_copy.unwrap();
    eventually("the database is dropped", || count(admin, &name) == 0);
    assert_eq!(count(admin, made.name()), 1);
}

#[test]
fn a_template_needs_a_valid_name() {
    let server = Database::new();
    let maintenance = pool(&server, 1);
    let long = "x".repeat(64);
    for bad in ["", "\0", &long] {
        let refused = wait(testing::Database::<PgPool>::from_template(
            &maintenance,
            bad,
            work!(|_name| Err(Error::TimedOut)),
        ));
        assert_matches!(refused, Err(Error::Input(_)));
    }
    let connected = &mut server.connect();
    let refused = wait(testing::Database::<PgPool>::from_template(
        &maintenance,
        server.name(),
        work!(|_name| Ok::<_, Error>(maintenance.clone())),
    ));
    assert_matches!(refused, Err(Error::Input(_)));
    run(connected, "SELECT");
}

#[test]
fn a_throttle_is_made_due() {
    throttled_resources! {
        enum Resource { Mail = "mail" every HOUR }
    }
    let database = installed();
    let pool = pool(&database, 2);
    let _ = wait(Throttle::sync::<Resource>(&pool)).unwrap();
    let throttles = [
        Throttle::named("t", HOUR),
        Throttle::named("t", HOUR).key(7),
        Throttle::named("mail", HOUR),
        Throttle::of(Resource::Mail),
        Throttle::of(Resource::Mail).key(7),
    ];
    let is_granted = |throttle: &Throttle| wait(throttle.attempt(&pool)).unwrap().is_granted();
    for throttle in &throttles {
        assert!(is_granted(throttle) && !is_granted(throttle));
    }
    for throttle in &throttles {
        wait(make_due(throttle, &pool)).unwrap();
        assert!(is_granted(throttle));
        assert!(
            throttles.iter().all(|throttle| !is_granted(throttle)),
            "other throttles are not due"
        );
    }
    // A throttle that was never granted is due already.
    wait(make_due(&Throttle::named("other", HOUR), &pool)).unwrap();
}

#[test]
fn permits_expire() {
    let database = installed();
    let pool = pool(&database, 2);
    let geocoder = Semaphore::named("geocoder", 1, HOUR);
    let other = Semaphore::named("other", 1, HOUR);
    let permit = wait(geocoder.try_acquire(&pool))
        .unwrap()
        .admitted()
        .unwrap();
    let _other = wait(other.try_acquire(&pool)).unwrap();
    assert!(wait(geocoder.try_acquire(&pool)).unwrap().is_full());
    assert_eq!(wait(expire(&geocoder, &pool)).unwrap(), 1);
    let next = wait(geocoder.try_acquire(&pool)).unwrap();
    assert!(next.is_admitted());
    assert_matches!(wait(permit.release()), Err(Error::PermitLost(_)));
    assert!(wait(other.try_acquire(&pool)).unwrap().is_full());
}

#[test]
fn a_limit_is_used_up() {
    let database = installed();
    let pool = pool(&database, 2);
    let api = RateLimit::named("api", Quota::per_day(24).burst(7));
    let used = api.key("used");
    for limit in [&used, &used] {
        wait(use_up(limit, &pool)).unwrap();
        assert!(wait(limit.check(&pool)).unwrap().is_limited());
    }
    assert!(wait(api.key("other").check(&pool)).unwrap().is_allowed());
}

#[test]
fn a_leader_is_deposed() {
    let database = installed();
    let pool = pool(&database, 2);
    let leader = Leader::named("dispatcher", HOUR);
    assert!(!wait(depose(&leader, &pool)).unwrap());
    let conn = &mut database.connect();
    run(
        conn,
        "SELECT resource_control.claim_service_request('leader dispatcher', 1, '1 h')",
    );
    assert!(wait(depose(&leader, &pool)).unwrap());
    assert_eq!(
        number(conn, "(SELECT count(*) FROM resource_control.leader)"),
        0
    );
}

#[test]
fn a_tick_is_made_due() {
    let database = installed();
    let pool = pool(&database, 2);
    let report = Schedule::named("report");
    assert!(!wait(make_tick_due(&report, &pool, HOUR)).unwrap());
    let look = || wait(report.run_due(&pool, hourly, work!(|_tick| Ok::<_, Error>(())))).unwrap();
    assert_matches!(look(), RunDue::Later(_));
    assert!(wait(make_tick_due(&report, &pool, HOUR)).unwrap());
    assert_eq!(look(), RunDue::Ran);
    assert_matches!(look(), RunDue::Later(_));
    // The tick that has run is the one from which the next tick is counted, and stays it.
    let of_row =
        "(SELECT tick = counted_from AND next_at = tick + '1 hour' FROM resource_control.schedule)";
    assert!(truth(&mut database.connect(), of_row));
    assert!(wait(make_tick_due(&report, &pool, HOUR)).unwrap());
    assert!(truth(&mut database.connect(), of_row));
}
