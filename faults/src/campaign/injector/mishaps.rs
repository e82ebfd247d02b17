//! Faults that workers inflict on themselves at the next opportunity.

use super::Means;
use crate::chance::Chance;
use crate::fault::MISHAPS;

pub(super) fn inject(means: Means<'_>) {
    means.scarcest_first(&MISHAPS, |means, scarcest| {
        // A worker may rarely have an opportunity for the scarcest kind, so other kinds are injected meanwhile.
        let any = means.random.choice(&MISHAPS).copied();
        let kind = any.filter(|_| means.random.one_in(2)).unwrap_or(scarcest);
        let able = means.crew.able(kind);
        if let Some(worker) = means.random.choice(&able) {
            means.crew.wish(*worker, kind);
        }
        means.pause(40, 120);
    });
}
