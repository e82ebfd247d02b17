//! Servers that restart, crash, and are succeeded by their standby.

use workbench::StopMode;

use super::Means;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Restart(StopMode),
    FailOver { synchronous: bool },
}

const KINDS: [Kind; 4] = [
    Kind::Restart(StopMode::Fast),
    Kind::Restart(StopMode::Immediate),
    Kind::FailOver { synchronous: false },
    Kind::FailOver { synchronous: true },
];

pub(super) fn inject(means: Means<'_>) {
    means.rounds(&KINDS, |means, kind| {
        means.pause(100, 500);
        let name = match kind {
            Kind::Restart(StopMode::Fast) => "fast restart",
            Kind::Restart(StopMode::Immediate) => "immediate restart",
            Kind::FailOver { synchronous: false } => "asynchronous failover",
            Kind::FailOver { synchronous: true } => "synchronous failover",
        };
        match kind {
            Kind::Restart(mode) => means.ledger.outage(means.site.restart(mode)),
            Kind::FailOver { synchronous } => {
                let (outage, failover) = means.site.fail_over(synchronous, &mut means.random);
                means.ledger.outage(outage);
                means.ledger.failover(failover);
            }
        }
        means.ledger.fault(name, means.crew.numbers());
    });
}
