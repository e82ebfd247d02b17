//! What is left when something ends badly: nothing.

use std::time::Duration;

use workbench::{Cluster, Database, StopMode};

use crate::instance::Start;
use crate::observer::{Observer, eventually};
use crate::requests::{at_once, reservation, service};

/// `kill -9`: the server frees the locks of a session, and the timeout frees the slot of a call.
pub fn a_killed_instance_frees_its_lock_at_once_and_its_slots_by_their_time_out(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_secs(600));
    let start = || Start::of(binary, &database.async_url()).calling(&service);
    let killed = start().with_long_report().start();
    let other = start().start();
    let mut observer = Observer::of(&database);

    let _report = killed.send_and_leave("POST", "/reports/nightly");
    let _calls: Vec<_> = (0..4)
        .map(|_| killed.send_and_leave("GET", "/geocode?q=x"))
        .collect();
    eventually("the report has begun", || {
        observer.count("report_runs") == 1
    });
    eventually("four calls are made", || service.stats().in_flight == 4);
    assert_eq!(other.post("/reports/nightly").status, 409);
    killed.kill();
    service.takes(Duration::ZERO);

    let response = other.get("/geocode?q=x");
    assert_eq!(response.status, 503, "{response:?}");
    assert!(
        (1..=600).contains(&response.retry_after_secs()),
        "{response:?}"
    );
    eventually("the report can be written", || {
        other.post("/reports/nightly").status == 201
    });
    assert_eq!(observer.in_flight(), 4);
    observer.let_time_pass();
    assert_eq!(other.get("/geocode?q=x").status, 200);
    assert_eq!(service.stats().violations, 0);
    observer.nothing_is_held();
}

/// Of a pool of two connections, all are there after ten panics with a lock, a slot and a transaction.
pub fn a_panic_leaves_the_pool_whole(binary: &str) {
    let database = Database::new();
    let service = service(Duration::ZERO);
    let instance = Start::of(binary, &database.async_url())
        .calling(&service)
        .with("CHAOS", "true")
        .with("POOL_SIZE", "2")
        .with("LOG", "off")
        .start();
    for _ in 0..10 {
        let response = instance.post("/chaos/panic");
        assert_eq!(response.status, 500, "{response:?}");
        assert!(
            !response.text.contains("asked for"),
            "the client must not see an internal error: {response:?}"
        );
    }
    let mut observer = Observer::of(&database);
    observer.nothing_is_held();
    let responses = at_once(10, |number| {
        instance.post_json("/reservations", reservation(number))
    });
    assert!(
        responses
            .iter()
            .all(|response| matches!(response.status, 201 | 409)),
        "{responses:#?}"
    );
    assert_eq!(instance.post("/reports/nightly").status, 201);
    assert_eq!(instance.get("/geocode?q=x").status, 200);
    observer.nothing_is_held();
}

/// The report is given up; the call to the service is not, since the service does not notice.
pub fn a_client_that_hangs_up_leaves_nothing_held(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_secs(600));
    let instance = Start::of(binary, &database.async_url())
        .calling(&service)
        .with_long_report()
        .start();
    let mut observer = Observer::of(&database);
    let report = instance.send_and_leave("POST", "/reports/nightly");
    let call = instance.send_and_leave("GET", "/geocode?q=x");
    eventually("the report has begun", || {
        observer.count("report_runs") == 1
    });
    eventually("the call is made", || service.stats().in_flight == 1);

    drop((report, call));
    eventually("the lock is free", || observer.held(None) == 0);
    assert_eq!(
        observer.count("report_runs WHERE finished_at IS NULL"),
        1,
        "it was given up"
    );
    assert!(
        observer.count("report_nights") < 30,
        "it was given up before its end"
    );
    assert_eq!(
        observer.in_flight(),
        1,
        "the service is still at it, so the slot is taken"
    );
    service.takes(Duration::ZERO);
    eventually("the slot is free", || observer.in_flight() == 0);
    assert_eq!(
        observer.not_completed(),
        0,
        "it was released, and did not time out"
    );
    observer.nothing_is_held();
}

/// As of a client that hangs up.
pub fn a_request_that_times_out_leaves_nothing_held(binary: &str) {
    let database = Database::new();
    let instance = Start::of(binary, &database.async_url())
        .with("REQUEST_TIMEOUT_SECS", "0.5")
        .with_long_report()
        .start();
    assert_eq!(instance.post("/reports/nightly").status, 504);
    let mut observer = Observer::of(&database);
    observer.nothing_is_held();
    assert_eq!(
        observer.count("report_runs WHERE finished_at IS NULL"),
        1,
        "it was given up"
    );
    assert!(
        observer.count("report_nights") < 30,
        "it was given up before its end"
    );
}

/// SIGTERM: what can be given up is, what cannot is waited for, and nothing is left.
pub fn an_instance_that_is_told_to_end_leaves_nothing_held(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_secs(600));
    let instance = Start::of(binary, &database.async_url())
        .calling(&service)
        .with_long_report()
        .start();
    let mut observer = Observer::of(&database);
    let responses = std::thread::scope(|scope| {
        let report = scope.spawn(|| instance.post("/reports/nightly"));
        let call = scope.spawn(|| instance.get("/geocode?q=x"));
        eventually("the report has begun", || {
            observer.count("report_runs") == 1
        });
        eventually("the call is made", || service.stats().in_flight == 1);
        instance.terminate();
        eventually("the lock is free", || observer.held(None) == 0);
        service.takes(Duration::ZERO);
        [report, call].map(|request| request.join().expect("it gets a response"))
    });
    assert_eq!(responses[0].status, 503, "{responses:?}");
    assert_eq!(responses[1].status, 200, "{responses:?}");
    let status = instance.ended();
    assert!(status.success(), "{status}");
    observer.nothing_is_held();
    assert_eq!(
        observer.not_completed(),
        0,
        "the call was released, and did not time out"
    );
    eventually("its sessions have ended", || observer.sessions() == 0);
}

/// A database that crashes takes the requests of that moment with it, and no more.
pub fn a_restarted_server_is_found_again(binary: &str) {
    let cluster = Cluster::start();
    let instance = Start::of(binary, &cluster.url("postgres"))
        .with("LOG", "off")
        .with_long_report()
        .start();
    let _report = instance.send_and_leave("POST", "/reports/nightly");
    let mut before = Observer::of_url(&cluster.url("postgres"));
    eventually("the report has begun", || before.held(None) == 1);
    cluster.restart(StopMode::Immediate);
    eventually("requests succeed again", || {
        instance.post_json("/reservations", reservation(1)).status == 201
    });
    let page = instance.get("/admin/locks");
    assert!(page.text.contains("Nobody holds a lock"), "{page:?}");
}
