//! The responses of an application in the normal case.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use fragile_geocoder::{FragileGeocoder, Stats};
use serde_json::{Value, json};
use workbench::Database;

use crate::instance::{Response, Start};
use crate::observer::{NIGHTLY, Observer, eventually};

/// A service that takes that long for a call.
pub(crate) fn service(takes: Duration) -> FragileGeocoder {
    FragileGeocoder::start("127.0.0.1:0", takes).expect("there is a free port")
}

/// A reservation of the article's server in the article's period.
pub(crate) fn reservation(user: usize) -> Value {
    json!({
        "datacenter_id": 223,
        "server_id": 345,
        "user_id": user,
        "start_date": "2021-01-01T14:45:00Z",
        "end_date": "2021-01-04T14:45:00Z",
    })
}

/// All at the same time.
pub(crate) fn at_once<T: Send>(count: usize, request: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let barrier = Barrier::new(count);
    thread::scope(|scope| {
        let request = &request;
        let barrier = &barrier;
        let threads: Vec<_> = (0..count)
            .map(|number| {
                scope.spawn(move || {
                    barrier.wait();
                    request(number)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no request panics"))
            .collect()
    })
}

fn count(responses: &[Response], status: u16) -> usize {
    responses
        .iter()
        .filter(|response| response.status == status)
        .count()
}

/// Ten requests for one server and one period, over two instances: one gets it, nine are told.
///
/// Nobody can insert before all ten are at it, so those who only check first would all find it free.
pub fn ten_overlapping_bookings_make_one_row(binary: &str) {
    let database = Database::new();
    let instances = [
        Start::of(binary, &database.async_url()).start(),
        Start::of(binary, &database.async_url()).start(),
    ];
    let mut observer = Observer::of(&database);
    let mut bad_luck = database.connect();
    bad_luck
        .batch_execute("BEGIN; LOCK TABLE reservations IN SHARE MODE")
        .expect("there is the table");
    let responses = thread::scope(|scope| {
        let responses = scope.spawn(|| {
            at_once(10, |number| {
                instances[number % 2].post_json("/reservations", reservation(number))
            })
        });
        eventually("all ten are at it", || observer.blocked() == 10);
        bad_luck.batch_execute("COMMIT").expect("it was begun");
        responses.join().expect("they get responses")
    });
    assert_eq!(
        (count(&responses, 201), count(&responses, 409)),
        (1, 9),
        "{responses:#?}"
    );
    assert_eq!(observer.count("reservations"), 1);

    // Another server, and another period, are free.
    let mut other = reservation(1);
    other["server_id"] = json!(346);
    assert_eq!(instances[0].post_json("/reservations", other).status, 201);
    let mut later = reservation(1);
    later["start_date"] = json!("2021-02-01T00:00:00Z");
    later["end_date"] = json!("2021-02-02T00:00:00Z");
    assert_eq!(instances[1].post_json("/reservations", later).status, 201);
}

/// 4xx with a message, never a panic.
pub fn bad_input_is_told_what_is_wrong(binary: &str) {
    let database = Database::new();
    let instance = Start::of(binary, &database.async_url()).start();
    let mut bodies = ["", "{", "null", "[]", "{}", "\u{0}", "\"x\""]
        .map(str::to_owned)
        .to_vec();
    let wrong = [
        ("user_id", json!("someone")),
        ("server_id", json!(1.5)),
        ("server_id", json!(3_000_000_000_u32)),
        ("server_id", json!(-1)),
        ("datacenter_id", Value::Null),
        ("start_date", json!("yesterday")),
        ("start_date", json!("-262143-01-01T00:00:00Z")),
        ("start_date", json!("2021-01-04T14:45:00Z")),
        ("end_date", json!("+262142-12-31T00:00:00Z")),
        ("end_date", json!("2020-01-01T00:00:00Z")),
        ("price", json!(1)),
    ];
    for (field, value) in wrong {
        let mut body = reservation(1);
        body[field] = value;
        bodies.push(body.to_string());
    }
    bodies.push("[".repeat(1_000_000));

    let mut responses: Vec<_> = bodies
        .iter()
        .map(|body| instance.post_json("/reservations", body))
        .collect();
    let long = "x".repeat(201);
    for target in [
        "/geocode",
        "/geocode?q=",
        "/geocode?q=%20",
        &format!("/geocode?q={long}"),
    ] {
        responses.push(instance.get(target));
    }
    for response in responses {
        assert!((400..500).contains(&response.status), "{response:?}");
        assert!(
            response.json()["error"]
                .as_str()
                .is_some_and(|error| error.len() > 5),
            "{response:?}"
        );
    }
    assert_eq!(Observer::of(&database).count("reservations"), 0);
    let service_is_asked = instance.get("/geocode?q=%00%F0%9F%97%BA%20O%27Connell%20%26%20Co");
    assert_eq!(service_is_asked.status, 200, "{service_is_asked:?}");
}

/// 409, with whatever the database and the holder's own row know of who it is.
pub fn a_second_report_is_told_who_writes_the_first(binary: &str) {
    let database = Database::new();
    let first = Start::of(binary, &database.async_url())
        .named("web-1")
        .with_long_report()
        .start();
    let second = Start::of(binary, &database.async_url())
        .named("web-2")
        .start();
    let mut observer = Observer::of(&database);

    let client = first.send_and_leave("POST", "/reports/nightly");
    eventually("the report has begun", || {
        observer.count("report_runs") == 1
    });
    assert_eq!(observer.held(Some(&NIGHTLY)), 1);

    let response = second.post("/reports/nightly");
    assert_eq!(response.status, 409, "{response:?}");
    let running = &response.json()["running"];
    assert_eq!(running["application_name"], "web-1");
    let holder = format!(
        "report_runs WHERE backend_pid = {} AND host = '{}' AND started_at = '{}' \
         AND started_at > clock_timestamp() - interval '10 min'",
        running["backend_pid"],
        running["host"].as_str().unwrap_or_default(),
        running["since"].as_str().unwrap_or_default(),
    );
    assert_eq!(observer.count(&holder), 1, "{response:?}");
    drop(client);

    eventually("the first has ended", || observer.held(Some(&NIGHTLY)) == 0);
    let response = second.post("/reports/nightly");
    assert_eq!(response.status, 201, "{response:?}");
    assert_eq!(
        observer.count("report_runs WHERE finished_at >= started_at"),
        1
    );
    assert_eq!(
        observer
            .count("report_nights JOIN report_runs ON id = run_id WHERE finished_at IS NOT NULL"),
        30
    );
    observer.nothing_is_held();
}

/// 429 with `Retry-After`, on whichever instance.
pub fn a_second_rebuild_is_told_when_to_come_back(binary: &str) {
    let database = Database::new();
    let first = Start::of(binary, &database.async_url()).start();
    let second = Start::of(binary, &database.async_url()).start();
    let mut observer = Observer::of(&database);
    let before = "occupancy WHERE reserved > 0";
    assert_eq!(observer.count(before), 0);
    let mut now = reservation(1);
    now["start_date"] = json!("2000-01-01T00:00:00Z");
    now["end_date"] = json!("2000-01-02T00:00:00Z");
    assert_eq!(first.post_json("/reservations", &now).status, 201);
    // As no client can: a reservation that lasts until today.
    let mut conn = database.connect();
    conn.batch_execute("UPDATE reservations SET end_date = 'infinity'")
        .expect("it is there");

    let response = first.post("/cache/rebuild");
    assert_eq!(response.status, 202, "{response:?}");
    for instance in [&first, &second] {
        let response = instance.post("/cache/rebuild");
        assert_eq!(response.status, 429, "{response:?}");
        assert!(
            (1..=15).contains(&response.retry_after_secs()),
            "{response:?}"
        );
    }
    eventually("the cache is rebuilt", || observer.count(before) == 1);
    observer.nothing_is_held();
}

/// Whatever the clients do, the service sees four at a time at most.
pub fn two_hundred_calls_over_two_instances_never_exceed_four(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_millis(20));
    let instances = [
        Start::of(binary, &database.async_url())
            .calling(&service)
            .start(),
        Start::of(binary, &database.async_url())
            .calling(&service)
            .start(),
    ];
    let responses = at_once(200, |number| {
        // Two hundred at once for one key may wait too long for each other.
        let client = format!("client-{number}");
        instances[number % 2].get_as(&client, &format!("/geocode?q=Main%20Street%20{number}"))
    });
    let (good, refused) = (count(&responses, 200), count(&responses, 503));
    assert_eq!(good + refused, 200, "{responses:#?}");
    for response in &responses {
        match response.status {
            200 => assert!(response.json()["place"]["lat"].is_number(), "{response:?}"),
            _ => assert!(
                (1..=600).contains(&response.retry_after_secs()),
                "{response:?}"
            ),
        }
    }
    let Stats {
        calls,
        most,
        violations,
        in_flight,
    } = service.stats();
    assert!(
        most <= 4 && violations == 0 && in_flight == 0,
        "{:?}",
        service.stats()
    );
    assert_eq!(calls as usize, good);
    assert!(good >= 4, "four at least find a slot: {good}");
    let mut observer = Observer::of(&database);
    observer.nothing_is_held();
    assert_eq!(observer.not_completed(), 0);
}
