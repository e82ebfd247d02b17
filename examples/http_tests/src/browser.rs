//! What the page at the root does in a browser.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use workbench::Database;

use crate::instance::Start;
use crate::requests::service;

/// Everything is tried with clicks: `page.mjs`. `scripts/test_with browser` installs what it needs.
pub fn the_page_works_in_a_browser(binary: &str) {
    let database = Database::new();
    let service = service(Duration::from_secs(1));
    let instance = Start::of(binary, &database.async_url())
        .named("the instance")
        .calling(&service)
        .with("LOG", "off")
        .with("REPORT_PAUSE_SECS", "0.1")
        .with("RESERVATION_PAUSE_SECS", "0.1")
        .with("GEOCODE_TIMEOUT_SECS", "4")
        .start();
    instance.post_form(
        "/admin/limits",
        "action=set&client=key%3Asmall&n=2&period_secs=3600&burst=2",
    );

    let mut browser = Command::new("node")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/page.mjs"))
        .arg(instance.address())
        .args([required("BROWSER"), required("PLAYWRIGHT")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("node can be started");
    let mut input = browser.stdin.take().expect("it is a pipe");
    let mut lines = BufReader::new(browser.stdout.take().expect("it is a pipe")).lines();
    if let Some(Ok(line)) = lines.next() {
        if line == "end it" {
            instance.kill();
        }
        // Nobody reads it if the program has failed meanwhile.
        let _ = input.write_all(b"ended\n");
    }
    drop(input);
    let status = browser.wait().expect("it was started");
    assert!(status.success(), "page.mjs: {status}");
}

fn required(variable: &str) -> String {
    env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: run scripts/test_with browser"))
}
