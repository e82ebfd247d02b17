//! Workers that die or freeze.

use super::Means;
use crate::fault::{Fault, PROCESSES};

pub(super) fn inject(means: Means<'_>) {
    means.scarcest_first(&PROCESSES, |means, kind| {
        let worker = means.any_worker();
        if kind == Fault::Freeze {
            means.crew.signal(worker, "STOP");
            // Longer than the timeouts of two of the semaphores.
            means.pause(800, 2500);
            means.crew.signal(worker, "CONT");
        } else {
            means.crew.replace(worker);
        }
        means.ledger.fault(kind, [worker]);
        means.pause(200, 700);
    });
}
