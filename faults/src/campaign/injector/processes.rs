//! Workers that die or freeze.

use super::Means;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Kill,
    Freeze,
}

pub(super) fn inject(means: Means<'_>) {
    means.rounds(&[Kind::Kill, Kind::Freeze], |means, kind| {
        let worker = means.any_worker();
        match kind {
            Kind::Kill => {
                means.crew.replace(worker);
                means.ledger.fault("kill -9 of a worker", [worker]);
            }
            Kind::Freeze => {
                means.crew.signal(worker, "STOP");
                // Longer than the time-outs of two of the semaphores.
                means.pause(800, 2500);
                means.crew.signal(worker, "CONT");
                means.ledger.fault("frozen worker", [worker]);
            }
        }
        means.pause(300, 900);
    });
}
