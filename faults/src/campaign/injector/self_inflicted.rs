//! Faults that workers inflict on themselves at the next opportunity.

use super::Injector;
use crate::chance::Chance;
use crate::fault::SELF_INFLICTED;

pub(super) fn inject(injector: Injector<'_>) {
    injector.scarcest_first(&SELF_INFLICTED, |injector, scarcest| {
        // A worker may rarely have an opportunity for the scarcest kind, so other kinds are injected meanwhile.
        let any = injector.random.choice(&SELF_INFLICTED).copied();
        let kind = any
            .filter(|_| injector.random.one_in(2))
            .unwrap_or(scarcest);
        let able = injector.workers.able_to_inflict(kind);
        if let Some(worker) = injector.random.choice(&able) {
            injector.workers.inflict(*worker, kind);
        }
        injector.pause(40, 120);
    });
}
