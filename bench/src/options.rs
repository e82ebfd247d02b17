//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use lexopt::Arg::{Long, Value};
use lexopt::{Parser, ValueExt};

use crate::harness::Plan;
use crate::server::Transport;

pub(crate) struct Options {
    pub(crate) quick: bool,
    pub(crate) json: Option<PathBuf>,
    pub(crate) transport: Transport,
    /// The names of the scenarios to run; empty for all.
    pub(crate) only: Vec<String>,
}

pub(crate) const USAGE: &str = "\
usage: scripts/bench [--quick] [--json FILE] [--socket] [SCENARIO ...]

  --quick      fewer and shorter rounds, and small tables; the figures are not good enough to publish
  --json FILE  writes the figures to this file as well
  --socket     connects over Unix sockets; defaults to TCP on the loopback interface

Scenarios; defaults to all: ";

impl Options {
    pub(crate) fn parse(mut parser: Parser, scenarios: &[&str]) -> Result<Self, lexopt::Error> {
        let mut options = Self {
            quick: false,
            json: None,
            transport: Transport::Tcp,
            only: Vec::new(),
        };
        while let Some(argument) = parser.next()? {
            match argument {
                Long("quick") => options.quick = true,
                Long("socket") => options.transport = Transport::Socket,
                Long("json") => options.json = Some(parser.value()?.into()),
                Value(name) if scenarios.iter().any(|scenario| name == *scenario) => {
                    options.only.push(name.string()?);
                }
                other => return Err(other.unexpected()),
            }
        }
        Ok(options)
    }

    pub(crate) fn wants(&self, scenario: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == scenario)
    }

    /// How long contenders take turns.
    pub(crate) fn plan(&self) -> Plan {
        if self.quick {
            Plan {
                rounds: 5,
                slice: Duration::from_millis(80),
                warm_up: Duration::from_millis(50),
            }
        } else {
            Plan {
                rounds: 21,
                slice: Duration::from_millis(250),
                warm_up: Duration::from_millis(300),
            }
        }
    }

    /// The same time in more and shorter turns, for those whose processes the scheduler spreads over the cores anew for each.
    pub(crate) fn plan_of_short_turns(&self) -> Plan {
        let plan = self.plan();
        Plan {
            rounds: plan.rounds * 2 + 1,
            slice: plan.slice / 2,
            ..plan
        }
    }

    /// The same time in fewer and longer turns, for those who cannot make theirs short.
    pub(crate) fn plan_of_long_turns(&self) -> Plan {
        let plan = self.plan();
        Plan {
            rounds: plan.rounds / 2 + 1,
            slice: plan.slice * 2,
            ..plan
        }
    }
}
