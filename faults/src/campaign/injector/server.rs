//! Servers that restart, crash, fail over to their standby, and reload their settings.

use workbench::StopMode;

use super::Injector;
use crate::chance::Chance;
use crate::fault::{Fault, SERVERS};

pub(super) fn inject(injector: Injector<'_>) {
    injector.scarcest_first(&SERVERS, |injector, kind| {
        injector.await_turn(750);
        let setting = match kind {
            // Shorter than the time that some locks are held without a statement, and in force for longer than the judge
            // allows it to reach a session.
            Fault::ReloadedIdleTimeout => Some(("idle_session_timeout", "250ms", 1500..2500)),
            Fault::ReloadedLockTimeout => Some(("lock_timeout", "40ms", 300..600)),
            _ => None,
        };
        if let Some((setting, value, period)) = setting {
            let period = injector.random.millis(period.start, period.end);
            if let Some(reload) = injector.primary.reload(setting, value, period) {
                injector.log.reload(reload);
                injector.log.fault(kind, injector.workers.numbers());
            }
            return;
        }
        let restart = match kind {
            Fault::FastRestart => Some(StopMode::Fast),
            Fault::ImmediateRestart => Some(StopMode::Immediate),
            _ => None,
        };
        if let Some(mode) = restart {
            injector.log.outage(injector.primary.restart(mode));
        } else {
            let synchronous = kind == Fault::SynchronousFailover;
            let (outage, failover) = injector
                .primary
                .fail_over(synchronous, &mut injector.random);
            injector.log.outage(outage);
            injector.log.failover(failover);
        }
        injector.log.fault(kind, injector.workers.numbers());
    });
}
