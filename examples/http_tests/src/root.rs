//! What the page at the root shows and can ask for.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use workbench::{Cluster, Database, StopMode};

use crate::instance::{Response, Start};
use crate::observer::{NIGHTLY, Observer, eventually};
use crate::requests::{reservation, service};
use crate::scene::Scene;

/// As a program prints them, an address for a browser each.
pub fn the_addresses_that_are_printed_lead_to_pages(binary: &str) {
    let database = Database::new();
    let instance = Start::of(binary, &database.async_url()).start();
    let pages = instance.printed_addresses();
    assert_eq!(pages.len(), 2, "{pages:?}");
    for (page, shown) in pages.iter().zip(["Book a server", "Who holds, who waits"]) {
        let response = instance.get(page);
        assert_eq!(response.status, 200, "{page}: {response:?}");
        assert_eq!(response.content_type, "text/html; charset=utf-8", "{page}");
        assert!(response.text.contains(shown), "{page}: {response:?}");
    }
}

/// Everything is asked for, by what is in the page alone, and fits a telephone.
pub fn the_root_is_a_page_that_asks_for_everything_and_needs_nothing_else(binary: &str) {
    let database = Database::new();
    let instance = Start::of(binary, &database.async_url()).start();
    let page = instance.get("/").text;
    for route in [
        "/reservations",
        "/reports/nightly",
        "/cache/rebuild",
        "/geocode?q=",
        "/status",
        "/burst",
        "/admin/locks",
        "/limit",
        "/admin/limits",
    ] {
        assert!(page.contains(&format!("\"{route}")), "{route}:\n{page}");
    }
    for needed in [
        "<html lang=\"en\">",
        "name=\"viewport\" content=\"width=device-width",
        "prefers-color-scheme: dark",
    ] {
        assert!(page.contains(needed), "{needed}:\n{page}");
    }
    for from_elsewhere in ["http:", "https:", "src=", "@import", "url(", "innerHTML"] {
        assert!(!page.contains(from_elsewhere), "{from_elsewhere}:\n{page}");
    }
}

/// Not a blank page.
pub fn an_address_that_leads_nowhere_names_the_one_that_does_not(binary: &str) {
    let database = Database::new();
    let instance = Start::of(binary, &database.async_url()).start();
    let response = instance.get("/locks");
    assert_eq!(response.status, 404, "{response:?}");
    let error = response.json()["error"].as_str().map(str::to_owned);
    assert!(
        error.is_some_and(|error| error.contains(" /")),
        "{response:?}"
    );
}

/// In one reading: locks with their holders and waiters, slots with their expiry, throttles with their
/// next time.
pub fn the_status_tells_who_holds_who_waits_and_when_what_is_free(binary: &str) {
    let scene = Scene::start(binary);
    let empty = scene.caller.get("/status").json();
    assert_eq!(empty["instance"], "the caller");
    assert_eq!(empty["locks"], json!([]));
    assert_eq!(
        empty["services"],
        json!([{ "name": "geocoder", "slots": [null, null, null, null], "in_flight": 0 }])
    );
    assert_eq!(
        empty["throttles"],
        json!([{ "name": "cache rebuild", "every_secs": 15.0, "taken_by": "", "free_in_secs": 0.0 }])
    );
    assert_eq!(empty["timed_out"], json!([]));

    let status = scene.while_everything_is_taken(1, |caller| caller.get("/status").json());
    let locks = &status["locks"];
    assert_eq!(locks[0]["name"], "nightly report", "{status:#}");
    assert_eq!(locks[0]["holders"][0]["who"], "the writer", "{status:#}");
    assert!(locks[0]["holders"][0]["session"].is_i64(), "{status:#}");
    assert!(seconds(&locks[0]["holders"][0]["for_secs"]) < 600.0);
    assert_eq!(locks[1]["name"], "server 223 345", "{status:#}");
    assert_eq!(locks[1]["holders"].as_array().map(Vec::len), Some(1));
    assert_eq!(locks[1]["waiters"][0]["who"], "the writer", "{status:#}");
    let geocoder = &status["services"][0];
    assert_eq!(geocoder["in_flight"], 1, "{status:#}");
    let call = geocoder["slots"]
        .as_array()
        .and_then(|slots| slots.iter().find(|slot| !slot.is_null()))
        .unwrap_or_else(|| panic!("a slot is taken: {status:#}"));
    assert_eq!(call["who"], "the caller");
    let expires_in = seconds(&call["expires_in_secs"]);
    assert!(0.0 < expires_in && expires_in <= 600.0, "{status:#}");
    let throttle = &status["throttles"][0];
    assert_eq!(throttle["taken_by"], "the caller", "{status:#}");
    assert!(seconds(&throttle["free_in_secs"]) <= 15.0, "{status:#}");
}

