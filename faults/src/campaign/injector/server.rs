//! Servers that restart, crash, and are succeeded by their standby.

use workbench::StopMode;

use super::Means;
use crate::fault::{Fault, SERVERS};

pub(super) fn inject(means: Means<'_>) {
    means.scarcest_first(&SERVERS, |means, kind| {
        means.await_turn(950);
        let restart = match kind {
            Fault::FastRestart => Some(StopMode::Fast),
            Fault::ImmediateRestart => Some(StopMode::Immediate),
            _ => None,
        };
        if let Some(mode) = restart {
            means.ledger.outage(means.site.restart(mode));
        } else {
            let synchronous = kind == Fault::SynchronousFailover;
            let (outage, failover) = means.site.fail_over(synchronous, &mut means.random);
            means.ledger.outage(outage);
            means.ledger.failover(failover);
        }
        means.ledger.fault(kind, means.crew.numbers());
    });
}
