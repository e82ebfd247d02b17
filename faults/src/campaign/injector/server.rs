//! Servers that restart, crash, fail over to their standby, and reload their settings.

use workbench::StopMode;

use super::Means;
use crate::chance::Chance;
use crate::fault::{Fault, SERVERS};

pub(super) fn inject(means: Means<'_>) {
    means.scarcest_first(&SERVERS, |means, kind| {
        means.await_turn(750);
        let setting = match kind {
            // Shorter than the time that some locks are held without a statement.
            Fault::ReloadedIdleTimeout => Some(("idle_session_timeout", "250ms")),
            Fault::ReloadedLockTimeout => Some(("lock_timeout", "40ms")),
            _ => None,
        };
        if let Some((setting, value)) = setting {
            let period = means.random.millis(300, 600);
            if let Some(reload) = means.site.reload(setting, value, period) {
                means.ledger.reload(reload);
                means.ledger.fault(kind, means.crew.numbers());
            }
            return;
        }
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