/// A call to the service that takes too long is given up with its permit, and its slot left to time out.
pub fn a_call_that_takes_too_long_is_seen_to_time_out(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_secs(60));
    let instance = Start::of(binary, &database.async_url())
        .named("the caller")
        .calling(&service)
        .with("GEOCODE_TIMEOUT_SECS", "1")
        .start();
    let response = instance.get("/geocode?q=slow");
    assert_eq!(response.status, 504, "{response:?}");
    eventually("it is shown", || {
        let timed_out = &instance.get("/status").json()["timed_out"];
        timed_out[0]["service"] == "geocoder"
            && timed_out[0]["who"] == "the caller"
            && timed_out[0]["secs_ago"].is_number()
    });
    let mut observer = Observer::of(&database);
    assert_eq!(
        observer.count("resource_control.service_request WHERE completed_at IS NOT NULL"),
        0,
        "it was not released, as the service is still at it"
    );
    observer.nothing_is_held();
}

/// 503 while it is away, and what there is as soon as it is back.
pub fn the_status_tells_that_the_database_is_away_and_finds_it_again(binary: &str) {
    let cluster = Cluster::start();
    let instance = Start::of(binary, &cluster.url("postgres"))
        .with("LOG", "off")
        .start();
    assert_eq!(instance.get("/status").status, 200);
    cluster.stop(StopMode::Immediate);
    let away = instance.get("/status");
    assert_eq!(away.status, 503, "{away:?}");
    assert_eq!(away.retry_after_secs(), 1);
    assert!(away.json()["error"].is_string(), "{away:?}");
    assert_eq!(instance.get("/").status, 200, "the page needs no database");
    cluster.start_again();
    eventually("it is read again", || instance.get("/status").status == 200);
    assert_eq!(
        Observer::of_url(&cluster.url("postgres")).held(Some(&NIGHTLY)),
        0
    );
}

/// More at once than a browser sends, each with its status, `Retry-After`, time and body.
pub fn a_burst_is_sent_at_once_and_each_of_its_responses_is_told(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_secs(600));
    let instance = Start::of(binary, &database.async_url())
        .calling(&service)
        .start();
    let burst = |times: usize, request: Value| {
        instance.post_json("/burst", json!({ "times": times, "request": request }))
    };
    let statuses = |response: Response| {
        assert_eq!(response.status, 200, "{response:?}");
        let responses = response.json();
        let responses = responses.as_array().expect("it is a list").clone();
        for response in &responses {
            assert!(response["body"].is_object(), "{response}");
            assert!(response["seconds"].is_number(), "{response}");
            let status = response["status"].as_u64();
            let told_when = response["retry_after"].is_string();
            assert_eq!(told_when, matches!(status, Some(429 | 503)), "{response}");
        }
        let mut statuses: Vec<_> = responses
            .iter()
            .filter_map(|response| response["status"].as_u64())
            .collect();
        statuses.sort_unstable();
        statuses
    };

    let booked = statuses(burst(10, json!({ "reservation": reservation(1) })));
    assert_eq!(booked, [[201].as_slice(), &[409; 9]].concat());
    assert_eq!(Observer::of(&database).count("reservations"), 1);
    let rebuilt = statuses(burst(5, json!("rebuild")));
    assert_eq!(rebuilt, [202, 429, 429, 429, 429]);
    let geocoded = thread::scope(|scope| {
        let geocoded = scope.spawn(|| burst(12, json!({ "geocode": "Main & Street" })));
        eventually("four are in flight", || service.stats().in_flight == 4);
        service.takes(Duration::ZERO);
        geocoded.join().expect("it gets a response")
    });
    let geocoded = statuses(geocoded);
    assert!(
        geocoded.len() == 12 && geocoded[..4] == [200; 4],
        "{geocoded:?}"
    );
    assert_eq!(service.stats().violations, 0);
    assert_eq!(statuses(burst(1, json!("report"))), [201]);

    for wrong in [
        burst(0, json!("report")),
        burst(21, json!("report")),
        burst(1, json!("shutdown")),
        instance.post_json("/burst", json!({ "times": 1, "url": "http://elsewhere/" })),
    ] {
        assert!((400..500).contains(&wrong.status), "{wrong:?}");
        assert!(wrong.json()["error"].is_string(), "{wrong:?}");
    }
}

#[track_caller]
fn seconds(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}
