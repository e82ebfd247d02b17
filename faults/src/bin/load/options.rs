//! The command line.

use std::time::Duration;

use lexopt::Arg::Long;
use lexopt::{Parser, ValueExt};

pub(crate) const USAGE: &str = "\
usage: scripts/faults load [--seconds S] [--pool deadpool|bb8] [--tasks N] [--locks N] [--connections N] [--hold MS]

  --seconds S      how long the tasks want locks, at most 60; defaults to 60
  --pool P         the pool; defaults to both, one after the other
  --tasks N        defaults to 10000
  --locks N        defaults to 100
  --connections N  the size of the pool; defaults to 16
  --hold MS        how long a lock is held, on average; defaults to 1";

/// A kind of pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolKind {
    Deadpool,
    Bb8,
}

impl PoolKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Deadpool => "deadpool",
            Self::Bb8 => "bb8",
        }
    }
}

/// The settings of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) duration: Duration,
    pool: Option<PoolKind>,
    pub(crate) tasks: usize,
    pub(crate) locks: usize,
    pub(crate) connections: u32,
    pub(crate) hold: Duration,
}

impl Options {
    pub(crate) fn parse(mut parser: Parser) -> Result<Self, lexopt::Error> {
        let mut options = Self {
            duration: Duration::from_secs(60),
            pool: None,
            tasks: 10_000,
            locks: 100,
            connections: 16,
            hold: Duration::from_millis(1),
        };
        while let Some(argument) = parser.next()? {
            match argument {
                Long("seconds") => {
                    let seconds: u64 = parser.value()?.parse()?;
                    options.duration = Duration::from_secs(seconds.clamp(1, 60));
                }
                Long("pool") => {
                    let name = parser.value()?.string()?;
                    let known = [PoolKind::Deadpool, PoolKind::Bb8];
                    let kind = known.into_iter().find(|kind| kind.name() == name);
                    options.pool = Some(kind.ok_or("an unknown pool")?);
                }
                Long("tasks") => options.tasks = parser.value()?.parse::<usize>()?.max(1),
                Long("locks") => options.locks = parser.value()?.parse::<usize>()?.max(1),
                Long("connections") => options.connections = parser.value()?.parse::<u32>()?.max(1),
                Long("hold") => options.hold = Duration::from_millis(parser.value()?.parse()?),
                other => return Err(other.unexpected()),
            }
        }
        Ok(options)
    }

    pub(crate) fn pools(&self) -> Vec<PoolKind> {
        match self.pool {
            Some(kind) => vec![kind],
            None => vec![PoolKind::Deadpool, PoolKind::Bb8],
        }
    }
}
