//! The campaign of faults: it starts servers and workers, injects faults, waits for recovery, and checks the promises.

mod crew;
mod injector;
mod keeper;
mod ledger;
mod observer;
mod site;
mod summary;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use self::crew::Crew;
use self::keeper::Keeper;
use self::ledger::{Book, Ledger};
use self::site::Site;
use crate::check;
use crate::clock;
use crate::fault::Fault;
use crate::options::Options;
use crate::record::Outcome;

/// From this length on, a campaign fails that injected any kind of fault fewer than `EACH` times.
const STRONG: Duration = Duration::from_secs(600);
const EACH: u64 = 100;

/// How long the recovery after the last fault may take.
const RECOVERING: Duration = Duration::from_secs(30);

/// How long workers may take to finish their operations and check their pools.
const RESTING: Duration = Duration::from_secs(60);

/// Runs a campaign, and fails if a promise was broken or a primitive was never used with success.
pub(crate) fn run(options: Options) -> ExitCode {
    println!(
        "{} workers, {} seconds of faults, seed {}",
        options.workers,
        options.duration.as_secs(),
        options.seed
    );
    let mut random = Rng::with_seed(options.seed);
    let keeper = Arc::new(Keeper::start());
    let ledger = Arc::new(Ledger::default());
    let site = Site::start(keeper.directory());
    observer::install(&site).expect("the schema can be installed");
    let crew = Crew::start(options.workers, &site, &keeper, &ledger, random.fork());

    ledger.book().history.direct = crew.direct().collect();

    let done = AtomicBool::new(false);
    let looked = thread::scope(|scope| {
        let watching = scope.spawn(|| observer::watch(&site, &ledger, &done));
        // Dropped also if the campaign itself panics.
        let over = Over(&done);
        injector::inject(&site, &crew, &ledger, random.fork(), options.duration);
        await_progress(&crew, &ledger);
        rest(&crew, &ledger);
        drop(over);
        watching.join().unwrap_or_default()
    });
    for text in observer::at_rest(&site)
        .into_iter()
        .chain(observer::missing_slots(&site))
        .chain(observer::closed_throttles(&site))
    {
        ledger.violation(format!("afterwards: {text}"));
    }
    let truth = observer::truth(&site).expect("the server tells what it has recorded");
    crew.dismiss();

    let book = ledger.book();
    let findings = check::examine(&book.history, &truth);
    println!("{}", summary::of(&book, &findings, looked));
    let violations = summary::violations(&book, &findings).len();
    let mut idle = what_was_not_tried(&crew, &book);
    let few = too_few(&book, options.duration);
    if options.duration >= STRONG {
        idle.extend(few);
    } else {
        for what in few {
            println!("few: {what}");
        }
    }
    for what in &idle {
        println!("not tried: {what}");
    }
    println!("the seed was {}", options.seed);
    if violations == 0 && idle.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Ends the observation when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until every worker is alive and has succeeded with all its primitives since the last fault.
fn await_progress(crew: &Crew, ledger: &Ledger) {
    let since = clock::now();
    let end = Instant::now() + RECOVERING;
    loop {
        let stuck: Vec<_> = crew
            .numbers()
            .flat_map(|worker| {
                crew.primitives(worker)
                    .iter()
                    .map(move |what| (worker, what))
            })
            .filter(|(worker, what)| !ledger.book().has_succeeded(*worker, **what, since))
            .collect();
        if stuck.is_empty() {
            break;
        }
        if Instant::now() > end {
            for (worker, what) in stuck {
                ledger.violation(format!(
                    "afterwards: worker {worker} makes no progress with {}",
                    what.name()
                ));
            }
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    for worker in crew.numbers().filter(|worker| !crew.is_alive(*worker)) {
        ledger.violation(format!("afterwards: worker {worker} has ended"));
    }
}

/// Lets the workers rest, and checks that every pool gives all its connections.
fn rest(crew: &Crew, ledger: &Ledger) {
    crew.rest();
    let end = Instant::now() + RESTING;
    for worker in crew.numbers() {
        loop {
            let rested = ledger.book().rested(worker);
            match rested {
                Some((given, of)) if given == of => break,
                Some((given, of)) => {
                    ledger.violation(format!(
                        "afterwards: the pool of worker {worker} gives {given} of {of} connections"
                    ));
                    break;
                }
                None if Instant::now() > end => {
                    ledger.violation(format!("afterwards: worker {worker} does not rest"));
                    break;
                }
                None => {}
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The kinds of faults that were injected less often than a campaign of that length should.
fn too_few(book: &Book, duration: Duration) -> Vec<String> {
    let wanted = EACH * duration.as_secs() / STRONG.as_secs();
    Fault::all()
        .map(|kind| (kind, book.faults.get(&kind).copied().unwrap_or(0)))
        .filter(|(_, number)| *number < wanted)
        .map(|(kind, number)| format!("{}, {number} times, and not {wanted}", kind.name()))
        .collect()
}

/// The primitives that were never used with success. A campaign that does nothing finds nothing.
fn what_was_not_tried(crew: &Crew, book: &Book) -> Vec<String> {
    let mut missing: Vec<String> = crew
        .numbers()
        .flat_map(|worker| crew.primitives(worker))
        .filter(|what| !book.operations.contains_key(&(**what, Outcome::Done)))
        .map(|what| what.name().to_owned())
        .collect();
    missing.sort();
    missing.dedup();
    missing
}
