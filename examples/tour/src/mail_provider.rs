//! The rate limit: so many per second for all processes together, and what passes is what was promised.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{Check, Quota, RateLimit};
use workbench::Database;

use crate::instance::{Instance, Process, READY};
use crate::screen::{bad, bar, good, note, say, title};

pub(crate) const ROLE: &str = "mailer";

const MAILERS: usize = 12;

const QUOTA: Quota = Quota::per_second(100).burst(10);

static MAILS: RateLimit = RateLimit::named("mails", QUOTA);

/// How long the mailers send, each with a counter of its own and then with one limit for all.
const ALONE: Duration = Duration::from_secs(1);
const TOGETHER: Duration = Duration::from_secs(3);

/// What a mailer says after the times of its mails.
const DONE: &str = "done";

/// What each mailer does: it sends as fast as its own counter allows, then as fast as the limit of all does.
pub(crate) fn send(mailer: &Instance) -> Result<(), Box<dyn Error>> {
    let pool = mailer.pool()?;
    mailer.say(READY)?;
    mailer.wait()?;
    mailer.say(&sent_alone().to_string())?;
    mailer.wait()?;

    let provider = MAILS.key("the provider");
    let start = Instant::now();
    while start.elapsed() < TOGETHER {
        match provider.check(&pool)? {
            Check::Allowed(spent) => mailer.say(&spent.at().timestamp_micros().to_string())?,
            Check::Limited(limited) => thread::sleep(limited.retry_after),
        }
    }
    Ok(mailer.say(DONE)?)
}

/// Counts in the process, and returns how many mails that lets pass.
fn sent_alone() -> u64 {
    let Quota { n, burst, .. } = QUOTA;
    let start = Instant::now();
    let mut sent = 0;
    loop {
        let elapsed = start.elapsed();
        if elapsed >= ALONE {
            return sent;
        }
        if sent < u64::from(burst) + elapsed.as_millis() as u64 * u64::from(n) / 1000 {
            sent += 1;
        } else {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

pub(crate) fn twelve_mailers_share_a_hundred_per_second(
    database: &Database,
) -> Result<(), Box<dyn Error>> {
    title("6. Twelve processes send mails to a provider that takes 100 per second");
    let mut mailers = Vec::new();
    for number in 1..=MAILERS {
        let name = format!("mailer-{number}");
        mailers.push(Process::launch(ROLE, &name, database, &[])?);
    }
    for mailer in &mut mailers {
        mailer.expect(READY);
    }

    say("Each counts its own mails, for a second");
    for mailer in &mut mailers {
        mailer.go_on()?;
    }
    let mut alone = 0;
    for mailer in &mut mailers {
        alone += mailer.said()?.parse::<i64>()?;
    }
    assert!(
        alone > promised(1_000_000),
        "{alone} are too few to show it"
    );
    bad(format!("the provider gets {alone} mails in that second"));

    say("Each asks before it sends: MAILS.key(\"the provider\").check(&pool)?");
    note("MAILS: RateLimit::named(\"mails\", Quota::per_second(100).burst(10))");
    for mailer in &mut mailers {
        mailer.go_on()?;
    }
    let mut times = Vec::new();
    for mailer in &mut mailers {
        loop {
            match mailer.said()?.as_str() {
                DONE => break,
                time => times.push(time.parse::<i64>()?),
            }
        }
    }
    for mailer in mailers {
        mailer.end()?;
    }
    times.sort_unstable();
    draw(&times);
    assert_kept(&times);
    Ok(())
}

/// Draws a bar for each second by the database's clock, from the first mail on.
fn draw(times: &[i64]) {
    for second in 0..TOGETHER.as_secs() as i64 {
        let is_in_it = |time: &&i64| (**time - times[0]) / 1_000_000 == second;
        let sent = times.iter().filter(is_in_it).count();
        bar(format!("second {}", second + 1), sent);
    }
}

/// Returns how many mails may pass in a time of so many microseconds.
fn promised(span: i64) -> i64 {
    let Quota { n, burst, .. } = QUOTA;
    i64::from(burst) + span * i64::from(n) / 1_000_000
}

/// Compares every span of time between two mails with the promise.
fn assert_kept(times: &[i64]) {
    let mut spans = 0;
    for (first, start) in times.iter().enumerate() {
        for (last, end) in times.iter().enumerate().skip(first) {
            let (sent, span) = ((last - first + 1) as i64, end - start);
            let most = promised(span);
            assert!(
                sent <= most,
                "{sent} mails in {span} us, and {most} were promised"
            );
            spans += 1;
        }
    }
    good(format!(
        "in none of {spans} spans of time W more than 10 + W × 100 per second"
    ));

    let all = times.len() as i64;
    let most = promised(times[times.len() - 1] - times[0]);
    assert!(all * 4 > most * 3, "only {all} of {most} mails passed");
    good(format!(
        "{all} mails passed of the {most} that were promised"
    ));
}
