//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use crate::harness::Plan;
use crate::site::Transport;

pub(crate) struct Options {
    pub(crate) quick: bool,
    pub(crate) json: Option<PathBuf>,
    pub(crate) transport: Transport,
    /// Of the scenarios, those whose names begin like this; all if there is none.
    pub(crate) only: Vec<String>,
}

pub(crate) const USAGE: &str = "\
usage: scripts/bench [--quick] [--json FILE] [--socket] [SCENARIO ...]

  --quick      fewer and shorter rounds, and small tables: for a look, not for the record
  --json FILE  writes the figures there as well
  --socket     over Unix sockets; else over TCP on the loopback interface

Scenarios, all unless told: ";

impl Options {
    pub(crate) fn parse(
        arguments: impl Iterator<Item = String>,
        scenarios: &[&str],
    ) -> Result<Self, String> {
        let mut options = Self {
            quick: false,
            json: None,
            transport: Transport::Tcp,
            only: Vec::new(),
        };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--socket" => options.transport = Transport::Socket,
                "--json" => {
                    options.json = Some(arguments.next().ok_or("--json needs a file")?.into())
                }
                name if scenarios.contains(&name) => options.only.push(argument),
                other => return Err(format!("{other} is neither an option nor a scenario")),
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
