//! The command line.

use std::time::Duration;

use lexopt::Arg::{Long, Value};
use lexopt::{Parser, ValueExt};

use crate::half::Half;

pub(crate) const USAGE: &str = "\
usage: scripts/faults [faults] [--seconds S] [--seed N] [--workers W] [--only HALF]
       scripts/faults contention [--seconds S]

faults (the default) injects faults into processes that use every primitive:
  --seconds S  how long to inject faults; defaults to 60. From 600 seconds on, the campaign fails if any kind of fault
               was injected fewer than 100 times; a shorter campaign reports such kinds, in proportion
  --seed N     the seed of the random choices; defaults to a random seed, which is printed
  --workers W  how many processes work at a time, at least 8, or 4 of one half; defaults to 8
  --only HALF  the half of the crate that they use, blocking or asynchronous; by default half of them use either

contention claims slots, attempts throttles and checks rate limits from many Rust and Python processes, some of which it kills:
  --seconds S  how long the first and longest of its six parts takes; defaults to 60. The six parts together take
               about twice as long";

/// The kind of campaign to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Faults(Options),
    Contention(Duration),
}

/// The settings of a campaign of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) duration: Duration,
    pub(crate) seed: u64,
    pub(crate) workers: usize,
    /// The only half that the workers use. `None` for both.
    pub(crate) only: Option<Half>,
}

/// Parses the arguments of the program.
pub(crate) fn parse(mut parser: Parser) -> Result<Kind, lexopt::Error> {
    let mut contention = false;
    let mut options = Options {
        duration: Duration::from_secs(60),
        seed: fastrand::u64(..1_000_000),
        workers: 8,
        only: None,
    };
    let mut is_first = true;
    while let Some(argument) = parser.next()? {
        match argument {
            Value(kind) if is_first && kind == "faults" => {}
            Value(kind) if is_first && kind == "contention" => contention = true,
            Long("seconds") => {
                let seconds: u64 = parser.value()?.parse()?;
                options.duration = Duration::from_secs(seconds.clamp(1, 86_400));
            }
            Long("seed") if !contention => options.seed = parser.value()?.parse()?,
            Long("workers") if !contention => {
                let workers: usize = parser.value()?.parse()?;
                options.workers = workers.min(100);
            }
            Long("only") if !contention => {
                let name = parser.value()?.string()?;
                let half = Half::ALL.into_iter().find(|half| half.name() == name);
                options.only = Some(half.ok_or(format!("no half is called {name:?}"))?);
            }
            other => return Err(other.unexpected()),
        }
        is_first = false;
    }
    // Each half is there with every route to the server.
    let routes = if options.only.is_some() { 4 } else { 8 };
    options.workers = options.workers.max(routes);
    Ok(if contention {
        Kind::Contention(options.duration)
    } else {
        Kind::Faults(options)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Kind, lexopt::Error> {
        parse(Parser::from_args(arguments))
    }

    #[test]
    fn faults_are_the_default_kind() {
        let expected = Kind::Faults(Options {
            duration: Duration::from_secs(20),
            seed: 1,
            workers: 8,
            only: None,
        });
        let options = ["--seconds", "20", "--seed=1", "--workers", "2"];
        assert_eq!(parsed(&options).unwrap(), expected);
        assert_eq!(
            parsed(&[&["faults"], &options[..]].concat()).unwrap(),
            expected
        );
    }

    #[test]
    fn one_half_needs_fewer_workers() {
        let arguments = ["--only", "asynchronous", "--workers", "2"];
        let Kind::Faults(options) = parsed(&arguments).unwrap() else {
            panic!("these are options of a campaign of faults");
        };
        assert_eq!(options.only, Some(Half::Asynchronous));
        assert_eq!(options.workers, 4);
        assert!(parsed(&["--only", "both"]).is_err());
    }

    #[test]
    fn contention_takes_a_duration_alone() {
        let expected = Kind::Contention(Duration::from_secs(15));
        assert_eq!(
            parsed(&["contention", "--seconds", "15"]).unwrap(),
            expected
        );
        assert!(parsed(&["contention", "--seed", "1"]).is_err());
    }

    #[test]
    fn unknown_arguments_are_errors() {
        for arguments in [
            &["--second", "1"][..],
            &["--seconds"],
            &["--seconds", "x"],
            &["all"],
        ] {
            assert!(parsed(arguments).is_err(), "{arguments:?}");
        }
    }
}
