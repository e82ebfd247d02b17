//! The command line.

use std::time::Duration;

pub(crate) const USAGE: &str = "usage: scripts/faults [--seconds S] [--seed N] [--workers W]

  --seconds S  how long to inject faults; 60 unless told. From 600 on, the campaign fails if there were fewer than 100 of
               any kind of fault; a shorter one says so, in proportion
  --seed N     what the random choices begin with; drawn and printed unless told
  --workers W  how many processes work at a time, 4 at least; 8 unless told";

/// What a campaign was told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) duration: Duration,
    pub(crate) seed: u64,
    pub(crate) workers: usize,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut options = Self {
            duration: Duration::from_secs(60),
            seed: crate::clock::now() as u64 % 1_000_000,
            workers: 8,
        };
        let mut arguments = arguments.iter();
        while let Some(name) = arguments.next() {
            let mut number = || -> Result<u64, String> {
                let value = arguments.next().ok_or(format!("{name} needs a number"))?;
                value
                    .parse()
                    .map_err(|_| format!("{name} needs a number, not {value}"))
            };
            match name.as_str() {
                "--seconds" => options.duration = Duration::from_secs(number()?.clamp(1, 86_400)),
                "--seed" => options.seed = number()?,
                "--workers" => options.workers = number()?.clamp(4, 100) as usize,
                _ => return Err(format!("what is {name}?")),
            }
        }
        Ok(options)
    }
}
