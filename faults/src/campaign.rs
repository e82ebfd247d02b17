//! The campaign of faults: it starts servers and workers, injects faults, waits for recovery, and checks the promises.

mod cleanup;
mod event_log;
mod injector;
mod observer;
mod primary;
mod summary;
mod workers;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use self::cleanup::CleanupProcess;
use self::event_log::{EventLog, Events};
use self::primary::Primary;
use self::workers::Workers;
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
        "{} workers{}, {} seconds of faults, seed {}",
        options.workers,
        options.only.map_or(String::new(), |half| format!(
            " of the {} half",
            half.name()
        )),
        options.duration.as_secs(),
        options.seed
    );
    let mut random = Rng::with_seed(options.seed);
    let cleanup = Arc::new(CleanupProcess::start());
    let log = Arc::new(EventLog::default());
    let primary = Primary::start(cleanup.directory());
    observer::install(&primary).expect("the schema can be installed");
    let workers = Workers::start(&options, &primary, &cleanup, &log, random.fork());

    log.events().history.direct = workers.direct().collect();

    let done = AtomicBool::new(false);
    let looked = thread::scope(|scope| {
        let watching = scope.spawn(|| observer::watch(&primary, &log, &done));
        // Dropped also if the campaign itself panics.
        let over = Over(&done);
        injector::inject(&primary, &workers, &log, random.fork(), options.duration);
        await_progress(&workers, &log);
        rest(&workers, &log);
        drop(over);
        watching.join().unwrap_or_default()
    });
    for text in observer::at_rest(&primary)
        .into_iter()
        .chain(observer::missing_slots(&primary))
        .chain(observer::closed_throttles(&primary))
        .chain(observer::closed_rate_limits(&primary))
    {
        log.violation(format!("afterwards: {text}"));
    }
    let truth = observer::truth(&primary).expect("the server tells what it has recorded");
    workers.end_all();

    let events = log.events();
    let findings = check::examine(&events.history, &truth);
    println!("{}", summary::of(&events, &findings, looked));
    let violations = summary::violations(&events, &findings).len();
    let mut idle = what_was_not_tried(&workers, &events);
    let few = too_few(&workers, &events, options.duration);
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
fn await_progress(workers: &Workers, log: &EventLog) {
    let since = clock::now();
    let end = Instant::now() + RECOVERING;
    loop {
        let stuck: Vec<_> = workers
            .numbers()
            .flat_map(|worker| {
                workers
                    .primitives(worker)
                    .iter()
                    .map(move |what| (worker, what))
            })
            .filter(|(worker, what)| !log.events().has_succeeded(*worker, **what, since))
            .collect();
        if stuck.is_empty() {
            break;
        }
        if Instant::now() > end {
            for (worker, what) in stuck {
                log.violation(format!(
                    "afterwards: worker {worker} makes no progress with {}",
                    what.name()
                ));
            }
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    for worker in workers
        .numbers()
        .filter(|worker| !workers.is_alive(*worker))
    {
        log.violation(format!("afterwards: worker {worker} has ended"));
    }
}

/// Lets the workers rest, and checks that every pool gives all its connections.
fn rest(workers: &Workers, log: &EventLog) {
    workers.rest();
    let end = Instant::now() + RESTING;
    for worker in workers.numbers() {
        loop {
            let rested = log.events().rested(worker);
            match rested {
                Some((given, of)) if given == of => break,
                Some((given, of)) => {
                    log.violation(format!(
                        "afterwards: the pool of worker {worker} gives {given} of {of} connections"
                    ));
                    break;
                }
                None if Instant::now() > end => {
                    log.violation(format!("afterwards: worker {worker} does not rest"));
                    break;
                }
                None => {}
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The kinds of faults that were injected less often than a campaign of that length should.
fn too_few(workers: &Workers, events: &Events, duration: Duration) -> Vec<String> {
    let wanted = EACH * duration.as_secs() / STRONG.as_secs();
    let has_half = |half| workers.numbers().any(|worker| workers.half(worker) == half);
    Fault::all()
        .filter(|kind| kind.half().is_none_or(has_half))
        .map(|kind| (kind, events.faults.get(&kind).copied().unwrap_or(0)))
        .filter(|(_, number)| *number < wanted)
        .map(|(kind, number)| format!("{}, {number} times, and not {wanted}", kind.name()))
        .collect()
}

/// The primitives that were never used with success. A campaign that does nothing finds nothing.
fn what_was_not_tried(workers: &Workers, events: &Events) -> Vec<String> {
    let mut missing: Vec<String> = workers
        .numbers()
        .flat_map(|worker| {
            let half = workers.half(worker);
            workers
                .primitives(worker)
                .iter()
                .map(move |what| (half, *what))
        })
        .filter(|(half, what)| {
            let done = (*half, *what, Outcome::Done);
            !events.operations.contains_key(&done)
        })
        .map(|(half, what)| format!("{}, {}", what.name(), half.name()))
        .collect();
    missing.sort();
    missing.dedup();
    missing
}
