//! The page of the administrator.

use workbench::Database;

use crate::instance::Start;
use crate::observer::{NIGHTLY, Observer, eventually};
use crate::scene::Scene;

/// The page shows the names of locks and instances, and not their numbers.
pub fn the_page_tells_who_holds_and_who_waits_by_name(binary: &str) {
    let scene = Scene::start(binary);
    let empty = scene.caller.get("/admin/locks");
    assert_eq!(empty.status, 200);
    assert!(empty.text.contains("Nobody holds a lock") && empty.text.contains("0 of 4 slots"));

    let page = scene.while_everything_is_taken(3, |caller| caller.get("/admin/locks").text);
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
}

/// The name of another application is text.
pub fn the_page_is_escaped(binary: &str) {
    let database = Database::new();
    let nasty = "<script>alert('1')</script>&";
    let instance = Start::of(binary, &database.async_url())
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
