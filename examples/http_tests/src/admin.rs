//! What the page shows.

use std::thread;
use std::time::Duration;

use diesel_interlock::{AdvisoryLock, LockKey};
use workbench::Database;

use crate::instance::Start;
use crate::observer::{NIGHTLY, Observer, eventually};
use crate::requests::{reservation, service};

/// Names, not numbers.
pub fn the_page_tells_who_holds_and_who_waits_by_name(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_secs(600));
    let writer = Start::of(binary, &database.url())
        .named("the writer")
        .with_long_report()
        .start();
    let caller = Start::of(binary, &database.url())
        .named("the caller")
        .calling(&service)
        .start();
    let mut observer = Observer::of(&database);

    let empty = caller.get("/admin/locks");
    assert_eq!(empty.status, 200);
    assert!(empty.text.contains("Nobody holds a lock") && empty.text.contains("0 of 4 slots"));

    let _report = writer.send_and_leave("POST", "/reports/nightly");
    let _calls: Vec<_> = (0..3)
        .map(|_| caller.send_and_leave("GET", "/geocode?q=x"))
        .collect();
    assert_eq!(caller.post("/cache/rebuild").status, 202);
    let pool = database.pool(1);
    let server = AdvisoryLock::new(LockKey::parts(["server", "223", "345"]));
    let elsewhere = server.acquire(&pool).expect("nobody has it");
    thread::scope(|scope| {
        let booking = scope.spawn(|| writer.post_json("/reservations", reservation(1)));
        eventually("the report has begun", || {
            observer.count("report_runs") == 1
        });
        eventually("the reservation waits", || observer.waiting() == 1);
        eventually("three calls are in flight", || observer.in_flight() == 3);

        let page = caller.get("/admin/locks").text;
        elsewhere.release().expect("it was held");
        for shown in [
            "nightly report",
            "the writer",
            "server 223 345",
            "waits",
            "3 of 4 slots",
            "the caller",
            "cache rebuild",
            "free in",
        ] {
            assert!(page.contains(shown), "{shown} is not on the page:\n{page}");
        }
        let number = NIGHTLY.key().id().expect("it has a name").to_string();
        assert!(
            !page.contains(&number),
            "the number of a lock that has a name:\n{page}"
        );
        assert_eq!(booking.join().expect("it is answered").status, 201);
    });
    service.takes(Duration::ZERO);
}

/// What others call themselves is text.
pub fn the_page_is_escaped(binary: &str) {
    let database = Database::new();
    let nasty = "<script>alert('1')</script>&";
    let instance = Start::of(binary, &database.url())
        .named(nasty)
        .with_long_report()
        .start();
    let _report = instance.send_and_leave("POST", "/reports/nightly");
    assert_eq!(instance.post("/cache/rebuild").status, 202);
    eventually("the report has begun", || {
        Observer::of(&database).held(Some(&NIGHTLY)) == 1
    });
    let page = instance.get("/admin/locks").text;
    assert!(page.contains("alert("), "the name is shown:\n{page}");
    assert!(
        !page.contains("<script") && !page.contains("</script"),
        "{page}"
    );
}
