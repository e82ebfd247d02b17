//! The rate limit: a hundred mails per second for all processes together.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{Check, Quota, RateLimit};
use workbench::Database;

use crate::instance::{Instance, Process};

pub(crate) const ROLE: &str = "mailer";

const MAILERS: i64 = 12;
const BURST: i64 = 10;
const PER_SECOND: i64 = 100;

static MAILS: RateLimit = RateLimit::named(
    "mails",
    Quota::per_second(PER_SECOND as u32).burst(BURST as u32),
);

/// The work of each mailer: for three seconds it sends as fast as the limit allows, and prints the time of each mail.
pub(crate) fn send(mailer: &Instance) -> Result<(), Box<dyn Error>> {
    let pool = mailer.pool()?;
    let provider = MAILS.key("the provider");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        match provider.check(&pool)? {
            Check::Allowed(spent) => println!("{}", spent.at().timestamp_micros()),
            Check::Limited(limited) => thread::sleep(limited.retry_after),
        }
    }
    println!("done");
    Ok(())
}

/// The number of mails that may be sent within `span` microseconds.
const fn promised(span: i64) -> i64 {
    BURST + span * PER_SECOND / 1_000_000
}

pub(crate) fn twelve_mailers_share_a_hundred_per_second(
    database: &Database,
) -> Result<(), Box<dyn Error>> {
    println!("\n6. Twelve processes send mails to a provider that takes 100 per second");
    println!("\n  Each counts its own mails");
    let alone = MAILERS * promised(1_000_000);
    println!("    ✗ the provider may get {alone} mails in the first second");

    println!("\n  Each asks before it sends: MAILS.key(\"the provider\").check(&pool)?");
    println!("    · MAILS: RateLimit::named(\"mails\", Quota::per_second(100).burst(10))");
    let names = (1..=MAILERS).map(|number| format!("mailer-{number}"));
    let mut mailers = Process::start(ROLE, names, database, "")?;
    for mailer in &mut mailers {
        mailer.go_on()?;
    }
    let mut times = Vec::new();
    for mut mailer in mailers {
        loop {
            match mailer.read_line()?.as_str() {
                "done" => break,
                time => times.push(time.parse::<i64>()?),
            }
        }
        mailer.end()?;
    }
    times.sort_unstable();

    // By the database's clock, from the first mail on.
    for second in 0..3 {
        let sent = times
            .iter()
            .filter(|it| (**it - times[0]) / 1_000_000 == second);
        let sent = sent.count();
        println!(
            "    · second {}  {} {sent}",
            second + 1,
            "█".repeat(sent / 2)
        );
    }
    let mut spans = 0;
    for (first, start) in times.iter().enumerate() {
        for (more, end) in times[first..].iter().enumerate() {
            let (sent, most) = (more as i64 + 1, promised(end - start));
            assert!(sent <= most, "{sent} mails, and {most} were promised");
            spans += 1;
        }
    }
    println!("    ✓ in none of {spans} spans of time W more than 10 + W × 100 per second");
    let (all, most) = (
        times.len() as i64,
        promised(times[times.len() - 1] - times[0]),
    );
    assert!(all * 4 > most * 3, "only {all} of {most} mails passed");
    println!("    ✓ {all} mails passed of the {most} that were promised");
    Ok(())
}
