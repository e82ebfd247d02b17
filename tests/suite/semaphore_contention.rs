//! Several processes with several threads each claim the slots of a semaphore. Its log then shows
//! that no promise was broken.

use std::collections::HashMap;
use std::env;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Double};

use crate::half::*;
use crate::support::{installed, number, run};

const URL: &str = "INTERLOCK_TEST_CONTENTION";
const LASTS: Duration = Duration::from_secs(2);
/// The least number of claims of each process.
const ENOUGH: usize = 8;

/// A request, and the times at which it began and ended to hold its slot.
#[derive(QueryableByName, Debug)]
struct Row {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Double)]
    began: f64,
    #[diesel(sql_type = Double)]
    ended: f64,
    #[diesel(sql_type = Bool)]
    is_after_the_last_in_its_slot: bool,
}

const ROWS: &str = "SELECT id, date_part('epoch', created_at) AS began, date_part('epoch', ended_at) AS ended,
        COALESCE(id > lag(id) OVER slot AND created_at >= lag(ended_at) OVER slot, true) AS is_after_the_last_in_its_slot
    FROM (SELECT *, LEAST(completed_at, timed_out_at, expires_at) AS ended_at FROM resource_control.service_request) AS r
    WINDOW slot AS (PARTITION BY slot ORDER BY created_at) ORDER BY began";

fn unix() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap().as_secs_f64()
}

/// Three threads claim, renew and end permits of a semaphore with `slots(elapsed)` slots. Returns
/// for each claim the token, the slots of the handle, and the times at which the claim was sent and
/// had returned.
fn hammer(url: &str, slots: impl Fn(Duration) -> u32 + Sync) -> Vec<(i64, u32, f64, f64)> {
    let (pool, claims) = (make_pool(url, 3, LASTS * 10), Mutex::new(Vec::new()));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // On a slow machine for longer, until there were enough claims.
                let is_over = |claims: usize| began.elapsed() >= LASTS && claims >= ENOUGH;
                while !is_over(claims.lock().unwrap().len()) {
                    assert!(began.elapsed() < 60 * LASTS, "the claims hang");
                    let slots = slots(began.elapsed());
                    let semaphore = Semaphore::named("hammered", slots, LASTS / 16);
                    let sent = unix();
                    let Some(permit) = wait(semaphore.try_acquire(&pool)).unwrap().admitted()
                    else {
                        continue;
                    };
                    let claim = (permit.fencing_token(), slots, sent, unix());
                    claims.lock().unwrap().push(claim);
                    if fastrand::u8(0..3) == 0 {
                        assert_in_time_or_lost(wait(permit.renew()));
                    }
                    match fastrand::u8(0..10) {
                        0 => drop(permit.detach()), // as after a crash
                        1..4 => drop(permit),
                        _ => assert_in_time_or_lost(wait(permit.release())),
                    }
                }
            });
        }
    });
    claims.into_inner().unwrap()
}

/// On a slow machine a permit may expire before its holder ends it.
fn assert_in_time_or_lost(ended: Result<()>) {
    if let Err(error) = ended {
        assert!(matches!(error, Error::PermitLost(_)), "{error}");
    }
}

/// Runs the same test in a child process, where it only claims slots, and prints its claims.
fn process(test: &str, url: &str) -> Child {
    let name = format!("suite::semaphore_contention::{test}");
    Command::new(env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture"])
        .env(URL, url)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn print(claims: Vec<(i64, u32, f64, f64)>) {
    for (token, slots, sent, returned) in claims {
        println!("\nclaim {token} {slots} {sent} {returned}");
    }
}

fn printed(process: Child) -> Vec<(i64, u32, f64, f64)> {
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let claims = text.lines().filter_map(|line| line.strip_prefix("claim "));
    claims
        .map(|claim| {
            let fields: Vec<_> = claim.split(' ').collect();
            let time = |field: usize| fields[field].parse().unwrap();
            (
                fields[0].parse().unwrap(),
                fields[1].parse().unwrap(),
                time(2),
                time(3),
            )
        })
        .collect()
}

/// Claims slots in three processes, and checks the log.
fn contend(test: &str, slots: impl Fn(Duration) -> u32 + Sync, isolation: &str) {
    if let Ok(url) = env::var(URL) {
        return print(hammer(&url, slots));
    }
    let database = installed();
    let admin = &mut database.connect();
    let alter = format!(
        "ALTER DATABASE {} SET default_transaction_isolation = '{isolation}'",
        database.name()
    );
    run(admin, &alter);
    let others = [(); 2].map(|()| process(test, &database.url()));
    let mut claims: HashMap<_, _> = HashMap::new();
    let mut add = |all: Vec<(i64, u32, f64, f64)>| {
        claims.extend(
            all.into_iter()
                .map(|(token, slots, sent, returned)| (token, (slots, sent, returned))),
        );
    };
    add(hammer(&database.url(), slots));
    others.into_iter().for_each(|other| add(printed(other)));

    let rows: Vec<Row> = diesel::sql_query(ROWS).load(admin).unwrap();
    assert_eq!(
        rows.len(),
        claims.len(),
        "each claim in the log was returned to its caller"
    );
    assert!(rows.len() > 20, "only {} claims", rows.len());
    let largest = claims.values().map(|claim| claim.0).max().unwrap() as usize;
    for (index, row) in rows.iter().enumerate() {
        assert!(row.is_after_the_last_in_its_slot, "{row:?}");
        // No request overlaps with one that began a thousand requests earlier.
        let earlier = rows[index.saturating_sub(1000)..index].iter();
        let live: Vec<_> = earlier.filter(|other| other.ended > row.began).collect();
        assert!(live.len() < largest, "{live:?} beside {row:?}");
        let (slots, sent, _) = claims[&row.id];
        let known = live
            .iter()
            .filter(|other| claims[&other.id].2 < sent)
            .count();
        assert!(
            known < slots as usize,
            "{known} before one of {slots}: {row:?}"
        );
    }
    let services = "(SELECT count(DISTINCT service) FROM resource_control.service_request)";
    assert_eq!(number(admin, services), 1);
}

#[test]
fn never_more_requests_are_in_flight_than_slots() {
    contend(
        "never_more_requests_are_in_flight_than_slots",
        |_| 4,
        "read committed",
    );
}

#[test]
fn the_tokens_of_one_slot_grow_from_holder_to_holder() {
    contend(
        "the_tokens_of_one_slot_grow_from_holder_to_holder",
        |_| 1,
        "repeatable read",
    );
}

#[test]
fn while_instances_disagree_the_larger_number_of_slots_holds() {
    let random = |_| fastrand::u32(2..=6);
    contend(
        "while_instances_disagree_the_larger_number_of_slots_holds",
        random,
        "read committed",
    );
}

#[test]
fn a_lowered_number_of_slots_holds_for_new_claims() {
    let falls = |after: Duration| 6 - (after.as_millis() / 150 % 5) as u32;
    contend(
        "a_lowered_number_of_slots_holds_for_new_claims",
        falls,
        "serializable",
    );
}
