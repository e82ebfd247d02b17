//! The rate limit of each client, and the page on which operators change it.

use std::time::Duration;

use workbench::{Cluster, Database, StopMode};

use crate::instance::{Response, Start};
use crate::observer::{Observer, eventually};
use crate::requests::{reservation, service};

/// What `RateLimit` tells of the limit `api`: how many requests are left, and the seconds.
#[track_caller]
fn told(response: &Response) -> (u64, u64) {
    let told = || {
        let items = response.limit.as_deref()?.split(", ");
        let mut ours = items.filter_map(|item| item.strip_prefix(r#""api";r="#));
        let (left, seconds) = ours.next()?.split_once(";t=")?;
        Some((left.parse().ok()?, seconds.parse().ok()?))
    };
    told().unwrap_or_else(|| panic!("no limit: {response:?}"))
}

/// 429 with all fields, over all instances and on each limited route, and on no other one.
pub fn a_client_is_limited_after_its_burst_and_another_is_not(binary: &str) {
    let database = Database::new();
    let service = service(Duration::ZERO);
    let start = || Start::of(binary, &database.async_url()).calling(&service);
    let instances = [start().start(), start().start()];
    let mut observer = Observer::of(&database);
    observer.limit_each_client(3);
    let policy = Some(r#""api";q=3;w=86400"#);

    for left in [2, 1, 0] {
        let response = instances[left % 2].get_as("a", "/geocode?q=x");
        assert_eq!(response.status, 200, "{response:?}");
        assert_eq!(response.policy.as_deref(), policy, "{response:?}");
        assert_eq!(told(&response).0, left as u64, "{response:?}");
        assert_eq!(response.retry_after, None, "{response:?}");
    }
    for instance in &instances {
        for refused in [
            instance.get_as("a", "/geocode?q=x"),
            instance.post_json_as("a", "/reservations", reservation(1)),
        ] {
            assert_eq!(refused.status, 429, "{refused:?}");
            assert_eq!(refused.policy.as_deref(), policy, "{refused:?}");
            let (left, seconds) = told(&refused);
            assert_eq!(left, 0, "{refused:?}");
            assert!((1..=86_400 / 3).contains(&seconds), "{refused:?}");
            assert_eq!(refused.retry_after_secs(), seconds, "{refused:?}");
            assert!(refused.json()["error"].is_string(), "{refused:?}");
        }
        for target in ["/", "/status", "/limit", "/admin/locks", "/admin/limits"] {
            let response = instance.get_as("a", target);
            assert_eq!(response.status, 200, "{target}: {response:?}");
            assert_eq!(response.limit, None, "{target}: {response:?}");
        }
    }
    assert_eq!(observer.count("reservations"), 0);
    assert_eq!(service.stats().calls, 3);

    // Also a request that is wrong in another way costs a unit, and is told what is left.
    let wrong = instances[0].get_as("b", "/geocode?q=");
    assert_eq!((wrong.status, told(&wrong).0), (422, 2), "{wrong:?}");
    let booked = instances[1].post_json_as("b", "/reservations", reservation(1));
    assert_eq!((booked.status, told(&booked).0), (201, 1), "{booked:?}");
}

/// And a key that cannot be one is refused.
pub fn a_client_without_a_key_is_known_by_its_address(binary: &str) {
    let database = Database::new();
    let instance = Start::of(binary, &database.async_url()).start();
    let mut observer = Observer::of(&database);
    for wrong in ["", "a b", &"k".repeat(201)] {
        let response = instance.get_as(wrong, "/geocode?q=x");
        assert_eq!(response.status, 422, "{wrong}: {response:?}");
        let error = response.json()["error"].to_string();
        assert!(error.contains("x-api-key"), "{response:?}");
    }
    assert_eq!(observer.count("resource_control.rate_limit"), 0);

    assert_eq!(instance.get("/geocode?q=x").status, 200);
    let same = instance.get_as("address:127.0.0.1", "/geocode?q=x");
    assert_eq!(same.status, 200, "{same:?}");
    for client in ["address:127.0.0.1", "key:address:127.0.0.1"] {
        let rows = format!("resource_control.rate_limit WHERE name = 'api' AND key = '{client}'");
        assert_eq!(observer.count(&rows), 1, "{client}");
    }
}

/// Wrong ones are told at the start.
pub fn the_quota_and_the_choice_for_an_outage_are_settings(binary: &str) {
    let database = Database::new();
    let start = || Start::of(binary, &database.async_url());
    for (setting, policy) in [
        (None, r#""api";q=6000;w=60"#),
        (Some("7"), r#""api";q=7;w=60"#),
    ] {
        let start = match setting {
            Some(value) => start().with("API_LIMIT_PER_MINUTE", value),
            None => start(),
        };
        let response = start.start().get_as("a", "/geocode?q=");
        assert_eq!(response.policy.as_deref(), Some(policy), "{response:?}");
    }
    for (setting, value) in [
        ("API_LIMIT_PER_MINUTE", "0"),
        ("API_LIMIT_PER_MINUTE", "many"),
        ("RATE_LIMIT_WHEN_AWAY", "maybe"),
    ] {
        let error = start().with(setting, value).error();
        let told = format!("{setting}={value}");
        assert!(error.contains(&told), "{error}");
    }
}

/// As the setting says, and as before once the database is back. A request that needs no database shows which.
pub fn a_limited_request_passes_or_is_refused_while_the_database_is_away(binary: &str) {
    let cluster = Cluster::start();
    let start = |when_away: &str| {
        Start::of(binary, &cluster.url("postgres"))
            .with("LOG", "off")
            .with("RATE_LIMIT_WHEN_AWAY", when_away)
            .start()
    };
    let [passes, refuses] = [start("pass"), start("refuse")];
    let by_default = Start::of(binary, &cluster.url("postgres"))
        .with("LOG", "off")
        .start();
    cluster.stop(StopMode::Immediate);
    for instance in [&passes, &by_default] {
        let response = instance.get("/geocode?q=");
        assert_eq!(response.status, 422, "the handler refused it: {response:?}");
        assert_eq!((&response.policy, &response.limit), (&None, &None));
    }
    let refused = refuses.get("/geocode?q=");
    assert_eq!(refused.status, 503, "{refused:?}");
    assert_eq!(refused.retry_after_secs(), 1);
    assert_eq!((&refused.policy, &refused.limit), (&None, &None));
    let error = refused.json()["error"].to_string();
    assert!(error.contains("rate limit"), "{refused:?}");
    assert_eq!(refuses.get("/").status, 200, "the page is not limited");

    cluster.start_again();
    for instance in [&passes, &refuses] {
        eventually("the limit is checked again", || {
            let response = instance.get("/geocode?q=");
            response.status == 422 && response.limit.is_some()
        });
    }
}

/// 503 with the fields of both.
pub fn a_full_semaphore_is_told_beside_the_rate_limit(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_secs(600));
    let instance = Start::of(binary, &database.async_url())
        .calling(&service)
        .start();
    let _calls: Vec<_> = (0..4)
        .map(|_| instance.send_and_leave("GET", "/geocode?q=x"))
        .collect();
    eventually("four calls are made", || service.stats().in_flight == 4);

    let response = instance.get_as("a", "/geocode?q=x");
    assert_eq!(response.status, 503, "{response:?}");
    let seconds = response.retry_after_secs();
    assert!((1..=600).contains(&seconds), "{response:?}");
    let policy = r#""geocoder";q=4;qu="concurrent-requests", "api";q=6000;w=60"#;
    assert_eq!(response.policy.as_deref(), Some(policy), "{response:?}");
    let (left, full_in) = told(&response);
    let limit = format!(r#""geocoder";r=0;t={seconds}, "api";r={left};t={full_in}"#);
    assert_eq!(response.limit, Some(limit));
    assert_eq!(left, 5999);
}

/// For the page at the root.
pub fn what_is_left_for_a_client_is_told_and_nothing_is_spent(binary: &str) {
    let database = Database::new();
    let instance = Start::of(binary, &database.async_url()).start();
    Observer::of(&database).limit_each_client(3);
    let _ = instance.get_as("a", "/geocode?q=");
    for _ in 0..2 {
        let left = instance.get_as("a", "/limit").json();
        assert_eq!(left["client"], "key:a");
        assert_eq!((&left["remaining"], &left["burst"]), (&2.into(), &3.into()));
        assert_eq!(
            (&left["n"], &left["period_secs"]),
            (&3.into(), &86_400.0.into())
        );
        let full_in = left["full_in_secs"].as_f64();
        assert!(
            full_in.is_some_and(|it| 0.0 < it && it <= 28_800.0),
            "{left}"
        );
    }
    let others = instance.get("/limit").json();
    assert_eq!(others["client"], "address:127.0.0.1");
    assert_eq!(
        (&others["remaining"], &others["full_in_secs"]),
        (&3.into(), &0.0.into())
    );
    assert_eq!(instance.get_as("a b", "/limit").status, 422);
}

/// The next request of the client heeds it, on every instance.
pub fn the_page_shows_who_is_near_to_the_limit_and_sets_quotas(binary: &str) {
    let database = Database::new();
    let start = || Start::of(binary, &database.async_url());
    let (instance, other) = (start().named("web-<1>").start(), start().start());
    let empty = instance.get("/admin/limits");
    assert_eq!(empty.status, 200, "{empty:?}");
    assert_eq!(empty.content_type, "text/html; charset=utf-8");
    for shown in [
        "Every client has its whole quota",
        "6000 per 60 s, 6000 at once",
        "web-&#60;1&#62;",
    ] {
        assert!(empty.text.contains(shown), "{shown}:\n{}", empty.text);
    }
    let change = |form: &str| {
        let page = instance.post_form("/admin/limits", form);
        assert_eq!(page.status, 200, "{form}: {page:?}");
        page.text
    };

    // Of a client with a small quota, of all, and of another client that spends more units, but less of its quota.
    change("action=set&client=key:small&n=2&period_secs=86400&burst=");
    change("action=set&client=&n=100&period_secs=86400&burst=50");
    for (client, requests) in [("large", 10), ("<small>", 1), ("small", 2)] {
        for _ in 0..requests {
            assert_eq!(other.get_as(client, "/geocode?q=").status, 422);
        }
    }
    assert_eq!(other.get_as("small", "/geocode?q=").status, 429);
    let page = instance.get("/admin/limits").text;
    let mut rest = &*page;
    for shown in [
        "<th>key:small<br>",
        "2 per 24 h, 2 at once",
        "limited",
        "0 of 2 left",
        "<th>key:large<br>",
        "100 per 24 h, 50 at once",
        "40 of 50 left",
        "<th>key:&#60;small&#62;<br>",
        "49 of 50 left",
        "<th>all clients</th>",
        "<td>100 per 24 h, 50 at once</td>",
        "<th>key:small</th>",
        "<td>2 per 24 h, 2 at once</td>",
    ] {
        let Some((_, after)) = rest.split_once(shown) else {
            panic!("{shown} is not in its place:\n{page}");
        };
        rest = after;
    }

    // A quota that is set twice is changed, and one that is deleted is that of all clients again.
    let page = change("action=set&client=key:small&n=2&period_secs=86400&burst=5");
    assert!(page.contains("2 per 24 h, 5 at once"), "{page}");
    assert_eq!(other.get_as("small", "/geocode?q=").status, 422);
    change("action=delete&client=key:small");
    let left = other.get_as("small", "/limit").json();
    assert_eq!(
        (&left["burst"], &left["remaining"]),
        (&50.into(), &47.into())
    );
    let page = change("action=delete&client=");
    assert!(!page.contains("all clients</th>"), "{page}");
    assert_eq!(other.get_as("new", "/limit").json()["burst"], 6000);
    let mut observer = Observer::of(&database);
    assert_eq!(observer.count("resource_control.rate_limit_override"), 0);
}

/// With what is wrong with it, and before anything is changed.
pub fn a_quota_that_makes_no_sense_is_refused(binary: &str) {
    let database = Database::new();
    let instance = Start::of(binary, &database.async_url()).start();
    for (form, wrong) in [
        (
            "action=set&client=key:a&n=0&period_secs=60&burst=",
            "n must be",
        ),
        (
            "action=set&client=key:a&n=9&period_secs=&burst=",
            "period_secs must be",
        ),
        (
            "action=set&client=key:a&n=9&period_secs=60&burst=x",
            "burst must be",
        ),
        (
            "action=set&client=key:a&n=1&period_secs=31622400&burst=101",
            "refilled",
        ),
        (
            "action=set&client=somebody&n=9&period_secs=60&burst=",
            "client must",
        ),
        (
            "action=set&client=key:a%00&n=9&period_secs=60",
            "client must",
        ),
        ("action=drop&client=key:a", "action must"),
        ("client=key:a&n=9&period_secs=60", "action"),
        ("action=set&table=pg_class", "table"),
        ("", "action"),
    ] {
        let response = instance.post_form("/admin/limits", form);
        assert!(
            (400..500).contains(&response.status),
            "{form}: {response:?}"
        );
        let error = response.json()["error"].to_string();
        assert!(error.contains(wrong), "{form}: {response:?}");
    }
    let json = instance.post_json("/admin/limits", "{}");
    assert!((400..500).contains(&json.status), "{json:?}");
    let mut observer = Observer::of(&database);
    assert_eq!(observer.count("resource_control.rate_limit_override"), 0);
}
