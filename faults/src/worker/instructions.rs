//! What the campaign tells a running worker.

use std::collections::BTreeSet;
use std::io::BufRead;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::report::{report, violation};
use crate::fault::Fault;
use crate::record::Record;

/// An instruction, which is one line of JSON.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Instruction {
    /// Finish the current operations and start no other.
    Rest,
    /// Inflict this fault on itself at the next opportunity.
    Inflict(Fault),
}

/// Whether no new operation is to be started.
static RESTING: AtomicBool = AtomicBool::new(false);

pub(super) fn is_resting() -> bool {
    RESTING.load(Ordering::Relaxed)
}

/// The faults that this worker is to inflict on itself at the next opportunity.
static DUE_FAULTS: Mutex<BTreeSet<Fault>> = Mutex::new(BTreeSet::new());

fn due_faults() -> MutexGuard<'static, BTreeSet<Fault>> {
    DUE_FAULTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether this fault is due now.
pub(super) fn is_due(kind: Fault) -> bool {
    due_faults().contains(&kind)
}

/// Returns whether this fault is due now, once. The caller reports it.
pub(super) fn is_due_once(kind: Fault) -> bool {
    due_faults().remove(&kind)
}

/// Returns whether this fault is due now, once, and reports it then.
pub(super) fn inflicts(kind: Fault) -> bool {
    let inflicts = is_due_once(kind);
    if inflicts {
        report(&Record::Fault { kind });
    }
    inflicts
}

/// Follows the instructions. At their end the campaign has ended, or no longer needs this worker.
pub(super) fn follow() {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Instruction::Rest) => RESTING.store(true, Ordering::Relaxed),
            Ok(Instruction::Inflict(fault)) => _ = due_faults().insert(fault),
            Err(error) => violation(format!(
                "the campaign sent an unknown instruction: {error}: {line}"
            )),
        }
    }
    std::process::exit(0);
}
