//! Workers that die or freeze.

use super::Injector;
use crate::fault::{Fault, PROCESSES};

pub(super) fn inject(injector: Injector<'_>) {
    injector.scarcest_first(&PROCESSES, |injector, kind| {
        let worker = injector.any_worker();
        if kind == Fault::Freeze {
            injector.workers.signal(worker, "STOP");
            // Longer than the timeouts of two of the semaphores.
            injector.pause(800, 2500);
            injector.workers.signal(worker, "CONT");
        } else {
            injector.workers.replace(worker);
        }
        injector.log.fault(kind, [worker]);
        injector.pause(200, 700);
    });
}
