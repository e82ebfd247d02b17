//! The roles of the processes that a campaign starts.

use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use crate::contention::{attempts, checks, holder};
use crate::worker;

/// A role and its settings. The Rust workers are this binary again; the Python workers read the same settings.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub(crate) enum Role {
    /// Uses every primitive while faults are injected.
    Application(worker::Settings),
    /// Holds slots of semaphores in competition with other processes.
    Holder(holder::Settings),
    /// Attempts a throttle in competition with other processes.
    Attempts(attempts::Settings),
    /// Checks a rate limit in competition with other processes.
    Checks(checks::Settings),
}

/// The first argument of a process that has a role. The second is the role.
pub(crate) const WORKER: &str = "worker";

impl Role {
    /// The arguments with which this binary takes the role.
    pub(crate) fn arguments(&self) -> [String; 2] {
        [WORKER.to_owned(), self.to_json()]
    }

    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a role is JSON")
    }

    /// Works until the campaign ends this process.
    pub(crate) fn run(json: &str) -> ExitCode {
        match serde_json::from_str(json) {
            Ok(Self::Application(settings)) => worker::run(settings),
            Ok(Self::Holder(settings)) => holder::run(&settings),
            Ok(Self::Attempts(settings)) => attempts::run(&settings),
            Ok(Self::Checks(settings)) => checks::run(&settings),
            Err(error) => {
                eprintln!(
                    "cannot start a worker: its settings are not readable: {error}; run scripts/faults"
                );
                ExitCode::from(2)
            }
        }
    }
}
